"""Many sessions at once: bounded, fair, each closed however it ends, faults counted and not scored.

    job -> a slot, in turn with other queues -> attempt: fresh session, fresh sandbox -> result
                                                   ^ fault of the infrastructure: |
                                                   +------ within the budget -----+

What the infrastructure does wrong is tried again and then excluded; what a grader or the author of
an environment does wrong would be wrong again, so it is excluded at once. Neither is a reward, and
neither ends another session.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count

from k3rl.envs.base import ScriptedPolicy, ToolEnv
from k3rl.envs.phases import Deadlines, Phase
from k3rl.envs.play import Played, Session
from k3rl.envs.slots import FairSlots
from k3rl.errors import (
    DeadlineExceeded,
    EnvError,
    GraderError,
    K3rlError,
    SandboxError,
    UserInputError,
)
from k3rl.sandboxes.base import SandboxBackend
from k3rl.types import Outcome, OutcomeKind, Task

_log = logging.getLogger(__name__)


class Cause(StrEnum):
    """What kind of thing failed."""

    SANDBOX = "sandbox"
    DEADLINE = "deadline"
    """Of boot or grade."""
    GRADER = "grader"
    ENVIRONMENT = "environment"
    """A bug of the environment's author, or of a scripted policy's."""


INFRASTRUCTURE = frozenset({Cause.SANDBOX, Cause.DEADLINE})


@dataclass(frozen=True, slots=True)
class Job:
    """One task to be played."""

    task: Task
    policy: ScriptedPolicy
    make: Callable[[], ToolEnv]
    """A fresh session of the task's environment; every attempt takes one."""
    seed: int = 0
    queue: str = ""
    """Whom it is played for: queues share the slots. By default the environment's id."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why one attempt came to nothing."""

    phase: Phase
    cause: Cause
    incarnation: str
    detail: str

    @property
    def name(self) -> str:
        """What it is counted under, such as boot/deadline."""
        return f"{self.phase}/{self.cause}"


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a job."""

    job: Job
    played: Played | None
    """None: excluded."""
    faults: tuple[Fault, ...] = ()
    """One for each attempt that failed, in order."""

    @property
    def outcome(self) -> Outcome:
        """The play's, or without reward what its last fault was."""
        if self.played is not None:
            return self.played.outcome
        last = self.faults[-1]
        is_machine = last.cause in INFRASTRUCTURE
        kind = OutcomeKind.INFRA_FAULT if is_machine else OutcomeKind.GRADER_FAULT
        return Outcome(kind, detail=last.detail)


@dataclass(slots=True)
class Counts:
    """Of one environment's jobs. num_jobs = num_played + num_excluded + num_cancelled (+ running).

    Every failed attempt is one fault: the faults of jobs that were not cancelled add up to
    num_retries + num_excluded.
    """

    num_jobs: int = 0
    num_played: int = 0
    num_excluded: int = 0
    num_cancelled: int = 0
    num_retries: int = 0
    num_left_behind: int = 0
    """Sandboxes that could not be closed."""
    faults: Counter[str] = field(default_factory=Counter)
    """By phase and cause, such as boot/deadline."""


class SessionPool:
    """Plays jobs over one backend, `max_sessions` at a time."""

    def __init__(
        self,
        backend: SandboxBackend,
        max_sessions: int = 64,
        deadlines: Deadlines | None = None,
        max_retries: int = 2,
    ) -> None:
        """`max_retries`: further attempts of a job whose sandbox failed. Does not own `backend`."""
        if max_retries < 0:
            raise UserInputError(f"max_retries: {max_retries} is negative")
        self.backend, self.max_retries = backend, max_retries
        self.deadlines = deadlines or Deadlines()
        self.slots = FairSlots(max_sessions)
        self.counts: dict[str, Counts] = {}
        """By environment id."""
        self._numbers = count(1)

    async def play_all(self, jobs: Iterable[Job]) -> list[Result]:
        """Play all, results in the order of the jobs; cancelled, it closes what it began."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.play(job)) for job in jobs]
        return [task.result() for task in tasks]

    async def play(self, job: Job) -> Result:
        """Wait for a slot and play. A caller that is cancelled waits for the session to close."""
        counts = self.counts.setdefault(job.task.env_id, Counts())
        counts.num_jobs += 1
        try:
            async with self.slots.take(job.queue or job.task.env_id) as slot:
                result = await self._attempts(job, slot, counts)
        except asyncio.CancelledError:
            counts.num_cancelled += 1
            raise
        if result.played is None:
            counts.num_excluded += 1
        else:
            counts.num_played += 1
        return result

    async def _attempts(self, job: Job, slot: int, counts: Counts) -> Result:
        faults: list[Fault] = []
        while True:
            incarnation = f"{slot}.{next(self._numbers)}"
            found = await self._attempt(job, incarnation, counts)
            if isinstance(found, Played):
                return Result(job, found, tuple(faults))
            faults.append(found)
            counts.faults[found.name] += 1
            if found.cause not in INFRASTRUCTURE or len(faults) > self.max_retries:
                return Result(job, None, tuple(faults))
            counts.num_retries += 1

    async def _attempt(self, job: Job, incarnation: str, counts: Counts) -> Played | Fault:
        """One session. Its incarnation is the slot's number and one that no other session has."""
        session: Session | None = None
        try:
            session = Session(
                _make(job), job.task, job.policy, self.backend, job.seed, self.deadlines
            )
            return await session.run()
        except K3rlError as error:
            phase = session.phase if session else Phase.BOOT
            fault = Fault(phase, _cause(error), incarnation, str(error))
            _log.info("session %s: %s: %s", incarnation, fault.name, fault.detail)
            return fault
        finally:
            counts.num_left_behind += session.num_left_behind if session else 0


def _make(job: Job) -> ToolEnv:
    try:
        return job.make()
    except (SandboxError, EnvError):  # of an environment that needs something running
        raise
    except Exception as error:
        raise EnvError(f"{job.task.env_id}: cannot be made: {error}") from error


def _cause(error: K3rlError) -> Cause:
    if isinstance(error, DeadlineExceeded):
        return Cause.DEADLINE
    if isinstance(error, GraderError):
        return Cause.GRADER
    if isinstance(error, EnvError):
        return Cause.ENVIRONMENT
    if not isinstance(error, SandboxError):
        _log.warning("counted as a failure of the infrastructure: %r", error)
    return Cause.SANDBOX
