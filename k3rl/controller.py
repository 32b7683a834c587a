"""The loop, over protocols alone: it knows no Ray, no torch and no engine.

     tasks --> begin (N groups x K per level) --> store queue --> workers claim and play
                 ^                                                      | finish / pause
       next      |    finished >= lambda x N x K x levels: pause the rest with their sandboxes
     iteration   |                                                      v
                 +-- resume paused first <-- complete groups scored <-- changes of the store

One iteration: requeue what is paused, begin whole groups until N x K trajectories per level are
unfinished, let the workers play until the fraction lambda (`rollout.finished_fraction`) of them has
finished, pause the rest, score every group whose K are complete. Nothing about a trajectory is kept
here that the store does not know, so a killed controller starts again where the store stands.

A worker that dies is fenced (`reap`), revived and goes on; what it played resumes from its last
committed step. An error of the store or the configuration ends the run as it is.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from k3rl import metrics
from k3rl.config import Config
from k3rl.envs.base import ToolEnv
from k3rl.errors import EngineError
from k3rl.learner.protocol import Learner
from k3rl.metrics import MetricsWriter
from k3rl.store.protocol import StoreStats, TrajectoryStore
from k3rl.types import (
    Outcome,
    OutcomeKind,
    Trajectory,
    TrajectoryHeader,
    TrajectoryId,
    TrajectoryKey,
    TrajectoryState,
)

T = TypeVar("T")
MIN_GROUP = 2
"""Valid members a group needs to be of use (design decision 3)."""
CHANGES_WAIT_S = 2.0


class WorkerLost(Exception):
    """A worker's process is gone; its handle can be revived."""


class WorkerHandle(Protocol):
    """A rollout worker, here or elsewhere. Calls raise WorkerLost when its process is gone."""

    name: str

    async def run(self, worker_id: str) -> None:
        """Play until stopped."""
        ...

    async def pause(self) -> None:
        """Give everything back."""
        ...

    async def resume(self) -> None:
        """Claim again."""
        ...

    async def stop(self) -> None:
        """End `run`."""
        ...

    async def revive(self) -> None:
        """Stand up a new process after WorkerLost."""
        ...


