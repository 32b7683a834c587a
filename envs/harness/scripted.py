"""Scripted policies in a harness: they speak the environment's own names and are translated.

Asked for a summary, a wrapped policy writes down every call and its answer, so that it can go on
from the summary as if it had read the contexts before.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from k3rl.envs.base import ScriptedPolicy
from k3rl.envs.harness.naming import BadCall
from k3rl.envs.harness.session import SUMMARY_TITLE, HarnessedEnv
from k3rl.errors import UserInputError
from k3rl.types import Message, Task, ToolCall


def harnessed(policy: ScriptedPolicy, env: HarnessedEnv) -> ScriptedPolicy:
    """`policy` as one that plays sessions like `env`; pure when `policy` is."""

    def play(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
        own = [each for message in transcript for each in _read(message, env)]
        if _is_asked(transcript, env):
            return Message("assistant", _summary(own), think="sum up")
        turn = policy(task, tuple(own), rng)
        return replace(turn, tool_calls=tuple(map(env.naming.call_out, turn.tool_calls)))

    return play


def _is_asked(transcript: Sequence[Message], env: HarnessedEnv) -> bool:
    last = transcript[-1]
    return last.role == "user" and last.content == env.harness.context.instruction


def _read(message: Message, env: HarnessedEnv) -> list[Message]:
    """A message in own names; a summary as the turns that it tells of."""
    if message.role == "user" and message.content.startswith(SUMMARY_TITLE):
        return _turns(message.content.split("\n")[1])
    if message.role == "assistant" and message.malformed is None:
        read = [env.naming.call_in(call) for call in message.tool_calls]
        pairs = zip(message.tool_calls, read, strict=True)
        calls = tuple(call if isinstance(own, BadCall) else own for call, own in pairs)
        return [replace(message, tool_calls=calls)]
    return [message]


def _summary(transcript: Sequence[Message]) -> str:
    """One line of JSON: per turn its calls as [tool, arguments, answer]."""
    turns: list[list[list[object]]] = []
    for message in transcript:
        if message.role == "assistant":
            turns.append([[call.tool, call.arguments, ""] for call in message.tool_calls])
        elif message.role == "tool" and turns and message.index is not None:
            turns[-1][message.index - 1][2] = message.content
    return json.dumps(turns, separators=(",", ":"))


def _turns(line: str) -> list[Message]:
    try:
        turns = json.loads(line)
        return [message for turn in turns for message in _turn(turn)]
    except (ValueError, TypeError) as error:
        raise UserInputError(f"not a summary that a script wrote: {error}") from None


def _turn(calls: list[tuple[str, dict[str, object], str]]) -> list[Message]:
    made = [ToolCall(tool, arguments, i) for i, (tool, arguments, _) in enumerate(calls, start=1)]
    answers = [
        Message("tool", text, tool=tool, index=index)
        for index, (tool, _, text) in enumerate(calls, start=1)
    ]
    return [Message("assistant", tool_calls=tuple(made)), *answers]
