"""From stored tokens of trajectories to the micro-batches of one optimiser step.

A trajectory's contexts are sequences of their own with the same trajectory index. What follows the
last token of a context that trains cannot matter and is left out, and so are contexts without such
a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from k3rl.errors import UserInputError
from k3rl.learner.batch import scored_tokens
from k3rl.store.protocol import TokenRead
from k3rl.types import Author, BoolArray, Int32Array, PackedBatch, Span


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """One context of a trajectory: what the store holds, and the credit it gets."""

    read: TokenRead
    trajectory_index: int
    """Of the trajectory among the members of the update."""
    advantage: float
    is_anchored: bool = False
    """The loss pulls it towards the reference policy."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """A batch, and which of its tokens the agreement check may compare."""

    batch: PackedBatch
    is_fresh: BoolArray
    """[T] sampled by the learner's own version, from a state that only this version computed."""


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """All micro-batches of an optimiser step, and sums over them."""

    micro_batches: list[MicroBatch]
    num_policy_tokens: int
    """Tokens that train: what the loss is divided by."""
    num_stale_tokens: int
    """Policy tokens left out for the age of their version."""
    num_trajectories: int
    """With at least one token that trains."""
    anchored: frozenset[int] = frozenset()
    """Trajectory indices that the loss pulls towards the reference policy."""


def pack(
    stored: Iterable[Stored], *, version: int, max_staleness: int, micro_batch_tokens: int
) -> Packed:
    """Pack contexts, longest first, into batches of at most `micro_batch_tokens` tokens.

    A longer context makes a batch of its own; anchored contexts are packed apart from others.
    Tokens older than `max_staleness` versions have weight 0. Raises UserInputError for tokens of a
    version that the learner has not reached, or without a finite log-prob.
    """
    stored = list(stored)
    single = [_single(item, version, max_staleness) for item in stored]
    trains = [scored_tokens(item.batch) for item in single]
    stale = sum(
        int(item.batch.loss_mask.sum()) - int(scored.sum())
        for item, scored in zip(single, trains, strict=True)
    )
    cut = [
        _cut(item, int(np.flatnonzero(scored)[-1]) + 1)
        for item, scored in zip(single, trains, strict=True)
        if scored.any()
    ]
    indices = {int(item.batch.trajectory_index[0]) for item in cut}
    anchored = frozenset(item.trajectory_index for item in stored if item.is_anchored)
    batches = [
        join(group)
        for part in _parted(cut, anchored)
        for group in _groups(part, micro_batch_tokens)
    ]
    num_scored = sum(int(scored.sum()) for scored in trains)
    return Packed(batches, num_scored, stale, len(indices), anchored & indices)


def join(items: Sequence[MicroBatch]) -> MicroBatch:
    """Several batches as one, sequences end to end."""
    batches = [item.batch for item in items]
    lengths = np.concatenate([np.diff(batch.cu_seqlens) for batch in batches])
    names = ("token_ids", "loss_mask", "rollout_logprobs", "advantages", "token_weight")
    arrays = {
        name: np.concatenate([getattr(batch, name) for batch in batches])
        for name in (*names, "policy_version", "trajectory_index")
    }
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    batch = PackedBatch(cu_seqlens=starts, **arrays)
    return MicroBatch(batch, np.concatenate([item.is_fresh for item in items]))


def _parted(items: list[MicroBatch], anchored: frozenset[int]) -> tuple[list[MicroBatch], ...]:
    """Contexts that need the reference's log-probs, and those to be spared its forward pass."""
    is_anchored = [int(item.batch.trajectory_index[0]) in anchored for item in items]
    pairs = list(zip(items, is_anchored, strict=True))
    return [item for item, yes in pairs if yes], [item for item, yes in pairs if not yes]


def _groups(items: list[MicroBatch], most: int) -> list[list[MicroBatch]]:
    groups: list[list[MicroBatch]] = []
    room = 0
    for item in sorted(items, key=lambda item: -len(item.batch.token_ids)):
        count = len(item.batch.token_ids)
        if not groups or count > room:
            groups.append([])
            room = most
        groups[-1].append(item)
        room -= count
    return groups


def _single(item: Stored, version: int, max_staleness: int) -> MicroBatch:
    """One context as a batch of one sequence."""
    read = item.read
    count = len(read.token_ids)
    where = f"trajectory {read.ref.id}: context {read.ref.context}"
    policy = [span for span in read.spans if span.author is Author.POLICY]
    if newer := [span for span in policy if span.policy_version > version]:
        found = f"version {newer[0].policy_version} at token {newer[0].start}"
        raise UserInputError(f"{where}: {found}, but the learner is at {version}")
    if not np.all(np.isfinite(read.rollout_logprobs[read.loss_mask])):
        raise UserInputError(f"{where}: a policy token has no finite log-prob")
    versions = _per_token(read.spans, [span.policy_version for span in read.spans], count)
    states = _per_token(read.spans, [span.state_version for span in read.spans], count)
    weight = read.loss_mask & (version - versions <= max_staleness)
    batch = PackedBatch(
        token_ids=read.token_ids,
        cu_seqlens=np.array([0, count], np.int32),
        loss_mask=read.loss_mask,
        rollout_logprobs=read.rollout_logprobs,
        advantages=np.full(count, item.advantage, np.float32),
        token_weight=weight.astype(np.float32),
        policy_version=versions,
        trajectory_index=np.full(count, item.trajectory_index, np.int32),
    )
    return MicroBatch(batch, read.loss_mask & (versions == version) & (states == version))


def _per_token(spans: tuple[Span, ...], values: list[int], count: int) -> Int32Array:
    starts = [span.start for span in spans]
    return np.repeat(np.array(values, np.int32), np.diff([*starts, count]))


def _cut(item: MicroBatch, end: int) -> MicroBatch:
    """The first `end` tokens of a batch of one sequence."""
    batch = item.batch
    short = PackedBatch(
        token_ids=batch.token_ids[:end],
        cu_seqlens=np.array([0, end], np.int32),
        loss_mask=batch.loss_mask[:end],
        rollout_logprobs=batch.rollout_logprobs[:end],
        advantages=batch.advantages[:end],
        token_weight=batch.token_weight[:end],
        policy_version=batch.policy_version[:end],
        trajectory_index=batch.trajectory_index[:end],
    )
    return MicroBatch(short, item.is_fresh[:end])
