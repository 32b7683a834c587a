"""Checks of the scripted policies: what must be rewarded, what must not, and that all is graded."""

from __future__ import annotations

import math

from k3rl.envs.base import REWARD_PARTS
from k3rl.envs.checker.case import SPLITS, Broken, Case, Session, Undeclared, need
from k3rl.envs.checker.check import Check, Group
from k3rl.errors import GraderError
from k3rl.types import Message, OutcomeKind

MAX_RANDOM_MEAN = 0.25
MIN_RANDOM_PLAYS = 16
ODD_ANSWERS = ("", " ", "\0", "\ud800", "nan", "-1e999", "{}", "x" * 20_000, "A\nB\n")


async def oracle_is_right(case: Case) -> str:
    """The oracle ends every task of both splits within its limits and gets exactly 1."""
    if "oracle" not in case.policies:
        raise Broken("no oracle is declared: nothing shows that a task can be solved")
    for split in SPLITS:
        for played in await case.play_all(case.tasks(split), case.policies["oracle"]):
            where, outcome = f"{split} task {played.task.key[:8]}", played.outcome
            need(outcome.kind is OutcomeKind.COMPLETED, f"{where}: ends as {outcome.kind}")
            need(outcome.reward == 1.0, f"{where}: gets {outcome.reward}")
    return f"1.0 on {case.num_tasks} tasks of each split"


async def null_gets_nothing(case: Case) -> str:
    """The policy that does nothing gets exactly 0."""
    null = case.policy("null")
    for split in SPLITS:
        for played in await case.play_all(case.tasks(split), null):
            reward = played.outcome.reward
            need(reward == 0.0, f"{split} task {played.task.key[:8]}: gets {reward}")
    return f"0.0 on {case.num_tasks} tasks of each split"


async def random_is_below(case: Case) -> str:
    """The random policy is far from the oracle."""
    random, tasks = case.policy("random"), case.tasks("train")
    rewards: list[float] = []
    seed = case.seed
    while len(rewards) < MIN_RANDOM_PLAYS:
        plays = await case.play_all(tasks, random, seed)
        rewards += [played.outcome.reward or 0.0 for played in plays]
        seed += 1
    mean = math.fsum(rewards) / len(rewards)
    need(mean <= MAX_RANDOM_MEAN, f"mean reward {mean:.3f} over {len(rewards)} plays")
    return f"mean reward {mean:.3f} over {len(rewards)} plays"


async def every_end_is_graded(case: Case) -> str:
    """Whatever the policy did, grade gives a reward and all parts, and never raises."""
    endings = 0
    for name in (None, *ODD_ANSWERS):
        async with case.session() as session:
            if name is not None:
                await session.env.act(Message("assistant", name))
            await _need_graded(f"after the answer {name!r:.20}", session)
        endings += 1
    for policy in ("oracle", "random", "null"):
        if policy in case.policies:
            async with case.session() as session:
                await session.play_out(case.policies[policy])
                await _need_graded(f"after {policy}", session)
            endings += 1
    return f"{endings} endings"


async def _need_graded(where: str, session: Session) -> None:
    try:
        outcome = await session.env.grade()
    except GraderError as error:
        raise Broken(f"{where}: {error}") from None
    parts, weights = outcome.reward_parts, session.env.spec.reward
    missing = {*REWARD_PARTS, *weights} - set(parts)
    need(not missing, f"{where}: no reward part {', '.join(sorted(missing))}")
    need(outcome.reward is not None, f"{where}: no reward")
    reward = outcome.reward or 0.0
    need(all(math.isfinite(value) for value in (reward, *parts.values())), f"{where}: {parts}")
    total = sum(weight * parts[name] for name, weight in weights.items())
    need(abs(reward - total) < 1e-9, f"{where}: reward {reward}, its parts say {total}")


async def cheats_get_nothing(case: Case) -> str:
    """Every known cheat is tried on every task and gets exactly 0."""
    if not case.cheats:
        raise Undeclared("no known cheat")
    for name, cheat in sorted(case.cheats.items()):
        for played in await case.play_all(case.tasks("train"), cheat):
            reward = played.outcome.reward
            need(reward == 0.0, f"{name}: gets {reward} for task {played.task.key[:8]}")
    return f"{len(case.cheats)} on {case.num_tasks} tasks: {', '.join(sorted(case.cheats))}"


CHECKS = (
    Check("oracle is right", Group.REFERENCE, oracle_is_right),
    Check("null gets nothing", Group.REFERENCE, null_gets_nothing),
    Check("random is below the oracle", Group.REFERENCE, random_is_below),
    Check("every end is graded", Group.REFERENCE, every_end_is_graded),
    Check("known cheats get nothing", Group.CHEATS, cheats_get_nothing),
)
