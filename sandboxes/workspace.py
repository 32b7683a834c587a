"""A sandbox's workspace on disk: what it is made of, and reading and writing it from the host.

`OverlayWorkspace` is lower folders from the layer cache and one private upper folder, which is all
that code can change; `PlainWorkspace` is an ordinary folder. Both are touched from the host only
while no process of the sandbox lives, so nothing moves underneath; links are never followed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from k3rl.errors import SandboxError, UserInputError
from k3rl.sandboxes.cache import LayerCache
from k3rl.sandboxes.layers import (
    EMPTY_TREE,
    Entry,
    EntryType,
    Layer,
    Tree,
    difference,
    merge,
    split_path,
)
from k3rl.sandboxes.trees import (
    FOLDER_FLAGS,
    OPAQUE_XATTR,
    Identity,
    extract,
    file_writer,
    read_below,
    remove_tree,
    scan,
    write_all,
)
from k3rl.types import Digest, digest_bytes

MOUNT_POINT = "/workspace"
CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW

Content = Callable[[Entry], bytes]


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers, bottom first, and the tree they add up to."""

    layers: tuple[Layer, ...] = ()
    tree: Tree = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """The tree of no layers is an empty folder."""
        if self.tree is None:
            object.__setattr__(self, "tree", EMPTY_TREE)

    def push(self, layer: Layer) -> Stack:
        """The stack with `layer` on top."""
        return Stack((*self.layers, layer), merge(self.tree, layer))


class Workspace(Protocol):
    """What a backend needs of a workspace; every call blocks on the disk."""

    stack: Stack

    def tree(self) -> Tree:
        """The present merged tree, with content digests."""
        ...

    def change(self) -> Layer | None:
        """What changed since the last seal; None when nothing did."""
        ...

    def is_untouched(self) -> bool:
        """Whether nothing changed since the last seal, if that can be seen without reading.

        The one call that is quick enough for an event loop. False says nothing.
        """
        ...

    def seal(self, layer: Layer) -> None:
        """Put `layer`, just returned by `change`, on the stack."""
        ...

    def read_large(self, entry: Entry) -> bytes:
        """The bytes of a large file of the present tree or of a sealed layer."""
        ...

    def read(self, path: str, max_bytes: int) -> bytes:
        """A regular file's content. Raises UserInputError for anything else."""
        ...

    def write(self, path: str, data: bytes, mode: int) -> None:
        """Write a regular file and the folders above it. Raises UserInputError."""
        ...

    def copy(self, folder: Path) -> Workspace:
        """A second workspace at `folder` with the sealed tree."""
        ...

    def remove(self) -> None:
        """Delete it."""
        ...


def inner_path(path: str) -> str:
    """A caller's path relative to the workspace. Raises UserInputError when it leads outside."""
    if path.startswith(MOUNT_POINT + "/"):
        path = path[len(MOUNT_POINT) + 1 :]
    return "/".join(split_path(path))


def _only_touched(entries: list[Entry], tree: Tree) -> bool:
    """Whether nothing differs but the workspace folder's own time stamp."""
    return all(not e.path and e.mode == tree[""].mode and not e.is_opaque for e in entries)


def _file_of(tree: Tree, path: str, max_bytes: int) -> Entry:
    entry = tree.get(path)
    if entry is None:
        raise UserInputError(f"{path!r}: no such file in the workspace")
    if entry.type is not EntryType.FILE:
        raise UserInputError(f"{path!r}: not a regular file but a {entry.type}")
    if entry.size > max_bytes:
        raise UserInputError(f"{path!r}: {entry.size} bytes are more than {max_bytes}")
    return entry


def _check_target(tree: Tree, path: str) -> None:
    parts = path.split("/")
    for depth in range(1, len(parts)):
        above = tree.get("/".join(parts[:depth]))
        if above is not None and above.type is not EntryType.DIR:
            raise UserInputError(f"{path!r}: {above.path!r} is not a folder but a {above.type}")
    entry = tree.get(path)
    if entry is not None and entry.type is not EntryType.FILE:
        raise UserInputError(f"{path!r}: not a regular file but a {entry.type}")


def _write_at(folder: int, name: str, data: bytes, mode: int, owner: Identity | None) -> None:
    handle = os.open(name, CREATE_FLAGS, 0o600, dir_fd=folder)
    try:
        write_all(handle, data)
        if owner is not None:
            os.fchown(handle, owner.uid, owner.gid)
        os.fchmod(handle, mode & 0o777)
    finally:
        os.close(handle)


