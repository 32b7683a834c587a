"""Full-size released configs from the documented facts, and bent ones by a seed."""

import copy
import json
import math
import random


def mxfp4_section() -> dict:
    name = "mxfp4-pack-quantized"
    weights = {"group_size": 32, "num_bits": 4, "type": "float", "scale_dtype": "torch.uint8"}
    groups = {"group_0": {"format": name, "targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": groups}


def layer_lists(full: list[int], count: int) -> dict:
    kda = [number for number in range(1, count + 1) if number not in full]
    return {"kda_layers": kda, "full_attn_layers": full}


def released_k3() -> dict:
    text = {
        "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 7168,
        "num_hidden_layers": 93, "rms_norm_eps": 1e-5, "initializer_range": 0.02,
        "linear_attn_config": layer_lists([*range(4, 93, 4), 93], 93) | {
            "num_heads": 96, "head_dim": 128, "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0, "use_full_rank_gate": True,
        },
        "num_attention_heads": 96, "num_key_value_heads": 96, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "mla_use_nope": True, "mla_use_output_gate": True, "attn_res_block_size": 12,
        "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
        "intermediate_size": 33792, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "num_experts": 896, "num_experts_per_token": 16, "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584, "latent_moe_use_norm": True, "num_shared_experts": 2,
        "moe_router_activation_func": "sigmoid", "moe_renormalize": True, "num_expert_group": 1,
        "topk_group": 1, "topk_method": "noaux_tc", "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0, "tie_word_embeddings": False,
        "max_position_embeddings": 1048576, "quantization_config": mxfp4_section(),
    }  # fmt: skip
    vision = {
        "patch_size": 14, "vt_num_hidden_layers": 27, "vt_hidden_size": 1024,
        "vt_intermediate_size": 4096, "vt_num_attention_heads": 12, "qkv_hidden_size": 1536,
        "norm_type": "rmsnorm", "attn_bias": False, "linear_bias": False,
        "patch_embed_proj_bias": False, "activation_func": "gelu_pytorch_tanh",
        "mlp_type": "mlp2", "init_pos_emb_height": 64, "init_pos_emb_width": 64,
        "init_pos_emb_time": 4, "pos_emb_type": "divided_fixed",
        "pos_emb_interpolation_mode": "bilinear", "merge_type": "sd2_tpool",
        "merge_kernel_size": [2, 2], "mm_projector_type": "patchmergerv2",
        "projector_hidden_act": "gelu", "projector_ln_eps": 1e-5, "mm_hidden_size": 1024,
        "text_hidden_size": 7168,
    }  # fmt: skip
    return {"model_type": "kimi_k3", "architectures": ["KimiK3ForConditionalGeneration"],
            "media_placeholder_token_id": 163605, "tie_word_embeddings": False,
            "text_config": text, "vision_config": vision}  # fmt: skip


def released_kimi_linear() -> dict:
    return {
        "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"],
        "vocab_size": 163840, "hidden_size": 2304, "num_hidden_layers": 27,
        "linear_attn_config": layer_lists([4, 8, 12, 16, 20, 24, 27], 27) | {
            "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
        },
        "num_attention_heads": 32, "num_key_value_heads": 32, "q_lora_rank": None,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "mla_use_nope": True, "rope_scaling": None, "intermediate_size": 9216,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_experts": 256,
        "num_experts_per_token": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024,
        "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_expert_group": 1,
        "topk_group": 1, "use_grouped_topk": True, "routed_scaling_factor": 2.446,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "initializer_range": 0.02,
        "tie_word_embeddings": False, "num_nextn_predict_layers": 0,
    }  # fmt: skip


TEXT_KEYS = tuple(released_k3()["text_config"])
VISION_KEYS = tuple(released_k3()["vision_config"])
KDA_KEYS = ("kda_layers", "full_attn_layers", "num_heads", "head_dim", "short_conv_kernel_size",
            "gate_lower_bound", "use_full_rank_gate", "gate_rank", "decay_rank")  # fmt: skip
OURS = ("attn_res", "router_input", "quantised", "shared_expert_size", "lora_norm_eps")
TWINS = {
    "hidden_size": {"hidden_size", "text_hidden_size"},
    "num_attention_heads": {"num_attention_heads", "num_key_value_heads"},
    "vt_hidden_size": {"vt_hidden_size", "mm_hidden_size"},
    "merge_kernel_size": {"merge_kernel_size"},
}
NEST: list = [[[[[[]]]]]]
ODD = (-1, 0, 1, 2, 3, 5, 32, 33, 1 << 16, 1 << 19, 1 << 20, 1 << 31, 1 << 63, 10**4000, 0.5, 1.0,
       -0.5, -5.1, 1e-300, 1e-30, 1e30, 1e300, math.nan, math.inf, -math.inf, True, False, None,
       "", "4", "silu", "full", "latent", "a\nb", "\ud800", [], [1], [2, 2], [3, 3.0], {}, {"a": 1},
       NEST)  # fmt: skip


