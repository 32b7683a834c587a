"""ScriptedEngine: a rollout engine whose law is a scripted policy of the environment.

It drives oracles, random players and benches through the very path a model takes: token ids in,
deltas out, aborts at any token, resumption from a half-sampled turn. Given the seed a script is
deterministic, so its law is a point mass and every rollout log-prob is 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np

from k3rl.envs.base import ScriptedPolicy
from k3rl.errors import EngineError
from k3rl.rollout.engine import Delta, EngineCapability, GenerateRequest
from k3rl.rollout.renderer import Renderer
from k3rl.types import FinishReason, JsonObject, TrajectoryId, philox

SCRIPT_VERSION = 0
"""Scripts have no weights: one version for ever."""


class ScriptedEngine:
    """Plays `policies[sample_index mod len]` of the task's environment."""

    policy_version = SCRIPT_VERSION

    def __init__(
        self,
        renderer: Renderer,
        policies: Sequence[str],
        find_policy: Callable[[str, str], ScriptedPolicy],
        *,
        delta_tokens: int = 32,
        tokens_per_s: float | None = None,
    ) -> None:
        """`find_policy(env_id, name)` resolves a script; `tokens_per_s` paces each trajectory."""
        self.renderer = renderer
        self.policies = tuple(policies)
        self.find_policy = find_policy
        self.delta_tokens = delta_tokens
        self.tokens_per_s = tokens_per_s
        self._running = asyncio.Event()
        self._running.set()
        self._aborts: dict[TrajectoryId, asyncio.Event] = {}

    @property
    def capabilities(self) -> frozenset[EngineCapability]:
        """A script does not depend on its batch, and its log-probs are those of its own law."""
        return frozenset({EngineCapability.BATCH_INVARIANT, EngineCapability.RAW_LOGPROBS})

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Emit the script's turn from where the context stands."""
        if (request.law.temperature, request.law.top_p) != (1.0, 1.0):
            raise EngineError(f"a scripted policy has no law {request.law}; use T = 1, top-p 1")
        trajectory_id = request.key.id
        if trajectory_id in self._aborts:
            raise EngineError(f"trajectory {trajectory_id} already has a running request")
        aborted = self._aborts[trajectory_id] = asyncio.Event()
        try:
            rest = self._rest_of_turn(request)
            limit = min(len(rest), request.max_new_tokens)
            ending = FinishReason.STOP if limit == len(rest) else FinishReason.LENGTH
            if limit <= 0:
                yield _delta(rest[:0], ending)
                return
            for start in range(0, limit, self.delta_tokens):
                ids = rest[start : min(start + self.delta_tokens, limit)]
                await self._pace(len(ids), aborted)
                if aborted.is_set():
                    yield _delta(ids[:0], FinishReason.ABORT)
                    return
                yield _delta(ids, ending if start + len(ids) == limit else None)
        finally:
            del self._aborts[trajectory_id]

    async def abort(self, trajectory_id: TrajectoryId) -> None:
        """End the trajectory's request at its next delta."""
        if event := self._aborts.get(trajectory_id):
            event.set()

    async def pause(self) -> None:
        """Hold every request before its next delta."""
        self._running.clear()

    async def resume(self) -> None:
        """Let the requests go on."""
        self._running.set()

    async def apply(self, manifest: JsonObject) -> int:
        """Refused: a script has no weights."""
        raise EngineError("a scripted policy has no weights to apply")

    async def export_state(self, trajectory_id: TrajectoryId) -> bytes:
        """Refused: a script keeps no state."""
        raise EngineError("a scripted policy keeps no state (no capability exports_state)")

    async def import_state(self, trajectory_id: TrajectoryId, state: bytes) -> None:
        """Refused: a script keeps no state."""
        raise EngineError("a scripted policy keeps no state (no capability exports_state)")

    async def aclose(self) -> None:
        """End every running request."""
        for event in self._aborts.values():
            event.set()
        self._running.set()

    def _rest_of_turn(self, request: GenerateRequest) -> np.ndarray:
        """What the script still has to say, after the tokens of the turn that stand already."""
        name = self.policies[request.key.sample_index % len(self.policies)]
        policy = self.find_policy(request.task.env_id, name)
        transcript = self.renderer.parse_context(request.token_ids[: request.turn_start])
        rng = philox(request.law.seed, request.stream, request.turn_start)
        turn = self.renderer.assistant_ids(policy(request.task, transcript, rng))
        said = request.token_ids[request.turn_start :]
        if not np.array_equal(turn[: len(said)], said):
            raise EngineError(f"trajectory {request.key.id}: its turn is not what {name} would say")
        return turn[len(said) :]

    async def _pace(self, num_tokens: int, aborted: asyncio.Event) -> None:
        if self.tokens_per_s is None:
            await asyncio.sleep(0)
        else:
            timeout = asyncio.timeout(num_tokens / self.tokens_per_s)
            try:
                async with timeout:
                    await aborted.wait()
            except TimeoutError:
                pass
        await self._running.wait()


def _delta(ids: np.ndarray, finish_reason: FinishReason | None) -> Delta:
    logprobs = np.zeros(len(ids), np.float32)
    return Delta(ids, logprobs, SCRIPT_VERSION, SCRIPT_VERSION, finish_reason)
