"""The loop, over protocols alone: it knows no Ray, no torch and no engine.

     tasks --> begin (N groups x K per level) --> store queue --> workers claim and play
                 ^                                                      | finish / pause
       next      |    finished >= lambda x N x K x levels: pause the rest with their sandboxes
     iteration   |                                                      v
                 +-- resume paused first <-- workers apply <-- trainer <-- complete groups scored

One iteration: requeue what is paused, begin whole groups until N x K trajectories per level take
part, let the workers play until the fraction lambda (`rollout.finished_fraction`) of them has
finished, pause the rest, score every group whose K are complete, train on them, and let the workers
apply the new policy version. Nothing about a trajectory is kept here that the store does not know;
`controller.json` beside it says which iteration is running, so a killed controller starts again in
the middle of it.

A worker that dies is fenced, revived and goes on; what it played resumes from its last committed
step. An error of the store or the configuration ends the run as it is.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from k3rl import evaluation, metrics
from k3rl.algorithms import intensity
from k3rl.blobs import replace_file
from k3rl.config import Config
from k3rl.envs.base import ToolEnv
from k3rl.errors import ConfigError
from k3rl.evaluation import Score
from k3rl.groups import Groups, has_reward, is_success
from k3rl.learner.protocol import Trainer, TrainerState, UpdatePlan
from k3rl.metrics import MetricsWriter
from k3rl.store.protocol import StoreStats, TrajectoryStore, check_digests
from k3rl.supervisor import Supervisor, WorkerHandle
from k3rl.types import (
    OutcomeKind,
    Trajectory,
    TrajectoryHeader,
    TrajectoryId,
    TrajectoryState,
    TruncationCause,
    from_plain,
    to_plain,
)

CHANGES_WAIT_S = 2.0
"""How long one look at the store's changes waits for the next."""


