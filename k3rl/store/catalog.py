"""All sealed trajectories by id, as columns; a batch of them comes and goes with its record.

Looking up costs the logarithm of their number, and so does adding (amortised). Only the owner
changes it; other threads may look up meanwhile and see it before or after a change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from k3rl.store.columns import Batch, hex_ids, id_key, snapshot_key
from k3rl.store.record import Piece, TokenRange
from k3rl.types import TrajectoryId

RUN_FACTOR = 4
"""A sorted run of an index is at least so many times longer than the next one."""
Run: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64]]


class Place(NamedTuple):
    """A trajectory of a batch."""

    batch: Batch
    at: int

    @property
    def id(self) -> TrajectoryId:
        """Its id."""
        return self.batch.id(self.at)

    @property
    def branched_from(self) -> TrajectoryId | None:
        """See `TrajectoryRecord`."""
        return self.batch.parent(self.at)

    def ranges(self) -> dict[int, TokenRange]:
        """See `TrajectoryRecord`."""
        return self.batch.ranges(self.at)

    def pieces(self, context: int, start: int, end: int) -> list[Piece]:
        """See `Batch`."""
        return self.batch.pieces(self.at, context, start, end)


class Index:
    """Integers by 64-bit keys that need not differ, in a few sorted runs: 16 bytes an entry."""

    def __init__(self, runs: tuple[Run, ...] = ()) -> None:
        """`runs` of keys and values, sorted by key."""
        self._runs = runs

    def plus(self, keys: NDArray[np.int64], values: NDArray[np.int64]) -> Index:
        """What there is, and more values under more keys."""
        if not len(keys):
            return self
        runs = [*self._runs]
        while runs and len(runs[-1][0]) < RUN_FACTOR * len(keys):
            old_keys, old_values = runs.pop()
            keys = np.concatenate([old_keys, keys])
            values = np.concatenate([old_values, values])
        order = np.argsort(keys, kind="stable")
        return Index((*runs, (keys[order], values[order])))

    def find(self, key: int) -> Iterator[int]:
        """What lies under a key."""
        return self.between(key, key)

    def between(self, low: int, high: int) -> Iterator[int]:
        """What lies under the keys from `low` to `high`, both included."""
        first, last = np.int64(low), np.int64(high)
        for keys, values in self._runs:
            at = int(keys.searchsorted(first))
            while at < len(keys) and keys[at] <= last:
                yield int(values[at])
                at += 1


class _View(NamedTuple):
    """What is there at one time. Values of an index: batch << 32 | row."""

    batches: Mapping[int, Batch]
    ids: Index
    snapshots: Index

    def plus(self, batch: Batch) -> _View:
        high = np.int64(batch.seq << 32)
        return _View(
            {**self.batches, batch.seq: batch},
            self.ids.plus(batch.keys, high + np.arange(len(batch))),
            self.snapshots.plus(batch.snapshot_keys, high + np.arange(len(batch.snapshot_keys))),
        )

    def place(self, value: int) -> Place:
        return Place(self.batches[value >> 32], value & 0xFFFFFFFF)


class Catalog:
    """The sealed trajectories of a store root."""

    def __init__(self) -> None:
        """Empty."""
        self._view = _View({}, Index(), Index())
        self.num_swaps = 0
        """How often batches were taken out: what was computed of them before is void."""

    @property
    def batches(self) -> list[Batch]:
        """In the order in which they were added."""
        return list(self._view.batches.values())

    def take(self, added: Batch | None, removed: Collection[int] = ()) -> None:
        """What a manifest record does: batches it takes out, by their record, and one it adds."""
        view = self._view
        if removed:
            kept = [batch for batch in self.batches if batch.seq not in removed]
            view = _View({}, Index(), Index())
            for batch in kept:
                view = view.plus(batch)
            self.num_swaps += 1
        self._view = view.plus(added) if added is not None else view

    def drop(self, ids: Collection[TrajectoryId]) -> None:
        """Take trajectories out; batches keep the others."""
        rows: defaultdict[int, list[int]] = defaultdict(list)
        for place in filter(None, map(self.find, ids)):
            rows[place.batch.seq].append(place.at)
        view = _View({}, Index(), Index())
        for batch in self.batches:
            kept = np.ones(len(batch), np.bool_)
            kept[rows[batch.seq]] = False
            view = view.plus(batch if kept.all() else batch.select(kept))
        self._view = view
        self.num_swaps += 1

    def find(self, id: TrajectoryId) -> Place | None:
        """Where a trajectory is; None when it is not sealed."""
        view = self._view
        try:
            found = view.ids.find(id_key(id))
        except ValueError:
            return None
        return next((place for place in map(view.place, found) if place.id == id), None)

    def find_prefix(self, prefix: str) -> list[TrajectoryId]:
        """Ids that begin with a text, which is not empty."""
        view = self._view
        try:
            low, high = id_key(prefix[:16].ljust(16, "0")), id_key(prefix[:16].ljust(16, "f"))
        except ValueError:
            return []
        found = (view.place(value).id for value in view.ids.between(low, high))
        return [id for id in found if id.startswith(prefix)]

    def find_snapshot(self, snapshot_id: str) -> Iterator[Place]:
        """Batches, and rows of their `snapshots` files, that may hold a snapshot."""
        view = self._view
        return map(view.place, view.snapshots.find(snapshot_key(snapshot_id)))

    def changes_after(self, cursor: int) -> list[tuple[int, TrajectoryId]]:
        """(sequence of the end, id) of what ended after a sequence."""
        found: list[tuple[int, TrajectoryId]] = []
        for batch in self.batches:
            if batch.last_finished > cursor:
                rows = batch.trajectories.finished > cursor
                ended = batch.trajectories.finished[rows].tolist()
                found += zip(ended, hex_ids(batch.trajectories.id[rows]), strict=True)
        return found
