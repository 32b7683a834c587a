"""What a PackedBatch must satisfy before anything is computed from it."""

from __future__ import annotations

import numpy as np

from k3rl.errors import UserInputError
from k3rl.learner.protocol import Denominators
from k3rl.types import PackedBatch


def check_batch(batch: PackedBatch, denominators: Denominators) -> None:
    """Raise UserInputError naming the array of a batch that breaks its contract."""
    count = len(batch.token_ids)
    names = ("loss_mask", "rollout_logprobs", "advantages", "token_weight")
    for name in (*names, "policy_version", "trajectory_index"):
        if len(getattr(batch, name)) != count:
            raise UserInputError(f"batch.{name}: {len(getattr(batch, name))} of {count} tokens")
    starts = batch.cu_seqlens
    if len(starts) < 2 or starts[0] != 0 or starts[-1] != count or np.any(np.diff(starts) <= 0):
        raise UserInputError("batch.cu_seqlens: must rise from 0 to the number of tokens")
    if np.any(batch.loss_mask[starts[:-1]]):
        raise UserInputError("batch.loss_mask: the first token of a sequence is not predicted")
    if not np.all(np.isfinite(batch.rollout_logprobs[batch.loss_mask])):
        raise UserInputError("batch.rollout_logprobs: not finite at a policy token")
    if not np.all(np.isfinite(batch.token_weight) & (batch.token_weight >= 0)):
        raise UserInputError("batch.token_weight: not finite or negative")
    scored = scored_tokens(batch)
    if not np.all(np.isfinite(batch.advantages[scored])):
        raise UserInputError("batch.advantages: not finite at a policy token")
    if denominators.num_policy_tokens < int(scored.sum()):
        raise UserInputError("denominators.num_policy_tokens: less than this batch alone holds")


def scored_tokens(batch: PackedBatch) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """[T] bool: the valid policy tokens, those that the loss and its denominator count.

    A weight of 0 takes a token out of both.
    """
    return batch.loss_mask & (batch.token_weight > 0)
