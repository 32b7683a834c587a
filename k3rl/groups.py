"""Which trajectories there are, and which to begin: groups of K of one task at one level.

Everything here is derived from the config and from what the store holds, so that a controller that
starts again begins exactly what is missing. Group g plays the same task at every level.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import cast

from k3rl.algorithms.intensity import Budgets
from k3rl.config import Config
from k3rl.envs.base import ToolEnv
from k3rl.envs.harness.drawing import harness_of
from k3rl.learner.protocol import Member
from k3rl.sections import Level, value_at
from k3rl.types import (
    Outcome,
    Task,
    Trajectory,
    TrajectoryHeader,
    TrajectoryId,
    TrajectoryKey,
    philox,
)

MIN_GROUP = 2
"""Valid members a group needs to be of use (design decision 3)."""


def has_reward(outcome: Outcome | None) -> bool:
    """Whether the ending was the policy's doing."""
    return outcome is not None and outcome.reward is not None


def is_success(outcome: Outcome | None) -> bool:
    """Whether the policy solved the task: full reward."""
    return outcome is not None and outcome.reward is not None and outcome.reward >= 1.0


def own_digests(config: Config, env: ToolEnv, task: Task) -> dict[str, str]:
    """What goes on the headers of a task's trajectories: environment, sandbox, drawn harness."""
    harness = harness_of(config.harness.model_dump(mode="json"), config.seed, task)
    return {
        "env": env.spec.digest,
        "sandbox": env.sandbox_spec.digest,
        "harness": harness.digest,
    }


@dataclass(slots=True)
class Group:
    """The K trajectories of one task at one level; the latest attempt of each sample counts."""

    members: dict[int, TrajectoryId] = field(default_factory=dict)
    budget: int | None = None
    """Of every member, whenever it is begun."""
    is_scored: bool = False
    is_consumed: bool = False
    """An update was trained on it, or nothing in it could be."""
    num_gone: int = 0
    """Members that the store let go after an update was trained on it."""


