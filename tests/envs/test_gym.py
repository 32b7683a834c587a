"""The gymnasium face: check_env, spaces, limits, copies, clean-up."""

import functools
import threading
import warnings
from dataclasses import replace

import gymnasium
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from hypothesis import given
from hypothesis import strategies as st

from k3rl.blobs import BlobStore
from k3rl.envs import registry
from k3rl.envs.gym import GymEnv, make_gym, register_gym
from k3rl.envs.spaces import MessageSpace
from k3rl.errors import SandboxError, UserInputError
from k3rl.sandboxes.factory import open_backend
from k3rl.types import Message, Task, ToolCall, ToolSpec, from_plain, philox, to_plain

IDS = ("k3rl/FileHunt-v0", "k3rl/Reason-v0", "k3rl/Terminal-v0")


def bwrap(root):
    return open_backend("bwrap", BlobStore(root / "blobs"), root / "scratch", False)


@pytest.fixture
def opener(tmp_path):
    return functools.partial(bwrap, tmp_path)


@pytest.mark.sandbox
@pytest.mark.parametrize("env_id", IDS)
def test_check_env(opener, env_id):
    assert env_id in register_gym()
    assert register_gym() == registry.ids()
    env = gymnasium.make(env_id, backend=opener)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped)
    env.close()


@pytest.mark.sandbox
@pytest.mark.parametrize("env_id", IDS)
def test_oracle_through_gymnasium(opener, env_id):
    register_gym()
    env = gymnasium.make(env_id, backend=opener, split="heldout", render_mode="ansi")
    oracle = registry.policy(env_id, "oracle")
    for episode in range(3):
        observation, info = env.reset(seed=episode)
        task = from_plain(Task, info["task"])
        assert task.split == "heldout"
        transcript, terminated = list(observation), False
        while not terminated:
            action = oracle(task, transcript, philox(0))
            observation, reward, terminated, truncated, info = env.step(action)
            transcript += [action, *observation]
            assert not truncated
            assert reward == float(terminated)
        assert info["outcome"]["reward_parts"]["correct"] == 1.0
        assert transcript[0].content in env.render()
        with pytest.raises(ResetNeeded):
            env.step(action)
    env.close()


@pytest.mark.sandbox
def test_seeds_and_options_choose_the_task(opener):
    env = make_gym("k3rl/FileHunt-v0", opener)
    session = registry.make("k3rl/FileHunt-v0")
    task = session.task("heldout", 7)
    first = env.reset(seed=3)
    assert env.reset(seed=3) == first
    assert env.reset()[1]["task_key"] != first[1]["task_key"]
    for options in ({"task": task}, {"task": to_plain(task)}, {"split": "heldout", "index": 7}):
        observation, info = env.reset(options=options)
        assert info["task_key"] == task.key
        assert observation == session.observe(task).messages
    for bad in ({"tsk": 1}, {"split": "test"}, {"task": {"env_id": 3}}):
        with pytest.raises(UserInputError):
            env.reset(options=bad)
    env.close()


@pytest.mark.sandbox
def test_text_actions_and_the_turn_limit(opener):
    env = make_gym("k3rl/Reason-v0", opener, env_kwargs={"preset": "arithmetic"})
    with pytest.raises(ResetNeeded):
        env.step("1")
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step("no idea")
    assert (reward, terminated, truncated) == (0.0, True, False)
    assert info["outcome"]["kind"] == "completed"
    env.reset(seed=0)
    action = Message("assistant", tool_calls=(ToolCall("python", {"code": "print(1)"}, 1),))
    for turn in range(1, 7):
        observation, reward, terminated, truncated, info = env.step(action)
        assert (terminated, truncated) == (False, turn == 6)
    assert observation[0].content == "1"
    assert (info["outcome"]["kind"], info["outcome"]["cause"]) == ("truncated", "turns")
    with pytest.raises(UserInputError):
        env.reset() and env.step(3)
    env.close()


@pytest.mark.sandbox
def test_nothing_is_shared_across_the_boundary(opener):
    env = make_gym("k3rl/FileHunt-v0", opener, render_mode="ansi")
    _, info = env.reset(seed=1)
    info["task"]["metadata"].clear()
    action = Message("assistant", tool_calls=(ToolCall("ls", {"path": "."}, 1),))
    _, *_, first = env.step(action)
    action.tool_calls[0].arguments["path"] = "changed"
    first["calls"].clear()
    again = Message("assistant", tool_calls=(ToolCall("ls", {"path": "."}, 1),))
    _, *_, second = env.step(again)
    assert len(second["calls"]) == 1
    assert "changed" not in env.render()
    env.close()


@pytest.mark.sandbox
def test_close_leaves_nothing(opener, tmp_path):
    before = threading.active_count()
    env = make_gym("k3rl/FileHunt-v0", opener)
    for _ in range(3):
        env.reset()
    backend, sandbox = env._backend, env._sandbox
    env.close()
    env.close()
    assert threading.active_count() == before
    assert backend is not None
    with pytest.raises(SandboxError):
        run_alone(backend.stats(sandbox.id))
    env.reset(seed=1)
    env.close()


def run_alone(work):
    import asyncio

    async def main():
        return await work

    return asyncio.run(main())


@pytest.mark.sandbox
def test_infrastructure_failure_raises_and_never_rewards(opener):
    env = make_gym("k3rl/FileHunt-v0", opener)
    env.reset(seed=0)
    env._thread.run(env._backend.close(env._sandbox.id))
    action = Message("assistant", tool_calls=(ToolCall("ls", {"path": "."}, 1),))
    with pytest.raises(SandboxError):
        env.step(action)
    with pytest.raises(ResetNeeded):
        env.step(action)
    env.reset(seed=0)
    assert env.step(action)[1] == 0.0
    env.close()


def test_render_mode_is_checked(opener):
    with pytest.raises(UserInputError, match="ansi"):
        GymEnv(lambda: registry.make("k3rl/FileHunt-v0"), opener, render_mode="human")


TOOLS = (
    ToolSpec(
        "f",
        "d",
        {
            "type": "object",
            "properties": {
                name: {"type": name} for name in ("string", "integer", "number", "boolean")
            },
            "required": [],
        },
    ),
)


@given(seed=st.integers(0, 2**31), role=st.sampled_from(["assistant", "user", "system", "tool"]))
def test_space_contains_and_round_trips_its_samples(seed, role):
    space = MessageSpace((role,), TOOLS, seed=seed)
    samples = [space.sample() for _ in range(4)]
    assert all(sample in space for sample in samples)
    assert space.from_jsonable(space.to_jsonable(samples)) == samples
    space.seed(seed)
    assert [space.sample() for _ in range(4)] == samples


def test_space_refuses_what_is_not_a_message_of_its_roles():
    space = MessageSpace(("assistant",), TOOLS)
    assert Message("assistant", "ls -la", tool_calls=(ToolCall("any", {"x": [1]}, 1),)) in space
    assert Message("assistant", malformed="why") in space
    good = Message("assistant", "x")
    for bad in ("x", None, replace(good, role="user"), replace(good, tool="f")):
        assert bad not in space
    assert replace(good, content=3) not in space
    assert replace(good, tool_calls=(ToolCall("f", {"x": object()}, 1),)) not in space
    others = MessageSpace(("user", "tool"))
    assert Message("user", "x", tool_calls=(ToolCall("f", {}, 1),)) not in others
    assert Message("tool", "x") not in others
    assert space == MessageSpace(("assistant",), TOOLS)
    assert space != others
    with pytest.raises(UserInputError):
        space.sample(mask=1)
