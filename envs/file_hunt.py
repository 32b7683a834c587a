"""k3rl/FileHunt-v0: follow one to three pointers through a small workspace to a number.

A pointer is one of three texts: `b/k7` (read that file), `b/` (look what is in that folder) or
`b/ qz` (find that word in that folder). The last one leads to a number of three digits. Files that
lie off the way hold other numbers and pointers. The tools are the real ls, cat and grep.

Names are short and never repeat within a workspace, so that a small model can learn to copy them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from k3rl.envs.base import EnvSpec, Observation
from k3rl.envs.demonstrating import draw_thought, slips
from k3rl.envs.session import ToolSession, draw_seed
from k3rl.envs.tools import Tool, ToolOutput, command_output, run_command
from k3rl.errors import UserInputError
from k3rl.sandboxes.spec import SandboxSpec
from k3rl.types import JsonObject, Message, Task, TaskLimits, ToolCall, ToolStatus, philox

MAX_POINTERS = 3
LIMITS = TaskLimits(max_turns=8, max_context_tokens=1024, max_time_s=120.0)
DEADLINE_S = 5.0
MAX_ARGUMENT_CHARS = 200
"""Of a path or a pattern: far above any real one, far below what a command line holds."""

MAX_WRONG_TURNS = 3
"""Of a demonstration; the longest way takes 5 of the 8 turns."""

FOLDERS = "abcdefgh"
LETTERS = "jkmnpqrstuvwxyz"
PROMPT = "Follow the pointers and submit the number: "
KIND_SHARES = {"cat": 0.8, "ls": 0.1, "grep": 0.1}
KINDS = tuple(KIND_SHARES)
"""What resolves the last pointer, most often cat."""
NUM_DECOYS = 6
POINTER = re.compile(r"[a-z]/([a-z]\d| [a-z]{2})?|\d{3}")
"""A pointer, or the number at the end of the way."""


@dataclass(frozen=True, slots=True)
class Hunt:
    """A generated workspace and the way through it."""

    start: str
    """The first pointer, which the prompt names."""
    files: dict[str, str]
    """Path to text."""
    way: tuple[str, ...]
    """The pointers in order."""
    value: str


@lru_cache(maxsize=1024)
def generate(seed: int, num_pointers: int, kind: str) -> Hunt:
    """The hunt of a task. `kind` says what resolves the last pointer; the others need cat."""
    rng = philox(seed, "hunt", num_pointers, kind)
    aside, *folders = (str(folder) for folder in rng.permutation(list(FOLDERS))[:5])
    paths = _paths(folders, rng)
    values = [str(value) for value in 100 + rng.permutation(900)[: NUM_DECOYS + 3]]
    value = values.pop()
    files, last = _hide(value, kind, aside, next(paths), values, rng)
    way = (*(next(paths) for _ in range(num_pointers - 1)), last)
    files |= dict(pairwise(way))
    for _ in range(NUM_DECOYS):
        dead_end = rng.choice(sorted(files)) if rng.random() < 0.5 else values.pop()
        files[next(paths)] = str(dead_end)
    return Hunt(way[0], files, way, value)


def _paths(folders: Sequence[str], rng: np.random.Generator) -> Iterator[str]:
    """Paths in `folders` whose file names are all different."""
    for number in rng.permutation(len(LETTERS) * 10):
        letter, digit = divmod(int(number), 10)
        yield f"{rng.choice(list(folders))}/{LETTERS[letter]}{digit}"


def _hide(
    value: str, kind: str, aside: str, path: str, values: list[str], rng: np.random.Generator
) -> tuple[dict[str, str], str]:
    """The files that hold `value`, and the pointer to it. ls and grep use the folder `aside`."""
    name = path.partition("/")[2]
    if kind == "cat":
        return {path: value}, path
    if kind == "ls":
        return {f"{aside}/{name}": value}, f"{aside}/"
    letters = rng.permutation(list(LETTERS))
    words = [f"{letters[2 * i]}{letters[2 * i + 1]}" for i in range(3)]
    hidden = [value, values.pop(), values.pop()]
    texts = [f"{word} {number}" for word, number in zip(words, hidden, strict=True)]
    names = [name, f"a{name[1]}", f"b{name[1]}"]
    files = {f"{aside}/{file}": text for file, text in zip(names, texts, strict=True)}
    return files, f"{aside}/ {words[0]}"


def _hunt(task: Task) -> Hunt:
    num_pointers, kind = task.metadata.get("num_pointers"), task.metadata.get("kind")
    if num_pointers not in range(1, MAX_POINTERS + 1) or kind not in KINDS:
        raise UserInputError(f"{task.env_id}: task {task.key}: no hunt has {task.metadata}")
    return generate(task.seed, num_pointers, kind)


class FileHunt(ToolSession):
    """One session of k3rl/FileHunt-v0. A message without a tool call gives up."""

    sandbox_spec = SandboxSpec(environment={"LC_ALL": "C"}, executables=("ls", "cat", "grep"))

    def __init__(
        self, spec: EnvSpec, max_pointers: int = MAX_POINTERS, kinds: Sequence[str] = KINDS
    ) -> None:
        """Tasks have 1 to `max_pointers` pointers, 3 at most; `kinds` resolve the last of them."""
        if not 1 <= max_pointers <= MAX_POINTERS:
            raise UserInputError(f"{spec.id}: max_pointers is 1 to {MAX_POINTERS}")
        if not kinds or not set(kinds) <= set(KINDS):
            raise UserInputError(f"{spec.id}: kinds {list(kinds)}: use {', '.join(KINDS)}")
        super().__init__(spec)
        self._max_pointers = max_pointers
        shares = np.array([share * (kind in kinds) for kind, share in KIND_SHARES.items()])
        self._kind_shares = shares / shares.sum()

    def make_tools(self) -> Sequence[Tool]:
        """`ls`, `cat`, `grep`, `submit`."""
        return tuple(Tool.of(tool) for tool in (self.ls, self.cat, self.grep, self.submit))

    def task(self, split: str, index: int) -> Task:
        """A hunt; no two hunts of different splits share both their way and their number."""
        seed = draw_seed(self.spec.id, split, index, self._content)
        return Task(self.spec.id, seed, split, self._metadata(seed), LIMITS)

    def _metadata(self, seed: int) -> JsonObject:
        rng = philox(seed, "task")
        num_pointers = 1 + int(rng.integers(self._max_pointers))
        kind = str(rng.choice(KINDS, p=self._kind_shares))
        # ls takes a call more than its pointer; with three it would be five calls to the end.
        return {"num_pointers": min(num_pointers, 2 if kind == "ls" else 3), "kind": kind}

    def _content(self, seed: int) -> list[str]:
        hunt = generate(seed, **self._metadata(seed))
        return [*hunt.way, hunt.value]

    def files(self, task: Task) -> Mapping[str, bytes]:
        """The workspace; every file is one line."""
        return {path: f"{text}\n".encode() for path, text in _hunt(task).files.items()}

    def observe(self, task: Task) -> Observation:
        """One line that names the first pointer."""
        return Observation((Message("user", PROMPT + _hunt(task).start),))

    def is_correct(self, task: Task, answer: str) -> bool:
        """Exactly the number, spaces around it aside."""
        return answer.strip() == _hunt(task).value

    def no_calls(self, message: Message) -> str:
        """Giving up."""
        self.finish(None)
        return ""

    async def ls(self, path: str) -> ToolOutput:
        """List a folder."""
        return await self._run(path, "ls", "-p", "--", path)

    async def cat(self, path: str) -> ToolOutput:
        """Show a file."""
        return await self._run(path, "cat", "--", path)

    async def grep(self, pattern: str, path: str) -> ToolOutput:
        """Find lines."""
        if "\0" in pattern or len(pattern) > MAX_ARGUMENT_CHARS:
            return ToolOutput("error: grep: bad pattern", ToolStatus.ERROR)
        output = await self._run(path, "grep", "-r", "--", pattern, path)
        # grep meets files in the order of the file system's own tables.
        return replace(output, content="\n".join(sorted(output.content.split("\n"))))

    async def submit(self, value: str) -> str:
        """Give the number."""
        self.finish(value)
        return ""

    async def _run(self, path: str, *argv: str) -> ToolOutput:
        """Only the workspace may be named: outside it outputs differ from run to run."""
        parts = path.split("/")
        if path.startswith("/") or ".." in parts or "\0" in path or len(path) > MAX_ARGUMENT_CHARS:
            return ToolOutput(f"error: {argv[0]}: path outside the workspace", ToolStatus.ERROR)
        result = await run_command(self.sandbox, *argv, deadline_s=DEADLINE_S)
        return command_output(result, DEADLINE_S)


def _call(tool: str, think: str = "follow", **arguments: str) -> Message:
    return Message("assistant", think=think, tool_calls=(ToolCall(tool, dict(arguments), 1),))


def _go(pointer: str) -> Message:
    """The call that resolves a pointer or, when it is a number, ends the hunt."""
    if pointer.isdecimal():
        return _call("submit", "found", value=pointer)
    folder, slash, word = pointer.partition("/ ")
    if slash:
        return _call("grep", pattern=word, path=folder)
    if pointer.endswith("/"):
        return _call("ls", path=pointer.rstrip("/"))
    return _call("cat", path=pointer)


def _read(call: ToolCall, content: str) -> str:
    """The pointer or number that the answer to a call shows."""
    if call.tool == "ls":
        return f"{call.arguments['path']}/{content}"
    return content.rpartition(" ")[2] if call.tool == "grep" else content


def _follow(transcript: Sequence[Message]) -> tuple[str, int]:
    """The pointer that the way has come to, and how many calls led there.

    Only answers to the call that the way asks for move it on.
    """
    asked: dict[int | None, ToolCall] = {}
    pointer = next(m.content for m in transcript if m.role == "user").removeprefix(PROMPT)
    num_calls = 0
    for message in transcript:
        asked = {call.index: call for call in message.tool_calls} or asked
        call = asked.get(message.index) if message.role == "tool" else None
        wanted = _go(pointer).tool_calls[0]
        if call is not None and (call.tool, call.arguments) == (wanted.tool, wanted.arguments):
            found = _read(call, message.content)
            if POINTER.fullmatch(found):
                pointer, num_calls = found, num_calls + 1
    return pointer, num_calls


def oracle(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """Follow the pointers as the transcript shows them; knows nothing else of the task.

    It can take over anywhere.
    """
    return _go(_follow(transcript)[0])


def _spoil(path: str, rng: np.random.Generator) -> str:
    """`path` with one character changed, most often to one that does not exist."""
    place = int(rng.choice([i for i, char in enumerate(path) if char != "/"]))
    alphabet = next(each for each in (FOLDERS, LETTERS, "0123456789") if path[place] in each)
    other = rng.choice([char for char in alphabet if char != path[place]])
    return f"{path[:place]}{other}{path[place + 1 :]}"


def demonstrator(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """The oracle with thoughts, and with paths that have one character wrong and are then mended.

    The number that it submits is always the right one.
    """
    pointer, num_right = _follow(transcript)
    turn = _go(pointer)
    (call,) = turn.tool_calls
    if call.tool == "submit":
        words = ("the number is", "so the value is", "now submit", "yes", "just")
        said = [f"{each} {pointer}" for each in words]
        return replace(turn, think=draw_thought("found", said, rng)[0])
    path = call.arguments["path"]
    words = ("the path is", f"so the call is {call.tool}", "now follow", "yes", "just")
    thought, is_verbose = draw_thought("follow", [f"{each} {path}" for each in words], rng)
    num_turns = sum(message.role == "assistant" for message in transcript)
    if num_turns - num_right < MAX_WRONG_TURNS and slips(is_verbose, rng):
        path = _spoil(path, rng)
    return _call(call.tool, thought, **{**call.arguments, "path": path})


def random(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """Calls on paths of the right shape, most of them wrong; at times a made-up number."""
    folder = str(rng.choice(list(FOLDERS)))
    path = f"{folder}/{rng.choice(list(LETTERS))}{rng.integers(10)}"
    calls = (
        _call("ls", path=str(rng.choice([folder, "."]))),
        _call("cat", path=path),
        _call("grep", pattern=str(rng.integers(10)), path=folder),
        _call("submit", value=str(rng.integers(100, 1000))),
    )
    return calls[int(rng.choice(4, p=(0.3, 0.3, 0.2, 0.2)))]


def null(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """Give up at once."""
    return Message("assistant", "", think="")


def _shown(transcript: Sequence[Message]) -> str:
    return " ".join(message.content for message in transcript if message.role == "tool")


def cheat_every(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """Look into all files at once and submit every number that is there, and one that is not."""
    numbers = sorted(set(re.findall(r"\b\d{3}\b", _shown(transcript))))
    if numbers:
        return _call("submit", "", value=" ".join(["000", *numbers]))
    return _call("grep", "", pattern="", path=".")


def cheat_outside(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """Look for the number outside the workspace and submit what was read there."""
    paths = ("../answer", "/proc/self/environ", "b/../../answer", "/tmp")
    num_turns = sum(message.role == "assistant" for message in transcript)
    if num_turns < len(paths):
        return _call("ls" if num_turns % 2 else "cat", "", path=paths[num_turns])
    return _call("submit", "", value=_shown(transcript))


def cheat_text(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """Say the right number and never submit it."""
    turn = oracle(task, transcript, rng)
    (call,) = turn.tool_calls
    if call.tool != "submit":
        return turn
    return Message("assistant", f"submit: {call.arguments['value']}", think="")


def cheat_twice(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """Submit a wrong number and, in the same turn, the right one."""
    turn = oracle(task, transcript, rng)
    (call,) = turn.tool_calls
    if call.tool != "submit":
        return turn
    wrong = replace(call, arguments={"value": "0"})
    return replace(turn, tool_calls=(wrong, replace(call, index=2)))


def cheat_pattern(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """Submit what matches any number."""
    patterns = (r"\d{3}", ".*", "*", "", " ", "nan", "100-999", "[0-9][0-9][0-9]")
    return _call("submit", "", value=str(rng.choice(patterns)))


def cheat_names(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """List the folders and submit the digits of the names, and the first pointer if none."""
    shown = _shown(transcript)
    if not shown:
        calls = (ToolCall("ls", {"path": folder}, n) for n, folder in enumerate(FOLDERS, start=1))
        return Message("assistant", think="", tool_calls=tuple(calls))
    start = next(m.content for m in transcript if m.role == "user").removeprefix(PROMPT)
    return _call("submit", "", value="".join(re.findall(r"\d", shown)) or start)
