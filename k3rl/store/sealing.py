"""From finished trajectories in the journal to sealed tables and one manifest record.

A crash at any point leaves either the old state (the journal still has everything, files that no
record names are set aside at the next start) or the new one.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from k3rl.errors import StoreError
from k3rl.store.manifest import CommitInDoubt, Manifest, ManifestRecord, SealedFile
from k3rl.store.parquet import BATCH_SEGMENTS, ROW_GROUP_SEGMENTS, write_sealed
from k3rl.store.protocol import SEGMENT_SLACK_TOKENS, SEGMENT_TOKENS
from k3rl.store.record import ContextRecord, Extent, Row, TrajectoryRecord
from k3rl.store.state import ContextExtents, SealBatch
from k3rl.store.tables import StepRow, to_table
from k3rl.store.tokens import TokenFiles, content_hash
from k3rl.types import Segment, TrajectoryId

MAX_BATCH_TOKENS = 32_000_000
"""Of one segments file: its footer stays below 1.5 MiB."""
UNWRITABLE = (pa.ArrowException, UnicodeError, OverflowError, ValueError, TypeError)
"""What Arrow makes of a value that a column cannot hold."""


def segment_ranges(start: int, end: int, step_ends: Iterable[int]) -> list[tuple[int, int]]:
    """How tokens [start, end) of a context are cut into segments.

    Each is as long as allowed, but ends at a step's end when one lies in its last 512 tokens.
    """
    ends, ranges = sorted(step_ends), []
    while start < end:
        limit = min(start + SEGMENT_TOKENS, end)
        if limit < end:
            low = limit - SEGMENT_SLACK_TOKENS
            limit = max([e for e in ends if low <= e <= limit], default=limit)
        ranges.append((start, limit))
        start = limit
    return ranges


def seal(
    root: Path, manifest: Manifest, files: TokenFiles, batch: SealBatch, record: ManifestRecord
) -> tuple[ManifestRecord, ContextExtents]:
    """Write the batch's tables and its manifest record; returns where the tokens lie now.

    Blocking. Raises StoreError when the disk refuses, or a row cannot be written down; the store
    then is as it was. Raises CommitInDoubt when the record may have been kept: then so are files.
    """
    manifest.check_writable()
    seq = manifest.head.seq + 1
    extents: dict[tuple[TrajectoryId, int], list[Extent]] = defaultdict(list)
    steps = [StepRow(r.id, step) for r in batch.records for step in r.steps]
    tables: dict[str, Sequence[Any]] = {
        "steps": steps,
        "trajectories": batch.records,
        "snapshots": batch.snapshots,
        "updates": batch.updates,
        "versions": batch.versions,
    }
    adds: list[SealedFile] = []
    try:
        name = _name("segments", seq)
        chunks = _chunks(_segments(batch.records, files, f"sealed/{name}", extents))
        first = next(chunks, None)
        if first is not None:
            adds.append(write_sealed(root, name, "segments", chain([first], chunks)))
        for table, carriers in tables.items():
            if carriers:
                arrow = _arrow(table, carriers)
                adds.append(write_sealed(root, _name(table, seq), table, [arrow]))
        return manifest.write(replace(record, adds=tuple(adds))), extents
    except CommitInDoubt:
        raise
    except BaseException:
        for file in adds:
            (root / file.path).unlink(missing_ok=True)
        raise


def _segments(
    records: list[TrajectoryRecord],
    files: TokenFiles,
    path: str,
    extents: dict[tuple[TrajectoryId, int], list[Extent]],
) -> Iterator[Segment]:
    row = 0
    for record in sorted(records, key=lambda r: r.id):
        for number, context in sorted(record.contexts.items()):
            for segment in _context_segments(record, number, context, files):
                place = Row(path, row // ROW_GROUP_SEGMENTS, row % ROW_GROUP_SEGMENTS)
                count = len(segment.token_ids)
                found = Extent(segment.token_start, count, segment.content_hash, place)
                extents[record.id, number].append(found)
                row += 1
                yield segment


def _context_segments(
    record: TrajectoryRecord, number: int, context: ContextRecord, files: TokenFiles
) -> Iterator[Segment]:
    step_ends = [step.token_end for step in record.steps if step.context == number]
    ranges = segment_ranges(context.base, context.committed, step_ends)
    for index, (start, end) in enumerate(ranges):
        tokens = files.load(list(context.pieces(start, end)))
        yield Segment(
            id=record.id,
            context=number,
            index=index,
            token_start=start,
            token_ids=tokens.token_ids,
            loss_mask=tokens.loss_mask,
            rollout_logprobs=tokens.rollout_logprobs,
            spans=tokens.spans,
            content_hash=content_hash(tokens),
        )


def _chunks(segments: Iterator[Segment]) -> Iterator[pa.Table]:
    while batch := list(islice(segments, BATCH_SEGMENTS)):
        yield _arrow("segments", batch)


def _arrow(table: str, carriers: Sequence[Any]) -> pa.Table:
    try:
        return to_table(table, carriers)
    except UNWRITABLE as error:
        if len(carriers) > 1:
            for carrier in carriers:
                _arrow(table, [carrier])
        id = getattr(carriers[0], "id", None)
        what = f"trajectory {id}" if id else repr(carriers[0])[:200]
        raise StoreError(
            f"{what}: cannot be a row of table {table}: {str(error) or type(error).__name__}; "
            "it stays in the journal, and so does all that ended after it"
        ) from error


def _name(table: str, seq: int) -> str:
    return f"{table}-{seq:08d}-{secrets.token_hex(4)}.parquet"
