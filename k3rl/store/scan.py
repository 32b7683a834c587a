"""What a journal file holds, as it is read back: whole frames in order, then perhaps a torn end."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from k3rl.errors import CorruptData
from k3rl.store.journal import HEADER_BYTES, MAGIC, Frame, follows, frame_bytes, parse

SECTOR_BYTES = 512
"""What a disk writes whole or not at all; of an appended file, one not written reads as zeros."""


class Scan:
    """All frames of one file in order; afterwards `good_bytes` and `torn_bytes` are known.

    Bytes from the first frame that `is_torn` on are torn. Whether that may be is for the caller to
    say (only at the end of the last file).
    """

    def __init__(self, path: Path, gaps: Collection[tuple[int, int]] = ()) -> None:
        """Reads nothing yet. `gaps`: jumps of the sequence that are known (`ManifestRecord`)."""
        self.path = path
        self._gaps = gaps
        self.good_bytes = 0
        self.torn_bytes = 0
        self.damage = CorruptData(str(path), 0, "frame", "the file ends inside a frame")
        """What is wrong with the torn bytes."""

    def __iter__(self) -> Iterator[Frame]:
        """Raises CorruptData at the first frame that is whole but not what was written."""
        data = self.path.read_bytes()
        previous: int | None = None
        while self.good_bytes < len(data):
            frame = self._parse(data)
            if frame is None:
                self.torn_bytes = len(data) - self.good_bytes
                return
            jump = (frame.sequence if previous is None else previous + 1, frame.sequence)
            if jump[0] != jump[1] and jump not in self._gaps:
                detail = f"{frame.sequence} follows {previous}"
                raise CorruptData(str(self.path), self.good_bytes, "sequence", detail)
            previous = frame.sequence
            yield frame
            self.good_bytes += frame.place.num_bytes

    def _parse(self, data: bytes) -> Frame | None:
        path, at = str(self.path), self.good_bytes
        self.damage = CorruptData(path, at, "frame", "the file ends inside a frame")
        try:
            return parse(data, at, path)
        except CorruptData as error:
            if not is_torn(data, at):
                raise
            self.damage = error
            return None


def is_torn(data: bytes, offset: int) -> bool:
    """Whether a power loss may have left the bad frame at `offset` of a file, before its sync.

    Then it runs past the end of the file, or misses a sector, and no later group follows: nothing
    from here on was acknowledged.
    """
    try:
        if parse(data, offset, "") is None:
            return True
    except CorruptData as error:
        if error.field not in ("magic", "header", "payload"):
            return False
    size = frame_bytes(data, offset) or HEADER_BYTES
    sector = offset - offset % SECTOR_BYTES
    pieces = (
        data[max(at, offset) : at + SECTOR_BYTES]
        for at in range(sector, min(offset + size, len(data)), SECTOR_BYTES)
    )
    return not all(map(any, pieces)) and not _has_group(data, offset + 1)


def _has_group(data: bytes, at: int) -> bool:
    """Whether a whole frame that begins a group lies at `at` or behind it."""
    while (at := data.find(MAGIC, at)) >= 0:
        try:
            frame = parse(data, at, "")
        except CorruptData:
            frame = None
        if frame is not None and not follows(data, at):
            return True
        at += 1
    return False
