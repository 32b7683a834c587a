"""The phases of a session, how long each may take, and what it means when one fails.

    boot --> step, step, ... --> grade --> close

Boot and grade belong to the machine: one that outlives its deadline is an infrastructure failure.
A step belongs to the policy: one that outlives its deadline cuts the session off, as its limit of
time does. An exception that is none of k3rl's own is a bug of the environment's author and becomes
an EnvError that names whose it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from k3rl.errors import DeadlineExceeded, EnvError, K3rlError, UserInputError
from k3rl.types import Task

T = TypeVar("T")


class Phase(StrEnum):
    """Where in its life a session is."""

    BOOT = "boot"
    STEP = "step"
    GRADE = "grade"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long one session's phases may take, in seconds."""

    boot_s: float = 600.0
    """Room, a sandbox and the opening; beyond it the infrastructure has failed."""
    step_s: float = 600.0
    """One turn's tools; beyond it the session is cut off and its state is graded."""
    grade_s: float = 300.0
    """The verdict; beyond it the infrastructure has failed."""
    close_s: float = 30.0
    """Each try to close what a session holds; beyond the last it is left behind and counted."""


async def within(limit_s: float, phase: Phase, task: Task, work: Awaitable[T]) -> T:
    """`work` of a session, its failures typed.

    Raises DeadlineExceeded after `limit_s`; EnvError in place of whatever is no K3rlError, or
    blames an argument; other K3rlErrors as they are.
    """
    whose = f"{task.env_id}: task {task.key}"
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await work
    except UserInputError as error:
        raise EnvError(f"{whose}: {phase}: {error}") from error
    except K3rlError:
        raise
    except Exception as error:
        if isinstance(error, TimeoutError) and limit.expired():
            raise DeadlineExceeded(f"{whose}: {phase} took longer than {limit_s:g} s") from None
        raise EnvError(f"{whose}: {phase}: {error!r}") from error
