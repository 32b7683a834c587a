"""Muon on matrices, AdamW on everything else, as one optimiser over named parameters.

Muon (Moonlight, arXiv 2502.16982): the update of a matrix is its Nesterov momentum with all
singular values brought near 1, times 0.2 sqrt(max(rows, cols)), the size of an AdamW update.
Query, key and value projections are split along heads first and each block is orthogonalised by
itself (per-head Muon, Kimi K3 report, arXiv 2607.24653, section 2.5).

Axes: B blocks of one shape, r rows, c columns.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from k3rl.errors import ConfigError
from k3rl.model.config import ModelConfig

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
UPDATE_SCALE = 0.2
ADAM_EPS = 1e-8
NORM_EPS = 1e-30
"""Keeps the zero matrix zero."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.(\w+)\.weight$")
_ADAMW = re.compile(r"embed_tokens|lm_head|conv1d|patch_embed")


def orthogonalise(blocks: Tensor) -> Tensor:
    """[B, r, c] with the singular values of every block brought to about 0.7 .. 1.2.

    Five steps of a quintic Newton-Schulz iteration, in the dtype of `blocks`; values below about
    1/300 of the block's norm get only part of the way.
    """
    is_tall = blocks.shape[-2] > blocks.shape[-1]
    x = blocks.mT if is_tall else blocks
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(NORM_EPS)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def head_rows(config: ModelConfig, name: str) -> tuple[int, ...] | None:
    """Rows of the parts of one head in the projection `name`; None when it has no heads to split.

    KDA q, k, v: one part per head. MLA queries: one; keys and values: a key part and a value part.
    """
    found = _LAYER.search(name)
    if not found:
        return None
    projection = found.group(2)
    if config.layer_kinds[int(found.group(1))] == "kda":
        return (config.kda.head_dim,) if projection in {"q_proj", "k_proj", "v_proj"} else None
    if projection in {"q_proj", "q_b_proj"}:
        return (config.mla.qk_head_dim,)
    if projection == "kv_b_proj":
        return (config.mla.qk_nope_head_dim, config.mla.v_head_dim)
    return None


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon takes it: a matrix, or a stack of them, that maps features to features.

    Embeddings, the head, convolution taps, vectors and pseudo-queries of one row are AdamW's.
    """
    return not _ADAMW.search(name) and parameter.ndim >= 2 and min(parameter.shape[-2:]) > 1


def split(tensor: Tensor, parts: tuple[int, ...] | None) -> list[Tensor]:
    """Views [B, r, c] of a matrix [rows, c] or a stack of them, one view per part of a head."""
    if parts is None:
        return [tensor.reshape(-1, *tensor.shape[-2:])]
    heads = tensor.view(-1, sum(parts), tensor.shape[-1])
    return list(heads.split_with_sizes(parts, dim=1))


@dataclass(frozen=True, slots=True)
class Rates:
    """Learning rates of one step."""

    matrix: float
    vector: float


class Optimiser:
    """State and step of Muon and AdamW over the parameters of one model that train."""

    def __init__(
        self,
        model: nn.Module,
        config: ModelConfig,
        *,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
    ) -> None:
        """Takes the parameters with `requires_grad`; `config` says where heads lie."""
        self.momentum, self.betas, self.weight_decay = momentum, betas, weight_decay
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.matrices = {n: p for n, p in named if is_matrix(n, p)}
        self.vectors = {n: p for n, p in named if n not in self.matrices}
        self._parts = {name: head_rows(config, name) for name in self.matrices}
        self._momenta = {n: torch.zeros_like(p) for n, p in self.matrices.items()}
        self._first = {n: torch.zeros_like(p) for n, p in self.vectors.items()}
        self._second = {n: torch.zeros_like(p) for n, p in self.vectors.items()}
        self.num_steps = 0

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """All of them, by name."""
        return {**self.matrices, **self.vectors}

    @torch.no_grad()
    def step(self, rates: Rates) -> None:
        """One update from the gradients that the parameters hold; None counts as zero."""
        self.num_steps += 1
        if self.matrices:
            self._step_matrices(rates.matrix)
        if self.vectors:
            self._step_vectors(rates.vector)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """Plain tensors by name; not copies."""
        state = {f"momentum.{n}": t for n, t in self._momenta.items()}
        state |= {f"first.{n}": t for n, t in self._first.items()}
        state |= {f"second.{n}": t for n, t in self._second.items()}
        return {**state, "num_steps": torch.tensor(self.num_steps)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over a `state_dict`. Raises ConfigError naming what does not fit."""
        own = self.state_dict()
        if strange := sorted(state.keys() ^ own.keys()):
            raise ConfigError(f"optimiser state: {strange[0]}: not in both model and checkpoint")
        for name, tensor in own.items():
            if tensor.shape != state[name].shape:
                found = f"{list(state[name].shape)} in the checkpoint"
                raise ConfigError(f"optimiser state: {name}: {list(tensor.shape)}, {found}")
            tensor.copy_(state[name])
        self.num_steps = int(state["num_steps"])

    def _step_matrices(self, rate: float) -> None:
        names = list(self.matrices)
        momenta = list(self._momenta.values())
        parameters: list[Tensor] = list(self.matrices.values())
        grads = _grads(parameters)
        torch._foreach_mul_(momenta, self.momentum)
        torch._foreach_add_(momenta, grads)
        updates = torch._foreach_add(grads, momenta, alpha=self.momentum)
        if self.weight_decay:
            torch._foreach_mul_(parameters, 1 - rate * self.weight_decay)
        # Blocks of one shape, whatever their matrix, are orthogonalised in one batch.
        shapes: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for name, parameter, update in zip(names, parameters, updates, strict=True):
            parts = self._parts[name]
            for into, block in zip(split(parameter, parts), split(update, parts), strict=True):
                shapes[tuple(block.shape[1:])].append((into, block))
        for (rows, columns), pairs in shapes.items():
            steps = orthogonalise(torch.cat([block for _, block in pairs]))
            size = rate * UPDATE_SCALE * math.sqrt(max(rows, columns))
            for (into, _), step in zip(
                pairs, steps.split_with_sizes([len(p) for p, _ in pairs]), strict=True
            ):
                into.sub_(step, alpha=size)

    def _step_vectors(self, rate: float) -> None:
        parameters: list[Tensor] = list(self.vectors.values())
        grads, (slow, slower) = _grads(parameters), self.betas
        first, second = list(self._first.values()), list(self._second.values())
        torch._foreach_lerp_(first, grads, 1 - slow)
        torch._foreach_mul_(second, slower)
        torch._foreach_addcmul_(second, grads, grads, 1 - slower)
        if self.weight_decay:
            torch._foreach_mul_(parameters, 1 - rate * self.weight_decay)
        scale = torch._foreach_sqrt(second)
        torch._foreach_div_(scale, math.sqrt(1 - slower**self.num_steps))
        torch._foreach_add_(scale, ADAM_EPS)
        torch._foreach_addcdiv_(parameters, first, scale, -rate / (1 - slow**self.num_steps))


def _grads(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
