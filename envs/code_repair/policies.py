"""Scripted policies of k3rl/CodeRepair-v0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from k3rl.envs.code_repair.env import workspace_of
from k3rl.envs.code_repair.workspace import Workspace
from k3rl.envs.demonstrating import draw_thought, slips
from k3rl.types import JSON, Message, Task, ToolCall

MAX_WRONG_TURNS = 3
"""Of a demonstration; with them it takes 7 of the 12 turns."""


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


def smallest_edit(wanted: Workspace) -> tuple[str, str]:
    """Lines of the broken file that stand in it once, and what must stand in their place."""
    text = wanted.files[wanted.broken].decode()
    broken, right = text.splitlines(True), wanted.repaired.splitlines(True)
    first = next(n for n, line in enumerate(broken) if line != right[n : n + 1][0])
    num_same = 0
    while broken[-1 - num_same] == right[-1 - num_same]:
        num_same += 1
    last, last_right = len(broken) - num_same, len(right) - num_same
    while text.count("".join(broken[first:last])) != 1:
        first -= 1
    return "".join(broken[first:last]), "".join(right[first:last_right])


def _spoil(text: str, rng: np.random.Generator) -> str:
    """`text` with one character changed, so that the file does not hold it."""
    place = int(rng.choice([n for n, char in enumerate(text) if not char.isspace()]))
    return f"{text[:place]}~{text[place + 1 :]}"


def demonstrator(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """View, replace the lines with the bug, test, submit; with thoughts and misquoted lines.

    A replacement that misquotes the file changes nothing and is then mended.
    """
    wanted = workspace_of(task)
    tools = [tool for tool, _ in _done(transcript)]
    answers = [message.content for message in transcript if message.role == "tool"]
    old, new = smallest_edit(wanted)
    if f"wrote {wanted.broken}" in answers:
        turn = call("submit") if tools[-1:] == ["run_tests"] else call("run_tests")
    elif "view" not in tools:
        turn = call("view", path=wanted.broken)
    else:
        turn = call("replace", path=wanted.broken, old=old, new=new)
    (made,) = turn.tool_calls
    said = [f"so the call is {made.tool}"]
    said += [f"the line is {old.strip()}", f"make it {new.strip()}"] * (made.tool == "replace")
    thought, is_verbose = draw_thought(made.tool, said, rng)
    if made.tool == "replace" and tools.count("replace") < MAX_WRONG_TURNS:
        old = _spoil(old, rng) if slips(is_verbose, rng) else old
    arguments = {**made.arguments, "old": old} if made.tool == "replace" else made.arguments
    return call(made.tool, thought, **arguments)


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
