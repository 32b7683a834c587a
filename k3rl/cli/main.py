"""`k3rl`: the command line. Every k3rl error is one line on stderr and exit status 2."""

from __future__ import annotations

import os
import sys

import typer

from k3rl.cli import bench, doctor, envs, evaluate, model, replay, sandbox, sft, smoke, train, traj
from k3rl.errors import K3rlError

app = typer.Typer(
    help="Agentic RL post-training for the Kimi K3 model family.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(train.train)
app.command("sft")(sft.sft)
app.command("smoke")(smoke.smoke)
app.command("eval")(evaluate.evaluate)
app.command("replay")(replay.replay)
app.command("doctor")(doctor.doctor)
app.add_typer(traj.app, name="traj")
app.add_typer(envs.app, name="envs")
app.add_typer(model.app, name="model")
app.add_typer(sandbox.app, name="sandbox")
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Run the command line."""
    # Read when torch is loaded. Threads that wait for each other spinning cost five times the work
    # on a machine whose cores are all in use.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app()
    except K3rlError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
