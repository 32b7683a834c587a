"""What environments share: one session's life, the dispatch of calls, the splits.

A subclass says what the world is (`task`, `files`, `observe`, `make_tools`) and what is right: an
answer (`is_correct`) or a final state (`judge`, in a fork of the sandbox); everything that could
differ by accident between environments is here. A session ends when something calls `finish`.
Limits on turns, tokens and time are the episode's business.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

from k3rl.envs.base import EnvSpec, Normaliser, Observation, StepResult
from k3rl.envs.tools import Tool, ToolOutput, answer, check_call, run_call
from k3rl.errors import EnvError, GraderError, SandboxError, UserInputError
from k3rl.sandboxes.base import Sandbox
from k3rl.sandboxes.spec import SandboxSpec
from k3rl.types import (
    JSON,
    JsonObject,
    Message,
    Outcome,
    OutcomeKind,
    Task,
    ToolCall,
    ToolRecord,
    ToolResult,
    ToolSpec,
    ToolStatus,
    digest_json,
    from_plain,
    philox,
    to_plain,
)

SPLITS = ("train", "heldout")
HELDOUT_SHARE = 8
"""One in so many contents belongs to heldout."""
SEED_LIMIT = 1 << 48


def split_of(content: JSON) -> str:
    """The split that a task's content belongs to: decided by its digest, so by content alone."""
    return SPLITS[int(digest_json(content)[:8], 16) % HELDOUT_SHARE == 0]


def draw_seed(env_id: str, split: str, index: int, content_of: Callable[[int], JSON]) -> int:
    """The seed of the `index`-th task: the first in its own stream whose content is of `split`.

    `content_of` must name everything that makes two tasks the same problem, and follow from the
    seed alone. Then no content and no seed is in both splits. Raises UserInputError for an
    unknown split or a negative index.
    """
    if split not in SPLITS:
        raise UserInputError(f"{env_id}: no split {split!r}, use one of {', '.join(SPLITS)}")
    if index < 0:
        raise UserInputError(f"{env_id}: task index {index} is negative")
    for attempt in count():
        seed = int(philox(index, env_id, attempt).integers(SEED_LIMIT))
        if split_of(content_of(seed)) == split:
            return seed
    raise AssertionError("count() does not end")


@dataclass(slots=True)
class SessionState:
    """All a session must remember beside its sandbox; travels as plain JSON."""

    num_turns: int = 0
    is_well_formed: bool = True
    """No malformed message and no call with a wrong tool or wrong arguments so far."""
    is_over: bool = False
    answer: str | None = None
    """What the policy answered or submitted; None: it has not, or it gave up."""
    memory: JsonObject = field(default_factory=dict)
    """A subclass's own, plain JSON."""


