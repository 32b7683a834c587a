"""Checkpoints: exact round trips, equal bytes, and one clear error for each kind of damage."""

import dataclasses
from pathlib import Path

import pytest
import torch
import yaml
from blake3 import blake3
from safetensors.torch import save as write_tensors

from k3rl.errors import ConfigError, CorruptData, SchemaTooNew
from k3rl.model import checkpoint
from k3rl.model.config import ModelConfig, load_config
from k3rl.model.model import K3Model
from k3rl.rollout.tokenizer import NanoTokenizer
from tests.model.model_builders import lively_model, small_config

NANO = "configs/model/k3_nano.yaml"


def test_float32_round_trip_is_exact(tmp_path):
    model = lively_model().float()
    digest = checkpoint.save(tmp_path / "deep" / "model.safetensors", model)
    data = (tmp_path / "deep" / "model.safetensors").read_bytes()
    assert digest == blake3(data).hexdigest()
    again = checkpoint.load_model(tmp_path / "deep" / "model.safetensors")
    assert again.config == model.config
    assert all(torch.equal(a, again.state_dict()[n]) for n, a in model.state_dict().items())
    assert checkpoint.to_bytes(again.state_dict(), again.config) == data
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["model.safetensors"]


def test_bfloat16_halves_what_the_release_halves(tmp_path):
    model = K3Model(small_config(), 0)
    checkpoint.save(tmp_path / "m", model, torch.bfloat16)
    config, tensors = checkpoint.load(tmp_path / "m")
    assert config == model.config
    for name, tensor in model.state_dict().items():
        wide = name.endswith(("conv1d.weight", "dt_bias", "A_log", "bias", "o_norm.weight"))
        expected = tensor if wide else tensor.bfloat16().float()
        assert torch.equal(tensors[name], expected), name
    assert (tmp_path / "m").stat().st_size < len(checkpoint.to_bytes(tensors, config)) * 0.7


def test_names_are_those_of_the_release():
    names = set(K3Model(small_config(), 0).state_dict())
    assert {
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.output_attn_res_proj.weight",
        "model.layers.0.self_attn.q_conv1d.weight",
        "model.layers.0.self_attn.A_log",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.self_attn.kv_a_proj_with_mqa.weight",
        "model.layers.1.block_sparse_moe.gate.e_score_correction_bias",
        "model.layers.1.block_sparse_moe.experts.w1",
        "model.layers.1.block_sparse_moe.routed_expert_norm.weight",
        "model.layers.4.mlp_res_norm.weight",
    } <= names
    assert len(names) == 5 + 5 * 6 + 3 * 14 + 2 * 8 + 3 + 4 * 11


def test_damage_is_one_line_that_names_file_and_tensor(tmp_path):
    model = K3Model(small_config(), 0)
    path = tmp_path / "m"
    checkpoint.save(path, model)
    data = path.read_bytes()
    tensors = model.state_dict()
    short = {n: t for n, t in tensors.items() if n != "lm_head.weight"}
    bent = tensors | {"model.norm.weight": torch.zeros(3)}
    whole = tensors | {"model.norm.weight": torch.zeros(24, dtype=torch.int64)}
    cases = {
        data[:-4]: "safetensors",
        b"": "safetensors",
        write_tensors({"a": torch.zeros(1)}): "not a k3rl model",
        checkpoint.to_bytes(short, model.config): "lm_head.weight: missing",
        checkpoint.to_bytes(tensors | {"zz": torch.zeros(1)}, model.config): "zz",
        checkpoint.to_bytes(bent, model.config): r"model.norm.weight: F32 \[3\]",
        checkpoint.to_bytes(whole, model.config): "model.norm.weight: I64",
    }
    for bad, message in cases.items():
        path.write_bytes(bad)
        with pytest.raises(CorruptData, match=message) as caught:
            checkpoint.load(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    path.write_bytes(data.replace(rb"\"schema\":1", rb"\"schema\":2"))
    with pytest.raises(SchemaTooNew, match="schema 2"):
        checkpoint.load(path)
    path.write_bytes(data.replace(rb"\"top_k\":2", rb"\"top_k\":9"))
    with pytest.raises(ConfigError, match="top_k"):
        checkpoint.load(path)
    with pytest.raises(ConfigError, match="absent"):
        checkpoint.load(tmp_path / "absent")


def test_nano_config_fits_the_tokenizer_and_its_size():
    config = load_config(NANO)
    assert config.vocab_size == NanoTokenizer.shipped().vocab_size
    count = sum(p.numel() for p in K3Model(config).parameters())
    assert 400_000 <= count <= 1_000_000
    assert ModelConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hiden_size": 3}, "hiden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"layer_kinds": ["kda", "gqa"]}, "layer_kinds"),
        (
            {"kda": {"num_heads": 2, "head_dim": 4, "decay_rank": 2, "gate_lower_bound": -6.0}},
            "kda",
        ),
        ({"layer_kinds": []}, "layer_kinds must name 1 to 1024"),
    ],
)
def test_config_errors_name_file_and_key(tmp_path, change, message):
    plain = yaml.safe_load(Path(NANO).read_text())
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(plain | change))
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        small_config().vocab_size = 3
