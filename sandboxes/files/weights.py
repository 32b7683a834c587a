"""What a workspace weighs on disk, found while code may be at work in it.

A workspace weighs what it would as one ordinary folder: the blocks that its files and folders take
and the number of its paths. Of an overlay workspace the lower layers count where the upper folder
hides nothing of them. Files that were deleted but are still held open weigh on: `held_bytes`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from k3rl.sandboxes.files.layers import Entry, EntryType, parent_of, sort_key
from k3rl.sandboxes.files.trees import FOLDER_FLAGS, is_opaque, open_lent

BLOCK_BYTES = 4096
STAT_BLOCK_BYTES = 512
ENTRIES_PER_LOOK = 1024
DELETED = " (deleted)"
NO_TREE: Mapping[str, Entry] = {}


HELD_FOLDERS = 64
"""So many levels stay open while those below are looked at; deeper ones are reached by ".."."""


class Stopped(Exception):
    """The weighing was called off."""


class Moved(Exception):
    """A deep folder went elsewhere while what it holds was looked at."""


@dataclass(frozen=True, slots=True)
class Weight:
    """What a workspace takes."""

    num_bytes: int = 0
    """Allocated, not the sizes that its files pretend to have."""
    num_entries: int = 0
    """Paths below the workspace folder; a file with two names counts twice."""

    def __add__(self, other: Weight) -> Weight:
        """The sum."""
        return Weight(self.num_bytes + other.num_bytes, self.num_entries + other.num_entries)

    def or_more(self, other: Weight) -> Weight:
        """The larger number of either."""
        return Weight(
            max(self.num_bytes, other.num_bytes), max(self.num_entries, other.num_entries)
        )

    def exceeds(self, other: Weight) -> bool:
        """Whether it is more than `other` in bytes or in entries."""
        return self.num_bytes > other.num_bytes or self.num_entries > other.num_entries


NO_WEIGHT = Weight()


def weigh(
    folder: Path,
    lower: Mapping[str, Entry] = NO_TREE,
    most: Weight | None = None,
    is_off: Callable[[], bool] = lambda: False,
) -> Weight:
    """The weight of a folder, over lower layers that show the tree `lower`.

    With `most` it may stop at more than that. What vanishes meanwhile is left out. Raises `Stopped`
    soon after `is_off` tells so, `Moved`, OSError.
    """
    scale = _Scale(lower, most, is_off)
    with suppress(_Enough):
        scale.walk(folder)
    return scale.weight()


class _Enough(Exception):
    """The upper folder alone weighs more than was asked about."""


@dataclass(slots=True)
class _Folder:
    """One that is being looked at."""

    handle: int
    """-1 while it is closed."""
    closed_mode: int | None
    """What to give back: its owner could not read it."""
    path: str
    """Only as long as lower layers may be below it."""
    is_over: bool
    """Whether it shows what lower layers hold at its path."""
    folders: list[str] = field(default_factory=list)
    """Those in it that are still to be looked at."""
    identity: tuple[int, int] = (0, 0)

    def close(self) -> None:
        if self.handle >= 0:
            if self.closed_mode is not None:
                os.fchmod(self.handle, self.closed_mode)
            os.close(self.handle)
            self.handle = -1


class _Scale:
    def __init__(
        self, lower: Mapping[str, Entry], most: Weight | None, is_off: Callable[[], bool]
    ) -> None:
        self.lower, self.most, self.is_off = lower, most, is_off
        self.num_bytes = self.num_entries = 0
        self.linked: set[tuple[int, int]] = set()
        self.hiding: set[str] = set()
        """Paths whose lower entry, and all below it, is not seen."""
        self.merged: list[Entry] = []
        """Lower folders that the upper folder has too."""

    def walk(self, top: Path) -> None:
        """Add what a folder holds, itself excluded."""
        above = [_Folder(os.open(top, FOLDER_FLAGS), None, "", bool(self.lower))]
        try:
            self.read(above[0])
            while above:
                here = above[-1]
                if not here.folders:
                    self.leave(above)
                elif (inner := self.open(here, here.folders.pop())) is not None:
                    above.append(inner)
                    self.read(inner)
                    if len(above) > HELD_FOLDERS:
                        here.close()
        finally:
            for folder in above:
                folder.close()

    def leave(self, above: list[_Folder]) -> None:
        """Go back to the folder above the last one. Raises `Moved` when it is not there."""
        last = above.pop()
        try:
            if above and above[-1].handle < 0:
                here = above[-1]
                here.handle, here.closed_mode = _open_readable("..", last.handle)
                status = os.fstat(here.handle)
                if here.identity != (status.st_dev, status.st_ino):
                    raise Moved
        finally:
            last.close()

    def open(self, here: _Folder, name: str) -> _Folder | None:
        """A folder in another; None when it has been moved or deleted meanwhile."""
        try:
            handle, mode = _open_readable(name, here.handle)
        except (FileNotFoundError, NotADirectoryError):
            return None
        inner = _Folder(handle, mode, "", False)
        if here.is_over:
            inner.path = f"{here.path}/{name}" if here.path else name
            inner.is_over = self.is_merged(handle, inner.path)
        return inner

    def read(self, folder: _Folder) -> None:
        """Add the entries of one folder."""
        status = os.fstat(folder.handle)
        folder.identity = (status.st_dev, status.st_ino)
        with os.scandir(folder.handle) as entries:
            for number, entry in enumerate(entries):
                if number % ENTRIES_PER_LOOK == 0:
                    self.look()
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    self.add(status)
                    if stat.S_ISDIR(status.st_mode):
                        folder.folders.append(entry.name)
                    elif folder.is_over:
                        path = f"{folder.path}/{entry.name}" if folder.path else entry.name
                        if path in self.lower:
                            self.hiding.add(path)

    def look(self) -> None:
        if self.is_off():
            raise Stopped
        if self.most is not None and Weight(self.num_bytes, self.num_entries).exceeds(self.most):
            raise _Enough

    def add(self, status: os.stat_result) -> None:
        if stat.S_ISCHR(status.st_mode):
            return  # a whiteout
        self.num_entries += 1
        if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
            inode = (status.st_dev, status.st_ino)
            if inode in self.linked:
                return
            self.linked.add(inode)
        self.num_bytes += status.st_blocks * STAT_BLOCK_BYTES

    def is_merged(self, handle: int, path: str) -> bool:
        """Whether a folder shows what the lower layers hold at its path."""
        below = self.lower.get(path)
        if below is None:
            return False
        if below.type is EntryType.DIR and not is_opaque(handle):
            self.merged.append(below)
            return True
        self.hiding.add(path)
        return False

    def weight(self) -> Weight:
        """What was added, and of the lower tree what is seen."""
        visible = list(_visible(self.lower, self.hiding))
        num_bytes = sum(map(_blocks, visible)) - sum(map(_blocks, self.merged))
        num_entries = len(visible) - len(self.merged)
        return Weight(self.num_bytes + num_bytes, self.num_entries + num_entries)


def _open_readable(name: str, folder: int) -> tuple[int, int | None]:
    """Open a folder, lending its owner the permission to read it; the mode to give back."""
    try:
        return os.open(name, FOLDER_FLAGS, dir_fd=folder), None
    except PermissionError:
        mode = stat.S_IMODE(os.lstat(name, dir_fd=folder).st_mode)
        return open_lent(name, folder, FOLDER_FLAGS, mode | 0o500), mode


def _visible(lower: Mapping[str, Entry], hiding: set[str]) -> Iterator[Entry]:
    if not hiding:
        yield from (entry for path, entry in lower.items() if path)
        return
    gone: set[str] = set()
    for entry in sorted(lower.values(), key=sort_key):
        if entry.path in hiding or parent_of(entry.path) in gone:
            gone.add(entry.path)
        elif entry.path:
            yield entry


def _blocks(entry: Entry) -> int:
    if entry.type is EntryType.FILE:
        return -(-entry.size // BLOCK_BYTES) * BLOCK_BYTES
    return BLOCK_BYTES if entry.type is EntryType.DIR else 0


def held_bytes(first: int, places: Sequence[str]) -> int:
    """What deleted files take that process `first` or a descendant of it holds.

    `places`: the folder that they were in, by the names that processes may have for it. A file that
    is mapped but not open counts as much as is mapped. Left out are processes that we may not look
    into, and files that are only on their way through a socket.
    """
    pids = _descendants(first)
    held: dict[tuple[int, int], int] = {}
    for find in (_mapped, _open):  # where both know of a file, the second knows better
        for pid in pids:
            with suppress(OSError):
                held |= find(pid, places)
    return sum(held.values())


def _descendants(first: int) -> list[int]:
    """A process and all below it, as far as they live."""
    found, new = [], [first]
    while new:
        pid = new.pop()
        found.append(pid)
        with suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                text = Path(f"/proc/{pid}/task/{task}/children").read_text()
                new += map(int, text.split())
    return found


def _open(pid: int, places: Sequence[str]) -> dict[tuple[int, int], int]:
    found, starts = {}, tuple(f"{place}/" for place in places)
    for number in os.listdir(f"/proc/{pid}/fd"):
        link = f"/proc/{pid}/fd/{number}"
        with suppress(FileNotFoundError):
            path = os.readlink(link)
            if path.startswith(starts) and path.endswith(DELETED):
                status = os.stat(link)
                if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                    inode = (status.st_dev, status.st_ino)
                    found[inode] = status.st_blocks * STAT_BLOCK_BYTES
    return found


def _mapped(pid: int, places: Sequence[str]) -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = {}
    for line in Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").split("\n"):
        if line.endswith(DELETED) and any(f" {place}/" in line for place in places):
            span, _, _, device, inode, _ = line.split(maxsplit=5)
            start, end = (int(word, 16) for word in span.split("-"))
            major, minor = (int(word, 16) for word in device.split(":"))
            key = (os.makedev(major, minor), int(inode))
            found[key] = found.get(key, 0) + end - start
    return found
