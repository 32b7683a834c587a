"""`k3rl traj compact`, `gc`, `pin` and `unpin`: a store by itself, without any service running."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3rl.cli.runs import RootArgument, find_run, store_root
from k3rl.sandboxes.files.layers import large_files

if TYPE_CHECKING:
    from k3rl.store.upkeep import Policy

NameArgument = Annotated[str, typer.Argument(help="The name of the pin.")]


def compact(
    root: RootArgument,
    level: Annotated[int, typer.Option(min=1, max=19, help="zstd level.")] = 9,
    min_batches: Annotated[
        int, typer.Option(min=2, help="Leave alone when there are fewer small batches.")
    ] = 2,
) -> None:
    """Write small sealed batches again as few large ones; what is read and drawn stays the same."""
    from k3rl.store.compaction import Limits
    from k3rl.store.offline import compact_root

    place = store_root(root)
    count = compact_root(place, Limits(min_batches=min_batches, level=level))
    typer.echo(f"{place}: {count} batches written again")


def gc(
    root: RootArgument,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would go; nothing is written.")
    ] = False,
    keep_updates: Annotated[
        int | None, typer.Option(min=1, help="Keep the trajectories of so many updates.")
    ] = None,
    max_age: Annotated[
        float | None, typer.Option(min=0, help="Keep what was sealed within so many seconds.")
    ] = None,
    max_bytes: Annotated[
        int | None, typer.Option(min=0, help="Keep so many bytes of sealed files, the newest.")
    ] = None,
    untrained: Annotated[
        bool, typer.Option("--untrained", help="Rewarded ones that no update named may go too.")
    ] = False,
    grace: Annotated[
        float | None, typer.Option(min=0, help="Seconds that garbage stays; default: the run's.")
    ] = None,
) -> None:
    """Let go what the retention policy lets go, and delete what nothing needs any more.

    The policy is that of the run's config; options change it. Without either only garbage goes.
    """
    from k3rl.store.offline import collect_root, preview
    from k3rl.store.retention import Retention

    place, policy = store_root(root), _policy(root)
    old = policy.retention
    kept = Retention(
        old.keep_updates if keep_updates is None else keep_updates,
        old.max_age_s if max_age is None else max_age,
        old.max_bytes if max_bytes is None else max_bytes,
        untrained or old.untrained,
    )
    policy = replace(policy, retention=kept, grace_s=policy.grace_s if grace is None else grace)
    report = (preview if dry_run else collect_root)(place, policy)
    for line in report.lines():
        typer.echo(f"would be {line}" if dry_run else line)
    if dry_run:
        for id, num_bytes in report.dropped.items():
            typer.echo(f"trajectory {id} {int(num_bytes)} bytes")
        for name, num_bytes in (*report.files.items(), *report.blobs.items()):
            typer.echo(f"{name} {num_bytes} bytes")


def pin(root: RootArgument, name: NameArgument) -> None:
    """Keep all that is sealed now, whatever the retention policy says, until `traj unpin`."""
    from k3rl.store.offline import pin_root

    place = store_root(root)
    typer.echo(f"{place}: record {pin_root(place, name)} is pinned as {name}")


def unpin(root: RootArgument, name: NameArgument) -> None:
    """Let go of what a pin keeps."""
    from k3rl.store.offline import unpin_root

    unpin_root(store_root(root), name)


def _policy(root: Path) -> Policy:
    from k3rl.store.host import policy_of
    from k3rl.store.upkeep import Policy

    run = root.parent if root.name == "store" else root
    if not (run / "config.yaml").exists():
        return Policy(references=large_files)
    _, config = find_run(run)
    return policy_of(config, large_files)
