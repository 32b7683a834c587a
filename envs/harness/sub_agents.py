"""Sub-agents: another player in the same world, frozen and out of the loss.

The harness says what a sub-agent reads and which tools it has; who plays it is a `SubAgentRunner`
that the episode gives: an engine with the policy's weights, or at replay the recorded turns. What
it does in the world counts as done in the session.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from k3rl.envs.base import StepResult
from k3rl.types import Message, ToolSpec


@dataclass(frozen=True, slots=True)
class SubAgentJob:
    """One task that was given away."""

    number: int
    """From 0 within the trajectory."""
    messages: tuple[Message, ...]
    """What the sub-agent reads first."""
    tools: tuple[ToolSpec, ...]
    max_turns: int
    max_tokens: int
    act: Callable[[Message], Awaitable[StepResult]]
    """Carry out a message with calls; one without is the answer and is never carried out."""


@dataclass(frozen=True, slots=True)
class SubAgentReport:
    """What became of a job. Round-trips through JSON."""

    turns: tuple[Message, ...]
    """The sub-agent's messages, in order: all that replay needs."""
    answer: str | None
    """Of its last message; None: its turns or tokens ran out."""
    num_tokens: int = 0
    """Sampled ones."""


class SubAgentRunner(Protocol):
    """Plays a job to its end."""

    async def __call__(self, job: SubAgentJob) -> SubAgentReport:
        """Raises SandboxError and EngineError; what the sub-agent does wrong is in the report."""
        ...


class RecordedSubAgents:
    """Plays what sub-agents did once before, in their order."""

    def __init__(self, reports: tuple[SubAgentReport, ...]) -> None:
        """`reports` are those of one message of the policy."""
        self._reports = iter(reports)

    async def __call__(self, job: SubAgentJob) -> SubAgentReport:
        """The next report, its turns carried out again; more jobs than reports get no answer."""
        report = next(self._reports, SubAgentReport((), None))
        for turn in report.turns:
            if turn.tool_calls and (await job.act(turn)).terminated:
                break
        return report
