"""k3rl/Reason-v0: a problem of reasoning-gym, a `python` tool, an answer in plain text.

The preset `arithmetic` asks for the value of an expression in a wording of ours, `12+7-3=?`, which
a very small model can learn; every other preset gives reasoning-gym's own texts.

A task is (dataset, its settings, entry index): `metadata` holds the first two, `seed` the third.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from k3rl.envs.base import EnvSpec, Observation
from k3rl.envs.demonstrating import draw_thought, slips
from k3rl.envs.interpreter import PYTHON
from k3rl.envs.reasoning import (
    ALL,
    CATEGORIES,
    TERSE,
    content_of,
    expression_of,
    find_entry,
    is_full_score,
)
from k3rl.envs.session import ToolSession, draw_seed
from k3rl.envs.tools import Tool, ToolOutput, command_output, run_command
from k3rl.errors import UserInputError
from k3rl.sandboxes.spec import SandboxSpec
from k3rl.types import JsonObject, Message, Task, TaskLimits, ToolCall

PRESETS = {"all": ALL, **CATEGORIES, "arithmetic": TERSE}
"""Name to datasets. reasoning-gym's own category arithmetic is in `all`."""
TERSE_LIMITS = TaskLimits(max_turns=6, max_context_tokens=512, max_time_s=120.0)
LIMITS = TaskLimits(max_turns=8, max_context_tokens=16384, max_time_s=600.0)
HOW_TO_ANSWER = "Your last message is your answer: nothing but the answer, in the form asked for."
DEADLINE_S = 5.0
MAX_WRONG_TURNS = 2
"""Of a demonstration, so that it stays within the limits."""


class Reason(ToolSession):
    """One session of k3rl/Reason-v0. A message without a tool call is the answer."""

    # Without a bytecode cache and with fixed hashing, a re-run leaves the same files and output.
    sandbox_spec = SandboxSpec(
        environment={"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"},
        executables=("python3",),
    )

    def __init__(
        self,
        spec: EnvSpec,
        preset: str = "all",
        datasets: Sequence[str] | None = None,
        max_terms: int = 3,
        max_digits: int = 2,
    ) -> None:
        """`datasets` are those of the preset that are asked, by default all of them.

        In `arithmetic`, terms are 2 to `max_terms`, of 1 to `max_digits` digits.
        """
        if preset not in PRESETS:
            raise UserInputError(f"{spec.id}: preset {preset!r}: use {', '.join(PRESETS)}")
        chosen = PRESETS[preset] if datasets is None else tuple(datasets)
        if not chosen or not set(chosen) <= set(PRESETS[preset]):
            known = ", ".join(PRESETS[preset])
            raise UserInputError(f"{spec.id}: datasets {list(chosen)}: {preset} has {known}")
        if max_terms < 2 or max_digits < 1:
            raise UserInputError(f"{spec.id}: needs max_terms >= 2 and max_digits >= 1")
        super().__init__(spec)
        self._datasets = chosen
        self._settings: JsonObject = {}
        if preset == "arithmetic":
            self._settings = {"max_terms": max_terms, "max_digits": max_digits}

    def make_tools(self) -> Sequence[Tool]:
        """`python`."""
        return (Tool.of(self.python),)

    def task(self, split: str, index: int) -> Task:
        """A problem; none is in both splits, whatever the preset."""
        seed = draw_seed(
            self.spec.id, split, index, lambda seed: content_of(seed, self._metadata(seed))
        )
        limits = TERSE_LIMITS if self._settings else LIMITS
        return Task(self.spec.id, seed, split, self._metadata(seed), limits)

    def _metadata(self, seed: int) -> JsonObject:
        return {"dataset": self._datasets[seed % len(self._datasets)], **self._settings}

    def files(self, task: Task) -> Mapping[str, bytes]:
        """None."""
        return {}

    def observe(self, task: Task) -> Observation:
        """The problem: `expression=?`, or the dataset's question and how to answer it."""
        _, entry = find_entry(task.seed, task.metadata)
        if is_terse(task):
            return Observation((Message("user", f"{expression_of(entry)}=?"),))
        question = str(entry["question"]).rstrip()
        return Observation((Message("user", f"{question}\n\n{HOW_TO_ANSWER}"),))

    def is_correct(self, task: Task, answer: str) -> bool:
        """Only the dataset's full score counts."""
        return is_full_score(task.seed, task.metadata, answer)

    async def python(self, code: str) -> ToolOutput:
        """Run Python."""
        source = code.encode()
        result = await run_command(self.sandbox, *PYTHON, stdin=source, deadline_s=DEADLINE_S)
        if result.exit_code:
            last = result.stderr.rstrip(b"\n").rpartition(b"\n")[2]
            result = replace(result, stderr=last)
        return command_output(result, DEADLINE_S)


