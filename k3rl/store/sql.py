"""SQL over the sealed tables, by DuckDB: it reads what the manifest names, and nothing else.

DuckDB itself opens no file. Each table is a view over Arrow datasets of exactly the manifest's
files, whose pages are checked as they are read; then all access to files, networks, extensions and
variables of this process is switched off, and the configuration is locked. One statement that
reads is taken; there is nothing to write to.

The views have the columns of the tables, ids and hashes as hex, JSON as DuckDB's JSON; `steps` has
one more, `calls`: a list of structs (tool, arguments, index, status, output, output_digest,
wall_s). Half a character (a lone surrogate, which UTF-8 cannot hold) shows as "?".
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as pads
from pyarrow.fs import LocalFileSystem

from k3rl.errors import StoreError, UserInputError
from k3rl.store.checks import check_text
from k3rl.store.manifest import Manifest, SealedFile, load_manifest
from k3rl.store.parquet import check_pages, open_sealed, read_groups
from k3rl.store.schemas import (
    MAJOR,
    TABLES,
    by_id,
    check_schema_id,
    counterpart,
    schema,
)

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

FETCH_ROWS = 1024
NO_DROPS = -1
NO_ACCESS: dict[str, str | bool | int | float | list[str]] = {
    "allow_persistent_secrets": "false",
    "allow_community_extensions": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
}
LOCK = (
    "SET python_enable_replacements = false",
    "SET temp_directory = ''",
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)
_CALL = {
    "call": {"tool": "VARCHAR", "arguments": "JSON", "index": "INTEGER"},
    **dict.fromkeys(("status", "output", "output_digest"), "VARCHAR"),
    "wall_s": "DOUBLE",
}
CALLS = f"""
    list_transform(
        from_json(clean_json(step_json)->'$.calls', '{json.dumps([_CALL])}'),
        lambda c: struct_pack(
            tool := c.call.tool, arguments := c.call.arguments, index := c.call."index",
            status := c.status, output := c.output, output_digest := c.output_digest,
            wall_s := c.wall_s
        )
    ) AS calls
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a statement gives: column names, and rows that are made as they are taken."""

    columns: list[str]
    rows: Iterator[tuple[Any, ...]]


@contextmanager
def query(root: Path, statement: str) -> Iterator[Answer]:
    """Run one SELECT (or DESCRIBE, SUMMARIZE, SHOW) on the sealed tables of a root.

    Raises UserInputError for a statement that is wrong or not allowed, or without duckdb;
    StoreError when there is no store or not enough memory, CorruptData, SchemaTooNew. Taking rows
    raises the same.
    """
    check_text("sql", statement)
    manifest, _ = load_manifest(root)
    if not manifest.records:
        raise StoreError(f"{root}: no trajectory store here (no manifest record)")
    with closing(_connect()) as connection, _translated(root, manifest):
        _check_statement(connection, statement)
        for table in TABLES:
            _create_view(connection, root, manifest, table)
        for setting in LOCK:
            connection.execute(setting)
        connection.execute(statement)
        columns = [column[0] for column in connection.description or ()]
        yield Answer(columns, _rows(connection))


def _connect() -> DuckDBPyConnection:
    try:
        import duckdb
    except ModuleNotFoundError:
        raise UserInputError(
            "sql: the package duckdb is not installed: pip install 'k3rl[sql]'"
        ) from None
    connection = duckdb.connect(":memory:", config=NO_ACCESS)
    connection.create_function("clean_json", _clean, ["VARCHAR"], "VARCHAR")
    return connection


def _check_statement(connection: DuckDBPyConnection, statement: str) -> None:
    found = [each.type.name for each in connection.extract_statements(statement)]
    if found != ["SELECT"]:
        what = " and ".join(found) or "nothing"
        raise UserInputError(f"sql: one statement that reads is taken (SELECT ...), not {what}")


def _rows(connection: DuckDBPyConnection) -> Iterator[tuple[Any, ...]]:
    while rows := connection.fetchmany(FETCH_ROWS):
        yield from rows


@contextmanager
def _translated(root: Path, manifest: Manifest) -> Iterator[None]:
    """DuckDB's errors as ours, each in one line."""
    import duckdb

    try:
        yield
    except duckdb.Error as error:
        text = "; ".join(str(error).split("\n\nLINE")[0].split("\n"))
        if "reading the stream" in text:
            for file in manifest.files.values():
                check_pages(root, file, open_sealed(root, file))
            raise StoreError(f"{root}: {text}") from None
        if isinstance(error, duckdb.OperationalError | duckdb.InternalError):
            raise StoreError(f"sql: {text}") from None
        raise UserInputError(f"sql: {text}") from None


