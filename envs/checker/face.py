"""The check that the gymnasium face of an environment passes gymnasium's own checker."""

from __future__ import annotations

import asyncio
import functools
import warnings

from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env

from k3rl.envs.base import ScriptedPolicy
from k3rl.envs.checker.case import Broken, Case, need
from k3rl.envs.checker.check import Check, Group
from k3rl.envs.gym import GymEnv
from k3rl.types import Message, Task, from_plain, philox


async def gymnasium_agrees(case: Case) -> str:
    """`check_env` raises and warns of nothing; the oracle is rewarded through step."""
    return await asyncio.to_thread(_check_face, case)


def _check_face(case: Case) -> str:
    entry_point = functools.partial(GymEnv, case.make, case.open_another)
    env = entry_point()
    env.spec = EnvSpec(case.env_id, entry_point)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_env(env)
    except Exception as error:  # an assertion, a warning or an error of the environment
        raise Broken(f"check_env: {error}") from error
    else:
        reward = _play(env, case.policies["oracle"], case.seed) if "oracle" in case.policies else 1
        need(reward == 1.0, f"the oracle gets {reward} through step")
    finally:
        env.close()
    return "check_env, and a play of the oracle"


def _play(env: GymEnv, oracle: ScriptedPolicy, seed: int) -> float:
    observation, info = env.reset(seed=seed)
    task = from_plain(Task, info["task"])
    transcript: list[Message] = list(observation)
    is_over, reward, turn = False, 0.0, 0
    while not is_over:
        message = oracle(task, tuple(transcript), philox(seed, task.key, turn))
        observation, reward, terminated, truncated, _ = env.step(message)
        transcript += [message, *observation]
        is_over, turn = terminated or truncated, turn + 1
    return reward


CHECKS = (Check("gymnasium agrees", Group.CONTRACT, gymnasium_agrees, is_alone=True),)
