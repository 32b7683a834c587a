"""What a model costs before it exists: parameters, bytes and operations, from shapes alone.

Parameters are counted as stored in the released layout: `A_log` of K3 with all its `head_dim`
entries, a packed expert by its weights and not by its scales.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from k3rl.model.config import ModelConfig
from k3rl.model.layout import TILE
from k3rl.model.released import layout

TEXT_PARTS = (
    "KDA", "MLA", "dense feed-forward", "routed experts", "shared experts", "latent projections",
    "routers", "norms and mixers", "embeddings", "head",
)  # fmt: skip
VISION_PARTS = ("vision tower", "vision projector")


@dataclass(frozen=True)
class Description:
    """Sizes of a model. Bytes are those of one sequence; FLOPs count 2 per multiply-add."""

    config: ModelConfig
    parameters: dict[str, int]
    """By part: `TEXT_PARTS`, then `VISION_PARTS` if there is a tower."""
    num_tensors: int
    """In a checkpoint of the released layout."""
    checkpoint_bytes: int

    @property
    def text_parameters(self) -> int:
        """Without vision."""
        return sum(self.parameters.get(part, 0) for part in TEXT_PARTS)

    @property
    def total_parameters(self) -> int:
        """With vision."""
        return sum(self.parameters.values())

    @property
    def active_parameters(self) -> int:
        """Text parameters that a token is multiplied with: k of E experts, no embedding table."""
        moe, routed = self.config.moe, self.parameters.get("routed experts", 0)
        idle = routed - routed * moe.top_k // moe.num_experts
        return self.text_parameters - idle - self.parameters["embeddings"]

    @property
    def cache_bytes_per_token(self) -> int:
        """MLA latents in bfloat16."""
        return self.config.num_mla_layers * self.config.mla.latent_dim * 2

    @property
    def state_bytes(self) -> int:
        """KDA memories in float32, whatever the length."""
        kda = self.config.kda
        return self.config.num_kda_layers * kda.num_heads * kda.head_dim**2 * 4

    @property
    def history_bytes(self) -> int:
        """Inputs that the short convolutions look back at, in bfloat16."""
        kda = self.config.kda
        return self.config.num_kda_layers * (kda.conv_kernel - 1) * 3 * kda.size * 2

    @property
    def weight_flops(self) -> int:
        """Of one token, forward, by products with weights."""
        return 2 * self.active_parameters

    @property
    def recurrence_flops(self) -> int:
        """Of one token, forward: the delta rule in tiles, whatever the context."""
        kda = self.config.kda
        per_head = 6 * kda.head_dim**2 + 10 * TILE * kda.head_dim
        return self.config.num_kda_layers * kda.num_heads * per_head

    @property
    def attention_flops(self) -> tuple[int, int]:
        """Of one token per token of context, forward: expanded keys and values, absorbed."""
        mla = self.config.mla
        heads = 2 * self.config.num_mla_layers * mla.num_heads
        expanded = heads * (mla.qk_head_dim + mla.v_head_dim)
        return expanded, heads * (mla.latent_dim + mla.kv_lora_rank)


def describe(config: ModelConfig) -> Description:
    """Count a model of any size; nothing is allocated."""
    parameters: Counter[str] = Counter(dict.fromkeys(TEXT_PARTS, 0))
    num_tensors = size = 0
    for stored in layout(config):
        parameters[_part(stored.ours, config)] += stored.num_parameters
        num_tensors += 1
        size += stored.num_bytes
    return Description(config, dict(parameters), num_tensors, size)


def _part(name: str, config: ModelConfig) -> str:
    if name.startswith(("vision_tower", "mm_projector")):
        return VISION_PARTS[0] if name.startswith("vision_tower") else VISION_PARTS[1]
    if ".self_attn." in name:
        kind = config.layer_kinds[int(name.split(".")[2])]
        return "KDA" if kind == "kda" else "MLA"
    marks = {
        "embed_tokens": "embeddings",
        "lm_head": "head",
        ".mlp.": "dense feed-forward",
        ".experts.": "routed experts",
        ".shared_experts.": "shared experts",
        ".routed_expert_": "latent projections",
        ".gate.": "routers",
    }
    return next((part for mark, part in marks.items() if mark in name), "norms and mixers")
