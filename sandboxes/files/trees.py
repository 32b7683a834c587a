"""Layer entries to files on disk, and reading and deleting those, without ever following a link.

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

from k3rl.errors import SandboxError
from k3rl.sandboxes.files.layers import OWN_ID, ROOT, Entry, EntryType, parent_of, sort_key

OPAQUE_XATTR = "user.overlay.opaque"
MAX_DEPTH = 200
"""Deepest folder that is captured: one open file per level."""
REMOVE_TRIES = 20
BLOCK_BYTES = 1 << 20
NO_XATTRS = (errno.ENOTSUP, errno.ENOSPC, errno.E2BIG)
"""What a file system says that holds no extended attributes, or not so large ones."""
NO_RANGE_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
"""What a kernel says that cannot copy between these two files by itself."""
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class Identity:
    """The uid and gid that own workspaces and run code."""

    uid: int
    gid: int


Placer = Callable[[Entry, int, str], None]
"""Makes one regular file: (entry, fd of its folder, name)."""


def file_writer(content: Callable[[Entry], Iterable[bytes]], owner: Identity | None) -> Placer:
    """A placer that writes the blocks of `content(entry)` with the entry's mode and time."""

    def place(entry: Entry, folder: int, name: str) -> None:
        with _made(name, folder) as handle:
            for block in content(entry):
                write_all(handle, block)
            _finish(handle, entry, owner)

    return place


def file_copier(sources: list[Path], owner: Identity | None) -> Placer:
    """A placer that copies the topmost file at the entry's path in a stack of folders."""

    def place(entry: Entry, folder: int, name: str) -> None:
        for source in reversed(sources):
            with file_below(source, entry.path, entry.size) as origin:
                if origin is None:
                    continue
                with _made(name, folder) as handle:
                    copy_content(origin, handle, 0)
                    _finish(handle, entry, owner)
                return
        raise SandboxError(f"{sources[-1]}: lost the file {entry.path!r}")

    return place


@contextmanager
def _made(name: str, folder: int) -> Iterator[int]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    handle = os.open(name, flags, 0o600, dir_fd=folder)
    try:
        yield handle
    finally:
        os.close(handle)


def copy_content(source: int, target: int, offset: int) -> None:
    """Copy a whole file to `offset` of another; btrfs and xfs share its blocks instead."""
    position = 0
    try:
        while count := os.copy_file_range(source, target, 1 << 30, position, offset + position):
            position += count
    except OSError as error:
        if error.errno not in NO_RANGE_COPY or position:
            raise
        for block in read_blocks(source, 0):
            position += os.pwrite(target, block, offset + position)


def read_blocks(handle: int, start: int, size: int | None = None) -> Iterator[bytes]:
    """A file in blocks from `start`, to its end or at most `size` bytes."""
    left = size
    while left is None or left > 0:
        block = os.pread(handle, BLOCK_BYTES if left is None else min(left, BLOCK_BYTES), start)
        if not block:
            return
        yield block
        start += len(block)
        left = None if left is None else left - len(block)


def extract(entries: Iterable[Entry], folder: Path, place: Placer, owner: Identity | None) -> None:
    """Make `folder`, which must not exist, hold the entries of a layer or a tree.

    The parent of each entry must be an entry as well. Folders are closed to others until they are
    complete; their modes and times are set last. `owner`: whose all of it is; None: our own, and
    what has another owner in its entry is given to that one where we may. Extended attributes that
    the file system cannot hold are left out.
    """
    os.mkdir(folder, 0o700)
    if owner is None:
        # A folder above may pass its group on.
        os.chown(folder, -1, os.getegid())
        os.chmod(folder, 0o700)
    ordered = sorted(entries, key=sort_key)
    root = ordered.pop(0) if ordered and not ordered[0].path else ROOT
    stack = [(root, os.open(folder, FOLDER_FLAGS))]
    try:
        for entry in ordered:
            while stack[-1][0].path != parent_of(entry.path):
                _close_folder(*stack.pop(), owner)
                if not stack:
                    raise SandboxError(f"{entry.path!r}: its folder has no entry")
            if entry.group in ("", entry.path):
                _make(entry, stack, place, owner)
            else:
                _link(folder, entry, stack[-1][1])
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
    _give(entry, owner, name, folder)
    if entry.type is not EntryType.LINK:
        os.chmod(name, entry.mode, dir_fd=folder)
    times = (entry.mtime_ns, entry.mtime_ns)
    os.utime(name, ns=times, dir_fd=folder, follow_symlinks=False)


def _link(root: Path, entry: Entry, folder: int) -> None:
    """Make one more name of the first file of the entry's group."""
    with parent_below(root, entry.group) as source:
        if source is None:
            raise SandboxError(f"{entry.path!r}: there is no {entry.group!r} to link it to")
        first, name = (path.rpartition("/")[2] for path in (entry.group, entry.path))
        os.link(first, name, src_dir_fd=source, dst_dir_fd=folder, follow_symlinks=False)


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
    _give(entry, owner, handle)
    for name, value in entry.xattrs:
        try:
            os.setxattr(handle, name, value)
        except OSError as error:
            if error.errno not in NO_XATTRS:
                raise
    os.fchmod(handle, entry.mode)
    os.utime(handle, ns=(entry.mtime_ns, entry.mtime_ns))


def _give(entry: Entry, owner: Identity | None, what: int | str, folder: int | None = None) -> None:
    if owner is not None:
        uid, gid = owner.uid, owner.gid
    elif (entry.uid, entry.gid) != (OWN_ID, OWN_ID):
        uid, gid = (-1 if number == OWN_ID else number for number in (entry.uid, entry.gid))
    else:
        return
    try:
        os.chown(what, uid, gid, dir_fd=folder, follow_symlinks=isinstance(what, int))
    except PermissionError:
        if owner is not None:
            raise


def write_all(handle: int, data: bytes) -> None:
    """Write all of `data`."""
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def is_opaque(handle: int) -> bool:
    """Whether an open folder of an upper or lower one hides what lies below it."""
    try:
        return os.getxattr(handle, OPAQUE_XATTR) == b"y"
    except OSError:
        return False


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


@contextmanager
def file_below(folder: Path, path: str, size: int) -> Iterator[int | None]:
    """The open regular file at `path`; None when there is none of `size` bytes."""
    with parent_below(folder, path) as parent:
        name = path.rpartition("/")[2]
        status = None if parent is None else os.lstat(name, dir_fd=parent)
        if status is None or not stat.S_ISREG(status.st_mode) or status.st_size != size:
            yield None
            return
        assert parent is not None
        with opened(name, parent, FILE_FLAGS, status) as handle:
            yield handle


def read_below(folder: Path, path: str, size: int) -> bytes | None:
    """`size` bytes of the regular file at `path`; None when there is none of that size."""
    with file_below(folder, path, size) as handle:
        return None if handle is None else read_all(handle, size)


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
        handle = open_lent(name, folder, flags, mode | needed)
    else:
        handle = os.open(name, flags, dir_fd=folder)
    try:
        yield handle
    finally:
        if is_lent:
            os.fchmod(handle, mode)
        os.close(handle)


def open_lent(name: str, folder: int, flags: int, mode: int) -> int:
    """Change the mode and open; by a descriptor, since the name may have become a link."""
    place = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=folder)
    try:
        if stat.S_ISLNK(os.fstat(place).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "became a link", name)
        os.chmod(f"/proc/self/fd/{place}", mode)
        return os.open(f"/proc/self/fd/{place}", flags & ~os.O_NOFOLLOW)
    finally:
        os.close(place)


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
