"""A sandbox's workspace on disk: what it is made of, and reading and writing it from the host.

`OverlayWorkspace` (in `overlay`) is lower folders from the layer cache and one private upper
folder, which is all that code can change; `PlainWorkspace` (in `plain`) is an ordinary folder. Both
are touched from the host only while no command runs, so nothing moves underneath; links are never
followed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from k3rl.errors import UserInputError
from k3rl.sandboxes.files.layers import Entry, EntryType, Layer, parent_of, split_path
from k3rl.sandboxes.files.merged import EMPTY_TREE, Tree, merge
from k3rl.sandboxes.files.seals import Sealed
from k3rl.sandboxes.files.trees import (
    FOLDER_FLAGS,
    OPAQUE_XATTR,
    Identity,
    write_all,
)
from k3rl.sandboxes.files.weights import Weight

MOUNT_POINT = "/workspace"
CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW

FROZEN_BYTES = 4 << 20
"""Of file contents that a seal keeps in memory until they are durable."""

Content = Callable[[Entry], Iterable[bytes]]
"""A file's bytes in blocks."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers, bottom first, and the tree they add up to."""

    layers: tuple[Layer, ...] = ()
    tree: Tree = field(default_factory=lambda: EMPTY_TREE)

    def push(self, layer: Layer) -> Stack:
        """The stack with `layer` on top."""
        return Stack((*self.layers, layer), merge(self.tree, layer))


class Workspace(Protocol):
    """What a backend needs of a workspace; every call blocks on the disk."""

    sealed: Sealed
    """What it held when it was last sealed."""
    shows_writes: bool
    """Whether a running sandbox sees what `write` does; else its mount must end first."""
    owner: Identity | None
    """Whose its files are; None: our own."""

    @property
    def folders(self) -> list[Path]:
        """Where the files of `shown` lie, topmost first; what is written goes to the first."""
        ...

    def shown(self) -> Mapping[str, Entry]:
        """The present merged tree by a look at it alone, without content digests."""
        ...

    places: Sequence[str]
    """The workspace folder, by the names that processes in the sandbox may have for it."""

    def tree(self) -> Tree:
        """The present merged tree, with content digests."""
        ...

    def is_untouched(self) -> bool:
        """Whether nothing changed since the last seal, if that can be seen without reading.

        The one call that is quick enough for an event loop. False says nothing.
        """
        ...

    def seal(self, end: Callable[[], None], is_shared: bool = False) -> Sealed:
        """Freeze what it holds now; `sealed` itself when nothing changed.

        `end` is called if what is mounted must end for that. `is_shared`: so that `copy` can share
        it. Raises UncapturableTree, OSError; then nothing is sealed.
        """
        ...

    def weigh(
        self, most: Weight | None = None, is_off: Callable[[], bool] = lambda: False
    ) -> Weight:
        """What it takes on disk, also while code changes it; see `weights.weigh`."""
        ...

    def read(self, path: str, max_bytes: int) -> bytes:
        """A regular file's content. Raises UserInputError for anything else."""
        ...

    def target(self, path: str) -> str:
        """`path` relative to the workspace, if `write` may write there. Raises UserInputError."""
        ...

    def write(self, path: str, data: bytes, mode: int) -> None:
        """Write a regular file and the folders above it. Raises UserInputError."""
        ...

    def copy(self, folder: Path) -> Workspace:
        """A second workspace at `folder` with the tree that was just sealed to be shared."""
        ...

    def remove(self) -> None:
        """Delete it."""
        ...


def inner_path(path: str) -> str:
    """A caller's path relative to the workspace. Raises UserInputError when it leads outside."""
    if path.startswith(MOUNT_POINT + "/"):
        path = path[len(MOUNT_POINT) + 1 :]
    return "/".join(split_path(path))


def file_of(tree: Mapping[str, Entry], path: str, max_bytes: int) -> Entry:
    """The regular file at `path` of at most `max_bytes`. Raises UserInputError."""
    entry = tree.get(path)
    if entry is None:
        raise UserInputError(f"{path!r}: no such file in the workspace")
    if entry.type is not EntryType.FILE:
        raise UserInputError(f"{path!r}: not a regular file but a {entry.type}")
    if entry.size > max_bytes:
        raise UserInputError(f"{path!r}: {entry.size} bytes are more than {max_bytes}")
    return entry


def check_target(tree: Mapping[str, Entry], path: str, kind: EntryType = EntryType.FILE) -> None:
    """Raise UserInputError unless an entry of this kind may be put at `path`."""
    parts = path.split("/")
    for depth in range(1, len(parts)):
        above = tree.get("/".join(parts[:depth]))
        if above is not None and above.type is not EntryType.DIR:
            raise UserInputError(f"{path!r}: {above.path!r} is not a folder but a {above.type}")
    entry = tree.get(path)
    if entry is not None and entry.type is not kind:
        wanted = "regular file" if kind is EntryType.FILE else kind
        raise UserInputError(f"{path!r}: not a {wanted} but a {entry.type}")


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
        is_whiteout = True  # check_target let nothing else through
        os.unlink(name, dir_fd=folder)
    os.mkdir(name, 0o700, dir_fd=folder)
    handle = os.open(name, FOLDER_FLAGS, dir_fd=folder)
    if is_whiteout:
        os.setxattr(handle, OPAQUE_XATTR, b"y")
    if owner is not None:
        os.fchown(handle, owner.uid, owner.gid)
    is_merged = below is not None and below.type is EntryType.DIR and not is_whiteout
    for name, value in below.xattrs if below is not None and is_merged else ():
        os.setxattr(handle, name, value)
    os.fchmod(handle, below.mode if below is not None and is_merged else 0o755)
    return handle


def reach(folder: Path, path: str, tree: Mapping[str, Entry], owner: Identity | None) -> int:
    """Open the subfolder at `path` ("" for `folder`), making those on the way that are missing.

    `tree` is what `folder`, a workspace's topmost, and its lower layers show.
    """
    handle = os.open(folder, FOLDER_FLAGS)
    try:
        parts = path.split("/") if path else []
        for depth, part in enumerate(parts, 1):
            deeper = _descend(handle, part, tree.get("/".join(parts[:depth])), owner)
            os.close(handle)
            handle = deeper
    except BaseException:
        os.close(handle)
        raise
    return handle


def write_below(
    folder: Path,
    path: str,
    data: bytes,
    mode: int,
    tree: Mapping[str, Entry],
    owner: Identity | None,
) -> None:
    """Write a regular file at `path` below a folder, whose lower layers show `tree`."""
    handle = reach(folder, parent_of(path), tree, owner)
    try:
        name = path.rpartition("/")[2]
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=handle)  # a regular file or a whiteout
        _write_at(handle, name, data, mode, owner)
    finally:
        os.close(handle)
