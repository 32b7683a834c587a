"""Kimi Delta Attention: projections, short convolution, decay gate, delta rule, gated norm."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3rl.model.config import ModelConfig
from k3rl.model.conv import causal_conv
from k3rl.model.delta import delta_tiles
from k3rl.model.layout import Layout
from k3rl.model.ops import (
    decay_gate,
    l2_norm,
    linear_many,
    rms_norm,
    sigmoid_gate,
    take_rows,
    wide,
)
from k3rl.model.weights import Weight


class KdaState(NamedTuple):
    """What one layer carries for N sequences."""

    memory: Tensor
    """[N, H, K, V] float32."""
    history: Tensor
    """[N, J - 1, 3 H K]: inputs of the q, k and v convolutions, oldest first."""


class KimiDeltaAttention(nn.Module):
    """One layer; weights are named as in the release (K3 report, arXiv 2607.24653)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        kda, d = config.kda, config.hidden_size
        self.kda, self.norm_eps = kda, config.norm_eps
        self.q_proj = Weight(kda.size, d)
        self.k_proj = Weight(kda.size, d)
        self.v_proj = Weight(kda.size, d)
        self.g_proj = Weight(kda.size, d)
        self.f_a_proj = Weight(kda.decay_rank, d)
        self.b_proj = Weight(kda.num_heads, d)
        self.f_b_proj = Weight(kda.size, kda.decay_rank)
        self.q_conv1d = Weight(kda.size, 1, kda.conv_kernel)
        self.k_conv1d = Weight(kda.size, 1, kda.conv_kernel)
        self.v_conv1d = Weight(kda.size, 1, kda.conv_kernel)
        self.A_log = nn.Parameter(torch.zeros(kda.num_heads))
        self.dt_bias = nn.Parameter(torch.zeros(kda.size))
        self.o_norm = Weight(kda.head_dim)
        self.o_proj = Weight(d, kda.size)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Inputs of the convolution [T, 3 H K], output gate, decay z [T, H, K], beta [T, H]."""
        kda = self.kda
        qkv = [self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]
        rest = [[module.weight] for module in (self.g_proj, self.f_a_proj, self.b_proj)]
        mixed, gate, low, beta = linear_many(x, [qkv, *rest])
        z = wide(F.linear(low, self.f_b_proj.weight)) + self.dt_bias
        z = z.view(*z.shape[:-1], kda.num_heads, kda.head_dim)
        return wide(mixed), gate, z, torch.sigmoid(wide(beta))

    def taps(self) -> Tensor:
        """Weights of the q, k and v convolutions [J, 3 H K], oldest first."""
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        return wide(torch.cat([conv.weight for conv in convs]).squeeze(1).t().contiguous())

    def _finish(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """Norm each head of [T, H, V], gate and project."""
        normed = rms_norm(mixed, self.o_norm.weight, self.norm_eps)
        return F.linear(sigmoid_gate(normed.flatten(-2), gate), self.o_proj.weight)

    def forward(self, x: Tensor, layout: Layout, state: KdaState | None) -> tuple[Tensor, KdaState]:
        """Packed x [T, d] -> [T, d] and the state after it; None starts from zeros."""
        kda = self.kda
        heads = kda.num_heads
        projected, gate, z, beta = self._project(x)
        history = None if state is None else state.history.to(projected.dtype)
        mixed, history = causal_conv(projected, self.taps(), layout, history)
        there, back, _ = layout.head_rows(3, heads)
        rows = F.silu(mixed).reshape(-1, kda.head_dim)
        tiles = take_rows(rows, there, back).view(3, layout.num_tiles, heads, -1, kda.head_dim)
        there, back, mask = layout.head_rows(1, heads)
        g = decay_gate(z, self.A_log, kda.gate_lower_bound).reshape(-1, kda.head_dim)
        g = take_rows(g, there, back, mask).view_as(tiles[0])
        beta = take_rows(beta.reshape(-1, 1), there, back, mask).view(g.shape[:3])
        shape = (layout.num_sequences, heads, kda.head_dim, kda.head_dim)
        memory = g.new_zeros(shape) if state is None else state.memory[layout.rank]
        q = l2_norm(tiles[0], kda.head_dim**-0.5)
        out, memory = delta_tiles(
            q, l2_norm(tiles[1]), tiles[2], g, beta, memory.to(g.dtype), layout.round_sizes,
            kda.gate_lower_bound,
        )  # fmt: skip
        out = take_rows(out.reshape(-1, kda.head_dim), back, there, None, mask)
        out = out.view(len(x), heads, kda.head_dim)
        return self._finish(out, gate), KdaState(memory[torch.argsort(layout.rank)], history)

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Decay, norm and induction values that no plain normal law gives; matrices are drawn.

        A = 0 and dt_bias the inverse softplus of a step log-uniform in [1e-3, 0.1] (report, 2.1).
        """
        kda = self.kda
        low, high = math.log(1e-3), math.log(0.1)
        steps = torch.rand(kda.size, generator=generator, dtype=torch.float64)
        steps = (low + (high - low) * steps).exp()
        span = kda.num_induction_heads * kda.head_dim
        steps[:span] = 1e-3
        self.dt_bias.copy_(steps.expm1().log())
        self.A_log.zero_()
        self.o_norm.weight.fill_(1.0)
        if span:
            self.k_proj.weight[:span] = self.q_proj.weight[:span]
            for conv, tap in ((self.q_conv1d, -1), (self.k_conv1d, -2), (self.v_conv1d, -1)):
                conv.weight[:span] = 0.0
                conv.weight[:span, :, tap] = 1.0
