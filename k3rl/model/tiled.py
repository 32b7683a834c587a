"""Products whose rows come out bit for bit the same however many rows there are, on any CPU.

Libraries choose how to sum by the size of a product, so a row's last bit can depend on what else is
computed with it. MKL's kernels for AVX-512 do so only for few rows or many columns; those for AVX2,
and what it runs on other makes of CPU, always do. There all is done in tiles of one shape: a batch
of at least two equal products is summed alike whatever their number.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

_ROWS = 16
_BLOCK = 32
_PROBED = 64


def needs_tiles(x: Tensor) -> bool:
    """Whether rows of products of `x` depend on their number here: float32 or 64, on a CPU."""
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        return False
    return not _keeps_rows(x.dtype, torch.get_num_threads())


@cache
def _keeps_rows(dtype: torch.dtype, num_threads: int) -> bool:
    """Probed once for each number of threads, by which BLAS chooses too."""
    del num_threads
    x = torch.linspace(-1, 1, _PROBED**2, dtype=dtype).view(_PROBED, _PROBED).sin()
    whole = x @ x.T
    return all(torch.equal(x[:rows] @ x.T, whole[:rows]) for rows in range(8, _PROBED))


def linear_by_tiles(x: Tensor, weight: Tensor) -> Tensor:
    """Product x W^T of x [..., in] and a matrix [out, in]; gradients are those of one product."""
    return cast(Tensor, _Linear.apply(x, weight))  # type: ignore[no-untyped-call]


class _Linear(Function):
    """A batched product's own gradient would be one of the weight's size for each tile."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        rows = x.reshape(-1, x.shape[-1])
        num_tiles = max(2, -(-len(rows) // _ROWS))
        padded = F.pad(rows, (0, 0, 0, num_tiles * _ROWS - len(rows)))
        tiles = padded.view(num_tiles, _ROWS, -1)
        out = torch.bmm(tiles, weight.t().expand(num_tiles, -1, -1))
        return out.flatten(0, 1)[: len(rows)].view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        rows, columns = x.reshape(-1, x.shape[-1]), d_out.reshape(-1, len(weight))
        d_x = (columns @ weight).view(x.shape) if needs_x else None
        return d_x, columns.t() @ rows if needs_weight else None


def causal_attention_by_tiles(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal softmax attention of q, k, v [N, H, W, D], with N H > 1: [N, H, W, D]."""
    return cast(Tensor, _Attention.apply(q, k, v, scale))  # type: ignore[no-untyped-call]


class _Attention(Function):
    """Its gradient is that of torch's attention, which is computed again for it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.scale = scale
        return _attend(q, k, v, scale)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = inputs = [part.detach().requires_grad_() for part in ctx.saved_tensors]
        with torch.enable_grad():
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=ctx.scale)
            return *torch.autograd.grad(out, inputs, d_out), None


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Every block of queries meets the blocks of keys from its own backwards, all blocks at once.

    They are summed with a running maximum (online softmax, arXiv 1805.02867 section 3).
    """
    shape = q.shape
    num_blocks = -(-shape[2] // _BLOCK)
    padding = (0, 0, 0, num_blocks * _BLOCK - shape[2])
    q, k, v = (
        F.pad(part, padding).reshape(-1, num_blocks, _BLOCK, shape[3]).transpose(0, 1)
        for part in (q * scale, k, v)
    )
    hidden = torch.ones(_BLOCK, _BLOCK, dtype=torch.bool).triu(1)
    scores = _scores(q, k).masked_fill(hidden, -torch.inf)
    highest = scores.amax(-1, keepdim=True)
    law = (scores - highest).exp()
    total, mixed = law.sum(-1, keepdim=True), _mix(law, v)
    for back in range(1, num_blocks):
        scores = _scores(q[back:], k[:-back])
        peak = torch.maximum(highest[back:], scores.amax(-1, keepdim=True))
        shrink, law = (highest[back:] - peak).exp(), (scores - peak).exp()
        later = total[back:] * shrink + law.sum(-1, keepdim=True)
        total = torch.cat([total[:back], later])
        mixed = torch.cat([mixed[:back], mixed[back:] * shrink + _mix(law, v[:-back])])
        highest = torch.cat([highest[:back], peak])
    out = (mixed / total).transpose(0, 1).reshape(*shape[:2], -1, shape[3])
    return out[:, :, : shape[2]]


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """[B, A, R, D] each -> [B, A, R, R]."""
    return torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).view(*q.shape[:3], _BLOCK)


def _mix(law: Tensor, v: Tensor) -> Tensor:
    return torch.bmm(law.flatten(0, 1), v.flatten(0, 1)).view(v.shape)
