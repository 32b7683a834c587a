"""Kimi Delta Attention: projections, short convolution, decay gate, delta rule, gated norm."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3rl.model.config import ModelConfig
from k3rl.model.conv import causal_conv
from k3rl.model.delta import delta_pairs, delta_tiles
from k3rl.model.dispatch import operation
from k3rl.model.layout import Layout
from k3rl.model.ops import (
    decay_gate,
    l2_norm,
    linear,
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


@operation
def delta_rule(
    qkv: Tensor, z: Tensor, beta: Tensor, rate_log: Tensor, lower_bound: float | None,
    memory: Tensor | None, layout: Layout,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The recurrence of KDA over packed sequences, with its norms and gates (2510.26692).

    Args:
        qkv: [T', 3, H, K] queries, keys and values behind convolution and SiLU, not normed yet.
        z: [T', H, K] float32, raw decay with its bias.
        beta: [T', H] float32, logits of the write strength.
        rate_log: [H], A_log.
        lower_bound: Log-decay is lower_bound * sigmoid(exp(A) z); None: -exp(A) softplus(z).
        memory: [N, H, K, V] before the first tokens; None: zeros.
        layout: Of the N sequences.

    Returns:
        [T', H, V], and the memory after each sequence's last token [N, H, K, V].

    """
    heads, width = z.shape[1:]
    there, back, _ = layout.head_rows(3, heads)
    num_real = layout.num_tokens * heads
    rows = qkv.reshape(-1, width)
    tiles = take_rows(rows, there, back, None, None, 3 * num_real)
    q, k, v = tiles.view(3, layout.num_tiles, heads, -1, width)
    q, k = l2_norm(q, width**-0.5), l2_norm(k)
    there, back, mask = layout.head_rows(1, heads)
    if lower_bound is None:
        g = -wide(rate_log).exp().unsqueeze(-1) * F.softplus(z)
    else:
        g = decay_gate(z, rate_log, lower_bound)
    g = take_rows(g.reshape(-1, width), there, back, mask, None, num_real).view_as(q)
    write = torch.sigmoid(beta).reshape(-1, 1)
    write = take_rows(write, there, back, mask, None, num_real).view(g.shape[:3])
    if memory is None:
        memory = g.new_zeros(layout.num_sequences, heads, width, width)
    else:
        memory = memory[layout.rank].to(g.dtype)
    if lower_bound is None:
        out, after = delta_pairs(q, k, v, g, write, memory, layout.round_sizes)
    else:
        out, after = delta_tiles(q, k, v, g, write, memory, layout.round_sizes, lower_bound)
    out = take_rows(out.reshape(-1, width), back, there, None, mask)
    return out.view(len(qkv), heads, width), after[torch.argsort(layout.rank)]


class KimiDeltaAttention(nn.Module):
    """One layer; weights are named as in the release (K3 report, arXiv 2607.24653).

    Kimi Linear (2510.26692) bounds no decay and projects the output gate through a low rank.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        kda, d = config.kda, config.hidden_size
        self.kda, self.norm_eps = kda, config.norm_eps
        self.q_proj = Weight(kda.size, d)
        self.k_proj = Weight(kda.size, d)
        self.v_proj = Weight(kda.size, d)
        if kda.gate_rank is None:
            self.g_proj = Weight(kda.size, d)
        else:
            self.g_a_proj = Weight(kda.gate_rank, d)
            self.g_b_proj = Weight(kda.size, kda.gate_rank)
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
        """Inputs of the convolution [T, 3 H K], output gate, decay z [T, H, K], beta logits."""
        kda = self.kda
        qkv = [self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]
        gate_in = self.g_proj if kda.gate_rank is None else self.g_a_proj
        rest = [[module.weight] for module in (gate_in, self.f_a_proj, self.b_proj)]
        mixed, gate, low, beta = linear_many(x, [qkv, *rest])
        if kda.gate_rank is not None:
            gate = linear(gate, self.g_b_proj.weight)
        z = wide(linear(low, self.f_b_proj.weight)) + self.dt_bias
        z = z.view(*z.shape[:-1], kda.num_heads, kda.head_dim)
        return wide(mixed), gate, z, wide(beta)

    def taps(self) -> Tensor:
        """Weights of the q, k and v convolutions [J, 3 H K], oldest first."""
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        return wide(torch.cat([conv.weight for conv in convs]).squeeze(1).t().contiguous())

    def _finish(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """Norm each head of [T, H, V], gate and project."""
        normed = rms_norm(mixed, self.o_norm.weight, self.norm_eps)
        return linear(sigmoid_gate(normed.flatten(-2), gate), self.o_proj.weight)

    def forward(self, x: Tensor, layout: Layout, state: KdaState | None) -> tuple[Tensor, KdaState]:
        """Packed x [T', d] -> [T', d] and the state after it; None starts from zeros."""
        kda = self.kda
        projected, gate, z, beta = self._project(x)
        history = None if state is None else state.history.to(projected.dtype)
        mixed, history = causal_conv(projected, self.taps(), layout, history)
        qkv = F.silu(mixed).view(len(x), 3, kda.num_heads, kda.head_dim)
        bound = kda.gate_lower_bound if kda.decay == "bounded" else None
        memory = None if state is None else state.memory
        out, memory = delta_rule(qkv, z, beta, self.A_log, bound, memory, layout)
        return self._finish(out, gate), KdaState(memory, history)

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
