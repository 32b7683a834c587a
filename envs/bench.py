"""How fast an environment's tasks are played, and what a turn costs beside its tools."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from k3rl.envs import registry
from k3rl.envs.phases import Deadlines
from k3rl.envs.sessions import INFRASTRUCTURE, Job, SessionPool
from k3rl.sandboxes.base import SandboxBackend

OVERHEAD_BAR_S = 0.001
"""Median of what one turn takes beyond the tool functions themselves."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One run over many tasks."""

    num_tasks: int
    num_solved: int
    """With full reward."""
    wall_s: float
    num_infra_faults: int
    """Attempts that the infrastructure ended, those that were tried again included."""
    num_other_faults: int
    num_left_behind: int
    """Sandboxes that were not closed."""
    overheads_s: tuple[float, ...]
    """Per turn, sorted: `act` less its tools."""

    @property
    def is_met(self) -> bool:
        """No fault, no sandbox left, and the median overhead within its bar."""
        is_clean = not (self.num_infra_faults or self.num_other_faults or self.num_left_behind)
        return is_clean and self.overhead_s(0.5) <= OVERHEAD_BAR_S

    def overhead_s(self, share: float) -> float:
        """The quantile of a turn's overhead; 0 without turns."""
        if not self.overheads_s:
            return 0.0
        return self.overheads_s[min(int(share * len(self.overheads_s)), len(self.overheads_s) - 1)]

    @property
    def mean_overhead_s(self) -> float:
        """Of all turns."""
        return statistics.fmean(self.overheads_s) if self.overheads_s else 0.0


async def measure(
    backend: SandboxBackend,
    env_id: str,
    num_tasks: int,
    concurrency: int,
    policy: str = "oracle",
    split: str = "train",
) -> Figures:
    """Play the first tasks of a split, each once, so many at a time. Raises EnvError."""
    await backend.capabilities()
    player = registry.policy(env_id, policy)
    tasks = [registry.make(env_id).task(split, index) for index in range(num_tasks)]
    jobs = [Job(task, player, lambda: registry.make(env_id)) for task in tasks]
    pool = SessionPool(backend, concurrency, Deadlines())
    began = time.perf_counter()
    results = await pool.play_all(jobs)
    wall_s = time.perf_counter() - began
    faults = [fault for result in results for fault in result.faults]
    num_infra = sum(fault.cause in INFRASTRUCTURE for fault in faults)
    played = [result.played for result in results if result.played is not None]
    return Figures(
        num_tasks=num_tasks,
        num_solved=sum((each.outcome.reward or 0.0) >= 1.0 for each in played),
        wall_s=wall_s,
        num_infra_faults=num_infra,
        num_other_faults=len(faults) - num_infra,
        num_left_behind=sum(counts.num_left_behind for counts in pool.counts.values()),
        overheads_s=tuple(sorted(o for each in played for o in each.overheads_s)),
    )
