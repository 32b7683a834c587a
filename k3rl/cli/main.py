"""`k3rl`: the command line. Every k3rl error is one line on stderr and exit status 2."""

from __future__ import annotations

import sys

import typer

from k3rl.cli import doctor, envs, replay, train, traj
from k3rl.errors import K3rlError

app = typer.Typer(
    help="Agentic RL post-training for the Kimi K3 model family.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(train.train)
app.command("replay")(replay.replay)
app.command("doctor")(doctor.doctor)
app.add_typer(traj.app, name="traj")
app.add_typer(envs.app, name="envs")


def main() -> None:
    """Run the command line."""
    try:
        app()
    except K3rlError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
