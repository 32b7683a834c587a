"""Token budgets per problem: what the cold-start policy needs for it, times a multiplier.

Kimi K3 report (arXiv 2607.24653, section 4): a trajectory that samples more than multiplier x b0
tokens is cut off with reward -1, and the multiplier is annealed per level. Here b0 belongs to a
kind of problem: tasks of the same environment with equal metadata.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from k3rl.errors import UserInputError
from k3rl.types import Task, Trajectory, canonical_json

MIN_CORRECT = 4
"""Correct samples that a kind of problem needs for a median of its own."""
CORRECT_REWARD = 1.0


@dataclass(frozen=True, slots=True)
class Budgets:
    """b0 in sampled tokens, all of a trajectory's turns together.

    Plain data: `k3rl.types.to_plain` and `from_plain` carry it as JSON.
    """

    kinds: dict[str, float]
    """By kind of problem (`kind_of`)."""
    environments: dict[str, float]
    """By environment id: for its kinds that are not in `kinds`."""

    def b0(self, task: Task) -> float:
        """Tokens the cold-start policy needs for the task.

        Raises UserInputError for an environment that no sample was taken of.
        """
        own = self.kinds.get(kind_of(task), self.environments.get(task.env_id))
        if own is None:
            known = ", ".join(self.environments) or "none"
            raise UserInputError(f"{task.env_id}: no budget was estimated; there are: {known}")
        return own

    def budget(self, task: Task, multiplier: float) -> int:
        """Sampled tokens allowed: multiplier x b0 rounded up, at least 1."""
        return max(1, math.ceil(multiplier * self.b0(task)))


def kind_of(task: Task) -> str:
    """The name that problems of one kind share: environment id and metadata."""
    return f"{task.env_id} {canonical_json(task.metadata).decode()}"


def estimate(trajectories: Iterable[Trajectory]) -> Budgets:
    """b0 from finished trajectories of the cold-start policy, played without budgets.

    A kind's b0 is the median length of its correct samples. A kind with fewer than MIN_CORRECT of
    them takes the largest such median of its environment, an environment without one the median
    of all its samples. Trajectories without a reward (infrastructure) are not samples.
    """
    lengths: dict[str, list[int]] = defaultdict(list)
    correct: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for trajectory in trajectories:
        task, outcome = trajectory.header.task, trajectory.outcome
        if outcome is None or outcome.reward is None:
            continue
        lengths[task.env_id].append(trajectory.num_policy_tokens)
        if outcome.reward >= CORRECT_REWARD:
            correct[task.env_id][kind_of(task)].append(trajectory.num_policy_tokens)
    kinds: dict[str, float] = {}
    environments: dict[str, float] = {}
    for env_id, samples in lengths.items():
        found = correct[env_id].items()
        own = {kind: float(median(of)) for kind, of in found if len(of) >= MIN_CORRECT}
        kinds |= own
        environments[env_id] = max(own.values(), default=float(median(samples)))
    return Budgets(kinds, environments)
