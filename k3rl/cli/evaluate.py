"""`k3rl eval`: how a checkpoint does on held-out tasks of an environment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from k3rl import config as configs
from k3rl.cli.launching import check_envs, claim_folder, run
from k3rl.cli.train import report_scores
from k3rl.errors import UserInputError
from k3rl.types import JsonObject, digest_json


def evaluate(
    checkpoint: Annotated[
        Path, typer.Argument(help="A .safetensors file, or the folder of a run that trained.")
    ],
    env: Annotated[str, typer.Argument(help="An environment id, for example k3rl/FileHunt-v0.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="key.path=value, for example evaluation.num_samples=4."),
    ] = None,
) -> None:
    """Play held-out tasks at every level: success, interval, pass@k and sampled tokens."""
    weights = find_weights(checkpoint)
    tree: JsonObject = {
        "run": {"iterations": 0},
        "policy": {"checkpoint": str(weights)},
        "engine": {"kind": "native"},
        "envs": [{"id": env}],
        "intensity": {"levels": ["low", "max"]},
        "evaluation": {"at_start": True, "num_tasks": 200, "num_greedy_tasks": 100},
        "rollout": {"num_workers": 2, "trajectories_per_worker": 64},
    }
    asked = list(overrides or [])
    name = digest_json([str(weights.resolve()), weights.stat().st_mtime_ns, env, asked])[:8]
    tree["run"]["name"] = f"eval-{name}"
    settings = configs.resolve(tree, "k3rl eval", asked)
    console = Console()
    check_envs(settings)
    claim_folder(settings)
    report_scores(run(settings, console).evaluations, console)


def find_weights(path: Path) -> Path:
    """The weights file itself, or that of a run's newest checkpoint. Raises UserInputError."""
    if path.is_dir():
        from k3rl.learner.checkpoint import Checkpoints
        from k3rl.learner.k3_learner import WEIGHTS_FILE
        from k3rl.learner.trainer import CHECKPOINTS

        saved = Checkpoints(path / CHECKPOINTS).newest()
        if saved is None:
            raise UserInputError(f"{path}: no checkpoint in it")
        return saved.folder / WEIGHTS_FILE
    if not path.is_file():
        raise UserInputError(f"{path}: no such file")
    return path
