"""MXFP4 weights and MXFP8 activations: what quantised experts are stored as and trained with.

OCP Microscaling Formats v1.0: 32 consecutive values of the last axis share one E8M0 scale, a power
of two kept as the byte log2(scale) + 127. MXFP4 elements are E2M1 codes, two a byte, the low nibble
first; MXFP8 elements are E4M3. One quantiser serves training, export and rollout (K3 report, arXiv
2607.24653, section 4.1: quantisation-aware training from SFT on), so the three cannot disagree.

The scale rule of weights is that of the compressed-tensors format, which the release names; that
the released weights came from the same rule is not known. It need not be: values that MXFP4 can
hold come back unchanged, whichever scale they were stored under.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from k3rl.errors import UserInputError
from k3rl.model.ops import applied, wide

GROUP = 32
"""Values that share a scale."""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the E2M1 codes 0 to 7; bit 3 is the sign."""
NOT_A_SCALE = 255
"""The E8M0 byte that stands for NaN."""

_CHUNK = 1 << 17  # groups worked on at a time: temporaries stay near 100 MB whatever the tensor
_SMALLEST, _LARGEST = 2.0**-127, 2.0**127
_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


class Packed(NamedTuple):
    """A weight [..., out, in] in MXFP4, as checkpoints keep it."""

    weight_packed: Tensor
    """uint8 [..., out, in / 2]: column 2 i in the low nibble of byte i, 2 i + 1 in the high one."""
    weight_scale: Tensor
    """uint8 [..., out, in / 32]: log2 of the scale of 32 columns, plus 127."""


class _Element(NamedTuple):
    """A small float: `mantissa_bits` behind the leading one, normal from `least` to `largest`."""

    mantissa_bits: int
    least: float
    largest: float


_E2M1 = _Element(1, 1.0, 6.0)
_E4M3 = _Element(3, 2.0**-6, 448.0)


