"""From the sealed files of one manifest record to its columns.

Of every file the footer and the number of rows are checked, of the `trajectories` file the pages of
the columns below; what else there is is read on demand, and by `fsck`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from blake3 import blake3
from numpy.typing import NDArray

from k3rl.errors import CorruptData
from k3rl.store.arrow import filled, fixed, flags, numbers, whole
from k3rl.store.columns import (
    Batch,
    ContextColumns,
    Ints,
    SegmentColumns,
    TrajectoryColumns,
    offsets,
    snapshot_key,
)
from k3rl.store.manifest import SealedFile
from k3rl.store.open_files import SealedFiles
from k3rl.store.segment_keys import NO_VERSION
from k3rl.types import Author

BATCH_TABLES = ("segments", "steps", "trajectories", "snapshots")
"""Tables that only make sense together."""
TRAJECTORY_COLUMNS = [
    *("trajectory", "parent", "run_id", "task_key", "level", "group_index", "outcome", "reward"),
    *("num_tokens", "num_policy_tokens", "num_own_tokens", "num_steps", "epoch"),
    *("begun_sequence", "finished_sequence", "start_json", "contexts_json"),
    *("sealed_seq", "segments", "origin"),
]
SEGMENT_FILE_COLUMNS = [
    *("trajectory", "context", "token_start", "num_tokens", "content_hash", "spans"),
]
_MIX = np.uint64(0x9E3779B97F4A7C15)


def load_batch(
    files: SealedFiles, seq: int, adds: Mapping[str, SealedFile], is_derived: bool = False
) -> Batch:
    """The columns of the files, by table, that record `seq` added.

    `is_derived`: those of segments as the segments file says, not as the `trajectories` file does.
    Raises CorruptData, SchemaTooNew, FileNotFoundError.
    """
    ends = {table: files.group_ends(file.path) for table, file in adds.items()}
    path = adds["trajectories"].path
    table = files.read(path, list(range(len(ends["trajectories"]))), TRAJECTORY_COLUMNS)
    where = str(files.root / path)
    columns = {name: whole(table.column(name)) for name in table.column_names}
    if is_derived:
        columns.pop("segments", None)
    trajectories = _trajectories(where, columns, seq)
    context_at, contexts = _contexts(where, columns["contexts_json"])
    owner, number, segments = _segments(files, adds, columns)
    batch = Batch(
        seq,
        dict(adds),
        trajectories,
        contexts,
        segments,
        context_at,
        _segment_at(where, context_at, contexts, owner, number),
        _snapshot_keys(files, adds, ends),
    )
    counts = {"steps": int(trajectories.num_steps.sum()), "segments": len(batch.segments)}
    for name, count in counts.items():
        found = adds[name].num_rows if name in adds else 0
        if found != count:
            raise CorruptData(where, 0, name, f"names {count}, their file has {found}")
    return batch


def segments_from_file(
    files: SealedFiles, path: str
) -> tuple[NDArray[np.uint8], Ints, SegmentColumns]:
    """([S, 16] trajectory ids, [S] context numbers, columns) as a segments file itself says."""
    ends = files.group_ends(path)
    table = files.read(path, list(range(len(ends))), SEGMENT_FILE_COLUMNS)
    columns = {name: whole(table.column(name)) for name in SEGMENT_FILE_COLUMNS}
    num_tokens = _ints(columns["num_tokens"], np.int32)
    rows = np.arange(len(num_tokens))
    groups = np.searchsorted(np.asarray(ends), rows, "right")
    first = np.asarray([0, *ends[:-1]])[groups]
    policy = _span_numbers(str(files.root / path), columns["spans"], num_tokens)
    found = SegmentColumns(
        start=_ints(columns["token_start"], np.int64),
        num_tokens=num_tokens,
        num_policy_tokens=policy[0],
        version_min=policy[1],
        version_max=policy[2],
        row_group=groups.astype(np.int32),
        row=(rows - first).astype(np.int32),
        content_hash=fixed(columns["content_hash"], 32),
    )
    return fixed(columns["trajectory"], 16), _ints(columns["context"], np.int32), found


def _trajectories(where: str, columns: dict[str, Any], seq: int) -> TrajectoryColumns:
    num_steps = _ints(columns["num_steps"], np.int32)
    level = _digests(columns["level"])
    run, task = _digests(columns["run_id"]), _digests(columns["task_key"])
    return TrajectoryColumns(
        id=fixed(columns["trajectory"], 16),
        parent=fixed(columns["parent"], 16),
        row=np.arange(len(level), dtype=np.int32),
        first_step=np.cumsum(num_steps, dtype=np.int64) - num_steps,
        num_steps=num_steps,
        start_step=_start_steps(where, columns["start_json"]),
        sealed_seq=filled(columns["sealed_seq"], seq).astype(np.int64),
        epoch=_ints(columns["epoch"], np.int64),
        begun=_ints(columns["begun_sequence"], np.int64),
        finished=_ints(columns["finished_sequence"], np.int64),
        num_tokens=_ints(columns["num_tokens"], np.int64),
        num_policy_tokens=_ints(columns["num_policy_tokens"], np.int64),
        num_own_tokens=_ints(columns["num_own_tokens"], np.int64),
        reward=filled(columns["reward"], np.nan).copy(),
        outcome=_digests(columns["outcome"]),
        level=level,
        group=_mix(run, task, level, _ints(columns["group_index"], np.int64)),
        is_imported=flags(columns["origin"].is_valid()),
    )


def _start_steps(where: str, column: Any) -> NDArray[np.int32]:
    steps = np.full(len(column), -1, np.int32)
    if column.null_count == len(column):
        return steps
    for row, text in enumerate(column.to_pylist()):
        if text is not None:
            try:
                steps[row] = json.loads(text)["step"]
            except (ValueError, KeyError, TypeError) as error:
                raise CorruptData(where, 0, "start_json", f"row {row}: {error}") from None
    return steps


def _contexts(where: str, column: Any) -> tuple[NDArray[np.int32], ContextColumns]:
    """From texts like "[[0, 0, 407], [1, 0, 20]]": number, base, end."""
    parts = pc.split_pattern(pc.replace_substring_regex(column, r"[\[\] ]", ""), ",")
    try:
        flat = _ints(parts.flatten().cast(pa.int64()), np.int64).reshape(-1, 3)
    except (pa.ArrowInvalid, ValueError) as error:
        raise CorruptData(where, 0, "contexts_json", str(error).split("\n")[0]) from None
    counts = _ints(parts.value_lengths(), np.int32) // 3
    return offsets(counts), ContextColumns(flat[:, 0].astype(np.int32), flat[:, 1], flat[:, 2])


def _segments(
    files: SealedFiles, adds: Mapping[str, SealedFile], columns: dict[str, Any]
) -> tuple[Ints, Ints, SegmentColumns]:
    """([S] trajectory, [S] context number, columns), by trajectory."""
    column = columns.get("segments")
    if column is None or column.null_count == len(column):
        return _derived_segments(files, adds, columns["trajectory"].to_pylist())
    owner = np.repeat(np.arange(len(column)), _ints(column.value_lengths(), np.int64))
    values = column.flatten()
    found = SegmentColumns(
        start=_ints(values.field("token_start"), np.int64),
        num_tokens=_ints(values.field("num_tokens"), np.int32),
        num_policy_tokens=_ints(values.field("num_policy_tokens"), np.int32),
        version_min=_ints(values.field("version_min"), np.int32),
        version_max=_ints(values.field("version_max"), np.int32),
        row_group=_ints(values.field("row_group"), np.int32),
        row=_ints(values.field("row"), np.int32),
        content_hash=fixed(values.field("content_hash"), 32),
    )
    return owner, _ints(values.field("context"), np.int32), found


def _derived_segments(
    files: SealedFiles, adds: Mapping[str, SealedFile], ids: list[bytes]
) -> tuple[Ints, Ints, SegmentColumns]:
    """As the segments file says; version 1.0 of `trajectories` has no column `segments`."""
    if "segments" not in adds:
        none = np.empty(0, np.int32)
        start, digests = np.empty(0, np.int64), np.empty((0, 32), np.uint8)
        return none, none, SegmentColumns(start, none, none, none, none, none, none, digests)
    path = adds["segments"].path
    found, context, segments = segments_from_file(files, path)
    index = {id: n for n, id in enumerate(ids)}
    owner = np.array([index.get(id.tobytes(), -1) for id in found], np.int64)
    if owner.min(initial=0) < 0:
        detail = "holds tokens of a trajectory that the `trajectories` file does not have"
        raise CorruptData(str(files.root / path), 0, "trajectory", detail)
    order = np.lexsort((segments.start, context, owner))
    return owner[order], context[order], segments.take(order)


def _segment_at(
    where: str, context_at: Ints, contexts: ContextColumns, owner: Ints, context: Ints
) -> NDArray[np.int32]:
    """[C + 1] first segment of each context; every segment must be of one that there is."""
    owners = np.repeat(np.arange(len(context_at) - 1), np.diff(context_at))
    have = owners << 32 | contexts.number
    want = owner.astype(np.int64) << 32 | context
    at = np.searchsorted(want, have)
    is_sorted = bool((np.diff(want) >= 0).all() and (np.diff(have) > 0).all())
    if not is_sorted or not np.isin(want, have).all():
        raise CorruptData(where, 0, "segments", "are not those of the contexts, in their order")
    return np.append(at, len(want)).astype(np.int32)


def _span_numbers(where: str, spans: Any, num_tokens: Ints) -> list[NDArray[np.int32]]:
    """[S] policy tokens, their oldest and their newest version: `span_numbers` of all segments."""
    counts = _ints(spans.value_lengths(), np.int64)
    if not counts.all():
        raise CorruptData(where, 0, "spans", "a segment has none")
    values, first = spans.flatten(), np.cumsum(counts) - counts
    starts = _ints(values.field("start"), np.int32)
    versions = _ints(values.field("policy_version"), np.int32)
    ends = np.append(starts[1:], 0)
    ends[first[1:] - 1] = num_tokens[:-1]
    ends[-1:] = num_tokens[-1:]
    authors = values.field("author").dictionary_encode()
    is_policy = [word == Author.POLICY for word in authors.dictionary.to_pylist()]
    is_own = np.array(is_policy, bool)[_ints(authors.indices, np.int64)]
    if not len(first):
        return [np.empty(0, np.int32)] * 3
    return [
        np.add.reduceat(np.where(is_own, ends - starts, 0), first).astype(np.int32),
        np.minimum.reduceat(np.where(is_own, versions, NO_VERSION), first).astype(np.int32),
        np.maximum.reduceat(np.where(is_own, versions, -1), first).astype(np.int32),
    ]


def _snapshot_keys(
    files: SealedFiles, adds: Mapping[str, SealedFile], ends: Mapping[str, list[int]]
) -> NDArray[np.int64]:
    if "snapshots" not in adds:
        return np.empty(0, np.int64)
    groups = list(range(len(ends["snapshots"])))
    names = files.read(adds["snapshots"].path, groups, ["snapshot"]).column("snapshot").to_pylist()
    return np.fromiter(map(snapshot_key, names), np.int64, len(names))


def _ints(array: Any, dtype: type[np.integer[Any]]) -> NDArray[Any]:
    return numbers(array).astype(dtype)


def _digests(column: Any) -> NDArray[np.int64]:
    """[N] a number for each text that is the same in every process; 0 for null."""
    encoded = column.dictionary_encode()
    words = encoded.dictionary.to_pylist()
    digests = [blake3(word.encode()).digest(8) for word in words]
    known = np.array([0, *(int.from_bytes(d, "little", signed=True) for d in digests)], np.int64)
    found: NDArray[np.int64] = known[filled(encoded.indices, -1).astype(np.int64) + 1]
    return found


def _mix(*parts: NDArray[np.int64]) -> NDArray[np.int64]:
    """One number for several (the finaliser of splitmix64 over their chain)."""
    mixed = np.zeros(len(parts[0]), np.uint64)
    for part in parts:
        mixed = (mixed ^ part.view(np.uint64)) + _MIX
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return mixed.view(np.int64)
