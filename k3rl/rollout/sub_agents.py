"""Sub-agents played by the trajectory's own engine.

Their contexts are no part of the trajectory: none of their tokens reaches the store as tokens, so
none can be in the loss; the harness keeps their messages in its state, which is all that replay
needs. Sampling is keyed by a child key, so a step that is run again after a kill has them do the
same again. They run under the version that the engine serves, and outside the token budget.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from k3rl.envs.harness.sub_agents import SubAgentJob, SubAgentReport
from k3rl.errors import EngineError
from k3rl.rollout.engine import GenerateRequest, RolloutEngine, SamplingLaw
from k3rl.rollout.renderer import Renderer
from k3rl.types import FinishReason, Int32Array, Message, TrajectoryHeader, TrajectoryKey


class SubAgentPaused(EngineError):
    """The engine was told to stop in the middle of a job; the step has to be run again."""


class EngineSubAgents:
    """A `SubAgentRunner` for one trajectory."""

    def __init__(
        self, engine: RolloutEngine, renderer: Renderer, header: TrajectoryHeader, seed: int
    ) -> None:
        """Jobs are sampled from the trajectory's own law."""
        self.engine, self.renderer, self.header = engine, renderer, header
        self.law = SamplingLaw(temperature=header.temperature, seed=seed)
        self._key: TrajectoryKey | None = None
        self._is_pausing = False

    async def pause(self) -> None:
        """Let the running job, and any further one, raise SubAgentPaused."""
        self._is_pausing = True
        if self._key is not None:
            await self.engine.abort(self._key.id)

    async def __call__(self, job: SubAgentJob) -> SubAgentReport:
        """Play a job to its answer or its limits. Raises SubAgentPaused."""
        self._key = child_key(self.header, job.number)
        try:
            return await self._play(job, self._key)
        finally:
            self._key = None

    async def _play(self, job: SubAgentJob, key: TrajectoryKey) -> SubAgentReport:
        ids = self.renderer.start(job.messages, job.tools, key.level)
        turns: list[Message] = []
        num_tokens = 0
        while len(turns) < job.max_turns:
            start = len(ids)
            room = self.header.task.limits.max_context_tokens - start
            sampled, reason = await self._sample(key, ids, min(room, job.max_tokens - num_tokens))
            ids, num_tokens = np.concatenate([ids, sampled]), num_tokens + len(sampled)
            if reason is not FinishReason.STOP:
                break
            turn = self.renderer.parse_turn(ids[start:])
            turns.append(turn)
            if turn.malformed is not None:
                answers: tuple[Message, ...] = (Message("system", f"error: {turn.malformed}"),)
            elif not turn.tool_calls:
                return SubAgentReport(tuple(turns), turn.content, num_tokens)
            else:
                result = await job.act(turn)
                if result.terminated:
                    break
                answers = result.messages
            ids = np.concatenate([ids, self.renderer.extend(answers)])
        return SubAgentReport(tuple(turns), None, num_tokens)

    async def _sample(
        self, key: TrajectoryKey, ids: Int32Array, room: int
    ) -> tuple[Int32Array, FinishReason | None]:
        """One turn after `ids` and why it ended."""
        if self._is_pausing:
            raise SubAgentPaused
        if room <= 0:
            return np.empty(0, np.int32), FinishReason.LENGTH
        stop_ids, task = self.renderer.stop_ids, self.header.task
        request = GenerateRequest(key, task, ids, len(ids), room, stop_ids, self.law)
        parts, reason = [np.empty(0, np.int32)], None
        async for delta in self.engine.generate(request):
            parts.append(delta.token_ids)
            reason = delta.finish_reason
            if self._is_pausing and reason is None:
                await self.engine.abort(key.id)
        if reason is FinishReason.ABORT:
            raise SubAgentPaused
        return np.concatenate(parts), reason


def child_key(header: TrajectoryHeader, number: int) -> TrajectoryKey:
    """What the sampling of a trajectory's `number`-th sub-agent is keyed by."""
    return replace(header.key, run_id=f"{header.id}/sub-agent/{number}")
