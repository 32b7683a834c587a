"""Checks of a session's life: single use, resume, copies, failures of the sandbox."""

from __future__ import annotations

import copy
import json
from collections.abc import Awaitable
from dataclasses import replace

from k3rl.envs.base import ScriptedPolicy
from k3rl.envs.checker.case import Broken, Case, difference, need, shorten, together
from k3rl.envs.checker.check import Check, Group
from k3rl.envs.checker.watched import Watched
from k3rl.envs.play import Played, cut_off
from k3rl.errors import EnvError, K3rlError, SandboxError, UserInputError
from k3rl.types import Message, Task, TruncationCause, philox

NUM_RESUMED = 2
NUM_TAKEN_OVER = 4
NUM_RANDOM_TURNS = 3


async def _need_raise(error: type[K3rlError], use: Awaitable[object], what: str) -> None:
    try:
        await use
    except error:
        return
    except Exception as other:  # any but the right one
        raise Broken(f"{what}: raises {other!r}, not {error.__name__}") from None
    raise Broken(f"{what}: is not refused by {error.__name__}") from None


async def sessions_are_single_use(case: Case) -> str:
    """Nothing works before open, after the end and after close; nothing opens twice."""
    oracle, turn = case.policy("oracle"), Message("assistant", "again")
    env = case.make()
    await _need_raise(EnvError, env.act(turn), "act before open")
    await _need_raise(EnvError, env.grade(), "grade before open")
    async with case.session() as session:
        task, sandbox = session.task, session.sandbox
        await _need_raise(EnvError, session.env.open(task, sandbox), "a second open")
        spoken = session.env.act(Message("user", "hello"))
        await _need_raise(UserInputError, spoken, "act with a user's message")
        await session.carry_on(oracle)
        if session.is_over:
            await _need_raise(EnvError, session.env.act(turn), "act after the end")
        need((await session.env.grade()).reward == 1.0, "graded again, the reward is another")
        await session.env.close()
        await session.env.close()
    async with case.session(task) as session:
        await session.env.close()
        await _need_raise(EnvError, session.env.act(turn), "act after close")
        foreign = replace(task, env_id="other/Env-v0")
        opening = case.make().open(foreign, session.sandbox)
        await _need_raise(UserInputError, opening, "open with a task of another environment")
    return "before open, twice, after the end, after close"


async def resume_is_exact(case: Case) -> str:
    """Cut after every turn: a new object with the old one's JSON state goes on the same."""
    num_cuts = 0
    for name in ("oracle", "random"):
        if name not in case.policies and name != "oracle":
            continue
        policy = case.policy(name)
        for task in case.tasks("train", NUM_RESUMED):
            whole = await case.play(task, policy)
            num_turns = sum(message.role == "assistant" for message in whole.transcript)
            cuts = (_resumed(case, task, policy, cut) for cut in range(num_turns + 1))
            for cut, found in enumerate(await together(cuts)):
                where = f"{name}, cut after turn {cut}"
                unlike = difference(whole, replace(found, records=whole.records))
                need(not unlike, f"{where}: {unlike}")
            num_cuts += num_turns + 1
    return f"{num_cuts} cuts"


async def _resumed(case: Case, task: Task, policy: ScriptedPolicy, cut: int) -> Played:
    """A play that another object takes over after `cut` turns."""
    async with case.session(copy.deepcopy(task)) as session:
        for _ in range(cut):
            await session.turn(policy)
        await session.start_over(json.loads(json.dumps(session.env.state())))
        outcome = await session.carry_on(policy)
        if not session.is_over:
            outcome = cut_off(outcome, TruncationCause.TURNS)
        return Played(task, tuple(session.transcript), (), outcome)


async def bad_state_is_refused(case: Case) -> str:
    """A state that is not one of its own is a UserInputError."""
    async with case.session() as session:
        env = case.make()
        opening = env.open(session.task, session.sandbox, {**env.state(), "num_turns": "many"})
        await _need_raise(UserInputError, opening, "a state with num_turns 'many'")
    return "num_turns 'many'"


async def oracle_takes_over(case: Case) -> str:
    """From any unfinished state that the random policy reaches, the oracle solves the task."""
    oracle, random = case.policy("oracle"), case.policy("random")

    async def try_one(task: Task) -> None:
        async with case.session(task) as session:
            for _ in range(NUM_RANDOM_TURNS):
                state, before = session.env.state(), list(session.transcript)
                await session.turn(random, case.seed + 1)
                if session.is_over:
                    await session.start_over(state)
                    session.transcript, session.is_over = before, False
                    break
            session.num_turns = 0
            outcome = await session.carry_on(oracle)
            said = f"task {task.key[:8]}: after the random policy it gets {outcome.reward}"
            need(outcome.reward == 1.0, said)

    tasks = case.tasks("train", NUM_TAKEN_OVER)
    await together(try_one(task) for task in tasks)
    return f"{len(tasks)} tasks"


