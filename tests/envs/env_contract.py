"""What every ToolEnv must do, as plain async functions over one `Case`.

Run them over another environment by making a Case of it; nothing here knows a particular one.
"""

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import pytest

from k3rl.envs.base import EnvSpec, ScriptedPolicy, ToolEnv
from k3rl.envs.play import Played, play
from k3rl.errors import EnvError, UserInputError
from k3rl.sandboxes.base import Sandbox, SandboxBackend
from k3rl.types import (
    Message,
    Outcome,
    OutcomeKind,
    Task,
    ToolCall,
    ToolRecord,
    ToolStatus,
    from_plain,
    philox,
    to_plain,
)

NUM_TASKS = 32
WRONG_VALUE = {"string": 7, "integer": "x", "number": "x", "boolean": "x"}
RIGHT_VALUE = {"string": "x", "integer": 1, "number": 1.0, "boolean": True}


@dataclass(frozen=True)
class Case:
    """An environment under test."""

    make: Callable[[], ToolEnv]
    oracle: ScriptedPolicy
    random: ScriptedPolicy
    null: ScriptedPolicy
    backend: SandboxBackend


def untimed(records: tuple[ToolRecord, ...]) -> list[ToolRecord]:
    return [replace(record, wall_s=0.0) for record in records]


def same(left: Played, right: Played) -> bool:
    return (left.transcript, untimed(left.records), left.outcome) == (
        right.transcript,
        untimed(right.records),
        right.outcome,
    )


async def opened(case: Case, index: int = 0, task: Task | None = None):
    """A fresh session in a fresh sandbox: (env, sandbox, task, opening transcript)."""
    env = case.make()
    task = task or env.task("train", index)
    sandbox = Sandbox(case.backend, await case.backend.create(env.sandbox_spec, env.files(task)))
    return env, sandbox, task, list((await env.open(task, sandbox)).messages)


async def carry_on(
    env: ToolEnv, task: Task, transcript: list[Message], policy: ScriptedPolicy, first_turn: int = 0
) -> Outcome:
    for turn in range(first_turn, task.limits.max_turns):
        message = policy(task, tuple(transcript), philox(0, task.key, turn))
        step = await env.act(message)
        transcript += [message, *step.messages]
        if step.terminated:
            break
    return await env.grade()


async def check_tasks_are_pure(case: Case) -> None:
    one, other = case.make(), case.make()
    for split in ("train", "heldout"):
        for index in (3, 0, 1, 2**31 - 1):
            task = one.task(split, index)
            assert task == other.task(split, index)
            assert (task.split, task.env_id) == (split, one.spec.id)
            assert from_plain(Task, json.loads(json.dumps(to_plain(task)))) == task
            assert one.files(task) == other.files(task)
    for split, index in (("test", 0), ("train", -1)):
        with pytest.raises(UserInputError):
            one.task(split, index)


async def check_reference_policies(case: Case) -> None:
    for split in ("train", "heldout"):
        tasks = [case.make().task(split, index) for index in range(NUM_TASKS)]
        rewards = {}
        for name, policy in (("oracle", case.oracle), ("random", case.random), ("null", case.null)):
            plays = [play(case.make(), task, policy, case.backend) for task in tasks]
            outcomes = [played.outcome for played in await asyncio.gather(*plays)]
            rewards[name] = [outcome.reward for outcome in outcomes]
            if name == "oracle":
                assert {outcome.kind for outcome in outcomes} == {OutcomeKind.COMPLETED}
            for outcome in outcomes:
                assert set(outcome.reward_parts) == {"correct", "complete", "num_steps", "format"}
        assert rewards["oracle"] == [1.0] * NUM_TASKS
        assert rewards["null"] == [0.0] * NUM_TASKS
        assert sum(rewards["random"]) < NUM_TASKS / 4


async def check_playing_is_deterministic(case: Case) -> None:
    for policy in (case.oracle, case.random):
        for index in range(4):
            task = case.make().task("train", index)
            one, other = [await play(case.make(), task, policy, case.backend) for _ in range(2)]
            assert same(one, other)


