"""The rules of the house: arrows, budgets, light imports, no pickle, one name for kernels."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).parents[1]
LEAVES = {"types", "errors", "blobs", "wire"}
# room -> what it may import of k3rl; the leaves and the room itself are always allowed.
ARROWS = {
    "types": {"errors"},
    "errors": set(),
    "wire": set(),
    "blobs": set(),
    "config": {"sections"},
    "sections": set(),
    "metrics": set(),
    "kernels": set(),
    "proxy": set(),
    "sandboxes": {"proxy"},
    "envs": {"sandboxes"},
    "store": {"config"},
    "model": {"kernels"},
    "algorithms": set(),
    "weights": set(),
    "learner": {
        "model", "algorithms", "kernels", "weights", "store.protocol", "config", "sections",
        "metrics",
    },
    "rollout": {
        "config", "sections", "envs", "sandboxes", "model", "kernels", "weights", "store.protocol",
        "store.ledger",
    },
    "replay": {"store", "rollout", "learner", "envs", "sandboxes", "config"},
    "view": {"store", "rollout.renderer", "config", "metrics", "evaluation"},
    "supervisor": {"store.protocol"},
    "groups": {
        "config", "sections", "envs.base", "envs.harness", "algorithms.intensity",
        "learner.protocol",
    },
    "evaluation": {"config", "metrics", "groups", "envs.base"},
    "controller": {
        "config", "metrics", "groups", "evaluation", "supervisor", "envs.base",
        "learner.protocol", "store.protocol", "algorithms.intensity",
    },
    "actors": None,
    "cluster": None,
    "cli": None,
    "__init__": {"envs.registry"},
}  # fmt: skip
# foreign packages with a fence: who may import them
FENCED = {
    "ray": {"actors", "cluster", "cli"},
    "torch": {"kernels", "model", "algorithms", "learner", "rollout", "weights", "cli"},
    "triton": {"kernels"},
    "vllm": {"rollout"},
    "redis": {"store"},
    "pyarrow": {"store"},
    "duckdb": {"store"},
    "pandas": set(),
    "polars": set(),
    "gymnasium": {"envs"},
    "docker": {"sandboxes"},
    "reasoning_gym": {"envs"},
    "mcp": {"envs"},
    "mcp_types": {"envs"},
    "tensorboard": {"metrics"},
    "typer": {"cli"},
    "fastapi": {"view"},
    "pickle": set(),
    "cloudpickle": set(),
    "dill": set(),
    "shelve": set(),
    "marshal": set(),
}
# file -> why it may be longer than 400 lines
LONG_FILES = {"k3rl/types.py": "the contract of all rooms"}
LONG_FUNCTIONS: dict[str, str] = {}


def source_files() -> list[Path]:
    folders = ("k3rl", "envs", "sandboxes", "kernels")
    return sorted(
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if not any(parent.is_symlink() for parent in path.parents)
    )


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[1] if parts[0] == "k3rl" else parts[0]


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", source_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_import_arrows_hold(path: Path) -> None:
    room = room_of(path)
    allowed = ARROWS[room]
    for name in imports_of(path):
        head, *rest = name.split(".")
        assert head not in {"envs", "sandboxes", "kernels"}, f"{name}: import it as k3rl.{name}"
        if head in FENCED:
            assert room in FENCED[head], f"{room} may not import {head}"
        if head != "k3rl":
            continue
        target = rest[0]
        if target in LEAVES or target == room or allowed is None:
            assert target != "cli" or room == "cli", f"{room} may not import the command line"
            continue
        dotted = {".".join(rest[:n]) for n in range(1, len(rest) + 1)}
        assert dotted & allowed, f"{room} may not import k3rl.{'.'.join(rest)}"


@pytest.mark.parametrize("path", source_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_loads_pickles_by_the_back_door(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert getattr(node.value, "value", True) is False
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            called = f"{node.value.id}.{node.attr}"
            assert called not in {"torch.load", "torch.save", "pd.read_pickle", "joblib.load"}


def test_arrow_check_can_fail(tmp_path: Path) -> None:
    bad = ROOT / "k3rl" / "store" / "protocol.py"
    assert room_of(bad) == "store"
    sample = tmp_path / "x.py"
    sample.write_text("import ray.util\nfrom k3rl.rollout import worker\n")
    assert imports_of(sample) == {"ray.util", "k3rl.rollout.worker"}
    assert "rollout" not in (ARROWS["store"] or set())
    assert "store" not in FENCED["ray"]


@pytest.mark.parametrize("path", source_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_budgets_hold(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    text = path.read_text()
    assert text.isascii(), f"{name}: not ASCII"
    limit = 600 if name in LONG_FILES else 400
    assert len(text.splitlines()) <= limit, f"{name}: more than {limit} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            where = f"{name}:{node.name}"
            assert length <= (80 if where in LONG_FUNCTIONS else 50), f"{where}: {length} lines"


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_k3rl_loads_only_the_leaves() -> None:
    modules = run_python("import sys, k3rl; print('\\n'.join(sys.modules))").split()
    ours = {name for name in modules if name.startswith("k3rl")}
    assert ours == {
        "k3rl", "k3rl.types", "k3rl.errors", "k3rl.wire", "k3rl.envs", "k3rl.envs.entries",
            "k3rl.envs.registry",
    }  # fmt: skip
    heavy = {"torch", "ray", "gymnasium", "pyarrow", "redis", "transformers", "tensorboard"}
    assert not heavy & set(modules)


def test_no_import_of_ours_makes_kernels_a_top_level_module() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in source_files()
    ]
    ours = [name if name.startswith("k3rl") else f"k3rl.{name}" for name in modules]
    code = f"""
import importlib, sys
sys.path.insert(0, '.')
for name in {ours}:
    importlib.import_module(name)
print('kernels' in sys.modules)
"""
    assert run_python(code).strip() == "False"


def test_transformers_does_not_take_our_kernels_for_the_hub_package() -> None:
    """It probes the name by importing it; with our folder in reach it must find no package."""
    code = """
import sys
sys.path.insert(0, '.')
from transformers.utils import is_kernels_available
import transformers.models.llama.modeling_llama
assert getattr(sys.modules.get('kernels'), '__file__', None) is None
print(is_kernels_available())
"""
    assert run_python(code).strip() == "False"


def test_symlinks_are_relative() -> None:
    for name in ("envs", "sandboxes", "kernels"):
        link = ROOT / "k3rl" / name
        assert link.is_symlink()
        assert str(link.readlink()) == f"../{name}"
        assert not (ROOT / name / "__init__.py").exists()


def test_ray_cluster_is_valid_and_offers_the_tags_the_code_asks_for() -> None:
    cluster = yaml.safe_load((ROOT / "ray_cluster.yaml").read_text())
    validate_config(prepare_config(cluster))
    offered = set()
    for node in cluster["available_node_types"].values():
        offered |= set(node["resources"])
    tree = ast.parse((ROOT / "k3rl" / "actors.py").read_text())
    asked = {
        key.value
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "resources"
        for key in node.value.keys
    }
    assert asked == {"rollout", "store", "learner"}
    assert asked <= offered
