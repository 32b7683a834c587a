"""A model as a judge: any rollout engine that reads two outputs and writes a verdict."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary

import numpy as np

from k3rl.envs.judge import Verdict, judge_messages, read_verdict
from k3rl.errors import EngineError, GraderError
from k3rl.rollout import xtml
from k3rl.rollout.engine import GenerateRequest, RolloutEngine, SamplingLaw
from k3rl.rollout.renderer import Renderer
from k3rl.types import FinishReason, Message, Task, TrajectoryKey

JUDGE_ENV = "k3rl/Judge-v0"
"""Names the tasks of judges; scripted engines find their script under it."""


class ModelJudge:
    """A `Judge` over an engine. Equal comparisons get equal verdicts while the version stays."""

    def __init__(
        self,
        engine: RolloutEngine,
        renderer: Renderer,
        *,
        num_tries: int = 3,
        max_new_tokens: int = 4096,
        effort: str = xtml.DEFAULT_EFFORT,
        law: SamplingLaw | None = None,
    ) -> None:
        """An answer that is no verdict is sampled again, `num_tries` times in all.

        Does not own the engine, which may serve rollouts at the same time.
        """
        self.engine, self.renderer, self.num_tries = engine, renderer, num_tries
        self.max_new_tokens, self.effort, self.law = max_new_tokens, effort, law or SamplingLaw()
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def compare(self, question: str, left: str, right: str) -> Verdict:
        """See `Judge`. Raises GraderError after the last try, and when the engine fails."""
        task = Task(JUDGE_ENV, 0, metadata={"question": question, "left": left, "right": right})
        messages = judge_messages(question, left, right)
        # An engine serves one request of a trajectory at a time, and equal questions are equal.
        lock = self._asking.setdefault(task.key, asyncio.Lock())
        async with lock:
            for attempt in range(self.num_tries):
                said = await self._ask(task, messages, attempt)
                verdict = read_verdict(said.content) if said is not None else None
                if verdict is not None:
                    return verdict
        raise GraderError(f"judge: no verdict on {task.key} in {self.num_tries} tries")

    async def _ask(self, task: Task, messages: tuple[Message, ...], attempt: int) -> Message | None:
        """The judge's turn; None when it has no end."""
        ids = self.renderer.start(messages, (), self.effort)
        key = TrajectoryKey("judge", task.key, self.effort, 0, 0, attempt)
        room, stops = self.max_new_tokens, self.renderer.stop_ids
        request = GenerateRequest(key, task, ids, len(ids), room, stops, self.law)
        sampled, reason = [ids[:0]], None
        try:
            async for delta in self.engine.generate(request):
                sampled.append(delta.token_ids)
                reason = delta.finish_reason
        except EngineError as error:
            raise GraderError(f"judge: its engine failed: {error}") from error
        if reason is not FinishReason.STOP:
            return None
        message = self.renderer.parse_turn(np.concatenate(sampled))
        return message if message.malformed is None else None
