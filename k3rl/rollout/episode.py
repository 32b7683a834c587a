"""One trajectory played by one worker: engine <-> environment <-> sandbox, into the store.

    claim --> sandbox from its last snapshot --> [ turn: engine deltas, appended and acknowledged
      ^                                            act: tools run in the sandbox
      |  pause at any token                        commit step + results + snapshot ] ...
      +------------------------------- until the world ends or a limit cuts --> grade, finish

Invariants. Tokens the engine sampled are appended as they are, never re-tokenised. Environment
tokens reach the store only in the commit that carries their snapshot. After a pause or a kill the
sandbox is the last committed snapshot, the acknowledged tokens of the unfinished turn stand, and
the turn goes on behind them; so a resumed trajectory equals an uninterrupted one.

Compaction. When a commit fills a context to the harness's fraction, it also asks for a summary. The
summary is a turn like any other, in the loss; its step closes the context. The next context begins
with a step of its own that has no turn, like step 0. Turns are counted without summaries.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from k3rl.envs.base import Observation, StepResult, ToolEnv
from k3rl.envs.harness.session import HarnessedEnv, turn_limit
from k3rl.envs.owned import OwnedBackend
from k3rl.envs.phases import Deadlines, Phase, within
from k3rl.errors import DeadlineExceeded, EnvError, K3rlError, SandboxError, UncapturableTree
from k3rl.rollout.engine import Delta, GenerateRequest, RolloutEngine, SamplingLaw
from k3rl.rollout.renderer import Renderer
from k3rl.rollout.sub_agents import EngineSubAgents, SubAgentPaused
from k3rl.sandboxes.base import Sandbox, SandboxBackend
from k3rl.sandboxes.blocking import unbroken
from k3rl.sandboxes.spec import SandboxSpec
from k3rl.store.ledger import Ledger
from k3rl.store.protocol import Ack, Claim, StepFrame, TrajectoryStore
from k3rl.types import (
    Author,
    BoolArray,
    FinishReason,
    Float32Array,
    Int32Array,
    Message,
    Outcome,
    OutcomeKind,
    Snapshot,
    Span,
    Step,
    TokenFrame,
    TruncationCause,
)

OVER_BUDGET_REWARD = -1.0
"""Design decision 1 (Kimi K3 report, arXiv 2607.24653 section 4)."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EpisodeParts:
    """What a worker lends to each of its episodes."""

    store: TrajectoryStore
    engine: RolloutEngine
    renderer: Renderer
    backend: SandboxBackend
    seed: int
    """Of every sampling law; the temperature is the trajectory's own."""
    ack_tokens: int = 64
    ledger: Ledger | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)


@dataclass(slots=True)
class _Turn:
    """The present assistant turn."""

    start: int
    finish_reason: FinishReason | None = None
    generate_s: float = 0.0


