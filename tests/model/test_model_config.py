"""Released configs: read as meant, written back the same, refused by name when bent."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.errors import ConfigError
from k3rl.model.config import (
    KdaConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    VisionConfig,
    load_config,
)
from k3rl.model.model import K3Model
from k3rl.model.released import meta_model
from k3rl.model.released_config import from_released, read_config
from k3rl.model.released_writing import released_json, to_released
from k3rl.model.vision import Patches
from tests.model.config_mutations import mutation, released_k3, released_kimi_linear

GOLDEN = Path("tests/data/golden")
MODELS = Path("configs/model")
SMALL = 3_000_000
"""Parameters of the largest model that a mutation is run through."""


def golden_config(name: str) -> dict:
    return json.loads((GOLDEN / name / "config.json").read_text())


def test_golden_configs_read_as_expected():
    vision = VisionConfig(310, hidden_size=32, mlp_size=64, num_layers=2, num_heads=3, qkv_size=48,
                          pos_height=6, pos_width=8)  # fmt: skip
    plain = ModelConfig(
        vocab_size=320,
        hidden_size=64,
        layer_kinds=("kda", "kda", "kda", "mla", "kda", "kda", "kda", "mla", "mla"),
        kda=KdaConfig(num_heads=4, head_dim=32, decay_rank=32),
        mla=MlaConfig(4, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8,
                      v_head_dim=16),
        moe=MoeConfig(dense_size=96, num_experts=16, top_k=4, latent_size=32, expert_size=24,
                      shared_size=48),
        attn_res_block_size=4,
        vision=vision,
    )  # fmt: skip
    assert read_config(GOLDEN / "tiny_k3") == plain
    assert read_config(GOLDEN / "tiny_k3" / "config.json") == plain
    packed = MoeConfig(dense_size=96, num_experts=8, top_k=3, latent_size=64, expert_size=32,
                       shared_size=64, expert_format="mxfp4")  # fmt: skip
    kinds = ("kda", "kda", "kda", "mla", "mla")
    assert read_config(GOLDEN / "tiny_k3_mxfp4") == replace(plain, layer_kinds=kinds, moe=packed)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("k3.yaml", (93, 69, 24, 92, 897)),
        ("kimi_linear_48b.yaml", (27, 20, 7, 26, 257)),
        ("k3_nano.yaml", (5, 3, 2, 4, 9)),
    ],
)
def test_shipped_yamls_read_and_survive_the_released_form(name, counts):
    config = read_config(MODELS / name)
    assert config == load_config(MODELS / name)
    shape = (config.num_layers, config.num_kda_layers, config.num_mla_layers)
    assert (*shape, config.num_router_layers, config.moe.num_experts + 1) == counts
    again = from_released(json.loads(released_json(config)))
    assert again == replace(config, kda=replace(config.kda, num_induction_heads=0))


@pytest.mark.parametrize(
    ("released", "name"),
    [(released_k3, "k3.yaml"), (released_kimi_linear, "kimi_linear_48b.yaml")],
    ids=["k3", "kimi_linear_48b"],
)
def test_full_size_released_configs_are_the_shipped_yamls(released, name, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(released()))
    assert read_config(path) == load_config(MODELS / name)
    assert read_config(tmp_path) == load_config(MODELS / name)


sizes = st.integers(1, 200)
positive = st.floats(1e-6, 1.0)
BLOCKS = st.sampled_from([32, 64, 96])


@st.composite
def moes(draw) -> MoeConfig:
    num_experts = draw(st.integers(2, 70))
    expert_format = draw(st.sampled_from(["plain", "mxfp4"]))
    is_quantised = draw(st.booleans())
    widths = BLOCKS if is_quantised or expert_format == "mxfp4" else sizes
    latent = draw(widths if widths is BLOCKS else st.none() | widths)
    inputs = ["hidden"] if latent is None else ["hidden", "latent"]
    return MoeConfig(
        dense_size=draw(sizes), num_experts=num_experts,
        top_k=draw(st.integers(1, num_experts - 1)),
        latent_size=latent, expert_size=draw(widths), shared_size=draw(sizes),
        num_dense_layers=draw(st.integers(0, 1)), router_input=draw(st.sampled_from(inputs)),
        routed_scaling_factor=draw(positive), expert_format=expert_format, quantised=is_quantised,
    )  # fmt: skip


@st.composite
def kdas(draw) -> KdaConfig:
    decay = draw(st.sampled_from(["bounded", "softplus"]))
    bound = draw(st.floats(-5.0, -1e-3)) if decay == "bounded" else -5.0
    return KdaConfig(
        num_heads=draw(sizes), head_dim=draw(sizes), decay_rank=draw(sizes),
        conv_kernel=draw(st.integers(2, 9)), decay=decay, gate_lower_bound=bound,
        gate_rank=draw(st.none() | sizes),
    )  # fmt: skip


@st.composite
def visions(draw, vocab_size: int) -> VisionConfig:
    heads, side = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    return VisionConfig(
        media_token_id=draw(st.integers(0, vocab_size - 1)), hidden_size=2 * draw(sizes),
        mlp_size=draw(sizes), num_layers=draw(st.integers(1, 30)), num_heads=heads,
        qkv_size=4 * heads * draw(sizes), patch_size=draw(sizes), merge_size=side,
        pos_height=draw(sizes), pos_width=draw(sizes), pos_time=draw(sizes),
        projector_eps=draw(positive),
    )  # fmt: skip


@st.composite
def configs(draw) -> ModelConfig:
    """Every field but those that its own variant does not read, and `num_induction_heads`."""
    vocab_size = draw(sizes)
    attn_res = draw(st.sampled_from(["block", "full", "off"]))
    activation = draw(st.sampled_from(["situ", "silu"]))
    betas = (draw(st.floats(0.1, 99.0)), draw(st.floats(0.1, 99.0)))
    betas = betas if activation == "situ" else (4.0, 25.0)
    return ModelConfig(
        vocab_size=vocab_size, hidden_size=draw(sizes),
        layer_kinds=tuple(draw(st.lists(st.sampled_from(["kda", "mla"]), min_size=1, max_size=9))),
        kda=draw(kdas()),
        mla=MlaConfig(*(draw(field) for field in (sizes, st.none() | sizes, sizes, sizes,
                                                  st.integers(0, 9), sizes, st.booleans()))),
        moe=draw(moes()), attn_res_block_size=1 if attn_res == "off" else draw(sizes),
        vision=draw(st.none() | visions(vocab_size)), attn_res=attn_res, activation=activation,
        gate_beta=betas[0], up_beta=betas[1], norm_eps=draw(positive),
        lora_norm_eps=draw(positive), init_std=draw(st.none() | positive),
    )  # fmt: skip


@given(configs())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_writing_then_reading_is_the_identity(config):
    assert from_released(json.loads(released_json(config))) == config
    assert to_released(config) == json.loads(released_json(config))
    assert ModelConfig.from_json(config.to_json()) == config


def is_finite(config: ModelConfig) -> bool:
    """Whether a seeded model gives finite logits of a few tokens and, with a tower, of a clip."""
    model, generator = K3Model(config, 0), torch.Generator().manual_seed(1)
    ids = torch.arange(19) % config.vocab_size
    media, vision = None, config.vision
    if vision is not None:
        ids = torch.cat([ids[ids != vision.media_token_id], torch.tensor([vision.media_token_id])])
        frames, side, patch = min(2, vision.pos_time), vision.merge_size, vision.patch_size
        shape = (frames * side * side, 3, patch, patch)
        grid = torch.tensor([[frames, side, side]])
        media = Patches(torch.randn(shape, generator=generator), grid)
    with torch.no_grad():
        hidden, _ = model(ids, torch.tensor([0, len(ids)]), media=media)
        return bool(torch.isfinite(model.head(hidden)).all())


def is_refused(path: Path) -> bool:
    """Whether a config is refused in one line that names the file; else its model must work."""
    try:
        config = read_config(path)
    except ConfigError as error:
        line = str(error)
        assert line.startswith(f"{path}: ")
        assert line.isprintable()
        assert len(line) < len(str(path)) + 300
        return True
    count = sum(tensor.numel() for tensor in meta_model(config).state_dict().values())
    assert count > SMALL or is_finite(config)
    return False


@pytest.mark.parametrize("name", ["tiny_k3", "tiny_k3_mxfp4"])
def test_a_bent_config_is_refused_by_name_or_its_model_is_finite(name, tmp_path):
    rng, plain, path = random.Random(name), golden_config(name), tmp_path / "config.json"
    refused = 0
    for number in range(500):
        text = mutation(plain, rng)
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        try:
            refused += is_refused(path)
        except Exception as error:
            raise AssertionError(f"mutation {number}: {text[:20_000]}") from error
    assert 250 < refused < 425


def quantised(**changes) -> dict:
    weights = {"group_size": 32, "num_bits": 4, "type": "float", "symmetric": True} | changes
    return {"format": "mxfp4-pack-quantized", "config_groups": {"group_0": {"weights": weights}}}


HUGE = 10**4000
DANGERS = {
    "eps that float32 takes for 0": ({"text.rms_norm_eps": 1e-300}, "norm_eps must lie in"),
    "eps 0": ({"vision.projector_ln_eps": 0}, "projector_eps must lie in"),
    "eps without bound": ({"text.rms_norm_eps": 1e300}, "norm_eps must lie in"),
    "beta whose inverse is inf": ({"text.activation_situ_beta": 1e-300}, "gate_beta must lie in"),
    "betas whose product is inf": ({"text.activation_situ_linear_beta": 1e300}, "up_beta must lie"),
    "scaling inf in float32": ({"text.routed_scaling_factor": 1e300}, "routed_scaling_factor must"),
    "weights inf in float32": ({"text.initializer_range": 1e300}, "init_std must lie in"),
    "no sine for an odd width": ({"vision.vt_hidden_size": 33, "vision.mm_hidden_size": 33},
                                 "hidden_size must be even"),
    "projector overflows": ({"vision.merge_kernel_size": [1024, 1024]}, "merge_size^2 must not"),
    "tower without end": ({"vision.vt_num_hidden_layers": 5000}, "num_layers must not exceed 1024"),
    "tensor overflows": ({"text.num_attention_heads": 1 << 20, "text.num_key_value_heads": 1 << 20},
                         "num_heads must lie in"),
    "more dense layers than layers": ({"text.first_k_dense_replace": 10}, "num_dense_layers must"),
    "product no one can print": ({"text.moe_intermediate_size": HUGE,
                                  "text.num_shared_experts": HUGE}, "Exceeds the limit"),
    "tied above the text": ({"tie_word_embeddings": True}, "tie_word_embeddings is true"),
    "true for 1": ({"text.num_experts_per_token": True}, "top_k"),
    "1 for true": ({"text.mla_use_nope": 1}, "mla_use_nope is 1, only true is supported"),
    "float for int": ({"text.vocab_size": 320.0}, "vocab_size"),
    "name over two lines": ({"text.quantization_config": {
        "format": "mxfp4-pack-quantized", "config_groups": {"a\nb": 3}}},
        r"a\nb is not a JSON object"),
    "other numbers of four bits": ({"text.quantization_config": quantised(type="int")}, "type is"),
    "eight bits": ({"text.quantization_config": quantised(num_bits=8)}, "num_bits is 8"),
    "no group": ({"text.quantization_config": quantised() | {"config_groups": {}}}, "no group"),
    "another choice of experts": ({"text.topk_method": "greedy"}, "topk_method is"),
}  # fmt: skip


def changed(plain: dict, changes: dict) -> dict:
    for path, value in changes.items():
        section, _, key = path.rpartition(".")
        (plain[f"{section}_config"] if section else plain)[key] = value
    return plain


@pytest.mark.parametrize(("changes", "message"), DANGERS.values(), ids=DANGERS)
def test_a_dangerous_value_is_refused_by_name(changes, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(changed(golden_config("tiny_k3"), changes)))
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_config(path)
    assert is_refused(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"text.first_k_dense_replace": 9},
        {"text.rms_norm_eps": 1, "text.routed_scaling_factor": 1, "text.activation_situ_beta": 4},
        {"text.rms_norm_eps": 1e-12, "text.initializer_range": 1.0},
        {"text.initializer_range": 1e-6, "vision.projector_ln_eps": 1e-12},
        {"text.activation_situ_beta": 1e-3, "text.activation_situ_linear_beta": 1e6},
        {"text.routed_scaling_factor": 1e6, "text.routed_expert_hidden_size": None},
        {"text.attn_res_block_size": None, "text.hidden_act": "silu"},
        {"vision.init_pos_emb_time": 1, "vision.merge_kernel_size": [1, 1]},
    ],
    ids=["all dense", "ints for floats", "least eps", "least weights", "uneven betas",
         "scaled experts", "residual stream", "single frames"],
)  # fmt: skip
def test_an_unusual_config_works(changes, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(changed(golden_config("tiny_k3"), changes)))
    assert not is_refused(path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "config.json",
            '{"model_type": "a", "model_type": "b"}',
            'key "model_type" is there twice',
        ),
        ("model.yaml", "a: &a [*a]", "Circular reference"),
        ("model.yaml", "a: 2024-99-99", "month must be"),
        ("model.yaml", "[" * 5000, "not YAML"),
    ],
    ids=["key twice", "yaml loop", "yaml date", "yaml depth"],
)
def test_a_file_that_cannot_be_read_is_a_config_error(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path / name)
