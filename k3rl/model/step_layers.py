"""Layers laid out for one-token steps: fewer, wider matrices, with constants folded into them.

Nothing here has a gradient. All arithmetic is float32 or wider. Matrices are [in, out]; the weight
of a norm and the root of its width are folded into the matrix behind it, so `unit_rows` is all
that is left of the norm.

Axes: B sequences, d hidden size, H heads, K key and V value width, J taps, E experts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from k3rl.model.delta import delta_step
from k3rl.model.kda import KimiDeltaAttention
from k3rl.model.mla import GatedMla
from k3rl.model.moe import GluMlp, LatentMoe, Router
from k3rl.model.ops import number, wide
from k3rl.model.routing import Routing

# Up to so many (token, expert) pairs all experts run on all tokens: fewer launches than sorting.
_DENSE_PAIRS = 2048


def norm_floor(width: int, eps: float, like: Tensor) -> Tensor:
    """The `floor` of `unit_rows` that an RMS norm of `eps` over `width` values has."""
    return number(math.sqrt(width * eps), like.dtype, like.device)


def unit_rows(x: Tensor, floor: Tensor) -> Tensor:
    """Rows x / sqrt(sum x^2 + floor^2) over the last axis."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / norm.hypot_(floor)


def behind_norm(weight: Tensor, norm: Tensor) -> Tensor:
    """A matrix [out, in] that reads an RMS norm of weight `norm` [in], as [in, out]."""
    scale = wide(norm) * math.sqrt(len(norm))
    return (wide(weight) * scale).t().contiguous()


def _turned(weight: Tensor) -> Tensor:
    return wide(weight).t().contiguous()


