"""The rows of the sealed tables: carriers to rows and back.

Nested carriers travel as JSON; what a reader from outside would filter on has a column of its own.
Ids and hashes are hex strings in memory and fixed-size binary on disk.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from k3rl.store.events import BranchStart, VersionRow
from k3rl.store.protocol import UpdateRow
from k3rl.store.record import ContextRecord, TrajectoryRecord
from k3rl.store.schemas import schema
from k3rl.store.segment_keys import SealedRow
from k3rl.types import (
    Media,
    Outcome,
    ProcessState,
    Segment,
    Snapshot,
    Step,
    TrajectoryHeader,
    TrajectoryId,
    TrajectoryState,
    from_plain,
    to_plain,
)


class StepRow(NamedTuple):
    """A step and whose it is."""

    id: TrajectoryId
    step: Step


def to_table(table: str, rows: Iterable[Any]) -> pa.Table:
    """Carriers as an Arrow table.

    By table: Segment, StepRow, SealedRow, Snapshot, UpdateRow, VersionRow.
    """
    rows = list(rows)
    if table == "segments":
        return segments_table(rows)
    makers: dict[str, Callable[[Any], dict[str, Any]]] = {
        "steps": _step_row,
        "trajectories": _trajectory_row,
        "snapshots": _snapshot_row,
        "updates": _update_row,
        "versions": _version_row,
    }
    return pa.Table.from_pylist([makers[table](row) for row in rows], schema=schema(table))


def segments_table(rows: list[Segment]) -> pa.Table:
    """Segments as an Arrow table; token arrays are not copied one by one."""
    lengths = [len(row.token_ids) for row in rows]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))

    def tokens(name: str, kind: pa.DataType) -> pa.Array:
        values = np.concatenate([getattr(row, name) for row in rows])
        return pa.ListArray.from_arrays(offsets, pa.array(values, kind, from_pandas=False))

    columns = {
        "trajectory": [bytes.fromhex(row.id) for row in rows],
        "context": [row.context for row in rows],
        "segment": [row.index for row in rows],
        "token_start": [row.token_start for row in rows],
        "num_tokens": lengths,
        "token_ids": tokens("token_ids", pa.int32()),
        "loss_mask": tokens("loss_mask", pa.bool_()),
        "rollout_logprobs": tokens("rollout_logprobs", pa.float32()),
        "spans": [[to_plain(span) for span in row.spans] for row in rows],
        "media": [[_media_row(media) for media in row.media] for row in rows],
        "expert_ids": [_raw(row.expert_ids) for row in rows],
        "content_hash": [bytes.fromhex(row.content_hash) for row in rows],
    }
    target = schema("segments")
    arrays = [
        columns[f.name]
        if isinstance(columns[f.name], pa.Array)
        else pa.array(columns[f.name], f.type)
        for f in target
    ]
    return pa.Table.from_arrays(arrays, schema=target)


def steps_from(rows: list[dict[str, Any]]) -> list[StepRow]:
    """The inverse of `to_table("steps", ...)`."""
    return [
        StepRow(row["trajectory"].hex(), from_plain(Step, json.loads(row["step_json"])))
        for row in rows
    ]


def snapshots_from(rows: list[dict[str, Any]]) -> list[Snapshot]:
    """The inverse of `to_table("snapshots", ...)`."""
    return [
        Snapshot(
            snapshot_id=row["snapshot"],
            parent=row["parent"],
            layers=tuple(layer.hex() for layer in row["layers"]),
            session=json.loads(row["session_json"]),
            tree_digest=row["tree_digest"],
            num_bytes=row["num_bytes"],
            process_state=ProcessState(row["process_state"]),
        )
        for row in rows
    ]


def updates_from(rows: list[dict[str, Any]]) -> list[UpdateRow]:
    """The inverse of `to_table("updates", ...)`."""
    return [
        UpdateRow(
            update=row["update"],
            policy_version_in=row["policy_version_in"],
            policy_version_out=row["policy_version_out"],
            manifest_seq=row["manifest_seq"],
            rng_key=row["rng_key"],
            members=tuple(member.hex() for member in row["members"]),
            advantages=tuple(row["advantages"]),
            denominators=json.loads(row["denominators_json"]),
            loss=tuple(row["loss"]),
            gradient_norm=row["gradient_norm"],
            checkpoint=_hex(row["checkpoint"]),
        )
        for row in rows
    ]


def versions_from(rows: list[dict[str, Any]]) -> list[VersionRow]:
    """The inverse of `to_table("versions", ...)`."""
    return [
        VersionRow(row["policy_version"], row["parent"], row["checksum"].hex(), _hex(row["blob"]))
        for row in rows
    ]


def _json(value: Any, cls: Any = None) -> str | None:
    """Escaped to ASCII: a tool's output may hold what UTF-8 cannot (lone surrogates)."""
    return None if value is None else json.dumps(to_plain(value, cls))


