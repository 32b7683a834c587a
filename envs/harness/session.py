"""`HarnessedEnv`: any environment inside a harness, itself an environment.

Calls are translated in and answers out, the system prompt comes first, and the harness's own tools
stand beside the environment's. Of one message the environment's calls run first, in one `act`, then
the harness's own, unless the session has ended. A call that is wrong in its names, or in the
arguments of an own tool, is answered here and reaches the environment as a call of no tool, so that
it counts there as any bad call does. The outcome is the environment's.

Compaction is a conversation with whoever plays the session: `ask_summary`, then `act` with the
policy's summary, then `next_context`. All of it is in `state`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

from k3rl.envs.base import Observation, StepResult, ToolEnv
from k3rl.envs.harness.naming import BadCall, Naming
from k3rl.envs.harness.own_tools import HarnessState, OwnTools
from k3rl.envs.harness.parts import ContextKind, Harness
from k3rl.envs.harness.sub_agents import SubAgentJob, SubAgentReport, SubAgentRunner
from k3rl.envs.tools import Tool, ToolOutput, answer, check_call, run_call
from k3rl.errors import EnvError
from k3rl.sandboxes.base import Sandbox
from k3rl.types import (
    JsonObject,
    Message,
    Outcome,
    Task,
    ToolCall,
    ToolRecord,
    ToolResult,
    ToolStatus,
    from_plain,
    to_plain,
)

STATE_KEY = "harness"
"""Of an environment's own state no key may be called that."""
NO_TOOL = "?"
"""Names no tool anywhere; stands in for a call that was answered here."""
SUMMARY_TITLE = "Summary so far:"
NO_SUMMARY = "(the summary could not be read)"


