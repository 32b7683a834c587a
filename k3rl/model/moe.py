"""Feed-forward blocks: a dense gated unit, and a mixture of experts that work in a latent space."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function

from k3rl.model.config import ModelConfig
from k3rl.model.dispatch import operation
from k3rl.model.mxfp4 import fake_quantise_activation, fake_quantise_weight
from k3rl.model.ops import applied, glu, linear, linear_many, rms_norm, take_rows, wide
from k3rl.model.routing import Routing
from k3rl.model.weights import Weight


class GluMlp(nn.Module):
    """down(glu(gate x, up x))."""

    def __init__(self, config: ModelConfig, size: int) -> None:
        super().__init__()
        self.betas = config.glu_betas
        self.gate_proj = Weight(size, config.hidden_size)
        self.up_proj = Weight(size, config.hidden_size)
        self.down_proj = Weight(config.hidden_size, size)

    def forward(self, x: Tensor) -> Tensor:
        """[T, d] -> [T, d]."""
        gate, up = linear_many(x, [[self.gate_proj.weight], [self.up_proj.weight]])
        return linear(glu(gate, up, self.betas), self.down_proj.weight)


class Router(nn.Module):
    """Sigmoid scores of the token; the bias takes part in the choice only."""

    e_score_correction_bias: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        moe = config.moe
        self.top_k, self.scale = moe.top_k, moe.routed_scaling_factor
        width = config.hidden_size if moe.router_input == "hidden" else cast(int, moe.latent_size)
        self.weight = nn.Parameter(torch.empty(moe.num_experts, width))
        self.register_buffer("e_score_correction_bias", torch.zeros(moe.num_experts))

    def forward(self, x: Tensor, routing: Routing | None) -> tuple[Tensor, Tensor]:
        """Experts [T, k] and their weights [T, k] in float32, which sum to the scaling factor."""
        scores = torch.sigmoid(linear(wide(x), wide(self.weight)))
        chosen = self.choose(scores, routing)
        raw = scores.gather(1, chosen)
        weights = raw / (raw.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights if self.scale == 1.0 else weights * self.scale

    def choose(self, scores: Tensor, routing: Routing | None) -> Tensor:
        """Experts [T, k] of raw scores [T, E]."""
        if routing is not None:
            return routing.choose(scores, self.e_score_correction_bias, self.top_k)
        return torch.topk(scores.detach() + self.e_score_correction_bias, self.top_k).indices


class _SegmentMatmul(Function):
    """Rows sorted by expert, each block times its expert's W^T: [R, in] -> [R, out]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bounds: list[int]) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.bounds = bounds
        out = rows.new_empty(len(rows), weight.shape[1])
        for expert, part in _blocks(bounds):
            out[part] = linear(rows[part], weight[expert])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        d_rows, d_weight = torch.empty_like(rows), torch.zeros_like(weight)
        for expert, part in _blocks(ctx.bounds):
            torch.mm(grad[part], weight[expert], out=d_rows[part])
            torch.mm(grad[part].t(), rows[part], out=d_weight[expert])
        return d_rows, d_weight, None


def _blocks(bounds: list[int]) -> list[tuple[int, slice]]:
    return [(expert, slice(a, b)) for expert, (a, b) in enumerate(pairwise(bounds)) if b > a]


@operation
def expert_mlp(
    z: Tensor, chosen: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, w3: Tensor,
    betas: tuple[float, float] | None, is_quantised: bool,
) -> Tensor:  # fmt: skip
    """sum_i weights_i E_i(z), E_i(z) = w2_i glu(w1_i z, w3_i z) (2601.18089).

    Args:
        z: [T, latent].
        chosen: [T, k] int64 experts.
        weights: [T, k] float32.
        w1: [E, expert, latent], gate.
        w2: [E, latent, expert], down.
        w3: [E, expert, latent], up.
        betas: As in `ops.glu`.
        is_quantised: Weights as MXFP4 and the inputs of both products as MXFP8, with
            straight-through gradients.

    Returns:
        [T, latent].

    """
    if is_quantised:
        z = fake_quantise_activation(z)
        w1, w2, w3 = (fake_quantise_weight(weight) for weight in (w1, w2, w3))
    tokens, top_k = chosen.shape
    order, bounds = _sort(chosen.flatten(), len(w1))
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    copies = z.unsqueeze(1).expand(-1, top_k, -1).reshape(tokens * top_k, -1)
    rows = take_rows(copies, order, back)
    gate = applied(_SegmentMatmul, rows, w1, bounds)
    up = applied(_SegmentMatmul, rows, w3, bounds)
    inner = glu(gate, up, betas)
    if is_quantised:
        inner = fake_quantise_activation(inner)
    out = applied(_SegmentMatmul, inner, w2, bounds)
    out = take_rows(out, back, order).view(tokens, top_k, -1)
    return (out * weights.unsqueeze(-1)).sum(1).to(z.dtype)


def _sort(experts: Tensor, num_experts: int) -> tuple[Tensor, list[int]]:
    """Rows by expert, and where each expert's block begins and ends."""
    counts = torch.bincount(experts, minlength=num_experts).cumsum(0)
    return torch.argsort(experts, stable=True), [0, *counts.tolist()]


class LatentExperts(nn.Module):
    """All routed experts of a layer, stacked: w1 gate, w3 up [E, expert, latent], w2 down."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        moe = config.moe
        self.betas, self.is_quantised = config.glu_betas, moe.quantised
        self.w1 = nn.Parameter(torch.empty(moe.num_experts, moe.expert_size, width))
        self.w2 = nn.Parameter(torch.empty(moe.num_experts, width, moe.expert_size))
        self.w3 = nn.Parameter(torch.empty(moe.num_experts, moe.expert_size, width))

    def forward(self, z: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """sum_i weights_i E_i(z) of z [T, latent] for experts and weights [T, k]."""
        return expert_mlp(
            z, chosen, weights, self.w1, self.w2, self.w3, self.betas, self.is_quantised
        )


class LatentMoe(nn.Module):
    """Shared(x) + W_up RMSNorm(sum_i p_i E_i(W_down x)); the router reads the full-width x.

    Without a latent (Kimi Linear, 2510.26692): Shared(x) + sum_i p_i E_i(x).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        moe, d = config.moe, config.hidden_size
        self.norm_eps, self.has_latent = config.norm_eps, moe.latent_size is not None
        self.routes_latent = moe.router_input == "latent"
        self.gate = Router(config)
        self.experts = LatentExperts(config, moe.latent_size or d)
        self.shared_experts = GluMlp(config, moe.shared_size)
        if moe.latent_size is not None:
            self.routed_expert_down_proj = Weight(moe.latent_size, d)
            self.routed_expert_norm = Weight(moe.latent_size)
            self.routed_expert_up_proj = Weight(d, moe.latent_size)

    def forward(self, x: Tensor, routing: Routing | None) -> Tensor:
        """[T, d] -> [T, d]."""
        z = linear(x, self.routed_expert_down_proj.weight) if self.has_latent else x
        chosen, weights = self.gate(z if self.routes_latent else x, routing)
        routed = self.experts(z, chosen, weights)
        if self.has_latent:
            routed = rms_norm(routed, self.routed_expert_norm.weight, self.norm_eps)
            routed = linear(routed, self.routed_expert_up_proj.weight)
        return cast(Tensor, self.shared_experts(x) + routed)
