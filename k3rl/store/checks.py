"""What is checked of a request before it is journaled: a bad row would surface only at sealing."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from k3rl.blobs import BlobStore
from k3rl.errors import StoreError, UserInputError
from k3rl.store.protocol import SampleRequest, SampleUnit, StepFrame, UpdateRow
from k3rl.types import Digest, Snapshot, Step, TokenFrame, TrajectoryHeader

INT32, INT64 = 2**31, 2**63
What: TypeAlias = str | Callable[[], str]
"""The subject of a complaint; what is checked 20,000 times in a second says it only if asked."""
_DIGEST = re.compile("[0-9a-f]{64}")
_ID = re.compile("[0-9a-f]{32}")


def check_digest(what: str, digest: Digest | None) -> None:
    """Raises UserInputError unless `digest` is None or 64 hex digits."""
    if digest is not None and not _DIGEST.fullmatch(digest):
        raise UserInputError(f"{what}: {digest!r} is not a digest (64 hex digits)")


def check_text(what: str, *texts: str | None) -> None:
    """Raises UserInputError for a text that UTF-8 cannot hold (a lone surrogate)."""
    for text in texts:
        try:
            (text or "").encode()
        except UnicodeEncodeError as error:
            raise UserInputError(f"{what}: {text!r} cannot be stored: {error.reason}") from None


def check_numbers(what: What, limit: int, *numbers: int | None) -> None:
    """Raises UserInputError for a number outside [-limit, limit)."""
    for number in numbers:
        if not -limit <= (number or 0) < limit:
            name = what if isinstance(what, str) else what()
            raise UserInputError(f"{name}: {number} does not fit {limit.bit_length()} bits")


def check_header(header: TrajectoryHeader) -> None:
    """Raises UserInputError for a header that the `trajectories` table cannot hold."""
    key, parent = header.key, header.parent
    texts = (key.run_id, key.task_key, key.level, header.task.env_id)
    check_text("trajectory header", *texts)
    numbers = (key.group_index, key.sample_index, key.attempt, header.iteration)
    check_numbers(f"trajectory {header.id}", INT64, *numbers)
    if parent is not None:
        where = f"trajectory {header.id}: parent"
        if not _ID.fullmatch(parent.id):
            raise UserInputError(f"{where}: {parent.id!r} is not a trajectory id")
        check_numbers(where, INT32, parent.context, parent.step)


def check_frame(frame: TokenFrame) -> None:
    """Raises UserInputError for numbers that the `segments` table cannot hold."""
    where = partial("trajectory {}: tokens at {}".format, frame.id, frame.offset)
    check_numbers(where, INT32, frame.context)
    check_numbers(where, INT64, frame.offset, frame.epoch)
    for span in frame.spans:
        check_numbers(where, INT32, span.policy_version, span.state_version)


def check_commit(frame: StepFrame, blobs: BlobStore) -> None:
    """Raises UserInputError for a step that the tables cannot hold.

    Raises StoreError when a layer of the snapshot is not stored, so it could not be restored.
    """
    check_step_fits(frame.step)
    if frame.tokens is not None:
        check_frame(frame.tokens)
    if frame.snapshot is None:
        return
    check_snapshot_fits(frame.snapshot)
    for layer in frame.snapshot.layers:
        if not blobs.has(layer):
            raise StoreError(
                f"snapshot {frame.snapshot.snapshot_id}: {blobs.path(layer)} is missing: "
                "put layers first"
            )


def check_step_fits(step: Step) -> None:
    """Raises UserInputError for a step that the `steps` table cannot hold."""
    where = partial("step {}".format, step.index)
    check_numbers(where, INT32, step.index, step.context)
    check_numbers(where, INT64, step.token_start, step.token_end)
    check_text("step", step.snapshot_before, step.snapshot_after, step.tree_digest)


def check_snapshot_fits(taken: Snapshot) -> None:
    """Raises UserInputError for a snapshot that the `snapshots` table cannot hold."""
    name = taken.snapshot_id
    check_text("snapshot", name, taken.parent, taken.tree_digest, taken.process_state)
    check_numbers(f"snapshot {name}", INT64, taken.num_bytes)
    for layer in taken.layers:
        check_digest(f"snapshot {name}: layer", layer)


def check_update(row: UpdateRow) -> None:
    """Raises UserInputError when it does not fit, or members, advantages and losses differ."""
    check_text(f"update {row.update}: rng_key", row.rng_key)
    numbers = (row.update, row.policy_version_in, row.policy_version_out, row.manifest_seq)
    check_numbers(f"update {row.update}", INT64, *numbers)
    check_digest(f"update {row.update}: checkpoint", row.checkpoint)
    for member in row.members:
        if not _ID.fullmatch(member):
            raise UserInputError(f"update {row.update}: {member!r} is not a trajectory id")
    counts = {len(row.members), len(row.advantages), len(row.loss)}
    if len(counts) > 1:
        raise UserInputError(f"update {row.update}: members, advantages and loss differ in length")


def check_version(parent: int, last: int, checksum: Digest, blob: Digest | None) -> None:
    """Raises UserInputError for a parent that was never handed out, or bad digests."""
    check_digest("version: checksum", checksum)
    check_digest("version: blob", blob)
    if not 0 <= parent <= last:
        raise UserInputError(f"version: parent {parent} is not one of 0..{last}")


def check_sample(request: SampleRequest) -> None:
    """Raises UserInputError for a draw that cannot be made of any store."""
    unit, window = request.unit, request.window
    if request.n < 0 or (window is not None and window < 1):
        raise UserInputError(f"sample: n {request.n} and window {window} must be counts")
    if unit is SampleUnit.TOKEN and window is None:
        raise UserInputError("sample: unit token needs a window")
    if unit is SampleUnit.SEGMENT and window is not None:
        raise UserInputError("sample: unit segment takes no window: a segment is drawn whole")
    if request.weights is not None and request.reward_temperature is not None:
        raise UserInputError("sample: weights and reward_temperature exclude each other")
    for weight in (request.weights or {}).values():
        if not 0 <= weight < math.inf:
            raise UserInputError(f"sample: {weight} is not a weight")
    if request.reward_temperature is not None and not request.reward_temperature > 0:
        raise UserInputError(f"sample: temperature {request.reward_temperature} is not positive")
