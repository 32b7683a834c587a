"""`k3rl model` from the command line: exact figures of K3, and checkpoints in both layouts."""

import re
import subprocess
import sys
import time

import pytest
import torch

from k3rl.model.checkpoint import first_model, open_model
from k3rl.model.released_config import read_config
from tests.model.model_builders import GOLDEN, batch

NANO, COLD_START = "configs/model/k3_nano.yaml", "tests/data/k3_nano_sft.safetensors"
MAIN = "from k3rl.cli.main import main; main()"


def k3rl(*words, status=0):
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "model", *map(str, words)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    return done.stdout if status == 0 else done.stderr


def test_describe_prints_the_exact_figures_of_k3_quickly_and_in_little_memory():
    peak = "import atexit; atexit.register(lambda: print(open('/proc/self/status').read()))"
    begun = time.monotonic()
    out = subprocess.run(
        [sys.executable, "-c", f"{peak}; {MAIN}", "model", "describe", "configs/model/k3.yaml"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert time.monotonic() - begun < 20
    assert int(re.search(r"VmHWM:\s+(\d+) kB", out).group(1)) < 2 << 20
    for figure in (
        "93 layers (69 KDA, 24 MLA)",
        "routed experts     2,722,740,830,208",
        "text parameters     2,779,484,478,208",
        "all parameters      2,779,931,837,184",
        "active per token    104,189,614,848",
        "497,220 tensors, 1,560,860,324,864 bytes",
        "27,648 bytes per token",
        "434,110,464 bytes per sequence",
        "208,379,229,696 per token",
    ):
        assert figure in out, figure


def test_describe_reads_every_kind_of_config():
    assert "49,122,681,728" in k3rl("describe", "configs/model/kimi_linear_48b.yaml")
    assert "9 layers (6 KDA, 3 MLA)" in k3rl("describe", GOLDEN / "tiny_k3")
    assert "636 tensors" in k3rl("describe", GOLDEN / "tiny_k3" / "config.json")


def test_a_model_goes_through_both_layouts_unchanged(tmp_path):
    folder, file, back = tmp_path / "hf", tmp_path / "one.safetensors", tmp_path / "again"
    k3rl("init", NANO, folder, "--seed", "5", "--dtype", "float32")
    k3rl("convert", folder, file, "--dtype", "float32")
    k3rl("convert", file, back, "--dtype", "float32")
    wanted = first_model(None, NANO, 5).state_dict()
    for place in (folder, file, back):
        found = open_model(place).state_dict()
        assert all(torch.equal(tensor, found[name]) for name, tensor in wanted.items())
    assert read_config(folder) == read_config(back)
    assert (folder / "model.safetensors.index.json").is_file()
    assert "exists" in k3rl("init", NANO, folder, status=2)


def test_a_released_checkpoint_converts_and_computes_the_same(tmp_path):
    k3rl("convert", GOLDEN / "tiny_k3_mxfp4", tmp_path / "plain", "--experts", "plain")
    k3rl("convert", tmp_path / "plain", tmp_path / "packed", "--experts", "mxfp4")
    ids, cu = batch([20], vocab_size=300)
    models = [open_model(GOLDEN / "tiny_k3_mxfp4"), *map(open_model, tmp_path.iterdir())]
    assert [model.config.moe.expert_format for model in models].count("mxfp4") == 2
    with torch.no_grad():
        hidden = [model(ids, cu)[0] for model in models]
    assert all(torch.equal(hidden[0], other) for other in hidden[1:])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["describe", "nowhere.yaml"], "nowhere.yaml: No such file"),
        (["describe", "README.md"], "README.md"),
        (["init", "configs/model/k3.yaml", "out"], "GB are free"),
        (["convert", "configs", "out"], "configs/config.json: No such file"),
        (["convert", COLD_START, "out", "--experts", "mxfp4"], "multiples of 32"),
        (["convert", COLD_START, "out.safetensors", "--experts", "plain"], "is for folders"),
        (["init", NANO, "/proc/nowhere/out"], "/proc/nowhere/out"),
    ],
    ids=[
        "missing",
        "not a config",
        "too large",
        "not a checkpoint",
        "not for these experts",
        "not in one file",
        "not writable",
    ],
)
def test_mistakes_are_one_line(words, message):
    error = k3rl(*words, status=2)
    assert message in error
    assert len(error.splitlines()) == 1
