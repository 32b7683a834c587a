"""Files on disk to layer entries and back, without ever following a link.

Every step goes through an open folder (`dir_fd`) with O_NOFOLLOW, so that a link planted by code
in a sandbox leads nowhere. On disk a layer has the form overlayfs reads: whiteouts are character
devices 0:0, opaque folders carry `user.overlay.opaque`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from k3rl.errors import SandboxError, UncapturableTree
from k3rl.sandboxes.layers import INLINE_BYTES, ROOT, Entry, EntryType, parent_of, sort_key
from k3rl.types import Digest, digest_bytes

OPAQUE_XATTR = "user.overlay.opaque"
MAX_DEPTH = 200
"""Deepest folder that is captured: one open file per level."""
REMOVE_TRIES = 20
READ_BYTES = 1 << 20
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class Identity:
    """The uid and gid that own workspaces and run code."""

    uid: int
    gid: int


Placer = Callable[[Entry, int, str], None]
"""Makes one regular file: (entry, fd of its folder, name)."""


def file_writer(content: Callable[[Entry], bytes], owner: Identity | None) -> Placer:
    """A placer that writes `content(entry)` with the entry's mode and time."""

    def place(entry: Entry, folder: int, name: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        handle = os.open(name, flags, 0o600, dir_fd=folder)
        try:
            write_all(handle, content(entry))
            _finish(handle, entry, owner)
        finally:
            os.close(handle)

    return place


def file_linker(lowers: list[Path]) -> Placer:
    """A placer that hard-links the topmost file at the entry's path in a stack of layers."""

    def place(entry: Entry, folder: int, name: str) -> None:
        for lower in reversed(lowers):
            with parent_below(lower, entry.path) as source:
                if source is not None:
                    os.link(name, name, src_dir_fd=source, dst_dir_fd=folder, follow_symlinks=False)
                    return
        raise SandboxError(f"{lowers[-1]}: the layer cache lost {entry.path!r}")

    return place


def extract(entries: Iterable[Entry], folder: Path, place: Placer, owner: Identity | None) -> None:
    """Make `folder`, which must not exist, hold the entries of a layer or a tree.

    The parent of each entry must be an entry as well. Folders are closed to others until they are
    complete; their modes and times are set last.
    """
    os.mkdir(folder, 0o700)
    ordered = sorted(entries, key=sort_key)
    root = ordered.pop(0) if ordered and not ordered[0].path else ROOT
    stack = [(root, os.open(folder, FOLDER_FLAGS))]
    try:
        for entry in ordered:
            while stack[-1][0].path != parent_of(entry.path):
                _close_folder(*stack.pop(), owner)
                if not stack:
                    raise SandboxError(f"{entry.path!r}: its folder has no entry")
            _make(entry, stack, place, owner)
        while stack:
            _close_folder(*stack.pop(), owner)
    finally:
        for _, handle in stack:
            os.close(handle)


def _make(
    entry: Entry, stack: list[tuple[Entry, int]], place: Placer, owner: Identity | None
) -> None:
    folder, name = stack[-1][1], entry.path.rpartition("/")[2]
    if entry.type is EntryType.DIR:
        os.mkdir(name, 0o700, dir_fd=folder)
        stack.append((entry, os.open(name, FOLDER_FLAGS, dir_fd=folder)))
        return
    if entry.type is EntryType.FILE:
        place(entry, folder, name)
        return
    if entry.type is EntryType.WHITEOUT:
        make_whiteout(name, folder)
        return
    if entry.type is EntryType.LINK:
        os.symlink(entry.target, name, dir_fd=folder)
    else:
        kind = stat.S_IFIFO if entry.type is EntryType.FIFO else stat.S_IFSOCK
        os.mknod(name, kind | 0o600, dir_fd=folder)
    if owner is not None:
        os.chown(name, owner.uid, owner.gid, dir_fd=folder, follow_symlinks=False)
    if entry.type is not EntryType.LINK:
        os.chmod(name, entry.mode, dir_fd=folder)
    times = (entry.mtime_ns, entry.mtime_ns)
    os.utime(name, ns=times, dir_fd=folder, follow_symlinks=False)


def make_whiteout(name: str, folder: int) -> None:
    """Hide what lower layers hold under this name; needs no privilege since Linux 5.8."""
    os.mknod(name, stat.S_IFCHR, device=0, dir_fd=folder)


def _close_folder(entry: Entry, handle: int, owner: Identity | None) -> None:
    try:
        if entry.is_opaque:
            os.setxattr(handle, OPAQUE_XATTR, b"y")
        _finish(handle, entry, owner)
    finally:
        os.close(handle)


def _finish(handle: int, entry: Entry, owner: Identity | None) -> None:
    if owner is not None:
        os.fchown(handle, owner.uid, owner.gid)
    os.fchmod(handle, entry.mode)
    os.utime(handle, ns=(entry.mtime_ns, entry.mtime_ns))


def write_all(handle: int, data: bytes) -> None:
    """Write all of `data`."""
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def scan(folder: Path, inline: dict[Digest, bytes] | None) -> list[Entry]:
    """The entries on disk, the folder itself included.

    With `inline`, contents are read: files get digests and small contents land in `inline`.
    With None it is a stat walk only and digests are "".
    """
    handle = os.open(folder, FOLDER_FLAGS)
    try:
        entries: list[Entry] = []
        _scan_folder(handle, "", os.fstat(handle), inline, entries)
        return entries
    finally:
        os.close(handle)


def _scan_folder(
    handle: int,
    path: str,
    status: os.stat_result,
    inline: dict[Digest, bytes] | None,
    into: list[Entry],
) -> None:
    if path.count("/") >= MAX_DEPTH:
        raise UncapturableTree(f"workspace folders are nested deeper than {MAX_DEPTH}")
    mode, mtime_ns = stat.S_IMODE(status.st_mode), status.st_mtime_ns
    into.append(Entry(path, EntryType.DIR, mode, mtime_ns, is_opaque=_is_opaque(handle)))
    for name in os.listdir(handle):
        child = f"{path}/{name}" if path else name
        found = os.lstat(name, dir_fd=handle)
        if stat.S_ISDIR(found.st_mode):
            with opened(name, handle, FOLDER_FLAGS, found) as inner:
                _scan_folder(inner, child, found, inline, into)
        elif stat.S_ISREG(found.st_mode):
            into.append(_scan_file(handle, name, child, found, inline))
        else:
            into.append(_scan_special(handle, name, child, found))


def _is_opaque(handle: int) -> bool:
    try:
        return os.getxattr(handle, OPAQUE_XATTR) == b"y"
    except OSError:
        return False


def _scan_file(
    folder: int,
    name: str,
    path: str,
    status: os.stat_result,
    inline: dict[Digest, bytes] | None,
) -> Entry:
    mode, mtime_ns, size = stat.S_IMODE(status.st_mode), status.st_mtime_ns, status.st_size
    if inline is None:
        return Entry(path, EntryType.FILE, mode, mtime_ns, size)
    with opened(name, folder, FILE_FLAGS, status) as handle:
        if size <= INLINE_BYTES:
            data = read_all(handle, size)
            digest = digest_bytes(data)
            inline[digest] = data
        else:
            hasher = blake3()
            while block := os.read(handle, READ_BYTES):
                hasher.update(block)
            digest = hasher.hexdigest()
    return Entry(path, EntryType.FILE, mode, mtime_ns, size, digest=digest)


def _scan_special(folder: int, name: str, path: str, status: os.stat_result) -> Entry:
    kind, mode = stat.S_IFMT(status.st_mode), stat.S_IMODE(status.st_mode)
    if kind == stat.S_IFLNK:
        target = os.readlink(name, dir_fd=folder)
        return Entry(path, EntryType.LINK, 0, status.st_mtime_ns, target=target)
    if kind == stat.S_IFCHR and status.st_rdev == 0:
        return Entry(path, EntryType.WHITEOUT)
    if kind == stat.S_IFIFO:
        return Entry(path, EntryType.FIFO, mode, status.st_mtime_ns)
    if kind == stat.S_IFSOCK:
        return Entry(path, EntryType.SOCKET, mode, status.st_mtime_ns)
    raise UncapturableTree(f"workspace holds a device: {path!r}")


@contextmanager
def parent_below(folder: Path, path: str) -> Iterator[int | None]:
    """The open folder that holds `path` below `folder`; None when there is nothing at `path`."""
    *above, name = path.split("/")
    with ExitStack() as held:
        handle = os.open(folder, FOLDER_FLAGS)
        held.callback(os.close, handle)
        found: int | None
        try:
            for part in above:
                status = os.lstat(part, dir_fd=handle)
                handle = held.enter_context(opened(part, handle, FOLDER_FLAGS, status))
            os.lstat(name, dir_fd=handle)
            found = handle
        except (FileNotFoundError, NotADirectoryError):
            found = None
        yield found


def read_below(folder: Path, path: str, size: int) -> bytes | None:
    """`size` bytes of the regular file at `path`; None when there is none of that size."""
    with parent_below(folder, path) as parent:
        if parent is None:
            return None
        name = path.rpartition("/")[2]
        status = os.lstat(name, dir_fd=parent)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            return None
        with opened(name, parent, FILE_FLAGS, status) as handle:
            return read_all(handle, size)


def read_all(handle: int, size: int) -> bytes:
    """Read `size` bytes, or what there is."""
    parts: list[bytes] = []
    while size > 0 and (part := os.read(handle, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


@contextmanager
def opened(name: str, folder: int, flags: int, status: os.stat_result) -> Iterator[int]:
    """Open what `status` describes, lending its owner the read permission it may lack."""
    mode = stat.S_IMODE(status.st_mode)
    needed = 0o500 if stat.S_ISDIR(status.st_mode) else 0o400
    is_lent = mode & needed != needed and os.geteuid() != 0
    if is_lent:
        os.chmod(name, mode | needed, dir_fd=folder)
    handle = os.open(name, flags, dir_fd=folder)
    try:
        yield handle
    finally:
        if is_lent:
            os.fchmod(handle, mode)
        os.close(handle)


def remove_tree(folder: Path) -> None:
    """Delete a folder whatever code in a sandbox made of it: any depth, any modes.

    Subfolders are moved up to the top before they are emptied, so depth costs neither recursion
    nor open files. A folder that is not there is fine; one that an unconfined process keeps
    filling is tried `REMOVE_TRIES` times.
    """
    try:
        top = os.open(folder, FOLDER_FLAGS)
    except FileNotFoundError:
        return
    try:
        for attempt in range(1, REMOVE_TRIES + 1):
            try:
                _empty(top)
                os.rmdir(folder)
                return
            except OSError as error:
                moved = error.errno in (errno.ENOTEMPTY, errno.ENOENT)
                if not moved or attempt == REMOVE_TRIES:
                    raise
    finally:
        os.close(top)


def _empty(top: int) -> None:
    serial = 0
    while names := os.listdir(top):
        for name in names:
            serial = _dissolve(top, name, serial)


def _dissolve(top: int, name: str, serial: int) -> int:
    status = os.lstat(name, dir_fd=top)
    if not stat.S_ISDIR(status.st_mode):
        os.unlink(name, dir_fd=top)
        return serial
    if stat.S_IMODE(status.st_mode) & 0o700 != 0o700:
        os.chmod(name, 0o700, dir_fd=top)
    handle = os.open(name, FOLDER_FLAGS, dir_fd=top)
    try:
        for child in os.listdir(handle):
            if stat.S_ISDIR(os.lstat(child, dir_fd=handle).st_mode):
                serial = _lift(handle, child, top, serial)
            else:
                os.unlink(child, dir_fd=handle)
    finally:
        os.close(handle)
    os.rmdir(name, dir_fd=top)
    return serial


def _lift(source: int, name: str, top: int, serial: int) -> int:
    """Move a folder to the top under a name that is free there."""
    if stat.S_IMODE(os.lstat(name, dir_fd=source).st_mode) & 0o300 != 0o300:
        # Moving a folder rewrites its "..", for which its owner needs write permission.
        os.chmod(name, 0o700, dir_fd=source)
    while True:
        serial += 1
        lifted = f".gone-{serial}"
        try:
            os.lstat(lifted, dir_fd=top)
        except FileNotFoundError:
            os.rename(name, lifted, src_dir_fd=source, dst_dir_fd=top)
            return serial
