"""The schemas of the sealed tables, their versions, and how files of other versions are read.

Every column has a `PARQUET:field_id`, its place in the list below counted from 1, and so has every
member of a nested column: member n of field f is f * 100 + n. An id never gets another meaning: a
new column is appended, nullable; a type may only become wider. That makes a new minor version. A
reader takes any minor version, by ids: what a file does not have is null, what it has too much is
left alone. Any other change makes a new major version and one pure function in `UPCASTS`. A newer
major version is refused with `SchemaTooNew`.

Every released version has a store under `tests/data/store/<version>` that must stay readable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TypeAlias

import pyarrow as pa

from k3rl.errors import CorruptData, SchemaTooNew

MAJOR, MINOR = 1, 1
SCHEMA_KEY = b"k3rl.schema_id"
FIELD_ID = b"PARQUET:field_id"
ID16, HASH = pa.binary(16), pa.binary(32)
SPANS = pa.list_(
    pa.struct(
        [
            ("start", pa.int32()),
            ("author", pa.string()),
            ("policy_version", pa.int32()),
            ("state_version", pa.int32()),
        ]
    )
)
MEDIA = pa.list_(
    pa.struct(
        [
            ("index", pa.int32()),
            ("blob", HASH),
            ("grid", pa.list_(pa.int32())),
            ("num_features", pa.int32()),
        ]
    )
)
SEGMENTS = pa.list_(
    pa.struct(
        [
            ("context", pa.int32()),
            ("token_start", pa.int64()),
            ("num_tokens", pa.int32()),
            ("num_policy_tokens", pa.int32()),
            ("version_min", pa.int32()),
            ("version_max", pa.int32()),
            ("row_group", pa.int32()),
            ("row", pa.int32()),
            ("content_hash", HASH),
        ]
    )
)
"""See `segment_keys.SegmentKey`."""
_COLUMNS: dict[str, list[tuple[str, pa.DataType]]] = {
    "segments": [
        ("trajectory", ID16),
        ("context", pa.int32()),
        ("segment", pa.int32()),
        ("token_start", pa.int64()),
        ("num_tokens", pa.int32()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("rollout_logprobs", pa.list_(pa.float32())),
        ("spans", SPANS),
        ("media", MEDIA),
        ("expert_ids", HASH),
        ("content_hash", HASH),
    ],
    "steps": [
        ("trajectory", ID16),
        ("step", pa.int32()),
        ("context", pa.int32()),
        ("token_start", pa.int64()),
        ("token_end", pa.int64()),
        ("finish_reason", pa.string()),
        ("snapshot_before", pa.string()),
        ("snapshot_after", pa.string()),
        ("tree_digest", pa.string()),
        ("generate_s", pa.float64()),
        ("act_s", pa.float64()),
        ("snapshot_s", pa.float64()),
        ("step_json", pa.string()),
    ],
    "trajectories": [
        ("trajectory", ID16),
        ("run_id", pa.string()),
        ("env_id", pa.string()),
        ("task_key", pa.string()),
        ("level", pa.string()),
        ("group_index", pa.int64()),
        ("sample_index", pa.int64()),
        ("attempt", pa.int64()),
        ("iteration", pa.int64()),
        ("parent", ID16),
        ("outcome", pa.string()),
        ("reward", pa.float64()),
        ("num_tokens", pa.int64()),
        ("num_policy_tokens", pa.int64()),
        ("num_own_tokens", pa.int64()),
        ("num_steps", pa.int32()),
        ("epoch", pa.int64()),
        ("begun_sequence", pa.int64()),
        ("finished_sequence", pa.int64()),
        ("header_json", pa.string()),
        ("outcome_json", pa.string()),
        ("start_json", pa.string()),
        ("contexts_json", pa.string()),
        ("sealed_seq", pa.int64()),
        ("segments", SEGMENTS),
        ("origin", HASH),
    ],
    "snapshots": [
        ("snapshot", pa.string()),
        ("parent", pa.string()),
        ("layers", pa.list_(HASH)),
        ("session_json", pa.string()),
        ("tree_digest", pa.string()),
        ("num_bytes", pa.int64()),
        ("process_state", pa.string()),
    ],
    "updates": [
        ("update", pa.int64()),
        ("policy_version_in", pa.int64()),
        ("policy_version_out", pa.int64()),
        ("manifest_seq", pa.int64()),
        ("rng_key", pa.string()),
        ("members", pa.list_(ID16)),
        ("advantages", pa.list_(pa.float64())),
        ("denominators_json", pa.string()),
        ("loss", pa.list_(pa.float64())),
        ("gradient_norm", pa.float64()),
        ("checkpoint", HASH),
    ],
    "versions": [
        ("policy_version", pa.int64()),
        ("parent", pa.int64()),
        ("checksum", HASH),
        ("blob", HASH),
    ],
}
TABLES = tuple(_COLUMNS)

Upcast: TypeAlias = Callable[[pa.Table], pa.Table]
UPCASTS: dict[tuple[str, int], Upcast] = {}
"""By (table, N): all columns of version N.x, with their ids, to those of N + 1.0, row by row."""


@cache
def schema(table: str) -> pa.Schema:
    """The Arrow schema of a table, with field ids and the schema id."""
    fields = [numbered(name, kind, at) for at, (name, kind) in enumerate(_COLUMNS[table], 1)]
    return pa.schema(fields, metadata={SCHEMA_KEY: schema_id(table).encode()})


def numbered(name: str, kind: pa.DataType, number: int) -> pa.Field:
    """A field with this id, and its members with theirs."""
    if pa.types.is_list(kind):
        kind = pa.list_(numbered("element", kind.value_type, number * 100 + 1))
    elif pa.types.is_struct(kind):
        kind = pa.struct(
            [numbered(m.name, m.type, number * 100 + n) for n, m in enumerate(kind, 1)]
        )
    return pa.field(name, kind, metadata={FIELD_ID: str(number).encode()})


def schema_id(table: str) -> str:
    """Names table and version, as the manifest records it."""
    return f"k3rl.{table}/{MAJOR}.{MINOR}"


def check_schema_id(path: str, table: str, found: str) -> int:
    """The major version of a file's schema.

    Raises SchemaTooNew when it is newer than this program's, or none of this table.
    """
    name, _, version = found.partition("/")
    major = version.partition(".")[0]
    where = f"{path}: {SCHEMA_KEY.decode()}"
    if name != f"k3rl.{table}" or not major.isdecimal():
        raise SchemaTooNew(f"{where}: {found!r} is not a schema of table {table}")
    if int(major) > MAJOR:
        raise SchemaTooNew(
            f"{where}: {found} is newer than {schema_id(table)}: read it with a newer k3rl"
        )
    return int(major)


def field_id(field: pa.Field) -> int | None:
    """The `PARQUET:field_id` of a field; None when it has none."""
    number = (field.metadata or {}).get(FIELD_ID)
    return None if number is None else int(number)


def by_id(fields: pa.Schema | pa.StructType) -> dict[int | str, pa.Field]:
    """Fields by id, and by name where they have none (members, in version 1.0)."""
    return {field_id(field) or field.name: field for field in fields}


def counterpart(fields: Mapping[int | str, pa.Field], want: pa.Field) -> pa.Field | None:
    """The field among those of a file that a field of ours is read from."""
    return fields.get(field_id(want) or 0) or fields.get(want.name)


def read_present(
    path: str,
    table: str,
    found: pa.Schema,
    columns: list[str],
    read: Callable[[list[str]], pa.Table],
) -> pa.Table:
    """Columns, by their present names, of a file that has another version of the schema.

    `read` reads columns of the file by their names in it. Raises CorruptData for a column that has
    a type which ours cannot have come from, SchemaTooNew.
    """
    target = pa.schema([schema(table).field(name) for name in columns])
    major = check_schema_id(path, table, found.metadata[SCHEMA_KEY].decode())
    if major == MAJOR:
        here = by_id(found)
        return select(path, read([h.name for w in target if (h := counterpart(here, w))]), target)
    return select(path, upcast(read(found.names), table, major), target)


def upcast(data: pa.Table, table: str, major: int) -> pa.Table:
    """All columns of version `major`.x as those of the present major version, step by step."""
    for version in range(major, MAJOR):
        data = UPCASTS[table, version](data)
    return data


def select(path: str, data: pa.Table, target: pa.Schema) -> pa.Table:
    """The columns of `target`, found by id, widened, null where `data` has none."""
    here, arrays = by_id(data.schema), []
    for want in target:
        have = counterpart(here, want)
        if have is None:
            arrays.append(pa.nulls(data.num_rows, want.type))
        else:
            column = data.column(have.name).combine_chunks()
            arrays.append(_fit(path, column, have, want))
    return pa.Table.from_arrays(arrays, schema=target)


def _fit(path: str, array: pa.Array, have: pa.Field, want: pa.Field) -> pa.Array:
    if have.type == want.type:
        return array
    mask = array.is_null() if array.null_count else None
    if pa.types.is_list(have.type) and pa.types.is_list(want.type):
        values = _fit(path, array.values, have.type.value_field, want.type.value_field)
        return pa.ListArray.from_arrays(array.offsets, values, type=want.type, mask=mask)
    if pa.types.is_struct(have.type) and pa.types.is_struct(want.type):
        here, members = by_id(have.type), []
        for member in want.type:
            old = counterpart(here, member)
            members.append(
                _fit(path, array.field(old.name), old, member)
                if old
                else pa.nulls(len(array), member.type)
            )
        return pa.StructArray.from_arrays(members, fields=list(want.type), mask=mask)
    if not _is_wider(have.type, want.type):
        raise CorruptData(path, 0, want.name, f"is {have.type}, which never becomes {want.type}")
    return array.cast(want.type)


def _is_wider(old: pa.DataType, new: pa.DataType) -> bool:
    kinds = (pa.types.is_signed_integer, pa.types.is_floating)
    return any(kind(old) and kind(new) and new.bit_width > old.bit_width for kind in kinds)