def is_terse(task: Task) -> bool:
    """Whether a task is of the preset `arithmetic`."""
    return "max_terms" in task.metadata


def _say_answer(answer: str) -> Message:
    return Message("assistant", answer, think="answer")


def _call_python(code: str) -> Message:
    return Message(
        "assistant", think="compute", tool_calls=(ToolCall("python", {"code": code}, 1),)
    )


def oracle(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """Compute in Python, then answer.

    In `arithmetic` it prints the expression that the prompt shows and answers what it reads back;
    it knows no other problem's way, so there it takes the answer from the task.
    """
    if not is_terse(task):
        _, entry = find_entry(task.seed, task.metadata)
        answer = str(entry["answer"])
        is_printed = any(message.role == "tool" for message in transcript)
        return _say_answer(answer) if is_printed else _call_python(f"print({answer!r})")
    prompt = next(message for message in transcript if message.role == "user")
    turn = _call_python(f"print({prompt.content.removesuffix('=?')})")
    asked: tuple[ToolCall, ...] = ()
    for message in transcript:
        asked = message.tool_calls or asked
        is_answer = message.role == "tool" and message.content.removeprefix("-").isdecimal()
        if is_answer and [call.arguments for call in asked] == [turn.tool_calls[0].arguments]:
            return _say_answer(message.content)
    return turn


def _spoil(code: str, rng: np.random.Generator) -> str:
    """`code` with one digit changed, never to 0: no number may start with it."""
    place = int(rng.choice([i for i, char in enumerate(code) if char.isdecimal()]))
    digit = rng.choice([char for char in "123456789" if char != code[place]])
    return f"{code[:place]}{digit}{code[place + 1 :]}"


def demonstrator(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """The oracle with thoughts, and with programs that have one digit wrong and are then mended.

    Only in `arithmetic`; elsewhere it is the oracle.
    """
    turn = oracle(task, transcript, rng)
    if not is_terse(task):
        return turn
    if not turn.tool_calls:
        words = ("the number is", "so the answer is", "now say", "yes")
        thought, _ = draw_thought("answer", [f"{each} {turn.content}" for each in words], rng)
        return replace(turn, think=thought)
    code = turn.tool_calls[0].arguments["code"]
    words = ("the code is", "so the call is", "now run", "yes")
    thought, is_verbose = draw_thought("compute", [f"{each} {code}" for each in words], rng)
    num_wrong = sum(message.role == "assistant" for message in transcript)
    if num_wrong < MAX_WRONG_TURNS and slips(is_verbose, rng):
        code = _spoil(code, rng)
    return replace(_call_python(code), think=thought)


def random(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """A random program or, half the time, a random answer."""
    left, right = (int(number) for number in rng.integers(0, 100, 2))
    if rng.random() < 0.5:
        return _say_answer(str(left - right))
    return _call_python(str(rng.choice([f"print({left}+{right})", f"{left}+", "exit(3)", "x"])))


def null(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """Answer nothing, at once."""
    return Message("assistant", "", think="")


def _cheat(answer: str) -> Message:
    return Message("assistant", answer, think="")


def cheat_echo(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """Answer with the question."""
    return _cheat(transcript[0].content)


def cheat_code(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """Answer with a program that gives the result, for a scorer that evaluates it."""
    if is_terse(task):
        return _cheat(f"eval('{transcript[0].content.removesuffix('=?')}')")
    return _cheat("__import__('pathlib').Path('/tmp/k3rl_reason_cheat').touch() or True")


def cheat_every(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """Answer with every number from -2000 to 2000, for a scorer that looks for the right one."""
    return _cheat(" ".join(str(number) for number in range(-2000, 2001)))


def cheat_nan(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """Answer with what no comparison of numbers calls wrong."""
    _, entry = find_entry(task.seed, task.metadata)
    right = str(entry["answer"])
    shaped = re.sub(r"-?\d+(\.\d+)?", "NaN", right)
    shaped = "NaN" if shaped == right else shaped
    return _cheat(str(rng.choice(["nan", "inf", "-inf", "nan+nanj", "NaN", "1e999", shaped])))


def cheat_empty(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """Answer with nothing in several spellings."""
    return _cheat(str(rng.choice([" ", "\n", "[]", "{}", "None", "null", '""'])))


def cheat_long(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """Answer with a text that a scorer might choke on."""
    return _cheat(str(rng.choice(["(", "[", "9", "1e999999999 ", "x"])) * 100_000)
