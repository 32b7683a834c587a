"""From finished trajectories in the journal to sealed tables and one manifest record.

A crash at any point leaves either the old state (the journal still has everything, files that no
record names are set aside at the next start) or the new one.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from k3rl.errors import StoreError
from k3rl.store.columns import Batch
from k3rl.store.load_columns import BATCH_TABLES, load_batch
from k3rl.store.manifest import CommitInDoubt, Manifest, ManifestRecord, SealedFile
from k3rl.store.open_files import SealedFiles
from k3rl.store.parquet import BATCH_SEGMENTS, SEALED, write_sealed
from k3rl.store.protocol import SEGMENT_SLACK_TOKENS, SEGMENT_TOKENS
from k3rl.store.record import ContextRecord, TrajectoryRecord
from k3rl.store.segment_keys import SealedRow, SegmentKey, span_numbers
from k3rl.store.state import SealBatch
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
) -> tuple[ManifestRecord, Batch | None]:
    """Write the batch's tables and its manifest record; returns what opening them would give.

    Blocking. Raises StoreError when the disk refuses, or a row cannot be written down; the store
    then is as it was. Raises CommitInDoubt when the record may have been kept: then so are files.
    """
    manifest.check_writable()
    seq = manifest.head.seq + 1
    keys: defaultdict[TrajectoryId, list[SegmentKey]] = defaultdict(list)
    adds: dict[str, SealedFile] = {}
    try:
        chunks = _chunks(_segments(batch.records, files, keys))
        first = next(chunks, None)
        if first is not None:
            name = _name("segments", seq)
            adds["segments"] = write_sealed(root, name, "segments", chain([first], chunks))
        tables: dict[str, Sequence[Any]] = {
            "steps": [StepRow(r.id, step) for r in batch.records for step in r.steps],
            "trajectories": [SealedRow(r, seq, keys[r.id]) for r in batch.records],
            "snapshots": batch.snapshots,
            "updates": batch.updates,
            "versions": batch.versions,
        }
        for table, carriers in tables.items():
            if carriers:
                arrow = _arrow(table, carriers)
                adds[table] = write_sealed(root, _name(table, seq), table, [arrow])
        added = _columns(root, seq, adds) if batch.records else None
        return manifest.write(replace(record, adds=tuple(adds.values()))), added
    except CommitInDoubt:
        raise
    except BaseException:
        for file in adds.values():
            (root / file.path).unlink(missing_ok=True)
        raise


def _columns(root: Path, seq: int, adds: dict[str, SealedFile]) -> Batch:
    """Read back what is needed in memory; what cannot be read is not sealed."""
    files = SealedFiles(root, {file.path: file for file in adds.values()}.get)
    return load_batch(files, seq, {t: file for t, file in adds.items() if t in BATCH_TABLES})


def _segments(
    records: list[TrajectoryRecord],
    files: TokenFiles,
    keys: dict[TrajectoryId, list[SegmentKey]],
) -> Iterator[Segment]:
    """In the order of the file; fills `keys`."""
    row = 0
    for record in sorted(records, key=lambda r: r.id):
        for number, context in sorted(record.contexts.items()):
            for segment in _context_segments(record, number, context, files):
                count = len(segment.token_ids)
                keys[record.id].append(
                    SegmentKey(
                        number,
                        segment.token_start,
                        count,
                        *span_numbers(segment.spans, count),
                        row // SEALED.group_segments,
                        row % SEALED.group_segments,
                        bytes.fromhex(segment.content_hash),
                    )
                )
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
    """While one is compressed, the next one is read from the journal and checked."""

    def make() -> pa.Table | None:
        batch = list(islice(segments, BATCH_SEGMENTS))
        return _arrow("segments", batch) if batch else None

    with ThreadPoolExecutor(1, thread_name_prefix="k3rl-seal") as pool:
        coming = pool.submit(make)
        while (chunk := coming.result()) is not None:
            coming = pool.submit(make)
            yield chunk


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