class Groups:
    """The trajectories of a run by id and by group."""

    def __init__(
        self,
        config: Config,
        envs: dict[str, ToolEnv],
        digests: dict[str, str],
        capabilities: tuple[str, ...],
    ) -> None:
        """`digests` and `capabilities` (what the sandboxes enforce) go on every header."""
        self.config, self.envs = config, envs
        self.digests, self.capabilities = digests, capabilities
        self.budgets: Budgets | None = None
        """What problems need of the cold-start policy; None until that is known."""
        self.trajectories: dict[TrajectoryId, Trajectory] = {}
        self._groups: dict[tuple[str, int], Group] = defaultdict(Group)
        self._mix: list[str] = []
        self._num_mixed: Counter[str] = Counter()

    def note(self, trajectory: Trajectory) -> None:
        """Take over what the store says of a trajectory."""
        key = trajectory.header.key
        self.trajectories[trajectory.id] = trajectory
        group = self._groups[key.level, key.group_index]
        group.budget, members = trajectory.header.budget, group.members
        known = members.get(key.sample_index)
        if known is None or self.trajectories[known].header.key.attempt <= key.attempt:
            members[key.sample_index] = trajectory.id

    def unfinished(self) -> list[Trajectory]:
        """Queued, active and paused ones."""
        return [t for t in self.trajectories.values() if t.outcome is None]

    def num_finished(self) -> Counter[str]:
        """Finished ones per level, with those that the store let go."""
        found = Counter(t.header.key.level for t in self.trajectories.values() if t.outcome)
        for (level, _), group in self._groups.items():
            found[level] += group.num_gone
        return found

    def to_begin(self, iteration: int, finished_before: Counter[str]) -> list[TrajectoryHeader]:
        """What makes N x K trajectories of every level part of this iteration.

        Groups begun in part are completed first, then whole ones are added. `finished_before`
        counts what had finished when the iteration started, so that one that is carried on after a
        kill begins no more than it would have.
        """
        settings = self.config.rollout
        finished = self.num_finished()
        headers = []
        for level in self.config.intensity.levels:
            taken = sum(t.header.key.level == level for t in self.unfinished())
            taken += finished[level] - finished_before[level]
            end = 1 + max((g for at, g in self._groups if at == level), default=-1)
            samples = range(settings.group_size)
            old = [g for g in range(end) if not self._groups[level, g].is_consumed]
            begun = {(g, s) for g in old for s in self._groups[level, g].members}
            wanted = [(g, s) for g in old for s in samples if (g, s) not in begun]
            room = settings.num_groups * settings.group_size - taken - len(wanted)
            new = range(end, end + max(room, 0) // settings.group_size)
            wanted += [(g, s) for g in new for s in samples]
            headers += [self._header(level, g, s, iteration) for g, s in wanted]
        return headers

    def score(self, iteration: int) -> list[TrajectoryHeader]:
        """Mark complete groups; returns the members to run again, once, of too broken ones."""
        again: list[TrajectoryHeader] = []
        for (level, index), group in self._complete():
            members = [self.trajectories[id] for id in group.members.values()]
            broken = [member for member in members if not has_reward(member.outcome)]
            may_retry = all(member.header.key.attempt == 0 for member in broken)
            if broken and may_retry and len(members) - len(broken) < MIN_GROUP:
                samples = [member.header.key.sample_index for member in broken]
                again += [self._header(level, index, s, iteration, attempt=1) for s in samples]
            else:
                group.is_scored = True
        return again

    def scored(self) -> list[Group]:
        """Groups whose K are complete."""
        return [group for group in self._groups.values() if group.is_scored]

    def ready(self) -> list[Group]:
        """Scored groups that no update was trained on yet."""
        return [g for g in self._groups.values() if g.is_scored and not g.is_consumed]

    def consume(self, ids: Iterable[TrajectoryId]) -> None:
        """Take over that updates were trained on these trajectories."""
        gone = set[TrajectoryId]()
        for id in ids:
            if id in self.trajectories:
                key = self.trajectories[id].header.key
                self._groups[key.level, key.group_index].is_consumed = True
            else:
                gone.add(id)
        if gone:
            self._note_gone(gone)

    def _note_gone(self, ids: set[TrajectoryId]) -> None:
        """The store let these go: their groups are not begun again."""
        size = self.config.rollout.group_size
        # Groups are begun one after the other, so none lies beyond as many as there can have been.
        for group in range(1 + max((g for _, g in self._groups), default=-1) + len(ids)):
            env = self.envs[self._env_of(group)]
            task = env.task(self.config.rollout.split, self.config.curriculum.first_task + group)
            for level in self.config.intensity.levels:
                keys = [
                    TrajectoryKey(self.config.run.name, task.key, level, group, sample, attempt)
                    for sample in range(size)
                    for attempt in range(2)
                ]
                if any(key.id in ids for key in keys):
                    found = self._groups[level, group]
                    found.is_consumed, found.num_gone = True, size - len(found.members)

    def valid(self, group: Group) -> list[Trajectory]:
        """The members whose reward counts, in the order of their samples."""
        members = [self.trajectories[id] for _, id in sorted(group.members.items())]
        return [member for member in members if has_reward(member.outcome)]

    def members(self, group: Group) -> tuple[Member, ...]:
        """What an update trains on: the valid members with their rewards."""
        valid = self.valid(group)
        rewards = [t.outcome.reward for t in valid if t.outcome and t.outcome.reward is not None]
        if self.config.objective.permute_rewards:
            rng = philox(self.config.seed, "permute", valid[0].id)
            rewards = [rewards[int(i)] for i in rng.permutation(len(rewards))]
        return tuple(Member(t.id, reward) for t, reward in zip(valid, rewards, strict=True))

    def is_dropped(self, group: Group) -> bool:
        """Whether too few of its members are valid, also after they were run again."""
        ends = [self.trajectories[id].outcome for id in group.members.values()]
        return sum(map(has_reward, ends)) < min(MIN_GROUP, len(ends))

    def is_informative(self, group: Group) -> bool:
        """Whether its rewards differ, so that a group-mean baseline leaves a gradient."""
        outcomes = [self.trajectories[id].outcome for id in group.members.values()]
        return len({o.reward for o in outcomes if o is not None and o.reward is not None}) > 1

    def _complete(self) -> Iterator[tuple[tuple[str, int], Group]]:
        for key, group in self._groups.items():
            ends = [self.trajectories[id].outcome for id in group.members.values()]
            if not group.is_scored and len(ends) == self.config.rollout.group_size and all(ends):
                yield key, group

    def _header(
        self, level: str, group: int, sample: int, iteration: int, attempt: int = 0
    ) -> TrajectoryHeader:
        env = self.envs[self._env_of(group)]
        task = env.task(self.config.rollout.split, self.config.curriculum.first_task + group)
        key = TrajectoryKey(self.config.run.name, task.key, level, group, sample, attempt)
        known = self._groups[level, group]
        budget = known.budget if known.members else self._budget(level, task, iteration)
        own = own_digests(self.config, env, task)
        return TrajectoryHeader(
            key,
            task,
            budget,
            digests=self.digests | own,
            capabilities=self.capabilities,
            iteration=iteration,
        )

    def _budget(self, level: str, task: Task, iteration: int) -> int | None:
        settings = self.config.intensity
        own = next(env.budget_multiplier for env in self.config.envs if env.id == task.env_id)
        multiplier = (settings.budget_multiplier | own).get(cast(Level, level))
        if multiplier is None:
            return settings.budget_tokens.get(cast(Level, level))
        if self.budgets is None:
            return None
        return self.budgets.budget(task, value_at(multiplier, iteration))

    def _env_of(self, group: int) -> str:
        """Each group goes to the environment furthest behind its share, so any prefix is mixed."""
        total = sum(env.weight for env in self.config.envs)
        while len(self._mix) <= group:
            share = (len(self._mix) + 1) / total
            behind = [e.weight * share - self._num_mixed[e.id] for e in self.config.envs]
            self._mix.append(self.config.envs[behind.index(max(behind))].id)
            self._num_mixed[self._mix[-1]] += 1
        return self._mix[group]
