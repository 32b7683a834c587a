"""Quantile balancing: router biases that give every expert its share (K3 report, 2607.24653).

The bias moves the choice of experts only. It follows from the scores of a whole optimiser step and
applies from the next one. In RL it stays frozen: rollout and training must route alike.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from k3rl.errors import UserInputError
from k3rl.model.model import DecoderLayer, K3Model
from k3rl.model.moe import Router


def quantile_bias(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """The next bias [E] from raw scores [m, E] of m tokens under `bias` [E].

    With a_i the (k+1)-th largest biased score of token i and q = m k / E, -b_j is the
    (floor(q) + 1)-th largest of s_ij - a_i over the tokens; then b is centred.
    """
    num_tokens, num_experts = scores.shape
    if num_tokens < 2 or not 0 < top_k < num_experts:
        raise UserInputError(f"{num_tokens} tokens, top {top_k} of {num_experts}: no quantile")
    scores = scores.double()
    threshold = torch.topk(scores + bias.double(), top_k + 1, dim=1).values[:, -1:]
    share = num_tokens * top_k // num_experts
    margin = torch.topk(scores - threshold, share + 1, dim=0).values[-1]
    return (-margin + margin.mean()).to(bias.dtype)


def routers(model: K3Model) -> list[Router]:
    """The routers of a model, by layer."""
    layers = [cast(DecoderLayer, layer) for layer in model.model.layers]
    return [layer.block_sparse_moe.gate for layer in layers if not layer.is_dense]


@torch.no_grad()
def balance(model: K3Model, scores: Tensor) -> None:
    """Give every router the bias that the raw scores [m, L, E] of a whole step call for.

    `scores` are those a `Routing.record(keep_scores=True)` kept, concatenated over micro-batches;
    each token once, padding left out.
    """
    gates = routers(model)
    if scores.dim() != 3 or scores.shape[1] != len(gates):
        raise UserInputError(f"scores {tuple(scores.shape)} for {len(gates)} routed layers")
    for layer, gate in enumerate(gates):
        bias = gate.e_score_correction_bias
        bias.copy_(quantile_bias(scores[:, layer], bias, gate.top_k))


def load_imbalance(ids: Tensor, num_experts: int) -> Tensor:
    """Largest over mean number of tokens per expert, [L], of expert ids [T, L, k]."""
    counts = torch.stack(
        [torch.bincount(layer.flatten(), minlength=num_experts) for layer in ids.unbind(1)]
    ).float()
    return counts.max(1).values / counts.mean(1)
