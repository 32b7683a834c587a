"""`k3rl bench`: timings of real parts on this machine, each beside its bar."""

from __future__ import annotations

import asyncio
import resource
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from k3rl.cli.backends import with_backend
from k3rl.cli.tables import plain_table
from k3rl.errors import UserInputError
from k3rl.sandboxes.base import SandboxBackend
from k3rl.sandboxes.bench import Idle, idle, measure
from k3rl.sandboxes.soak import soak
from k3rl.sandboxes.spec import MIB

app = typer.Typer(help="Timings of real parts on this machine.", no_args_is_help=True)
Kind = Annotated[str, typer.Option(help="The kind of backend, as in sandbox.backend.")]


@app.callback()
def main() -> None:
    """Timings of real parts on this machine."""


@app.command("sandbox")
def sandbox(
    backend: Kind = "bwrap",
    runs: Annotated[int, typer.Option(help="Of each quantity; medians are printed.", min=1)] = 30,
) -> None:
    """Time a sandbox backend. Exit 1 when a median is beyond its bar."""
    timings = asyncio.run(with_backend(backend, lambda made, _: measure(made, runs)))
    table = plain_table(f"{backend}, medians of {runs} (ms)", ["what"], ["median", "worst", "bar"])
    for each in timings:
        bar = "" if each.bar_s == float("inf") else f"{each.bar_s * 1e3:g}"
        mark = "" if each.is_met else " missed"
        table.add_row(
            each.name, f"{each.median_s * 1e3:.2f}", f"{each.worst_s * 1e3:.2f}", bar + mark
        )
    Console(soft_wrap=True).print(table)
    if not all(each.is_met for each in timings):
        raise typer.Exit(1)


@app.command("sandbox-idle")
def sandbox_idle(
    backend: Kind = "bwrap",
    count: Annotated[int, typer.Option(help="Sandboxes alive at once.", min=1)] = 500,
) -> None:
    """Have many sandboxes alive at once, and tell what they take."""

    async def work(made: SandboxBackend, _: Path) -> Idle:
        return await idle(made, count)

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    found = asyncio.run(with_backend(backend, work))
    typer.echo(
        f"{backend}: {found.count} alive after {found.start_s:.1f} s,"
        f" {found.num_bytes / found.count / MIB:.1f} MiB each,"
        f" a command {found.command_s * 1e3:.2f} ms (median)"
    )


@app.command("sandbox-soak")
def sandbox_soak(
    backend: Kind = "bwrap",
    cycles: Annotated[int, typer.Option(help="Sandboxes to create.", min=1)] = 2000,
    seed: Annotated[int, typer.Option(help="Of the moments of the kills.")] = 0,
) -> None:
    """Kill the owners of sandboxes at random moments. Exit 1 when anything is left of one."""
    with tempfile.TemporaryDirectory(prefix="k3rl-soak-") as folder:
        found = soak(backend, Path(folder), cycles, seed)
    seen = ", ".join(f"{kind} {count}" for kind, count in sorted(found.seen.items()))
    typer.echo(
        f"{backend}: {found.num_created} created, {found.num_kills} owners killed"
        f" (right behind a kill the census saw: {seen or 'nothing'}),"
        f" {sum(map(len, found.leaked))} leaked"
    )
    for census in found.leaked:
        typer.echo(str(census))
    if found.leaked:
        raise typer.Exit(1)


@app.command("envs")
def envs(
    env: Annotated[str, typer.Option(help="Id of the environment.")] = "k3rl/FileHunt-v0",
    num_tasks: Annotated[int, typer.Option(help="Tasks to play, each once.", min=1)] = 64,
    concurrency: Annotated[int, typer.Option(help="Sessions at a time.", min=1)] = 64,
    policy: Annotated[str, typer.Option(help="Which scripted policy plays.")] = "oracle",
    split: Annotated[str, typer.Option(help="Of the tasks.")] = "train",
    backend: Kind = "bwrap",
) -> None:
    """Play an environment's tasks side by side. Exit 1 when anything failed or is beyond its bar.

    The round trip is what a turn takes beyond its tools.
    """
    from k3rl.envs.bench import OVERHEAD_BAR_S, Figures
    from k3rl.envs.bench import measure as measure_envs

    async def work(made: SandboxBackend, _: object) -> Figures:
        return await measure_envs(made, env, num_tasks, concurrency, policy, split)

    found = asyncio.run(with_backend(backend, work))
    rows = {
        "wall": (f"{found.wall_s:.2f} s", ""),
        "tasks per second": (f"{found.num_tasks / found.wall_s:.1f}", ""),
        "solved": (f"{found.num_solved} of {found.num_tasks}", ""),
        "faults of the infrastructure": (str(found.num_infra_faults), "0"),
        "other faults": (str(found.num_other_faults), "0"),
        "sandboxes left behind": (str(found.num_left_behind), "0"),
        "round trip, p50": (
            f"{found.overhead_s(0.5) * 1e3:.3f} ms",
            f"{OVERHEAD_BAR_S * 1e3:g} ms",
        ),
        "round trip, p95": (f"{found.overhead_s(0.95) * 1e3:.3f} ms", ""),
    }
    table = plain_table(f"{env}, {policy}, {concurrency} at a time", ["what"], ["measured", "bar"])
    for name, (value, bar) in rows.items():
        table.add_row(name, value, bar)
    Console(soft_wrap=True).print(table)
    if not found.is_met:
        raise typer.Exit(1)


@app.command("store")
def store(
    only: Annotated[
        list[str] | None, typer.Option(help="Parts to time; all when left out.")
    ] = None,
) -> None:
    """Time and measure the trajectory store, fsync on, each quantity beside its bar."""
    from k3rl.store.bench import PARTS
    from k3rl.store.bench import measure as measure_store

    unknown = [name for name in only or () if name not in PARTS]
    if unknown:
        raise UserInputError(f"bench store: {unknown[0]} is none of {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory(prefix="k3rl-bench-") as folder:
        found = asyncio.run(measure_store(Path(folder), only or list(PARTS)))
    table = plain_table("trajectory store", ["what"], ["measured", "limit", "unit"])
    for each in found:
        sign = ">=" if each.is_rate else "<="
        mark = "" if each.is_met else " missed"
        value = "-" if each.value is None else f"{each.value:.4g}"
        table.add_row(each.name, value, f"{sign} {each.bar:g}{mark}", each.unit)
    Console(soft_wrap=True).print(table)
