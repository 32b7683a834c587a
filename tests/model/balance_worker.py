"""One rank of a group that balances together; a module of its own, so that spawn can import it."""

from pathlib import Path

import numpy as np
import torch
from torch import distributed as dist

from k3rl.model.balance import QuantileBalancer

NUM_STEPS = 3
NUM_LAYERS, NUM_EXPERTS, TOP_K = 2, 12, 3


def scores_of(step: int, num_tokens: int) -> torch.Tensor:
    """Raw scores [m, L, E] of all ranks in a step, skewed between experts."""
    generator = torch.Generator().manual_seed(step)
    noise = torch.randn(num_tokens, NUM_LAYERS, NUM_EXPERTS, generator=generator)
    return torch.sigmoid(noise + torch.linspace(-1, 1, NUM_EXPERTS))


def start_biases() -> list[torch.Tensor]:
    return [torch.linspace(-0.2, 0.3, NUM_EXPERTS) * sign for sign in (1, -1)]


def run_steps(parts: list[slice], num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts [S, L, E, bins] and biases [S, L, E] of steps that observe `parts` of the tokens."""
    balancer = QuantileBalancer(start_biases(), TOP_K)
    counts, biases = [], []
    for step in range(NUM_STEPS):
        scores = scores_of(step, num_tokens)
        for part in parts:
            balancer.observe(scores[part])
        assert balancer.step() == num_tokens
        counts.append(balancer.counts.numpy().copy())
        biases.append(torch.stack(balancer.biases).numpy().copy())
    return np.stack(counts), np.stack(biases)


def work(rank: int, cuts: list[int], folder: str) -> None:
    """Rank `rank` of len(cuts) - 1; it owns the tokens from cuts[rank] to cuts[rank + 1].

    A rank without tokens observes nothing. Results go to `folder`.
    """
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/rendezvous", rank=rank, world_size=len(cuts) - 1
    )
    try:
        start, stop = cuts[rank], cuts[rank + 1]
        middle = (start + stop) // 2
        parts = [slice(start, middle), slice(middle, stop)] if stop > start else []
        counts, biases = run_steps(parts, cuts[-1])
        np.save(Path(folder) / f"counts{rank}.npy", counts)
        np.save(Path(folder) / f"biases{rank}.npy", biases)
    finally:
        dist.destroy_process_group()
