"""One-token steps of the whole model: what `K3Model.step` runs, on weights laid out once.

At one token per sequence an operator costs more than its arithmetic, so a step is written in few
of them, on the matrices of `step_layers`. A plan is valid for the weights it was made from.

Sources of the attention residuals lie in one buffer [S, B, d]; its last row is the running sum. A
source that is finished has its scores for all later mixers computed at once.

Axes: B sequences, S sources, Lk KDA layers, C = 3 H K channels, J taps.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from k3rl.model.config import ModelConfig
from k3rl.model.kda import KimiDeltaAttention
from k3rl.model.mla import GatedMla, hide_after
from k3rl.model.ops import wide
from k3rl.model.routing import Routing
from k3rl.model.state import StatePool
from k3rl.model.step_layers import (
    DenseStep,
    KdaStep,
    MlaStep,
    MoeStep,
    Reach,
    norm_floor,
    unit_rows,
)

if TYPE_CHECKING:
    from k3rl.model.model import Decoder, DecoderLayer

_VERSION = attrgetter("_version")


class _Batch:
    """The B sequences of one step: where their states lie, and what is read of all layers."""

    def __init__(self, pool: StatePool, slots: Tensor, taps: Tensor | None) -> None:
        """`taps` [Lk, J, C], None without KDA layers. Raises EngineError as `require_room`."""
        self.pool, self.slots = pool, slots
        numbers = slots.tolist()
        first, end = numbers[0], numbers[0] + len(numbers)
        # Neighbouring slots are worked on where they lie; others are copied out and back.
        self.span = slice(first, end) if numbers == list(range(first, end)) else None
        self.lengths = pool.lengths.index_select(0, slots)
        longest = int(self.lengths.max()) + 1
        pool.require_room(longest)
        rows = slots * pool.max_tokens + self.lengths
        bias = hide_after(self.lengths.unsqueeze(1), longest, pool.latents.dtype).squeeze(1)
        self.reach = Reach(rows, self.span, slots, bias)
        self.inputs: list[Tensor] = []
        if taps is not None:
            self.conv, self.memory = self._parts(pool.conv), self._parts(pool.kda)
            self.convolved = (self.conv * taps[:, None, :-1]).sum(2)

    def _parts(self, states: Tensor) -> Tensor:
        return states.index_select(1, self.slots) if self.span is None else states[:, self.span]

    def finish(self) -> None:
        """Write back what was copied out, shift the convolutions and count the token."""
        if self.inputs:
            newest = torch.stack(self.inputs).unsqueeze(2)
            window = torch.cat([self.conv[:, :, 1:], newest], 2)
            if self.span is None:
                self.pool.conv.index_copy_(1, self.slots, window)
                self.pool.kda.index_copy_(1, self.slots, self.memory)
            else:
                self.conv.copy_(window)
        self.pool.lengths.index_copy_(0, self.slots, self.lengths + 1)


class _Sources:
    """The sources of the attention residuals of one step, and their scores at each mixer."""

    def __init__(self, embedded: Tensor, num_sources: int, queries: Tensor, floor: Tensor) -> None:
        """The embedding [B, d] is the first running sum; `queries` [M, d] of M mixers."""
        self.queries, self.floor = queries, floor
        self.values = embedded.new_empty(num_sources, *embedded.shape)
        self.scores = embedded.new_empty(len(queries), num_sources, len(embedded))
        self.rows = self.values.unbind(0)
        self.last = 0
        self.total = self.rows[0].copy_(embedded)
        """The running sum [B, d], to be added to in place."""

    def mix(self, site: int, is_finished: bool = False) -> Tensor:
        """Unit rows [B, d] of the mixture at mixer `site`.

        `is_finished` ends the block: the running sum stays as it is, and `begin` starts another.
        """
        last = self.last
        unit = unit_rows(self.total, self.floor)
        if is_finished:
            torch.mm(self.queries, unit.t(), out=self.scores[:, last])
        else:
            torch.mv(unit, self.queries[site], out=self.scores[site, last])
        if last == 0:
            return unit
        law = torch.softmax(self.scores[site, : last + 1], 0).unsqueeze(2)
        return unit_rows((self.values[: last + 1] * law).sum(0), self.floor)

    def begin(self, x: Tensor, matrix: Tensor) -> None:
        """Start a running sum with the product of x [B, in] and a matrix [in, d]."""
        self.last += 1
        self.total = torch.mm(x, matrix, out=self.rows[self.last])


class StepPlan:
    """The weights of a decoder as they were, laid out for `step`."""

    def __init__(self, decoder: Decoder) -> None:
        """Copies the weights; `fits` says whether they are still those of the decoder."""
        with torch.inference_mode(mode=False), torch.no_grad():
            self._watch(decoder)
            self._lay_out(decoder)

    @staticmethod
    def lays_out(config: ModelConfig) -> bool:
        """Whether a config is of the one family that steps are laid out for: K3 as released."""
        kda, mla, moe = config.kda, config.mla, config.moe
        return (
            (config.attn_res, config.activation, kda.decay) == ("block", "situ", "bounded")
            and kda.gate_rank is None
            and mla.q_lora_rank is not None
            and mla.output_gate
            and moe.latent_size is not None
            and moe.router_input == "hidden"
            and moe.routed_scaling_factor == 1.0
            and not moe.quantised
        )

    def _watch(self, decoder: Decoder) -> None:
        modules = list(decoder.modules())
        self._tables = [
            (table, name)
            for module in modules
            for table in (module._parameters, module._buffers)
            for name in table
        ]
        # Keeping the tensors keeps their addresses from being given to others.
        self._seen = [cast(Tensor, table[name]).detach() for table, name in self._tables]
        self._marks = self._look()

    def _look(self) -> tuple[list[int], list[int]]:
        """Addresses and versions; loops in C, as this is asked at every step."""
        found = [cast(Tensor, table[name]) for table, name in self._tables]
        return list(map(Tensor.data_ptr, found)), list(map(_VERSION, found))

    def fits(self) -> bool:
        """Whether no weight was replaced or changed in place since.

        Seen through PyTorch's version counters, which do not count changes through `.data`.
        """
        return self._look() == self._marks

    def _lay_out(self, decoder: Decoder) -> None:
        config = decoder.config
        layers = [cast("DecoderLayer", layer) for layer in decoder.layers]
        self._block = config.attn_res_block_size
        self._num_sources = 1 + -(-len(layers) // self._block)
        mixers = [
            pair
            for layer in layers
            for pair in (
                (layer.self_attention_res_norm, layer.self_attention_res_proj),
                (layer.mlp_res_norm, layer.mlp_res_proj),
            )
        ]
        mixers.append((decoder.output_attn_res_norm, decoder.output_attn_res_proj))
        root = config.hidden_size**0.5
        self._queries = torch.cat([wide(n.weight) * wide(p.weight) * root for n, p in mixers])
        self._floor = norm_floor(config.hidden_size, config.norm_eps, self._queries)
        self._embedding = decoder.embed_tokens.weight.detach()
        self._out_scale = wide(decoder.norm.weight) * root
        self._attention = [_attention(layer) for layer in layers]
        self._feed_forward = [_feed_forward(layer) for layer in layers]
        kda = [cast(KimiDeltaAttention, layer.self_attn) for layer in layers if layer.is_kda]
        self._taps = torch.stack([layer.taps() for layer in kda]) if kda else None

    def step(
        self, token_ids: Tensor, pool: StatePool, slots: Tensor, routing: Routing | None
    ) -> Tensor:
        """As `K3Model.step`, inside `inference_mode`.

        Arithmetic and pool are float32, or float64 with float64 weights; only the result returns
        to the dtype of the weights.
        """
        batch = _Batch(pool, slots, self._taps)
        embedded = wide(F.embedding(token_ids, self._embedding))
        sources = _Sources(embedded, self._num_sources, self._queries, self._floor)
        num_mla = 0
        for index, attention in enumerate(self._attention):
            begins = index % self._block == 0
            x = sources.mix(2 * index, is_finished=begins)
            if isinstance(attention, KdaStep):
                number = len(batch.inputs)
                inner, channels = attention(x, batch.convolved[number], batch.memory[number])
                batch.inputs.append(channels)
            else:
                inner = attention(x, pool.latents[num_mla], batch.reach)
                num_mla += 1
            if begins:
                sources.begin(inner, attention.out)
            else:
                sources.total.addmm_(inner, attention.out)
            x = sources.mix(2 * index + 1)
            self._feed_forward[index].add_to(sources.total, x, routing)
        batch.finish()
        return sources.mix(-1).mul_(self._out_scale).to(self._embedding.dtype)


def _attention(layer: DecoderLayer) -> KdaStep | MlaStep:
    norm = layer.input_layernorm.weight
    if layer.is_kda:
        return KdaStep(cast(KimiDeltaAttention, layer.self_attn), norm)
    return MlaStep(cast(GatedMla, layer.self_attn), norm)


def _feed_forward(layer: DecoderLayer) -> DenseStep | MoeStep:
    norm = layer.post_attention_layernorm.weight
    return DenseStep(layer.mlp, norm) if layer.is_dense else MoeStep(layer.block_sparse_moe, norm)
