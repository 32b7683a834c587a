"""`k3rl train`: run a config to its end, or carry on where an earlier run of it stopped."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from k3rl import config as configs
from k3rl.blobs import replace_file
from k3rl.cli.tables import plain_table
from k3rl.config import Config
from k3rl.controller import Controller, Summary
from k3rl.controller import Progress as RunProgress
from k3rl.errors import ConfigError
from k3rl.groups import is_success
from k3rl.types import OutcomeKind, Trajectory, TrajectoryState, digest_json

FAULTS = (OutcomeKind.INFRA_FAULT, OutcomeKind.GRADER_FAULT)


def train(
    config: Annotated[Path, typer.Argument(help="A YAML file, for example configs/debug/*.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key.path=value, values in YAML syntax.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved config and stop.")
    ] = False,
) -> None:
    """Play the config's environments into its store (algorithm: none trains nothing)."""
    settings = configs.load(config, overrides or [])
    if dry_run:
        typer.echo(settings.to_yaml(), nl=False)
        return
    console = Console()
    check_envs(settings)
    claim_folder(settings)
    summary = run(settings, console)
    report(settings, summary, console)


def check_envs(settings: Config) -> None:
    """Fail before anything starts when an environment or a script does not exist."""
    from k3rl.envs import registry

    for env in settings.envs:
        registry.make(env.id, **env.kwargs)
        for policy in settings.engine.policies:
            registry.policy(env.id, policy)


def claim_folder(settings: Config) -> None:
    """Make the run folder, or check that the run in it is this one, and write the config."""
    path = settings.run_folder / "config.yaml"
    if path.exists():
        earlier = configs.load(path)
        if earlier.identity != settings.identity:
            raise ConfigError(
                f"{path}: another run has this name; change run.name, or take its config"
            )
    try:
        settings.run_folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, settings.to_yaml())
    except OSError as error:
        raise ConfigError(f"{path}: cannot write: {error.strerror}") from None


def run(settings: Config, console: Console) -> Summary:
    """Launch the parts and the controller, with a progress bar on `console`."""
    from k3rl.cluster import launch
    from k3rl.rollout.worker import make_backend, make_env, make_renderer

    async def go() -> Summary:
        backend = make_backend(settings)
        enforced = await backend.capabilities()
        await backend.aclose()
        digests = {
            "tokenizer": make_renderer(settings).digest,
            "harness": digest_json(settings.harness.model_dump()),
        }
        async with launch(settings) as parts:
            controller = Controller(
                settings,
                parts.store,
                parts.workers,
                parts.learner,
                lambda env_id: make_env(settings, env_id),
                digests=digests,
                capabilities=tuple(sorted(enforced)),
                on_progress=update,
            )
            return await controller.run()

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("success {task.fields[success]:.2f}"),
        TimeElapsedColumn(),
        console=console,
    ) as bar:
        task = bar.add_task("starting", total=None, success=0.0)

        def update(now: RunProgress) -> None:
            bar.update(
                task,
                description=f"iteration {now.iteration + 1}/{now.num_iterations}",
                total=now.num_target or None,
                completed=min(now.num_finished, now.num_target),
                success=now.num_success / max(now.num_scored, 1),
            )

        try:
            return asyncio.run(go())
        except KeyboardInterrupt:
            typer.echo("interrupted: the same command carries the run on", err=True)
            raise typer.Exit(130) from None


def report(settings: Config, summary: Summary, console: Console) -> None:
    """Print what was played, per environment, script and level."""
    title = f"{settings.run_folder}: {summary.num_iterations} iterations"
    numbers = ["played", "solved", "reward", "tokens", "turns"]
    table = plain_table(title, ["environment", "level", "policy"], numbers)
    rows: dict[tuple[str, str, str], list[Trajectory]] = defaultdict(list)
    for trajectory in summary.trajectories:
        if trajectory.outcome is not None:
            key = trajectory.header.key
            policies = settings.engine.policies
            policy = policies[key.sample_index % len(policies)]
            rows[trajectory.header.task.env_id, key.level, policy].append(trajectory)
    for names, played in sorted(rows.items()):
        table.add_row(*names, *_cells(played))
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
    if not summary.trains:
        console.print("algorithm: none - trajectories were played and stored, nothing was trained")


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