def sections(config: dict) -> list[tuple[dict, tuple[str, ...]]]:
    """Objects of a config and the keys in each that are worth bending; sections may be gone."""
    text, vision = config.get("text_config"), config.get("vision_config")
    found = [(config, ("model_type", "text_config", "vision_config", "media_placeholder_token_id",
                       "tie_word_embeddings", "quantization_config"))]  # fmt: skip
    if isinstance(text, dict):
        found += [(text, TEXT_KEYS + OURS)] * 6
        if isinstance(lists := text.get("linear_attn_config"), dict):
            found += [(lists, KDA_KEYS)] * 3
        if isinstance(packed := text.get("quantization_config"), dict):
            found.append((packed, ("format", "config_groups")))
    if isinstance(vision, dict):
        found += [(vision, VISION_KEYS)] * 3
    return found


def bend_twins(config: dict, key: str, rng: random.Random) -> None:
    """The same odd size wherever a config repeats it."""
    value = rng.choice([1, 2, 3, 6, 8, 16, 30, 33, 65, 96, 1 << 19, 1 << 20, 1 << 40])
    for section, _ in sections(config):
        for name in section.keys() & TWINS[key]:
            section[name] = [value, value] if key == "merge_kernel_size" else value


def bend_value(config: dict, section: dict, key: str, rng: random.Random) -> None:
    old = section.get(key)
    kind = rng.randrange(10)
    if key in TWINS and kind < 6:
        bend_twins(config, key, rng)
    elif kind == 0:
        section.pop(key, None)
    elif kind == 1:
        section[f"{key}x{rng.randrange(9)}"] = section.pop(key, 1)
    elif kind < 6 and isinstance(old, int | float) and abs(old) < 1 << 20:
        near = (old + 1, old - 1, old * 2, old * 3, old / 2, old // 2, -old, float(old), str(old))
        section[key] = rng.choice(near)
    elif kind < 6 and isinstance(old, list):
        section[key] = bent_list(old, rng)
    else:
        section[key] = copy.deepcopy(rng.choice(ODD))


def bent_list(old: list, rng: random.Random) -> list:
    at = rng.randrange(len(old) + 1)
    odd = rng.choice([0, -1, 4, 10, 1 << 70, 1.0, 2.5, True, "3", None, [4], math.nan])
    cut, inserted = old[:at] + old[at + 1 :], [*old[:at], odd, *old[at:]]
    choices = [cut, inserted, [*old[:at], odd, *old[at + 1 :]], old[::-1], old + old[:1], old * 2]
    return rng.choice(choices)


def bend_layers(config: dict, rng: random.Random) -> None:
    """Exchange the lists, or move a layer from one to the other."""
    text = config.get("text_config")
    lists = text.get("linear_attn_config") if isinstance(text, dict) else None
    kda, mla = (lists.get(key) if isinstance(lists, dict) else 0 for key in KDA_KEYS[:2])
    if isinstance(kda, list) and isinstance(mla, list):
        if kda and rng.random() < 0.5:
            mla.append(kda.pop(rng.randrange(len(kda))))
        else:
            lists["kda_layers"], lists["full_attn_layers"] = mla, kda


def bend_text(text: str, rng: random.Random) -> str:
    at = rng.randrange(len(text))
    quote = text.index('"', min(at, len(text) - 200))
    twice = text.replace('"hidden_size": 64', '"hidden_size": 64, "hidden_size": 32')
    choices = [text[:at], text[at:], text[:at] + text[at + 1 :], text[:at] + "\x00" + text[at:],
               "", "null", "3", "[]", '"x"', "[" * 100_000, '{"a":' * 900 + "1" + "}" * 900,
               text + "}", text[:quote] + text[quote + 1 :], twice, f"[{text}]", "\ufeff" + text,
               text.replace("64", "6" * 5000)]  # fmt: skip
    return rng.choice(choices)


def mutation(plain: dict, rng: random.Random) -> str:
    config = copy.deepcopy(plain)
    for _ in range(rng.choice((1, 1, 1, 2))):
        if rng.random() < 0.05:
            bend_layers(config, rng)
        else:
            section, keys = rng.choice(sections(config))
            bend_value(config, section, rng.choice(keys), rng)
    text = json.dumps(config)
    return bend_text(text, rng) if rng.random() < 0.08 else text
