"""`k3rl traj sql`: one SELECT over the sealed tables of a store."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterator
from decimal import Decimal
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from k3rl.cli.runs import RootArgument, store_root
from k3rl.cli.tables import plain_table
from k3rl.errors import UserInputError

if TYPE_CHECKING:
    from k3rl.store.sql import Answer

MAX_CELL = 64
"""Characters of a cell of a table."""
WIDTH = 1 << 16
"""Of the table: no terminal's, or rich would leave out columns and cut ids."""


class Format(StrEnum):
    """How rows are written."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"


def sql(
    root: RootArgument,
    statement: Annotated[str, typer.Argument(help="One SELECT; SHOW TABLES and DESCRIBE help.")],
    format: Annotated[
        Format, typer.Option(help="table is for the eye; json: an object a line.")
    ] = Format.TABLE,
    limit: Annotated[int, typer.Option(help="At most so many rows of a table; 0: all.")] = 100,
) -> None:
    """Query the sealed tables: segments, steps, trajectories, snapshots, updates, versions."""
    from k3rl.store.sql import query

    write = {Format.TABLE: _write_table, Format.CSV: _write_csv, Format.JSON: _write_json}[format]
    with query(store_root(root), statement) as answer:
        write(answer, limit)


def _write_table(answer: Answer, limit: int) -> None:
    table = plain_table(None, [escape(name) for name in answer.columns])
    for row in islice(answer.rows, limit or None):
        table.add_row(*(Text(_short(_cell(value))) for value in row))
    Console(width=WIDTH).print(table)
    if next(answer.rows, None) is not None:
        typer.echo("there are more rows; --limit 0 shows all")


def _write_csv(answer: Answer, limit: int) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(answer.columns)
    writer.writerows([_cell(value) for value in row] for row in answer.rows)


def _write_json(answer: Answer, limit: int) -> None:
    for line in _lines(answer):
        sys.stdout.write(f"{line}\n")


def _lines(answer: Answer) -> Iterator[str]:
    if len(set(answer.columns)) < len(answer.columns):
        names = ", ".join(answer.columns)
        raise UserInputError(f"sql: columns of the same name cannot be one object: {names}")
    for row in answer.rows:
        yield json.dumps({n: _plain(v) for n, v in zip(answer.columns, row, strict=True)})


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return json.dumps(_plain(value)) if isinstance(value, dict | list) else str(_plain(value))


def _short(text: str) -> str:
    line = text.replace("\n", "\\n")
    return line if len(line) <= MAX_CELL else f"{line[: MAX_CELL - 3]}..."


def _plain(value: Any) -> Any:
    """What JSON can hold: bytes as hex, NaN and infinities as null, dates as text."""
    match value:
        case bytes():
            return value.hex()
        case float():
            return value if math.isfinite(value) else None
        case Decimal():
            return float(value)
        case list() | tuple():
            return [_plain(item) for item in value]
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}
        case None | bool() | int() | str():
            return value
    return str(value)
