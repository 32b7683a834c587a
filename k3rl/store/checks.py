"""What is checked of a request before it is journaled: a bad row would surface only at sealing."""

from __future__ import annotations

import re

from k3rl.blobs import BlobStore
from k3rl.errors import StoreError, UserInputError
from k3rl.store.protocol import StepFrame, UpdateRow
from k3rl.types import Digest

_DIGEST = re.compile("[0-9a-f]{64}")
_ID = re.compile("[0-9a-f]{32}")


def check_digest(what: str, digest: Digest | None) -> None:
    """Raises UserInputError unless `digest` is None or 64 hex digits."""
    if digest is not None and not _DIGEST.fullmatch(digest):
        raise UserInputError(f"{what}: {digest!r} is not a digest (64 hex digits)")


def check_commit(frame: StepFrame, blobs: BlobStore) -> None:
    """Raises StoreError when a layer of the snapshot is not stored, so it could not be restored."""
    if frame.snapshot is None:
        return
    name = frame.snapshot.snapshot_id
    for layer in frame.snapshot.layers:
        check_digest(f"snapshot {name}: layer", layer)
        if not blobs.has(layer):
            raise StoreError(f"snapshot {name}: {blobs.path(layer)} is missing: put layers first")


def check_update(row: UpdateRow) -> None:
    """Raises UserInputError when members, advantages and losses do not match."""
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
