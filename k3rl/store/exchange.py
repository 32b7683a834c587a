"""Export of one finished trajectory with its snapshots to a file, and import into another store.

An import is one sealed batch: every byte of the file is checked first, then the blobs are made
durable, then one manifest record makes the trajectory exist. A crash leaves all of it or nothing
that is visible, and importing again is a no-op. It belongs to the store's files alone: no update
row, no version and no ledger comes with it, and `origin` tells it from what was played here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from k3rl.blobs import BlobStore
from k3rl.errors import StoreError, UserInputError
from k3rl.store.parcel import (
    Kind,
    Parcel,
    ParcelTokens,
    References,
    digest_of,
    head_of,
    pack,
    pack_tokens,
    snapshots_of,
    token_ranges,
)
from k3rl.store.protocol import Ref
from k3rl.store.reader import StoreReader
from k3rl.store.record import TrajectoryRecord
from k3rl.store.recovery import RootLock, recover
from k3rl.store.rules import same
from k3rl.store.sealing import seal
from k3rl.store.sections import SectionFile, SectionWriter
from k3rl.store.state import SealBatch, StoreState
from k3rl.types import Digest, Snapshot, Trajectory, TrajectoryId, TrajectoryState


@dataclass(frozen=True, slots=True)
class Report:
    """What a file holds, and whether an import added it."""

    id: TrajectoryId
    num_tokens: int
    num_steps: int
    num_snapshots: int
    num_blobs: int
    num_bytes: int
    """Of the file."""
    is_new: bool = True
    """False: the store had this very trajectory already."""


def export_trajectory(root: Path, prefix: str, path: Path, references: References) -> Report:
    """Write a finished trajectory, by id or unambiguous prefix, to a new file.

    A service may run on `root`. Raises UserInputError when `path` exists, StoreError when the
    trajectory is unknown or unfinished, a blob is missing or the disk refuses, CorruptData.
    """
    reader, blobs = StoreReader(root), BlobStore(root / "blobs")
    trajectory = reader.get(prefix)
    if trajectory.state is not TrajectoryState.FINISHED:
        raise StoreError(
            f"trajectory {trajectory.id} is {trajectory.state}: only finished ones are exported"
        )
    snapshots = [reader.snapshot(name) for name in snapshots_of(trajectory.steps)]
    num_blobs = 0
    with SectionWriter(path) as out:
        for kind, content in _carriers(reader, trajectory):
            out.add(kind, content)
        for content in _contents(blobs, snapshots, references):
            out.add(Kind.BLOB, content)
            num_blobs += 1
    return Report(
        trajectory.id,
        trajectory.num_tokens,
        len(trajectory.steps),
        len(snapshots),
        num_blobs,
        path.stat().st_size,
    )


def import_trajectory(root: Path, path: Path, references: References) -> Report:
    """Take an exported trajectory into a store, which is made when there is none.

    No service may run on `root`. Raises CorruptData (file, offset, field) for any damage and
    SchemaTooNew, both before anything is written; StoreError when the store has another trajectory
    or snapshot of that name, or the disk refuses; UserInputError for a wrong path.
    """
    with SectionFile(path) as file:
        parcel = Parcel.read(file, references)
        _check_place(root)
        lock = RootLock(root)
        try:
            state = recover(root, True)
            is_new = not _is_stored(StoreReader(root), parcel)
            blobs = BlobStore(root / "blobs")
            for section in parcel.blobs.values():
                blobs.put(file.content(section))
            if is_new:
                _seal(root, state, parcel)
        finally:
            lock.release()
        return Report(
            parcel.head.header.id,
            sum(parcel.head.contexts),
            len(parcel.steps),
            len(parcel.snapshots),
            len(parcel.blobs),
            file.num_bytes,
            is_new,
        )


def _carriers(reader: StoreReader, trajectory: Trajectory) -> Iterator[tuple[int, bytes]]:
    head = head_of(trajectory)
    yield Kind.HEAD, pack(head)
    for step in trajectory.steps:
        yield Kind.STEP, pack(step)
    for context, start, end in token_ranges(head, trajectory.steps):
        yield Kind.TOKENS, pack_tokens(reader.read(Ref(trajectory.id, start, end, context)))
    for name in snapshots_of(trajectory.steps):
        yield Kind.SNAPSHOT, pack(reader.snapshot(name))


def _contents(
    blobs: BlobStore, snapshots: list[Snapshot], references: References
) -> Iterator[bytes]:
    """Every blob that the snapshots need, once; a layer comes before what it names."""
    done: set[Digest] = set()
    for layer in dict.fromkeys(layer for taken in snapshots for layer in taken.layers):
        content = blobs.get(layer)
        names = references(content, str(blobs.path(layer)))
        for digest in (layer, *names):
            if digest not in done:
                done.add(digest)
                yield content if digest == layer else blobs.get(digest)


def _check_place(root: Path) -> None:
    if root.exists() and not root.is_dir():
        raise UserInputError(f"{root}: is not a folder")
    names = {entry.name for entry in root.iterdir()} if root.exists() else set()
    if names and not names & {"_log", "LOCK"}:
        raise UserInputError(f"{root}: is neither a store nor empty")


def _is_stored(reader: StoreReader, parcel: Parcel) -> bool:
    """Whether the store holds this very trajectory. Raises StoreError when it holds another."""
    id, live = parcel.head.header.id, reader.state.live
    for taken in parcel.snapshots:
        known = live.snapshot(taken.snapshot_id)
        if known is not None and not same(known, taken):
            raise StoreError(f"snapshot {taken.snapshot_id} exists here with another content")
    if id not in live:
        return False
    found = reader.get(id)
    if found.state is not TrajectoryState.FINISHED:
        raise StoreError(f"trajectory {id} exists here and is {found.state}")
    if digest_of(_carriers(reader, found)) != parcel.content:
        raise StoreError(f"trajectory {id} exists here with another content")
    return True


def _seal(root: Path, state: StoreState, parcel: Parcel) -> None:
    """One sealed batch, as of the last frame of the journal."""
    head, sequence = parcel.head, max(state.last_sequence, 1)
    record = TrajectoryRecord(
        header=head.header,
        start=None,
        begun_sequence=sequence,
        state=TrajectoryState.FINISHED,
        contexts=parcel.contexts,
        steps=parcel.steps,
        outcome=head.outcome,
        finished_sequence=sequence,
        num_policy_tokens=head.num_policy_tokens,
        origin=parcel.content,
    )
    draft = replace(state.next_record(), is_import=True)
    batch = SealBatch([record], parcel.snapshots, [], [], state.last_sequence, "")
    seal(root, state.manifest, ParcelTokens(parcel), batch, draft)
