"""MXFP4 and MXFP8: bit-exact with the golden files, saturating, idempotent, straight-through."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import load_file

from k3rl.errors import UserInputError
from k3rl.model import mxfp4
from k3rl.model.mxfp4 import (
    MAGNITUDES,
    dequantise,
    fake_quantise_activation,
    fake_quantise_weight,
    quantise,
)

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
INT_OF = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
FAKES = [fake_quantise_weight, fake_quantise_activation]


def same_bits(found, expected):
    assert found.dtype == expected.dtype
    as_int = INT_OF[found.dtype]
    return torch.equal(found.view(as_int), expected.view(as_int))


def group(*values, dtype=torch.float32):
    """One group that starts with `values` and ends in zeros, [1, 32]."""
    row = torch.zeros(1, 32, dtype=dtype)
    row[0, : len(values)] = torch.tensor(values, dtype=dtype)
    return row


def nearest_e2m1(value):
    """By search over the eight magnitudes; the even code of two that are equally near."""
    return min(range(8), key=lambda code: (abs(abs(value) - MAGNITUDES[code]), code % 2))


def test_every_code_under_every_scale_decodes_as_released():
    golden = load_file(GOLDEN / "mxfp4_codec.safetensors")
    found = dequantise(golden["weight_packed"], golden["weight_scale"], torch.float64)
    assert same_bits(found, golden["value"])
    assert same_bits(fake_quantise_weight(found), found)


def test_weights_quantise_as_in_the_format_library():
    golden = load_file(GOLDEN / "mxfp4_quantise.safetensors")
    packed = quantise(golden["weight"])
    assert torch.equal(packed.weight_packed, golden["weight_packed"])
    assert torch.equal(packed.weight_scale, golden["weight_scale"])
    assert same_bits(dequantise(*packed), golden["dequant"])
    assert torch.equal(quantise(golden["weight"].double()).weight_packed, packed.weight_packed)


def test_a_released_checkpoint_decodes_and_is_a_fixed_point():
    stored = load_file(GOLDEN / "tiny_k3_mxfp4" / "model.safetensors")
    expected = load_file(GOLDEN / "tiny_k3_mxfp4_dequant.safetensors")
    assert len(expected) == 96
    for name, value in expected.items():
        packed = stored[f"{name}_packed"], stored[f"{name}_scale"]
        assert same_bits(dequantise(*packed, torch.bfloat16), value)
        assert same_bits(fake_quantise_weight(value), value)
        again = quantise(value)
        assert torch.equal(again.weight_scale, packed[1])
        assert torch.equal(dequantise(*again), value)


def test_leading_axes_are_kept():
    weight = torch.randn(3, 2, 5, 64, generator=torch.Generator().manual_seed(0))
    packed = quantise(weight)
    assert packed.weight_packed.shape == (3, 2, 5, 32)
    assert packed.weight_scale.shape == (3, 2, 5, 2)
    one = quantise(weight[2, 1])
    assert torch.equal(packed.weight_packed[2, 1], one.weight_packed)
    turned = quantise(weight.transpose(0, 2)).weight_packed
    assert torch.equal(turned.transpose(0, 2), packed.weight_packed)
    assert dequantise(*packed, torch.float32).shape == weight.shape
    empty = quantise(weight[:0])
    assert dequantise(*empty).shape == (0, 2, 5, 64)


def test_work_in_parts_is_the_work_at_once(monkeypatch):
    weight = torch.randn(7, 96, generator=torch.Generator().manual_seed(1))
    packed, faked = quantise(weight), [fake(weight) for fake in FAKES]
    monkeypatch.setattr(mxfp4, "_CHUNK", 4)
    assert all(torch.equal(a, b) for a, b in zip(quantise(weight), packed, strict=True))
    assert same_bits(dequantise(*packed, torch.float32), faked[0])
    assert all(same_bits(fake(weight), once) for fake, once in zip(FAKES, faked, strict=True))


@pytest.mark.parametrize(
    ("largest", "byte"),
    [(6.0, 127), (7.0 - 2**-20, 127), (7.0, 128), (8.0, 128), (4.0, 127), (4.0 - 2**-20, 127),
     (3.5, 127), (3.5 - 2**-20, 126), (0.0, 0), (2.0**-125, 0), (2.0**-124, 1), (1e-45, 0),
     (1.75 * 2.0**127, 252), (3.4e38, 252)],
)  # fmt: skip
def test_the_scale_rounds_up_from_a_mantissa_of_seven_quarters(largest, byte):
    packed = quantise(group(largest, -largest / 3))
    assert packed.weight_scale.item() == byte
    assert torch.isfinite(dequantise(*packed, torch.bfloat16)).all()


def test_ties_go_to_the_even_code_and_signs_are_kept():
    values = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    values += [-value for value in values]
    faked = fake_quantise_weight(group(*values))[0, :16].tolist()
    assert faked[:8] == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert faked[8:] == [-value for value in faked[:8]]
    small = group(6.0, -0.1, -0.0, 0.1)
    codes = quantise(small).weight_packed[0, :2].tolist()
    assert codes == [0x87, 0x00], "low nibble first; -0.1 is code 8, -0.0 is code 0"
    assert torch.signbit(fake_quantise_weight(small))[0, :4].tolist() == [False, True, True, False]


def test_values_beyond_float32_saturate_in_float64():
    packed = quantise(group(1e300, -1e300, 1.0, dtype=torch.float64))
    assert packed.weight_scale.item() == 254
    found = dequantise(*packed, torch.float64)[0, :3].tolist()
    assert found == [6 * 2.0**127, -6 * 2.0**127, 0.0]
    with pytest.raises(UserInputError, match="too large for"):
        dequantise(*packed, torch.float32)


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_what_is_not_finite_is_an_error_to_store_and_nan_to_train(bad):
    weight = torch.ones(2, 64)
    weight[1, 40] = bad
    with pytest.raises(UserInputError, match="inf or NaN"):
        quantise(weight)
    for fake in FAKES:
        found = fake(weight)
        assert torch.isnan(found[1, 32:]).all()
        assert torch.isfinite(found[0]).all()
        assert torch.isfinite(found[1, :32]).all()


def test_bad_arguments_are_named():
    for call in (quantise, *FAKES):
        with pytest.raises(UserInputError, match="multiple of 32"):
            call(torch.zeros(3, 33))
        with pytest.raises(UserInputError, match="multiple of 32"):
            call(torch.tensor(1.0))
        with pytest.raises(UserInputError, match="float16"):
            call(torch.zeros(3, 32, dtype=torch.float16))
    packed, scale = quantise(torch.ones(4, 64))
    for codes, scales in [(packed, scale[:, :1]), (packed[:, :30], scale), (packed[:3], scale),
                          (packed[0, 0], scale[0, 0])]:  # fmt: skip
        with pytest.raises(UserInputError, match="does not fit"):
            dequantise(codes, scales)
    with pytest.raises(UserInputError, match="uint8"):
        dequantise(packed.int(), scale)
    with pytest.raises(UserInputError, match="cannot hold"):
        dequantise(packed, scale, torch.float16)
    scale[2, 1] = 255
    with pytest.raises(UserInputError, match="scale is 255"):
        dequantise(packed, scale)


def test_activations_are_rounded_once_and_saturate():
    x = group(256.0, 500.0, 464.0, 440.0, 18.0, 17.0, 19.0, 2.0**-10, -(2.0**-10), 3 * 2.0**-10)
    found = fake_quantise_activation(x)[0, :10].tolist()
    assert found == [256.0, 448.0, 448.0, 448.0, 18.0, 16.0, 20.0, 0.0, -0.0, 2.0**-8]
    # Just above a tie in float64, on the tie once rounded to float32.
    y = group(256.0, 17.0 + 2.0**-40, dtype=torch.float64)
    assert fake_quantise_activation(y)[0, 1] == 18.0
    assert y.to(torch.float8_e4m3fn).double()[0, 1] == 16.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_agree_with_the_cast_where_it_rounds_once(dtype):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(50, 96, generator=generator) * 2.0 ** torch.randint(-9, 9, (50, 1))
    x = x.to(dtype)
    groups = x.float().view(-1, 32)
    scale = 2.0 ** (groups.abs().amax(1, keepdim=True).log2().floor() - 8)
    expected = (groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    assert same_bits(fake_quantise_activation(x), expected.view(50, 96).to(dtype))


def test_gradients_pass_straight_through():
    for fake in FAKES:
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(3)).requires_grad_()
        upstream = torch.randn(4, 64, generator=torch.Generator().manual_seed(4))
        fake(x).backward(upstream)
        assert torch.equal(x.grad, upstream)
        with torch.no_grad():
            assert not fake(x).requires_grad


def floats(width):
    dtype = {32: "float32", 64: "float64"}[width]
    values = st.floats(allow_nan=False, allow_infinity=False, width=width)
    return hnp.arrays(dtype, (2, 32), elements=values)


@settings(max_examples=60, deadline=None)
@given(st.one_of(floats(32), floats(64)), st.booleans())
def test_rounding_twice_is_rounding_once(values, as_bfloat16):
    x = torch.from_numpy(values.copy())
    if as_bfloat16:
        x = torch.nan_to_num(x.to(torch.bfloat16))
    for fake in FAKES:
        once = fake(x)
        assert torch.isfinite(once).all()
        assert same_bits(fake(once), once)
    packed = quantise(x)
    assert torch.equal(dequantise(*packed, x.dtype), fake_quantise_weight(x))


@settings(max_examples=60, deadline=None)
@given(hnp.arrays("uint8", (3, 16)), hnp.arrays("uint8", (3, 1), elements=st.integers(0, 254)))
def test_whatever_is_stored_is_a_fixed_point(codes, scales):
    """Also of weights whose scale the rule here would not have chosen."""
    value = dequantise(torch.from_numpy(codes), torch.from_numpy(scales), torch.float64)
    assert same_bits(fake_quantise_weight(value), value)
    assert torch.equal(dequantise(*quantise(value), torch.float64), value)


@settings(max_examples=40, deadline=None)
@given(hnp.arrays("float32", (32,), elements=st.floats(-6, 6, width=32)))
def test_elements_are_the_nearest(values):
    values[0] = 6.0
    faked = fake_quantise_weight(torch.from_numpy(values.copy()[None]))[0].tolist()
    assert [abs(value) for value in faked] == [MAGNITUDES[nearest_e2m1(v)] for v in values]
