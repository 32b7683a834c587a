"""Elementwise pieces of K3 as autograd functions: one read and one write where autograd takes ten.

Arithmetic is float32 or wider; results return to the dtype of the input. Axes: T tokens, d width.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from k3rl.model.dispatch import operation
from k3rl.model.tiled import linear_by_tiles, needs_tiles


def wide(x: Tensor) -> Tensor:
    """`x` in float32, or as it is when already that precise."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


class _NoContext:
    """Takes what a forward would keep for its backward, and forgets it."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        pass


def applied(function: type[Function], *args: Any) -> Tensor:
    """function.apply(*args); without autograd its forward alone, which saves 10 us a call."""
    if torch.is_grad_enabled():
        return cast(Tensor, cast(Any, function).apply(*args))
    return cast(Tensor, function.forward(_NoContext(), *args))


@lru_cache(maxsize=64)
def number(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A constant as a tensor without axes: operators take it 3 us sooner than a Python number."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype, device=device)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis, which it keeps."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    floor = number(eps, norm.dtype, norm.device)
    return torch.addcmul(floor, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = wide(x)
        scale = inverse_rms(y, eps)
        normed = y * scale
        ctx.save_for_backward(normed, scale, weight)
        ctx.dtype = x.dtype
        return normed.to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        normed, scale, weight = ctx.saved_tensors
        grad = wide(grads[0])
        product = grad * normed
        d_weight = product.reshape(-1, product.shape[-1]).sum(0)
        mean = torch.mv(product.reshape(-1, product.shape[-1]), wide(weight)) / product.shape[-1]
        d_normed = (grad * weight).addcmul_(normed, mean.view(scale.shape), value=-1.0)
        return d_normed.mul_(scale).to(ctx.dtype), d_weight.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normed x / sqrt(mean(x^2) + eps) over the last axis, in the dtype of x, times weight [d]."""
    return applied(_RmsNorm, x, weight, eps)


class _L2Norm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, eps: float) -> Tensor:
        y = wide(x)
        norm = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
        floor = number(eps, norm.dtype, norm.device)
        inverse = torch.addcmul(floor, norm, norm).rsqrt_()
        unit: Tensor = y * inverse
        ctx.save_for_backward(unit, inverse)
        ctx.scale, ctx.dtype = scale, x.dtype
        return unit * scale if scale != 1.0 else unit

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        unit, inverse = ctx.saved_tensors
        along = (grads[0] * unit).sum(-1, keepdim=True)
        d_unit = grads[0].addcmul(unit, along, value=-1.0)
        return d_unit.mul_(inverse * ctx.scale).to(ctx.dtype), None, None


def l2_norm(x: Tensor, scale: float = 1.0, eps: float = 1e-6) -> Tensor:
    """Scale * x / sqrt(sum(x^2) + eps) over the last axis, float32 or wider."""
    return applied(_L2Norm, x, scale, eps)