class KdaStep:
    """One KDA layer; `norm` [d] is the weight of the RMS norm in front of it."""

    def __init__(self, layer: KimiDeltaAttention, norm: Tensor) -> None:
        kda = layer.kda
        self.parts = (-1, 3, kda.num_heads, kda.head_dim)
        self.gate_cuts = [kda.size, kda.size, kda.num_heads]
        self.cuts = [3 * kda.size, sum(self.gate_cuts)]
        # exp(A) (W_fb W_fa x + dt_bias) as one matrix: the rank of the decay is spent on its
        # parameters, and one product more costs more than these columns.
        rate = wide(layer.A_log).exp().repeat_interleave(kda.head_dim)
        decay = wide(layer.f_b_proj.weight) @ wide(layer.f_a_proj.weight) * rate.unsqueeze(1)
        modules = (layer.q_proj, layer.k_proj, layer.v_proj, layer.g_proj)
        rows = [*(wide(module.weight) for module in modules), decay, wide(layer.b_proj.weight)]
        self.into = behind_norm(torch.cat(rows), norm)
        self.into_bias = self.into.new_zeros(self.into.shape[1])
        self.into_bias[4 * kda.size : 5 * kda.size] = rate * layer.dt_bias
        self.last_tap = layer.taps()[-1]
        self.bound = number(kda.gate_lower_bound, self.into.dtype, self.into.device)
        self.unit_floor = number(1e-3, self.into.dtype, self.into.device)
        # Queries keep unit length; their scale 1/sqrt(K) turns into a larger eps.
        self.out_floor = norm_floor(kda.head_dim**2, layer.norm_eps, self.into)
        out_norm = wide(layer.o_norm.weight).repeat(kda.num_heads) * kda.num_heads**-0.5
        self.out = behind_norm(layer.o_proj.weight, out_norm)

    def __call__(self, x: Tensor, convolved: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """One token each.

        Args:
            x: [B, d] unit rows.
            convolved: [B, 3 H K], what the past adds to the convolutions.
            memory: [B, H, K, V], updated in place.

        Returns:
            [B, H V] in front of `out`, and the inputs of the convolutions [B, 3 H K].

        """
        joined = torch.addmm(self.into_bias, x, self.into)
        channels, gates = joined.split_with_sizes(self.cuts, 1)
        mixed = torch.addcmul(convolved, channels, self.last_tap)
        mixed = torch.nn.functional.silu(mixed).view(self.parts)
        q, k = unit_rows(mixed[:, :2], self.unit_floor).unbind(1)
        gate, decay, beta = torch.sigmoid(gates).split_with_sizes(self.gate_cuts, 1)
        decay = torch.mul(decay, self.bound).exp_()
        out = delta_step(q, k, mixed[:, 2], decay, beta, memory)
        return unit_rows(out, self.out_floor).view(gate.shape).mul_(gate), channels


class Reach(NamedTuple):
    """Where the latents of B sequences lie in a pool, and which of them each may see."""

    rows: Tensor
    """[B] int64: the row of the new token in the flat [slots * P]."""
    span: slice | None
    """The slots, if they are neighbours: attended where they lie. None: copied out."""
    slots: Tensor
    """[B] int64."""
    bias: Tensor
    """[B, 1, L]: 0, or minus infinity."""


class MlaStep:
    """One MLA layer; `norm` [d] is the weight of the RMS norm in front of it."""

    def __init__(self, layer: GatedMla, norm: Tensor) -> None:
        mla = layer.mla
        self.num_heads, self.rank = mla.num_heads, mla.kv_lora_rank
        self.latent_size = mla.latent_dim
        query_rank = len(layer.q_a_layernorm.weight)
        self.cuts = [query_rank, mla.latent_dim, mla.num_heads * mla.v_head_dim]
        down = (layer.q_a_proj, layer.kv_a_proj_with_mqa, layer.g_proj)
        self.into = behind_norm(torch.cat([module.weight for module in down]), norm)
        self.query_floor = norm_floor(query_rank, layer.lora_eps, self.into)
        self.latent_floor = norm_floor(mla.kv_lora_rank, layer.lora_eps, self.into)
        self.latent_scale = wide(layer.kv_a_layernorm.weight) * math.sqrt(mla.kv_lora_rank)
        up_k, up_v = (wide(part) for part in layer.up())
        query = wide(layer.q_b_proj.weight).view(mla.num_heads, mla.qk_head_dim, -1)
        nope, rope = query.split_with_sizes([mla.qk_nope_head_dim, mla.qk_rope_head_dim], 1)
        absorbed = torch.cat([up_k.transpose(1, 2) @ nope, rope], 1).flatten(0, 1) * layer.scale
        self.query = behind_norm(absorbed, layer.q_a_layernorm.weight)
        self.up_v = up_v.transpose(1, 2).contiguous()
        self.out = _turned(layer.o_proj.weight)

    def __call__(self, x: Tensor, latents: Tensor, reach: Reach) -> Tensor:
        """One token each: unit rows x [B, d] -> [B, H v] in front of `out`.

        `latents` [slots, P, rank + rope] gets the new rows in place.
        """
        low, latent, gate = torch.mm(x, self.into).split_with_sizes(self.cuts, 1)
        query = torch.mm(unit_rows(low, self.query_floor), self.query)
        query = query.view(-1, self.num_heads, self.latent_size)
        inner = unit_rows(latent[:, : self.rank], self.latent_floor).mul_(self.latent_scale)
        row = torch.cat([inner, latent[:, self.rank :]], 1)
        latents.view(-1, self.latent_size).index_copy_(0, reach.rows, row)
        mixed = self._attend(query, latents, reach)
        value = torch.bmm(mixed.transpose(0, 1), self.up_v).transpose(0, 1)
        opened = torch.sigmoid(gate)
        opened.view(value.shape).mul_(value)
        return opened

    def _attend(self, query: Tensor, latents: Tensor, reach: Reach) -> Tensor:
        """Queries [B, H, rank + rope] -> mixed latents [B, H, rank]."""
        longest = reach.bias.shape[2]
        if reach.span is not None:
            keys = latents[reach.span, :longest]
        else:
            keys = latents[:, :longest].index_select(0, reach.slots)
        law = torch.baddbmm(reach.bias, query, keys.transpose(1, 2)).softmax(-1)
        return torch.bmm(law, keys[..., : self.rank])


class _Glu:
    """SiTU of adjacent halves [gate | up], without its bound gate_beta * up_beta.

    `fold` divides the matrices that make the halves by their betas, so one tanh bends both.
    """

    def __init__(self, betas: tuple[float, float] | None, like: Tensor) -> None:
        assert betas is not None
        self.betas, self.bound = betas, betas[0] * betas[1]
        self.gate_beta = number(betas[0], like.dtype, like.device)

    def fold(self, gate: Tensor, up: Tensor) -> Tensor:
        """Matrices [size, in] as one [2 size, in]."""
        return torch.cat([wide(gate) / self.betas[0], wide(up) / self.betas[1]])

    def __call__(self, halves: Tensor) -> Tensor:
        """[B, 2 size] -> [B, size]."""
        size = halves.shape[1] // 2
        bend, line = torch.tanh(halves).split_with_sizes([size, size], 1)
        return torch.mul(halves[:, :size], self.gate_beta).sigmoid_().mul_(bend).mul_(line)


class DenseStep:
    """A dense feed-forward block; `norm` [d] is the weight of the RMS norm in front of it."""

    def __init__(self, layer: GluMlp, norm: Tensor) -> None:
        self.glu = _Glu(layer.betas, wide(norm))
        self.into = behind_norm(self.glu.fold(layer.gate_proj.weight, layer.up_proj.weight), norm)
        self.out = _turned(layer.down_proj.weight) * self.glu.bound

    def add_to(self, total: Tensor, x: Tensor, routing: Routing | None) -> None:
        """Add the block of unit rows x [B, d] to `total` [B, d]; it routes nothing."""
        del routing
        total.addmm_(self.glu(torch.mm(x, self.into)), self.out)


class MoeStep:
    """A routed block; `norm` [d] is the weight of the RMS norm in front of it."""

    def __init__(self, layer: LatentMoe, norm: Tensor) -> None:
        gate, experts, shared = layer.gate, layer.experts, layer.shared_experts
        self.router: Router = gate
        self.experts = experts
        self.glu = glu = _Glu(experts.betas, wide(norm))
        self.count, latent_size, self.expert_size = experts.w2.shape
        into = [wide(gate.weight), wide(layer.routed_expert_down_proj.weight),
                glu.fold(shared.gate_proj.weight, shared.up_proj.weight)]  # fmt: skip
        self.cuts = [len(rows) for rows in into]
        self.into = behind_norm(torch.cat(into), norm)
        self.up = _turned(glu.fold(experts.w1.flatten(0, 1), experts.w3.flatten(0, 1)))
        self.down = wide(experts.w2).transpose(1, 2).flatten(0, 1) * glu.bound
        self.floor = norm_floor(latent_size, layer.norm_eps, self.into)
        self.tiny = number(1e-20, self.into.dtype, self.into.device)
        norm_weight = layer.routed_expert_norm.weight
        self.routed_out = behind_norm(layer.routed_expert_up_proj.weight, norm_weight)
        self.shared_out = _turned(shared.down_proj.weight) * glu.bound

    def add_to(self, total: Tensor, x: Tensor, routing: Routing | None) -> None:
        """Add the block of unit rows x [B, d] to `total` [B, d]."""
        logits, latent, shared = torch.mm(x, self.into).split_with_sizes(self.cuts, 1)
        total.addmm_(self.glu(shared), self.shared_out)
        scores = torch.sigmoid(logits)
        chosen = self.router.choose(scores, routing)
        if x.shape[0] * self.count <= _DENSE_PAIRS:
            mixed = self._all_experts(latent, scores, chosen)
        else:
            raw = scores.gather(1, chosen)
            weights = raw / raw.sum(1, keepdim=True).add_(self.tiny)
            dtype = self.experts.w1.dtype
            mixed = wide(self.experts(latent.to(dtype), chosen, weights))
        total.addmm_(unit_rows(mixed, self.floor), self.routed_out)

    def _all_experts(self, latent: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """Every expert on every token, those not chosen weighted 0; [B, latent]."""
        weights = torch.zeros_like(scores).scatter_(1, chosen, 1.0).mul_(scores)
        weights.div_(weights.sum(1, keepdim=True).add_(self.tiny))
        inner = self.glu(torch.mm(latent, self.up))
        inner.view(-1, self.count, self.expert_size).mul_(weights.unsqueeze(2))
        return torch.mm(inner, self.down)
