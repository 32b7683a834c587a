"""The RolloutEngine contract: token ids in, ids and log-probs out; partial and resumable.

A request names all the tokens of a context so far. An engine keeps whatever state it likes between
requests of one trajectory, but a fresh engine given the same request continues the same way: what
is sampled at a token offset depends on (seed, trajectory id, context, offset) and the law alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

from k3rl.types import (
    FinishReason,
    Float32Array,
    Int32Array,
    JsonObject,
    Task,
    TrajectoryId,
    TrajectoryKey,
)


class EngineCapability(StrEnum):
    """What an engine can promise; a missing one is shown by the conformance suite."""

    BATCH_INVARIANT = "batch_invariant"
    EXPORTS_STATE = "exports_state"
    ROUTER_IDS = "router_ids"
    RAW_LOGPROBS = "raw_logprobs"
    IN_FLIGHT_UPDATE = "in_flight_update"


@dataclass(frozen=True, slots=True)
class SamplingLaw:
    """The law sampled from; rollout_logprobs are those of this law (design.md 2b, decision 9)."""

    temperature: float = 1.0
    """1 is the law that is trained; 0 takes the most likely id, whose log-prob is then 0."""
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class GenerateRequest:
    """Continue one context until a stop id or `max_new_tokens`."""

    key: TrajectoryKey
    task: Task
    """What a scripted policy plays from; an engine with a model must not look at it."""
    token_ids: Int32Array
    """The whole context so far, including tokens of an unfinished turn."""
    turn_start: int
    """Offset of the present assistant turn's first token; len(token_ids) when it has none yet."""
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    law: SamplingLaw = field(default_factory=SamplingLaw)
    context: int = 0
    """Number of the context within its trajectory."""

    @property
    def stream(self) -> str:
        """Names the random numbers: the trajectory's id, and the context behind the first one."""
        return f"{self.key.id}/{self.context}" if self.context else self.key.id


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """Some sampled tokens. All of one delta come from one version."""

    token_ids: Int32Array
    rollout_logprobs: Float32Array
    policy_version: int
    state_version: int
    finish_reason: FinishReason | None = None
    """Set on the last delta of a request, and only there."""


@runtime_checkable
class RolloutEngine(Protocol):
    """Serves one policy version at a time."""

    policy_version: int

    @property
    def capabilities(self) -> frozenset[EngineCapability]:
        """What this engine promises."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Sample; the last delta carries a finish reason. Raises EngineError on a refused law."""
        ...

    async def abort(self, trajectory_id: TrajectoryId) -> None:
        """End the trajectory's running request with `FinishReason.ABORT`; unknown ids are fine."""
        ...

    async def pause(self) -> None:
        """Finish no further token until `resume`; requests stay open."""
        ...

    async def resume(self) -> None:
        """Undo `pause`."""
        ...

    async def apply(self, manifest: JsonObject) -> int:
        """Take a published policy version, all or nothing; returns it.

        The present version again is no change; an older one raises WeightsError. Requests go on:
        tokens sampled after this come from the new version.
        """
        ...

    async def export_state(self, trajectory_id: TrajectoryId) -> bytes:
        """The model state kept for a trajectory.

        Raises EngineError without EXPORTS_STATE, and when none is kept.
        """
        ...

    async def import_state(self, trajectory_id: TrajectoryId, state: bytes) -> None:
        """Take over a state exported elsewhere; one of another version is not used.

        Raises EngineError without EXPORTS_STATE, and for bytes that are no state of the trajectory.
        """
        ...

    async def aclose(self) -> None:
        """Free everything."""
        ...
