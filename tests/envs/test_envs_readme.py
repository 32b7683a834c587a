"""The example of envs/README.md runs as it stands there."""

import asyncio
import importlib.util
import re
from pathlib import Path

import pytest

from k3rl.blobs import BlobStore
from k3rl.envs import registry
from k3rl.envs.play import play
from k3rl.sandboxes.factory import open_backend

README = Path(__file__).parents[2] / "envs" / "README.md"


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Imports the example as a module against a registry of its own."""
    own = registry.Registry(group=None)
    monkeypatch.setattr(registry, "register", own.register)
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    path = tmp_path / "acme_word_length.py"
    path.write_text(block)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return own


@pytest.mark.sandbox
def test_example_is_solved_by_its_oracle(tmp_path, example):
    async def main():
        backend = open_backend("bwrap", BlobStore(tmp_path / "blobs"), tmp_path / "scratch", False)
        rewards = {}
        for name in ("oracle", "null"):
            policy = example.policy("acme/WordLength-v0", name)
            envs = [example.make("acme/WordLength-v0") for _ in range(6)]
            plays = [play(e, e.task("train", i), policy, backend) for i, e in enumerate(envs)]
            rewards[name] = {played.outcome.reward for played in await asyncio.gather(*plays)}
        await backend.aclose()
        return rewards

    assert asyncio.run(main()) == {"oracle": {1.0}, "null": {0.0}}
