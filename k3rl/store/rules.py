"""What a request must satisfy before it becomes an event. Every function raises StoreError."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeAlias

from k3rl.errors import StoreError
from k3rl.store.protocol import Ack, StepFrame
from k3rl.store.record import ContextRecord, TrajectoryRecord
from k3rl.types import Author, Snapshot, TokenFrame, to_plain

FindSnapshot: TypeAlias = Callable[[str], Snapshot | None]


def check_active(record: TrajectoryRecord) -> None:
    """Somebody holds the claim."""
    if record.worker_id is None:
        raise StoreError(f"trajectory {record.id} is {record.state}: claim it before writing")


def check_authors(frame: TokenFrame, author: Author) -> None:
    """All tokens are of one author: policy by append, environment by commit."""
    if any(span.author is not author for span in frame.spans):
        way = "`append`" if author is Author.POLICY else "`commit_step`"
        raise StoreError(f"trajectory {frame.id}: {way} takes tokens of the {author} only")


def check_offset(record: TrajectoryRecord, frame: TokenFrame) -> None:
    """The tokens come right after the acknowledged ones."""
    context = writable(record, frame.context)
    if frame.offset != context.acked:
        raise StoreError(
            f"trajectory {frame.id}: context {frame.context} has {context.acked} tokens, "
            f"offset {frame.offset} leaves a gap"
        )


def writable(record: TrajectoryRecord, number: int) -> ContextRecord:
    """The present context, or the next one once the present one is all committed."""
    present = record.contexts[record.context_number]
    if number == record.context_number:
        return present
    if number == record.context_number + 1 and present.acked == present.committed:
        return ContextRecord()
    raise StoreError(
        f"trajectory {record.id}: context {number} cannot be written: the present one is "
        f"{record.context_number} with {present.acked - present.committed} uncommitted tokens"
    )


def known(record: TrajectoryRecord, frame: TokenFrame) -> Ack | None:
    """The acknowledgement that these very tokens got before; None when they are new."""
    context = record.contexts.get(frame.context)
    if context is None or frame.offset >= context.acked:
        return None
    extent, ack = context.extent_at(frame.offset), ack_of(frame)
    if extent and (extent.start, extent.content_hash) == (frame.offset, ack.content_hash):
        if extent.spans != frame.spans:
            raise StoreError(
                f"trajectory {frame.id}: the tokens at offset {frame.offset} of context "
                f"{frame.context} are stored with other spans"
            )
        return ack
    raise StoreError(
        f"trajectory {frame.id}: other tokens are stored at offset {frame.offset} of "
        f"context {frame.context}"
    )


def check_step(record: TrajectoryRecord, frame: StepFrame, find: FindSnapshot) -> None:
    """The step is the next one, covers all uncommitted tokens, and its snapshot is known."""
    step, where = frame.step, f"trajectory {record.id}: step {frame.step.index}"
    if step.index != record.next_step:
        raise StoreError(f"{where}: the next one is {record.next_step}")
    context = writable(record, step.context)
    count = 0
    if frame.tokens is not None:
        count = len(frame.tokens.token_ids)
        check_authors(frame.tokens, Author.ENVIRONMENT)
        check_offset(record, frame.tokens)
    if (step.token_start, step.token_end) != (context.committed, context.acked + count):
        raise StoreError(
            f"{where}: tokens [{step.token_start}, {step.token_end}) are not "
            f"[{context.committed}, {context.acked + count})"
        )
    check_snapshot(where, frame, find)


def check_snapshot(where: str, frame: StepFrame, find: FindSnapshot) -> None:
    """The commit carries the snapshot that its step names, or names one that is stored."""
    after, snapshot = frame.step.snapshot_after, frame.snapshot
    if snapshot is None:
        if after is not None and find(after) is None:
            raise StoreError(f"{where}: snapshot {after} is unknown")
        return
    if snapshot.snapshot_id != after:
        raise StoreError(f"{where}: carries snapshot {snapshot.snapshot_id}, names {after}")
    stored = find(snapshot.snapshot_id)
    if stored is not None and not same(stored, snapshot):
        raise StoreError(f"{where}: snapshot {after} exists with another content")


def known_step(record: TrajectoryRecord, frame: StepFrame) -> list[Ack]:
    """The acknowledgements that this very step got before."""
    own = frame.step.index - (record.start.step if record.start else 0)
    if own < 0 or not same(record.steps[own], frame.step):
        raise StoreError(f"trajectory {record.id}: step {frame.step.index} was another one")
    if frame.tokens is None or not len(frame.tokens.token_ids):
        return []
    ack = known(record, frame.tokens)
    if ack is None:
        raise StoreError(
            f"trajectory {record.id}: step {frame.step.index} had no tokens at offset "
            f"{frame.tokens.offset}"
        )
    return [ack]


def ack_of(frame: TokenFrame) -> Ack:
    """What the writer of `frame` is told once it is durable."""
    content_hash = frame.content_hash()
    return Ack(frame.id, frame.context, frame.offset, len(frame.token_ids), content_hash)


def same(a: Any, b: Any) -> bool:
    """Whether two carriers say the same; a tuple and a list, two NaNs, do."""
    return json.dumps(to_plain(a), sort_keys=True) == json.dumps(to_plain(b), sort_keys=True)
