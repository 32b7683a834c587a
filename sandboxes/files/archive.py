"""Folders of a workspace as tar archives, both ways.

tarfile reads headers alone, and no more of each than `MAX_HEADER_BYTES`. An archive is looked
through as a whole before anything is written; what is then placed goes through open folders
(`dir_fd`), never follows a link and never opens a file that it did not make.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

from k3rl.errors import SandboxError, UserInputError
from k3rl.sandboxes.blocking import in_workspace
from k3rl.sandboxes.files.layers import FILE_MTIME_NS, Entry, EntryType, parent_of, sort_key
from k3rl.sandboxes.files.trees import BLOCK_BYTES, MAX_DEPTH, Identity, file_below, write_all
from k3rl.sandboxes.files.workspace import (
    CREATE_FLAGS,
    MOUNT_POINT,
    Workspace,
    check_target,
    inner_path,
    reach,
)

MAX_MEMBERS = 100_000
MAX_HEADER_BYTES = 64 * 1024
"""Of one member, with its extended headers."""
MAX_NAME_BYTES, MAX_TARGET_BYTES = 255, 4095
MIN_TIME_S, MAX_TIME_S = -(1 << 31), 1 << 34
"""What ext4 can record."""
TYPES = {EntryType.FILE: tarfile.REGTYPE, EntryType.DIR: tarfile.DIRTYPE,
         EntryType.LINK: tarfile.SYMTYPE}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Member:
    """One member that may be placed."""

    name: str
    """As the archive has it."""
    entry: Entry
    """Its path is the one in the workspace."""
    offset: int = 0
    """Of a file's content in the archive."""
    source: str = ""
    """Of a hard link: the path of the file, which comes earlier, in the workspace."""


def folder_path(path: str) -> str:
    """A caller's path of a folder, relative to the workspace: "" for the workspace itself."""
    return "" if path in ("", ".", "./", MOUNT_POINT, f"{MOUNT_POINT}/") else inner_path(path)


def unpack_tree(archive: BinaryIO, path: str, workspace: Workspace) -> None:
    """Place a whole archive in a folder, or nothing of it. Raises UserInputError."""
    inside, tree = folder_path(path), workspace.shown()
    check_target(tree, inside, EntryType.DIR)
    members = _plan(archive, inside, tree)
    folders = [member for member in members if member.entry.type is EntryType.DIR]
    walk = _Walk(workspace, tree)
    try:
        walk.at(inside)
        for member in members:
            in_workspace(member.name, _place, member, walk, archive.fileno())
        # A folder's mode may close it to us, so those inside come first.
        for member in sorted(folders, key=lambda each: sort_key(each.entry), reverse=True):
            in_workspace(member.name, _finish, member, walk)
    finally:
        walk.close()


def pack_tree(workspace: Workspace, path: str, archive: BinaryIO, max_bytes: int) -> None:
    """Write a folder as an archive; equal trees give equal bytes. Raises UserInputError."""
    inside, tree = folder_path(path), workspace.shown()
    if (root := tree.get(inside)) is None or root.type is not EntryType.DIR:
        found = "no such folder" if root is None else f"not a folder but a {root.type}"
        raise UserInputError(f"{path!r}: {found}")
    above = f"{inside}/" if inside else ""
    entries = [each for each in tree.values() if each is root or each.path.startswith(above)]
    if sum(entry.size for entry in entries) > max_bytes:
        raise UserInputError(f"{path!r}: its files hold more than {max_bytes} bytes")
    with tarfile.TarFile(
        fileobj=archive, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8",
        errors="surrogateescape",
    ) as tar:  # fmt: skip
        for entry in sorted(entries, key=sort_key):
            _add(tar, entry, entry.path[len(above) :] or ".", workspace)
    archive.flush()
    if archive.tell() > max_bytes:
        raise UserInputError(f"{path!r}: the archive is larger than {max_bytes} bytes")


