"""`k3rl replay`: run a stored trajectory's tool calls again and compare."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
from rich.console import Console

from k3rl.cli.runs import RunOption, find_run
from k3rl.replay.verify import ReplayReport


def replay(
    trajectory: Annotated[list[str], typer.Argument(help="Ids, or unambiguous prefixes of ids.")],
    run: RunOption = None,
) -> None:
    """Re-run every tool call from the first snapshot in a fresh sandbox; exit 1 on a divergence."""
    reports = asyncio.run(_replay_all(trajectory, run))
    console = Console()
    for report in reports:
        show(report, console)
    if not all(report.is_identical for report in reports):
        raise typer.Exit(1)


async def _replay_all(ids: list[str], run: RunOption) -> list[ReplayReport]:
    from k3rl.replay.verify import replay as replay_one
    from k3rl.rollout.worker import make_backend, make_renderer, make_session, sandbox_spec
    from k3rl.store.reader import StoreReader

    folder, settings = find_run(run)
    reader = StoreReader(folder / "store")
    backend, renderer = make_backend(settings), make_renderer(settings)
    reports = []
    try:
        for id in ids:
            env = make_session(settings, reader.get(id).header.task)
            spec = sandbox_spec(settings, env)
            reports.append(await replay_one(reader, id, env, backend, spec, renderer))
    finally:
        await backend.aclose()
    return reports


def show(report: ReplayReport, console: Console) -> None:
    """One line per step, the differences below it."""
    trajectory = report.trajectory
    calls = sum(verdict.num_calls for verdict in report.verdicts)
    for verdict in report.verdicts:
        word = "differs" if verdict.differences else "identical"
        line = f"  step {verdict.step}: {verdict.num_calls} calls: {word}"
        console.print(line, markup=False, highlight=False)
        for difference in verdict.differences:
            console.print(f"    {difference}", markup=False, highlight=False)
    divergence = report.first_divergence
    word = "identical" if divergence is None else f"divergent at step {divergence.step}"
    console.print(
        f"{trajectory.id} {trajectory.header.task.env_id}: {len(report.verdicts)} steps,"
        f" {calls} calls: {word}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
