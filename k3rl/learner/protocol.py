"""The Learner contract: gradients from packed batches, then one optimiser step, one version.

A learner knows nothing of environments or rollouts: advantages and weights ride on the batch.
Denominators cover the whole optimiser step, so the gradient is the same for any micro-batch split,
packing order or number of ranks (design.md 4, invariant 5).

The Trainer around it is what a controller talks to: it is told which trajectories to train on, by
reference, reads their tokens from the store, and answers with the next published policy version.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from k3rl.types import JsonObject, PackedBatch, TrajectoryId


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
    """Sums over the valid policy tokens of the batch, by metric name."""
    losses: tuple[float, ...] = ()
    """Per sequence of the batch: its share of the loss."""


@runtime_checkable
class Learner(Protocol):
    """Turns batches into optimiser steps on the weights it holds."""

    async def forward_backward(self, batch: PackedBatch, denominators: Denominators) -> LearnStats:
        """Accumulate gradients. Raises UserInputError for a batch whose arrays disagree."""
        ...

    async def optim_step(self, update: int) -> dict[str, float]:
        """Apply what was accumulated, by the settings of update `update`; returns metrics."""
        ...

    async def save(self, folder: Path) -> None:
        """Write a checkpoint: weights and optimiser state."""
        ...

    async def load(self, folder: Path) -> None:
        """Take over a checkpoint. Raises ConfigError when it does not fit."""
        ...


@dataclass(frozen=True, slots=True)
class Member:
    """One valid trajectory of a group, with the reward it is trained on."""

    id: TrajectoryId
    reward: float


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """What one update trains on."""

    update: int
    """Index of the update, from 0."""
    groups: tuple[tuple[Member, ...], ...]
    """Complete groups, valid members only; their mean reward is the baseline."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Where a trainer stands."""

    next_update: int
    policy_version: int
    manifest: JsonObject
    """The published version, as engines apply it."""
    consumed: tuple[TrajectoryId, ...]
    """Trajectories that updates below `next_update` were trained on."""


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What one update did."""

    state: TrainerState
    """After the update; `consumed` names only this update's trajectories."""
    metrics: dict[str, float] = field(default_factory=dict)


@runtime_checkable
class Trainer(Protocol):
    """Trains on stored trajectories and publishes policy versions."""

    async def start(self) -> TrainerState:
        """Begin, or carry on from the newest checkpoint of the run; publishes what it holds.

        Safe to call again. Raises ConfigError for weights that do not fit.
        """
        ...

    async def update(self, plan: UpdatePlan) -> UpdateReport:
        """One optimiser step, one new version, one row of the `updates` table.

        Raises UserInputError for an update out of order, EngineError when the agreement check
        finds log-probs of the engine that the learner does not reproduce.
        """
        ...
