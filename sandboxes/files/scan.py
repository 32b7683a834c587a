"""Files on disk to layer entries: what is there, read again only where it may have changed.

Every step goes through an open folder (`dir_fd`) with O_NOFOLLOW, as in `trees`. Nothing may run in
a folder that is looked at.
"""

from __future__ import annotations

import mmap
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from k3rl.errors import UncapturableTree
from k3rl.sandboxes.files.held import Reader, TooMuch
from k3rl.sandboxes.files.layers import (
    OWN_ID,
    Attributes,
    Entry,
    EntryType,
    is_own_xattr,
    sort_key,
)
from k3rl.sandboxes.files.merged import Tree
from k3rl.sandboxes.files.trees import (
    FILE_FLAGS,
    FOLDER_FLAGS,
    MAX_DEPTH,
    Identity,
    is_opaque,
    opened,
)

TICK_S = 0.001
LONGEST_TICK_S = 1.0

Stamp = tuple[int, int, int, int]
"""Inode, size and times of change, in ns, of content and of anything."""


@dataclass(frozen=True, slots=True)
class Known:
    """What was found at a path."""

    stamp: Stamp
    entry: Entry
    is_settled: bool
    """Whether any later change shows in the stamp."""


@dataclass(frozen=True, slots=True)
class Found:
    """A look at a folder."""

    seen: dict[str, Known]
    """By path, the folder itself included, parents before what they hold."""
    changed: list[Entry]
    """Entries that are new or unlike those known before."""
    gone: list[str]
    """Paths known before."""

    @property
    def entries(self) -> list[Entry]:
        """Of all of it, parents before what they hold."""
        return [known.entry for known in self.seen.values()]


