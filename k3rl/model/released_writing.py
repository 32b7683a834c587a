"""A ModelConfig as a released `config.json`: the inverse of `released_config`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from k3rl.model.config import ModelConfig
from k3rl.model.released_config import (
    LORA_EPS,
    MXFP4_FORMAT,
    MXFP4_WEIGHTS,
    TEXT_FIXED,
    VISION_FIXED,
    VISION_SIZES,
)
from k3rl.types import JSON, JsonObject


def to_released(config: ModelConfig) -> JsonObject:
    """The inverse of `from_released`.

    Left out: `kda.num_induction_heads`, which only concerns initial weights, and what the config's
    own variant does not read (a block size without blocks, a bound of unbounded decay).
    """
    text = _write_text(config)
    if config.vision is None:
        return text
    vision = config.vision
    sizes = {theirs: getattr(vision, ours) for theirs, ours in VISION_SIZES.items()}
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "tie_word_embeddings": False,
        "media_placeholder_token_id": vision.media_token_id,
        "text_config": text,
        "vision_config": {
            **VISION_FIXED,
            **sizes,
            "merge_kernel_size": [vision.merge_size, vision.merge_size],
            "mm_hidden_size": vision.hidden_size,
            "text_hidden_size": config.hidden_size,
        },
    }


def _write_text(config: ModelConfig) -> dict[str, Any]:
    mla = config.mla
    implied = "off" if config.attn_res == "off" else "block"
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "linear_attn_config": _write_kda(config),
        "attn_res_block_size": None if implied == "off" else config.attn_res_block_size,
        "hidden_act": config.activation,
        "activation_situ_beta": config.gate_beta,
        "activation_situ_linear_beta": config.up_beta,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "num_attention_heads": mla.num_heads,
        "num_key_value_heads": mla.num_heads,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "mla_use_output_gate": mla.output_gate,
        **{key: wanted for key, (wanted, _) in TEXT_FIXED.items()},
        **_differing(
            attn_res=(config.attn_res, implied),
            lora_norm_eps=(config.lora_norm_eps, LORA_EPS),
        ),
        **_write_moe(config),
    }


def _write_kda(config: ModelConfig) -> dict[str, Any]:
    kda, numbered = config.kda, list(enumerate(config.layer_kinds, 1))
    return {
        "kda_layers": [number for number, kind in numbered if kind == "kda"],
        "full_attn_layers": [number for number, kind in numbered if kind == "mla"],
        "num_heads": kda.num_heads,
        "head_dim": kda.head_dim,
        "short_conv_kernel_size": kda.conv_kernel,
        "gate_lower_bound": kda.gate_lower_bound if kda.decay == "bounded" else None,
        "use_full_rank_gate": kda.gate_rank is None,
        **_differing(
            decay_rank=(kda.decay_rank, kda.head_dim),
            gate_rank=(kda.gate_rank or kda.head_dim, kda.head_dim),
        ),
    }


def _write_moe(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    num_shared = max(1, moe.shared_size // moe.expert_size)
    plain = {
        "intermediate_size": moe.dense_size,
        "num_experts": moe.num_experts,
        "num_experts_per_token": moe.top_k,
        "routed_expert_hidden_size": moe.latent_size,
        "moe_intermediate_size": moe.expert_size,
        "num_shared_experts": num_shared,
        "first_k_dense_replace": moe.num_dense_layers,
        "routed_scaling_factor": moe.routed_scaling_factor,
        **_differing(
            router_input=(moe.router_input, "hidden"),
            quantised=(moe.quantised, False),
            shared_expert_size=(moe.shared_size, num_shared * moe.expert_size),
        ),
    }
    if moe.expert_format == "plain":
        return plain
    weights = {**MXFP4_WEIGHTS, "scale_dtype": "torch.uint8"}
    group = {"format": MXFP4_FORMAT, "targets": ["Linear"], "weights": weights}
    quantisation = {
        "quant_method": "compressed-tensors",
        "format": MXFP4_FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["re:^(?!.*\\.experts\\.).*"],
    }
    return {**plain, "quantization_config": quantisation}


def _differing(**pairs: tuple[JSON, JSON]) -> dict[str, Any]:
    return {key: value for key, (value, implied) in pairs.items() if value != implied}


def released_json(config: ModelConfig) -> str:
    """`to_released` as the text of a file."""
    value: Mapping[str, Any] = to_released(config)
    return json.dumps(value, indent=2) + "\n"
