"""`k3rl envs`: which environments there are."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(help="Tool environments.", no_args_is_help=True)


@app.command("list")
def list_envs() -> None:
    """List registered environments with their tools and what their sandbox must enforce."""
    from k3rl.envs import registry

    table = Table()
    for column in ("id", "tools", "sandbox must enforce", "entry point"):
        table.add_column(column)
    for env_id in registry.ids():
        env = registry.make(env_id)
        tools = ", ".join(tool.name for tool in env.tools)
        table.add_row(env_id, tools, ", ".join(env.sandbox_spec.required), env.spec.entry_point)
    Console().print(table)


@app.callback()
def _group() -> None:
    """Keep `list` a subcommand while it is the only one."""
