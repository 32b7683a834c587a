"""Credit of a trajectory: its reward against the mean of its group."""

from __future__ import annotations

import math
from collections.abc import Sequence


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Reward minus the group's mean, not divided by a deviation (Kimi K2.5, arXiv 2602.02276).

    `rewards` are those of the valid members only. Equal rewards give exact zeros, and so does a
    single member.
    """
    if not is_informative(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def is_informative(rewards: Sequence[float]) -> bool:
    """Whether rewards differ, so that the baseline leaves a gradient."""
    return len(set(rewards)) > 1
