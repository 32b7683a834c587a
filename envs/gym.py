"""The gymnasium face: `GymEnv` runs any ToolEnv behind reset, step and close.

The session is the same object that episodes run; it lives on an event loop in a private thread, and
so do its sandboxes. Observations and infos are copies, so nothing that a caller keeps can change
under it (gymnasium #1132). An infrastructure failure raises: it is never a reward.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import gymnasium
from gymnasium.error import ResetNeeded

from k3rl.envs import registry
from k3rl.envs.base import StepResult, ToolEnv
from k3rl.envs.harness.session import turn_limit
from k3rl.envs.play import cut_off
from k3rl.envs.spaces import MessageSpace
from k3rl.errors import EnvError, GraderError, UncapturableTree, UserInputError
from k3rl.sandboxes.base import Sandbox, SandboxBackend
from k3rl.types import (
    JsonObject,
    Message,
    Outcome,
    OutcomeKind,
    Task,
    TruncationCause,
    from_plain,
    to_plain,
)

INDEX_LIMIT = 1 << 31
_T = TypeVar("_T")
_Obs = tuple[Message, ...]


class _LoopThread:
    """An event loop in a thread of its own, until `stop`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="k3rl-gym", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def stop(self) -> None:
        self.run(self._loop.shutdown_asyncgens())
        self.run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class GymEnv(gymnasium.Env[_Obs, Message | str]):
    """A ToolEnv as a `gymnasium.Env`.

    Actions are assistant messages or plain text (a message without tool calls); observations are
    tuples of messages. The reward comes with the end: `terminated` when the world ended,
    `truncated` at the task's turn limit; `info["outcome"]` then holds the Outcome as plain JSON.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 (gymnasium's own annotation)

    def __init__(
        self,
        make_env: Callable[[], ToolEnv],
        backend: SandboxBackend | Callable[[], SandboxBackend],
        split: str = "train",
        render_mode: str | None = None,
    ) -> None:
        """`make_env` gives a new session each time. A `backend` given as a function is opened by
        this environment, on its own event loop, and closed with it; a ready one stays the caller's.
        """
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise UserInputError(f"render_mode {render_mode!r}: use 'ansi' or None")
        self.render_mode = render_mode
        self.split = split
        self._make_env = make_env
        self._open_backend = backend
        self._backend: SandboxBackend | None = None
        self._thread: _LoopThread | None = None
        self._session: ToolEnv | None = None
        self._sandbox: Sandbox | None = None
        self._task: Task | None = None
        self._num_turns = 0
        self._transcript: list[Message] = []
        self.action_space = MessageSpace(("assistant",), make_env().tools)
        self.observation_space = gymnasium.spaces.Sequence(MessageSpace(("system", "user", "tool")))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[_Obs, dict[str, Any]]:
        """Start a task in a fresh sandbox.

        `options`: `task` (a Task or its plain form), else `split` and `index`; without an index
        one is drawn from the seeded generator.
        """
        super().reset(seed=seed)
        options = dict(options or {})
        unknown = set(options) - {"task", "split", "index"}
        if unknown:
            raise UserInputError(f"reset: unknown options {sorted(unknown)}: task, split, index")
        drawn = int(self.np_random.integers(INDEX_LIMIT))
        if self._thread is None:
            self._thread = _LoopThread()
        observation = self._thread.run(self._reset(options, drawn))
        assert self._task is not None
        return observation, {"task": to_plain(self._task), "task_key": self._task.key}

    async def _reset(self, options: dict[str, Any], drawn: int) -> _Obs:
        await self._end_session()
        session = self._make_env()
        task = options.get("task")
        if task is None:
            task = session.task(options.get("split", self.split), options.get("index", drawn))
        elif not isinstance(task, Task):
            task = from_plain(Task, task)
        backend = self._backend
        if backend is None:
            given = self._open_backend
            backend = self._backend = given if isinstance(given, SandboxBackend) else given()
        id = await backend.create(session.sandbox_spec, session.files(task))
        self._sandbox = Sandbox(backend, id)
        self._session, self._task, self._num_turns = session, task, 0
        observation = copy.deepcopy((await session.open(task, self._sandbox)).messages)
        self._transcript = list(observation)
        return copy.deepcopy(observation)

    def step(self, action: Message | str) -> tuple[_Obs, float, bool, bool, dict[str, Any]]:
        """Carry out one assistant message. Raises ResetNeeded before `reset` and after the end."""
        if self._thread is None or self._session is None:
            raise ResetNeeded("call reset first")
        message = Message("assistant", action) if isinstance(action, str) else action
        if not isinstance(message, Message):
            raise UserInputError(f"an action is a Message or a str, not {type(action).__name__}")
        return self._thread.run(self._step(self._session, copy.deepcopy(message)))

    async def _step(
        self, session: ToolEnv, message: Message
    ) -> tuple[_Obs, float, bool, bool, dict[str, Any]]:
        assert self._task is not None
        try:
            result = await session.act(message)
            self._num_turns += 1
            self._transcript += [message, *copy.deepcopy(result.messages)]
            limit = turn_limit(session, self._task)
            truncated = not result.terminated and self._num_turns >= limit
            if not result.terminated and not truncated:
                return copy.deepcopy(result.messages), 0.0, False, False, _info(result)
            outcome = await _graded(session)
        except BaseException:
            await self._end_session()
            raise
        if truncated and outcome.kind is OutcomeKind.COMPLETED:
            outcome = cut_off(outcome, TruncationCause.TURNS)
        await self._end_session()
        reward = _reward(outcome)
        info = {**_info(result), "outcome": to_plain(outcome)}
        return copy.deepcopy(result.messages), reward, result.terminated, truncated, info

    async def _end_session(self) -> None:
        session, sandbox = self._session, self._sandbox
        self._session = self._sandbox = None
        try:
            if session is not None:
                await session.close()
        finally:
            if sandbox is not None:
                await sandbox.backend.close(sandbox.id)

    def render(self) -> str | None:
        """In mode ansi the transcript so far, one line per message or call; else None."""
        if self.render_mode is None:
            return None
        return "\n".join(line for message in self._transcript for line in _lines(message))

    def close(self) -> None:
        """End the session, close an own backend, stop the thread. Closing twice is fine."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            thread.run(self._end_session())
            if self._backend is not None and self._backend is not self._open_backend:
                thread.run(self._backend.aclose())
        finally:
            self._backend = None
            thread.stop()


