"""The tools that a harness adds of its own: notes, skills, sub-agents."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from k3rl.envs.harness.parts import Harness
from k3rl.envs.tools import Tool, ToolOutput
from k3rl.envs.words import nearest
from k3rl.types import JsonObject, ToolStatus


@dataclass(slots=True)
class HarnessState:
    """All that a harness must remember beside the environment; travels as plain JSON."""

    notes: str = ""
    summary: str | None = None
    """Of the contexts so far; None: there was no compaction yet."""
    is_summarising: bool = False
    """The policy was asked for a summary: its next message is that."""
    is_context_closed: bool = False
    """The summary is given; the next context has yet to be opened."""
    num_sub_agents: int = 0
    num_sub_agent_tokens: int = 0
    """Sampled by sub-agents, none of them in the loss."""
    sub_agents: list[JsonObject] = field(default_factory=list)
    """What the sub-agents of the last message did (`SubAgentReport`), for replay."""


AssignTask = Callable[[str], Awaitable[ToolOutput]]


class OwnTools:
    """Skills and notes as tools over a `HarnessState`, and what starts a sub-agent."""

    def __init__(self, harness: Harness, state: HarnessState, assign: AssignTask) -> None:
        """`assign` has a task done and returns the answer."""
        self.harness, self.state, self._assign = harness, state, assign

    def make(self) -> tuple[Tool, ...]:
        """Those that the harness has."""
        functions: list[Callable[..., Awaitable[str | ToolOutput]]] = []
        if self.harness.skills:
            functions.append(self.read_skill)
        if self.harness.memory is not None:
            functions += [self.write_notes, self.read_notes]
        if self.harness.sub_agents is not None:
            functions.append(self.assign_task)
        return tuple(Tool.of(function) for function in functions)

    async def read_skill(self, name: str) -> ToolOutput:
        """Read a skill."""
        text = self.harness.skills.get(name)
        if text is None:
            close = nearest(name, self.harness.skills)
            return ToolOutput(f"no such skill, nearest is {close}", ToolStatus.ERROR)
        return ToolOutput(text)

    async def write_notes(self, text: str) -> ToolOutput:
        """Replace your notes."""
        memory = self.harness.memory
        assert memory is not None
        if len(text) > memory.max_chars:
            return ToolOutput(f"notes hold {memory.max_chars} characters", ToolStatus.ERROR)
        self.state.notes = text
        return ToolOutput("noted")

    async def read_notes(self) -> str:
        """Read your notes."""
        return self.state.notes or "(empty)"

    async def assign_task(self, task: str) -> ToolOutput:
        """Have a sub-agent do a task."""
        return await self._assign(task)
