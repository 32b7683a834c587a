"""The learner slot of `algorithm: none`: it checks and counts batches and says that nothing trains.

It keeps the place, the actor and the data path of a learner in a run that only plays and stores.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from k3rl.errors import ConfigError, UserInputError
from k3rl.learner.protocol import Denominators, LearnStats
from k3rl.types import PackedBatch


class IdleLearner:
    """Counts what it is handed; makes no policy version, ever."""

    trains = False
    policy_version = 0

    async def forward_backward(self, batch: PackedBatch, denominators: Denominators) -> LearnStats:
        """Check that the arrays agree and count tokens; there is no gradient."""
        check_batch(batch, denominators)
        return LearnStats(len(batch.token_ids), int(batch.loss_mask.sum()))

    async def optim_step(self) -> int:
        """The version stays."""
        return self.policy_version

    async def save(self, folder: Path) -> None:
        """Refused: there is nothing to save."""
        raise ConfigError("algorithm: none has no weights to save")

    async def load(self, folder: Path) -> None:
        """Refused: there is nothing to load."""
        raise ConfigError("algorithm: none has no weights to load")


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
    if not np.all(np.isfinite(batch.rollout_logprobs[batch.loss_mask])):
        raise UserInputError("batch.rollout_logprobs: not finite at a policy token")
    if denominators.num_policy_tokens < int(batch.loss_mask.sum()):
        raise UserInputError("denominators.num_policy_tokens: less than this batch alone holds")