class HarnessedEnv:
    """One session of `inner` in `harness`; the `ToolEnv` contract."""

    def __init__(
        self, inner: ToolEnv, harness: Harness, run_sub_agent: SubAgentRunner | None = None
    ) -> None:
        """Raises EnvError when the harness does not fit the environment's tools."""
        self.inner, self.harness, self.run_sub_agent = inner, harness, run_sub_agent
        self.spec, self.sandbox_spec = inner.spec, inner.sandbox_spec
        self.normalisers = inner.normalisers
        self.progress = HarnessState()
        own = OwnTools(harness, self.progress, self._assign)
        self._own_tools = own
        self._own: dict[str, Tool] = {tool.spec.name: tool for tool in own.make()}
        specs = (*inner.tools, *(tool.spec for tool in self._own.values()))
        if len({spec.name for spec in specs}) < len(specs):
            raise EnvError(f"{self.spec.id}: a tool has the name of one of the harness's own")
        self.naming = Naming(specs, harness.tools)
        self.tools = self.naming.specs
        self._opening: tuple[Message, ...] = ()
        self._is_open = False

    def task(self, split: str, index: int) -> Task:
        """The environment's."""
        return self.inner.task(split, index)

    def files(self, task: Task) -> Mapping[str, bytes]:
        """The environment's: skills and notes are kept beside the workspace."""
        return self.inner.files(task)

    async def open(
        self, task: Task, sandbox: Sandbox, state: JsonObject | None = None
    ) -> Observation:
        """Start, or with `state` carry on, a session; the opening of the first context."""
        inner = None
        if state is not None:
            inner = {key: value for key, value in state.items() if key != STATE_KEY}
            self.progress = from_plain(HarnessState, state.get(STATE_KEY, {}))
            self._own_tools.state = self.progress
        observation = await self.inner.open(task, sandbox, inner)
        self._is_open = True
        said = tuple(self._show(message) for message in observation.messages)
        prompt = self._system_prompt()
        self._opening = (Message("system", prompt), *said) if prompt else said
        return Observation(self._opening)

    async def act(self, message: Message) -> StepResult:
        """Carry out one assistant message; when a summary was asked for, it is that."""
        state = self.progress
        if state.is_context_closed:
            raise EnvError(f"{self.spec.id}: the context is summed up: open the next one first")
        if state.is_summarising:
            state.is_summarising, state.is_context_closed = False, True
            state.summary = NO_SUMMARY if message.malformed is not None else message.content
            return StepResult((), (), False)
        state.sub_agents = []
        return await self._act(message, self.naming, self._own)

    def wants_summary(self, num_tokens: int, max_context_tokens: int) -> bool:
        """Whether a context that holds `num_tokens` is to be summed up now."""
        context = self.harness.context
        if context.kind is not ContextKind.COMPACTION:
            return False
        return num_tokens >= context.fraction * max_context_tokens

    def ask_summary(self) -> Message:
        """Ask for a summary: what the policy reads, and the next message to `act` is the summary.

        Its tool calls are not carried out.
        """
        self.progress.is_summarising = True
        return Message("user", self.harness.context.instruction)

    @property
    def is_context_closed(self) -> bool:
        """Whether a summary is given and `next_context` comes before anything else."""
        return self.progress.is_context_closed

    def next_context(self) -> Observation:
        """The opening of the context that follows a summary: the first one's, summary, notes."""
        state = self.progress
        if not state.is_context_closed:
            raise EnvError(f"{self.spec.id}: no summary was given, so no context is to be opened")
        state.is_context_closed = False
        text = f"{SUMMARY_TITLE}\n{state.summary}"
        if self.harness.memory is not None and state.notes:
            text += f"\n{self.harness.memory.file}:\n{state.notes}"
        return Observation((*self._opening, Message("user", text)))

    def state(self) -> JsonObject:
        """The environment's state, and the harness's own under `STATE_KEY`."""
        inner = self.inner.state()
        if STATE_KEY in inner:
            raise EnvError(f"{self.spec.id}: its state may have no key {STATE_KEY}: rename it")
        return {**inner, STATE_KEY: to_plain(self.progress)}

    async def grade(self) -> Outcome:
        """The environment's judgement."""
        return await self.inner.grade()

    async def close(self) -> None:
        """Close the environment's session."""
        self._is_open = False
        await self.inner.close()

    async def _act(self, message: Message, naming: Naming, own: Mapping[str, Tool]) -> StepResult:
        """Carry out a message whose calls are in the names of `naming`."""
        if message.role != "assistant" or message.malformed is not None or not message.tool_calls:
            result = await self.inner.act(message)
            return replace(result, messages=tuple(map(self._show, result.messages)))
        calls = dict(enumerate(copy.deepcopy(message.tool_calls), start=1))
        read = {at: _checked(naming.call_in(call), own, naming) for at, call in calls.items()}
        mine = {at: c for at, c in read.items() if isinstance(c, ToolCall) and c.tool in own}
        theirs = tuple(_numbered(read[at], at) for at in calls if at not in mine)
        result = StepResult((), (), False)
        if theirs:
            result = await self.inner.act(replace(message, tool_calls=theirs))
        elif not self._is_open:
            raise EnvError(f"{self.spec.id}: act on a session that is not open or has ended")
        said = {m.index: m for m in result.messages if m.role == "tool"}
        answers: dict[int, tuple[ToolResult, ToolRecord]] = {}
        for record in result.records:
            at = record.call.index
            answers[at] = _shown(calls[at], read[at], record, said.get(at), naming)
        self._is_open = not result.terminated
        for at, each in mine.items():
            # A sub-agent may end the session too.
            if self._is_open:
                answers[at] = await _call_own(calls[at], each, own, naming)
        pairs = [answers[at] for at in sorted(answers)]
        records = tuple(record for _, record in pairs)
        if not self._is_open:
            return StepResult((), records, True)
        messages = [Message("tool", r.content, tool=r.tool, index=r.index) for r, _ in pairs]
        others = [self._show(m) for m in result.messages if m.role != "tool"]
        return StepResult((*messages, *others), records, False)

    async def _assign(self, task: str) -> ToolOutput:
        """Have a sub-agent do `task`; its answer."""
        settings, state = self.harness.sub_agents, self.progress
        assert settings is not None
        if state.num_sub_agents >= settings.max_count:
            return ToolOutput(f"all {settings.max_count} sub-agents are used", ToolStatus.ERROR)
        if self.run_sub_agent is None:
            raise EnvError(f"{self.spec.id}: nobody plays the sub-agents of this session")
        specs = [spec for spec in self.inner.tools if spec.name in settings.tools]
        naming = Naming(specs, self.harness.tools)
        job = SubAgentJob(
            number=state.num_sub_agents,
            messages=(Message("system", settings.prompt), Message("user", task)),
            tools=naming.specs,
            max_turns=settings.max_turns,
            max_tokens=settings.max_tokens,
            act=lambda message: self._act(message, naming, {}),
        )
        report = await self.run_sub_agent(job)
        state.num_sub_agents += 1
        state.num_sub_agent_tokens += report.num_tokens
        plain: JsonObject = to_plain(report)
        state.sub_agents.append(plain)
        if report.answer is None:
            return ToolOutput("the sub-agent came to no answer", ToolStatus.ERROR)
        return ToolOutput(report.answer)

    def _system_prompt(self) -> str:
        parts = [self.harness.system_prompt]
        if self.harness.skills:
            lines = [f"{name}: {text.partition(chr(10))[0]}" for name, text in self._skills()]
            parts.append("Skills: " + "; ".join(lines))
        return "\n".join(filter(None, parts))

    def _skills(self) -> list[tuple[str, str]]:
        return list(self.harness.skills.items())

    def _show(self, message: Message) -> Message:
        return replace(message, content=self.naming.text_out(message.content))