async def check_bad_calls_are_answered(case: Case) -> None:
    env, sandbox, task, transcript = await opened(case)
    bad = [("", ToolCall("no_such_tool", {}, 1))]
    for tool in env.tools:
        kinds = {name: p["type"] for name, p in tool.parameters["properties"].items()}
        good = {name: RIGHT_VALUE[kind] for name, kind in kinds.items()}
        bad.append(("nonsense", ToolCall(tool.name, {**good, "nonsense": 1}, 1)))
        bad.append(("JSON", ToolCall(tool.name, {}, 1, raw='{"broken')))
        for name, kind in kinds.items():
            bad.append((name, ToolCall(tool.name, {**good, name: WRONG_VALUE[kind]}, 1)))
            bad.append((name, ToolCall(tool.name, {**good, name: None}, 1)))
            if kind == "string":
                bad.append((name, ToolCall(tool.name, {**good, name: "\ud800"}, 1)))
        for name in tool.parameters["required"]:
            bad.append((name, ToolCall(tool.name, {k: v for k, v in good.items() if k != name}, 1)))
    for mentioned, call in bad:
        step = await env.act(Message("assistant", tool_calls=(call,)))
        (record,), (answer,) = step.records, step.messages
        assert not step.terminated
        assert record.status is ToolStatus.ERROR
        assert record.output == answer.content
        assert answer.content.startswith("error:")
        assert mentioned in answer.content
        assert (answer.role, answer.tool, answer.index) == ("tool", call.tool, call.index)
    transcript.append(step.messages[0])
    await check_recovers(env, sandbox, task, transcript, case)


async def check_malformed_is_answered(case: Case) -> None:
    env, sandbox, task, transcript = await opened(case)
    step = await env.act(Message("assistant", malformed="tools block is not closed"))
    assert not step.terminated
    assert step.records == ()
    assert "tools block is not closed" in step.messages[0].content
    transcript.append(step.messages[0])
    await check_recovers(env, sandbox, task, transcript, case)


async def check_recovers(
    env: ToolEnv, sandbox: Sandbox, task: Task, transcript: list[Message], case: Case
) -> None:
    """After errors the same session can still be solved, and the reward part format says so."""
    outcome = await carry_on(env, task, transcript, case.oracle)
    assert (outcome.reward, outcome.reward_parts["format"]) == (1.0, 0.0)
    await env.close()
    await case.backend.close(sandbox.id)


async def check_calls_run_in_order(case: Case) -> None:
    """All calls of one message are answered in its order, whatever indices they carry."""
    env, sandbox, _, _ = await opened(case)
    calls = tuple(ToolCall(f"no_{n}", {}, n) for n in (3, 1, 2))
    step = await env.act(Message("assistant", tool_calls=calls))
    assert [(m.tool, m.index) for m in step.messages] == [(c.tool, c.index) for c in calls]
    assert [record.call for record in step.records] == list(calls)
    await case.backend.close(sandbox.id)


async def check_session_is_single_use(case: Case) -> None:
    env = case.make()
    for use in (env.act(Message("assistant")), env.grade()):
        with pytest.raises(EnvError):
            await use
    env, sandbox, task, transcript = await opened(case)
    with pytest.raises(EnvError):
        await env.open(task, sandbox)
    with pytest.raises(UserInputError):
        await env.act(Message("user", "hello"))
    await carry_on(env, task, transcript, case.oracle)
    with pytest.raises(EnvError):
        await env.act(Message("assistant", "again"))
    assert (await env.grade()).reward == 1.0
    await env.close()
    await env.close()
    other, *_ = await opened(case, task=task)
    await other.close()
    with pytest.raises(EnvError):
        await other.act(Message("assistant"))
    foreign = replace(task, env_id="other/Env-v0")
    with pytest.raises(UserInputError):
        await case.make().open(foreign, sandbox)


