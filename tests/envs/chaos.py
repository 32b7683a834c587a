"""A real backend behind which things go wrong at seeded moments, and an environment to play."""

import asyncio
import functools
from collections import Counter

import numpy as np

from k3rl.envs.base import Observation
from k3rl.envs.session import ToolSession
from k3rl.envs.tools import Tool, command_output, run_command
from k3rl.errors import SandboxError
from k3rl.types import Message, Task, TaskLimits, ToolCall

NAME = "test/Counting-v0"
MAX_CLOSE_FAILURES = 3


def in_loop(test):
    """Run an async test to its end."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


class Chaos:
    """Fails create, exec, fork and close with the given chances; create and fork may hang too.

    Half of the failures come when the work is done, as a lost answer would. No sandbox's close
    fails more than `MAX_CLOSE_FAILURES` times.
    """

    def __init__(self, backend, seed=0, **chances):
        self.inner, self.chances = backend, chances
        self.rng = np.random.default_rng(seed)
        self.num_faults = 0
        self.closes = Counter()

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def _draws(self, what):
        is_due = self.rng.random() < self.chances.get(what, 0.0)
        self.num_faults += is_due
        return is_due

    def _fail(self, what):
        if self._draws(what):
            raise SandboxError(f"chaos: {what}")

    async def _hang(self, what):
        if self._draws(f"{what}_hang"):
            await asyncio.Event().wait()

    async def create(self, spec, files=None):
        await self._hang("create")
        self._fail("create")
        made = await self.inner.create(spec, files)
        await self._lose("create", [made])
        return made

    async def fork(self, sandbox_id, n):
        await self._hang("fork")
        self._fail("fork")
        made = await self.inner.fork(sandbox_id, n)
        await self._lose("fork", made)
        return made

    async def _lose(self, what, made):
        if self._draws(what):
            for each in made:
                await self.inner.close(each)
            raise SandboxError(f"chaos: {what} lost")

    async def exec(self, sandbox_id, request):
        await self._hang("exec")
        self._fail("exec")
        async for event in self.inner.exec(sandbox_id, request):
            yield event
        self._fail("exec")

    async def close(self, sandbox_id):
        if self.closes[sandbox_id] >= MAX_CLOSE_FAILURES:
            return await self.inner.close(sandbox_id)
        self.closes[sandbox_id] += 1
        self._fail("close")
        await self.inner.close(sandbox_id)
        return self._fail("close")


class Counting(ToolSession):
    """Three `add`s in the sandbox, then the grader counts them in a fork of the final state."""

    def __init__(self, spec, fault="", reached=None):
        self.fault, self.reached = fault, reached
        super().__init__(spec)

    def make_tools(self):
        return tuple(Tool.of(tool) for tool in (self.add, self.wait, self.done))

    def task(self, split, index):
        return Task(NAME, index, split, limits=TaskLimits(max_turns=6, max_time_s=20.0))

    def files(self, task):
        if self.fault == "files":
            raise KeyError("no such file")
        return {"start": str(task.seed).encode()}

    def observe(self, task):
        return Observation((Message("user", "count"),))

    async def open(self, task, sandbox, state=None):
        if self.fault == "open":
            raise ValueError("not today")
        observation = await super().open(task, sandbox, state)
        await run_command(sandbox, "true")
        return observation

    async def judge(self, task):
        if self.fault == "judge":
            raise ZeroDivisionError("judge")
        self._reach("judge")
        async with self.final_fork() as fork:
            result = await run_command(fork, "sh", "-c", "wc -l < log")
        return {"correct": float(result.stdout.strip() == b"3")}

    def _reach(self, what):
        if self.reached is not None:
            self.reached(what)

    async def add(self, word: str):
        """Add."""
        if self.fault == "tool":
            raise LookupError("a bug")
        self._reach("add")
        result = await run_command(
            self.sandbox, "sh", "-c", 'echo "$1" >> log', "sh", word, deadline_s=5.0
        )
        return command_output(result)

    async def wait(self, seconds: float):
        """Wait."""
        self._reach("wait")
        result = await run_command(self.sandbox, "sleep", str(seconds), deadline_s=30.0)
        return command_output(result, 30.0)

    async def done(self):
        """End."""
        self.finish("done")
        return ""


def say(tool, **arguments):
    return Message("assistant", tool_calls=(ToolCall(tool, arguments, 1),))


def oracle(task, transcript, rng):
    turns = sum(message.role == "assistant" for message in transcript)
    return say("add", word=f"w{turns}") if turns < 3 else say("done")


def sleeper(task, transcript, rng):
    return say("wait", seconds=20.0)
