"""Sealed files that stay open between reads.

A footer in memory costs thirty times its bytes, and a file of small trajectories has a footer of
two megabytes: so few are kept, by their size, and one reader of a file serves one thread at a time.
Of segments files only the places of pages are kept, 0.1 KB for each row group.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from k3rl.errors import CorruptData
from k3rl.store.manifest import SealedFile
from k3rl.store.pages import LEAVES, GroupRows, Plans, Unusual
from k3rl.store.parquet import open_sealed, read_groups

_ALL_LEAVES = [name for names in LEAVES.values() for name in names]
FOOTER_BYTES = 1 << 20
"""Of footers kept, as they are on disk."""
MAX_OPEN = 64
MAX_PLANS = 4096
"""Row groups whose pages are known, at about 2 KB each."""
MOST_BYTES = 1 << 26
"""Of a row group: more than a footer that is not damaged can say."""


@dataclass(slots=True)
class _Open:
    footer: pq.FileMetaData
    group_ends: list[int]
    """Rows up to the end of each row group."""
    idle: list[pq.ParquetFile] = field(default_factory=list)


class _Pages(NamedTuple):
    handle: FileIO
    places: NDArray[np.int64]
    """[groups, leaves, 2] first byte and size of each column chunk of `LEAVES`."""


class SealedFiles:
    """The sealed files of a root by path. Safe to use from several threads.

    Raises FileNotFoundError for a file that the manifest names no more, or that is gone: who read
    it as of an earlier record looks up the places again.
    """

    def __init__(self, root: Path, find: Callable[[str], SealedFile | None]) -> None:
        """`find` gives the manifest entry of a path."""
        self.root = root
        self._find = find
        self._known: OrderedDict[str, _Open] = OrderedDict()
        self._pages: OrderedDict[str, _Pages] = OrderedDict()
        self._plans: dict[tuple[str, int], Plans] = {}
        """Of row groups, the one that was read last at the end."""
        self._guard = threading.Lock()

    def read(self, path: str, groups: list[int], columns: list[str]) -> pa.Table:
        """Row groups of a file end to end; pages are checked. Raises CorruptData."""
        with self._opened(path) as (file, reader, _):
            return read_groups(self.root, file, reader, groups, columns)

    def group_rows(
        self, path: str, group: int, fields: Iterable[str], may_wait: bool = True
    ) -> GroupRows:
        """A row group of a segments file, for `fields` of `pages.LEAVES`.

        Raises Unusual for what must be read with `read`, and BlockingIOError where that would have
        to wait for the disk, although it may not.
        """
        if self._find(path) is None:
            raise self._gone(path)
        with self._guard:
            known = self._pages.get(path)
            if known is not None:
                self._pages.move_to_end(path)
        if known is None:
            if not may_wait:
                raise BlockingIOError
            known = self._locate(path)
        names = [name for field in fields for name in LEAVES[field]]
        if group >= len(known.places):
            raise Unusual(f"{len(known.places)} row groups")
        places = known.places[group, [_ALL_LEAVES.index(name) for name in names]].tolist()
        low, high = min(at for at, _ in places), max(map(sum, places))
        if not 0 <= low < high < low + MOST_BYTES:
            raise Unusual(f"a row group of {high - low} bytes")
        data = memoryview(read_at(known.handle, high - low, low, may_wait))
        chunks = {
            name: data[at - low : at - low + size]
            for name, (at, size) in zip(names, places, strict=True)
        }
        return GroupRows(chunks, self._plans_of(path, group))

    def _plans_of(self, path: str, group: int) -> Plans:
        """What earlier reads of a row group found out."""
        with self._guard:
            plans = self._plans.pop((path, group), None)
            if plans is None:
                plans = {}
                if len(self._plans) >= MAX_PLANS:
                    del self._plans[next(iter(self._plans))]
            self._plans[path, group] = plans
        return plans

    def rows(self, path: str, low: int, high: int, columns: list[str]) -> list[Any]:
        """Rows [low, high) of a file as dicts. Raises CorruptData."""
        if low >= high:
            return []
        with self._opened(path) as (file, reader, ends):
            if high > ends[-1]:
                detail = f"has {ends[-1]} rows, not {high}"
                raise CorruptData(str(self.root / path), 0, "rows", detail)
            starts = [0, *ends[:-1]]
            pairs = zip(starts, ends, strict=True)
            groups = [n for n, (start, end) in enumerate(pairs) if start < high and end > low]
            table = read_groups(self.root, file, reader, groups, columns)
        rows: list[Any] = table.slice(low - starts[groups[0]], high - low).to_pylist()
        return rows

    def group_ends(self, path: str) -> list[int]:
        """How many rows a file has up to the end of each row group; checks footer and count."""
        with self._opened(path) as (_, _, ends):
            return ends

    def forget(self, paths: Iterable[str]) -> None:
        """Files that are no more. Reads under way keep theirs."""
        with self._guard:
            for path in paths:
                self._close(path)
                self._pages.pop(path, None)

    def close(self) -> None:
        """Let go of all of them; whoever reads again opens them again."""
        with self._guard:
            for path in list(self._known):
                self._close(path)
            self._pages.clear()

    def _locate(self, path: str) -> _Pages:
        with self._opened(path) as (_, reader, _):
            places = _places(reader.metadata)
        known = _Pages(FileIO(self.root / path), places)
        with self._guard:
            self._close(path)  # its footer has served
            self._pages[path] = known
            if len(self._pages) > MAX_OPEN or self._find(path) is None:
                self._pages.popitem(last=self._find(path) is None)
        return known

    @contextmanager
    def _opened(self, path: str) -> Iterator[tuple[SealedFile, pq.ParquetFile, list[int]]]:
        file = self._find(path)
        if file is None:
            raise self._gone(path)
        with self._guard:
            known = self._known.get(path)
            reader = known.idle.pop() if known and known.idle else None
        if reader is None:
            reader = self._open(file, known.footer if known else None)
        if known is None:
            footer = reader.metadata
            sizes = (footer.row_group(n).num_rows for n in range(footer.num_row_groups))
            known = _Open(footer, list(accumulate(sizes)))
        yield file, reader, known.group_ends
        # A reader that met an error is not used again, nor one of a file that is no more.
        if self._find(path) is None:
            reader.close()
            return
        with self._guard:
            is_new = path not in self._known
            self._known.setdefault(path, known).idle.append(reader)
            self._known.move_to_end(path)
            if is_new:
                self._evict()

    def _open(self, file: SealedFile, footer: Any) -> pq.ParquetFile:
        try:
            return open_sealed(self.root, file, footer)
        except CorruptData:
            if not (self.root / file.path).exists():
                raise self._gone(file.path) from None
            raise

    def _gone(self, path: str) -> FileNotFoundError:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.root / path))

    def _evict(self) -> None:
        total = sum(known.footer.serialized_size for known in self._known.values())
        while len(self._known) > 1 and (total > FOOTER_BYTES or len(self._known) > MAX_OPEN):
            path, known = next(iter(self._known.items()))
            total -= known.footer.serialized_size
            self._close(path)

    def _close(self, path: str) -> None:
        known = self._known.pop(path, None)
        for reader in known.idle if known else ():
            reader.close()


def read_at(handle: FileIO, num_bytes: int, offset: int, may_wait: bool) -> bytes | bytearray:
    """Bytes of a file, fewer at its end.

    Raises BlockingIOError when it may not wait for the disk, and not all of them are in memory.
    """
    if may_wait:
        return os.pread(handle.fileno(), num_bytes, offset)
    data = bytearray(num_bytes)
    try:
        count = os.preadv(handle.fileno(), [data], offset, os.RWF_NOWAIT)
    except OSError as error:  # a file system may not know how to say so
        raise BlockingIOError from error
    if count < num_bytes:
        raise BlockingIOError
    return data


def _places(footer: pq.FileMetaData) -> NDArray[np.int64]:
    names = [footer.schema.column(n).path for n in range(footer.num_columns)]
    if not set(_ALL_LEAVES) <= set(names):
        return np.empty((0, len(_ALL_LEAVES), 2), np.int64)
    which = [names.index(leaf) for leaf in _ALL_LEAVES]
    found = []
    for group in map(footer.row_group, range(footer.num_row_groups)):
        chunks = [group.column(n) for n in which]
        found.append(
            [
                (c.dictionary_page_offset or c.data_page_offset, c.total_compressed_size)
                for c in chunks
            ]
        )
    return np.array(found, np.int64).reshape(-1, len(which), 2)
