"""Demonstrators: every play is solved, wrong turns and long thoughts are part of it."""

import asyncio
from dataclasses import dataclass

import numpy as np
import pytest

from k3rl.blobs import BlobStore
from k3rl.envs import demonstrating, file_hunt, reason, registry
from k3rl.envs.play import play
from k3rl.sandboxes.factory import open_backend
from k3rl.types import philox

MODULES = {"k3rl/FileHunt-v0": file_hunt, "k3rl/Reason-v0": reason}
NUM_RESTATEMENTS = {"k3rl/FileHunt-v0": 5, "k3rl/Reason-v0": 4}
NUM_TASKS = 60
KWARGS = {"k3rl/FileHunt-v0": {}, "k3rl/Reason-v0": {"preset": "arithmetic"}}


@dataclass
class Recorded:
    """A demonstrator that notes for each tool turn whether it is what the oracle would do."""

    env_id: str
    wrong: list
    thoughts: list

    def __call__(self, task, transcript, rng):
        turn = registry.policy(self.env_id, "demonstrator")(task, transcript, rng)
        right = registry.policy(self.env_id, "oracle")(task, transcript, rng)
        self.thoughts.append(turn.think)
        assert turn.content == right.content
        assert [call.tool for call in turn.tool_calls] == [call.tool for call in right.tool_calls]
        if turn.tool_calls and turn.tool_calls[0].tool != "submit":
            self.wrong.append(turn.tool_calls != right.tool_calls)
        else:
            assert turn.tool_calls == right.tool_calls
        return turn


@pytest.mark.sandbox
@pytest.mark.parametrize("env_id", MODULES)
def test_demonstrations_solve_every_task(tmp_path, env_id):
    policy = Recorded(env_id, [], [])

    async def main():
        backend = open_backend("bwrap", BlobStore(tmp_path / "blobs"), tmp_path / "scratch", False)
        try:
            envs = [registry.make(env_id, **KWARGS[env_id]) for _ in range(NUM_TASKS)]
            tasks = [env.task("train", index) for index, env in enumerate(envs)]
            plays = [play(e, task, policy, backend) for e, task in zip(envs, tasks, strict=True)]
            return await asyncio.gather(*plays)
        finally:
            await backend.aclose()

    played = asyncio.run(main())
    assert [each.outcome.reward for each in played] == [1.0] * NUM_TASKS
    assert max(len(each.records) for each in played) > 2
    verbose = np.array([", " in thought for thought in policy.thoughts])
    assert abs(verbose.mean() - demonstrating.VERBOSE_SHARE) < 0.12
    num_said = sum(thought.count(", ") for thought in policy.thoughts)
    assert num_said == verbose.sum() * NUM_RESTATEMENTS[env_id]
    assert 0.3 < np.mean(policy.wrong) < 0.6


@pytest.mark.parametrize("env_id", MODULES)
def test_the_worst_luck_stays_within_the_turns(env_id):
    """Even when every draw asks for a wrong turn, only so many are taken."""

    class Unlucky:
        def __init__(self):
            self.rng = philox(0)

        def random(self):
            return 0.0

        def __getattr__(self, name):
            return getattr(self.rng, name)

    env = registry.make(env_id, **KWARGS[env_id])
    task = env.task("train", 0)
    policy, oracle = (registry.policy(env_id, name) for name in ("demonstrator", "oracle"))
    opening = env.observe(task).messages
    right = oracle(task, opening, None)
    transcript, rng = list(opening), Unlucky()
    while len(transcript) < task.limits.max_turns:
        transcript.append(policy(task, tuple(transcript), rng))
        if transcript[-1].tool_calls == right.tool_calls:
            break
    assert len(transcript) - len(opening) == MODULES[env_id].MAX_WRONG_TURNS + 1