class _SituGlu(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, gate_beta: float, up_beta: float) -> Tensor:
        g, u = wide(gate), wide(up)
        bend = torch.mul(g, number(1.0 / gate_beta, g.dtype, g.device)).tanh_()
        swish = torch.sigmoid(g)
        line = torch.mul(u, number(1.0 / up_beta, u.dtype, u.device)).tanh_()
        ctx.save_for_backward(bend, swish, line)
        ctx.betas, ctx.dtype = (gate_beta, up_beta), gate.dtype
        bound = number(gate_beta * up_beta, g.dtype, g.device)
        return (bend * swish).mul_(line).mul_(bound).to(gate.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        bend, swish, line = ctx.saved_tensors
        gate_beta, up_beta = ctx.betas
        grad = wide(grads[0])
        gated = bend * swish
        # d gate = s (1 - t^2) + beta t s (1 - s), written so that each factor is used once.
        slope = torch.addcmul(swish, gated, bend, value=-1.0)
        slope.add_(gated, alpha=gate_beta).addcmul_(gated, swish, value=-gate_beta)
        d_gate = slope.mul_(line).mul_(grad).mul_(up_beta)
        d_up = torch.addcmul(gated, gated * line, line, value=-1.0).mul_(grad).mul_(gate_beta)
        return d_gate.to(ctx.dtype), d_up.to(ctx.dtype), None, None


@operation
def situ_glu(gate: Tensor, up: Tensor, gate_beta: float, up_beta: float) -> Tensor:
    """[b1 tanh(g/b1) sigmoid(g)] * [b2 tanh(u/b2)] (K3 report, arXiv 2607.24653): |.| <= b1 b2."""
    return applied(_SituGlu, gate, up, gate_beta, up_beta)


def glu(gate: Tensor, up: Tensor, betas: tuple[float, float] | None) -> Tensor:
    """The gated unit of a model: SiTU-GLU with its two betas, or SwiGLU (None)."""
    if betas is not None:
        return situ_glu(gate, up, *betas)
    return (torch.nn.functional.silu(wide(gate)) * wide(up)).to(gate.dtype)


class _DecayGate(Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, rate_log: Tensor, lower_bound: float) -> Tensor:
        rate = wide(rate_log).exp().unsqueeze(-1)
        opened = torch.sigmoid(wide(z) * rate)
        ctx.save_for_backward(z, rate, opened)
        ctx.lower_bound, ctx.rate_dtype = lower_bound, rate_log.dtype
        return opened * number(lower_bound, opened.dtype, opened.device)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        z, rate, opened = ctx.saved_tensors
        d_inner = torch.addcmul(opened, opened, opened, value=-1.0).mul_(grads[0])
        d_inner.mul_(rate).mul_(ctx.lower_bound)
        d_rate = (d_inner * wide(z)).sum((0, 2)).to(ctx.rate_dtype)
        return d_inner.to(z.dtype), d_rate, None


def decay_gate(z: Tensor, rate_log: Tensor, lower_bound: float) -> Tensor:
    """Log-decay lower_bound * sigmoid(exp(A_h) z) of z [T, H, D] and A [H]; in (lower_bound, 0)."""
    return applied(_DecayGate, z, rate_log, lower_bound)


class _SigmoidGate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        opened = torch.sigmoid(wide(gate))
        ctx.save_for_backward(x, opened)
        ctx.dtype = gate.dtype
        return (x * opened).to(gate.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, opened = ctx.saved_tensors
        d_x = grads[0] * opened
        d_gate = torch.addcmul(d_x, d_x, opened, value=-1.0).mul_(x)
        return d_x.to(x.dtype), d_gate.to(ctx.dtype)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Product x * sigmoid(gate), in the dtype of `gate`."""
    return applied(_SigmoidGate, x, gate)


class _TakeRows(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows: Tensor,
        back: Tensor,
        mask: Tensor | None,
        back_mask: Tensor | None,
        num_real: int | None,
    ) -> Tensor:
        ctx.save_for_backward(back, back_mask)
        ctx.num_real = num_real
        taken = x.index_select(0, rows)
        return taken if mask is None else taken.mul_(mask)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        back, back_mask = ctx.saved_tensors
        grad = grads[0].contiguous().index_select(0, back)
        if back_mask is not None:
            grad.mul_(back_mask)
        if ctx.num_real is not None:
            grad[ctx.num_real :] = 0
        return grad, None, None, None, None, None


def take_rows(
    x: Tensor, rows: Tensor, back: Tensor, mask: Tensor | None = None,
    back_mask: Tensor | None = None, num_real: int | None = None,
) -> Tensor:  # fmt: skip
    """x[rows] * mask, where row i of x went to row back[i], if back_mask[i] is not 0.

    A gather both ways: index_select's own gradient is a scatter-add, several times slower. Masks
    are [rows, 1] of 0 and 1; rows of the result that `back` does not name get no gradient, nor do
    rows of x from `num_real` on.
    """
    return applied(_TakeRows, x, rows, back, mask, back_mask, num_real)


_FUSE_BELOW = 1 << 20
# Measured on CPUs with AVX-512: a row of a product of at least so many rows and at most so many
# columns comes out bit for bit the same however many rows there are; outside it need not.
_MIN_ROWS, _MAX_COLUMNS = 8, 128


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Product x W^T of x [..., in] and a matrix [out, in].

    On a CPU, in float32 and float64, a row of the result does not depend on the number of rows:
    few rows are padded and many columns are summed in pieces, or see tiled.py.
    """
    if needs_tiles(x):
        return linear_by_tiles(x, weight)
    num_rows, width = x.numel() // x.shape[-1], x.shape[-1]
    is_exact = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    if not is_exact or (num_rows >= _MIN_ROWS and width <= _MAX_COLUMNS):
        return torch.nn.functional.linear(x, weight)
    rows = x.reshape(-1, width)
    if num_rows < _MIN_ROWS:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, _MIN_ROWS - num_rows))
    pieces = zip(*(torch.split(part, _MAX_COLUMNS, -1) for part in (rows, weight)), strict=True)
    first, *rest = (torch.nn.functional.linear(a, b) for a, b in pieces)
    for piece in rest:
        first = first + piece
    return first[:num_rows].view(*x.shape[:-1], len(weight))


def linear_many(x: Tensor, groups: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """Products x @ W^T for each group of weights [out, in], a group's results side by side.

    Small ones are a single product, for its fewer launches.
    """
    if sum(weight.numel() for group in groups for weight in group) > _FUSE_BELOW:
        return tuple(
            torch.cat([linear(x, weight) for weight in group], -1) if len(group) > 1
            else linear(x, group[0])
            for group in groups
        )  # fmt: skip
    joined = linear(x, torch.cat([w for group in groups for w in group]))
    return joined.split_with_sizes([sum(map(len, group)) for group in groups], -1)
