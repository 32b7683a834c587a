"""A worker that samples from a model: weights by version, each trajectory's law, errors."""

import asyncio
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from k3rl.blobs import BlobStore
from k3rl.errors import ConfigError, WeightsError
from k3rl.model import checkpoint
from k3rl.model.config import load_config as load_model_config
from k3rl.rollout.native import NativeEngine
from k3rl.rollout.scripted import ScriptedEngine
from k3rl.rollout.worker import RolloutWorker, make_engine, make_env, max_context_tokens
from k3rl.store.host import StoreHost
from k3rl.store.protocol import Ref
from k3rl.types import Author, TrajectoryHeader, TrajectoryKey, TrajectoryState, TruncationCause
from k3rl.weights.blob import manifest_of
from tests.builders import MATH, NOTES, TERSE, load_config
from tests.rollout.engine_contract import collect, ids_of
from tests.rollout.native_helpers import CONFIG, make_model, make_request, published

NANO = Path(__file__).parents[2] / "configs" / "model" / "k3_nano.yaml"
NATIVE = ("engine.kind=native", f"policy.model={NANO}")
BUDGET = 12


async def finished(store, worker_task, count):
    while len(await store.trajectories(TrajectoryState.FINISHED)) < count:
        if worker_task.done():
            worker_task.result()
        await asyncio.sleep(0.02)


def header(config, number, temperature=1.0):
    task = make_env(config, NOTES).task("train", number)
    key = TrajectoryKey("r", task.key, "max", number, 0)
    return TrajectoryHeader(key, task, budget=BUDGET, temperature=temperature)


def policy_tokens(read):
    spans = {(s.author, s.policy_version, s.state_version) for s in read.spans}
    return {span[1:] for span in spans if span[0] is Author.POLICY}


@pytest.mark.sandbox
def test_a_worker_samples_under_each_trajectory_s_law_and_the_version_it_was_told(tmp_path):
    async def go(scratch):
        config = load_config(tmp_path, *NATIVE, f"sandbox.scratch={scratch}")
        host = StoreHost(config)
        store = await host.open()
        blobs = BlobStore(config.run_folder / "store" / "blobs")
        nano = load_model_config(NANO)
        first = published(blobs, make_model(5, config=nano), 3)
        second = published(blobs, make_model(6, config=nano), 4, 3)
        worker = RolloutWorker(config, store)
        assert json.loads(await worker.stats()) == {}
        await worker.apply(json.dumps(first))
        running = asyncio.create_task(worker.run("w"))
        try:
            headers = [header(config, 0), header(config, 1, temperature=0.0)]
            await store.begin(headers)
            await finished(store, running, 2)
            await worker.apply(json.dumps(second))
            with pytest.raises(WeightsError, match="at 4 already"):
                await worker.apply(json.dumps(first))
            with pytest.raises(WeightsError, match="not JSON"):
                await worker.apply("{")
            headers.append(header(config, 2))
            await store.begin(headers[2:])
            await finished(store, running, 3)
            assert json.loads(await worker.stats())["decoded_tokens"] == 3 * BUDGET
            reads = [await store.read(Ref(h.id)) for h in headers]
            assert [policy_tokens(read) for read in reads] == [{(3, 3)}, {(3, 3)}, {(4, 4)}]
            sampled = [read.rollout_logprobs[read.loss_mask] for read in reads]
            assert [len(logprobs) for logprobs in sampled] == [BUDGET] * 3
            assert np.all(sampled[0] < 0)
            assert np.all(sampled[1] == 0)
            for h in headers:
                outcome = (await store.get(h.id)).outcome
                assert (outcome.reward, outcome.cause) == (-1.0, TruncationCause.BUDGET)
            await worker.stop()
            await asyncio.wait_for(running, 10)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await host.aclose()

    with tempfile.TemporaryDirectory(dir="/tmp") as scratch:
        os.chmod(scratch, 0o755)
        asyncio.run(go(scratch))


def test_version_0_is_the_config_s_checkpoint_or_random_weights_by_its_seed(tmp_path):
    async def said(config):
        engine = make_engine(config)
        assert engine.policy_version == 0
        return ids_of(await collect(engine, make_request(0, length=9, max_new=9)))

    model = make_model(11, config=load_model_config(NANO))
    path = tmp_path / "weights.safetensors"
    checkpoint.save(path, model)
    by_seed = [load_config(tmp_path, *NATIVE, f"seed={seed}") for seed in (11, 11, 12)]
    by_file = load_config(tmp_path, "engine.kind=native", f"policy.checkpoint={path}", "seed=11")
    one, again, other, loaded = [asyncio.run(said(c)) for c in [*by_seed, by_file]]
    assert one == again == loaded
    assert one != other


def test_the_config_s_own_weights_published_as_version_0_are_no_change(tmp_path):
    config = load_config(tmp_path, *NATIVE, "seed=11")
    blobs = BlobStore(config.run_folder / "store" / "blobs")

    def manifest(seed):
        model = make_model(seed, config=load_model_config(NANO))
        data = checkpoint.to_bytes(model.state_dict(), model.config)
        return manifest_of(0, 0, blobs.put(data), len(data))

    engine = make_engine(config)
    assert asyncio.run(engine.apply(manifest(11))) == 0
    with pytest.raises(WeightsError, match="other weights"):
        asyncio.run(engine.apply(manifest(12)))


def test_the_engine_holds_the_longest_context_of_the_config_s_tasks(tmp_path):
    config = load_config(tmp_path, *NATIVE, "engine.num_slots=7", envs=[TERSE])
    engine = make_engine(config)
    assert isinstance(engine, NativeEngine)
    assert (engine.num_slots, engine.max_tokens) == (7, max_context_tokens(config))
    assert engine.max_tokens == make_env(config, MATH).task("train", 0).limits.max_context_tokens
    assert isinstance(make_engine(load_config(tmp_path)), ScriptedEngine)


def test_a_model_of_another_vocabulary_is_refused(tmp_path):
    path = tmp_path / "small.safetensors"
    checkpoint.save(path, make_model(1))
    config = load_config(tmp_path, "engine.kind=native", f"policy.checkpoint={path}")
    with pytest.raises(ConfigError, match=f"{CONFIG.vocab_size} ids"):
        make_engine(config)
