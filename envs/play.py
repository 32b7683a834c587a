"""Play one task with a scripted policy: an episode in messages, without tokens or a store.

For oracle transcripts, checks of an environment, and trying one out by hand; `SessionPool` runs
many of them. Without tokens no context fills up: a harness's compaction never comes, and nobody
plays sub-agents.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import cast

from k3rl.envs.base import Observation, ScriptedPolicy, StepResult, ToolEnv
from k3rl.envs.harness.session import turn_limit
from k3rl.envs.owned import OwnedBackend
from k3rl.envs.phases import Deadlines, Phase, within
from k3rl.errors import DeadlineExceeded, EnvError, UncapturableTree
from k3rl.sandboxes.base import Sandbox, SandboxBackend
from k3rl.sandboxes.blocking import unbroken
from k3rl.types import (
    Message,
    Outcome,
    OutcomeKind,
    Task,
    ToolRecord,
    TruncationCause,
    philox,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Played:
    """A finished play."""

    task: Task
    transcript: tuple[Message, ...]
    """The opening, then turns and what they caused, as the policy read them."""
    records: tuple[ToolRecord, ...]
    outcome: Outcome
    overheads_s: tuple[float, ...] = ()
    """Per turn: what `act` took beyond its tools."""


def cut_off(outcome: Outcome, cause: TruncationCause) -> Outcome:
    """The outcome of a session that a limit ended: graded on its final state, named truncated."""
    return replace(outcome, kind=OutcomeKind.TRUNCATED, cause=cause)


async def play(
    env: ToolEnv,
    task: Task,
    policy: ScriptedPolicy,
    backend: SandboxBackend,
    seed: int = 0,
    deadlines: Deadlines | None = None,
) -> Played:
    """Play `task` in a fresh sandbox to its end or to a limit; uses up `env`.

    Turn t draws from `philox(seed, task.key, t)`, so equal arguments give equal transcripts.
    Raises SandboxError when the infrastructure fails (DeadlineExceeded in boot and grade),
    GraderError when the grader does, EnvError for a bug of the environment or the policy.
    However it ends, the session and all of its sandboxes are closed.
    """
    return await Session(env, task, policy, backend, seed, deadlines or Deadlines()).run()


class Session:
    """One play, and where it stands. Single use."""

    def __init__(
        self,
        env: ToolEnv,
        task: Task,
        policy: ScriptedPolicy,
        backend: SandboxBackend,
        seed: int,
        deadlines: Deadlines,
    ) -> None:
        """See `play`."""
        self.env, self.task, self.policy, self.seed = env, task, policy, seed
        self.deadlines = deadlines
        self.phase = Phase.BOOT
        self.num_left_behind = 0
        """Sandboxes that no try could close."""
        self._owned = OwnedBackend(backend, deadlines.close_s)
        self._transcript: list[Message] = []
        self._records: list[ToolRecord] = []
        self._overheads_s: list[float] = []

    async def run(self) -> Played:
        """Play to the end; see `play`."""
        try:
            outcome = await self._play()
        except UncapturableTree as error:
            outcome = Outcome(OutcomeKind.POLICY_FAULT, 0.0, detail=str(error))
        finally:
            await unbroken(self._close())
        transcript, records = tuple(self._transcript), tuple(self._records)
        return Played(self.task, transcript, records, outcome, tuple(self._overheads_s))

    async def _play(self) -> Outcome:
        limits = self.deadlines
        opening = await within(limits.boot_s, Phase.BOOT, self.task, self._boot())
        self._transcript += opening.messages
        self.phase = Phase.STEP
        cause = await self._turns()
        self.phase = Phase.GRADE
        outcome = await within(limits.grade_s, Phase.GRADE, self.task, self.env.grade())
        return outcome if cause is None else cut_off(outcome, cause)

    async def _boot(self) -> Observation:
        sandbox_id = await self._owned.create(self.env.sandbox_spec, self.env.files(self.task))
        sandbox = Sandbox(cast("SandboxBackend", self._owned), sandbox_id)
        return await self.env.open(self.task, sandbox)

    async def _turns(self) -> TruncationCause | None:
        """Play turns until the world ends, or return which limit came first."""
        ends = time.monotonic() + self.task.limits.max_time_s
        for turn in range(turn_limit(self.env, self.task)):
            message = self._speak(turn)
            left_s = ends - time.monotonic()
            if left_s <= 0:
                return TruncationCause.TIME
            began = time.perf_counter()
            try:
                limit_s = min(left_s, self.deadlines.step_s)
                step = await within(limit_s, Phase.STEP, self.task, self.env.act(message))
            except DeadlineExceeded:
                self._transcript.append(message)
                return TruncationCause.TIME
            self._note(message, step, time.perf_counter() - began)
            if step.terminated:
                return None
        return TruncationCause.TURNS

    def _speak(self, turn: int) -> Message:
        rng = philox(self.seed, self.task.key, turn)
        try:
            return self.policy(self.task, tuple(self._transcript), rng)
        except Exception as error:
            whose = f"{self.task.env_id}: task {self.task.key}"
            raise EnvError(f"{whose}: the scripted policy failed: {error!r}") from error

    def _note(self, message: Message, step: StepResult, act_s: float) -> None:
        self._transcript += [message, *step.messages]
        self._records += step.records
        self._overheads_s.append(act_s - sum(record.wall_s for record in step.records))

    async def _close(self) -> None:
        """What closing refuses is no part of the play."""
        try:
            limit_s = self.deadlines.close_s
            await within(limit_s, Phase.CLOSE, self.task, self.env.close())
        except Exception as error:
            _log.warning("%s", error)
        finally:
            self.num_left_behind = await self._owned.close_all()