class Episode:
    """Plays one claim until it finishes or is paused. Single use."""

    def __init__(self, parts: EpisodeParts, env: ToolEnv, spec: SandboxSpec, claim: Claim) -> None:
        """`env` is a fresh session of the claim's environment, `spec` where its tools run."""
        self.parts, self.env, self.spec, self.claim = parts, env, spec, claim
        self.id, self.epoch, self.task = claim.header.id, claim.epoch, claim.header.task
        self.steps = list(claim.steps)
        self.snapshot: Snapshot | None = claim.snapshot
        self.sandbox: Sandbox | None = None
        self._owned = OwnedBackend(parts.backend, parts.deadlines.close_s)
        self.is_pausing = False
        no_tokens = np.empty(0, np.int32)
        self._ids: list[Int32Array] = [claim.tokens.token_ids if claim.tokens else no_tokens]
        self._num_tokens = len(self._ids[0])
        self._context = claim.tokens.context if claim.tokens else 0
        self._num_sampled = claim.num_sampled
        self._started = time.monotonic()
        self._harnessed = env if isinstance(env, HarnessedEnv) else None
        self._sub_agents = EngineSubAgents(parts.engine, parts.renderer, claim.header, parts.seed)
        if self._harnessed is not None:
            self._harnessed.run_sub_agent = self._sub_agents

    async def pause(self) -> None:
        """Ask the episode to give its trajectory back at the next token or step end."""
        self.is_pausing = True
        await self.parts.engine.abort(self.id)
        await self._sub_agents.pause()

    async def run(self) -> Outcome | None:
        """Play; returns the outcome, or None when the trajectory was paused."""
        await self._note(list(self.claim.acks))
        try:
            outcome = await self._play()
        except SubAgentPaused:
            outcome = None
        except UncapturableTree as error:
            outcome = Outcome(OutcomeKind.POLICY_FAULT, 0.0, detail=str(error))
        except SandboxError as error:
            outcome = Outcome(OutcomeKind.INFRA_FAULT, detail=str(error))
        except EnvError as error:  # the grader's, or a bug of the environment's author
            outcome = Outcome(OutcomeKind.GRADER_FAULT, detail=str(error))
        finally:
            await self._close()
        if outcome is None:
            await self.parts.store.pause(self.id, self.epoch)
        else:
            await self.parts.store.finish(self.id, self.epoch, outcome)
        return outcome

    async def _play(self) -> Outcome | None:
        await self._open()
        if self.steps[-1].is_terminal:
            return await self._grade()
        while True:
            if self._harnessed is not None and self._harnessed.is_context_closed:
                await self._open_context(self._harnessed)
            if self._num_turns() >= turn_limit(self.env, self.task):
                return await self._truncate(TruncationCause.TURNS)
            if self._live_s() > self.task.limits.max_time_s:
                return await self._truncate(TruncationCause.TIME)
            turn = await self._generate()
            if turn.finish_reason is FinishReason.ABORT:
                return None
            if turn.finish_reason is FinishReason.BUDGET:
                cause = TruncationCause.BUDGET
                return Outcome(OutcomeKind.TRUNCATED, OVER_BUDGET_REWARD, cause=cause)
            if turn.finish_reason is FinishReason.LENGTH:
                return await self._truncate(TruncationCause.CONTEXT)
            try:
                is_over = await self._act(turn)
            except DeadlineExceeded:
                return await self._truncate(TruncationCause.TIME)
            if is_over:
                return await self._grade()
            if self.is_pausing:
                return None

    async def _open(self) -> None:
        """Restore the sandbox and the session, or make both and commit the opening step."""
        is_new = self.snapshot is None
        limit_s = self.parts.deadlines.boot_s
        observation = await within(limit_s, Phase.BOOT, self.task, self._boot())
        if not is_new:
            return
        await self._commit_opening(observation)

    async def _open_context(self, env: HarnessedEnv) -> None:
        """Begin the context that follows a summary."""
        observation = env.next_context()
        self._ids, self._num_tokens, self._context = [], 0, self._context + 1
        await self._commit_opening(observation)

    async def _commit_opening(self, observation: Observation) -> None:
        """Commit the step that a context begins with."""
        level = self.claim.header.key.level
        ids = self.parts.renderer.start(observation.messages, self.env.tools, level)
        step = Step(len(self.steps), 0, len(ids), env_state=self.env.state())
        await self._commit(step, ids)

    def _num_turns(self) -> int:
        """Turns so far, of all contexts, without summaries: each of those closed a context."""
        return sum(step.finish_reason is not None for step in self.steps) - self._context

    async def _boot(self) -> Observation:
        owned, state = self._owned, None
        if self.snapshot is not None:
            sandbox_id = await owned.restore(self.spec, self.snapshot)
            state = self.steps[-1].env_state
        else:
            sandbox_id = await owned.create(self.spec, self.env.files(self.task))
        self.sandbox = Sandbox(cast("SandboxBackend", owned), sandbox_id)
        return await self.env.open(self.task, self.sandbox, state)

    async def _grade(self) -> Outcome:
        limit_s = self.parts.deadlines.grade_s
        return await within(limit_s, Phase.GRADE, self.task, self.env.grade())

    async def _generate(self) -> _Turn:
        """Sample until the turn ends, appending as tokens come."""
        turn = _Turn(self.steps[-1].token_end)
        context = np.concatenate(self._ids)
        self._ids = [context]
        stop_ids = self.parts.renderer.stop_ids
        if len(context) > turn.start and int(context[-1]) in stop_ids:
            turn.finish_reason = FinishReason.STOP
            return turn
        room, cap_reason = self._room()
        if self.is_pausing or room <= 0:
            turn.finish_reason = FinishReason.ABORT if self.is_pausing else cap_reason
            return turn
        began = time.monotonic()
        header = self.claim.header
        law = SamplingLaw(temperature=header.temperature, seed=self.parts.seed)
        request = GenerateRequest(
            header.key, self.task, context, turn.start, room, stop_ids, law, self._context
        )
        turn.finish_reason = await self._sample(request)
        if turn.finish_reason is FinishReason.LENGTH:
            turn.finish_reason = cap_reason
        turn.generate_s = time.monotonic() - began
        return turn

    async def _sample(self, request: GenerateRequest) -> FinishReason:
        """Append every `ack_tokens` tokens, at a version change, and at the end."""
        pending: list[Delta] = []
        count = 0
        reason: FinishReason | None = None
        async for delta in self.parts.engine.generate(request):
            if pending and _versions(delta) != _versions(pending[0]):
                await self._append(pending)
                pending, count = [], 0
            if len(delta.token_ids):
                pending.append(delta)
                count += len(delta.token_ids)
            reason = delta.finish_reason
            if pending and (count >= self.parts.ack_tokens or reason is not None):
                await self._append(pending)
                pending, count = [], 0
            if self.is_pausing and reason is None:
                await self.parts.engine.abort(self.id)
        assert reason is not None, "an engine ends a request with a finish reason"
        return reason

    async def _append(self, pending: list[Delta]) -> None:
        """Make deltas of one version durable, as one span."""
        ids = np.concatenate([delta.token_ids for delta in pending])
        logprobs = np.concatenate([delta.rollout_logprobs for delta in pending])
        span = Span(0, Author.POLICY, *_versions(pending[0]))
        mask = np.ones(len(ids), bool)
        frame = self._frame(ids, mask, logprobs, span)
        ack = await self.parts.store.append(frame)
        self._take(ids)
        self._num_sampled += len(ids)
        await self._note([ack])

    async def _act(self, turn: _Turn) -> bool:
        """Run the turn's tools and commit the step; True when the world has ended."""
        message = self._message(turn)
        began = time.monotonic()
        left_s = max(self.task.limits.max_time_s - self._live_s(), 0.0)
        limit_s = min(left_s, self.parts.deadlines.step_s)
        result = await within(limit_s, Phase.STEP, self.task, self.env.act(message))
        ids = self._results(result)
        step = Step(
            len(self.steps),
            turn.start,
            0,
            calls=result.records,
            finish_reason=turn.finish_reason,
            is_terminal=result.terminated,
            env_state=self.env.state(),
            generate_s=turn.generate_s,
            act_s=time.monotonic() - began,
        )
        await self._commit(step, ids)
        return result.terminated

    def _message(self, turn: _Turn) -> Message:
        context = np.concatenate(self._ids)
        return self.parts.renderer.parse_turn(context[turn.start :])

    def _results(self, result: StepResult) -> Int32Array:
        """What the policy reads next in this context; may ask for a summary."""
        env, renderer = self._harnessed, self.parts.renderer
        if result.terminated or (env is not None and env.is_context_closed):
            return np.empty(0, np.int32)
        ids = renderer.extend(result.messages)
        # The step of these results is not among the steps yet.
        has_turns = self._num_turns() + 1 < turn_limit(self.env, self.task)
        num_tokens = self._num_tokens + len(ids)
        limit = self.task.limits.max_context_tokens
        if env is not None and has_turns and env.wants_summary(num_tokens, limit):
            return renderer.extend([*result.messages, env.ask_summary()])
        return ids

    async def _commit(self, step: Step, ids: Int32Array) -> None:
        """One commit for the step, its environment tokens and the sandbox after it."""
        assert self.sandbox is not None
        began = time.monotonic()
        snapshot = await self.parts.backend.snapshot(self.sandbox.id, step.env_state)
        before = self.snapshot.snapshot_id if self.snapshot else None
        step = replace(
            step,
            token_end=self._num_tokens + len(ids),
            context=self._context,
            snapshot_before=before,
            snapshot_after=snapshot.snapshot_id,
            tree_digest=snapshot.tree_digest,
            snapshot_s=time.monotonic() - began,
        )
        tokens = self._environment_frame(ids) if len(ids) else None
        frame = StepFrame(step, tokens, snapshot)
        acks = await self.parts.store.commit_step(self.id, self.epoch, frame)
        self._take(ids)
        self.steps.append(step)
        self.snapshot = snapshot
        await self._note(acks)

    def _environment_frame(self, ids: Int32Array) -> TokenFrame:
        version = self.parts.engine.policy_version
        span = Span(0, Author.ENVIRONMENT, version, version)
        mask, nan = np.zeros(len(ids), bool), np.full(len(ids), np.nan, np.float32)
        return self._frame(ids, mask, nan, span)

    def _frame(
        self, ids: Int32Array, mask: BoolArray, logprobs: Float32Array, span: Span
    ) -> TokenFrame:
        where = (self.id, self.epoch, self._num_tokens)
        return TokenFrame(*where, ids, mask, logprobs, (span,), context=self._context)

    def _take(self, ids: Int32Array) -> None:
        self._ids.append(ids)
        self._num_tokens += len(ids)

    def _room(self) -> tuple[int, FinishReason]:
        """Tokens that may still be sampled, and which limit that is."""
        room = self.task.limits.max_context_tokens - self._num_tokens
        budget = self.claim.header.budget
        if budget is not None and budget - self._num_sampled < room:
            return budget - self._num_sampled, FinishReason.BUDGET
        return room, FinishReason.LENGTH

    def _live_s(self) -> float:
        """Seconds of live time: of earlier claims by their steps, of this one by the clock."""
        earlier = sum(s.generate_s + s.act_s for s in self.claim.steps)
        return earlier + time.monotonic() - self._started

    async def _truncate(self, cause: TruncationCause) -> Outcome:
        """Cut off by a limit: the grader judges the final state (design decision 2)."""
        graded = await self._grade()
        if graded.reward is None:
            return graded
        return replace(graded, kind=OutcomeKind.TRUNCATED, cause=cause)

    async def _note(self, acks: list[Ack]) -> None:
        if self.parts.ledger is not None and acks:
            await asyncio.to_thread(self.parts.ledger.write, *acks)

    async def _close(self) -> None:
        """Free session and sandboxes, whatever cancels it; failing to is no part of the outcome."""
        await unbroken(self._close_all())

    async def _close_all(self) -> None:
        try:
            limit_s = self.parts.deadlines.close_s
            await within(limit_s, Phase.CLOSE, self.task, self.env.close())
        except K3rlError as error:
            _log.warning("trajectory %s: %s", self.id, error)
        finally:
            if num_left := await self._owned.close_all():
                _log.warning("trajectory %s: %d sandboxes are left behind", self.id, num_left)


def _versions(delta: Delta) -> tuple[int, int]:
    return delta.policy_version, delta.state_version
