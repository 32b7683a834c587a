"""`k3rl traj`: look at stored trajectories, and check the store, without any service running."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from k3rl.cli import exchange, sql, upkeep
from k3rl.cli.runs import RunOption, find_run
from k3rl.cli.tables import plain_table
from k3rl.sandboxes.files.layers import large_files
from k3rl.store.protocol import Ref, check_digests
from k3rl.store.reader import StoreReader
from k3rl.types import Step, Trajectory

app = typer.Typer(help="Stored trajectories.", no_args_is_help=True)
app.command("sql")(sql.sql)
app.command("export")(exchange.export_command)
app.command("import")(exchange.import_command)
app.command("compact")(upkeep.compact)
app.command("gc")(upkeep.gc)
app.command("pin")(upkeep.pin)
app.command("unpin")(upkeep.unpin)


@app.command("ls")
def ls(
    run: RunOption = None,
    env: Annotated[str | None, typer.Option(help="Only this environment id.")] = None,
    outcome: Annotated[str | None, typer.Option(help="Only this outcome or state.")] = None,
    limit: Annotated[int, typer.Option(help="At most so many rows; 0: all.")] = 50,
) -> None:
    """List trajectories: id, task, level, state, reward, tokens, steps."""
    folder, _ = find_run(run)
    rows = [t for t in StoreReader(folder / "store").trajectories() if _matches(t, env, outcome)]
    names = ["id", "environment", "level", "group", "state"]
    title = f"{folder}: {len(rows)} trajectories"
    table = plain_table(title, names, ["reward", "tokens", "steps"])
    for trajectory in rows[: limit or None]:
        table.add_row(*_row(trajectory))
    Console().print(table)
    if limit and len(rows) > limit:
        typer.echo(f"{len(rows) - limit} more; --limit 0 shows all")


@app.command("show")
def show(
    trajectory: Annotated[str, typer.Argument(help="An id, or an unambiguous prefix of one.")],
    run: RunOption = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Also print the token text.")] = False,
) -> None:
    """Show one trajectory: header, steps with their tool calls, outcome."""
    from k3rl.rollout.worker import make_renderer

    folder, settings = find_run(run)
    reader = StoreReader(folder / "store")
    found = reader.get(trajectory)
    console = Console()
    for line in _head(found):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for step in found.steps:
        for line in _step_lines(step):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if found.outcome:
        line = f"outcome {found.outcome.kind} reward {found.outcome.reward}"
        console.print(line, found.outcome.reward_parts, found.outcome.detail, markup=False)
    if tokens:
        renderer = make_renderer(settings)
        check_digests(found.header, {"tokenizer": renderer.digest})
        for context in range(found.num_contexts):
            ids = reader.read(Ref(found.id, context=context), ("token_ids",)).token_ids.tolist()
            console.print(renderer.tokenizer.decode(ids), markup=False, highlight=False)


@app.command("fsck")
def fsck(
    store: Annotated[Path | None, typer.Argument(help="A store root; default: the run's.")] = None,
    run: RunOption = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Move what is broken to quarantine/.")
    ] = False,
    ledger: Annotated[
        Path | None, typer.Option(help="Compare with the ledgers in this folder.")
    ] = None,
) -> None:
    """Check every hash of a store; exit 1 when something is broken."""
    from k3rl.store.fsck import check, compare_ledger

    root = store or find_run(run)[0] / "store"
    report = check(root, repair=repair, references=large_files)
    for finding in report.findings:
        typer.echo(str(finding))
    typer.echo(report.summary())
    is_broken = bool(report.findings)
    if ledger is not None:
        comparison = compare_ledger(root, ledger)
        typer.echo(comparison.summary())
        is_broken = is_broken or not comparison.is_exact
    if is_broken:
        raise typer.Exit(1)


def _matches(trajectory: Trajectory, env: str | None, outcome: str | None) -> bool:
    state = trajectory.outcome.kind if trajectory.outcome else trajectory.state
    return env in (None, trajectory.header.task.env_id) and outcome in (None, str(state))


def _row(trajectory: Trajectory) -> list[str]:
    key, outcome = trajectory.header.key, trajectory.outcome
    return [
        trajectory.id[:12],
        trajectory.header.task.env_id,
        key.level,
        f"{key.group_index}.{key.sample_index}",
        str(outcome.kind if outcome else trajectory.state),
        "" if outcome is None or outcome.reward is None else f"{outcome.reward:g}",
        str(trajectory.num_tokens),
        str(len(trajectory.steps)),
    ]


def _head(trajectory: Trajectory) -> list[str]:
    header = trajectory.header
    key = header.key
    lines = [
        f"trajectory {trajectory.id}",
        f"task {header.task.env_id} {header.task.split} seed {header.task.seed} key {key.task_key}",
        f"run {key.run_id} level {key.level} group {key.group_index} sample {key.sample_index}"
        f" attempt {key.attempt} iteration {header.iteration}",
        f"tokens {trajectory.num_tokens}, sampled {trajectory.num_policy_tokens}",
        f"enforced {', '.join(header.capabilities)}",
    ]
    if header.parent:
        lines.append(f"parent {header.parent.id} at token {header.parent.token_offset}")
    return lines


def _step_lines(step: Step) -> list[str]:
    head = f"step {step.index}: tokens {step.token_start}-{step.token_end}"
    tree = (step.tree_digest or "")[:12]
    seconds = {"generate": step.generate_s, "act": step.act_s, "snapshot": step.snapshot_s}
    times = ", ".join(f"{name} {value:.3f} s" for name, value in seconds.items())
    lines = [f"{head}, tree {tree}, {times}"]
    for record in step.calls:
        call = f"{record.call.tool}({record.call.arguments})"
        lines.append(f"  {record.call.index}. {call} -> {record.status}: {record.output!r}")
    return lines
