"""The one look of tables on the terminal: narrow, no frame, nothing wrapped."""

from __future__ import annotations

from rich.table import Table


def plain_table(title: str | None, names: list[str], numbers: list[str] | None = None) -> Table:
    """A table with text columns `names`, then right-aligned columns `numbers`."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in numbers or []:
        table.add_column(name, justify="right", no_wrap=True)
    return table
