"""Small K3 models and packed batches, and the loops that the model is judged by."""

from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from k3rl.model.config import KdaConfig, MlaConfig, ModelConfig, MoeConfig
from k3rl.model.model import K3Model
from k3rl.model.state import StatePool

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


def small_config(**changes) -> ModelConfig:
    """Every kind of layer, a short last block, widths that all differ."""
    fields = {
        "vocab_size": 61,
        "hidden_size": 24,
        "layer_kinds": ("kda", "mla", "kda", "kda", "mla"),
        "attn_res_block_size": 2,
        "kda": KdaConfig(num_heads=2, head_dim=8, decay_rank=5),
        "mla": MlaConfig(2, q_lora_rank=14, kv_lora_rank=12, qk_nope_head_dim=7,
                         qk_rope_head_dim=4, v_head_dim=9),
        "moe": MoeConfig(dense_size=40, num_experts=6, top_k=2, latent_size=10, expert_size=12,
                         shared_size=16),
        "init_std": None,
    }  # fmt: skip
    return ModelConfig(**(fields | changes))


def lively_model(seed: int = 0, config: ModelConfig | None = None) -> K3Model:
    """Float64, with pseudo-queries, router biases and decays away from their initial values."""
    return lively(K3Model(config or small_config(), seed).double(), seed)


def lively(model: K3Model, seed: int = 0) -> K3Model:
    """Move what starts at a constant, in place."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("res_proj.weight") or parameter.dim() == 1:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.4 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.add_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Float64, from a normal law."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis, as its formula stands."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def filled(module: nn.Module, seed: int = 0) -> nn.Module:
    """`module` in float64 with every parameter drawn."""
    module = module.double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.4, generator=generator)
    return module


def batch(lengths: list[int], seed: int = 0, vocab_size: int = 61) -> tuple[Tensor, Tensor]:
    """Random ids [T] and cu_seqlens [N + 1]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab_size, (sum(lengths),), generator=generator)
    return ids, torch.tensor([0, *lengths]).cumsum(0)


def parts(cu_seqlens: Tensor) -> list[slice]:
    return [slice(a, b) for a, b in pairwise(cu_seqlens.tolist())]


@torch.no_grad()
def stepped(model: K3Model, ids: Tensor, cu_seqlens: Tensor, pool: StatePool, slots) -> Tensor:
    """Hidden [T, d] by one-token steps, sequences that end leaving the batch."""
    out = torch.empty(len(ids), model.config.hidden_size, dtype=model.lm_head.weight.dtype)
    spans = parts(cu_seqlens)
    for offset in range(max(span.stop - span.start for span in spans)):
        alive = [n for n, span in enumerate(spans) if span.start + offset < span.stop]
        where = torch.tensor([spans[n].start + offset for n in alive])
        out[where] = model.step(ids[where], pool, torch.tensor([slots[n] for n in alive]))
    return out
