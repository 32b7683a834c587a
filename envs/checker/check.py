"""What a check of an environment is, and what becomes of it.

A check plays real sessions in real sandboxes and returns one line that says what it tried; it
raises `Broken` where the environment breaks its contract. Every check is tried on an environment
that is broken in just that way (tests/envs/broken_envs.py), so one that sees nothing is found.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from k3rl.envs.checker.case import Broken, Case, Undeclared

CHECK_DEADLINE_S = 600.0
NUM_TOGETHER = 4


class Group(StrEnum):
    """What a check is about."""

    CONTRACT = "contract"
    DETERMINISM = "determinism"
    REFERENCE = "reference policies"
    CHEATS = "known cheats"
    NORMALISERS = "normalisers"
    LEAKS = "leaks"
    SANDBOXES = "sandboxes"


class Verdict(StrEnum):
    """What became of a check."""

    PASSED = "passed"
    BROKEN = "BROKEN"
    FAILED = "FAILED"
    """It did not come to an end: an error raised by the environment or by the machine."""
    UNDECLARED = "none declared"


BAD = (Verdict.BROKEN, Verdict.FAILED)


@dataclass(frozen=True, slots=True)
class Check:
    """One promise of the contract."""

    name: str
    group: Group
    run: Callable[[Case], Awaitable[str]]
    """Returns what was tried; raises Broken or Undeclared."""
    is_alone: bool = False
    """Whether it runs by itself, after those that do not."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A check's verdict on one environment."""

    check: str
    group: Group
    verdict: Verdict
    detail: str
    """What was tried, or what is wrong."""
    wall_s: float


async def examine(case: Case, checks: Sequence[Check]) -> list[Finding]:
    """The findings of these checks, in their order; some run at the same time."""
    findings: dict[str, Finding] = {}
    slots = asyncio.Semaphore(NUM_TOGETHER)

    async def run(check: Check) -> None:
        async with slots:
            findings[check.name] = await _judge(check, case)

    await asyncio.gather(*(run(check) for check in checks if not check.is_alone))
    for check in checks:
        if check.is_alone:
            await run(check)
    return [findings[check.name] for check in checks]


async def _judge(check: Check, case: Case) -> Finding:
    begun = time.monotonic()
    verdict = Verdict.PASSED
    mine = case.apart(check.name)
    try:
        async with asyncio.timeout(CHECK_DEADLINE_S):
            detail = await check.run(mine)
    except Broken as error:
        verdict, detail = Verdict.BROKEN, str(error)
    except Undeclared as error:
        verdict, detail = Verdict.UNDECLARED, str(error)
    except TimeoutError:
        verdict, detail = Verdict.FAILED, f"took longer than {CHECK_DEADLINE_S:.0f} s"
    except Exception as error:  # whatever it is, the environment did not pass
        verdict, detail = Verdict.FAILED, f"{type(error).__name__}: {error}"
    finally:
        await mine.clear()
    wall_s = time.monotonic() - begun
    return Finding(check.name, check.group, verdict, " ".join(detail.split()), wall_s)