async def sessions_do_not_mix(case: Case) -> str:
    """Plays at the same time are the same as one after another."""
    oracle, tasks = case.policy("oracle"), case.tasks("train")
    alone = [await case.play(task, oracle) for task in tasks]
    together = await case.play_all(tasks, oracle)
    for one, other in zip(alone, together, strict=True):
        unlike = difference(one, other)
        need(not unlike, f"task {one.task.key[:8]}, alone / with others: {unlike}")
    return f"{len(tasks)} plays together"


async def nothing_is_shared(case: Case) -> str:
    """Changing what was handed over or handed out changes nothing inside."""
    oracle = case.policy("oracle")
    async with case.session() as session:
        env, task = session.env, session.task
        before, files = copy.deepcopy(task), dict(env.files(task))
        task.metadata.clear()
        handed_out = env.files(before)
        if isinstance(handed_out, dict):
            handed_out["extra"] = b""
        need(env.task("train", 0) == before, "a task's metadata are shared")
        need(dict(env.files(before)) == files, "the files of a task are shared")
        message = oracle(before, tuple(session.transcript), philox(0, before.key, 0))
        kept = copy.deepcopy(message)
        step = await env.act(message)
        for call in message.tool_calls:
            call.arguments.clear()
        recorded = [record.call for record in step.records]
        need(recorded == list(kept.tool_calls), "records share the arguments of calls")
        state = env.state()
        expected = copy.deepcopy(state)
        _scramble(state)
        need(env.state() == expected, "state() hands out what the session goes on with")
    return "task, files, calls, state"


def _scramble(value: object) -> None:
    """Empty every list and object inside a plain JSON value."""
    if isinstance(value, dict):
        for inner in value.values():
            _scramble(inner)
        value.clear()
    elif isinstance(value, list):
        for inner in value:
            _scramble(inner)
        value.clear()


async def observations_stay(case: Case) -> str:
    """What was read once does not change under the reader, in this session or by another."""
    oracle = case.policy("oracle")
    held: list[tuple[object, object]] = []
    for task in case.tasks("train", NUM_RESUMED):
        async with case.session(task) as session:
            await session.play_out(oracle)
        held += session.held
    for kept, as_read in held:
        need(kept == as_read, f"{shorten(str(as_read))} has become {shorten(str(kept))}")
    return f"{len(held)} observations"


async def lost_sandboxes_are_raised(case: Case) -> str:
    """When the sandbox is gone, act and grade raise SandboxError: no answer, no reward."""
    oracle, num_raised = case.policy("oracle"), 0
    async with case.session() as session:
        await case.backend.close(session.sandbox.id)
        while not session.is_over and session.num_turns < session.task.limits.max_turns:
            if await _is_lost(case, session.turn(oracle), "an answer"):
                num_raised += 1
                break
    async with case.session() as session:
        await session.play_out(oracle)
        await case.backend.close(session.sandbox.id)
        num_raised += await _is_lost(case, session.env.grade(), "a reward")
    return f"raised {num_raised} times" if num_raised else "it asks nothing of the sandbox"


async def _is_lost(case: Case, use: Awaitable[object], what: str) -> bool:
    """Whether it raised the loss; Broken when it met it and raised something else or nothing."""
    watched = case.backend
    assert isinstance(watched, Watched)
    before = watched.num_refused
    try:
        await use
    except SandboxError:
        return True
    except Exception as error:  # also one that hides the loss
        raise Broken(f"the loss is raised as {error!r}") from None
    need(watched.num_refused == before, f"what a lost sandbox could not do became {what}")
    return False


CHECKS = (
    Check("sessions are single use", Group.CONTRACT, sessions_are_single_use),
    Check("resume is exact", Group.CONTRACT, resume_is_exact),
    Check("bad state is refused", Group.CONTRACT, bad_state_is_refused),
    Check("oracle takes over anywhere", Group.CONTRACT, oracle_takes_over),
    Check("sessions do not mix", Group.CONTRACT, sessions_do_not_mix),
    Check("nothing is shared", Group.CONTRACT, nothing_is_shared),
    Check("observations stay as they were", Group.CONTRACT, observations_stay),
    Check("lost sandboxes are raised", Group.CONTRACT, lost_sandboxes_are_raised),
)
