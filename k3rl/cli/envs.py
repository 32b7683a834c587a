"""`k3rl envs`: which environments there are, what they are, whether they keep their contract."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from k3rl.cli.backends import with_backend
from k3rl.cli.envs_play import Prompted, Shown, print_outcome
from k3rl.cli.tables import plain_table
from k3rl.errors import EnvError, UserInputError

app = typer.Typer(help="Tool environments.", no_args_is_help=True)
Kind = Annotated[str, typer.Option(help="As in sandbox.backend.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
LIST_WIDTH = 1000
"""Columns: nothing of a list is cut off, it is as wide as what it lists."""
EnvId = Annotated[str, typer.Argument(help="Such as k3rl/FileHunt-v0.")]


@app.command("list")
def list_envs() -> None:
    """List registered environments: their tools, where they come from, their policies."""
    from k3rl.envs import registry

    table = plain_table(None, ["id", "tools", "package", "policies"])
    problems = registry.problems()
    for env_id in registry.names():
        try:
            tools = " ".join(tool.name for tool in registry.make(env_id).tools)
        except EnvError as error:
            tools = "-"
            problems.append(str(error))
        policies = " ".join(registry.policies(env_id))
        table.add_row(env_id, tools, registry.package(env_id) or "-", policies or "-")
    Console(width=LIST_WIDTH).print(table)
    for problem in problems:
        print(f"warning: {problem}", file=sys.stderr)


@app.command("show")
def show(env_id: EnvId, backend: Kind = "bwrap", as_json: AsJson = False) -> None:
    """Show what an environment is: settings, tools, limits, policies, a task's first messages."""
    from k3rl.cli.envs_show import describe, print_described

    found = asyncio.run(with_backend(backend, lambda made, _: describe(env_id, made)))
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        print_described(found)


@app.command("check")
def check(
    env_ids: Annotated[list[str] | None, typer.Argument(help="Ids; or --all.")] = None,
    is_all: Annotated[bool, typer.Option("--all", help="Every registered one.")] = False,
    backend: Kind = "bwrap",
    num_tasks: Annotated[int, typer.Option(min=1, help="Of each split.")] = 8,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    only: Annotated[list[str] | None, typer.Option(help="A check by name; repeatable.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check that environments keep their contract. Exit 1 when one does not."""
    from k3rl.envs import registry
    from k3rl.envs.checker.suite import checks_named

    checks = checks_named(only or ())
    if bool(env_ids) == is_all:
        raise UserInputError("envs check: name environments, or --all")
    chosen = registry.names() if is_all else list(env_ids or ())
    for env_id in chosen:
        registry.spec(env_id)
    problems = registry.problems() if is_all else []
    found = {}
    for env_id in chosen:
        options = (num_tasks, seed, checks)
        found[env_id] = asyncio.run(with_backend(backend, _checking(env_id, backend, *options)))
        if not as_json:
            _print_findings(env_id, found[env_id])
    if as_json:
        plain = {env_id: [_plain(each) for each in found[env_id]] for env_id in chosen}
        print(json.dumps({"envs": plain, "problems": problems}, indent=2))
    for problem in problems:
        print(f"warning: {problem}", file=sys.stderr)
    if problems or any(_is_bad(each) for findings in found.values() for each in findings):
        raise typer.Exit(1)


def _checking(env_id: str, kind: str, num_tasks: int, seed: int, checks: Any) -> Any:
    """The work of one environment, for `with_backend`."""
    from k3rl.envs.checker.suite import check_env

    return lambda made, folder: check_env(env_id, made, folder, kind, num_tasks, seed, checks)


def _print_findings(env_id: str, findings: list[Any]) -> None:
    from k3rl.envs.checker.check import Verdict

    table = plain_table(env_id, ["check", "verdict"], ["s"])
    for each in findings:
        table.add_row(each.check, each.verdict, f"{each.wall_s:.1f}")
    console = Console(soft_wrap=True)
    console.print(table)
    for each in findings:
        if each.verdict is not Verdict.PASSED:
            console.print(f"{each.verdict}: {each.check}: {each.detail}", markup=False)
    counts = Counter(str(each.verdict) for each in findings)
    summary = ", ".join(f"{num} {verdict}" for verdict, num in sorted(counts.items()))
    console.print(f"{env_id}: {summary}\n", markup=False, highlight=False)
    for line in _normalisers(env_id, findings):
        console.print(line, markup=False, highlight=False)


def _normalisers(env_id: str, findings: list[Any]) -> list[str]:
    from k3rl.envs import registry
    from k3rl.envs.checker.suite import CAN_BE_MADE

    if findings[0].check == CAN_BE_MADE:
        return []
    normalisers = registry.make(env_id).normalisers
    lines = [f"  {each.name}: {each.pattern} -> {each.replacement}" for each in normalisers]
    return [f"{len(lines)} normalisers", *lines, ""] if lines else []


def _is_bad(finding: Any) -> bool:
    from k3rl.envs.checker.check import BAD

    return finding.verdict in BAD


def _plain(finding: Any) -> dict[str, Any]:
    return {
        "check": finding.check,
        "group": str(finding.group),
        "verdict": str(finding.verdict),
        "detail": finding.detail,
        "wall_s": round(finding.wall_s, 3),
    }


@app.command("play")
def play(
    env_id: EnvId,
    policy: Annotated[str | None, typer.Option(help="A scripted one; without it, you.")] = None,
    split: Annotated[str, typer.Option(help="train or heldout.")] = "train",
    index: Annotated[int, typer.Option(min=0, help="Of the task in its split.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of the policy.")] = 0,
    backend: Kind = "bwrap",
) -> None:
    """Play a task and print it as it goes.

    Without a policy, each line of standard input is a turn: text is a message, `/tool {"arg": 1}`
    calls a tool. After the end of input every turn is an empty message.
    """
    from k3rl.envs import registry
    from k3rl.envs.play import play as play_task

    env = registry.make(env_id)
    task = env.task(split, index)
    shown = Shown(registry.policy(env_id, policy) if policy else Prompted(sys.stdin))
    played = asyncio.run(
        with_backend(backend, lambda made, _: play_task(env, task, shown, made, seed))
    )
    shown.show(played.transcript)
    print_outcome(played.outcome)


@app.command("new")
def new(
    name: Annotated[str, typer.Argument(help="Of the class, such as WordCount.")],
    namespace: Annotated[str, typer.Option(help="Before the slash of the id.")] = "local",
    folder: Annotated[Path, typer.Option(help="Where the package's folder is made.")] = Path("."),
) -> None:
    """Write a package that adds an environment: tests, oracle and README; it passes check."""
    from k3rl.envs.scaffolding import write_package

    made = write_package(name, namespace, folder)
    print(f"{made.folder}: written. Next:")
    print(f"  pip install --no-build-isolation --editable {made.folder}")
    print(f"  k3rl envs check {made.env_id}")