def _raw(digest: str | None) -> bytes | None:
    return None if digest is None else bytes.fromhex(digest)


def _hex(raw: bytes | None) -> str | None:
    return None if raw is None else raw.hex()


def _media_row(media: Media) -> dict[str, Any]:
    return {**to_plain(media), "blob": _raw(media.blob)}


def _step_row(row: StepRow) -> dict[str, Any]:
    step = row.step
    names = ("context", "token_start", "token_end", "finish_reason", "snapshot_before")
    more = ("snapshot_after", "tree_digest", "generate_s", "act_s", "snapshot_s")
    return {
        "trajectory": bytes.fromhex(row.id),
        "step": step.index,
        "step_json": _json(step),
        **{name: getattr(step, name) for name in names + more},
    }


def _trajectory_row(sealed: SealedRow) -> dict[str, Any]:
    record = sealed.record
    key, outcome, parent = record.header.key, record.outcome, record.header.parent
    contexts = [[n, c.base, c.committed] for n, c in sorted(record.contexts.items())]
    return {
        "trajectory": bytes.fromhex(record.id),
        "run_id": key.run_id,
        "env_id": record.header.task.env_id,
        "task_key": key.task_key,
        "level": key.level,
        "group_index": key.group_index,
        "sample_index": key.sample_index,
        "attempt": key.attempt,
        "iteration": record.header.iteration,
        "parent": bytes.fromhex(parent.id) if parent else None,
        "outcome": outcome.kind if outcome else None,
        "reward": outcome.reward if outcome else None,
        "num_tokens": record.num_tokens,
        "num_policy_tokens": record.num_policy_tokens,
        "num_own_tokens": record.num_own_tokens,
        "num_steps": len(record.steps),
        "epoch": record.epoch,
        "begun_sequence": record.begun_sequence,
        "finished_sequence": record.finished_sequence,
        "header_json": _json(record.header),
        "outcome_json": _json(outcome),
        "start_json": _json(record.start),
        "contexts_json": json.dumps(contexts),
        "sealed_seq": sealed.sealed_seq,
        "segments": [segment._asdict() for segment in sealed.segments],
        "origin": _raw(record.origin),
    }


def record_from(row: dict[str, Any]) -> TrajectoryRecord:
    """The record in a row of `trajectories`; it has no steps and no extents."""
    start = row["start_json"]
    return TrajectoryRecord(
        header=from_plain(TrajectoryHeader, json.loads(row["header_json"])),
        start=from_plain(BranchStart, json.loads(start)) if start else None,
        begun_sequence=row["begun_sequence"],
        state=TrajectoryState.FINISHED,
        epoch=row["epoch"],
        contexts={
            number: ContextRecord(base, committed, committed)
            for number, base, committed in json.loads(row["contexts_json"])
        },
        outcome=from_plain(Outcome, json.loads(row["outcome_json"])),
        finished_sequence=row["finished_sequence"],
        num_policy_tokens=row["num_policy_tokens"],
        origin=_hex(row["origin"]),
    )


def _snapshot_row(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "snapshot": snapshot.snapshot_id,
        "parent": snapshot.parent,
        "layers": [bytes.fromhex(layer) for layer in snapshot.layers],
        "session_json": _json(snapshot.session, dict),
        "tree_digest": snapshot.tree_digest,
        "num_bytes": snapshot.num_bytes,
        "process_state": snapshot.process_state,
    }


def _update_row(row: UpdateRow) -> dict[str, Any]:
    return {
        "update": row.update,
        "policy_version_in": row.policy_version_in,
        "policy_version_out": row.policy_version_out,
        "manifest_seq": row.manifest_seq,
        "rng_key": row.rng_key,
        "members": [bytes.fromhex(member) for member in row.members],
        "advantages": list(row.advantages),
        "denominators_json": json.dumps(row.denominators),
        "loss": list(row.loss),
        "gradient_norm": row.gradient_norm,
        "checkpoint": _raw(row.checkpoint),
    }


def _version_row(row: VersionRow) -> dict[str, Any]:
    return {
        "policy_version": row.policy_version,
        "parent": row.parent,
        "checksum": _raw(row.checksum),
        "blob": _raw(row.blob),
    }