def _descend(folder: int, name: str, below: Entry | None, owner: Identity | None) -> int:
    """Open a subfolder of an upper (or plain) folder, making it as overlayfs would.

    `below` is what the lower layers show at its path. A folder made over a whiteout is opaque.
    """
    is_whiteout = False
    try:
        status = os.lstat(name, dir_fd=folder)
    except FileNotFoundError:
        pass
    else:
        if stat.S_ISDIR(status.st_mode):
            return os.open(name, FOLDER_FLAGS, dir_fd=folder)
        is_whiteout = True  # _check_target let nothing else through
        os.unlink(name, dir_fd=folder)
    os.mkdir(name, 0o700, dir_fd=folder)
    handle = os.open(name, FOLDER_FLAGS, dir_fd=folder)
    if is_whiteout:
        os.setxattr(handle, OPAQUE_XATTR, b"y")
    if owner is not None:
        os.fchown(handle, owner.uid, owner.gid)
    is_merged = below is not None and below.type is EntryType.DIR and not is_whiteout
    os.fchmod(handle, below.mode if below is not None and is_merged else 0o755)
    return handle


def _write_below(
    folder: Path, path: str, data: bytes, mode: int, tree: Tree, owner: Identity | None
) -> None:
    handle = os.open(folder, FOLDER_FLAGS)
    try:
        parts = path.split("/")
        for depth, part in enumerate(parts[:-1], 1):
            deeper = _descend(handle, part, tree.get("/".join(parts[:depth])), owner)
            os.close(handle)
            handle = deeper
        with suppress(FileNotFoundError):
            os.unlink(parts[-1], dir_fd=handle)  # a regular file or a whiteout
        _write_at(handle, parts[-1], data, mode, owner)
    finally:
        os.close(handle)


class OverlayWorkspace:
    """Lower folders, bottom first, in `lowers`; `upper` and `work` for one mount at a time."""

    def __init__(self, cache: LayerCache, folder: Path, stack: Stack, content: Content) -> None:
        """Makes `folder` and takes the stack's items from the cache, extracting what is missing."""
        self.cache, self.folder = cache, folder
        self.stack = Stack()
        self._names: list[str] = []
        folder.mkdir(mode=0o755)
        self._empty = folder / "empty"
        self._empty.mkdir()
        try:
            for layer in stack.layers:
                self._push(layer, cache.layer(layer, content))
        except BaseException:
            self.remove()
            raise
        self._renew()

    @property
    def upper(self) -> Path:
        """The only folder that code in the sandbox changes."""
        return self.folder / "upper"

    @property
    def work(self) -> Path:
        """What overlayfs needs beside it."""
        return self.folder / "work"

    @property
    def lowers(self) -> list[Path]:
        """Read-only folders of the mount, bottom first, at least one."""
        return [self._empty, *(self.cache.path(name) for name in self._names)]

    def tree(self) -> Tree:
        """The present merged tree."""
        layer = self.change()
        return merge(self.stack.tree, layer) if layer else self.stack.tree

    def change(self) -> Layer | None:
        """What the upper folder holds beyond the stack."""
        inline: dict[Digest, bytes] = {}
        entries = scan(self.upper, inline)
        known = self.stack.tree
        if _only_touched([e for e in entries if known.get(e.path) != e], known):
            return None
        return Layer.of(entries, inline)

    def is_untouched(self) -> bool:
        """Whether the upper folder is as it was made."""
        with suppress(OSError):
            return not os.listdir(self.upper) and self.change() is None
        return False

    def seal(self, layer: Layer) -> None:
        """Turn the upper folder into the topmost lower one."""
        self._push(layer, self.cache.adopt(layer, self.upper))
        self._renew()

    def read_large(self, entry: Entry) -> bytes:
        """A large file of the upper folder or the topmost layer that has this version of it."""
        for folder in [self.upper, *reversed(self.lowers)]:
            data = read_below(folder, entry.path, entry.size)
            if data is not None and digest_bytes(data) == entry.digest:
                return data
        raise SandboxError(f"{self.folder}: lost the large file {entry.path!r}")

    def read(self, path: str, max_bytes: int) -> bytes:
        """A regular file of the merged view."""
        inside = inner_path(path)
        upper = self._upper_entries()
        entry = _file_of(merge(self.stack.tree, upper), inside, max_bytes)
        is_upper = any(e.path == inside for e in upper.entries)
        for folder in [self.upper] if is_upper else reversed(self.lowers):
            data = read_below(folder, inside, entry.size)
            if data is not None:
                return data
        raise SandboxError(f"{self.folder}: lost the file {inside!r}")

    def write(self, path: str, data: bytes, mode: int) -> None:
        """Write into the upper folder."""
        inside = inner_path(path)
        tree = merge(self.stack.tree, self._upper_entries())
        _check_target(tree, inside)
        _write_below(self.upper, inside, data, mode, tree, self.cache.identity)

    def copy(self, folder: Path) -> OverlayWorkspace:
        """Shares the lower folders; only small empty folders are made."""
        twin = OverlayWorkspace(self.cache, folder, Stack(), _no_content)
        self.cache.share(self._names)
        twin._names, twin.stack = list(self._names), self.stack
        twin._renew()
        return twin

    def remove(self) -> None:
        """Delete the private folders and give the items back."""
        remove_tree(self.folder)
        self.cache.release(self._names)
        self._names = []

    def _upper_entries(self) -> Layer:
        return Layer("", tuple(scan(self.upper, None)), {})

    def _push(self, layer: Layer, name: str) -> None:
        self.stack = self.stack.push(layer)
        self._names.append(name)
        if len(self._names) > self.cache.max_lowers:
            ids = [layer.id for layer in self.stack.layers]
            flat = self.cache.flat(ids, self.stack.tree, self.lowers)
            self.cache.release(self._names)
            self._names = [flat]

    def _renew(self) -> None:
        """Fresh upper and work folders; the upper's root carries the merged root's attributes."""
        owner, root = self.cache.identity, self.stack.tree[""]
        for path in (self.upper, self.work):
            remove_tree(path)
            path.mkdir()
            if owner is not None:
                os.chown(path, owner.uid, owner.gid)
        self.upper.chmod(root.mode)
        os.utime(self.upper, ns=(root.mtime_ns, root.mtime_ns))