def _add(tar: tarfile.TarFile, entry: Entry, name: str, workspace: Workspace) -> None:
    if entry.type not in TYPES:
        raise UserInputError(f"{entry.path!r}: a {entry.type} cannot travel in an archive")
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.mtime = TYPES[entry.type], entry.mode, FILE_MTIME_NS // 10**9
    info.linkname = entry.target
    _forget(tar)
    if entry.type is not EntryType.FILE:
        tar.addfile(info)
        return
    info.size = entry.size
    for folder in workspace.folders:
        with file_below(folder, entry.path, entry.size) as handle:
            if handle is not None:
                with open(handle, "rb", closefd=False) as file:
                    tar.addfile(info, file)
                return
    raise SandboxError(f"{workspace.folders[0]}: lost the file {entry.path!r}")


def _forget(tar: tarfile.TarFile) -> None:
    """It would keep every member."""
    tar.members.clear()  # type: ignore[attr-defined]


class _Headers:
    """A file for tarfile to read headers from, a few bytes each."""

    def __init__(self, file: BinaryIO) -> None:
        self.num_left, self._file = MAX_HEADER_BYTES, file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        self.num_left -= size
        if size < 0 or self.num_left < 0:
            raise tarfile.ReadError(f"a header of more than {MAX_HEADER_BYTES} bytes")
        return self._file.read(size)