async def _graded(session: ToolEnv) -> Outcome:
    try:
        return await session.grade()
    except UncapturableTree as error:  # the policy's doing, as in an episode
        return Outcome(OutcomeKind.POLICY_FAULT, 0.0, detail=str(error))


def _info(result: StepResult) -> dict[str, Any]:
    """What was called, without timings: equal seeds and actions give equal infos."""
    calls = [
        {"tool": record.call.tool, "status": str(record.status), "digest": record.output_digest}
        for record in result.records
    ]
    return {"calls": calls}


def _reward(outcome: Outcome) -> float:
    if outcome.reward is None:
        raise GraderError(f"the session ended as {outcome.kind} without a reward: {outcome.detail}")
    return outcome.reward


def _lines(message: Message) -> list[str]:
    lines = [f"{message.role}: {message.content}"] if message.content else []
    return lines + [f"{message.role}> {c.tool} {c.arguments}" for c in message.tool_calls]


def make_gym(
    env_id: str,
    backend: SandboxBackend | Callable[[], SandboxBackend],
    split: str = "train",
    render_mode: str | None = None,
    env_kwargs: JsonObject | None = None,
) -> GymEnv:
    """The gymnasium face of a registered environment; what `gymnasium.make` calls.

    Under `gymnasium.make` pass `backend` as a function: it copies the arguments it is given.
    """
    kwargs = dict(env_kwargs or {})
    return GymEnv(lambda: registry.make(env_id, **kwargs), backend, split, render_mode)


def register_gym() -> list[str]:
    """Give every registered environment the same id in gymnasium; returns the ids. Repeatable."""
    known = registry.ids()
    for id in known:
        found = gymnasium.registry.get(id)
        if found is not None and found.entry_point != "k3rl.envs.gym:make_gym":
            raise EnvError(f"{id}: gymnasium has another environment of this id")
        if found is None:
            gymnasium.register(
                id,
                entry_point="k3rl.envs.gym:make_gym",
                nondeterministic=registry.spec(id).nondeterministic,
                kwargs={"env_id": id},
            )
    return known
