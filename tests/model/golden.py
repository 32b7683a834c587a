"""Golden files of the released code, and how far from them a value may lie."""

import json
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from k3rl.model.config import ModelConfig
from k3rl.model.layout import Layout
from k3rl.model.model import K3Model
from k3rl.model.released import load_released
from k3rl.model.released_config import read_config

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
CASES = {case["name"]: case for case in json.loads((GOLDEN / "manifest.json").read_text())["cases"]}
DTYPES = [torch.float64, torch.float32]
# Values stored as float32 carry half an ulp of it; the manifest allows 2e-7.
STORED = 2e-7


@cache
def golden(name: str) -> dict[str, Tensor]:
    """The tensors of a case; not to be changed."""
    return load_file(GOLDEN / f"{name}.safetensors")


@cache
def golden_model(checkpoint: str, dtype: torch.dtype) -> K3Model:
    """A golden checkpoint; not to be changed."""
    return load_released(GOLDEN / checkpoint, dtype).requires_grad_(False)


def golden_config() -> ModelConfig:
    return read_config(GOLDEN / "tiny_k3")


def token_ids(case: dict[str, Tensor]) -> Tensor:
    return case["input_ids"].long()


def below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): x for n, x in tensors.items() if n.startswith(prefix)}


def equal_layout(count: int, length: int) -> Layout:
    """Of `count` sequences of `length` tokens."""
    return Layout.of(torch.arange(count + 1) * length, count * length)


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference. Raises AssertionError when shapes differ."""
    assert found.shape == expected.shape
    return float((found.detach().double() - expected.double()).abs().max())


def assert_stored(found: Tensor, expected: Tensor, part: float, label: str = "") -> None:
    """Float64: equal but for the rounding of what is stored. Float32: within `part` of its largest
    value.
    """
    largest = float(expected.abs().max())
    off = distance(found, expected)
    if found.dtype == torch.float32:
        assert off <= part * largest, f"{label}: {off} of {largest}"
        return
    assert found.dtype == torch.float64, label
    assert off <= STORED * largest + 1e-30, f"{label}: {off} of {largest}"
    excess = (found.detach() - expected).abs() - STORED * expected.abs()
    assert float(excess.max()) <= 1e-11 * max(largest, 1.0), f"{label}: {float(excess.max())}"


def bfloat16_steps(found: Tensor, expected: Tensor) -> int:
    """How many representable values lie between two bfloat16 tensors, at most."""

    def order(x: Tensor) -> Tensor:
        bits = x.detach().contiguous().view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    assert found.dtype == expected.dtype == torch.bfloat16
    return int((order(found) - order(expected)).abs().max())
