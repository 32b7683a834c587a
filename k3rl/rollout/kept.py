"""A kept model state as bytes, so that another engine can carry a trajectory on.

uint32 length of the head | head: `encode(KeptState)` | ModelState bytes
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from k3rl.errors import EngineError, K3rlError
from k3rl.model.config import ModelConfig
from k3rl.model.state import ModelState
from k3rl.types import Int32Array, TrajectoryId, decode, encode


@dataclass(frozen=True, slots=True, eq=False)
class KeptState:
    """What a model state is the state of."""

    trajectory_id: TrajectoryId
    policy_version: int
    """The version that computed all of it."""
    token_ids: Int32Array
    """The tokens it has read."""


def pack_state(kept: KeptState, state: ModelState) -> bytes:
    """Both as bytes."""
    head = encode(kept)
    return struct.pack("<I", len(head)) + head + state.to_bytes()


def unpack_state(data: bytes, config: ModelConfig) -> tuple[KeptState, ModelState]:
    """The inverse of `pack_state` for a model of `config`. Raises EngineError."""
    try:
        (size,) = struct.unpack_from("<I", data)
        kept = decode(KeptState, data[4 : 4 + size])
        state = ModelState.from_bytes(data[4 + size :], config)
    except (struct.error, K3rlError) as error:
        raise EngineError(f"not a kept model state: {error}") from error
    if state.num_tokens != len(kept.token_ids):
        raise EngineError(
            f"not a kept model state: {len(kept.token_ids)} tokens, but a state of"
            f" {state.num_tokens}"
        )
    return kept, state
