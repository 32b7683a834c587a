"""Sealed trajectories and snapshots as carriers, read from their files when somebody asks.

What was read last is kept, up to a number of steps and snapshots. A carrier that is handed out is
shared: nobody changes it. Safe to use from several threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from k3rl.errors import CorruptData
from k3rl.store.catalog import Catalog
from k3rl.store.columns import Batch
from k3rl.store.open_files import SealedFiles
from k3rl.store.record import TrajectoryRecord
from k3rl.store.tables import record_from, snapshots_from, steps_from
from k3rl.types import Snapshot, TrajectoryId

MAX_STEPS = 10_000
"""Of trajectories kept in memory; one of them weighs as much as a step itself."""
MAX_SNAPSHOTS = 1_000
CHUNK = 512
"""Trajectories made at a time when all are asked for."""
ATTEMPTS = 3
RECORD_COLUMNS = [
    *("trajectory", "epoch", "num_policy_tokens", "begun_sequence", "finished_sequence"),
    *("header_json", "outcome_json", "start_json", "contexts_json", "origin"),
]
STEP_COLUMNS = ["trajectory", "step_json"]
SNAPSHOT_COLUMNS = [
    *("snapshot", "parent", "layers", "session_json", "tree_digest", "num_bytes"),
    "process_state",
]
T = TypeVar("T")


class Archive:
    """The sealed half of a store: columns in memory, the rest in files."""

    def __init__(self, files: SealedFiles | None = None) -> None:
        """Empty. `files` may be None as long as it stays so."""
        self.catalog = Catalog()
        self.files = files or SealedFiles(Path(), lambda path: None)
        self._records = _Kept[TrajectoryRecord](MAX_STEPS)
        self._snapshots = _Kept[Snapshot](MAX_SNAPSHOTS)

    def record(self, id: TrajectoryId) -> TrajectoryRecord | None:
        """A trajectory with its steps, without extents; None when it is not sealed.

        Raises CorruptData.
        """
        return self._records.get(id) or self._still(lambda: self._find_record(id))

    def snapshot(self, snapshot_id: str) -> Snapshot | None:
        """A snapshot of a sealed trajectory. Raises CorruptData."""
        found = self._snapshots.get(snapshot_id)
        return found or self._still(lambda: self._find_snapshot(snapshot_id))

    def keep(self, record: TrajectoryRecord) -> None:
        """A record that has just been sealed: likely to be asked for."""
        self._records.put(record.id, record, len(record.steps) + 1)

    def forget(self, batch: Batch) -> None:
        """A batch was taken out, and so were its files."""
        for id in batch.ids:
            self._records.drop(id)
        self.files.forget(file.path for file in batch.files.values())

    def drop(self, ids: Collection[TrajectoryId]) -> None:
        """Trajectories are no more; their rows stay in the files."""
        if ids:
            self.catalog.drop(ids)
            for id in ids:
                self._records.drop(id)

    def records(self, batch: Batch) -> Iterator[TrajectoryRecord]:
        """All trajectories of a batch, in its order, without extents. Raises CorruptData."""
        for low in range(0, len(batch), CHUNK):
            yield from self._make(batch, low, min(low + CHUNK, len(batch)))

    def snapshots(self, batch: Batch) -> Iterator[Snapshot]:
        """All snapshots of a batch. Raises CorruptData."""
        for low in range(0, len(batch.snapshot_keys), CHUNK):
            high = min(low + CHUNK, len(batch.snapshot_keys))
            yield from self._make_snapshots(batch, low, high)

    def _find_record(self, id: TrajectoryId) -> TrajectoryRecord | None:
        place = self.catalog.find(id)
        if place is None:
            return None
        (record,) = self._make(place.batch, place.at, place.at + 1)
        self.keep(record)
        return record

    def _find_snapshot(self, snapshot_id: str) -> Snapshot | None:
        for batch, row in self.catalog.find_snapshot(snapshot_id):
            (found,) = self._make_snapshots(batch, row, row + 1)
            if found.snapshot_id == snapshot_id:
                self._snapshots.put(snapshot_id, found, 1)
                return found
        return None

    def _make(self, batch: Batch, low: int, high: int) -> list[TrajectoryRecord]:
        """Trajectories [low, high) of a batch."""
        columns = batch.trajectories
        at, first = columns.row[low:high].tolist(), columns.first_step[low:high].tolist()
        counts = columns.num_steps[low:high].tolist()
        rows = self._rows(batch, "trajectories", at[0], at[-1] + 1, RECORD_COLUMNS)
        steps = self._rows(batch, "steps", first[0], first[-1] + counts[-1], STEP_COLUMNS)
        made = []
        for n, count in enumerate(counts):
            own = steps[first[n] - first[0] :][:count]
            record = self._record(batch, low + n, rows[at[n] - at[0]], own)
            record.sealed_seq = int(columns.sealed_seq[low + n])
            made.append(record)
        return made

    def _record(
        self, batch: Batch, index: int, row: dict[str, Any], steps: list[dict[str, Any]]
    ) -> TrajectoryRecord:
        id = batch.trajectories.id[index].tobytes()
        for table, found in (("trajectories", [row]), ("steps", steps)):
            if any(one["trajectory"] != id for one in found):
                detail = f"the rows of trajectory {id.hex()} are another's"
                raise self._corrupt(batch, table, "trajectory", detail)
        try:
            record = record_from(row)
        except (ValueError, TypeError, LookupError) as error:
            detail = f"trajectory {id.hex()}: {error}"
            raise self._corrupt(batch, "trajectories", "row", detail) from None
        try:
            record.steps = [found.step for found in steps_from(steps)]
        except (ValueError, TypeError, LookupError) as error:
            detail = f"trajectory {id.hex()}: {error}"
            raise self._corrupt(batch, "steps", "step_json", detail) from None
        return record

    def _make_snapshots(self, batch: Batch, low: int, high: int) -> list[Snapshot]:
        rows = self._rows(batch, "snapshots", low, high, SNAPSHOT_COLUMNS)
        try:
            return snapshots_from(rows)
        except (ValueError, TypeError, LookupError) as error:
            raise self._corrupt(batch, "snapshots", "row", str(error)) from None

    def _rows(
        self, batch: Batch, table: str, low: int, high: int, columns: list[str]
    ) -> list[dict[str, Any]]:
        return self.files.rows(batch.files[table].path, low, high, columns) if low < high else []

    def _corrupt(self, batch: Batch, table: str, field: str, detail: str) -> CorruptData:
        return CorruptData(str(self.files.root / batch.files[table].path), 0, field, detail)

    def _still(self, find: Callable[[], T]) -> T:
        """Look again when files went away with the record that replaced them."""
        for _ in range(ATTEMPTS):
            try:
                return find()
            except FileNotFoundError as error:
                missing = str(error.filename)
        raise CorruptData(missing, 0, "file", "named by the manifest but missing")


class _Kept(Generic[T]):
    """What was used last, up to a total weight."""

    def __init__(self, limit: int) -> None:
        self._limit, self._total = limit, 0
        self._items: OrderedDict[str, tuple[T, int]] = OrderedDict()
        self._guard = threading.Lock()

    def get(self, key: str) -> T | None:
        with self._guard:
            found = self._items.get(key)
            if found is None:
                return None
            self._items.move_to_end(key)
            return found[0]

    def put(self, key: str, item: T, weight: int) -> None:
        with self._guard:
            self._drop(key)
            self._items[key] = (item, weight)
            self._total += weight
            while self._total > self._limit and len(self._items) > 1:
                self._drop(next(iter(self._items)))

    def drop(self, key: str) -> None:
        with self._guard:
            self._drop(key)

    def _drop(self, key: str) -> None:
        _, weight = self._items.pop(key, (None, 0))
        self._total -= weight