def _no_content(entry: Entry) -> bytes:
    raise SandboxError(f"{entry.path!r}: there is no content to extract")


class PlainWorkspace:
    """An ordinary folder, `files`, for backends that cannot mount."""

    def __init__(self, folder: Path, stack: Stack, content: Content) -> None:
        """Makes `folder` and writes the stack's tree into it."""
        self.folder, self.stack = folder, stack
        folder.mkdir(mode=0o700)
        extract(stack.tree.values(), self.files, file_writer(content, None), None)

    @property
    def files(self) -> Path:
        """The workspace folder itself."""
        return self.folder / "files"

    def tree(self) -> Tree:
        """The present tree."""
        return {entry.path: entry for entry in scan(self.files, {})}

    def change(self) -> Layer | None:
        """The difference to the stack, found by reading everything."""
        inline: dict[Digest, bytes] = {}
        tree = {entry.path: entry for entry in scan(self.files, inline)}
        entries = difference(self.stack.tree, tree)
        if _only_touched(entries, self.stack.tree):
            return None
        return Layer.of(entries, inline)

    def is_untouched(self) -> bool:
        """Never known without reading."""
        return False

    def seal(self, layer: Layer) -> None:
        """Remember the change as a layer."""
        self.stack = self.stack.push(layer)

    def read_large(self, entry: Entry) -> bytes:
        """A large file."""
        return self._file(entry)

    def read(self, path: str, max_bytes: int) -> bytes:
        """A regular file."""
        inside = inner_path(path)
        return self._file(_file_of(self._now(), inside, max_bytes))

    def write(self, path: str, data: bytes, mode: int) -> None:
        """Write a regular file."""
        inside, tree = inner_path(path), self._now()
        _check_target(tree, inside)
        _write_below(self.files, inside, data, mode, tree, None)

    def copy(self, folder: Path) -> PlainWorkspace:
        """A full copy."""
        return PlainWorkspace(folder, self.stack, self._file)

    def remove(self) -> None:
        """Delete it."""
        remove_tree(self.folder)

    def _file(self, entry: Entry) -> bytes:
        data = read_below(self.files, entry.path, entry.size)
        if data is None:
            raise SandboxError(f"{self.folder}: lost the file {entry.path!r}")
        return data

    def _now(self) -> Tree:
        return {entry.path: entry for entry in scan(self.files, None)}
