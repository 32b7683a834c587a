"""What `k3rl envs play` prints, and how a person takes turns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

import numpy as np

from k3rl.envs.base import ScriptedPolicy
from k3rl.types import Message, Outcome, Task, ToolCall


@dataclass
class Shown:
    """A policy whose transcript is printed as it grows."""

    policy: ScriptedPolicy
    num_shown: int = 0

    def __call__(
        self, task: Task, transcript: Sequence[Message], rng: np.random.Generator
    ) -> Message:
        """The policy's turn, after what led to it."""
        self.show(transcript)
        return self.policy(task, transcript, rng)

    def show(self, transcript: Sequence[Message]) -> None:
        """Print the messages that are new."""
        for message in transcript[self.num_shown :]:
            for line in _lines(message):
                print(line, flush=True)
        self.num_shown = len(transcript)


def _lines(message: Message) -> list[str]:
    lines = [f"{message.role} thinks: {message.think}"] if message.think else []
    if message.malformed is not None:
        lines.append(f"{message.role}: malformed: {message.malformed}")
    if message.role == "tool":
        lines.append(f"{message.tool}: {message.content}")
    elif message.content or not (message.tool_calls or message.malformed):
        lines.append(f"{message.role}: {message.content}")
    for call in message.tool_calls:
        arguments = json.dumps(call.arguments) if call.raw is None else call.raw
        lines.append(f"{message.role}: /{call.tool} {arguments}")
    return lines


@dataclass
class Prompted:
    """A policy that reads its turns from lines of text."""

    lines: TextIO

    def __call__(
        self, task: Task, transcript: Sequence[Message], rng: np.random.Generator
    ) -> Message:
        """The next line as a turn; after the last one an empty message."""
        if self.lines.isatty():
            print("> ", end="", flush=True)
        line = self.lines.readline().rstrip("\n")
        if not line.startswith("/"):
            return Message("assistant", line)
        tool, _, text = line[1:].partition(" ")
        return Message("assistant", tool_calls=(_call(tool, text.strip() or "{}"),))


def _call(tool: str, text: str) -> ToolCall:
    try:
        arguments = json.loads(text)
    except ValueError:
        return ToolCall(tool, {}, 1, raw=text)
    if not isinstance(arguments, dict):
        return ToolCall(tool, {}, 1, raw=text)
    return ToolCall(tool, arguments, 1)


def print_outcome(outcome: Outcome) -> None:
    """How it ended, its reward and all parts of it."""
    how = f"{outcome.kind}" + (f" ({outcome.cause})" if outcome.cause else "")
    print(f"outcome: {how}, reward {outcome.reward:g}")
    for name, value in sorted(outcome.reward_parts.items()):
        print(f"  {name} {value:g}")