async def check_resume_equals_uninterrupted(case: Case) -> None:
    """Cut after every turn: a new session object with the old one's JSON state goes on the same."""
    for policy in (case.oracle, case.random):
        for index in range(2):
            task = case.make().task("train", index)
            whole = await play(case.make(), task, policy, case.backend)
            for cut in range(len(whole.transcript)):
                env, sandbox, task, transcript = await opened(case, task=task)
                ended = False
                for turn in range(cut):
                    message = policy(task, tuple(transcript), philox(0, task.key, turn))
                    step = await env.act(message)
                    transcript += [message, *step.messages]
                    ended = step.terminated or turn + 1 == task.limits.max_turns
                    if ended:
                        break
                state = json.loads(json.dumps(env.state()))
                await env.close()
                env = case.make()
                await env.open(task, sandbox, state)
                if ended:
                    outcome = await env.grade()
                else:
                    outcome = await carry_on(env, task, transcript, policy, cut)
                await case.backend.close(sandbox.id)
                assert tuple(transcript) == whole.transcript
                assert (outcome.reward, outcome.reward_parts) == (
                    whole.outcome.reward,
                    whole.outcome.reward_parts,
                )
                if ended:
                    break


async def check_bad_state_is_refused(case: Case) -> None:
    env = case.make()
    task = env.task("train", 0)
    sandbox = Sandbox(case.backend, await case.backend.create(env.sandbox_spec, env.files(task)))
    with pytest.raises(UserInputError, match="num_turns"):
        await env.open(task, sandbox, {**env.state(), "num_turns": "many"})
    await case.backend.close(sandbox.id)


async def check_oracle_takes_over_anywhere(case: Case) -> None:
    """From any unfinished state that the random policy reaches, the oracle solves the task."""
    for index in range(6):
        env, sandbox, task, transcript = await opened(case, index)
        for turn in range(3):
            message = case.random(task, tuple(transcript), philox(1, task.key, turn))
            state = env.state()
            step = await env.act(message)
            if step.terminated:
                await env.close()
                env = case.make()
                await env.open(task, sandbox, state)
                break
            transcript += [message, *step.messages]
        assert (await carry_on(env, task, transcript, case.oracle)).reward == 1.0
        await case.backend.close(sandbox.id)


async def check_sessions_do_not_mix(case: Case) -> None:
    tasks = [case.make().task("train", index) for index in range(8)]
    alone = [await play(case.make(), task, case.oracle, case.backend) for task in tasks]
    plays = [play(case.make(), task, case.oracle, case.backend) for task in tasks]
    together = await asyncio.gather(*plays)
    assert all(same(*pair) for pair in zip(alone, together, strict=True))


async def check_nothing_is_shared(case: Case) -> None:
    """Changing what was handed over or handed out changes nothing inside."""
    env, sandbox, task, transcript = await opened(case)
    before, files = copy.deepcopy(task), dict(env.files(task))
    task.metadata.clear()
    env.files(before).update({"extra": b""})  # type: ignore[attr-defined]
    assert env.task("train", 0) == before
    assert env.files(before) == files
    message = case.oracle(before, tuple(transcript), philox(0, before.key, 0))
    kept = copy.deepcopy(message)
    step = await env.act(message)
    for call in message.tool_calls:
        call.arguments.clear()
    assert [record.call for record in step.records] == list(kept.tool_calls)
    state = env.state()
    expected = copy.deepcopy(state)
    state.clear()
    assert env.state() == expected
    assert case.make().tools == env.tools
    await env.close()
    await case.backend.close(sandbox.id)


async def check_spec_round_trips(case: Case) -> None:
    spec = case.make().spec
    again = from_plain(EnvSpec, json.loads(json.dumps(to_plain(spec))))
    assert again == spec
    assert again.digest == spec.digest


async def check_answer_is_not_shown(case: Case) -> None:
    """A task that the policy can see in whole (its prompt, tools, metadata) does not solve itself.

    The final message of the oracle is what is right; nothing visible before a call contains it.
    """
    for index in range(12):
        env = case.make()
        task = env.task("heldout", index)
        played = await play(env, task, case.oracle, case.backend)
        last = played.transcript[-1]
        right = last.content or next(iter(last.tool_calls[0].arguments.values()))
        assert json.dumps(right) not in json.dumps(to_plain(task))
        assert played.transcript[0].content.split()[-1] != right


CHECKS: dict[str, Callable[[Case], Awaitable[None]]] = {
    name.removeprefix("check_"): check
    for name, check in sorted(globals().items())
    if name.startswith("check_") and name != "check_recovers"
}
