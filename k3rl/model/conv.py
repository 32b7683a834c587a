"""Causal depthwise convolution over packed sequences, with the inputs before them carried in."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from k3rl.model.dispatch import operation
from k3rl.model.layout import Layout
from k3rl.model.ops import applied


class _ShiftedSum(Function):
    """y_t = sum_j w_j x_{t-J+1+j} on one long sequence: slices, no gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor) -> Tensor:
        ctx.save_for_backward(x, taps)
        y = x * taps[-1]
        for shift in range(1, min(len(taps), len(x))):
            y[shift:].addcmul_(x[:-shift], taps[-1 - shift])
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, taps = ctx.saved_tensors
        grad = grads[0]
        d_x = grad * taps[-1]
        d_taps = torch.zeros_like(taps)
        d_taps[-1] = (grad * x).sum(0)
        for shift in range(1, min(len(taps), len(x))):
            d_x[:-shift].addcmul_(grad[shift:], taps[-1 - shift])
            d_taps[-1 - shift] = (grad[shift:] * x[:-shift]).sum(0)
        return d_x, d_taps


@operation
def causal_conv(
    x: Tensor, taps: Tensor, layout: Layout, history: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Convolve each sequence with its own past.

    Args:
        x: [T', channels], packed; rows from T on are padding.
        taps: [J, channels], oldest first.
        layout: Of the N sequences.
        history: [N, J - 1, channels] inputs before the first token, oldest first; None: zeros.

    Returns:
        [T', channels], and the history after the last token [N, J - 1, channels].

    """
    reach = len(taps) - 1
    if history is None:
        history = x.new_zeros(layout.num_sequences, reach, x.shape[1])
    starts = layout.cu_seqlens[:-1, None]
    steps = torch.arange(reach, device=x.device)
    lengths = layout.length_array[:, None]
    # The first J - 1 outputs of a sequence saw its neighbour; they are computed again, apart.
    first = x[(starts + steps.clamp(max=lengths - 1))]
    window = torch.cat([history, first], 1)
    edge = sum(window[:, j : j + reach] * taps[j] for j in range(reach + 1))
    inside = steps < lengths
    dense = applied(_ShiftedSum, x, taps)
    out = dense.index_put((starts.add(steps)[inside],), cast(Tensor, edge)[inside])
    # Input number i of a sequence is at window column i + J - 1, or in x.
    last = lengths - reach + steps
    tail = x[(starts + last.clamp(min=0))]
    old = window.gather(1, (last + reach).clamp(max=reach)[..., None].expand_as(tail))
    return out, torch.where((last < 0)[..., None], old, tail)
