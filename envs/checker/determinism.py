"""Checks that the same comes out twice: in one process, in another, and grading again."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence

from k3rl.envs.checker.case import SPLITS, Broken, Case, Undeclared, difference, need, shorten
from k3rl.envs.checker.check import Check, Group
from k3rl.envs.checker.elsewhere import Request, digests, name_of
from k3rl.types import JSON, to_plain

NUM_REPEATED = 4
NUM_ELSEWHERE = 3
HASH_SEEDS = ("1", "2")


def _need_determinism(case: Case) -> None:
    if case.make().spec.nondeterministic:
        raise Undeclared("it is declared nondeterministic")


async def plays_are_deterministic(case: Case) -> str:
    """One seed twice: the same transcript, records and outcome, also at another time."""
    _need_determinism(case)
    names = [name for name in ("oracle", "random") if name in case.policies]
    if not names:
        raise Undeclared("no policy that could play")
    tasks = case.tasks("train", min(case.num_tasks, NUM_REPEATED))
    for name in names:
        first = await case.play_all(tasks, case.policies[name])
        second = [await case.play(task, case.policies[name]) for task in reversed(tasks)]
        for one, other in zip(first, reversed(second), strict=True):
            unlike = difference(one, other)
            need(not unlike, f"{name}, task {one.task.key[:8]}, played twice: {unlike}")
    return f"{len(tasks)} tasks twice by {' and '.join(names)}"


async def other_processes_agree(case: Case) -> str:
    """Processes with other hash seeds make the same tasks and play them the same."""
    _need_determinism(case)
    oracle = case.policies.get("oracle")
    request = Request(
        to_plain(case.make().spec),
        name_of(oracle) if oracle else "",
        case.backend_kind,
        NUM_ELSEWHERE,
        case.seed,
        tuple(path for path in sys.path if path),
    )
    here = await digests(request, case.backend)
    for seed in HASH_SEEDS:
        there = await _ask(request, seed)
        for split in SPLITS:
            for index, (one, other) in enumerate(zip(here[split], there[split], strict=True)):
                _compare(f"{split} {index}, PYTHONHASHSEED={seed}", one, other)
        _compare(f"tools, PYTHONHASHSEED={seed}", {"tools": here["tools"]}, there)
    played = "played" if request.oracle else "not played: the oracle has no module and name"
    return f"{2 * NUM_ELSEWHERE} tasks in {len(HASH_SEEDS)} other processes, {played}"


def _compare(where: str, one: dict[str, JSON], other: dict[str, JSON]) -> None:
    for key in one:
        unlike = f"{shorten(str(one[key]))} / {shorten(str(other[key]))}"
        need(one[key] == other[key], f"{where}: {key}: {unlike}")


async def _ask(request: Request, hash_seed: str) -> dict[str, list[dict[str, JSON]]]:
    argv: Sequence[str] = (sys.executable, "-m", "k3rl.envs.checker.elsewhere")
    paths = os.pathsep.join(request.paths)
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": paths},
    )
    try:
        out, err = await process.communicate(json.dumps(to_plain(request)).encode())
    except BaseException:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        last = err.decode(errors="replace").strip().rpartition("\n")[2]
        raise Broken(f"another process cannot make or play it: {last}")
    found: dict[str, list[dict[str, JSON]]] = json.loads(out)
    return found


async def grading_is_repeatable(case: Case) -> str:
    """A final state is graded the same again."""
    _need_determinism(case)
    names = [name for name in ("oracle", "random", "null") if name in case.policies]
    for name in names:
        async with case.session() as session:
            first = await session.carry_on(case.policies[name])
            second = await session.env.grade()
            need(first == second, f"{name}: {first.reward_parts} / {second.reward_parts}")
    return f"final states of {', '.join(names)}"


CHECKS = (
    Check("plays are deterministic", Group.DETERMINISM, plays_are_deterministic),
    Check("other processes agree", Group.DETERMINISM, other_processes_agree),
    Check("grading is repeatable", Group.DETERMINISM, grading_is_repeatable),
)
