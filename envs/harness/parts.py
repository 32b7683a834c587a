"""A harness as plain data: what surrounds the policy beside the environment itself.

System prompt, style of the tools, management of the context, skills, notes and sub-agents are parts
that combine freely. Equal harnesses have equal digests; all of it round-trips through JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from k3rl.errors import UserInputError
from k3rl.types import Digest, digest_json, to_plain

SUMMARY_INSTRUCTION = "Context is nearly full. Sum up the work so far; only this summary is kept."


class NameCase(StrEnum):
    """How names of tools and parameters are spelled."""

    KEEP = "keep"
    CAMEL = "camel"
    """ReadSkill; of parameters readSkill."""
    SNAKE = "snake"


class Description(StrEnum):
    """What the declaration of a tool says about it."""

    PLAIN = "plain"
    """The tool's own line."""
    USAGE = "usage"
    """The line, then the names of its parameters."""
    NONE = "none"


class ContextKind(StrEnum):
    """What becomes of a context that fills up."""

    FULL = "full"
    """It grows to the task's limit."""
    COMPACTION = "compaction"
    """The policy sums it up; the summary opens the next one."""


@dataclass(frozen=True, slots=True)
class ToolStyle:
    """How tools are shown. `names` and `parameters` map own names to shown ones and win over the
    case; of those that a world does not have nothing is shown.
    """

    case: NameCase = NameCase.KEEP
    prefix: str = ""
    """Before the shown name of every tool."""
    names: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)
    descriptions: Description = Description.PLAIN
    shell: str | None = None
    """One tool of this name in place of all: its `command` is a tool's name and its arguments in
    order, quoted as in a shell."""


@dataclass(frozen=True, slots=True)
class Context:
    """What becomes of a context that fills up."""

    kind: ContextKind = ContextKind.FULL
    fraction: float = 0.7
    """Compaction: of the task's max_context_tokens; a context that holds so many is summed up."""
    instruction: str = SUMMARY_INSTRUCTION

    def __post_init__(self) -> None:
        """Hold the range of the fraction."""
        if not 0.0 < self.fraction < 1.0:
            raise UserInputError(f"harness: context fraction {self.fraction} is not in (0, 1)")


@dataclass(frozen=True, slots=True)
class Memory:
    """Notes that the policy writes and reads by tools; every new context shows them."""

    file: str = "NOTES.md"
    """What they are called."""
    max_chars: int = 2000


@dataclass(frozen=True, slots=True)
class SubAgents:
    """Tasks that the policy may give away. Who does them is frozen and out of the loss."""

    max_count: int = 2
    """Per trajectory."""
    max_turns: int = 4
    max_tokens: int = 512
    """Sampled ones, per sub-agent."""
    tools: tuple[str, ...] = ()
    """Own names of the environment's tools that they get, where it has them; else they answer."""
    prompt: str = "Do the task, then answer without a tool call."


@dataclass(frozen=True, slots=True)
class Harness:
    """What surrounds the policy. One without arguments changes nothing."""

    system_prompt: str = ""
    tools: ToolStyle = ToolStyle()
    context: Context = Context()
    skills: dict[str, str] = field(default_factory=dict)
    """Name to Markdown; the first line tells the policy what it is about."""
    memory: Memory | None = None
    sub_agents: SubAgents | None = None
    max_turns: int | None = None
    """In place of the tasks' own limit."""

    @property
    def digest(self) -> Digest:
        """Content hash."""
        return digest_json(to_plain(self))