@dataclass(slots=True)
class Progress:
    """What a progress bar shows."""

    iteration: int
    num_iterations: int
    phase: str = "rollout"
    """rollout, update or evaluation."""
    policy_version: int = 0
    num_finished: int = 0
    """In this iteration."""
    num_target: int = 0
    num_scored: int = 0
    """Finished with a reward, over all iterations of this process."""
    num_success: int = 0


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run did, over everything the store holds of it."""

    trajectories: list[Trajectory]
    wall_s: float
    num_iterations: int
    num_restarts: int
    stats: StoreStats
    policy_version: int
    """0: nothing was trained."""
    evaluations: dict[int, list[Score]]
    """By the iteration before which they were made."""


@dataclass(slots=True)
class _Saved:
    """`controller.json`: what a controller that starts again needs beside the store."""

    iteration: int
    finished_before: Counter[str]
    """Per level, when the iteration started."""
    worker_ids: list[str]
    """Every worker that may still hold a claim."""


class Controller:
    """Runs iterations over a store, workers and, unless `algorithm` is none, a trainer."""

    def __init__(
        self,
        config: Config,
        store: TrajectoryStore,
        workers: list[WorkerHandle],
        trainer: Trainer | None,
        make_env: Callable[[str], ToolEnv],
        *,
        digests: dict[str, str] | None = None,
        capabilities: tuple[str, ...] = (),
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        """`make_env` builds the environments that tasks are drawn from."""
        self.config, self.store, self.trainer = config, store, trainer
        self.on_progress = on_progress
        envs = {env.id: make_env(env.id) for env in config.envs}
        self.groups = Groups(config, envs, digests or {}, capabilities)
        self.supervisor = Supervisor(
            workers, store, config.rollout.max_worker_restarts, self._note_worker
        )
        self.metrics = MetricsWriter(config.run_folder, **config.metrics.model_dump())
        self.progress = Progress(0, config.run.iterations)
        self.evaluations: dict[int, list[Score]] = {}
        self._saved = _Saved(0, Counter(), [])
        self._cursor = 0
        self._next_update = 0
        self._evaluated: dict[TrajectoryId, Trajectory | None] = {}
        """Trajectories of the present evaluation."""

    async def run(self) -> Summary:
        """All iterations, then a sealed store. Raises the first error that no restart can cure."""
        began = time.monotonic()
        settings, progress = self.config.evaluation, self.progress
        try:
            await self._recover()
            self.supervisor.start()
            if self.trainer is not None:
                await self.supervisor.guard(self._take(await self.trainer.start()))
            if settings.at_start:
                await self.supervisor.guard(self._evaluate(0))
            while progress.iteration < self.config.run.iterations:
                await self.supervisor.guard(self._iterate())
                progress.iteration += 1
                self._save(progress.iteration)
            if settings.at_end:
                await self.supervisor.guard(self._evaluate(progress.iteration))
            await self.supervisor.guard(self.supervisor.stop())
            await self.store.pin()
            unfinished = (self.store.get(t.id) for t in self.groups.unfinished())
            for trajectory in await asyncio.gather(*unfinished):
                self.groups.note(trajectory)
            stats = await self.store.stats()
        finally:
            await self.supervisor.aclose()
            self.metrics.close()
        return Summary(
            list(self.groups.trajectories.values()),
            time.monotonic() - began,
            progress.iteration,
            self.supervisor.num_restarts,
            stats,
            progress.policy_version,
            self.evaluations,
        )

    async def _iterate(self) -> None:
        began = time.monotonic()
        before = self._saved.finished_before
        self.progress.phase = "rollout"
        await self.store.requeue_paused()
        await self._begin(self.groups.to_begin(self.progress.iteration, before))
        self.progress.num_finished = (self.groups.num_finished() - before).total()
        self.progress.num_target = self._target()
        await self.supervisor.play()
        finished: list[Trajectory] = []
        while self.progress.num_finished < self.progress.num_target:
            finished += await self._take_changes(CHANGES_WAIT_S)
        await self.supervisor.pause()
        finished += await self._take_changes(0.0)
        await self._begin(self.groups.score(self.progress.iteration))
        self._estimate_budgets(self.groups.trajectories.values())
        rollout_s = time.monotonic() - began
        learned = await self._train()
        await self._report(finished, rollout_s, time.monotonic() - began, learned)

    async def _train(self) -> dict[str, float]:
        """One update on all complete groups, and its version applied; returns its metrics."""
        if self.trainer is None:
            return {}
        self.progress.phase = "update"
        self.on_progress(self.progress)
        groups = self.groups.ready()
        useful = [group for group in groups if not self.groups.is_dropped(group)]
        learned: dict[str, float] = {}
        if any(map(self.groups.is_informative, useful)):
            members = tuple(self.groups.members(group) for group in useful)
            report = await self.trainer.update(UpdatePlan(self._next_update, members))
            await self._take(report.state)
            learned = report.metrics
        for group in groups:
            group.is_consumed = True
        return learned

    async def _take(self, state: TrainerState) -> None:
        """Note where the trainer stands, and let every worker serve its version."""
        self._next_update, self.progress.policy_version = state.next_update, state.policy_version
        self.groups.consume(state.consumed)
        await self.supervisor.apply(json.dumps(state.manifest))

    def _estimate_budgets(self, played: Iterable[Trajectory]) -> None:
        """Once, from what the cold-start policy plays first: an evaluation, else iteration 0."""
        multipliers = [env.budget_multiplier for env in self.config.envs]
        multipliers.append(self.config.intensity.budget_multiplier)
        if self.groups.budgets is not None or not any(multipliers):
            return
        sampled = [t for t in played if has_reward(t.outcome) and t.header.temperature == 1.0]
        found = intensity.estimate(sampled)
        if not all(env.id in found.environments for env in self.config.envs):
            return  # An environment without a sample: the next iteration is without budgets too.
        self.groups.budgets = found
        replace_file(self._budgets_path, json.dumps(to_plain(self.groups.budgets)))

    async def _evaluate(self, iteration: int) -> None:
        """Play the held-out tasks with the present version, unless that was done before."""
        path = self.config.run_folder / f"evaluation-{iteration:04d}.json"
        if path.exists():
            self.evaluations[iteration] = from_plain(list[Score], json.loads(path.read_text()))
            return
        groups = self.groups
        planned = evaluation.plan(
            self.config, groups.envs, f"{iteration:04d}", groups.digests, groups.capabilities
        )
        self._evaluated = {header.id: None for header in planned}
        paused = await self.store.trajectories(TrajectoryState.PAUSED)
        if any(t.id in self._evaluated for t in paused):
            await self.store.requeue_paused()
        await self.store.begin(planned)
        self.progress.phase = "evaluation"
        self.progress.num_finished, self.progress.num_target = 0, len(planned)
        await self.supervisor.play()
        while None in self._evaluated.values():
            await self._take_changes(CHANGES_WAIT_S)
        await self.supervisor.pause()
        played = [t for t in self._evaluated.values() if t is not None]
        found = evaluation.scores(played)
        self.evaluations[iteration], self._evaluated = found, {}
        self._estimate_budgets(played)
        replace_file(path, json.dumps(to_plain(found, list[Score])))
        self.metrics.write(iteration, evaluation.scalars(found))

    def _target(self) -> int:
        """Lambda of all that take part, or all there are when that is fewer."""
        settings, levels = self.config.rollout, self.config.intensity.levels
        whole = settings.num_groups * settings.group_size * len(levels)
        share = round(settings.finished_fraction * whole, 6)  # 0.07 x 100 is above 7
        return min(math.ceil(share), self.progress.num_finished + len(self.groups.unfinished()))

    async def _begin(self, headers: list[TrajectoryHeader]) -> None:
        await self.store.begin(headers)
        for header in headers:
            self.groups.note(Trajectory(header, TrajectoryState.QUEUED, 0, 0))

    async def _take_changes(self, wait_s: float) -> list[Trajectory]:
        """Follow the store; returns what has newly finished."""
        changes = await self.store.changes(self._cursor, wait_s)
        self._cursor = changes.cursor
        ended = []
        for id, state in changes.items:
            known = self._evaluated.get(id) or self.groups.trajectories.get(id)
            is_ours = known is not None or id in self._evaluated
            if not is_ours or (known is not None and known.outcome):
                continue
            if state is TrajectoryState.FINISHED:
                ended.append(id)
            elif known:
                self.groups.note(replace(known, state=state))
        finished = await asyncio.gather(*map(self.store.get, ended))
        for trajectory in finished:
            if trajectory.id in self._evaluated:
                self._evaluated[trajectory.id] = trajectory
            else:
                self.groups.note(trajectory)
        self.progress.num_finished += len(finished)
        self.progress.num_scored += sum(has_reward(t.outcome) for t in finished)
        self.progress.num_success += sum(is_success(t.outcome) for t in finished)
        self.on_progress(self.progress)
        return finished

    async def _report(
        self,
        finished: list[Trajectory],
        rollout_s: float,
        wall_s: float,
        learned: dict[str, float],
    ) -> None:
        outcomes = [t.outcome for t in finished if t.outcome]
        rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
        faults = [outcome for outcome in outcomes if outcome.kind is OutcomeKind.INFRA_FAULT]
        scored = self.groups.scored()
        stats = await self.store.stats()
        self.metrics.write(
            self.progress.iteration,
            {
                metrics.SUCCESS: _mean(float(is_success(outcome)) for outcome in outcomes),
                metrics.REWARD: _mean(rewards),
                metrics.NUM_FINISHED: len(finished),
                metrics.NUM_UNFINISHED: len(self.groups.unfinished()),
                metrics.NUM_INFRA_FAULTS: len(faults),
                metrics.POLICY_TOKENS: _mean(t.num_policy_tokens for t in finished),
                metrics.STEPS: _mean(max(len(t.steps) - 1, 0) for t in finished),
                metrics.ITERATION_S: wall_s,
                metrics.ROLLOUT_S: rollout_s,
                metrics.TRAJECTORIES_PER_S: len(finished) / max(rollout_s, 1e-9),
                metrics.WORKER_RESTARTS: self.supervisor.num_restarts,
                metrics.NUM_GROUPS: len(scored),
                metrics.NUM_DROPPED_GROUPS: sum(map(self.groups.is_dropped, scored)),
                metrics.NUM_INFORMATIVE_GROUPS: sum(map(self.groups.is_informative, scored)),
                metrics.STORE_TOKENS: stats.num_tokens,
                metrics.STORE_INDEX_REBUILDS: stats.num_index_rebuilds,
                metrics.STORE_FREE_BYTES: stats.free_bytes,
                metrics.STORE_REFUSED: stats.num_refused,
                **_by_level(finished),
                **learned,
            },
        )

    async def _recover(self) -> None:
        """Take over what an earlier run of the same name left, and fence its workers."""
        present = {n: d for n, d in self.groups.digests.items() if n == "tokenizer"}
        for trajectory in await self.store.trajectories():
            if trajectory.header.key.run_id == self.config.run.name:
                check_digests(trajectory.header, present)
                self.groups.note(trajectory)
        if self._budgets_path.exists():
            self.groups.budgets = from_plain(
                intensity.Budgets, json.loads(self._budgets_path.read_text())
            )
        if self._path.exists():
            self._load()
        if not self.groups.trajectories:
            self._saved.iteration, self._saved.finished_before = 0, Counter()
        for worker_id in self._saved.worker_ids:
            await self.store.reap(worker_id)
        self._saved.worker_ids = []
        self.progress.iteration = self._saved.iteration
        await self._begin(self.groups.score(self.progress.iteration))

    @property
    def _path(self) -> Path:
        return self.config.run_folder / "controller.json"

    @property
    def _budgets_path(self) -> Path:
        return self.config.run_folder / "budgets.json"

    def _load(self) -> None:
        try:
            self._saved = from_plain(_Saved, json.loads(self._path.read_text()))
        except ValueError as error:
            raise ConfigError(
                f"{self._path}: not what a controller wrote ({error}); remove it to begin an"
                " iteration with what the store holds"
            ) from None

    def _save(self, iteration: int) -> None:
        """Note the start of an iteration."""
        self._saved.iteration, self._saved.finished_before = iteration, self.groups.num_finished()
        self._write()

    def _note_worker(self, worker_id: str) -> None:
        self._saved.worker_ids.append(worker_id)
        self._write()

    def _write(self) -> None:
        replace_file(self._path, json.dumps(to_plain(self._saved)))


def _by_level(finished: Iterable[Trajectory]) -> dict[str, float]:
    """Success, reward and tokens of each level."""
    levels: dict[str, list[Trajectory]] = {}
    for trajectory in finished:
        levels.setdefault(trajectory.header.key.level, []).append(trajectory)
    found = {}
    for level, played in levels.items():
        outcomes = [t.outcome for t in played if t.outcome]
        over = [o.cause is TruncationCause.BUDGET for o in outcomes]
        rewards = [o.reward for o in outcomes if o.reward is not None]
        found[f"{metrics.SUCCESS}/{level}"] = _mean(float(is_success(o)) for o in outcomes)
        found[f"{metrics.REWARD}/{level}"] = _mean(rewards)
        found[f"{metrics.POLICY_TOKENS}/{level}"] = _mean(t.num_policy_tokens for t in played)
        found[f"{metrics.OVER_BUDGET}/{level}"] = _mean(map(float, over))
    return found


def _mean(values: Iterable[float]) -> float:
    items = list(values)
    return sum(items) / len(items) if items else 0.0
