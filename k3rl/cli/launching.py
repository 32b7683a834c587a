"""What every command that runs a config does: check it, claim its folder, launch it, watch it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from k3rl import config as configs
from k3rl.blobs import replace_file
from k3rl.config import Config
from k3rl.controller import Controller, Progress, Summary
from k3rl.errors import ConfigError

if TYPE_CHECKING:
    from k3rl.cluster import Parts

ConfigFile = Annotated[Path, typer.Argument(help="A YAML file of configs/.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="key.path=value, values in YAML syntax.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved config and stop.")]
Watch = Callable[[Progress, "Parts"], None]
"""Sees every progress report, with the parts of the run, inside the controller's event loop."""


def check_envs(settings: Config) -> None:
    """Fail before anything starts when something that the config names does not exist or fit."""
    from k3rl.envs import registry
    from k3rl.envs.harness.drawing import harnesses
    from k3rl.envs.harness.session import HarnessedEnv

    drawn = harnesses(settings.harness.model_dump(mode="json"))
    known: set[str] = set()
    for env in settings.envs:
        made = registry.make(env.id, reward=env.reward, **env.kwargs)
        known |= {tool.name for tool in made.tools}
        for harness in drawn:
            HarnessedEnv(made, harness)
        if settings.engine.kind == "scripted":
            for policy in settings.engine.policies:
                registry.policy(env.id, policy)
    for sub_agents in filter(None, (harness.sub_agents for harness in drawn)):
        for name in sorted(set(sub_agents.tools) - known):
            has = ", ".join(sorted(known))
            raise ConfigError(f"harness.sub_agents.tools: no tool {name}, there are: {has}")
    for key, path in settings.policy.model_dump(include={"model", "checkpoint"}).items():
        if settings.engine.kind == "native" and path and not Path(path).is_file():
            raise ConfigError(f"policy.{key}: {path}: no such file")


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


def run(settings: Config, console: Console, watch: Watch | None = None) -> Summary:
    """Launch the parts and the controller, with a progress bar on `console`."""
    with ProgressBar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("success {task.fields[success]:.2f}"),
        TimeElapsedColumn(),
        console=console,
    ) as bar:
        task = bar.add_task("starting", total=None, success=0.0)

        def update(now: Progress, parts: Parts) -> None:
            if watch is not None:
                watch(now, parts)
            place = f"iteration {now.iteration + 1}/{now.num_iterations}"
            bar.update(
                task,
                description="evaluation" if now.phase == "evaluation" else place,
                total=now.num_target or None,
                completed=min(now.num_finished, now.num_target),
                success=now.num_success / max(now.num_scored, 1),
            )

        try:
            return asyncio.run(_launched(settings, update))
        except KeyboardInterrupt:
            typer.echo("interrupted: the same command carries the run on", err=True)
            raise typer.Exit(130) from None


async def _launched(settings: Config, update: Watch) -> Summary:
    from k3rl.cluster import launch
    from k3rl.rollout.worker import make_backend, make_env, make_renderer

    backend = make_backend(settings)
    enforced = await backend.capabilities()
    await backend.aclose()
    digests = {"tokenizer": make_renderer(settings).digest}
    async with launch(settings) as parts:
        controller = Controller(
            settings,
            parts.store,
            parts.workers,
            parts.trainer,
            lambda env_id: make_env(settings, env_id),
            digests=digests,
            capabilities=tuple(sorted(enforced)),
            on_progress=lambda now: update(now, parts),
        )
        return await controller.run()
