"""`config.json` as released with Kimi K3 and Kimi Linear, read into a ModelConfig.

K3 nests `text_config` and `vision_config`; Kimi Linear is flat. Layer lists are 1-based. A key that
this model can follow only in one setting is refused in any other, by name; keys that say nothing
about the computation are passed over. What released keys cannot say lies under keys of our
own (`decay_rank`, `gate_rank`, `shared_expert_size`, `attn_res`, `router_input`, `quantised`,
`lora_norm_eps`), only where it differs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from k3rl.errors import ConfigError
from k3rl.model.config import ModelConfig, load_config
from k3rl.types import JSON

MXFP4_FORMAT = "mxfp4-pack-quantized"
LORA_EPS = 1e-6
_SHOWN_AT_MOST, _NAMED_AT_MOST = 60, 120
# key -> (the one setting that is followed, what an absent key means)
TEXT_FIXED: dict[str, tuple[JSON, JSON]] = {
    "mla_use_nope": (True, None),
    "moe_layer_freq": (1, 1),
    "moe_renormalize": (True, True),
    "moe_router_activation_func": ("sigmoid", "sigmoid"),
    "num_expert_group": (1, 1),
    "topk_group": (1, 1),
    "num_nextn_predict_layers": (0, 0),
    "tie_word_embeddings": (False, False),
    "latent_moe_use_norm": (True, True),
    "topk_method": ("noaux_tc", "noaux_tc"),
    "attention_bias": (False, False),
}
# Of the weights of a quantised group.
MXFP4_WEIGHTS: dict[str, JSON] = {
    "group_size": 32,
    "num_bits": 4,
    "strategy": "group",
    "symmetric": True,
    "type": "float",
}
VISION_FIXED: dict[str, JSON] = {
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "linear_bias": False,
    "merge_type": "sd2_tpool",
    "mlp_type": "mlp2",
    "mm_projector_type": "patchmergerv2",
    "norm_type": "rmsnorm",
    "patch_embed_proj_bias": False,
    "pos_emb_interpolation_mode": "bilinear",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
}
VISION_SIZES = {
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "mlp_size",
    "vt_num_attention_heads": "num_heads",
    "vt_num_hidden_layers": "num_layers",
    "qkv_hidden_size": "qkv_size",
    "init_pos_emb_height": "pos_height",
    "init_pos_emb_width": "pos_width",
    "init_pos_emb_time": "pos_time",
    "patch_size": "patch_size",
    "projector_ln_eps": "projector_eps",
}


class _Keys:
    """A JSON object whose keys are asked for one by one; errors name the file and the path."""

    def __init__(self, value: JSON, source: str, path: str = "") -> None:
        if not isinstance(value, dict):
            raise ConfigError(f"{source}: {_name(path) or 'the file'} is not a JSON object")
        self.value, self.source, self.path = value, source, path

    def bad(self, key: str, detail: str) -> ConfigError:
        where = f"{self.path}.{key}" if self.path else key
        return ConfigError(f"{self.source}: {_name(where)} {detail}")

    def get(self, key: str) -> JSON:
        if key not in self.value:
            raise self.bad(key, "is missing")
        return self.value[key]

    def child(self, key: str) -> _Keys:
        return _Keys(self.get(key), self.source, f"{self.path}.{key}" if self.path else key)

    def fixed(self, key: str, wanted: JSON, absent: JSON = None) -> None:
        found = self.value.get(key, absent)
        if type(found) is not type(wanted) or found != wanted:
            raise self.bad(key, f"is {_shown(found)}, only {_shown(wanted)} is supported")

    def integer(self, key: str) -> int:
        found = self.get(key)
        if type(found) is not int:
            raise self.bad(key, f"is {_shown(found)}, not a whole number")
        return found

    def layers(self, key: str) -> list[int]:
        found = self.get(key)
        if not isinstance(found, list) or any(type(item) is not int for item in found):
            raise self.bad(key, "is not a list of whole numbers")
        return [int(str(item)) for item in found]


def _name(path: str) -> str:
    """The path of a key in one short line: names of `config_groups` are free text."""
    return json.dumps(path)[1:-1][:_NAMED_AT_MOST]


def _shown(value: JSON) -> str:
    """A value in an error, short whatever it is."""
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):
        return "not a JSON value"
    return text if len(text) <= _SHOWN_AT_MOST else f"{text[:_SHOWN_AT_MOST]}..."


def from_released(value: JSON, source: str = "config.json") -> ModelConfig:
    """The model that a released `config.json` describes.

    Raises:
        ConfigError: a key is missing, of the wrong type, contradicts another, or asks for what
            this model does not do; names `source` and the key.

    """
    top = _Keys(value, source)
    family = top.get("model_type")
    if family == "kimi_k3":
        top.fixed("tie_word_embeddings", False, absent=False)
        text = top.child("text_config")
        text.fixed("model_type", "kimi_linear")
    elif family == "kimi_linear":
        text = top
    else:
        raise top.bad("model_type", f"is {_shown(family)}, not kimi_k3 or kimi_linear")
    plain = _text(text)
    formats = [_expert_format(keys) for keys in {id(k): k for k in (top, text)}.values()]
    plain["moe"]["expert_format"] = "mxfp4" if "mxfp4" in formats else "plain"
    if family == "kimi_k3":
        plain["vision"] = _vision(top, plain["hidden_size"])
    return ModelConfig.from_json(plain, source)


def _text(text: _Keys) -> dict[str, Any]:
    for key, (wanted, absent) in TEXT_FIXED.items():
        text.fixed(key, wanted, absent)
    text.fixed("num_key_value_heads", text.get("num_attention_heads"), absent=None)
    activation = text.get("hidden_act")
    block_size = text.value.get("attn_res_block_size")
    plain: dict[str, Any] = {
        "vocab_size": text.get("vocab_size"),
        "hidden_size": text.get("hidden_size"),
        "layer_kinds": _layer_kinds(text),
        "attn_res_block_size": 1 if block_size is None else block_size,
        "attn_res": text.value.get("attn_res", "off" if block_size is None else "block"),
        "activation": activation,
        "norm_eps": text.get("rms_norm_eps"),
        "lora_norm_eps": text.value.get("lora_norm_eps", LORA_EPS),
        "init_std": text.value.get("initializer_range", 0.02),
        "kda": _kda(text.child("linear_attn_config")),
        "mla": _mla(text),
        "moe": _moe(text),
    }
    if activation == "situ":
        plain["gate_beta"] = text.get("activation_situ_beta")
        plain["up_beta"] = text.get("activation_situ_linear_beta")
    return plain


def _layer_kinds(text: _Keys) -> list[str]:
    lists, count = text.child("linear_attn_config"), text.integer("num_hidden_layers")
    kda, mla = lists.layers("kda_layers"), lists.layers("full_attn_layers")
    if len(kda) + len(mla) != count or set(kda) | set(mla) != set(range(1, len(kda + mla) + 1)):
        raise lists.bad(
            "kda_layers",
            f"and full_attn_layers do not name each of layers 1 to {_shown(count)} once",
        )
    return ["kda" if layer in set(kda) else "mla" for layer in range(1, count + 1)]


def _kda(keys: _Keys) -> dict[str, Any]:
    bound = keys.value.get("gate_lower_bound")
    width = keys.get("head_dim")
    plain = {
        "num_heads": keys.get("num_heads"),
        "head_dim": width,
        "decay_rank": keys.value.get("decay_rank", width),
        "conv_kernel": keys.get("short_conv_kernel_size"),
        "decay": "softplus" if bound is None else "bounded",
    }
    if bound is not None:
        plain["gate_lower_bound"] = bound
    is_full_rank = keys.value.get("use_full_rank_gate", False)
    if not isinstance(is_full_rank, bool):
        raise keys.bad("use_full_rank_gate", "is neither true nor false")
    plain["gate_rank"] = None if is_full_rank else keys.value.get("gate_rank", width)
    return plain


def _mla(text: _Keys) -> dict[str, Any]:
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")
    return {
        "num_heads": text.get("num_attention_heads"),
        "output_gate": text.value.get("mla_use_output_gate", False),
        **{name: text.get(name) for name in names},
    }


def _moe(text: _Keys) -> dict[str, Any]:
    expert, shared = text.integer("moe_intermediate_size"), text.integer("num_shared_experts")
    return {
        "dense_size": text.get("intermediate_size"),
        "num_experts": text.get("num_experts"),
        "top_k": text.get("num_experts_per_token"),
        "latent_size": text.value.get("routed_expert_hidden_size"),
        "expert_size": expert,
        "shared_size": text.value.get("shared_expert_size", shared * expert),
        "num_dense_layers": text.get("first_k_dense_replace"),
        "routed_scaling_factor": text.value.get("routed_scaling_factor", 1.0),
        "router_input": text.value.get("router_input", "hidden"),
        "quantised": text.value.get("quantised", False),
    }


def _expert_format(keys: _Keys) -> str:
    if keys.value.get("quantization_config") is None:
        return "plain"
    quantised = keys.child("quantization_config")
    quantised.fixed("format", MXFP4_FORMAT)
    groups = quantised.child("config_groups")
    if not groups.value:
        raise quantised.bad("config_groups", "names no group")
    for name in groups.value:
        group = groups.child(name)
        group.fixed("format", MXFP4_FORMAT, absent=MXFP4_FORMAT)
        weights = group.child("weights")
        for key, wanted in MXFP4_WEIGHTS.items():
            weights.fixed(key, wanted, absent=None if key == "group_size" else wanted)
    return "mxfp4"


def _vision(top: _Keys, text_width: JSON) -> dict[str, Any]:
    keys = top.child("vision_config")
    for key, wanted in VISION_FIXED.items():
        keys.fixed(key, wanted)
    keys.fixed("mm_hidden_size", keys.get("vt_hidden_size"))
    keys.fixed("text_hidden_size", text_width)
    merge = keys.layers("merge_kernel_size")
    if len(merge) != 2 or merge[0] != merge[1]:
        raise keys.bad("merge_kernel_size", "is not a pair of equal whole numbers")
    plain: dict[str, Any] = {ours: keys.get(theirs) for theirs, ours in VISION_SIZES.items()}
    return plain | {"merge_size": merge[0], "media_token_id": top.get("media_placeholder_token_id")}


def read_config(path: Path | str) -> ModelConfig:
    """A model from a YAML of ours, a released `config.json`, or the folder that holds one.

    Raises:
        ConfigError: the file cannot be read, or a key or value in it is wrong; names both.

    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix != ".json":
        return load_config(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    return from_released(value, str(path))


def _once(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    """An object whose keys are there once: which of two counts is anyone's guess."""
    found: dict[str, JSON] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {_shown(key)} is there twice")
        found[key] = value
    return found
