"""Small sealed batches written again as one larger one, without what was dropped of them.

Rows are copied, not made again: a trajectory keeps its header, its steps, the cut into segments and
its `sealed_seq`, so that reads, exports and every past draw come out as before. What a branch
inherits stays its parent's (`branch` caps how long a chain of parents may be). The new order is by
group, then by id: trajectories of one task share their beginning, and compress better side by side.

Everything streams; in memory are the columns of the batch and a few decoded row groups.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from k3rl.errors import CorruptData
from k3rl.store.catalog import Catalog
from k3rl.store.columns import Batch
from k3rl.store.load_columns import load_batch
from k3rl.store.manifest import CommitInDoubt, Manifest, ManifestRecord, SealedFile
from k3rl.store.open_files import SealedFiles
from k3rl.store.parquet import COMPACTED, REWRITTEN, write_sealed
from k3rl.store.reorder import Reordered
from k3rl.store.schemas import schema
from k3rl.store.sealing import MAX_BATCH_TOKENS
from k3rl.store.state import StoreState

MAX_BATCH_ROWS = 200_000
"""Trajectories of one batch: the rows that its columns in memory are made of at once."""
NEVER = 1 << 62
"""As `min_batches`: small batches are left alone, however many there are."""
DEAD_SHARE = 0.2
"""A batch of which so much was dropped is written again by itself."""


class Limits(NamedTuple):
    """What becomes one batch."""

    max_tokens: int = MAX_BATCH_TOKENS
    min_batches: int = 32
    """Fewer small batches than this are left alone."""
    level: int = COMPACTED.zstd_level


@dataclass(frozen=True, slots=True)
class Rewritten:
    """New files, not named by any record yet, and what opening them gives."""

    adds: tuple[SealedFile, ...]
    removes: tuple[str, ...]
    batch: Batch | None
    """Its `seq` is still to be filled in; None: nothing was left to write."""


def plan(catalog: Catalog, limits: Limits) -> list[Batch]:
    """The batches to write again as one, oldest first; none: there is nothing to do.

    Small is what holds less than half of the most that a batch may hold.
    """
    small = [
        batch
        for batch in catalog.batches
        if _num_tokens(batch) < limits.max_tokens // 2 and len(batch) < MAX_BATCH_ROWS // 2
    ]
    if len(small) < max(limits.min_batches, 2):
        small = []
    for batch in catalog.batches:
        num_dead = batch.files["trajectories"].num_rows - len(batch)
        if num_dead >= DEAD_SHARE * batch.files["trajectories"].num_rows and batch not in small:
            small.append(batch)
    chosen: list[Batch] = []
    tokens = rows = 0
    for batch in small:
        tokens, rows = tokens + _num_tokens(batch), rows + len(batch)
        if chosen and (tokens > limits.max_tokens or rows > MAX_BATCH_ROWS):
            break
        chosen.append(batch)
    return chosen


def rewrite(
    root: Path,
    manifest: Manifest,
    batches: Sequence[Batch],
    level: int = COMPACTED.zstd_level,
    snapshots: Collection[str] = (),
    check: Callable[[], None] = lambda: None,
) -> Rewritten:
    """Write the trajectories of several batches as one. Blocking; no record is written.

    Snapshots are kept that steps name, and those of `snapshots`. `check` is called now and then: to
    stop, it raises. Raises StoreError when the disk refuses, CorruptData when what is read is not
    what was sealed; then no new file is left behind.
    """
    files = SealedFiles(root, manifest.files.get)
    adds: dict[str, SealedFile] = {}
    removes = tuple(file.path for batch in batches for file in batch.files.values())
    try:
        rows = Reordered(files, batches, snapshots)
        if not len(rows):
            return Rewritten((), removes, None)
        mark = f"{max(batch.seq for batch in batches):08d}-{secrets.token_hex(4)}"
        writers = {
            "segments": rows.segments,
            "steps": rows.steps,
            "trajectories": rows.trajectories,
            "snapshots": rows.snapshots,
        }
        for table, chunks in writers.items():
            found = chunks()
            first = next(found, None)
            if first is not None:
                name = f"{table}-{mark}{REWRITTEN}"
                steady = _checked(first, found, check)
                adds[table] = write_sealed(
                    root, name, table, steady, COMPACTED._replace(zstd_level=level)
                )
        return Rewritten(tuple(adds.values()), removes, _read_back(root, rows, adds))
    except BaseException:
        discard(root, adds.values())
        raise
    finally:
        files.close()


def rewrite_rows(
    root: Path, manifest: Manifest, table: str, level: int = COMPACTED.zstd_level
) -> Rewritten:
    """Write all files of `updates` or `versions` as one, rows in their order."""
    old = [file for _, file in manifest.files_of(table)]
    files = SealedFiles(root, manifest.files.get)

    def chunks() -> Iterator[pa.Table]:
        for file in old:
            groups = range(len(files.group_ends(file.path)))
            yield from (files.read(file.path, [group], schema(table).names) for group in groups)

    name = f"{table}-{manifest.head.seq + 1:08d}-{secrets.token_hex(4)}{REWRITTEN}"
    try:
        added = write_sealed(root, name, table, chunks(), COMPACTED._replace(zstd_level=level))
    finally:
        files.close()
    return Rewritten((added,), tuple(file.path for file in old), None)


def draft(state: StoreState, done: Rewritten) -> ManifestRecord:
    """The record by which new files take the place of old ones."""
    return replace(state.next_record(), adds=done.adds, removes=done.removes, is_upkeep=True)


def write(manifest: Manifest, record: ManifestRecord) -> ManifestRecord:
    """Write the record of a `draft`. Blocking.

    Raises StoreError, then nothing happened and the new files are gone, or CommitInDoubt.
    """
    try:
        return manifest.write(record)
    except CommitInDoubt:
        raise
    except BaseException:
        discard(manifest.root, record.adds)
        raise


def take(state: StoreState, record: ManifestRecord, done: Rewritten) -> None:
    """The record is written: what it says holds from here on."""
    batch = done.batch
    state.take(record, replace(batch, seq=record.seq) if batch is not None else None)


def discard(root: Path, adds: Iterable[SealedFile]) -> None:
    """Delete new files that no record will name."""
    for file in adds:
        (root / file.path).unlink(missing_ok=True)


def _num_tokens(batch: Batch) -> int:
    return int(batch.trajectories.num_own_tokens.sum())


def _checked(
    first: pa.Table, others: Iterator[pa.Table], check: Callable[[], None]
) -> Iterator[pa.Table]:
    yield first
    for table in others:
        check()
        yield table


def _read_back(root: Path, rows: Reordered, adds: dict[str, SealedFile]) -> Batch:
    """What opening the new files gives, which must be what they were made of."""
    again = SealedFiles(root, {file.path: file for file in adds.values()}.get)
    try:
        batch = load_batch(again, 0, adds)
    finally:
        again.close()
    moved = {"row", "first_step", "row_group"}
    for name in ("trajectories", "contexts", "segments"):
        old, new = getattr(rows, f"old_{name}"), getattr(batch, name)
        for field in fields(new):
            a, b = getattr(old, field.name), getattr(new, field.name)
            is_float = a.dtype.kind == "f"
            if field.name not in moved and not np.array_equal(a, b, equal_nan=is_float):
                path = str(root / adds["trajectories"].path)
                raise CorruptData(path, 0, f"{name}.{field.name}", "was not written as it was read")
    return batch
