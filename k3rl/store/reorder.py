"""Rows of several sealed batches in a new order, table by table, as a stream.

In memory are the columns of the batches and the row groups that were decoded last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from k3rl.errors import CorruptData
from k3rl.store.columns import Batch, Columns, Ints
from k3rl.store.open_files import SealedFiles
from k3rl.store.parquet import BATCH_SEGMENTS, COMPACTED, ROW_GROUP_ROWS
from k3rl.store.schemas import schema
from k3rl.store.tokens import ARRAYS, ArrowRows, content_hash

KEPT_BYTES = 32 << 20
"""Of decoded row groups."""
_SAME = ("num_tokens", "num_policy_tokens", "version_min", "version_max")


class Reordered:
    """Rows of several batches in their new order, table by table, in chunks."""

    def __init__(
        self, files: SealedFiles, batches: Sequence[Batch], snapshots: Collection[str]
    ) -> None:
        """By group, then by id. `snapshots`: those to keep beside what steps name."""
        self._files, self._batches = files, batches
        owner = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches])
        index = np.concatenate([np.arange(len(batch)) for batch in batches])
        every = _joined([batch.trajectories for batch in batches])
        words = np.ascontiguousarray(every.id).view(">u8").reshape(-1, 2)
        order = np.lexsort((words[:, 1], words[:, 0], every.group))
        self._owner, self._index = owner[order], index[order]
        self.old_trajectories = every.take(order)
        context_at = [batch.context_at for batch in batches]
        which, owners, self._num_contexts = _spread(self._owner, self._index, context_at)
        self.old_contexts = _pick([batch.contexts for batch in batches], which, owners)
        segment_at = [batch.segment_at for batch in batches]
        which, self._segment_owner, self._num_segments = _spread(owners, which, segment_at)
        self.old_segments = _pick([b.segments for b in batches], which, self._segment_owner)
        self._groups = _Groups(files)
        self._named = set(snapshots)

    def __len__(self) -> int:
        """Trajectories."""
        return len(self._index)

    def segments(self) -> Iterator[pa.Table]:
        """Checked against the hashes in memory."""
        paths = [b.files["segments"].path if "segments" in b.files else "" for b in self._batches]
        old, names = self.old_segments, schema("segments").names
        for low in range(0, len(old), BATCH_SEGMENTS):
            part = slice(low, low + BATCH_SEGMENTS)
            wanted = [
                (paths[owner], group, row)
                for owner, group, row in zip(
                    self._segment_owner[part].tolist(),
                    old.row_group[part].tolist(),
                    old.row[part].tolist(),
                    strict=True,
                )
            ]
            table = self._groups.take(wanted, names)
            self._check_tokens(wanted, table, old.content_hash[part])
            yield table

    def _check_tokens(
        self, wanted: list[tuple[str, int, int]], table: pa.Table, digests: NDArray[np.uint8]
    ) -> None:
        """Raises CorruptData unless the rows hold what the `trajectories` files say."""
        rows = ArrowRows(table, ARRAYS)
        for row, (digest, (path, group, _)) in enumerate(zip(digests, wanted, strict=True)):
            if content_hash(rows.tokens(row)) != digest.tobytes().hex():
                detail = f"row group {group}: tokens do not match their hash"
                raise CorruptData(str(self._files.root / path), 0, "content_hash", detail)

    def steps(self) -> Iterator[pa.Table]:
        """Notes which snapshots they name."""
        columns = self.old_trajectories
        owners = np.repeat(self._owner, columns.num_steps)
        first = np.cumsum(columns.num_steps) - columns.num_steps
        rows = np.arange(len(owners)) - np.repeat(first - columns.first_step, columns.num_steps)
        for table in self._by_row("steps", owners, rows):
            for name in ("snapshot_before", "snapshot_after"):
                self._named.update(filter(None, table.column(name).unique().to_pylist()))
            yield table

    def trajectories(self) -> Iterator[pa.Table]:
        """With their first record and with where their segments lie now."""
        target = schema("trajectories")
        ends = np.cumsum(self._num_contexts)
        segment_ends = np.append(0, np.cumsum(self._num_segments))[np.append(0, ends)]
        low = 0
        for table in self._by_row("trajectories", self._owner, self.old_trajectories.row):
            high = low + table.num_rows
            seqs = pa.array(self.old_trajectories.sealed_seq[low:high])
            lists = self._segment_lists(segment_ends[low : high + 1])
            for name, column in (("sealed_seq", seqs), ("segments", lists)):
                at = target.get_field_index(name)
                table = table.set_column(at, target.field(at), column)
            yield table
            low = high

    def snapshots(self) -> Iterator[pa.Table]:
        """Those that steps name, each once. Comes after `steps`."""
        names, done = schema("snapshots").names, set[str]()
        for batch in self._batches:
            if "snapshots" not in batch.files:
                continue
            path = batch.files["snapshots"].path
            for group in range(len(self._files.group_ends(path))):
                table = self._files.read(path, [group], names)
                ids = table.column("snapshot").to_pylist()
                kept = [n for n, id in enumerate(ids) if id in self._named and id not in done]
                done.update(ids[n] for n in kept)
                if kept:
                    yield table.take(pa.array(kept))

    def _segment_lists(self, ends: Ints) -> pa.Array:
        """The column `segments` of trajectories whose segments end there."""
        low, high = int(ends[0]), int(ends[-1])
        part, old = slice(low, high), self.old_segments
        numbers = np.repeat(self.old_contexts.number, self._num_segments)[part]
        rows = np.arange(low, high, dtype=np.int32)
        values = {
            "context": pa.array(numbers),
            "token_start": pa.array(old.start[part]),
            **{name: pa.array(getattr(old, name)[part]) for name in _SAME},
            "row_group": pa.array(rows // COMPACTED.group_segments),
            "row": pa.array(rows % COMPACTED.group_segments),
            "content_hash": _hashes(old.content_hash[part]),
        }
        kind = schema("trajectories").field("segments").type
        members = list(kind.value_type)
        arrays = [values[member.name] for member in members]
        struct = pa.StructArray.from_arrays(arrays, fields=members)
        return pa.ListArray.from_arrays(pa.array((ends - low).astype(np.int32)), struct, type=kind)

    def _by_row(self, table: str, owners: Ints, rows: Ints) -> Iterator[pa.Table]:
        names = schema(table).names
        paths = [b.files[table].path if table in b.files else "" for b in self._batches]
        ends = [np.array(self._files.group_ends(path) if path else [0]) for path in paths]
        for low in range(0, len(rows), ROW_GROUP_ROWS):
            part = slice(low, low + ROW_GROUP_ROWS)
            wanted = []
            for owner, row in zip(owners[part].tolist(), rows[part].tolist(), strict=True):
                group = int(np.searchsorted(ends[owner], row, "right"))
                first = int(ends[owner][group - 1]) if group else 0
                wanted.append((paths[owner], group, row - first))
            yield self._groups.take(wanted, names)


class _Groups:
    """Decoded row groups, the last ones kept."""

    def __init__(self, files: SealedFiles) -> None:
        self._files = files
        self._known: OrderedDict[tuple[str, int], pa.Table] = OrderedDict()
        self._num_bytes = 0

    def take(self, wanted: Sequence[tuple[str, int, int]], names: list[str]) -> pa.Table:
        """The rows (file, row group, row in it), in this order, in one piece."""
        by_group: dict[tuple[str, int], list[int]] = {}
        for at, (path, group, _) in enumerate(wanted):
            by_group.setdefault((path, group), []).append(at)
        parts = []
        for (path, group), places in by_group.items():
            table, rows = self._table(path, group, names), [wanted[at][2] for at in places]
            if max(rows) >= table.num_rows:
                where = str(self._files.root / path)
                raise CorruptData(where, 0, "rows", f"row group {group}: has {table.num_rows} rows")
            parts.append(table.take(pa.array(rows)))
        order = np.argsort([at for places in by_group.values() for at in places])
        return pa.concat_tables(parts).take(pa.array(order)).combine_chunks()

    def _table(self, path: str, group: int, names: list[str]) -> pa.Table:
        found = self._known.pop((path, group), None)
        if found is None:
            found = self._files.read(path, [group], names)
            self._num_bytes += found.nbytes
        self._known[path, group] = found
        while self._num_bytes > KEPT_BYTES and len(self._known) > 1:
            self._num_bytes -= self._known.popitem(last=False)[1].nbytes
        return found


def _spread(owners: Ints, rows: Ints, at: Sequence[Ints]) -> tuple[Ints, Ints, Ints]:
    """What lies between at[owner][row] and at[owner][row + 1] for each row.

    Returns ([M] all of it, [M] whose batch it is of, [N] how much of each row).
    """
    start, counts = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    for owner, bounds in enumerate(at):
        mine = owners == owner
        start[mine] = bounds[rows[mine]]
        counts[mine] = np.diff(bounds)[rows[mine]]
    first = np.cumsum(counts) - counts
    within = np.arange(int(counts.sum())) - np.repeat(first, counts)
    return np.repeat(start, counts) + within, np.repeat(owners, counts), counts


def _pick(tables: Sequence[Columns], rows: Ints, owners: Ints) -> Any:
    first = np.cumsum([0, *(len(table) for table in tables)])[:-1]
    return _joined(tables).take(first[owners] + rows)


def _joined(tables: Sequence[Columns]) -> Any:
    columns = (
        np.concatenate([getattr(table, field.name) for table in tables])
        for field in fields(tables[0])
    )
    return type(tables[0])(*columns)


def _hashes(digests: NDArray[np.uint8]) -> pa.Array:
    data = pa.py_buffer(np.ascontiguousarray(digests).tobytes())
    return pa.Array.from_buffers(pa.binary(32), len(digests), [None, data])
