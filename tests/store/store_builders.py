"""Builders of headers, frames and steps, and a small writer that plays whole trajectories."""

from contextlib import asynccontextmanager

import numpy as np

from k3rl.blobs import BlobStore
from k3rl.store.index import LiveIndex
from k3rl.store.protocol import StepFrame
from k3rl.store.service import StoreService
from k3rl.types import (
    Author,
    FinishReason,
    Outcome,
    OutcomeKind,
    Snapshot,
    Span,
    Step,
    Task,
    TokenFrame,
    ToolCall,
    ToolRecord,
    ToolStatus,
    TrajectoryHeader,
    TrajectoryKey,
    digest_json,
)

COMPLETED = Outcome(OutcomeKind.COMPLETED, 1.0, {"correct": 1.0})


def header(number=0, run="run", parent=None):
    task = Task("k3rl/Test-v0", number)
    key = TrajectoryKey(run, task.key, "max", number // 4, number % 4)
    return TrajectoryHeader(key, task, parent=parent, digests={"env": "e"})


def policy(id, epoch, offset, count, seed=0, version=1, context=0):
    rng = np.random.default_rng([seed, offset, count])
    return TokenFrame(
        id,
        epoch,
        offset,
        rng.integers(0, 160_000, count).astype(np.int32),
        np.ones(count, bool),
        -rng.exponential(size=count).astype(np.float32),
        (Span(0, Author.POLICY, version, version),) if count else (),
        context,
    )


def environment(id, epoch, offset, count, seed=0, context=0):
    rng = np.random.default_rng([seed, offset, count, 1])
    return TokenFrame(
        id,
        epoch,
        offset,
        rng.integers(0, 160_000, count).astype(np.int32),
        np.zeros(count, bool),
        np.full(count, np.nan, np.float32),
        (Span(0, Author.ENVIRONMENT, 0, 0),) if count else (),
        context,
    )


def snapshot(id, step, layers=()):
    tree = digest_json([id, step])
    return Snapshot(f"snap-{id[:8]}-{step}", None, tuple(layers), {"cwd": "/", "n": [step]}, tree)


def step(id, epoch, index, start, acked, count=5, seed=0, context=0, layers=()):
    """A step over [start, acked) and then `count` environment tokens, with a snapshot."""
    taken = snapshot(id, index, layers)
    call = ToolCall("python", {"code": "1+1"}, 1)
    record = ToolRecord(call, ToolStatus.OK, "2\udc80", digest_json("2"), 0.25)
    return StepFrame(
        Step(
            index,
            start,
            acked + count,
            calls=(record,) if index else (),
            snapshot_after=taken.snapshot_id,
            tree_digest=taken.tree_digest,
            finish_reason=FinishReason.STOP if index else None,
            env_state={"step": index},
            context=context,
        ),
        environment(id, epoch, acked, count, seed, context) if count else None,
        taken,
    )


async def play(
    store, claim, num_steps=3, turn=130, chunk=64, note=lambda ack: None, finish=True, layers=list
):
    """Play from wherever the claim stands: step 0, then turns of policy tokens; then finish.

    `layers` is called for the layers of each step's snapshot. Returns how many tokens there are.
    """
    id, epoch = claim.header.id, claim.epoch
    for ack in claim.acks:
        note(ack)
    if claim.outcome is not None:
        return None
    acked = len(claim.tokens.token_ids) if claim.tokens is not None else 0
    steps = len(claim.steps)
    start = claim.steps[-1].token_end if claim.steps else 0
    while steps < num_steps:
        while steps and acked < start + turn:
            count = min(chunk, start + turn - acked)
            note(await store.append(policy(id, epoch, acked, count)))
            acked += count
        frame = step(id, epoch, steps, start, acked, layers=layers())
        for ack in await store.commit_step(id, epoch, frame):
            note(ack)
        acked += 5
        start, steps = acked, steps + 1
    if finish:
        await store.finish(id, epoch, COMPLETED)
    return acked


async def claim_one(store, worker="w"):
    (claim,) = await store.claim(worker, 1, [], 5.0)
    return claim


async def played(store, number=0, **options):
    """A new trajectory, played to its end; returns its id."""
    await store.begin([header(number)])
    claim = await claim_one(store, f"player-{number}")
    await play(store, claim, **options)
    return claim.header.id


@asynccontextmanager
async def service(root, url, prefix=None, **options):
    """An open service on `root`, its index under a prefix of its own."""
    index = LiveIndex.from_url(url, prefix or str(root), retry_s=2.0)
    store = StoreService(root, BlobStore(root / "blobs"), index, **options)
    await store.open()
    try:
        yield store
    finally:
        await store.aclose()
