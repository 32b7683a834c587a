"""`k3rl sandbox`: what is enforced here, what runs, a shell inside, clearing up after the dead."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from k3rl.cli.backends import with_backend
from k3rl.cli.tables import plain_table
from k3rl.errors import UserInputError
from k3rl.sandboxes.base import SandboxBackend
from k3rl.sandboxes.conformance.check import BAD, Verdict, examine
from k3rl.sandboxes.conformance.suite import CHECKS
from k3rl.sandboxes.listing import live_sandboxes
from k3rl.sandboxes.scratch import reap, sandbox_identity
from k3rl.sandboxes.shell import Shell
from k3rl.sandboxes.spec import ENFORCED_BY_DEFAULT, Capability, SandboxSpec

app = typer.Typer(help="Check, enter, list and clear sandboxes.", no_args_is_help=True)
Kind = Annotated[str, typer.Option(help="As in sandbox.backend.")]
LINE_DEADLINE_S = 600.0


@app.command("check")
def check(
    backend: Kind = "bwrap",
    security: Annotated[
        bool, typer.Option("--security", help="Attack sandboxes instead, for about a minute.")
    ] = False,
) -> None:
    """Try what a backend enforces on this machine. Exit 1 when specs by default ask for more.

    With --security: exit 1 when an attack gets through or a check cannot be trusted.
    """
    if security:
        return _check_security(backend)
    found = asyncio.run(with_backend(backend, lambda made, _: made.capabilities()))
    table = plain_table(None, ["capability", "here", "by default"])
    for each in Capability:
        asked = "required" if each in ENFORCED_BY_DEFAULT else ""
        table.add_row(each, "enforced" if each in found else "MISSING", asked)
    Console(soft_wrap=True).print(table)
    if not set(ENFORCED_BY_DEFAULT) <= found:
        raise typer.Exit(1)
    return None


def _check_security(backend: str) -> None:
    findings = asyncio.run(with_backend(backend, lambda made, _: examine(made, CHECKS)))
    table = plain_table(None, ["check", "verdict", "needs"])
    for each in findings:
        table.add_row(each.name, each.verdict, each.needs or "")
    console = Console(soft_wrap=True)
    console.print(table)
    for each in findings:
        if each.verdict in (*BAD, Verdict.UNTRIED):
            console.print(f"{each.verdict}: {each.name}: {each.detail}", markup=False)
    if any(each.verdict in BAD for each in findings):
        raise typer.Exit(1)


@app.command("ps")
def ps() -> None:
    """List the live sandboxes of bwrap and landlock here; docker ps lists those of docker."""
    table = plain_table(None, ["pid", "owner"], ["uid", "age s", "processes", "MiB"])
    for each in live_sandboxes():
        owner = f"{each.owner} (dead)" if each.is_orphan else str(each.owner)
        numbers = (each.uid, f"{each.age_s:.0f}", each.num_processes, each.rss_bytes >> 20)
        table.add_row(str(each.pid), owner, *map(str, numbers))
    Console(soft_wrap=True).print(table)


@app.command("reap")
def reap_command(
    scratch: Annotated[Path, typer.Argument(help="A scratch folder, such as RUN/scratch.")],
) -> None:
    """Remove what dead owners left in a scratch folder, and end what they left running."""
    if not scratch.is_dir():
        raise UserInputError(f"{scratch}: no such folder")
    removed = reap(scratch, sandbox_identity())
    for name in removed:
        typer.echo(name)
    typer.echo(f"{len(removed)} removed")


@app.command("shell")
def shell(
    backend: Kind = "bwrap",
    folder: Annotated[
        Path | None, typer.Option(help="Its files are copied in first; nothing is copied out.")
    ] = None,
) -> None:
    """Run lines of standard input by bash in a fresh sandbox, until their end or `exit`."""
    files = {} if folder is None else _files_of(folder)

    async def serve(made: SandboxBackend, _: Path) -> None:
        box = await made.create(SandboxSpec(executables=("bash",)), files)
        session = Shell(made, box)
        while (line := await asyncio.to_thread(_next_line)) is not None:
            await _run_line(session, line)

    asyncio.run(with_backend(backend, serve))


def _next_line() -> str | None:
    if sys.stdin.isatty():
        print("$ ", end="", flush=True)
    line = sys.stdin.readline()
    return line if line and line.strip() != "exit" else None


async def _run_line(session: Shell, line: str) -> None:
    result = await session.run(line, deadline_s=LINE_DEADLINE_S)
    sys.stdout.buffer.write(result.stdout)
    sys.stderr.buffer.write(result.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if result.timed_out:
        typer.echo(f"killed after {LINE_DEADLINE_S:.0f} s", err=True)


def _files_of(folder: Path) -> dict[str, bytes]:
    if not folder.is_dir():
        raise UserInputError(f"{folder}: no such folder")
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}