@dataclass(slots=True)
class Progress:
    """What a progress bar shows."""

    iteration: int
    num_iterations: int
    num_finished: int = 0
    num_target: int = 0
    num_scored: int = 0
    """Finished with a reward, over all iterations of this process."""
    num_success: int = 0
    num_restarts: int = 0


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run did, over everything the store holds of it."""

    trajectories: list[Trajectory]
    wall_s: float
    num_iterations: int
    num_restarts: int
    stats: StoreStats
    trains: bool


@dataclass(slots=True)
class _Group:
    """The K trajectories of one task at one level; the latest attempt of each sample counts."""

    members: dict[int, TrajectoryId] = field(default_factory=dict)
    is_scored: bool = False


class Controller:
    """Runs iterations over a store, workers and a learner slot."""

    def __init__(
        self,
        config: Config,
        store: TrajectoryStore,
        workers: list[WorkerHandle],
        learner: Learner,
        make_env: Callable[[str], ToolEnv],
        *,
        digests: dict[str, str] | None = None,
        capabilities: tuple[str, ...] = (),
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        """`make_env` builds the environments tasks are drawn from; `digests` and
        `capabilities` (what the sandboxes enforce) go on every header.
        """
        self.config, self.store, self.workers, self.learner = config, store, workers, learner
        self.digests, self.capabilities = digests or {}, capabilities
        self.on_progress = on_progress
        self.metrics = MetricsWriter(config.run_folder, **config.metrics.model_dump())
        self.envs = {env.id: make_env(env.id) for env in config.envs}
        self.trajectories: dict[TrajectoryId, Trajectory] = {}
        self.groups: dict[tuple[str, int], _Group] = defaultdict(_Group)
        self.progress = Progress(0, config.run.iterations)
        self._cursor = 0
        self._mix: list[str] = []
        self._num_mixed: Counter[str] = Counter()
        self._incarnation: dict[str, int] = defaultdict(int)

    async def run(self) -> Summary:
        """All iterations, then a sealed store. Raises the first error that no restart can cure."""
        began = time.monotonic()
        await self._recover()
        supervisors = [asyncio.create_task(self._supervise(worker)) for worker in self.workers]
        try:
            while self.progress.iteration < self.config.run.iterations:
                await self._or_failure(self._iterate(), supervisors)
                self.progress.iteration += 1
                self._save_iteration()
            await self._or_failure(self._each_worker("stop"), supervisors)
            await asyncio.gather(*supervisors)
            await self.store.pin()
            stats = await self.store.stats()
        finally:
            for task in supervisors:
                task.cancel()
            self.metrics.close()
        return Summary(
            list(self.trajectories.values()),
            time.monotonic() - began,
            self.progress.iteration,
            self.progress.num_restarts,
            stats,
            self.learner.trains,
        )

    async def _iterate(self) -> None:
        began = time.monotonic()
        await self.store.requeue_paused()
        await self._begin_groups()
        levels = self.config.intensity.levels
        target = self.config.rollout.num_groups * self.config.rollout.group_size * len(levels)
        unfinished = len(self._unfinished())
        self.progress.num_target = math.ceil(self.config.rollout.finished_fraction * target)
        self.progress.num_target = min(self.progress.num_target, unfinished)
        self.progress.num_finished = 0
        await self._each_worker("resume")
        finished = await self._wait_until_finished()
        await self._each_worker("pause")
        finished += await self._take_changes(0.0)
        await self._score_groups()
        await self._report(finished, time.monotonic() - began)

    async def _begin_groups(self) -> None:
        """Begin whole groups until every level has N x K unfinished trajectories."""
        settings = self.config.rollout
        headers: list[TrajectoryHeader] = []
        for level in self.config.intensity.levels:
            active = sum(t.header.key.level == level for t in self._unfinished())
            next_group = 1 + max((g for at, g in self.groups if at == level), default=-1)
            wanted = settings.num_groups * settings.group_size - active
            for group in range(next_group, next_group + max(wanted, 0) // settings.group_size):
                samples = range(settings.group_size)
                headers += [self._header(level, group, sample) for sample in samples]
        await self._begin(headers)

    async def _begin(self, headers: list[TrajectoryHeader]) -> None:
        await self.store.begin(headers)
        for header in headers:
            self._note(Trajectory(header, TrajectoryState.QUEUED, 0, 0))

    def _header(self, level: str, group: int, sample: int, attempt: int = 0) -> TrajectoryHeader:
        """Group g plays task g of its environment, at every level the same one."""
        env = self.envs[self._env_of(group)]
        task = env.task(self.config.rollout.split, self.config.curriculum.first_task + group)
        key = TrajectoryKey(self.config.run.name, task.key, level, group, sample, attempt)
        budget = self.config.intensity.budget_tokens.get(level)  # type: ignore[call-overload]
        own = {"env": env.spec.digest, "sandbox": env.sandbox_spec.digest}
        return TrajectoryHeader(
            key,
            task,
            budget,
            digests=self.digests | own,
            capabilities=self.capabilities,
            iteration=self.progress.iteration,
        )

    def _env_of(self, group: int) -> str:
        """Each group goes to the environment furthest behind its share, so any prefix is mixed."""
        total = sum(env.weight for env in self.config.envs)
        while len(self._mix) <= group:
            share = (len(self._mix) + 1) / total
            behind = [e.weight * share - self._num_mixed[e.id] for e in self.config.envs]
            self._mix.append(self.config.envs[behind.index(max(behind))].id)
            self._num_mixed[self._mix[-1]] += 1
        return self._mix[group]

    async def _wait_until_finished(self) -> list[Trajectory]:
        finished: list[Trajectory] = []
        while len(finished) < self.progress.num_target:
            finished += await self._take_changes(CHANGES_WAIT_S)
        return finished

    async def _take_changes(self, wait_s: float) -> list[Trajectory]:
        """Follow the store; returns what has newly finished."""
        changes = await self.store.changes(self._cursor, wait_s)
        self._cursor = changes.cursor
        finished = []
        for id, state in changes.items:
            known = self.trajectories.get(id)
            if known and known.outcome:
                continue
            if state is TrajectoryState.FINISHED:
                finished.append(await self.store.get(id))
                self._note(finished[-1])
            elif known:
                self._note(replace(known, state=state))
        self.progress.num_finished += len(finished)
        self.progress.num_scored += sum(has_reward(t.outcome) for t in finished)
        self.progress.num_success += sum(is_success(t.outcome) for t in finished)
        self.on_progress(self.progress)
        return finished

    async def _score_groups(self) -> None:
        """Mark complete groups; run again, once, the members of one with too few valid ones."""
        again: list[TrajectoryHeader] = []
        for (level, index), group in self.groups.items():
            members = [self.trajectories[id] for id in group.members.values()]
            if group.is_scored or not all(member.outcome for member in members):
                continue
            broken = [m for m in members if m.outcome and m.outcome.reward is None]
            may_retry = all(member.header.key.attempt == 0 for member in broken)
            if broken and may_retry and len(members) - len(broken) < MIN_GROUP:
                samples = [member.header.key.sample_index for member in broken]
                again += [self._header(level, index, sample, attempt=1) for sample in samples]
            else:
                group.is_scored = True
        await self._begin(again)

    async def _report(self, finished: list[Trajectory], wall_s: float) -> None:
        outcomes = [t.outcome for t in finished if t.outcome]
        rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
        scored = [group for group in self.groups.values() if group.is_scored]
        stats = await self.store.stats()
        self.metrics.write(
            self.progress.iteration,
            {
                metrics.SUCCESS: _mean(float(is_success(outcome)) for outcome in outcomes),
                metrics.REWARD: _mean(rewards),
                metrics.NUM_FINISHED: len(finished),
                metrics.NUM_PAUSED: len(self._unfinished()),
                metrics.NUM_INFRA_FAULTS: sum(
                    outcome.kind is OutcomeKind.INFRA_FAULT for outcome in outcomes
                ),
                metrics.POLICY_TOKENS: _mean(t.num_policy_tokens for t in finished),
                metrics.STEPS: _mean(len(t.steps) - 1 for t in finished),
                metrics.ITERATION_S: wall_s,
                metrics.TRAJECTORIES_PER_S: len(finished) / max(wall_s, 1e-9),
                metrics.WORKER_RESTARTS: self.progress.num_restarts,
                metrics.NUM_GROUPS: len(scored),
                metrics.NUM_INFORMATIVE_GROUPS: sum(self._is_informative(g) for g in scored),
                metrics.STORE_TOKENS: stats.num_tokens,
                metrics.STORE_INDEX_REBUILDS: stats.num_index_rebuilds,
            },
        )

    def _is_informative(self, group: _Group) -> bool:
        """Whether its rewards differ, so that a group-mean baseline leaves a gradient."""
        outcomes = [self.trajectories[id].outcome for id in group.members.values()]
        return len({outcome.reward for outcome in outcomes if outcome and outcome.reward}) > 1

    async def _supervise(self, worker: WorkerHandle) -> None:
        """Keep one worker running: a lost process is fenced, revived and started again."""
        while True:
            worker_id = f"{worker.name}-{self._incarnation[worker.name]}-{os.getpid()}"
            try:
                await worker.run(worker_id)
                return
            except WorkerLost as error:
                await self.store.reap(worker_id)
                self._incarnation[worker.name] += 1
                self.progress.num_restarts += 1
                if self.progress.num_restarts > self.config.rollout.max_worker_restarts:
                    raise EngineError(
                        f"worker {worker.name}: lost {self.progress.num_restarts} times in this"
                        f" run (rollout.max_worker_restarts): {error}"
                    ) from None
                await worker.revive()

    async def _each_worker(self, verb: str) -> None:
        async def tell(worker: WorkerHandle) -> None:
            try:
                await getattr(worker, verb)()
            except WorkerLost:
                # Its supervisor revives it; a new process holds nothing and starts unpaused, so
                # a pause has to be said again, and the other verbs hold already.
                if verb != "resume":
                    await worker.revive()
                    await getattr(worker, verb)()

        await asyncio.gather(*(tell(worker) for worker in self.workers))

    async def _or_failure(
        self, work: Coroutine[Any, Any, T], supervisors: list[asyncio.Task[None]]
    ) -> T:
        """`work`, unless a supervisor fails first: then its error."""
        task = asyncio.create_task(work)
        waiting: set[asyncio.Task[Any]] = {task, *supervisors}
        try:
            while not task.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for finished in done - {task}:
                    await finished
            return await task
        finally:
            task.cancel()

    async def _recover(self) -> None:
        """Take over what an earlier run of the same name left in the store."""
        for trajectory in await self.store.trajectories():
            self._note(trajectory)
        path = self.config.run_folder / "iteration.json"
        if path.exists() and self.trajectories:
            self.progress.iteration = int(json.loads(path.read_text())["next"])
        await self._score_groups()

    def _save_iteration(self) -> None:
        path = self.config.run_folder / "iteration.json"
        temp = path.with_suffix(".tmp")
        temp.write_text(json.dumps({"next": self.progress.iteration}))
        os.replace(temp, path)

    def _note(self, trajectory: Trajectory) -> None:
        key = trajectory.header.key
        self.trajectories[trajectory.id] = trajectory
        members = self.groups[key.level, key.group_index].members
        known = members.get(key.sample_index)
        if known is None or self.trajectories[known].header.key.attempt <= key.attempt:
            members[key.sample_index] = trajectory.id

    def _unfinished(self) -> list[Trajectory]:
        return [t for t in self.trajectories.values() if t.outcome is None]


def has_reward(outcome: Outcome | None) -> bool:
    """Whether the ending was the policy's doing."""
    return outcome is not None and outcome.reward is not None


def is_success(outcome: Outcome | None) -> bool:
    """Whether the policy solved the task: full reward."""
    return outcome is not None and outcome.reward is not None and outcome.reward >= 1.0


def _mean(values: Iterable[float]) -> float:
    items = list(values)
    return sum(items) / len(items) if items else 0.0
