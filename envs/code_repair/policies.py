"""Scripted policies of k3rl/CodeRepair-v0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from k3rl.envs.code_repair.env import workspace_of
from k3rl.types import JSON, Message, Task, ToolCall


def call(tool: str, think: str = "", **arguments: JSON) -> Message:
    """A message of one call."""
    return Message("assistant", think=think, tool_calls=(ToolCall(tool, dict(arguments), 1),))


def _done(transcript: Sequence[Message]) -> list[tuple[str, object]]:
    calls = [each for message in transcript for each in message.tool_calls]
    return [(each.tool, each.arguments) for each in calls]


def oracle(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """Write the right source, run the public tests, submit. It can take over anywhere."""
    wanted = workspace_of(task)
    repair = call("write", "repair", path=wanted.broken, content=wanted.repaired)
    expected = _done([repair, call("run_tests")])
    done = _done(transcript)
    if done[-2:] == expected:
        (submit,) = call("submit").tool_calls
        return Message("assistant", "The bug is repaired.", think="done", tool_calls=(submit,))
    return call("run_tests", "check") if done[-1:] == expected[:1] else repair


def random(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """Calls of every tool, few of which are of use."""
    path = str(rng.choice([workspace_of(task).broken, "notes.txt", "tests", "../x"]))
    number = int(rng.integers(10))
    calls = (
        call("view", path=path),
        call("replace", path=path, old=f" {number}", new=f" {number + 1}"),
        call("write", path="notes.txt", content=f"try {number}\n"),
        call("python", code=str(rng.choice([f"print({number})", "import solution", "1/0", "x ="]))),
        call("run_tests"),
        call("submit"),
    )
    return calls[int(rng.choice(6, p=(0.25, 0.2, 0.15, 0.15, 0.15, 0.1)))]


def null(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """Give up at once."""
    return Message("assistant", "", think="")