def _headers(archive: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """The members' headers. Raises UserInputError when they do not go on to the archive's end."""
    archive.seek(0)
    file = _Headers(archive)
    try:
        tar = tarfile.TarFile(fileobj=file, encoding="utf-8", errors="surrogateescape")  # type: ignore[arg-type]
        while (info := tar.next()) is not None:
            yield info
            file.num_left = MAX_HEADER_BYTES
            _forget(tar)
        archive.seek(tar.offset)
        if archive.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
            raise tarfile.ReadError("damaged or cut off")
    except (tarfile.TarError, ValueError, OverflowError) as error:
        where = archive.tell()
        raise UserInputError(f"not a tar archive up to its end: byte {where}: {error}") from None


def _plan(archive: BinaryIO, inside: str, tree: Mapping[str, Entry]) -> list[Member]:
    """What is to be placed, in order. Raises UserInputError naming the member that must not be."""
    num_bytes = os.fstat(archive.fileno()).st_size
    known, given = dict(tree), dict[str, Member]()
    for info in _headers(archive):
        if len(given) >= MAX_MEMBERS:
            raise UserInputError(
                f"{info.name!r}: the archive holds more than {MAX_MEMBERS} members"
            )
        member = _member(info, inside, num_bytes, given)
        path, kind = member.entry.path, member.entry.type
        if path in given and not kind is given[path].entry.type is EntryType.DIR:
            raise UserInputError(f"{info.name!r}: given twice")
        if not path and kind is not EntryType.DIR:
            raise UserInputError(f"{info.name!r}: the folder itself is no {kind}")
        check_target(known, path, kind)
        given[path] = member
        known[path] = member.entry
        while path := parent_of(path):
            known.setdefault(path, Entry(path, EntryType.DIR))
    return list(given.values())


def _member(info: tarfile.TarInfo, inside: str, num_bytes: int, given: dict[str, Member]) -> Member:
    """What a header says. Raises UserInputError on anything but what may be placed."""
    path = _path(info.name, inside)
    if not MIN_TIME_S <= info.mtime <= MAX_TIME_S:
        raise UserInputError(f"{info.name!r}: its time, {info.mtime}, is out of range")
    whole_s, part_s = divmod(info.mtime, 1)
    mode, mtime_ns = info.mode & 0o777, int(whole_s) * 10**9 + int(part_s * 10**9)
    if info.isreg() and not info.issparse():
        if not 0 <= info.size <= num_bytes - info.offset_data:
            raise UserInputError(f"{info.name!r}: the archive does not hold its {info.size} bytes")
        entry = Entry(path, EntryType.FILE, mode, mtime_ns, info.size)
        return Member(info.name, entry, info.offset_data)
    if info.size:
        raise UserInputError(f"{info.name!r}: has {info.size} bytes but is no plain file")
    if info.isdir():
        return Member(info.name, Entry(path, EntryType.DIR, mode, mtime_ns))
    if info.issym():
        target = os.fsencode(info.linkname)
        if not 0 < len(target) <= MAX_TARGET_BYTES or b"\0" in target:
            raise UserInputError(f"{info.name!r}: a link to nowhere")
        return Member(info.name, Entry(path, EntryType.LINK, 0, mtime_ns, target=info.linkname))
    if not info.islnk():
        raise UserInputError(f"{info.name!r}: not a regular file, folder or link")
    source = given.get(_path(info.linkname, inside))
    if source is None or source.entry.type is not EntryType.FILE:
        raise UserInputError(f"{info.name!r}: a hard link to no earlier file of the archive")
    first = source.source or source.entry.path
    return Member(info.name, Entry(path, EntryType.FILE), source=first)


def _path(name: str, inside: str) -> str:
    """A member's path in the workspace. Raises UserInputError when it has none."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or "\0" in name or ".." in parts or not name:
        raise UserInputError(f"{name!r}: not a path inside the folder")
    if any(len(os.fsencode(part)) > MAX_NAME_BYTES for part in parts):
        raise UserInputError(f"{name!r}: a name of more than {MAX_NAME_BYTES} bytes")
    path = "/".join([inside, *parts] if inside else parts)
    if path.count("/") >= MAX_DEPTH:
        raise UserInputError(f"{name!r}: nested deeper than {MAX_DEPTH}")
    return path


class _Walk:
    """The folders of a workspace, made where they are missing; the last one stays open."""

    def __init__(self, workspace: Workspace, tree: Mapping[str, Entry]) -> None:
        self.top, self.tree, self.owner = workspace.folders[0], tree, workspace.owner
        self._path, self._handle = "", -1

    def at(self, path: str) -> int:
        if path != self._path or self._handle < 0:
            self.close()
            self._handle = reach(self.top, path, self.tree, self.owner)
            self._path = path
        return self._handle

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _place(member: Member, walk: _Walk, archive: int) -> None:
    entry = member.entry
    if entry.type is EntryType.DIR:
        walk.at(entry.path)
        return
    folder, name = walk.at(parent_of(entry.path)), entry.path.rpartition("/")[2]
    _clear(folder, name, entry.path in walk.tree)
    if member.source:
        _link(member.source, walk, folder, name)
    elif entry.type is EntryType.LINK:
        os.symlink(entry.target, name, dir_fd=folder)
        if walk.owner is not None:
            who = walk.owner
            os.chown(name, who.uid, who.gid, dir_fd=folder, follow_symlinks=False)
        times = (entry.mtime_ns, entry.mtime_ns)
        os.utime(name, ns=times, dir_fd=folder, follow_symlinks=False)
    else:
        handle = os.open(name, CREATE_FLAGS, 0o600, dir_fd=folder)
        try:
            _copy(archive, member.offset, entry.size, handle)
            _stamp(handle, entry, walk.owner)
        finally:
            os.close(handle)


def _clear(folder: int, name: str, is_known: bool) -> None:
    """Remove what the workspace showed here before, or a whiteout."""
    try:
        status = os.lstat(name, dir_fd=folder)
    except FileNotFoundError:
        return
    if not is_known and not stat.S_ISCHR(status.st_mode):
        raise UserInputError(f"{name!r}: the file system takes it for another member")
    os.unlink(name, dir_fd=folder)


def _link(source: str, walk: _Walk, folder: int, name: str) -> None:
    other = reach(walk.top, parent_of(source), walk.tree, walk.owner)
    try:
        first = source.rpartition("/")[2]
        os.link(first, name, src_dir_fd=other, dst_dir_fd=folder, follow_symlinks=False)
    finally:
        os.close(other)


def _copy(archive: int, offset: int, size: int, target: int) -> None:
    while size:
        data = os.pread(archive, min(size, BLOCK_BYTES), offset)
        if not data:
            raise SandboxError("an archive on disk became shorter")
        write_all(target, data)
        offset, size = offset + len(data), size - len(data)


def _finish(member: Member, walk: _Walk) -> None:
    _stamp(walk.at(member.entry.path), member.entry, walk.owner)


def _stamp(handle: int, entry: Entry, owner: Identity | None) -> None:
    if owner is not None:
        os.fchown(handle, owner.uid, owner.gid)
    os.fchmod(handle, entry.mode)
    os.utime(handle, ns=(entry.mtime_ns, entry.mtime_ns))
