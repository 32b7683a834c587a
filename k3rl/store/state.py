"""All that a store root amounts to, in memory: manifest, trajectories, tables, journal usage.

The service and the offline reader hold the same `StoreState`; only the service changes it after
loading. No I/O here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from k3rl.store.columns import Batch
from k3rl.store.events import Event, FileStart, VersionRow
from k3rl.store.journal import Place
from k3rl.store.live import LiveState
from k3rl.store.manifest import Manifest, ManifestRecord
from k3rl.store.protocol import UpdateRow
from k3rl.store.record import TrajectoryRecord
from k3rl.types import JsonObject, Snapshot, TrajectoryId, TrajectoryState


@dataclass(frozen=True, slots=True)
class SealBatch:
    """What one round of sealing writes: everything finished up to a point of the journal."""

    records: list[TrajectoryRecord]
    snapshots: list[Snapshot]
    updates: list[UpdateRow]
    versions: list[VersionRow]
    journal_low_water: int
    journal_through: str


@dataclass(slots=True)
class StoreState:
    """One store root."""

    manifest: Manifest
    live: LiveState = field(default_factory=LiveState)
    updates: list[UpdateRow] = field(default_factory=list)
    versions: list[VersionRow] = field(default_factory=list)
    unsealed_rows: list[tuple[int, UpdateRow | VersionRow]] = field(default_factory=list)
    usage: dict[str, set[TrajectoryId]] = field(default_factory=dict)
    """Unsealed trajectories with frames in a journal file, by file; every file has an entry."""
    unsealed: dict[TrajectoryId, None] = field(default_factory=dict)
    """Finished trajectories that are not sealed yet, in the order in which they finished."""
    unsealed_tokens: int = 0
    last_sequence: int = 0
    last_version: int = 0
    """Highest policy version seen anywhere: the next one is above it."""
    recovery: JsonObject = field(default_factory=dict)
    """What loading found."""

    def apply(self, event: Event, sequence: int, place: Place) -> None:
        """Fold a durable event in."""
        usage = self.usage.setdefault(place.file, set())
        self.last_sequence = sequence
        match event:
            case FileStart():
                pass
            case UpdateRow():
                self.updates.append(event)
                self.unsealed_rows.append((sequence, event))
                self.last_version = max(self.last_version, event.policy_version_out)
            case VersionRow():
                self.versions.append(event)
                self.unsealed_rows.append((sequence, event))
                self.last_version = max(self.last_version, event.policy_version)
            case _:
                self.live.apply(event, sequence, place)
                usage.add(event.id)
                record = self.live.records[event.id]
                if record.state is TrajectoryState.FINISHED:
                    self.unsealed[event.id] = None
                    self.unsealed_tokens += record.num_own_tokens

    def has_unsealed(self, sequence: int) -> bool:
        """Whether anything that ended or was recorded up to `sequence` is not sealed yet."""
        first = next(iter(self.unsealed), None)
        if first and self.live.records[first].finished_sequence <= sequence:
            return True
        return bool(self.unsealed_rows) and self.unsealed_rows[0][0] <= sequence

    def take(self, record: ManifestRecord, added: Batch | None) -> None:
        """The next record of the chain: batches whose files it removes go, `added` comes.

        Sealed trajectories that it drops go too.
        """
        self.manifest.take(record)
        gone, archive = set(record.removes), self.live.sealed
        removed = [
            batch
            for batch in archive.catalog.batches
            if any(file.path in gone for file in batch.files.values())
        ]
        archive.catalog.take(added, [batch.seq for batch in removed])
        for batch in removed:
            archive.forget(batch)
        archive.drop(record.drops)

    def first_sealed(self, ids: Collection[TrajectoryId]) -> int:
        """The first record that had any of these sealed; the next one when none had."""
        places = filter(None, map(self.live.sealed.catalog.find, ids))
        seqs = [int(place.batch.trajectories.sealed_seq[place.at]) for place in places]
        return min(seqs, default=self.manifest.head.seq + 1)

    def batch(self, low_water: int, through: str, max_tokens: int) -> SealBatch:
        """What can be sealed of frames up to sequence `low_water` in files up to `through`."""
        records: list[TrajectoryRecord] = []
        tokens = 0
        for id in self.unsealed:
            record = self.live.records[id]
            if record.finished_sequence > low_water or (records and tokens >= max_tokens):
                break
            records.append(record)
            tokens += record.num_own_tokens
        names = {step.snapshot_after: None for record in records for step in record.steps}
        snapshots = [self.live.snapshot(name) for name in names if name]
        rows = [row for sequence, row in self.unsealed_rows if sequence <= low_water]
        return SealBatch(
            records=records,
            snapshots=[snapshot for snapshot in snapshots if snapshot],
            updates=[row for row in rows if isinstance(row, UpdateRow)],
            versions=[row for row in rows if isinstance(row, VersionRow)],
            journal_low_water=low_water,
            journal_through=through,
        )

    def seal_record(self, batch: SealBatch) -> ManifestRecord:
        """The manifest record of a batch, still without the files that it adds."""
        ids = {record.id for record in batch.records}
        closed = [name for name in self.usage if name <= batch.journal_through]
        return replace(
            self.next_record(),
            journal_low_water=batch.journal_low_water,
            journal_through=batch.journal_through,
            journal_files=tuple(sorted(name for name in closed if self.usage[name] - ids)),
        )

    def next_record(self) -> ManifestRecord:
        """A record that changes nothing, to be filled in."""
        return replace(self.manifest.next_record(), last_version=self.last_version)

    def sealed(self, batch: SealBatch, record: ManifestRecord, added: Batch | None) -> list[str]:
        """The batch is sealed by `record`; returns the journal files that are needed no more."""
        self.take(record, added)
        ids = set()
        for sealed in batch.records:
            ids.add(sealed.id)
            sealed.sealed_seq = record.seq
            self.live.seal(sealed)
            del self.unsealed[sealed.id]
            self.unsealed_tokens -= sealed.num_own_tokens
        low_water = batch.journal_low_water
        self.unsealed_rows = [row for row in self.unsealed_rows if row[0] > low_water]
        for users in self.usage.values():
            users -= ids
        kept = set(record.journal_files)
        gone = [n for n in self.usage if n <= record.journal_through and n not in kept]
        for name in gone:
            del self.usage[name]
        return gone