def _create_view(
    connection: DuckDBPyConnection, root: Path, manifest: Manifest, table: str
) -> None:
    """One view: a part for each version of the schema and each set of rows that repairs gave up.

    The first part is empty: it lends its names and types to the others.
    """
    connection.register(f"_{table}", schema(table).empty_table())
    parts = [f'SELECT * FROM "_{table}"']
    groups = _files(manifest, table)
    for number, ((version, since), files) in enumerate(groups.items()):
        name = f"_{table}_{number}"
        if check_schema_id(str(root / files[0].path), table, version) == MAJOR:
            found = _dataset(root, files)
            columns = _by_id(found.schema, table)
        else:
            found, columns = pa.concat_tables([_whole(root, file) for file in files]), "*"
        connection.register(name, found)
        part = f'SELECT {columns} FROM "{name}"'
        if since != NO_DROPS:
            drops = [bytes.fromhex(id) for id, r in manifest.drops.items() if r.seq >= since]
            connection.register(f"{name}_drops", pa.table({"id": pa.array(drops, pa.binary(16))}))
            part += f' WHERE trajectory NOT IN (SELECT id FROM "{name}_drops")'
        parts.append(part)
    shown = ", ".join(f'{_shown(field)} AS "{field.name}"' for field in schema(table))
    more = f", {CALLS}" if table == "steps" else ""
    union = " UNION ALL BY NAME ".join(parts)
    connection.execute(f'CREATE VIEW "{table}" AS SELECT {shown}{more} FROM ({union})')


def _files(manifest: Manifest, table: str) -> dict[tuple[str, int], list[SealedFile]]:
    """The files of a table by schema version and by what of them does not count.

    That is what records gave up from a first one on, or NO_DROPS.
    """
    groups = defaultdict(list)
    has_drops = "trajectory" in schema(table).names
    losses = sorted({r.seq for r in manifest.drops.values()}) if has_drops else []
    for seq, file in manifest.files_of(table):
        since = losses[at] if (at := bisect_left(losses, seq)) < len(losses) else NO_DROPS
        groups[file.schema_id, since].append(file)
    return groups


def _dataset(root: Path, files: list[SealedFile]) -> pads.Dataset:
    opened = [open_sealed(root, file) for file in files]
    options = pads.ParquetFragmentScanOptions(page_checksum_verification=True)
    kind, disk = pads.ParquetFileFormat(default_fragment_scan_options=options), LocalFileSystem()
    fragments = [kind.make_fragment(str((root / f.path).absolute()), disk) for f in files]
    return pads.FileSystemDataset(fragments, opened[0].schema_arrow, kind)


def _whole(root: Path, file: SealedFile) -> pa.Table:
    opened = open_sealed(root, file)
    groups = list(range(opened.metadata.num_row_groups))
    return read_groups(root, file, opened, groups, schema(file.table).names)


def _by_id(columns: pa.Schema, table: str) -> str:
    """The columns of files, by their present names."""
    here = by_id(columns)
    found = [(counterpart(here, want), want) for want in schema(table)]
    return ", ".join(f'"{have.name}" AS "{want.name}"' for have, want in found if have)


def _shown(field: pa.Field) -> str:
    name, kind = f'"{field.name}"', field.type
    if field.name.endswith("_json"):
        return f"clean_json({name})::JSON"
    return _hexed(name, kind)


def _hexed(value: str, kind: pa.DataType) -> str:
    """An expression with all fixed-size binary in it as hex."""
    if pa.types.is_fixed_size_binary(kind):
        return f"lower(hex({value}))"
    if pa.types.is_list(kind):
        inner = _hexed("x", kind.value_type)
        return value if inner == "x" else f"list_transform({value}, lambda x: {inner})"
    if pa.types.is_struct(kind):
        members = {m.name: (f'{value}."{m.name}"', m.type) for m in kind}
        if any(_hexed(*member) != member[0] for member in members.values()):
            packed = ", ".join(f'"{name}" := {_hexed(*m)}' for name, m in members.items())
            return f"struct_pack({packed})"
    return value


def _clean(text: str) -> str:
    r"""A JSON text in which no `\ud...` stands for half a character."""
    if "\\ud" not in text:
        return text
    return json.dumps(json.loads(text), ensure_ascii=False).encode("utf-8", "replace").decode()
