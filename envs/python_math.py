"""k3rl/PythonMath-v0: an arithmetic problem, a `python` tool, an answer in plain text.

Problems and their scoring are reasoning-gym's (arXiv 2505.24760), the wording is ours: `12+7-3=?`.
reasoning_gym is imported when the first task is made; that takes about a second.

A task is (dataset, its settings, entry index): `metadata` holds the first two, `seed` the third.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import numpy as np

from k3rl.envs.base import EnvSpec, Observation
from k3rl.envs.demonstrating import draw_thought, slips
from k3rl.envs.session import ToolSession, draw_seed
from k3rl.envs.tools import Tool, ToolOutput, command_output, run_command
from k3rl.errors import UserInputError
from k3rl.sandboxes.spec import SandboxSpec
from k3rl.types import JsonObject, Message, Task, TaskLimits, ToolCall

DATASETS = ("chain_sum", "basic_arithmetic")
LIMITS = TaskLimits(max_turns=6, max_context_tokens=512, max_time_s=120.0)
DEADLINE_S = 5.0
MAX_WRONG_TURNS = 2
"""Of a demonstration, so that it stays within the limits."""
START = """import builtins, _sitebuiltins
builtins.exit = builtins.quit = _sitebuiltins.Quitter("exit", "")
del builtins, _sitebuiltins
exec(compile(__import__("sys").stdin.read(), "<stdin>", "exec"))"""
PYTHON = ("python3", "-S", "-s", "-c", START)
"""Runs the program on its input without the site module, which takes a quarter of Python's start
and would let the host's packages in; of what that module adds, programs get `exit` and `quit`."""
DATASET_SEED = 0
"""reasoning-gym draws entry i from `Random(seed + i)`: one fixed seed, or entries would repeat."""


@cache
def _dataset(name: str, max_terms: int, max_digits: int) -> Any:
    import reasoning_gym

    settings: dict[str, Any] = {"max_terms": max_terms, "max_digits": max_digits}
    if name == "basic_arithmetic":
        settings |= {"operators": ["+", "-", "*"], "allow_negation": False}
    return reasoning_gym.create_dataset(
        name, seed=DATASET_SEED, size=1, min_terms=2, min_digits=1, **settings
    )


@lru_cache(4096)
def _drawn(name: str, max_terms: int, max_digits: int, seed: int) -> dict[str, Any]:
    """An entry; a task asks for its own again and again: drawn, shown, answered and scored."""
    entry: dict[str, Any] = _dataset(name, max_terms, max_digits)[seed]
    return entry


def _entry(seed: int, metadata: JsonObject) -> tuple[Any, dict[str, Any]]:
    """The dataset that scores a task, and the task's entry in it."""
    name = metadata.get("dataset")
    max_terms, max_digits = metadata.get("max_terms"), metadata.get("max_digits")
    if name not in DATASETS or not isinstance(max_terms, int) or not isinstance(max_digits, int):
        raise UserInputError(f"k3rl/PythonMath-v0: no problem has {metadata}")
    dataset = _dataset(name, max_terms, max_digits)
    return dataset, _drawn(name, max_terms, max_digits, seed)


def _expression(seed: int, metadata: JsonObject) -> str:
    _, entry = _entry(seed, metadata)
    return str(entry["metadata"]["expression"]).replace(" ", "")


class PythonMath(ToolSession):
    """One session of k3rl/PythonMath-v0. A message without a tool call is the answer."""

    # Without a bytecode cache and with fixed hashing, a re-run leaves the same files and output.
    sandbox_spec = SandboxSpec(
        environment={"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"},
        executables=("python3",),
    )

    def __init__(
        self,
        spec: EnvSpec,
        datasets: Sequence[str] = DATASETS,
        max_terms: int = 3,
        max_digits: int = 2,
    ) -> None:
        """Terms are 2 to `max_terms`, of 1 to `max_digits` digits."""
        if not datasets or not set(datasets) <= set(DATASETS):
            raise UserInputError(f"{spec.id}: datasets {list(datasets)}: use {', '.join(DATASETS)}")
        if max_terms < 2 or max_digits < 1:
            raise UserInputError(f"{spec.id}: needs max_terms >= 2 and max_digits >= 1")
        super().__init__(spec)
        self._datasets = tuple(datasets)
        self._settings = {"max_terms": max_terms, "max_digits": max_digits}

    def make_tools(self) -> Sequence[Tool]:
        """`python`."""
        return (Tool.of(self.python),)

    def task(self, split: str, index: int) -> Task:
        """A problem; no expression is in both splits, whatever the dataset."""
        seed = draw_seed(
            self.spec.id, split, index, lambda seed: _expression(seed, self._metadata(seed))
        )
        return Task(self.spec.id, seed, split, self._metadata(seed), LIMITS)

    def _metadata(self, seed: int) -> JsonObject:
        return {"dataset": self._datasets[seed % len(self._datasets)], **self._settings}

    def files(self, task: Task) -> Mapping[str, bytes]:
        """None."""
        return {}

    def observe(self, task: Task) -> Observation:
        """The problem as `expression=?`."""
        return Observation((Message("user", f"{_expression(task.seed, task.metadata)}=?"),))

    def is_correct(self, task: Task, answer: str) -> bool:
        """Only the dataset's full score counts; it gives parts of a point for near misses."""
        dataset, entry = _entry(task.seed, task.metadata)
        return bool(dataset.score_answer(answer.strip(), entry) == 1.0)

    async def python(self, code: str) -> ToolOutput:
        """Run Python."""
        source = code.encode()
        result = await run_command(self.sandbox, *PYTHON, stdin=source, deadline_s=DEADLINE_S)
        if result.exit_code:
            last = result.stderr.rstrip(b"\n").rpartition(b"\n")[2]
            result = replace(result, stderr=last)
        return command_output(result, DEADLINE_S)


def _say_answer(answer: str) -> Message:
    return Message("assistant", answer, think="answer")


def _call_python(code: str) -> Message:
    return Message(
        "assistant", think="compute", tool_calls=(ToolCall("python", {"code": code}, 1),)
    )


def oracle(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """Print the expression that the prompt shows, then answer what the tool read back."""
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
    """The oracle with thoughts, and with programs that have one digit wrong and are then mended."""
    turn = oracle(task, transcript, rng)
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
