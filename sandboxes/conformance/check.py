"""What a check of the security suite is, and what becomes of it on a backend.

A check is an attack and its control: the same attack where what should contain it is missing (a
looser limit, the unconfined backend, an ordinary process of the host, a weakened expectation). It
is held when nothing of the attack gets through and the control shows that it would be seen. A
control that shows nothing makes the check worthless, whatever its attack did.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from k3rl.sandboxes.base import SandboxBackend
from k3rl.sandboxes.conformance.ground import Ground, Untried, prepared
from k3rl.sandboxes.spec import Capability

Attack = Callable[[Ground], Awaitable[str]]
"""Tries something; returns what of it got through in a few words, "" when nothing did."""
CHECK_DEADLINE_S = 90.0
NUM_TOGETHER = 4


@dataclass(frozen=True, slots=True)
class Check:
    """One attack, asked of backends that claim the capability it needs."""

    name: str
    needs: Capability | None
    """None: every backend must hold it."""
    attack: Attack
    control: Attack
    also_needs: Capability | None = None
    is_alone: bool = False
    """Whether it measures what other checks would disturb."""

    def is_asked(self, claimed: Collection[Capability]) -> bool:
        """Whether a backend that claims these must hold it."""
        return {self.needs, self.also_needs} <= {None, *claimed}


class Verdict(StrEnum):
    """What became of a check."""

    HELD = "held"
    BREACHED = "BREACHED"
    BLIND = "BLIND"
    """The control showed nothing: an error of the suite."""
    FAILED = "FAILED"
    """It did not come to an end: an error of the suite or of the machine."""
    UNTRIED = "untried"
    """This machine or user has no means to try it, or to try its control."""
    NOT_CLAIMED = "not claimed"


BAD = (Verdict.BREACHED, Verdict.BLIND, Verdict.FAILED)


@dataclass(frozen=True, slots=True)
class Finding:
    """A check's verdict on one backend."""

    name: str
    needs: Capability | None
    verdict: Verdict
    detail: str
    """What got through, what went wrong, what the control showed."""
    wall_s: float


async def examine(backend: SandboxBackend, checks: Sequence[Check]) -> list[Finding]:
    """The findings of these checks, in their order. The backend stays open.

    Raises CapabilityMissing when the backend cannot make sandboxes here.
    """
    claimed = await backend.capabilities()
    findings: dict[str, Finding] = {}
    async with prepared(backend) as ground:
        slots = asyncio.Semaphore(NUM_TOGETHER)

        async def run(check: Check) -> None:
            async with slots:
                findings[check.name] = await _judge(check, ground)

        asked = [check for check in checks if check.is_asked(claimed)]
        await asyncio.gather(*(run(check) for check in asked if not check.is_alone))
        for check in asked:
            if check.is_alone:
                await run(check)
    unclaimed = Verdict.NOT_CLAIMED
    return [
        findings.get(check.name) or Finding(check.name, check.needs, unclaimed, "", 0.0)
        for check in checks
    ]


async def _judge(check: Check, ground: Ground) -> Finding:
    begun = time.monotonic()
    verdict, detail = Verdict.HELD, ""
    try:
        async with asyncio.timeout(CHECK_DEADLINE_S):
            if breach := await check.attack(ground):
                verdict, detail = Verdict.BREACHED, breach
            elif not (detail := await check.control(ground)):
                verdict, detail = Verdict.BLIND, "the control was contained too"
    except Untried as error:
        verdict, detail = Verdict.UNTRIED, str(error)
    except TimeoutError:
        verdict, detail = Verdict.FAILED, f"took longer than {CHECK_DEADLINE_S:.0f} s"
    except Exception as error:  # whatever it is, nothing is known of this check
        verdict, detail = Verdict.FAILED, f"{type(error).__name__}: {error}"
    return Finding(check.name, check.needs, verdict, detail, time.monotonic() - begun)
