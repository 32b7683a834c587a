"""Checkpoints in the released layout: exact both ways, refused by name, a shard at a time."""

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from k3rl.errors import ConfigError, CorruptData, UserInputError, WeightsError
from k3rl.model import released
from k3rl.model.config import KdaConfig, VisionConfig, load_config
from k3rl.model.model import K3Model
from k3rl.model.mxfp4 import dequantise, fake_quantise_weight
from k3rl.model.released import INDEX, layout, load_released, save_released
from tests.model.model_builders import batch, lively_model, small_config

GOLDEN = Path("tests/data/golden")
A_LOG = "language_model.model.layers.0.self_attn.A_log"
NORM = "language_model.model.norm.weight"
EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.3.w2"


def golden(name: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / name / "model.safetensors")


def folder_of(tmp_path: Path, name: str, tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint of `tensors` in one file without an index, with the golden config `name`."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    shutil.copy(GOLDEN / name / "config.json", folder)
    save_file(tensors, folder / "model.safetensors")
    return folder


def same(a: K3Model, b: K3Model) -> None:
    left, right = a.state_dict(), b.state_dict()
    assert list(left) == list(right)
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["tiny_k3", "tiny_k3_mxfp4"])
def test_golden_checkpoints_load_value_by_value(name, dtype):
    tensors, model = golden(name), load_released(GOLDEN / name, dtype)
    ours = model.state_dict()
    seen = 0
    for stored in layout(model.config):
        if stored.name.endswith("weight_scale"):
            continue
        value = tensors[stored.name]
        if stored.dtype == "U8":
            scale = tensors[stored.name.replace("_packed", "_scale")]
            value = dequantise(value, scale, torch.float64)
        if stored.ours.endswith("A_log"):
            assert not value[4:].any()
            value = value[:4]
        target = ours[stored.ours] if stored.expert is None else ours[stored.ours][stored.expert]
        assert target.dtype == dtype
        assert torch.equal(target, value.to(dtype)), stored.name
        seen += target.numel()
    assert seen == sum(tensor.numel() for tensor in ours.values())
    assert all(parameter.requires_grad for parameter in model.parameters())
    hidden, _ = model(*batch([5], vocab_size=300))
    assert bool(torch.isfinite(hidden).all())


@pytest.mark.parametrize("shape", [(32,), (4,), (1, 1, 4, 1)], ids=str)
def test_decay_rates_are_read_by_head_from_the_front(shape, tmp_path):
    tensors, wanted = golden("tiny_k3"), load_released(GOLDEN / "tiny_k3")
    for name, value in tensors.items():
        if name.endswith("A_log"):
            tensors[name] = value if shape == (32,) else value[:4].clone().view(shape)
    if shape == (32,):
        tensors[A_LOG][4:] = 7.0
    same(load_released(folder_of(tmp_path, "tiny_k3", tensors)), wanted)


@pytest.mark.parametrize("shape", [(1,), (3,), (31,), (2, 2), (33,)], ids=str)
def test_decay_rates_of_other_shapes_are_misshaped(shape, tmp_path):
    folder = folder_of(tmp_path, "tiny_k3", golden("tiny_k3") | {A_LOG: torch.zeros(shape)})
    with pytest.raises(WeightsError, match=re.escape(f"{A_LOG} F32 {list(shape)} instead of")):
        load_released(folder)


def test_a_dequantised_mirror_without_the_text_root_loads(tmp_path):
    mirror = {}
    for name, value in golden("tiny_k3_mxfp4").items():
        bare = name.removeprefix("language_model.")
        if bare.endswith("weight_packed"):
            scale = golden_scale(name)
            mirror[bare.removesuffix("_packed")] = dequantise(value, scale, torch.bfloat16)
        elif not bare.endswith("weight_scale"):
            mirror[bare] = value
    wanted = load_released(GOLDEN / "tiny_k3_mxfp4")
    same(load_released(folder_of(tmp_path, "tiny_k3_mxfp4", mirror)), wanted)


def golden_scale(name: str) -> torch.Tensor:
    return golden("tiny_k3_mxfp4")[name.replace("_packed", "_scale")]


def packable(**changes):
    moe = replace(small_config().moe, latent_size=64, expert_size=32, **changes)
    vision = VisionConfig(60, 8, 12, 2, 2, 16, patch_size=3, pos_height=3, pos_width=4)
    return small_config(moe=moe, vision=vision)


