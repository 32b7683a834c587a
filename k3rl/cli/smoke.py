"""`k3rl smoke`: fine-tuning and reinforcement learning with every part real, and what came out.

A few fine-tuning steps from the shipped cold start (or, with `--scratch`, all of them from random
weights), then a run with Ray actors, an embedded Valkey, sandboxes, store and partial rollouts. One
rollout worker is SIGKILLed in the middle of an iteration. Exit status 0 only if every check holds.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import psutil
import typer
from rich.console import Console

from k3rl import config as configs
from k3rl.cli import sft as fine_tuning
from k3rl.cli import smoke_checks as checks
from k3rl.cli.launching import check_envs, claim_folder, run
from k3rl.cli.train import report
from k3rl.config import Config
from k3rl.controller import Progress, Summary
from k3rl.errors import UserInputError
from k3rl.view.report import Check, write_report

if TYPE_CHECKING:
    from k3rl.actors import RayWorker
    from k3rl.cluster import Parts

SFT_CONFIG, RL_CONFIG = Path("configs/nano_sft.yaml"), Path("configs/smoke.yaml")
COLD_START = Path("tests/data/k3_nano_sft.safetensors")
FEW_STEPS = (
    "cluster.backend=local",
    "sft.num_steps=8",
    "sft.warmup_steps=0",
    "sft.log_every=4",
    "sft.batch_tokens=4096",
    "rollout.num_groups=2",
    "rollout.group_size=4",
    "optimiser.matrix_lr=0.0002",
    "optimiser.vector_lr=0.0002",
)
"""The path is proven, the loss falls; one batch holds about all demonstrations."""
TASKS_PER_SEED = 1000
"""Every seed has tasks of its own, to train on and to be judged by."""
KILL_ITERATION = 2
KILL_FRACTION = 0.3
"""Of the iteration's trajectories that have finished when a worker is killed."""
MEMORY_EVERY_S = 4.0


@dataclass(slots=True)
class Killer:
    """SIGKILLs one rollout worker, once, in the middle of an iteration."""

    pid: int | None = None
    """Of the worker that was killed."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def watch(self, now: Progress, parts: Parts) -> None:
        """Look at a progress report; called inside the controller's event loop."""
        is_time = now.phase == "rollout" and now.iteration == KILL_ITERATION
        if is_time and not self.tasks and now.num_finished >= KILL_FRACTION * now.num_target:
            self.tasks.append(
                asyncio.ensure_future(self._kill(cast("RayWorker", parts.workers[0])))
            )

    async def _kill(self, worker: RayWorker) -> None:
        self.pid = await worker.pid()
        os.kill(self.pid, signal.SIGKILL)


class MemoryMeter(threading.Thread):
    """Peak memory of this process and all its descendants, shared pages counted once."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self._is_over = threading.Event()

    def run(self) -> None:
        """Look every MEMORY_EVERY_S seconds."""
        while not self._is_over.wait(MEMORY_EVERY_S):
            self.peak_bytes = max(self.peak_bytes, _tree_bytes())

    def stop(self) -> None:
        """Stop looking."""
        self._is_over.set()


def smoke(
    seed: Annotated[int, typer.Option(help="Of the demonstrations, of sampling and tasks.")] = 0,
    scratch: Annotated[
        bool, typer.Option("--scratch", help="Fine-tune from random weights first.")
    ] = False,
    control: Annotated[
        bool,
        typer.Option("--control", help="Permute rewards in groups: nothing to learn."),
    ] = False,
    folder: Annotated[Path, typer.Option(help="Where the runs go.")] = Path("runs"),
) -> None:
    """Fine-tune, train by reinforcement, and check what came out. Exit 1 when a check fails."""
    began = time.monotonic()
    for path in (SFT_CONFIG, RL_CONFIG, *([] if scratch else [COLD_START])):
        if not path.exists():
            raise UserInputError(f"{path}: no such file; run it from the repository's root")
    console = Console()
    meter, killer = MemoryMeter(), Killer()
    meter.start()
    name = f"smoke-{seed}" + "-scratch" * scratch + "-control" * control
    weights = _fine_tune(console, folder, name, seed, scratch)
    settings, summary = _train(console, folder, name, seed, control, weights, killer)
    meter.stop()
    found = [checks.sft_loss_falls(weights.parent)]
    found += checks.training(settings)
    if control:
        found += checks.control(summary)
    else:
        found += checks.learning(summary)
        found += checks.machinery(settings, summary, killer.pid)
    limits = (checks.SCRATCH_LIMIT_S if scratch else checks.LIMIT_S), checks.MEMORY_LIMIT_BYTES
    found += checks.resources(time.monotonic() - began, meter.peak_bytes, *limits)
    show(console, found)
    page = write_report(settings.run_folder, f"k3rl smoke, seed {seed}", found)
    console.print(f"{page}")
    if not all(check.is_met for check in found):
        raise typer.Exit(1)


def _fine_tune(console: Console, folder: Path, name: str, seed: int, scratch: bool) -> Path:
    """The weights that reinforcement learning starts from."""
    overrides = [f"run.name={name}-sft", f"run.folder={folder}", f"seed={seed}"]
    if not scratch:
        overrides += [f"policy.checkpoint={COLD_START}", *FEW_STEPS]
    settings = configs.load(SFT_CONFIG, overrides)
    shutil.rmtree(settings.run_folder, ignore_errors=True)
    return fine_tuning.run(settings, console)


def _train(
    console: Console,
    folder: Path,
    name: str,
    seed: int,
    control: bool,
    weights: Path,
    killer: Killer,
) -> tuple[Config, Summary]:
    overrides = [f"run.name={name}", f"run.folder={folder}", f"seed={seed}"]
    overrides += [f"policy.checkpoint={weights}", f"objective.permute_rewards={control}"]
    first = seed * TASKS_PER_SEED
    overrides += [f"curriculum.first_task={first}", f"evaluation.first_task={first}"]
    settings = configs.load(RL_CONFIG, overrides)
    shutil.rmtree(settings.run_folder, ignore_errors=True)
    check_envs(settings)
    claim_folder(settings)
    summary = run(settings, console, killer.watch)
    report(settings, summary, console)
    return settings, summary


def show(console: Console, found: list[Check]) -> None:
    """Print the checks, one line each."""
    for check in found:
        mark = "ok  " if check.is_met else "FAIL"
        line = f"{mark} {check.name}: {check.value}   (bar: {check.bar})"
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _tree_bytes() -> int:
    """Proportional set size (a page shared by n processes counts 1/n in each) of the whole tree."""
    total = 0
    this = psutil.Process()
    for process in [this, *this.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total