@dataclass(slots=True)
class _Walk:
    """One walk through a folder."""

    owner: Identity
    is_upper: bool
    read: Reader | None
    known: Mapping[str, Known]
    clock_ns: int
    max_entries: int | None = None
    given: Tree | None = None
    """What is there, if that is known and only the stamps are wanted."""
    seen: dict[str, Known] = field(default_factory=dict)
    names: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    """Of files with several names, by device and inode."""

    def folder(self, handle: int, path: str, status: os.stat_result) -> None:
        if path.count("/") >= MAX_DEPTH:
            raise UncapturableTree(f"workspace folders are nested deeper than {MAX_DEPTH}")
        if not self.recall(path, status):
            self.add(status, self.branch(handle, path, status))
        for name in os.listdir(handle):
            child = f"{path}/{name}" if path else name
            found = os.lstat(name, dir_fd=handle)
            if stat.S_ISDIR(found.st_mode):
                with opened(name, handle, FOLDER_FLAGS, found) as inner:
                    self.folder(inner, child, found)
                continue
            if not self.recall(child, found):
                self.add(found, self.leaf(handle, name, child, found))
            if found.st_nlink > 1 and not stat.S_ISCHR(found.st_mode):
                self.names.setdefault((found.st_dev, found.st_ino), []).append(child)

    def recall(self, path: str, status: os.stat_result) -> bool:
        """Take over what is known, if it cannot have changed."""
        if self.max_entries is not None and len(self.seen) > self.max_entries:
            raise TooMuch
        old = self.known.get(path)
        if old is None or not old.is_settled or old.stamp != _stamp(status):
            return False
        self.seen[path] = old
        return True

    def add(self, status: os.stat_result, entry: Entry) -> None:
        old = self.known.get(entry.path)
        if old is not None and old.entry == entry:
            entry = old.entry
        is_settled = status.st_ctime_ns < self.clock_ns
        self.seen[entry.path] = Known(_stamp(status), entry, is_settled)

    def entry(self, path: str, kind: EntryType, status: os.stat_result, **facts: Any) -> Entry:
        uid = OWN_ID if status.st_uid == self.owner.uid else status.st_uid
        gid = OWN_ID if status.st_gid == self.owner.gid else status.st_gid
        mode = 0 if kind is EntryType.LINK else stat.S_IMODE(status.st_mode)
        return Entry(path, kind, mode, status.st_mtime_ns, uid=uid, gid=gid, **facts)

    def branch(self, handle: int, path: str, status: os.stat_result) -> Entry:
        if self.given is not None:
            return self.given[path]
        hides, xattrs = self.is_upper and is_opaque(handle), _attributes(handle)
        return self.entry(path, EntryType.DIR, status, is_opaque=hides, xattrs=xattrs)

    def leaf(self, folder: int, name: str, path: str, status: os.stat_result) -> Entry:
        if self.given is not None:
            return self.given[path]
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFREG:
            if self.read is None:
                return self.entry(path, EntryType.FILE, status, size=status.st_size)
            with opened(name, folder, FILE_FLAGS, status) as handle:
                digest, size = self.read(handle, status.st_size)
                facts = {"size": size, "digest": digest, "xattrs": _attributes(handle)}
                return self.entry(path, EntryType.FILE, status, **facts)
        if kind == stat.S_IFLNK:
            target = os.readlink(name, dir_fd=folder)
            return self.entry(path, EntryType.LINK, status, target=target)
        if kind == stat.S_IFCHR and status.st_rdev == 0 and self.is_upper:
            return Entry(path, EntryType.WHITEOUT)
        if kind == stat.S_IFIFO:
            return self.entry(path, EntryType.FIFO, status)
        if kind == stat.S_IFSOCK:
            return self.entry(path, EntryType.SOCKET, status)
        raise UncapturableTree(f"workspace holds a device: {path!r}")

    def group(self) -> None:
        """Name the groups of files that have more than one name here."""
        for names in self.names.values():
            found = [self.seen[name] for name in names]
            first = min((known.entry for known in found), key=sort_key).path
            wanted = first if len(names) > 1 else ""
            for name, known in zip(names, found, strict=True):
                if known.entry.group != wanted:
                    entry = replace(known.entry, group=wanted)
                    old = self.known.get(name)
                    if old is not None and old.entry == entry:
                        entry = old.entry
                    self.seen[name] = replace(known, entry=entry)


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _attributes(handle: int) -> Attributes:
    try:
        names = sorted(filter(is_own_xattr, os.listxattr(handle)))
    except OSError:
        return ()  # none on this file system
    return tuple((name, os.getxattr(handle, name)) for name in names)


def _look(folder: Path, walk: _Walk) -> _Walk:
    handle = os.open(folder, FOLDER_FLAGS)
    try:
        walk.folder(handle, "", os.fstat(handle))
    finally:
        os.close(handle)
    walk.group()
    return walk


def scan(
    folder: Path, read: Reader | None, owner: Identity | None = None, is_upper: bool = False
) -> list[Entry]:
    """The entries on disk, the folder itself included, parents before what they hold.

    With `read` None it is a look without opening files: no digests, no attributes of files. In an
    upper folder of overlayfs, device 0:0 is a whiteout and folders may be opaque.
    """
    walk = _Walk(owner or ourselves(), is_upper, read, {}, 0)
    return [known.entry for known in _look(folder, walk).seen.values()]


def ourselves() -> Identity:
    """Whom files belong to that we make and leave as they are."""
    return Identity(os.geteuid(), os.getegid())


