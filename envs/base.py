"""The ToolEnv contract: a world whose actions are assistant messages and observations tool results.

A session is single use: `open`, then `act` until terminated, then `grade`, then `close`. The async
session is the one implementation; `k3rl.envs.gym` runs the same object behind `gymnasium.Env`. An
environment knows messages, never token ids. The episode that runs it owns the sandbox: it creates
or restores it, snapshots it at every step end, and closes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from k3rl.sandboxes.base import Sandbox
from k3rl.sandboxes.spec import SandboxSpec
from k3rl.types import (
    Digest,
    JsonObject,
    Message,
    Outcome,
    Task,
    ToolRecord,
    ToolSpec,
    digest_json,
    to_plain,
)

REWARD_PARTS = ("correct", "complete", "num_steps", "format")
"""What every environment reports; one may report more."""
MAX_NORMALISERS = 5


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """What is registered: a name, how to build it, and what it needs. Round-trips through JSON."""

    id: str
    """ns/Name-vN."""
    entry_point: str
    """module:Class, imported when the environment is first made."""
    kwargs: JsonObject = field(default_factory=dict)
    nondeterministic: bool = False
    """True: replay may differ for reasons outside the trajectory."""
    reward: dict[str, float] = field(default_factory=lambda: {"correct": 1.0})
    """The reward is the sum of these parts, each times its weight."""

    @property
    def digest(self) -> Digest:
        """Content hash of the spec."""
        return digest_json(to_plain(self))


@dataclass(frozen=True, slots=True)
class Normaliser:
    """What of the tools' outputs differs from run to run, and what the policy reads instead.

    It is applied before anyone reads an output, so that transcripts and replays compare exactly.
    `hides` are two texts that it must make equal, `keeps` two that it must not: the checker tries.
    """

    name: str
    pattern: str
    """A regular expression, searched for in whole outputs."""
    replacement: str
    hides: tuple[str, str]
    keeps: tuple[str, str]

    def apply(self, text: str) -> str:
        """`text` with every match replaced."""
        return re.sub(self.pattern, self.replacement, text)


@dataclass(frozen=True, slots=True)
class Observation:
    """What the policy sees before its first turn: system and user messages."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one assistant message caused."""

    messages: tuple[Message, ...]
    """Tool results (role tool, in call order), or an error answer to a malformed message."""
    records: tuple[ToolRecord, ...]
    """One per executed call, as replay compares them."""
    terminated: bool
    """The world has ended; `messages` may then be empty. Limits are the episode's business."""


@runtime_checkable
class ToolEnv(Protocol):
    """One session of an environment."""

    spec: EnvSpec
    tools: tuple[ToolSpec, ...]
    sandbox_spec: SandboxSpec
    normalisers: tuple[Normaliser, ...]
    """At most `MAX_NORMALISERS`."""

    def task(self, split: str, index: int) -> Task:
        """The `index`-th task of a split. Equal arguments give equal tasks in any process.

        Raises UserInputError for an unknown split.
        """
        ...

    def files(self, task: Task) -> Mapping[str, bytes]:
        """What the task's fresh workspace holds."""
        ...

    async def open(
        self, task: Task, sandbox: Sandbox, state: JsonObject | None = None
    ) -> Observation:
        """Start, or with `state` carry on, a session in a sandbox that holds the right files."""
        ...

    async def act(self, message: Message) -> StepResult:
        """Carry out one assistant message. Bad calls are answered, never raised."""
        ...

    def state(self) -> JsonObject:
        """What `open` needs, beside the sandbox, to carry on from here in another process."""
        ...

    async def grade(self) -> Outcome:
        """Judge the final state. Raises GraderError only when the grader itself fails."""
        ...

    async def close(self) -> None:
        """Free what the session holds (not the sandbox)."""
        ...


class ScriptedPolicy(Protocol):
    """A policy in messages: oracles, random players, cheats. Must be a pure function."""

    def __call__(
        self, task: Task, transcript: Sequence[Message], rng: np.random.Generator
    ) -> Message:
        """The next assistant message after `transcript`, all randomness from `rng`."""
        ...