def recorded_reports(state: JsonObject) -> tuple[SubAgentReport, ...]:
    """What the sub-agents of a step did, from the state that was stored after it."""
    plain = state.get(STATE_KEY, {}).get("sub_agents", [])
    return tuple(from_plain(SubAgentReport, each) for each in plain)


def was_summary(state: JsonObject) -> bool:
    """Whether a step was a summary, from the state that was stored after it."""
    return bool(state.get(STATE_KEY, {}).get("is_context_closed", False))


def turn_limit(env: ToolEnv, task: Task) -> int:
    """The most turns of a session: the harness's, or else the task's."""
    own = env.harness.max_turns if isinstance(env, HarnessedEnv) else None
    return own or task.limits.max_turns


def _numbered(call: ToolCall | BadCall, at: int) -> ToolCall:
    """A call as the environment gets it, numbered by its place in the message."""
    return ToolCall(NO_TOOL, {}, at) if isinstance(call, BadCall) else replace(call, index=at)


async def _call_own(
    call: ToolCall, read: ToolCall, own: Mapping[str, Tool], naming: Naming
) -> tuple[ToolResult, ToolRecord]:
    """Carry out an own tool's call."""
    result, record = await run_call(own[read.tool], read)
    text = naming.error_out(result.content, result.status, read.tool)
    return answer(call, ToolOutput(text, result.status), record.wall_s)


def _checked(
    call: ToolCall | BadCall, own: Mapping[str, Tool], naming: Naming
) -> ToolCall | BadCall:
    """The call, or what is wrong with it when it is one of an own tool."""
    if isinstance(call, BadCall) or call.tool not in own:
        return call
    problem = check_call(own, call)
    if problem is None:
        return call
    return BadCall(naming.error_out(problem, ToolStatus.ERROR, call.tool))


def _shown(
    call: ToolCall,
    read: ToolCall | BadCall,
    record: ToolRecord,
    message: Message | None,
    naming: Naming,
) -> tuple[ToolResult, ToolRecord]:
    """The environment's answer to `read` as one to `call`, as the policy made it."""
    if isinstance(read, BadCall):
        return answer(call, ToolOutput(read.text, ToolStatus.ERROR), record.wall_s)
    content = record.output if message is None else message.content
    text = naming.error_out(content, record.status, read.tool)
    if text != content:
        return answer(call, ToolOutput(text, record.status), record.wall_s)
    return ToolResult(call.tool, call.index, content, record.status), replace(record, call=call)
