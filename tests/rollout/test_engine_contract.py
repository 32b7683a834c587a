"""Every engine against the contract."""

import asyncio
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest

from k3rl.blobs import BlobStore
from k3rl.envs import registry
from k3rl.model.config import load_config
from k3rl.rollout.engine import GenerateRequest
from k3rl.rollout.renderer import Renderer
from k3rl.rollout.scripted import ScriptedEngine
from k3rl.rollout.tokenizer import NanoTokenizer
from k3rl.types import Message, TrajectoryKey
from tests.rollout.engine_contract import CASES, collect, ids_of
from tests.rollout.native_helpers import make_engine, make_model

RENDERER = Renderer(NanoTokenizer.shipped())
NANO = load_config(Path(__file__).parents[2] / "configs" / "model" / "k3_nano.yaml")
WIDE_STOPS = (*RENDERER.stop_ids, *range(0, NANO.vocab_size, 29))
"""Random weights would nearly never say the one stop id."""


def scripted():
    return ScriptedEngine(RENDERER, ["oracle", "random"], registry.policy, delta_tokens=4)


def native(model):
    return make_engine(BlobStore(Path("nowhere")), model, max_tokens=1100, num_slots=8)


ENGINES = {
    "scripted": scripted,
    "native-random": partial(native, make_model(10, config=NANO)),
    "native-peaked": partial(native, make_model(9, sharpness=4.0, config=NANO)),
}


async def with_a_real_turn(make, request):
    """The first attempt whose turn is neither over at once nor long, so that cases can cut it."""
    for attempt in range(50):
        tried = replace(request, key=replace(request.key, attempt=attempt), stop_ids=WIDE_STOPS)
        if 8 <= len(ids_of(await collect(make(), replace(tried, max_new_tokens=80)))) < 80:
            return tried
    raise AssertionError("no attempt gives a turn of 8 to 79 tokens")


@cache
def requests(engine):
    made = []
    for sample, env_id in enumerate(["k3rl/Reason-v0", "k3rl/FileHunt-v0"] * 2):
        env = registry.make(env_id)
        task = env.task("train", sample)
        prompt = RENDERER.start([Message("user", "go")], env.tools, "low")
        key = TrajectoryKey("run", task.key, "low", 0, sample)
        request = GenerateRequest(key, task, prompt, len(prompt), 500, RENDERER.stop_ids)
        if engine.startswith("native"):
            request = asyncio.run(with_a_real_turn(ENGINES[engine], request))
        made.append(request)
    return made


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("engine", ENGINES)
def test_engine(engine, case):
    asyncio.run(case(ENGINES[engine], requests(engine)))
