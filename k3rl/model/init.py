"""Initial weights, from the config and a seed alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from k3rl.model.config import ModelConfig
from k3rl.model.kda import KimiDeltaAttention
from k3rl.model.moe import Router

if TYPE_CHECKING:
    from k3rl.model.model import K3Model


@torch.no_grad()
def initialise(model: K3Model, config: ModelConfig, seed: int) -> None:
    """Fill every parameter in place.

    Matrices are normal with `config.init_std`, or 1/sqrt(columns) where that is None. Norms are 1,
    pseudo-queries and router biases 0 (uniform mixing, 2603.15031), decays as in `kda.reset`.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        elif name.endswith("res_proj.weight"):
            parameter.zero_()
        else:
            std = config.init_std
            if std is None:
                std = _own_std(name, parameter)
            parameter.normal_(0.0, std, generator=generator)
    for module in model.modules():
        if isinstance(module, KimiDeltaAttention):
            module.reset(generator)
        elif isinstance(module, Router):
            module.e_score_correction_bias.zero_()


def _own_std(name: str, parameter: nn.Parameter) -> float:
    """1/sqrt(columns): embeddings of unit length. Half that for the head: near-uniform laws."""
    if name == "lm_head.weight":
        return 0.5 / math.sqrt(parameter.shape[-1])
    columns = parameter[0].numel() if "patch_embed.proj" in name else parameter.shape[-1]
    return 1.0 / math.sqrt(columns)
