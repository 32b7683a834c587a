"""`k3rl envs`: which environments there are."""

from __future__ import annotations

import typer
from rich.console import Console

from k3rl.cli.tables import plain_table

app = typer.Typer(help="Tool environments.", no_args_is_help=True)


@app.command("list")
def list_envs() -> None:
    """List registered environments with their tools."""
    from k3rl.envs import registry

    table = plain_table(None, ["id", "tools", "entry point"])
    for env_id in registry.ids():
        env = registry.make(env_id)
        tools = " ".join(tool.name for tool in env.tools)
        table.add_row(env_id, tools, env.spec.entry_point)
    Console().print(table)


@app.callback()
def _group() -> None:
    """Keep `list` a subcommand while it is the only one."""
