"""Finding a run on disk: shared by the commands that look at stored trajectories."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from k3rl import config as configs
from k3rl.config import Config
from k3rl.errors import UserInputError

RunOption = Annotated[
    Path | None, typer.Option("--run", help="Run folder; default: the latest under runs/.")
]
RootArgument = Annotated[Path, typer.Argument(help="A store root, or the folder of a run.")]


def store_root(path: Path) -> Path:
    """The store root that `path` is, or the one of the run folder that it is."""
    return path / "store" if (path / "config.yaml").exists() else path


def find_run(run: Path | None) -> tuple[Path, Config]:
    """The run folder and its resolved config. Raises UserInputError when there is none."""
    if run is None:
        found = [path.parent for path in Path("runs").glob("*/config.yaml")]
        if not found:
            raise UserInputError("no run under runs/; name one with --run FOLDER")
        run = max(found, key=lambda path: (path / "config.yaml").stat().st_mtime)
    if not (run / "config.yaml").exists():
        raise UserInputError(f"{run}: not a run folder (it has no config.yaml)")
    settings = configs.load(run / "config.yaml")
    moved = settings.run.model_copy(update={"folder": str(run.parent), "name": run.name})
    return run, settings.model_copy(update={"run": moved})
