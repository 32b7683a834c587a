"""The Learner contract: gradients from packed batches, then one optimiser step, one version.

A learner knows nothing of environments or rollouts: advantages and weights ride on the batch.
Denominators cover the whole optimiser step, so the gradient is the same for any micro-batch split,
packing order or number of ranks (design.md 4, invariant 5).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from k3rl.types import PackedBatch


@dataclass(frozen=True, slots=True)
class Denominators:
    """Sums over the whole optimiser step."""

    num_policy_tokens: int
    """Valid policy tokens: what the loss is divided by."""
    num_trajectories: int


@dataclass(frozen=True, slots=True)
class LearnStats:
    """What one forward_backward saw."""

    num_tokens: int
    num_policy_tokens: int
    metrics: dict[str, float] = field(default_factory=dict)


@runtime_checkable
class Learner(Protocol):
    """Turns batches into policy versions."""

    trains: bool
    """False: `algorithm: none`; batches are checked and counted, no version is ever made."""
    policy_version: int

    async def forward_backward(self, batch: PackedBatch, denominators: Denominators) -> LearnStats:
        """Accumulate gradients. Raises UserInputError for a batch whose arrays disagree."""
        ...

    async def optim_step(self) -> int:
        """Apply what was accumulated; returns the policy version, which never goes back."""
        ...

    async def save(self, folder: Path) -> None:
        """Write a checkpoint."""
        ...

    async def load(self, folder: Path) -> None:
        """Take over a checkpoint. Raises ConfigError when it does not fit."""
        ...
