"""What a policy remembers of a sequence: KDA memories, convolution tails and MLA latents.

`ModelState` is one sequence and travels; `BatchState` is N side by side and feeds a forward pass;
`StatePool` holds the live sequences of an engine, which `K3Model.step` updates in place.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from safetensors.torch import load as read_tensors
from safetensors.torch import save as write_tensors
from torch import Tensor

from k3rl.errors import EngineError, UserInputError
from k3rl.model.config import ModelConfig


@dataclass(frozen=True, eq=False)
class ModelState:
    """One sequence after `num_tokens` tokens. Lk KDA layers, Lm MLA layers."""

    kda: Tensor
    """[Lk, H, K, V] float32."""
    conv: Tensor
    """[Lk, J - 1, 3 H K]: the last inputs of the q, k and v convolutions, oldest first."""
    latents: Tensor
    """[Lm, num_tokens, rank + rope]: the latent after its norm, and the raw shared key slice."""
    num_tokens: int

    def detach(self) -> ModelState:
        """The same values outside the autograd graph."""
        kda, conv, latents = (part.detach() for part in _parts(self))
        return ModelState(kda, conv, latents, self.num_tokens)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> ModelState:
        """On another device or in another dtype; shares what needs no copy."""
        kda, conv, latents = (part.to(device=device, dtype=dtype) for part in _parts(self))
        return ModelState(kda, conv, latents, self.num_tokens)

    def to_bytes(self) -> bytes:
        """As safetensors, which `from_bytes` reads back exactly."""
        parts = {"kda": self.kda, "conv": self.conv, "latents": self.latents}
        return write_tensors(
            {name: part.contiguous() for name, part in parts.items()},
            {"num_tokens": str(self.num_tokens)},
        )

    @classmethod
    def from_bytes(cls, data: bytes, config: ModelConfig) -> Self:
        """The inverse of `to_bytes`. Raises UserInputError on bytes of another shape."""
        try:
            parts = read_tensors(data)
            kda, conv, latents = parts["kda"], parts["conv"], parts["latents"]
            size = int.from_bytes(data[:8], "little")
            num_tokens = int(json.loads(data[8 : 8 + size])["__metadata__"]["num_tokens"])
        except Exception as error:
            # safetensors raises its own type, KeyError or ValueError by what is wrong.
            raise UserInputError(f"not a model state: {error}") from None
        if not all(part.is_floating_point() for part in (kda, conv, latents)):
            raise UserInputError("not a model state: it holds whole numbers")
        expected = _shapes(config, num_tokens)
        found = [tuple(part.shape) for part in (kda, conv, latents)]
        if found != expected:
            raise UserInputError(f"model state has shapes {found}, the model wants {expected}")
        return cls(kda, conv, latents, num_tokens)


def _parts(state: ModelState | BatchState) -> tuple[Tensor, Tensor, Tensor]:
    return state.kda, state.conv, state.latents


def _shapes(config: ModelConfig, num_tokens: int) -> list[tuple[int, ...]]:
    kda = config.kda
    return [
        (config.num_kda_layers, kda.num_heads, kda.head_dim, kda.head_dim),
        (config.num_kda_layers, kda.conv_kernel - 1, 3 * kda.size),
        (config.num_mla_layers, num_tokens, config.mla.latent_dim),
    ]


@dataclass(frozen=True, eq=False)
class BatchState:
    """N sequences side by side."""

    kda: Tensor
    """[Lk, N, H, K, V] float32."""
    conv: Tensor
    """[Lk, N, J - 1, 3 H K]."""
    latents: Tensor
    """[Lm, N, P, rank + rope]; sequence n fills the first lengths[n] of P."""
    lengths: Tensor
    """[N] int64."""

    @classmethod
    def zeros(
        cls,
        config: ModelConfig,
        num_sequences: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Self:
        """Sequences without tokens. States are kept in `dtype`, whatever the model computes in."""
        kda, conv, latents = (
            torch.zeros(shape[0], num_sequences, *shape[1:], dtype=dtype, device=device)
            for shape in _shapes(config, 0)
        )
        lengths = torch.zeros(num_sequences, dtype=torch.int64, device=device)
        return cls(kda, conv, latents, lengths)

    @classmethod
    def join(cls, states: list[ModelState]) -> Self:
        """Sequences of any lengths as a batch."""
        lengths = [state.num_tokens for state in states]
        latents = states[0].latents.new_zeros(
            states[0].latents.shape[0], len(states), max(lengths), states[0].latents.shape[2]
        )
        for index, state in enumerate(states):
            latents[:, index, : state.num_tokens] = state.latents
        kda = torch.stack([state.kda for state in states], 1)
        conv = torch.stack([state.conv for state in states], 1)
        return cls(kda, conv, latents, torch.tensor(lengths, device=kda.device))

    def split(self) -> list[ModelState]:
        """The sequences apart; copies."""
        return [
            ModelState(
                self.kda[:, index].clone(),
                self.conv[:, index].clone(),
                self.latents[:, index, :length].clone(),
                length,
            )
            for index, length in enumerate(self.lengths.tolist())
        ]

    def select(self, sequences: Tensor) -> BatchState:
        """Some of the sequences, [M] int64, in that order; gradients flow through."""
        lengths = self.lengths.index_select(0, sequences)
        longest = int(lengths.max()) if len(lengths) else 0
        kda, conv, latents = (part.index_select(1, sequences) for part in _parts(self))
        return BatchState(kda, conv, latents[:, :, :longest], lengths)

    @classmethod
    def concat(cls, states: list[BatchState]) -> BatchState:
        """The sequences of several batches as one; gradients flow through."""
        longest = max(state.latents.shape[2] for state in states)
        latents = [
            F.pad(state.latents, (0, 0, 0, longest - state.latents.shape[2])) for state in states
        ]
        return cls(
            torch.cat([state.kda for state in states], 1),
            torch.cat([state.conv for state in states], 1),
            torch.cat(latents, 1),
            torch.cat([state.lengths for state in states]),
        )

    def detach(self) -> BatchState:
        """The same values outside the autograd graph."""
        kda, conv, latents = (part.detach() for part in _parts(self))
        return BatchState(kda, conv, latents, self.lengths)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> BatchState:
        """On another device or in another dtype; shares what needs no copy."""
        kda, conv, latents = (part.to(device=device, dtype=dtype) for part in _parts(self))
        return BatchState(kda, conv, latents, self.lengths.to(device=device))


class StatePool:
    """Room for `num_slots` sequences of up to `max_tokens` tokens each."""

    def __init__(
        self,
        config: ModelConfig,
        num_slots: int,
        max_tokens: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        shapes = _shapes(config, max_tokens)
        self.config, self.num_slots, self.max_tokens = config, num_slots, max_tokens
        self.kda, self.conv, self.latents = (
            torch.zeros(shape[0], num_slots, *shape[1:], dtype=dtype, device=device)
            for shape in shapes
        )
        self.lengths = torch.zeros(num_slots, dtype=torch.int64, device=device)
        """[num_slots] int64."""
        self._free = list(range(num_slots - 1, -1, -1))

    def allocate(self) -> int:
        """An empty slot, the lowest free one. Raises EngineError when the pool is full."""
        if not self._free:
            raise EngineError(f"state pool: all {self.num_slots} slots are taken")
        slot = self._free.pop()
        self.clear(slot)
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back. Raises EngineError when it is free already."""
        if slot in self._free or not 0 <= slot < self.num_slots:
            raise EngineError(f"state pool: slot {slot} is not in use")
        self._free.append(slot)
        self._free.sort(reverse=True)

    def clear(self, slot: int) -> None:
        """Make a slot a sequence without tokens.

        Latents go too: masked attention multiplies what lies behind a sequence by 0, and 0 times a
        NaN that an earlier owner left is NaN.
        """
        self.kda[:, slot] = 0
        self.conv[:, slot] = 0
        self.latents[:, slot] = 0
        self.lengths[slot] = 0

    def gather(self, slots: Tensor) -> BatchState:
        """The sequences in `slots` [N], copied."""
        lengths = self.lengths[slots]
        longest = int(lengths.max()) if len(slots) else 0
        latents = self.latents[:, :, :longest].index_select(1, slots)
        return BatchState(
            self.kda.index_select(1, slots), self.conv.index_select(1, slots), latents, lengths
        )

    def scatter(self, slots: Tensor, state: BatchState) -> None:
        """Put sequences into `slots` [N]. Raises EngineError when one is too long."""
        longest = int(state.lengths.max()) if len(slots) else 0
        self.require_room(longest)
        self.kda.index_copy_(1, slots, state.kda.to(self.kda.dtype))
        self.conv.index_copy_(1, slots, state.conv.to(self.conv.dtype))
        latents = state.latents[:, :, :longest].to(self.latents.dtype)
        self.latents[:, :, :longest].index_copy_(1, slots, latents)
        self.lengths[slots] = state.lengths

    def require_room(self, num_tokens: int) -> None:
        """Raise EngineError unless a sequence of so many tokens fits."""
        if num_tokens > self.max_tokens:
            raise EngineError(
                f"state pool: a sequence of {num_tokens} tokens exceeds max_tokens "
                f"{self.max_tokens}"
            )

    def export(self, slot: int) -> ModelState:
        """The sequence in `slot`, copied."""
        return self.gather(torch.tensor([slot], device=self.lengths.device)).split()[0]

    def load(self, slot: int, state: ModelState) -> None:
        """Put a sequence into `slot`. Raises EngineError when it is too long."""
        where = self.lengths.device
        self.scatter(torch.tensor([slot], device=where), BatchState.join([state]).to(where))
