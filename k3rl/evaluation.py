"""Held-out evaluation: which trajectories to play, and what they say, per environment and level.

Evaluated trajectories go the way of all others (store, workers, sandboxes) under a run id of their
own, without budgets, and are never trained on.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from k3rl import metrics
from k3rl.config import Config
from k3rl.envs.base import ToolEnv
from k3rl.groups import is_success, own_digests
from k3rl.types import Trajectory, TrajectoryHeader, TrajectoryKey

Z_95 = 1.959964
"""Two-sided 95 % quantile of the normal law."""


@dataclass(frozen=True, slots=True)
class Score:
    """How a policy does in one environment at one level under one law."""

    env_id: str
    level: str
    temperature: float
    num_tasks: int
    num_valid: int
    """Trajectories with a reward; the others are failures of the machine."""
    success: float
    """Share of valid trajectories with full reward: pass@1."""
    low: float
    high: float
    """95 % Wilson interval of `success`."""
    pass_at_k: float
    """Share of tasks that at least one of their trajectories solved."""
    k: int
    num_tokens: float
    """Mean sampled tokens of valid trajectories."""


def run_id(config: Config, name: str) -> str:
    """The run id of an evaluation's trajectories."""
    return f"{config.run.name}/eval-{name}"


def plan(
    config: Config,
    envs: dict[str, ToolEnv],
    name: str,
    digests: dict[str, str],
    capabilities: tuple[str, ...],
) -> list[TrajectoryHeader]:
    """The trajectories of evaluation `name`: T = 1 first, then greedy ones, levels side by side."""
    settings = config.evaluation
    headers = []
    for temperature, num_tasks, num_samples in (
        (1.0, settings.num_tasks, settings.num_samples),
        (0.0, settings.num_greedy_tasks, 1),
    ):
        law = f"{run_id(config, name)}-t{temperature:g}"
        for index in range(num_tasks):
            for env in config.envs:
                world = envs[env.id]
                task = world.task(settings.split, settings.first_task + index)
                own = own_digests(config, world, task)
                headers += [
                    TrajectoryHeader(
                        TrajectoryKey(law, task.key, level, index, sample),
                        task,
                        digests=digests | own,
                        capabilities=capabilities,
                        temperature=temperature,
                    )
                    for level in config.intensity.levels
                    for sample in range(num_samples)
                ]
    return headers


def scores(trajectories: Iterable[Trajectory]) -> list[Score]:
    """One score per environment, level and law."""
    cells: dict[tuple[str, str, float], list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        header = trajectory.header
        cells[header.task.env_id, header.key.level, header.temperature].append(trajectory)
    return [_score(*cell, played) for cell, played in sorted(cells.items())]


def _score(env_id: str, level: str, temperature: float, played: Sequence[Trajectory]) -> Score:
    valid = [t for t in played if t.outcome is not None and t.outcome.reward is not None]
    tasks: dict[str, list[bool]] = defaultdict(list)
    for trajectory in valid:
        tasks[trajectory.header.task.key].append(is_success(trajectory.outcome))
    num_success = sum(map(sum, tasks.values()))
    low, high = wilson(num_success, len(valid))
    return Score(
        env_id,
        level,
        temperature,
        num_tasks=len({t.header.task.key for t in played}),
        num_valid=len(valid),
        success=num_success / max(len(valid), 1),
        low=low,
        high=high,
        pass_at_k=sum(map(any, tasks.values())) / max(len(tasks), 1),
        k=max(map(len, tasks.values()), default=0),
        num_tokens=fmean(t.num_policy_tokens for t in valid) if valid else 0.0,
    )


def wilson(num_success: int, count: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927, JASA 22); (0, 1) when nothing was counted."""
    if count == 0:
        return 0.0, 1.0
    share, z2 = num_success / count, Z_95**2
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    spread = share * (1 - share) / count + z2 / (4 * count**2)
    half = Z_95 * math.sqrt(spread) / (1 + z2 / count)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def scalars(found: Iterable[Score]) -> dict[str, float]:
    """Scores as metrics."""
    values = {}
    for score in found:
        where = f"{score.env_id}/{score.level}/t{score.temperature:g}"
        values[f"{metrics.EVAL_SUCCESS}/{where}"] = score.success
        values[f"{metrics.EVAL_TOKENS}/{where}"] = score.num_tokens
    return values


def mean_success(
    found: Iterable[Score], temperature: float = 1.0, level: str | None = None
) -> float:
    """Mean over environments (and levels) of the success under one law."""
    return fmean(_cells(found, temperature, level, "success"))


def mean_tokens(
    found: Iterable[Score], temperature: float = 1.0, level: str | None = None
) -> float:
    """Mean over environments (and levels) of the sampled tokens under one law."""
    return fmean(_cells(found, temperature, level, "num_tokens"))


def _cells(found: Iterable[Score], temperature: float, level: str | None, name: str) -> list[float]:
    return [
        getattr(score, name)
        for score in found
        if score.temperature == temperature and level in (None, score.level)
    ]