class ToolSession(ABC):
    """Base of tool environments; keeps the `ToolEnv` contract for its subclasses."""

    sandbox_spec: SandboxSpec = SandboxSpec()
    normalisers: tuple[Normaliser, ...] = ()

    def __init__(self, spec: EnvSpec) -> None:
        """`spec` is what the registry holds for this environment, its kwargs filled in."""
        self.spec = spec
        self._tools: dict[str, Tool] = {tool.spec.name: tool for tool in self.make_tools()}
        self.tools: tuple[ToolSpec, ...] = tuple(tool.spec for tool in self._tools.values())
        self.progress = SessionState()
        self._task: Task | None = None
        self._sandbox: Sandbox | None = None

    @abstractmethod
    def make_tools(self) -> Sequence[Tool]:
        """The tools, in the order in which they are declared to the policy."""

    @abstractmethod
    def task(self, split: str, index: int) -> Task:
        """The `index`-th task of a split; see `ToolEnv.task` and `draw_seed`."""

    @abstractmethod
    def files(self, task: Task) -> Mapping[str, bytes]:
        """What the task's fresh workspace holds."""

    @abstractmethod
    def observe(self, task: Task) -> Observation:
        """What the policy reads first."""

    def is_correct(self, task: Task, answer: str) -> bool:
        """Whether `answer` solves `task`; for environments that are judged by their answer."""
        raise NotImplementedError(f"{type(self).__name__} has neither is_correct nor judge")

    async def judge(self, task: Task) -> Mapping[str, float]:
        """The reward part `correct`, and further ones of the environment's own.

        By default the answer's. One that judges the final state looks into `final_fork()`, never
        into what the policy says. An exception becomes a GraderError, but for SandboxError.
        """
        answer = self.progress.answer
        return {"correct": float(answer is not None and self.is_correct(task, answer))}

    @asynccontextmanager
    async def final_fork(self) -> AsyncIterator[Sandbox]:
        """A sandbox with the final state's files and none of its processes; closed afterwards.

        Whatever a verifier adds there no tool of the session has ever seen.
        """
        backend = self.sandbox.backend
        (fork,) = await backend.fork(self.sandbox.id, 1)
        try:
            yield Sandbox(backend, fork)
        finally:
            await backend.close(fork)

    def no_calls(self, message: Message) -> str:
        """Take a message without tool calls: `finish`, or return a nudge for the policy.

        By default it ends the session, its content being the final answer.
        """
        self.finish(message.content)
        return ""

    def finish(self, answer: str | None) -> None:
        """End the session with an answer, or with None when the policy gave up."""
        self.progress.answer, self.progress.is_over = answer, True

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox of the open session."""
        if self._sandbox is None:
            raise EnvError(f"{self.spec.id}: the session is not open")
        return self._sandbox

    async def open(
        self, task: Task, sandbox: Sandbox, state: JsonObject | None = None
    ) -> Observation:
        """Start, or with `state` carry on, a session. Raises EnvError when used a second time."""
        if self._task is not None:
            raise EnvError(f"{self.spec.id}: a session is single use, make another one")
        if task.env_id != self.spec.id:
            raise UserInputError(f"{self.spec.id}: task {task.key} is of {task.env_id}")
        if state is not None:
            self.progress = from_plain(SessionState, state)
        observation = self.observe(task)
        self._task, self._sandbox = task, sandbox
        return observation

    async def act(self, message: Message) -> StepResult:
        """Carry out one assistant message: its calls in order, until one ends the session.

        Nobody reads on in a world that has ended, so a terminated result carries no messages; its
        records are complete. Raises EnvError before `open`, after the end and after `close`.
        """
        progress = self.progress
        if self._sandbox is None or progress.is_over:
            raise EnvError(f"{self.spec.id}: act on a session that is not open or has ended")
        if message.role != "assistant":
            raise UserInputError(
                f"{self.spec.id}: act takes assistant messages, not {message.role}"
            )
        progress.num_turns += 1
        if message.malformed is not None:
            progress.is_well_formed = False
            return _say(f"error: malformed message: {message.malformed}")
        if not message.tool_calls:
            nudge = self.no_calls(message)
            return StepResult((), (), True) if progress.is_over else _say(nudge)
        results, records = [], []
        for call in message.tool_calls:
            result, record = await self._call(call)
            results.append(Message("tool", result.content, tool=result.tool, index=result.index))
            records.append(record)
            if progress.is_over:
                return StepResult((), tuple(records), True)
        return StepResult(tuple(results), tuple(records), False)

    async def _call(self, call: ToolCall) -> tuple[ToolResult, ToolRecord]:
        call = copy.deepcopy(call)
        problem = check_call(self._tools, call)
        if problem is None:
            return await self._carry_out(call)
        self.progress.is_well_formed = False
        return answer(call, ToolOutput(problem, ToolStatus.ERROR))

    async def _carry_out(self, call: ToolCall) -> tuple[ToolResult, ToolRecord]:
        """Raises EnvError naming the tool whose function fails by itself."""
        try:
            return await run_call(self._tools[call.tool], call, self._normalise)
        except (SandboxError, EnvError):
            raise
        except Exception as error:
            key = self._task.key if self._task else ""
            whose = f"{self.spec.id}: task {key}: tool {call.tool}"
            raise EnvError(f"{whose}: {error!r}") from error

    def _normalise(self, output: str) -> str:
        for normaliser in self.normalisers:
            output = normaliser.apply(output)
        return output

    def state(self) -> JsonObject:
        """`SessionState` as plain JSON, sharing nothing with the session."""
        plain: JsonObject = to_plain(self.progress)
        return plain

    async def grade(self) -> Outcome:
        """Judge the present state. The kind is always completed: who cut it off says so."""
        if self._task is None:
            raise EnvError(f"{self.spec.id}: grade before open")
        progress = self.progress
        parts = {
            "complete": float(progress.is_over and progress.answer is not None),
            "num_steps": float(progress.num_turns),
            "format": float(progress.is_well_formed),
        }
        try:
            parts |= await self.judge(self._task)
            reward = sum(weight * parts[name] for name, weight in self.spec.reward.items())
        except (GraderError, SandboxError):
            raise
        except KeyError as error:
            raise GraderError(f"{self.spec.id}: no reward part {error}: {sorted(parts)}") from error
        except Exception as error:
            raise GraderError(f"{self.spec.id}: grading failed: {error!r}") from error
        return Outcome(OutcomeKind.COMPLETED, reward=reward, reward_parts=parts)

    async def close(self) -> None:
        """Let go of the sandbox, which is the episode's to close. Closing twice is fine."""
        self._sandbox = None


def _say(text: str) -> StepResult:
    return StepResult((Message("system", text),), (), False)