def kimi_linear_like():
    kda = KdaConfig(2, 8, 5, decay="softplus", gate_rank=3)
    moe = replace(small_config().moe, latent_size=None)
    return small_config(kda=kda, moe=moe, attn_res="off", attn_res_block_size=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", [packable(), kimi_linear_like()], ids=["k3", "kimi linear"])
def test_a_saved_model_comes_back_bit_for_bit(config, dtype, tmp_path):
    model = lively_model(1, config).to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    save_released(tmp_path / "c", model, dtype)
    same(load_released(tmp_path / "c", next(model.parameters()).dtype), model)
    assert load_released(tmp_path / "c").config == config


def test_packed_experts_come_back_as_they_will_be_served(tmp_path):
    model = lively_model(2, packable(expert_format="mxfp4")).float()
    save_released(tmp_path / "c", model, torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                # -0.0 + 0.0 is 0.0: the sign of what rounds to zero is not kept.
                parameter.copy_(fake_quantise_weight(parameter) + 0.0)
    again = load_released(tmp_path / "c")
    same(again, model)
    save_released(tmp_path / "d", again, torch.float32)
    same(load_released(tmp_path / "d"), again)


@pytest.mark.parametrize("shard_bytes", [1, 1500, 20_000, 10**9])
def test_shards_hold_what_the_index_says_in_the_order_of_the_model(shard_bytes, tmp_path):
    model = lively_model(3, packable(expert_format="mxfp4")).float()
    total = save_released(tmp_path / "c", model, shard_bytes=shard_bytes)
    index = json.loads((tmp_path / "c" / INDEX).read_text())
    wanted = list(layout(model.config))
    sizes = {stored.name: stored.num_bytes for stored in wanted}
    assert list(index["weight_map"]) == list(sizes)
    assert index["metadata"]["total_size"] == total == sum(sizes.values())
    names = list(dict.fromkeys(index["weight_map"].values()))
    count = len(names)
    assert names == [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    shards = {name: load_file(tmp_path / "c" / name) for name in names}
    held = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    assert held == index["weight_map"]
    spans = [[sizes[tensor] for tensor in tensors] for tensors in shards.values()]
    assert all(sum(span) <= shard_bytes or len(span) == 1 for span in spans)
    assert (count == 1) == (shard_bytes > total)
    assert (count == len(sizes)) == (shard_bytes == 1)
    whole = load_released(tmp_path / "c")
    save_released(tmp_path / "one", model)
    same(load_released(tmp_path / "one"), whole)
    shutil.copytree(tmp_path / "c", tmp_path / "bare")
    (tmp_path / "bare" / INDEX).unlink()
    same(load_released(tmp_path / "bare"), whole)


def test_every_fault_of_the_tensors_is_listed_at_once(tmp_path):
    tensors = golden("tiny_k3_mxfp4")
    del tensors["language_model.lm_head.weight"], tensors[f"{EXPERT}.weight_scale"]
    tensors |= {"surplus": torch.zeros(1), NORM: torch.zeros(63)}
    tensors["mm_projector.post_norm.weight"] = torch.zeros(64, dtype=torch.int32)
    tensors[f"{EXPERT}.weight_packed"] = torch.zeros(64, 16)
    folder = folder_of(tmp_path, "tiny_k3_mxfp4", tensors)
    save_file({NORM: torch.zeros(64), "more": torch.zeros(1)}, folder / "another.safetensors")
    with pytest.raises(WeightsError) as caught:
        load_released(folder)
    assert str(caught.value) == (
        f"{folder}: 2 missing: language_model.lm_head.weight, {EXPERT}.weight_scale; "
        f"2 unexpected: more, surplus; 1 there twice: {NORM}; "
        f"3 misshaped: {EXPERT}.weight_packed F32 [64, 16] instead of U8 [64, 16], "
        f"{NORM} F32 [63] instead of BF16 [64], "
        "mm_projector.post_norm.weight I32 [64] instead of BF16 [64]"
    )


def sharded(tmp_path: Path) -> Path:
    save_released(tmp_path / "c", lively_model().float(), shard_bytes=9000)
    return tmp_path / "c"


def test_a_shard_that_is_gone_or_cut_is_named(tmp_path):
    folder = sharded(tmp_path)
    shard = sorted(folder.glob("*.safetensors"))[1]
    data = shard.read_bytes()
    for size in (0, 7, 100, len(data) - 1):
        shard.write_bytes(data[:size])
        with pytest.raises(CorruptData, match=shard.name) as caught:
            load_released(folder)
        assert "\n" not in str(caught.value)
    shard.unlink()
    with pytest.raises(ConfigError, match=shard.name):
        load_released(folder)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "[" * 100_000,
     '{"weight_map": {"a": ["x"]}}', '{"weight_map": {"a": "../c/model.safetensors"}}'],
    ids=["empty", "cut", "list", "no map", "map a list", "number", "deep", "nested", "elsewhere"],
)  # fmt: skip
def test_a_damaged_index_is_corrupt(text, tmp_path):
    folder = sharded(tmp_path)
    (folder / INDEX).write_text(text)
    with pytest.raises(CorruptData, match=re.escape(INDEX)):
        load_released(folder)


def test_folders_without_a_checkpoint_are_config_errors(tmp_path):
    folder = sharded(tmp_path)
    (folder / INDEX).write_text('{"weight_map": {}}')
    with pytest.raises(ConfigError, match="no safetensors files"):
        load_released(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_released(folder)


def test_a_scale_that_is_no_number_names_file_and_tensor(tmp_path):
    tensors = golden("tiny_k3_mxfp4")
    tensors[f"{EXPERT}.weight_scale"][5] = 255
    folder = folder_of(tmp_path, "tiny_k3_mxfp4", tensors)
    with pytest.raises(CorruptData, match=rf"model\.safetensors.*{EXPERT}\.weight_scale: .*255"):
        load_released(folder)


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    model = lively_model(0, packable(expert_format="mxfp4")).float()
    (tmp_path / "taken").mkdir()
    with pytest.raises(UserInputError, match="taken exists"):
        save_released(tmp_path / "taken", model)
    with pytest.raises(UserInputError, match=r"torch\.int8"):
        save_released(tmp_path / "c", model, torch.int8)
    with torch.no_grad():
        model.model.layers[4].block_sparse_moe.experts.w3[1, 2, 3] = torch.inf
    with pytest.raises(UserInputError, match="inf or NaN"):
        save_released(tmp_path / "c", model, shard_bytes=1000)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(released, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        save_released(tmp_path / "deep" / "c", lively_model())
    assert {path.name for path in tmp_path.rglob("*")} == {"deep", "taken"}


def test_the_layout_of_k3_is_the_released_index():
    index = json.loads((GOLDEN / "index_shapes.json").read_text())
    found: Counter = Counter()
    layers: dict[str, set[int]] = {}
    num_bytes = num_text = num_all = 0
    for stored in layout(load_config("configs/model/k3.yaml")):
        template = re.sub(r"experts\.\d+\.", "experts.{E}.", stored.name)
        number = re.search(r"(?:layers|blocks)\.(\d+)\.", template)
        if number:
            template = template.replace(number[0], number[0].replace(number[1], "{N}"))
            layers.setdefault(template, set()).add(int(number[1]))
        found[template, stored.shape, stored.dtype] += 1
        num_bytes += stored.num_bytes
        num_all += stored.num_parameters
        num_text += stored.num_parameters * stored.name.startswith("language_model.")
    wanted = {(t["name"], tuple(t["shape"]), t["dtype"]): t["count"] for t in index["templates"]}
    assert found == wanted
    for template in index["templates"]:
        spans = template.get("layers_0based_ranges", [])
        numbers = {number for a, b in spans for number in range(a, b + 1)}
        assert layers.get(template["name"], set()) == numbers, template["name"]
    assert found.total() == index["tensor_count"] == 497_220
    assert num_bytes == index["total_size"] == 1_560_860_324_864
    assert num_text == index["text_params_A_log_as_128"] == 2_779_484_478_208
    assert num_all == index["all_params"]


MEASURE = """
import sys
from pathlib import Path
import torch
from k3rl.model import released
from k3rl.model.config import KdaConfig, MlaConfig, ModelConfig, MoeConfig
from k3rl.model.model import K3Model

def peak():
    # Not ru_maxrss: a child begins with that of its parent.
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) // 1024

task, folder, dtype, expert_format = sys.argv[1:]
dtype = getattr(torch, dtype)
config = ModelConfig(
    vocab_size=2048, hidden_size=512, layer_kinds=("kda", "mla") * 4, attn_res_block_size=2,
    kda=KdaConfig(4, 64, 64), mla=MlaConfig(4, 128, 128, 64, 32, 64),
    moe=MoeConfig(1024, 32, 2, 256, 256, 512, expert_format=expert_format),
)
if task == "save":
    model = K3Model(config, seed=None).to(dtype)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02)
    before = peak()
    released.save_released(folder, model, dtype, shard_bytes=30 << 20)
else:
    before = peak()
    model = released.load_released(folder, dtype)
size = sum(t.numel() * t.element_size() for t in model.state_dict().values()) >> 20
print(size, peak() - before)
"""


def measured(*args: str) -> tuple[int, int]:
    """MiB of the model, and by how many the task raised the peak of its process."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *args], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    size, grown = done.stdout.split()
    return int(size), int(grown)


@pytest.mark.parametrize(
    ("dtype", "expert_format", "size"),
    [("float32", "plain", 229), ("bfloat16", "plain", 114), ("bfloat16", "mxfp4", 114)],
)
def test_beside_the_model_one_shard_is_in_memory(dtype, expert_format, size, tmp_path):
    shard, slack = 30, 20
    found, grown = measured("save", str(tmp_path / "c"), dtype, expert_format)
    assert found == size
    assert grown < shard + slack
    found, grown = measured("load", str(tmp_path / "c"), dtype, expert_format)
    assert found == size
    assert size < grown < size + shard + slack