def quantise(weight: Tensor) -> Packed:
    """`weight` [..., out, in] in MXFP4.

    With a the largest magnitude of a group and p the power of two below it, the scale is p / 4, or
    p / 2 from a = 1.75 p on: 7 would be the next element after 6. Elements are the nearest, ties to
    the even code. A negative value that rounds to zero has code 8, but -0.0 itself has code 0, as
    in compressed-tensors: values come back from a second round, code 8 does not. Scale byte 0 is
    the least, also for a group of zeros. In float32 and bfloat16 no scale exceeds 2^125, in float64
    none exceeds 2^127, so that every element is finite; larger magnitudes saturate at 6.

    Raises:
        UserInputError: `weight` is not bfloat16, float32 or float64, `in` is not a multiple of 32,
            or a value is inf or NaN.

    """
    groups = _groups_of(weight, "weight")
    packed = torch.empty(len(groups), GROUP // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(len(groups), dtype=torch.uint8, device=weight.device)
    for part in _parts(len(groups)):
        x = wide(groups[part])
        scale = _weight_scale(x, _scale_limit(weight.dtype))
        if not bool(torch.isfinite(scale).all()):
            raise UserInputError("weight holds inf or NaN: it cannot be quantised")
        packed[part] = _pack(_nearest(x.div(scale), _E2M1), x < 0)
        # The biased exponent of float32 is the byte; the subnormal 2^-127 has exponent bits 0.
        scales[part] = (scale.float().view(torch.int32) >> 23).squeeze(-1).to(torch.uint8)
    *lead, columns = weight.shape
    return Packed(packed.view(*lead, columns // 2), scales.view(*lead, columns // GROUP))


def dequantise(
    weight_packed: Tensor, weight_scale: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """The values [..., out, in] of a `Packed` in `dtype`: code * 2^(scale - 127), exactly.

    Raises:
        UserInputError: tensors that are not uint8 or do not belong together, another `dtype` than
            bfloat16, float32 or float64, a scale byte of 255, or a value too large for `dtype`.

    """
    _check_packed(weight_packed, weight_scale, dtype)
    codes = weight_packed.reshape(-1, GROUP // 2)
    scales = weight_scale.reshape(-1)
    pairs, powers = _pair_values(dtype, codes.device), _powers(dtype, codes.device)
    out = torch.empty(len(codes), GROUP, dtype=dtype, device=codes.device)
    for part in _parts(len(codes)):
        values = pairs.index_select(0, codes[part].flatten().int()).view(-1, GROUP)
        scale = powers.index_select(0, scales[part].int()).unsqueeze(-1)
        torch.mul(values, scale, out=out[part])
        if not bool(torch.isfinite(out[part]).all()):
            raise UserInputError(f"a packed weight is too large for {dtype}: use float64")
    return out.view(*weight_packed.shape[:-1], 2 * weight_packed.shape[-1])


def fake_quantise_weight(weight: Tensor) -> Tensor:
    """`weight` [..., in] as it will be served: the values of `quantise`, in its own dtype.

    Equal to `dequantise(*quantise(weight), weight.dtype)`; -0.0 stays -0.0, so that what
    `dequantise` gives back is left as it is, bit for bit, and a second time changes nothing. A
    group with an inf or NaN becomes NaN: a loss that is not finite stops the step. The gradient
    passes through as if nothing was rounded (straight-through).
    Raises UserInputError on dtypes and widths as `quantise` does.
    """
    return applied(_FakeQuantise, weight, _E2M1)


def fake_quantise_activation(x: Tensor) -> Tensor:
    """`x` [..., d] rounded to MXFP8 along its last axis, in its own dtype.

    The scale of a group is 2^(floor(log2 a) - 8) for its largest magnitude a, between 2^-127 and
    2^127 (OCP MX, section 6.3); E4M3 elements are the nearest, ties to even, and saturate at 448.
    Each value is rounded once from the dtype of `x`. The cast to torch.float8_e4m3fn would round
    float64 twice, through float32.
    Gradient, inf, NaN, idempotence and errors are those of `fake_quantise_weight`.
    """
    return applied(_FakeQuantise, x, _E4M3)


class _FakeQuantise(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, element: _Element) -> Tensor:
        groups = _groups_of(x, "weight" if element is _E2M1 else "activation")
        out = torch.empty_like(groups, memory_format=torch.contiguous_format)
        for part in _parts(len(groups)):
            y = wide(groups[part])
            if element is _E2M1:
                scale = _weight_scale(y, _scale_limit(x.dtype))
            else:
                scale = _activation_scale(y)
            # The least scale is subnormal: flushed to zero it would make 0 / 0 of a group of zeros.
            scale.masked_fill_(~y.any(-1, keepdim=True), 1.0)
            out[part] = _nearest(y.div(scale), element).mul_(scale)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return grads[0], None


def _groups_of(x: Tensor, what: str) -> Tensor:
    """[groups, 32] of x [..., columns]."""
    if x.dtype not in _DTYPES:
        raise UserInputError(f"{what} is {x.dtype}: bfloat16, float32 or float64 can be quantised")
    if x.dim() == 0 or x.shape[-1] % GROUP:
        raise UserInputError(f"{what} {tuple(x.shape)}: last axis must be a multiple of {GROUP}")
    return x.detach().reshape(-1, GROUP)


def _parts(count: int) -> Iterator[slice]:
    return (slice(start, start + _CHUNK) for start in range(0, count, _CHUNK))


def _power_below(x: Tensor) -> Tensor:
    """2^floor(log2 |x|) of float32 or float64: the exponent bits alone. Subnormals give 0."""
    if x.dtype == torch.float32:
        return (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    return (x.view(torch.int64) & 0x7FF0000000000000).view(torch.float64)


def _scale_limit(dtype: torch.dtype) -> float:
    """The largest scale under which every element is finite in `dtype`."""
    return _LARGEST if dtype == torch.float64 else 2.0**125


def _weight_scale(x: Tensor, limit: float) -> Tensor:
    """Scales [groups, 1] of x [groups, 32]; NaN where a group is not finite."""
    largest = x.abs().amax(-1, keepdim=True)
    power = _power_below(largest)
    # In float32 the power above 2^127 is inf, which the limit takes down again.
    power = torch.where(largest >= 1.75 * power, 2 * power, power)
    return _held(power.div_(4).clamp_(_SMALLEST, limit), largest)


def _activation_scale(x: Tensor) -> Tensor:
    largest = x.abs().amax(-1, keepdim=True)
    return _held(_power_below(largest).div_(256).clamp_(_SMALLEST, _LARGEST), largest)


def _held(scale: Tensor, largest: Tensor) -> Tensor:
    return scale.masked_fill_(~torch.isfinite(largest), torch.nan)


def _nearest(y: Tensor, element: _Element) -> Tensor:
    """The elements nearest to `y`, ties to even: multiples of a step that grows with |y|.

    The sign of zero stays.

    Steps are powers of two, so division and product are exact and `round` is the one rounding.
    """
    step = _power_below(y).clamp_(min=element.least)
    step.mul_(0.5**element.mantissa_bits)
    return y.div(step).round_().mul_(step).clamp_(-element.largest, element.largest)


def _pack(values: Tensor, negative: Tensor) -> Tensor:
    """Bytes [groups, 16] of E2M1 values and whether they are negative, both [groups, 32]."""
    doubled = values.abs_().mul_(2).int()
    codes = _codes(values.device).index_select(0, doubled.flatten()).view(values.shape)
    codes |= negative.to(torch.uint8) << 3
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


@lru_cache(maxsize=16)
def _codes(device: torch.device) -> Tensor:
    """The code of half of each index 0 to 12."""
    table = [0] * 13
    for code, magnitude in enumerate(MAGNITUDES):
        table[int(2 * magnitude)] = code
    return _table(table, torch.uint8, device)


@lru_cache(maxsize=16)
def _pair_values(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Values [256, 2] of the low and the high nibble of each byte."""
    signed = [*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)]
    pairs = [(signed[byte & 15], signed[byte >> 4]) for byte in range(256)]
    return _table(pairs, dtype, device)


@lru_cache(maxsize=16)
def _powers(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Scales [255] of the bytes 0 to 254."""
    return _table([2.0 ** (byte - 127) for byte in range(NOT_A_SCALE)], dtype, device)


def _table(values: list[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # one made inside could not take part in autograd later
        return torch.tensor(values, dtype=torch.float64).to(dtype).to(device)


def _check_packed(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise UserInputError(f"packed weight {packed.dtype}, scale {scale.dtype}: both are uint8")
    expected = (*packed.shape[:-1], packed.shape[-1] * 2 // GROUP) if packed.dim() else ()
    if packed.dim() == 0 or packed.shape[-1] % (GROUP // 2) or scale.shape != expected:
        raise UserInputError(
            f"scale {tuple(scale.shape)} does not fit packed weight {tuple(packed.shape)}"
        )
    if dtype not in _DTYPES:
        raise UserInputError(f"{dtype} cannot hold MXFP4: use bfloat16, float32 or float64")
    if bool((scale == NOT_A_SCALE).any()):
        raise UserInputError(f"a weight scale is {NOT_A_SCALE}, which is NaN: the weight is broken")
