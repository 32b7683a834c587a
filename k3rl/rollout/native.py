"""NativeEngine: k3rl's own rollout engine, batched decoding over the model state of every lane.

  generate --> waiting --> a lane (its own, a free one, the one idle longest)
                             --> [ LaneDecoder: one token for every lane served ] ... --> deltas

One asyncio task runs the loop and yields between iterations; an iteration itself never awaits, so
abort, apply and export always see every lane between two tokens. Tokens sampled before a new
version are given out under the old one, and lanes are read again under the new one before their
next token: state_version is policy_version in every delta, and ids once sampled stay as they are.

Log-probs are float32 of the law sampled from (draws.py). They are equal to rounding, not bitwise,
for other batch compositions: the engine does not claim BATCH_INVARIANT.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np

from k3rl.blobs import BlobStore
from k3rl.errors import EngineError, K3rlError, WeightsError
from k3rl.model import checkpoint
from k3rl.model.model import K3Model
from k3rl.rollout.decode import EngineStats, LaneDecoder
from k3rl.rollout.engine import Delta, EngineCapability, GenerateRequest
from k3rl.rollout.kept import KeptState, pack_state, unpack_state
from k3rl.types import Digest, FinishReason, JsonObject, TrajectoryId, digest_bytes
from k3rl.weights.blob import fetch

NO_WEIGHTS = -1
"""Policy version of an engine that was given no weights yet."""
AWAY_S = 0.25
"""A trajectory that ended a turn so long ago is taken for one that does not come back."""
TURNS_OF_OTHERS = 6
"""How often everything else may run between two iterations; each takes microseconds when idle."""
FIRST_VERSION = 0
"""Policy version of the weights an engine is made with."""


@dataclass(slots=True, eq=False)
class _Live:
    """A running request."""

    request: GenerateRequest
    lane: int | None = None
    deltas: asyncio.Queue[Delta | Exception] = field(default_factory=asyncio.Queue)


class NativeEngine:
    """Serves one K3 policy on this process's CPU; the contract is `k3rl.rollout.engine`."""

    def __init__(
        self,
        blobs: BlobStore,
        model: K3Model | None,
        *,
        num_slots: int = 96,
        max_tokens: int = 1100,
        delta_tokens: int = 32,
        extend_every: int = 8,
        linger_s: float = 0.0,
    ) -> None:
        """`model` is version 0; without one the engine generates only after `apply`.

        `blobs` holds published versions. No context may grow beyond `max_tokens`. Lanes with
        several unread tokens wait for the next of every `extend_every` iterations, to be read
        together. While more trajectories are in their tools than run, an iteration waits `linger_s`
        for them to come back.
        """
        self.blobs, self.delta_tokens, self.linger_s = blobs, delta_tokens, linger_s
        self._extend_every = extend_every
        self.num_slots, self.max_tokens = num_slots, max_tokens
        self.policy_version = NO_WEIGHTS
        self.stats = EngineStats()
        self._checksum: Digest | None = None
        self._decoder: LaneDecoder | None = None
        self._live: dict[TrajectoryId, _Live] = {}
        self._waiting: dict[TrajectoryId, _Live] = {}
        self._is_running = asyncio.Event()
        self._is_running.set()
        self._task: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        if model is not None:
            data = checkpoint.to_bytes(model.state_dict(), model.config)
            self._take(model, FIRST_VERSION, digest_bytes(data))

    @property
    def capabilities(self) -> frozenset[EngineCapability]:
        """What this engine promises."""
        return frozenset(
            {
                EngineCapability.EXPORTS_STATE,
                EngineCapability.RAW_LOGPROBS,
                EngineCapability.IN_FLIGHT_UPDATE,
            }
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Sample; deltas hold at most `delta_tokens` tokens of one version."""
        self._check(request)
        if request.max_new_tokens <= 0:
            nothing = request.token_ids[:0], np.empty(0, np.float32)
            yield Delta(*nothing, self.policy_version, self.policy_version, FinishReason.LENGTH)
            return
        live = _Live(request)
        self._live[request.key.id] = self._waiting[request.key.id] = live
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._serve())
        try:
            reason = None
            while reason is None:
                delta = await live.deltas.get()
                if isinstance(delta, Exception):
                    raise delta
                reason = delta.finish_reason
                yield delta
        finally:
            self._leave(live)

    async def abort(self, trajectory_id: TrajectoryId) -> None:
        """End the trajectory's request now, with the tokens sampled so far."""
        if live := self._live.get(trajectory_id):
            self._send(live, FinishReason.ABORT)

    async def pause(self) -> None:
        """Sample nothing until `resume`."""
        self._is_running.clear()

    async def resume(self) -> None:
        """Let the requests go on."""
        self._is_running.set()

    async def apply(self, manifest: JsonObject) -> int:
        """Take a published version, all or nothing, between two tokens of whatever runs.

        The present version again is no change. Raises WeightsError for an older one, for bytes that
        are not what was published, and for weights of another model than the present one.
        """
        data = fetch(self.blobs, manifest)
        version, blob = manifest["policy_version"], manifest["blob"]
        where = f"policy version {version}: blob {blob}"
        if version < self.policy_version:
            raise WeightsError(f"{where}: the engine is at {self.policy_version} already")
        if version == self.policy_version:
            if manifest["checksum"] != self._checksum:
                raise WeightsError(f"{where}: the engine holds other weights under that version")
            return self.policy_version
        try:
            config, tensors = checkpoint.from_bytes(data)
        except K3rlError as error:
            raise WeightsError(f"{where}: {error}") from error
        if self._decoder is not None and config != self._decoder.model.config:
            raise WeightsError(f"{where}: it has another model config than the engine's")
        model = K3Model(config, seed=None)
        model.load_state_dict(tensors)
        for live in self._live.values():
            self._send(live, None)
        self._take(model, version, manifest["checksum"])
        return int(version)

    async def export_state(self, trajectory_id: TrajectoryId) -> bytes:
        """Model state and tokens read of a trajectory. Raises EngineError when none is kept."""
        decoder = self._decoder_or_refuse()
        lanes = decoder.lanes
        lane = lanes.lane_of(trajectory_id)
        if lane is None or not lanes.num_fed[lane]:
            raise EngineError(f"trajectory {trajectory_id}: no model state is kept here")
        read = lanes.token_ids[lane, : lanes.num_fed[lane]].copy()
        kept = KeptState(trajectory_id, int(lanes.version[lane]), read)
        return pack_state(kept, decoder.pool.export(lane))

    async def import_state(self, trajectory_id: TrajectoryId, state: bytes) -> None:
        """Take over a state; one of another version is dropped, and the context read afresh.

        Raises EngineError for bytes that are no such state or belong to another trajectory, while
        the trajectory has a running request here, and when every lane is busy.
        """
        decoder = self._decoder_or_refuse()
        kept, model_state = unpack_state(state, decoder.model.config)
        if kept.trajectory_id != trajectory_id:
            raise EngineError(f"trajectory {trajectory_id}: the state is of {kept.trajectory_id}")
        if trajectory_id in self._live:
            raise EngineError(f"trajectory {trajectory_id} already has a running request")
        if kept.policy_version != self.policy_version or len(kept.token_ids) > self.max_tokens:
            return
        lane = decoder.lanes.seat(trajectory_id)
        if lane is None:
            raise EngineError(f"trajectory {trajectory_id}: all {self.num_slots} lanes are busy")
        decoder.load(lane, kept.token_ids, model_state)
        decoder.lanes.leave(trajectory_id)

    async def aclose(self) -> None:
        """End every running request and the loop."""
        for live in list(self._live.values()):
            self._send(live, FinishReason.ABORT)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def _check(self, request: GenerateRequest) -> None:
        """Refuse what cannot be served, before anything is touched."""
        law, trajectory_id = request.law, request.key.id
        if self._failure is not None:
            raise EngineError(f"the engine has failed: {self._failure}") from self._failure
        if law.temperature not in (0.0, 1.0) or law.top_p != 1.0:
            raise EngineError(f"no law {law}; use temperature 1 or 0 and top-p 1")
        if trajectory_id in self._live:
            raise EngineError(f"trajectory {trajectory_id} already has a running request")
        vocab_size = self._decoder_or_refuse().model.config.vocab_size
        ids = request.token_ids
        if not len(ids) or ids.min() < 0 or ids.max() >= vocab_size:
            raise EngineError(f"trajectory {trajectory_id}: no ids, or ids beyond {vocab_size}")
        if len(ids) + request.max_new_tokens > self.max_tokens:
            raise EngineError(
                f"trajectory {trajectory_id}: {len(ids)} tokens and {request.max_new_tokens} new"
                f" ones are more than the engine's {self.max_tokens}"
            )

    def _decoder_or_refuse(self) -> LaneDecoder:
        if self._decoder is None:
            raise EngineError("the engine has no weights yet: apply a published version first")
        return self._decoder

    def _take(self, model: K3Model, version: int, checksum: Digest) -> None:
        if self._decoder is None:
            settings = (self.num_slots, self.max_tokens, self._extend_every)
            self._decoder = LaneDecoder(model, version, *settings)
            self.stats = self._decoder.stats
        else:
            self._decoder.take(model, version)
        self.policy_version, self._checksum = version, checksum

    async def _serve(self) -> None:
        """The loop, while there are requests; an error of it is the error of every request."""
        try:
            while self._live:
                await self._is_running.wait()
                await self._linger()
                if self._is_running.is_set() and self._live:
                    self._seat_waiting()
                    self._iterate()
        except Exception as error:
            self._failure = error
            for live in list(self._live.values()):
                live.deltas.put_nowait(EngineError(f"the engine has failed: {error}"))

    async def _linger(self) -> None:
        """Let others run, longer while many trajectories are in their tools."""
        lanes = self._decoder_or_refuse().lanes
        num_away = lanes.num_left_since(time.monotonic() - AWAY_S)
        is_thin = self.linger_s > 0 and len(self._live) < num_away
        if is_thin:
            await asyncio.sleep(self.linger_s)
        # An episode between two requests takes many short turns on this event loop.
        for _ in range(TURNS_OF_OTHERS):
            await asyncio.sleep(0)

    def _seat_waiting(self) -> None:
        """Give lanes to requests, in the order they came, while there are any."""
        decoder = self._decoder_or_refuse()
        for trajectory_id, live in list(self._waiting.items()):
            live.lane = decoder.lanes.seat(trajectory_id)
            if live.lane is None:
                return
            del self._waiting[trajectory_id]
            decoder.begin(live.lane, live.request)

    def _iterate(self) -> None:
        """One token for every request that is served now, and the deltas that are due."""
        decoder = self._decoder_or_refuse()
        # The model is fastest on neighbouring slots.
        seated = sorted((live.lane, live) for live in self._live.values() if live.lane is not None)
        rows = np.array([lane for lane, _ in seated])
        picked = decoder.pick(rows)
        rows = rows[picked]
        has_stopped = decoder.sample_next(rows)
        num_tokens = decoder.lanes.num_tokens[rows]
        is_full = num_tokens >= decoder.lanes.limit[rows]
        is_due = num_tokens - decoder.lanes.num_sent[rows] >= self.delta_tokens
        served = np.flatnonzero(picked)
        for index in np.flatnonzero(has_stopped | is_full | is_due).tolist():
            reason = FinishReason.LENGTH if is_full[index] else None
            _, live = seated[served[index]]
            self._send(live, FinishReason.STOP if has_stopped[index] else reason)

    def _send(self, live: _Live, reason: FinishReason | None) -> None:
        """Give out what was sampled since the last delta; with a reason the request ends."""
        sent = live.request.token_ids[:0], np.empty(0, np.float32)
        if live.lane is not None:
            lane, lanes = live.lane, self._decoder_or_refuse().lanes
            new = slice(int(lanes.num_sent[lane]), int(lanes.num_tokens[lane]))
            sent = lanes.token_ids[lane, new].copy(), lanes.logprobs[lane, new].copy()
            lanes.num_sent[lane] = lanes.num_tokens[lane]
        if len(sent[0]) or reason is not None:
            live.deltas.put_nowait(Delta(*sent, self.policy_version, self.policy_version, reason))
        if reason is not None:
            self._leave(live, has_stopped=reason is FinishReason.STOP)

    def _leave(self, live: _Live, has_stopped: bool = False) -> None:
        """The request has ended, or nobody listens to it any more."""
        trajectory_id = live.request.key.id
        if self._live.get(trajectory_id) is live:
            del self._live[trajectory_id]
            self._waiting.pop(trajectory_id, None)
            if live.lane is not None:
                self._decoder_or_refuse().lanes.leave(trajectory_id, has_stopped)
