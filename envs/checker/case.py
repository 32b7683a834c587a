"""The environment under test, and what the checks share in playing it."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from k3rl.envs.base import ScriptedPolicy, ToolEnv
from k3rl.envs.checker.watched import Watched
from k3rl.envs.play import Played, play
from k3rl.sandboxes.base import Sandbox, SandboxBackend
from k3rl.types import JsonObject, Message, Outcome, Task, ToolRecord, philox

NUM_PLAYS_TOGETHER = 8
SPLITS = ("train", "heldout")
_T = TypeVar("_T")


class Broken(Exception):
    """The environment does not do what it must; the message says in one line what it did."""


class Undeclared(Exception):
    """The environment declares nothing that the check could try."""


def need(is_so: bool, otherwise: str) -> None:
    """Raise Broken with a message unless `is_so`."""
    if not is_so:
        raise Broken(otherwise)


@dataclass
class Case:
    """An environment under test."""

    env_id: str
    make: Callable[[], ToolEnv]
    policies: Mapping[str, ScriptedPolicy]
    """oracle, random, null, as far as declared."""
    cheats: Mapping[str, ScriptedPolicy]
    backend: SandboxBackend
    open_another: Callable[[], SandboxBackend]
    """A backend like it, on whatever event loop it is first used."""
    backend_kind: str = "bwrap"
    """As `open_backend` takes it: another process opens its own."""
    num_tasks: int = 8
    """Of each split."""
    seed: int = 0
    """Of the first plays; further ones count on from it."""
    left: dict[str, int] = field(default_factory=dict)
    """Check to the number of sandboxes that were open at its end."""
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(NUM_PLAYS_TOGETHER))
    name: str = ""
    """Of the check that it is for."""

    def apart(self, name: str) -> Case:
        """The same case with a count of sandboxes of its own."""
        return replace(self, name=name, backend=Watched(self.backend).as_backend())

    async def clear(self) -> None:
        """Close what is still open, and remember how many there were."""
        watched = self.backend
        assert isinstance(watched, Watched)
        if watched.live:
            self.left[self.name] = len(watched.live)
        await watched.aclose()

    def policy(self, name: str) -> ScriptedPolicy:
        """A policy that is declared. Raises Undeclared."""
        if name not in self.policies:
            raise Undeclared(f"no policy {name!r}")
        return self.policies[name]

    def tasks(self, split: str, num: int | None = None) -> list[Task]:
        """The first tasks of a split."""
        env = self.make()
        return [env.task(split, index) for index in range(num or self.num_tasks)]

    async def play(self, task: Task, policy: ScriptedPolicy, seed: int | None = None) -> Played:
        """Play a task with a fresh session; only so many plays run at a time."""
        async with self.slots:
            chosen = self.seed if seed is None else seed
            return await play(self.make(), copy.deepcopy(task), policy, self.backend, chosen)

    async def play_all(
        self, tasks: Sequence[Task], policy: ScriptedPolicy, seed: int | None = None
    ) -> list[Played]:
        """Play tasks at the same time."""
        return await together(self.play(task, policy, seed) for task in tasks)

    @asynccontextmanager
    async def session(
        self, task: Task | None = None, state: JsonObject | None = None
    ) -> AsyncIterator[Session]:
        """A session that is open in a fresh sandbox, closed at the end."""
        async with self.slots:
            env = self.make()
            task = task or env.task("train", 0)
            id = await self.backend.create(env.sandbox_spec, env.files(task))
            sandbox = Sandbox(self.backend, id)
            try:
                opening = await env.open(task, sandbox, state)
                held: list[tuple[object, object]] = [(opening, copy.deepcopy(opening))]
                yield Session(self, env, task, sandbox, list(opening.messages), held)
            finally:
                await env.close()
                await self.backend.close(id)


@dataclass
class Session:
    """An open session and what was said so far."""

    case: Case
    env: ToolEnv
    task: Task
    sandbox: Sandbox
    transcript: list[Message]
    held: list[tuple[object, object]]
    """What the environment handed out, beside a copy of it as it was then."""
    num_turns: int = 0
    is_over: bool = False

    async def turn(self, policy: ScriptedPolicy, seed: int | None = None) -> None:
        """Let a policy take one turn."""
        seed = self.case.seed if seed is None else seed
        rng = philox(seed, self.task.key, self.num_turns)
        message = policy(self.task, tuple(self.transcript), rng)
        step = await self.env.act(message)
        self.held.append((step, copy.deepcopy(step)))
        self.transcript += [message, *step.messages]
        self.num_turns += 1
        self.is_over = step.terminated

    async def play_out(self, policy: ScriptedPolicy) -> None:
        """Let a policy play on to the end or the turn limit."""
        while not self.is_over and self.num_turns < self.task.limits.max_turns:
            await self.turn(policy)

    async def carry_on(self, policy: ScriptedPolicy) -> Outcome:
        """`play_out`, then grade."""
        await self.play_out(policy)
        return await self.env.grade()

    async def start_over(self, state: JsonObject) -> None:
        """Go on in the same sandbox with another session object."""
        await self.env.close()
        self.env = self.case.make()
        await self.env.open(self.task, self.sandbox, state)


async def together(works: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """What all of them give; an error is raised when none of them runs any more."""
    ended = await asyncio.gather(*works, return_exceptions=True)
    for each in ended:
        if isinstance(each, BaseException):
            raise each
    return cast("list[_T]", ended)


def untimed(records: Sequence[ToolRecord]) -> list[ToolRecord]:
    """Records without what the clock says."""
    return [replace(record, wall_s=0.0) for record in records]


def difference(left: Played, right: Played) -> str:
    """The first thing in which two plays differ; "" when they are the same."""
    for turn, (one, other) in enumerate(zip(left.transcript, right.transcript, strict=False)):
        if one != other:
            return f"message {turn}: {shorten(one.content)} / {shorten(other.content)}"
    if len(left.transcript) != len(right.transcript):
        return f"{len(left.transcript)} / {len(right.transcript)} messages"
    if untimed(left.records) != untimed(right.records):
        return "the records of the calls"
    return "" if left.outcome == right.outcome else f"{left.outcome} / {right.outcome}"


def shorten(text: str, num_chars: int = 60) -> str:
    """`text` as one quoted line, cut."""
    return repr(text if len(text) <= num_chars else text[:num_chars] + "...")
