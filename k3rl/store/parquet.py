"""Sealed Parquet files: write once, check, never replace; every page has a checksum.

Token ids are PLAIN + zstd (for them plain bytes under LZ matching beat delta, dictionary and bit
packing), log-probs BYTE_STREAM_SPLIT + zstd, masks run-length encoded. A row group holds a few
segments (`Layout`): it is what one random read decompresses.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from blake3 import blake3

from k3rl.blobs import fsync_folder
from k3rl.errors import CorruptData, StoreError
from k3rl.store.manifest import SealedFile
from k3rl.store.schemas import SCHEMA_KEY, check_schema_id, read_present, schema, schema_id

ROW_GROUP_ROWS = 512
"""Of the other tables: what is decompressed to read one trajectory."""
BATCH_SEGMENTS = 64
"""Segments that become Arrow at a time: 16 row groups, a few MiB."""
REWRITTEN = "-again.parquet"
"""How the names of files end that compaction made of others."""
_DICTIONARY = ["author", "finish_reason", "run_id", "env_id", "task_key", "level", "outcome"]
_ENCODINGS = {
    "token_ids.list.element": "PLAIN",
    "rollout_logprobs.list.element": "BYTE_STREAM_SPLIT",
    "loss_mask.list.element": "RLE",
    "content_hash": "PLAIN",
}


class Layout(NamedTuple):
    """What is chosen of a file: time against size. Whoever reads it need not know."""

    group_segments: int
    """Of a row group of segments."""
    zstd_level: int


SEALED = Layout(4, 1)
"""Written while a run waits for it."""
COMPACTED = Layout(4, 9)
"""Written in the background."""


def write_sealed(
    root: Path, name: str, table: str, chunks: Iterable[pa.Table], layout: Layout = SEALED
) -> SealedFile:
    """Write `sealed/<name>` from Arrow tables and return its manifest entry.

    Temp file, footer check, fsync, link (so an existing file is never replaced), folder fsync.
    Raises StoreError when the disk refuses; no file is then left.
    """
    folder = root / "sealed"
    path, temp = folder / name, folder / f".tmp-{name}"
    is_named = False
    try:
        rows = _write(temp, table, chunks, layout)
        _check_footer(temp, table, rows)
        num_bytes, digest = _sync(temp)
        os.link(temp, path)
        is_named = True
        fsync_folder(folder)
    except OSError as error:
        if is_named:
            path.unlink(missing_ok=True)
        reason = error.strerror or str(error)
        raise StoreError(
            f"{path}: cannot seal: {reason}; acknowledged tokens stay in the journal: "
            "make room on this disk"
        ) from error
    finally:
        temp.unlink(missing_ok=True)
    return SealedFile(f"sealed/{name}", table, schema_id(table), rows, num_bytes, digest)


def open_sealed(root: Path, file: SealedFile, footer: Any = None) -> pq.ParquetFile:
    """Open a sealed file with page checksums on. Raises CorruptData or SchemaTooNew.

    `footer` is the `metadata` of an earlier opening, which saves parsing it again.
    """
    path = root / file.path
    check_schema_id(str(path), file.table, file.schema_id)
    try:
        found = pq.ParquetFile(
            path, metadata=footer, pre_buffer=False, page_checksum_verification=True
        )
    except FileNotFoundError:
        raise CorruptData(str(path), 0, "file", "named by the manifest but missing") from None
    except (OSError, pa.ArrowInvalid) as error:
        raise CorruptData(str(path), _size(path), "footer", _line(error)) from None
    stored = (found.metadata.metadata or {}).get(SCHEMA_KEY, b"").decode(errors="replace")
    check_schema_id(str(path), file.table, stored)
    if stored != file.schema_id:
        detail = f"{stored}, the manifest says {file.schema_id}"
        raise CorruptData(str(path), _size(path), SCHEMA_KEY.decode(), detail)
    if found.metadata.num_rows != file.num_rows:
        detail = f"{found.metadata.num_rows} rows, the manifest says {file.num_rows}"
        raise CorruptData(str(path), _size(path), "footer", detail)
    return found


def read_groups(
    root: Path, file: SealedFile, opened: pq.ParquetFile, groups: list[int], columns: list[str]
) -> pa.Table:
    """Columns of an open file by their present names, whatever version it has.

    Checksums are verified. Raises CorruptData naming the column.
    """
    path = root / file.path
    if file.schema_id == schema_id(file.table):
        return _read(path, opened, groups, columns)
    read = partial(_read, path, opened, groups)
    return read_present(str(path), file.table, opened.schema_arrow, columns, read)


def check_pages(root: Path, file: SealedFile, opened: pq.ParquetFile) -> None:
    """Read all there is in an open file. Raises CorruptData naming the column."""
    for group in range(opened.metadata.num_row_groups):
        _read(root / file.path, opened, [group], opened.schema_arrow.names)


def read_rows(root: Path, file: SealedFile, columns: list[str] | None = None) -> list[Any]:
    """All rows of a file as dicts."""
    opened = open_sealed(root, file)
    names = columns or schema(file.table).names
    groups = list(range(opened.metadata.num_row_groups))
    rows: list[Any] = read_groups(root, file, opened, groups, names).to_pylist()
    return rows


def file_digest(path: Path) -> str:
    """blake3 of a whole file."""
    return blake3().update_mmap(path).hexdigest()


def _read(path: Path, opened: pq.ParquetFile, groups: list[int], names: list[str]) -> pa.Table:
    try:
        return opened.read_row_groups(groups, columns=names, use_threads=len(groups) > 1)
    except (OSError, pa.ArrowException) as error:
        raise _blame(path, opened, groups, names, error) from None


def _write(temp: Path, table: str, chunks: Iterable[pa.Table], layout: Layout) -> int:
    names = schema(table).names
    per_group = layout.group_segments if table == "segments" else ROW_GROUP_ROWS
    leaves = {name: e for name, e in _ENCODINGS.items() if name.split(".")[0] in names}
    words = [name for name in _DICTIONARY if name in names]
    if table == "segments":
        words.append("spans.list.element.author")
    rows = 0
    with pq.ParquetWriter(
        temp,
        schema(table),
        compression="zstd",
        compression_level=layout.zstd_level,
        use_dictionary=words,
        column_encoding=leaves,
        write_statistics=[name for name in ("trajectory", "token_start") if name in names],
        write_page_index=True,
        write_page_checksum=True,
        store_schema=True,
    ) as writer:
        for chunk in chunks:
            writer.write_table(chunk, row_group_size=per_group)
            rows += chunk.num_rows
    return rows


def _check_footer(temp: Path, table: str, rows: int) -> None:
    found = pq.read_metadata(temp)
    if found.num_rows != rows or found.metadata[SCHEMA_KEY] != schema_id(table).encode():
        raise StoreError(f"{temp}: the footer just written does not read back")


def _sync(temp: Path) -> tuple[int, str]:
    handle = os.open(temp, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    return temp.stat().st_size, file_digest(temp)


def _blame(
    path: Path, opened: pq.ParquetFile, groups: list[int], columns: list[str], error: Exception
) -> CorruptData:
    for group in groups:
        for at in range(opened.metadata.num_columns):
            chunk = opened.metadata.row_group(group).column(at)
            name = chunk.path_in_schema
            if name.split(".")[0] not in columns:
                continue
            try:
                opened.read_row_group(group, columns=[name], use_threads=False)
            except (OSError, pa.ArrowException) as bad:
                detail = f"row group {group}: {_line(bad)}"
                return CorruptData(str(path), chunk.data_page_offset, name, detail)
    return CorruptData(str(path), 0, ",".join(columns), _line(error))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _line(error: Exception) -> str:
    return str(error).split("\n")[0]
