"""The sampling rule: one Philox number per token offset, inverse CDF over ids in order.

The number that decides the token at offset t of a context is number t of the stream keyed by
(seed, `GenerateRequest.stream`) (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2,
3"). There is no generator state, so pause, resume, another process and the batch around it cannot
change it.

Axes: B sequences, V vocabulary ids.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k3rl.types import philox

BLOCK = 4
"""Numbers of one Philox 4x64 counter value."""


def uniforms(seed: int, stream: str, offset: int, count: int) -> NDArray[np.float64]:
    """Numbers [offset, offset + count) of a stream, each in [0, 1)."""
    generator = philox(seed, stream)
    cast(np.random.Philox, generator.bit_generator).advance(offset // BLOCK)
    skipped = offset % BLOCK
    return generator.random(skipped + count)[skipped:]


def sample(logits: Tensor, numbers: Tensor, is_greedy: Tensor) -> tuple[Tensor, Tensor]:
    """One id per row, int64 [B], and its log-prob under the law sampled from, float32 [B].

    `logits` float32 [B, V]; `numbers` float64 [B] in [0, 1) from `uniforms`; rows of `is_greedy`
    bool [B] take the most likely id (the first of equals) with log-prob 0, the others the id whose
    interval of the CDF at temperature 1 holds their number.
    """
    shifted = logits - logits.amax(-1, keepdim=True)
    cdf = torch.cumsum(torch.exp(shifted), -1, dtype=torch.float64)
    total = cdf[:, -1:]
    # Rounding must not carry a number to the total: no interval holds that.
    below_total = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(numbers[:, None] * total, below_total)
    ids = torch.searchsorted(cdf, target, right=True)
    logprobs = shifted.gather(1, ids) - torch.log(total).to(torch.float32)
    ids, logprobs = ids[:, 0], logprobs[:, 0].clamp(max=0.0)
    if bool(is_greedy.any()):
        ids = torch.where(is_greedy, logits.argmax(-1), ids)
        logprobs = torch.where(is_greedy, torch.zeros_like(logprobs), logprobs)
    return ids, logprobs
