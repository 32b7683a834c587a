"""Feed-forward blocks: dense SiTU-GLU, and a mixture of experts that work in a latent space."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from k3rl.model.config import ModelConfig
from k3rl.model.ops import applied, linear_many, rms_norm, situ_glu, take_rows, wide
from k3rl.model.routing import Routing
from k3rl.model.weights import Weight

# Up to this many (token, expert) pairs all experts run on all tokens: fewer launches than sorting.
DENSE_PAIRS = 2048


class GluMlp(nn.Module):
    """down(SiTU-GLU(gate x, up x))."""

    def __init__(self, config: ModelConfig, size: int) -> None:
        super().__init__()
        self.betas = (config.gate_beta, config.up_beta)
        self.gate_proj = Weight(size, config.hidden_size)
        self.up_proj = Weight(size, config.hidden_size)
        self.down_proj = Weight(config.hidden_size, size)

    def forward(self, x: Tensor) -> Tensor:
        """[T, d] -> [T, d]."""
        gate, up = linear_many(x, [[self.gate_proj.weight], [self.up_proj.weight]])
        return F.linear(situ_glu(gate, up, *self.betas), self.down_proj.weight)


class Router(nn.Module):
    """Sigmoid scores of the full-width hidden; the bias takes part in the choice only."""

    e_score_correction_bias: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k = config.moe.top_k
        self.weight = nn.Parameter(torch.empty(config.moe.num_experts, config.hidden_size))
        bias = torch.zeros(config.moe.num_experts)
        self.register_buffer("e_score_correction_bias", bias)

    def forward(self, x: Tensor, routing: Routing | None) -> tuple[Tensor, Tensor]:
        """Experts [T, k] and their weights [T, k], which sum to 1, of x [T, d]."""
        scores = torch.sigmoid(F.linear(wide(x), wide(self.weight)))
        chosen = self.choose(scores, routing)
        raw = scores.gather(1, chosen)
        return chosen, raw / (raw.sum(-1, keepdim=True) + 1e-20)

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
            torch.mm(rows[part], weight[expert].t(), out=out[part])
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


class LatentExperts(nn.Module):
    """All routed experts of a layer, stacked: w1 gate, w3 up [E, expert, latent], w2 down."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        moe = config.moe
        self.betas = (config.gate_beta, config.up_beta)
        self.w1 = nn.Parameter(torch.empty(moe.num_experts, moe.expert_size, moe.latent_size))
        self.w2 = nn.Parameter(torch.empty(moe.num_experts, moe.latent_size, moe.expert_size))
        self.w3 = nn.Parameter(torch.empty(moe.num_experts, moe.expert_size, moe.latent_size))

    def forward(self, z: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """sum_i weights_i E_i(z) of latents z [T, latent] for experts and weights [T, k]."""
        if not torch.is_grad_enabled() and len(z) * len(self.w1) <= DENSE_PAIRS:
            return self._dense(z, chosen, weights)
        return self._sorted(z, chosen, weights)

    def _dense(self, z: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        count, size = self.w1.shape[:2]
        gate, up = linear_many(z, [[self.w1.flatten(0, 1)], [self.w3.flatten(0, 1)]])
        inner = situ_glu(gate, up, *self.betas).view(len(z), count, size)
        spread = weights.new_zeros(len(z), count).scatter_(1, chosen, weights)
        inner = (inner * spread.unsqueeze(-1)).to(z.dtype).flatten(1)
        return F.linear(inner, self.w2.permute(1, 0, 2).flatten(1))

    def _sorted(self, z: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        tokens, top_k = chosen.shape
        order = torch.argsort(chosen.flatten(), stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.w1)).cumsum(0)
        bounds = [0, *counts.tolist()]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        copies = z.unsqueeze(1).expand(-1, top_k, -1).reshape(tokens * top_k, -1)
        rows = take_rows(copies, order, back)
        gate = applied(_SegmentMatmul, rows, self.w1, bounds)
        up = applied(_SegmentMatmul, rows, self.w3, bounds)
        out = applied(_SegmentMatmul, situ_glu(gate, up, *self.betas), self.w2, bounds)
        out = take_rows(out, back, order).view(tokens, top_k, -1)
        return (out * weights.unsqueeze(-1)).sum(1).to(z.dtype)


class LatentMoe(nn.Module):
    """Shared(x) + W_up RMSNorm(sum_i p_i E_i(W_down x)); the router reads the full-width x."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        moe, d = config.moe, config.hidden_size
        self.norm_eps = config.norm_eps
        self.gate = Router(config)
        self.experts = LatentExperts(config)
        self.shared_experts = GluMlp(config, moe.shared_size)
        self.routed_expert_down_proj = Weight(moe.latent_size, d)
        self.routed_expert_norm = Weight(moe.latent_size)
        self.routed_expert_up_proj = Weight(d, moe.latent_size)

    def forward(self, x: Tensor, routing: Routing | None) -> Tensor:
        """[T, d] -> [T, d]."""
        chosen, weights = self.gate(x, routing)
        z = F.linear(x, self.routed_expert_down_proj.weight)
        mixed = self.experts(z, chosen, weights)
        mixed = rms_norm(mixed, self.routed_expert_norm.weight, self.norm_eps)
        routed = F.linear(mixed, self.routed_expert_up_proj.weight)
        return cast(Tensor, self.shared_experts(x) + routed)
