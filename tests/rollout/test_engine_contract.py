"""Every engine against the contract."""

import asyncio

import pytest

from k3rl.envs import registry
from k3rl.rollout.engine import GenerateRequest
from k3rl.rollout.renderer import Renderer
from k3rl.rollout.scripted import ScriptedEngine
from k3rl.rollout.tokenizer import NanoTokenizer
from k3rl.types import Message, TrajectoryKey
from tests.rollout.engine_contract import CASES

RENDERER = Renderer(NanoTokenizer.shipped())


def scripted():
    return ScriptedEngine(RENDERER, ["oracle", "random"], registry.policy, delta_tokens=4)


ENGINES = {"scripted": scripted}


def requests():
    made = []
    for sample, env_id in enumerate(["k3rl/PythonMath-v0", "k3rl/FileHunt-v0"] * 2):
        env = registry.make(env_id)
        task = env.task("train", sample)
        prompt = RENDERER.start([Message("user", "go")], env.tools, "low")
        key = TrajectoryKey("run", task.key, "low", 0, sample)
        made.append(GenerateRequest(key, task, prompt, len(prompt), 500, RENDERER.stop_ids))
    return made


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("engine", ENGINES)
def test_engine(engine, case):
    asyncio.run(case(ENGINES[engine], requests()))
