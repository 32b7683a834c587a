"""`k3rl sft`: play demonstrations, then fine-tune on those that were rewarded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from k3rl import config as configs
from k3rl import metrics
from k3rl.cli.launching import ConfigFile, DryRun, Overrides, check_envs, claim_folder
from k3rl.cli.launching import run as play
from k3rl.cli.train import report
from k3rl.config import Config
from k3rl.errors import ConfigError
from k3rl.groups import is_success
from k3rl.metrics import MetricsWriter
from k3rl.types import Trajectory

if TYPE_CHECKING:
    from k3rl.learner.sft import Demonstration
    from k3rl.model.model import K3Model

CHECKPOINT = "sft.safetensors"
"""What comes out, in the run folder."""
NUM_FIXED = 64
"""Demonstrations, the first ones, whose loss is taken before and after."""


def sft(config: ConfigFile, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    """Play demonstrations into the run's store, then imitate those that were rewarded."""
    settings = configs.load(config, overrides or [])
    if dry_run:
        typer.echo(settings.to_yaml(), nl=False)
        return
    run(settings, Console())


def run(settings: Config, console: Console) -> Path:
    """`k3rl sft` for a resolved config; returns the checkpoint."""
    check(settings)
    check_envs(settings)
    model = make_model(settings)
    claim_folder(settings)
    summary = play(settings, console)
    report(settings, summary, console)
    return imitate(settings, model, rewarded(settings, summary.trajectories), console)


def check(settings: Config) -> None:
    """Refuse a config that plays no demonstrations, or trains while it plays them."""
    if settings.engine.kind != "scripted":
        raise ConfigError(f"engine.kind: {settings.engine.kind}: demonstrations are scripted")
    if settings.algorithm != "none":
        raise ConfigError(f"algorithm: {settings.algorithm}: fine-tuning plays with none")


def make_model(settings: Config) -> K3Model:
    """The policy to start from. Raises ConfigError when the config names none, or one amiss."""
    from k3rl.model.checkpoint import first_model
    from k3rl.rollout.worker import make_renderer

    policy = settings.policy
    model = first_model(policy.checkpoint, policy.model, settings.seed)
    if model is None:
        raise ConfigError("policy: name a model or a checkpoint to fine-tune")
    num_ids = make_renderer(settings).tokenizer.vocab_size
    if model.config.vocab_size != num_ids:
        raise ConfigError(
            f"policy: the model has a vocabulary of {model.config.vocab_size},"
            f" the tokenizer of {num_ids}"
        )
    return model


def rewarded(settings: Config, trajectories: Sequence[Trajectory]) -> list[Demonstration]:
    """The tokens of the trajectories that solved their task, each context a demonstration."""
    from k3rl.learner.sft import Demonstration
    from k3rl.rollout.worker import make_renderer
    from k3rl.rollout.xtml import EFFORTS
    from k3rl.store.protocol import Ref, check_digests
    from k3rl.store.reader import StoreReader

    reader = StoreReader(settings.run_folder / "store")
    present = {"tokenizer": make_renderer(settings).digest}
    found = []
    for trajectory in trajectories:
        if is_success(trajectory.outcome):
            check_digests(trajectory.header, present)
            effort = EFFORTS.index(trajectory.header.key.level)
            for context in range(trajectory.num_contexts):
                ref = Ref(trajectory.id, context=context)
                tokens = reader.read(ref, ("token_ids", "loss_mask"))
                found.append(Demonstration(tokens.token_ids, tokens.loss_mask, effort))
    if not found:
        raise ConfigError(f"{settings.run_folder}: no demonstration solved its task")
    return found


def imitate(
    settings: Config, model: K3Model, demonstrations: list[Demonstration], console: Console
) -> Path:
    """Fine-tune `model` and write the checkpoint; returns its path."""
    import torch

    from k3rl.learner.sft import draw_batches, make_learner, rates_at
    from k3rl.model import checkpoint

    torch.set_num_threads(settings.learner.num_threads)
    learner, plan = make_learner(settings, model), settings.sft
    writer = MetricsWriter(settings.run_folder / "sft", **settings.metrics.model_dump())
    lengths = [len(demonstration.token_ids) for demonstration in demonstrations]
    batches = draw_batches(lengths, plan.batch_tokens, settings.seed)
    fixed = demonstrations[:NUM_FIXED]
    writer.write(0, {metrics.SFT_FIXED_LOSS: learner.loss(fixed)})
    began, num_tokens = time.monotonic(), 0
    for step in range(plan.num_steps):
        batch = [demonstrations[index] for index in next(batches)]
        stats = learner.step(batch, rates_at(settings.optimiser, step, plan.warmup_steps))
        num_tokens += stats.num_tokens
        rate = num_tokens / (time.monotonic() - began)
        writer.write(step, stats.scalars() | {metrics.SFT_TOKENS_PER_S: rate})
        if (step + 1) % plan.log_every == 0 or step + 1 == plan.num_steps:
            console.print(
                f"step {step + 1}/{plan.num_steps}: loss {stats.loss:.4f},"
                f" probe {stats.probe_loss:.4f}, {num_tokens} tokens, {rate:.0f} tokens/s"
            )
    writer.write(plan.num_steps, {metrics.SFT_FIXED_LOSS: learner.loss(fixed)})
    writer.close()
    path = settings.run_folder / CHECKPOINT
    digest = checkpoint.save(path, model, torch.bfloat16)
    console.print(f"{path}: {len(demonstrations)} demonstrations, digest {digest}")
    return path
