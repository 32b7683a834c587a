"""Batched decoding over lanes: one iteration reads what is unread and samples a token per lane.

A lane that misses only its last token is stepped; others are extended, several at a time. Under a
new version a lane that an older one has read is cleared and read again from its first token
(`refresh`), so all of a lane's state always comes from one version.

Axes: B lanes of an iteration, d hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k3rl.model.model import K3Model
from k3rl.model.state import ModelState, StatePool
from k3rl.rollout.draws import sample, uniforms
from k3rl.rollout.engine import GenerateRequest
from k3rl.rollout.lanes import Lanes
from k3rl.types import Int32Array

EXTEND_TOKENS = 4096
"""Most padded tokens of one `extend`: bounds its memory and evens out its lengths."""
Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine was made."""

    num_steps: int = 0
    """Iterations: every lane served in one sampled one token."""
    decoded_tokens: int = 0
    num_prefills: int = 0
    """Contexts read from their first token: new here, evicted, or changed elsewhere."""
    prefill_tokens: int = 0
    num_refreshes: int = 0
    """Contexts read again because an older version had read them."""
    refresh_tokens: int = 0
    num_cache_hits: int = 0
    """Requests that went on from a kept state."""
    num_extends: int = 0
    """Iterations in which lanes were extended."""
    extend_tokens: int = 0
    """Tokens read several at a time: prefills, refreshes and tool results."""


class LaneDecoder:
    """One model, its lanes and their states."""

    def __init__(
        self, model: K3Model, version: int, num_lanes: int, max_tokens: int, extend_every: int
    ) -> None:
        """Lanes that must be extended wait for every `extend_every`th iteration, together."""
        self.stats, self.extend_every = EngineStats(), extend_every
        self.lanes = Lanes(num_lanes, max_tokens, model.config.vocab_size)
        self.pool = StatePool(model.config, num_lanes, max_tokens)
        for _ in range(num_lanes):
            self.pool.allocate()
        self._since_extend = 0
        self.take(model, version)

    def take(self, model: K3Model, version: int) -> None:
        """Decode with another version of the same model from now on."""
        self.model, self.version = model.requires_grad_(False), version

    def begin(self, lane: int, request: GenerateRequest) -> None:
        """Write a request into its lane and see what the lane's state is good for."""
        lanes, context = self.lanes, request.token_ids
        if not lanes.has_read(lane, context):
            lanes.forget(lane)
        elif lanes.version[lane] == self.version:
            self.stats.num_cache_hits += 1
        lanes.hold(lane, context)
        offset, end = len(context), len(context) + request.max_new_tokens
        numbers = uniforms(request.law.seed, request.stream, offset, request.max_new_tokens)
        lanes.uniforms[lane, offset:end] = numbers
        lanes.limit[lane] = end
        lanes.is_greedy[lane] = request.law.temperature == 0.0
        lanes.is_stop[lane] = False
        lanes.is_stop[lane, list(request.stop_ids)] = True

    def load(self, lane: int, token_ids: Int32Array, state: ModelState) -> None:
        """Let a lane be what this version has made of `token_ids` elsewhere."""
        self.pool.load(lane, state)
        self.lanes.hold(lane, token_ids)
        self.lanes.num_fed[lane], self.lanes.version[lane] = len(token_ids), self.version

    def pick(self, rows: Rows) -> Mask:
        """Which of the lanes [B] the next iteration serves; at least one."""
        is_single = self._is_single(rows)
        self._since_extend += 1
        if is_single.any() and self._since_extend < self.extend_every:
            return is_single
        if not is_single.all():
            self._since_extend = 0
        return np.ones(len(rows), bool)

    @torch.inference_mode()
    def sample_next(self, rows: Rows) -> Mask:
        """Bring the lanes [B] up to their contexts and sample one token each.

        Returns which of the new tokens are stop ids.
        """
        lanes = self.lanes
        hidden = self._read(rows)
        offsets = lanes.num_tokens[rows]
        drawn, logprobs = sample(
            self.model.head(hidden),
            torch.from_numpy(lanes.uniforms[rows, offsets]),
            torch.from_numpy(lanes.is_greedy[rows]),
        )
        ids = drawn.numpy()
        lanes.token_ids[rows, offsets] = ids
        lanes.logprobs[rows, offsets] = logprobs.numpy()
        lanes.num_tokens[rows] = offsets + 1
        self.stats.num_steps += 1
        self.stats.decoded_tokens += len(rows)
        is_stop: Mask = lanes.is_stop[rows, ids]
        return is_stop

    def _is_single(self, rows: Rows) -> Mask:
        """Which lanes only miss their last token."""
        num_unread = self.lanes.num_tokens[rows] - self.lanes.num_fed[rows]
        is_single: Mask = (self.lanes.version[rows] == self.version) & (num_unread == 1)
        return is_single

    def _read(self, rows: Rows) -> Tensor:
        """Read all that is unread; hidden states of the last tokens [B, d]."""
        lanes = self.lanes
        is_single = self._is_single(rows)
        if is_single.all():
            hidden = self._step(rows)
        else:
            self._clear_outdated(rows)
            hidden = torch.empty(len(rows), self.model.config.hidden_size)
            if is_single.any():
                hidden[torch.from_numpy(is_single)] = self._step(rows[is_single])
            num_unread = lanes.num_tokens[rows] - lanes.num_fed[rows]
            longer = np.flatnonzero(~is_single)
            for places in _batches(longer[np.argsort(num_unread[longer])], num_unread):
                hidden[torch.from_numpy(places)] = self._extend(rows[places])
            self.stats.num_extends += 1
        lanes.num_fed[rows] = lanes.num_tokens[rows]
        lanes.version[rows] = self.version
        return hidden

    def _step(self, rows: Rows) -> Tensor:
        """Feed the last tokens; hidden [B, d]."""
        last = self.lanes.token_ids[rows, self.lanes.num_tokens[rows] - 1]
        return self.model.step(_int64(last), self.pool, torch.from_numpy(rows))

    def _extend(self, rows: Rows) -> Tensor:
        """Feed all unread tokens; hidden of the last ones [B, d]."""
        lanes = self.lanes
        unread = [lanes.token_ids[r, lanes.num_fed[r] : lanes.num_tokens[r]] for r in rows]
        ends = np.cumsum([len(ids) for ids in unread])
        self.stats.extend_tokens += int(ends[-1])
        hidden = self.model.extend(
            _int64(np.concatenate(unread)),
            torch.from_numpy(np.concatenate([[0], ends])),
            self.pool,
            torch.from_numpy(rows),
        )
        return hidden[torch.from_numpy(ends - 1)]

    def _clear_outdated(self, rows: Rows) -> None:
        """Clear the states that another version has read, or that are of no use."""
        lanes = self.lanes
        for lane in rows[lanes.version[rows] != self.version].tolist():
            self.pool.clear(lane)
            count = int(lanes.num_tokens[lane])
            if lanes.num_fed[lane]:
                self.stats.num_refreshes += 1
                self.stats.refresh_tokens += count
            else:
                self.stats.num_prefills += 1
                self.stats.prefill_tokens += count
            lanes.forget(lane)


def _int64(array: Int32Array) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))


def _batches(places: Rows, lengths: Rows) -> Iterator[Rows]:
    """Cut places, sorted by their length, so that none is more than EXTEND_TOKENS when padded."""
    start = 0
    for end in range(1, len(places) + 1):
        is_last = end == len(places)
        if is_last or (end + 1 - start) * lengths[places[end]] > EXTEND_TOKENS:
            yield places[start:end]
            start = end
