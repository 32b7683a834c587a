"""`k3rl traj export` and `import`: one trajectory with its snapshots as one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3rl.cli.runs import RootArgument, store_root
from k3rl.sandboxes.files.layers import large_files

if TYPE_CHECKING:
    from k3rl.store.exchange import Report


def export_command(
    root: RootArgument,
    trajectory: Annotated[str, typer.Argument(help="An id, or an unambiguous prefix of one.")],
    file: Annotated[Path, typer.Argument(help="A new file; by custom it ends in .k3t.")],
) -> None:
    """Write a finished trajectory, its snapshots and their files to one checked file."""
    from k3rl.store.exchange import export_trajectory

    report = export_trajectory(store_root(root), trajectory, file, large_files)
    typer.echo(f"{file}: {_summary(report)}, {report.num_bytes} bytes")


def import_command(
    root: RootArgument,
    file: Annotated[Path, typer.Argument(help="What `traj export` wrote.")],
) -> None:
    """Take an exported trajectory into a store; a folder that is empty or missing becomes one."""
    from k3rl.store.exchange import import_trajectory

    place = store_root(root)
    report = import_trajectory(place, file, large_files)
    word = "added" if report.is_new else "was there already"
    typer.echo(f"{place}: {_summary(report)}: {word}")


def _summary(report: Report) -> str:
    return (
        f"trajectory {report.id}, {report.num_tokens} tokens, {report.num_steps} steps, "
        f"{report.num_snapshots} snapshots, {report.num_blobs} blobs"
    )
