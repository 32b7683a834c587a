"""`k3rl train`: run a config to its end, or carry on where an earlier run of it stopped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import typer
from rich.console import Console

from k3rl import config as configs
from k3rl.cli.launching import ConfigFile, DryRun, Overrides, check_envs, claim_folder, run
from k3rl.cli.tables import plain_table
from k3rl.config import Config
from k3rl.controller import Summary
from k3rl.evaluation import Score
from k3rl.groups import is_success
from k3rl.types import OutcomeKind, Trajectory, TrajectoryState

FAULTS = (OutcomeKind.INFRA_FAULT, OutcomeKind.GRADER_FAULT)


def train(config: ConfigFile, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    """Play the config's environments into its store and train on what was played."""
    settings = configs.load(config, overrides or [])
    if dry_run:
        typer.echo(settings.to_yaml(), nl=False)
        return
    console = Console()
    check_envs(settings)
    claim_folder(settings)
    summary = run(settings, console)
    report(settings, summary, console)


def report(settings: Config, summary: Summary, console: Console) -> None:
    """Print what was played, per environment, script and level."""
    title = f"{settings.run_folder}: {summary.num_iterations} iterations"
    numbers = ["played", "solved", "reward", "tokens", "turns"]
    table = plain_table(title, ["environment", "level", "policy"], numbers)
    rows: dict[tuple[str, str, str], list[Trajectory]] = defaultdict(list)
    is_scripted = settings.engine.kind == "scripted"
    for trajectory in summary.trajectories:
        if trajectory.outcome is not None:
            key = trajectory.header.key
            scripts = settings.engine.policies
            policy = scripts[key.sample_index % len(scripts)] if is_scripted else "K3"
            rows[trajectory.header.task.env_id, key.level, policy].append(trajectory)
    for names, played in sorted(rows.items()):
        table.add_row(*names, *_cells(played))
    if rows:
        console.print(table)
    unfinished = [t for t in summary.trajectories if t.outcome is None]
    paused = sum(t.state is TrajectoryState.PAUSED for t in unfinished)
    stats = summary.stats
    outcomes = [t.outcome for t in summary.trajectories if t.outcome]
    faults = sum(outcome.kind in FAULTS for outcome in outcomes)
    console.print(
        f"{stats.num_tokens} tokens stored, {len(unfinished)} trajectories unfinished"
        f" ({paused} paused), {faults} infrastructure faults,"
        f" {summary.num_restarts} worker restarts, {stats.num_index_rebuilds} index rebuilds,"
        f" {summary.wall_s:.1f} s"
    )
    report_scores(summary.evaluations, console)
    if settings.algorithm == "none":
        console.print("algorithm: none - trajectories were played and stored, nothing was trained")


def report_scores(evaluations: Mapping[int, Sequence[Score]], console: Console) -> None:
    """Print evaluations, one row per environment, level and law."""
    for iteration, found in sorted(evaluations.items()):
        title = f"evaluation before iteration {iteration} (95 % interval)"
        k = max((score.k for score in found), default=1)
        numbers = ["tasks", "success", "interval", f"pass@{k}", "tokens"]
        table = plain_table(title, ["environment", "level", "T"], numbers)
        for score in found:
            table.add_row(
                score.env_id,
                score.level,
                f"{score.temperature:g}",
                str(score.num_tasks),
                f"{score.success:.3f}",
                f"{score.low:.3f}-{score.high:.3f}",
                f"{score.pass_at_k:.3f}",
                f"{score.num_tokens:.1f}",
            )
        console.print(table)


def _cells(played: list[Trajectory]) -> list[str]:
    outcomes = [t.outcome for t in played if t.outcome]
    rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
    count = len(played)

    def mean(values: Iterable[float]) -> float:
        return sum(values) / max(count, 1)

    return [
        str(count),
        f"{sum(map(is_success, outcomes)) / max(len(rewards), 1):.2f}",
        f"{sum(rewards) / max(len(rewards), 1):.2f}",
        f"{mean(t.num_tokens for t in played):.0f}",
        f"{mean(len(t.steps) - 1 for t in played):.1f}",
    ]