class Survey:
    """What the last look at a folder found, so that the next one reads only what changed since.

    A file whose stamp is the same is the same: every change of a file, its attributes or its names
    sets the time of change (ctime), which nothing but the machine's clock decides. That holds if
    no change can fall into the tick of the file system's clock in which the file was looked at:
    what is not older than that tick is read again next time. It also needs a file system that
    notes writes through memory maps, which is tried out (tmpfs does not), and no map that outlives
    the command that made it: nothing runs during a look.
    """

    def __init__(self, folder: Path, home: Path, owner: Identity | None, is_upper: bool) -> None:
        """`home`, a folder of ours on the same file system, is where the clock is read."""
        self.folder, self.home, self.is_upper = folder, home, is_upper
        self.owner = owner or ourselves()
        self.known: dict[str, Known] = {}

    def look(
        self, read: Reader | None, max_entries: int | None = None, given: Tree | None = None
    ) -> Found:
        """What is there now. Raises TooMuch, UncapturableTree, OSError; `keep` remembers it."""
        clock_ns = _clock_ns(self.home)
        if not notes_mapped_writes(self.home):
            clock_ns = 0
        walk = _Walk(self.owner, self.is_upper, read, self.known, clock_ns, max_entries, given)
        seen = _look(self.folder, walk).seen
        changed = [new.entry for path, new in seen.items() if not self._is_old(path, new.entry)]
        return Found(seen, changed, [path for path in self.known if path not in seen])

    def keep(self, found: Found) -> None:
        """Remember a look."""
        self.known = found.seen

    def prime(self, tree: Tree) -> None:
        """Remember that the folder holds this tree, which has just been written into it."""
        self.keep(self.look(None, given=tree))

    def _is_old(self, path: str, entry: Entry) -> bool:
        old = self.known.get(path)
        return old is not None and old.entry is entry


def _clock_ns(home: Path) -> int:
    """The time that the file system would give to a change now."""
    marker = home / "clock"
    marker.touch()
    return marker.stat().st_ctime_ns


def notes_mapped_writes(home: Path) -> bool:
    """Whether a write through a memory map shows in a file's times, where `home` is."""
    device = home.stat().st_dev
    if device not in _notes:
        _notes[device] = _try_mapped_write(home)
    return _notes[device]


_notes: dict[int, bool] = {}
"""By device, as far as it was tried out."""


def _try_mapped_write(home: Path) -> bool:
    """The page is read first: a file system that does not ask is not told of the write then."""
    with tempfile.TemporaryFile(dir=home) as file:
        file.write(b"0")
        file.flush()
        with mmap.mmap(file.fileno(), 1) as view:
            before = view[0], os.fstat(file.fileno()).st_ctime_ns
            end = time.monotonic() + LONGEST_TICK_S
            while _clock_ns(home) <= before[1] and time.monotonic() < end:
                time.sleep(TICK_S)
            view[0:1] = b"1"
            return os.fstat(file.fileno()).st_ctime_ns > before[1]


def root_of(folder: Path, owner: Identity | None) -> Entry:
    """The entry of a folder alone, as the root of what it holds."""
    handle = os.open(folder, FOLDER_FLAGS)
    try:
        walk = _Walk(owner or ourselves(), False, None, {}, 0)
        entry = walk.entry("", EntryType.DIR, os.fstat(handle))
        return replace(entry, xattrs=_attributes(handle))
    finally:
        os.close(handle)


def reach(folder: Path) -> bool:
    """Raise UncapturableTree for a folder too deep to be captured, by a look at names alone.

    Returns whether all of it can be read without lending a permission.
    """
    handle = os.open(folder, FOLDER_FLAGS)
    try:
        return _reach(handle, 1)
    finally:
        os.close(handle)


def _reach(handle: int, depth: int) -> bool:
    is_open = True
    if depth > MAX_DEPTH + 1:
        raise UncapturableTree(f"workspace folders are nested deeper than {MAX_DEPTH}")
    with os.scandir(handle) as found:
        for each in found:
            is_folder = each.is_dir(follow_symlinks=False)
            if not is_folder and os.geteuid() == 0:
                continue
            status = each.stat(follow_symlinks=False)
            if not stat.S_ISLNK(status.st_mode):
                needed = 0o500 if is_folder else 0o400
                is_open &= os.geteuid() == 0 or status.st_mode & needed == needed
            if is_folder:
                with opened(each.name, handle, FOLDER_FLAGS, status) as inner:
                    is_open &= _reach(inner, depth + 1)
    return is_open
