"""What can be looked up of trajectories, whether they are sealed or not.

Those that are not sealed are records in memory; of sealed ones columns are, and looking up a
header, steps or a snapshot reads files (`Archive`). Where tokens lie is known without reading.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from k3rl.errors import CorruptData, StoreError
from k3rl.store.archive import Archive
from k3rl.store.catalog import Place
from k3rl.store.columns import Batch, hex_ids
from k3rl.store.protocol import Ref
from k3rl.store.record import Piece, TokenRange, TrajectoryRecord
from k3rl.types import (
    Snapshot,
    Step,
    Trajectory,
    TrajectoryId,
    TrajectoryState,
)

FINISHED = TrajectoryState.FINISHED
NOT_SEALED = 1 << 62
"""Above every manifest record."""


class Numbers(NamedTuple):
    """What is known of a trajectory without reading; inherited tokens and steps included."""

    id: TrajectoryId
    state: TrajectoryState
    epoch: int
    num_tokens: int
    """Committed ones."""
    num_steps: int


class View:
    """All trajectories and snapshots of a store.

    Whatever names a trajectory that is not there raises StoreError, and what reads CorruptData.
    """

    def __init__(self, sealed: Archive | None = None) -> None:
        """Nothing but what is sealed."""
        self.sealed = sealed or Archive()
        self.records: dict[TrajectoryId, TrajectoryRecord] = {}
        """Trajectories that are not sealed, in the order in which they were begun."""
        self.snapshots: dict[str, Snapshot] = {}
        """Those of trajectories that are not sealed."""
        self.changed: OrderedDict[TrajectoryId, int] = OrderedDict()
        """Sequence of the last change of state of what is not sealed, oldest first."""

    # All

    def __contains__(self, id: TrajectoryId) -> bool:
        """Whether there is such a trajectory."""
        return id in self.records or self.sealed.catalog.find(id) is not None

    def all_numbers(self) -> Iterator[Numbers]:
        """Of every trajectory."""
        yield from map(_numbers, self.records.values())
        for batch in self.sealed.catalog.batches:
            yield from _sealed_numbers(batch, slice(None))

    def totals(self) -> tuple[Counter[TrajectoryState], int]:
        """(trajectories by state, committed tokens that they store themselves)."""
        states = Counter(record.state for record in self.records.values())
        contexts = (c for record in self.records.values() for c in record.contexts.values())
        num_tokens = sum(context.committed - context.base for context in contexts)
        for batch in self.sealed.catalog.batches:
            states[FINISHED] += len(batch)
            num_tokens += int(batch.trajectories.num_own_tokens.sum())
        return states, num_tokens

    def ids(self) -> list[TrajectoryId]:
        """In the order in which they were begun."""
        begun = [_order(record) for record in self.records.values()]
        for batch in self.sealed.catalog.batches:
            columns = batch.trajectories
            lists = (columns.begun.tolist(), columns.sealed_seq.tolist(), batch.ids)
            begun += zip(*lists, strict=True)
        return [id for *_, id in sorted(begun)]

    def branches(self) -> dict[TrajectoryId, TrajectoryId]:
        """Those that begin with tokens of a parent, and their parents."""
        found = {id: _parent(record) for id, record in self.records.items() if record.start}
        for batch in self.sealed.catalog.batches:
            found.update(batch.branches())
        return found

    def all_snapshots(self) -> Iterator[Snapshot]:
        """Every snapshot; one that several batches hold comes several times. Reads files."""
        batches = self.sealed.catalog.batches
        return chain(self.snapshots.values(), *map(self.sealed.snapshots, batches))

    def listing(self, state: TrajectoryState | None = None) -> Callable[[], list[Trajectory]]:
        """Trajectories as of now, in the order in which they were begun.

        What is returned makes the list; it reads files and may be called in another thread.
        """
        records = [r for r in self.records.values() if state in (None, r.state)]
        live = [(_order(record), self.trajectory(record.id)) for record in records]
        batches = self.sealed.catalog.batches if state in (None, FINISHED) else []

        made: dict[TrajectoryId, TrajectoryRecord] = {}

        def make() -> list[Trajectory]:
            made.update({r.id: r for batch in batches for r in self.sealed.records(batch)})
            found = live + [(_order(r), r.trajectory(steps(r))) for r in made.values()]
            return [t for _, t in sorted(found, key=lambda pair: pair[0])]

        def steps(record: TrajectoryRecord) -> tuple[Step, ...]:
            if record.start is None:
                return tuple(record.steps)
            parent = made.get(_parent(record)) or self.record(_parent(record))
            return steps(parent)[: record.start.step] + tuple(record.steps)

        return make

    def changes_after(self, cursor: int) -> list[tuple[int, TrajectoryId]]:
        """(sequence, id) of every trajectory whose last change of state is after `cursor`."""
        found = self.sealed.catalog.changes_after(cursor)
        for id, sequence in reversed(self.changed.items()):
            if sequence <= cursor:
                break
            found.append((sequence, id))
        return sorted(found)

    # One

    def known(self, id: TrajectoryId) -> TrajectoryRecord | None:
        """A trajectory's record; None when it is unknown. Of a sealed one it has no extents."""
        return self.records.get(id) or self.sealed.record(id)

    def record(self, id: TrajectoryId) -> TrajectoryRecord:
        """A trajectory's record. Of a sealed one it has no extents."""
        record = self.known(id)
        if record is None:
            raise StoreError(f"trajectory {id} is unknown")
        return record

    def find(self, prefix: str) -> TrajectoryId:
        """The id, of which an unambiguous prefix will do."""
        if prefix in self:
            return prefix
        found = [id for id in self.records if id.startswith(prefix)] if prefix else []
        found += self.sealed.catalog.find_prefix(prefix) if prefix else []
        if len(found) == 1:
            return found[0]
        what = f"is ambiguous: {', '.join(found[:3])}, ..." if found else "is unknown"
        raise StoreError(f"trajectory {prefix!r} {what}")

    def state_of(self, id: TrajectoryId) -> TrajectoryState:
        """The state of one that there is."""
        record = self.records.get(id)
        return record.state if record else FINISHED

    def is_imported(self, id: TrajectoryId) -> bool:
        """Whether one that there is came from a file, and was not played here."""
        if id in self.records:
            return self.records[id].origin is not None
        batch, index = self._place(id)
        return bool(batch.trajectories.is_imported[index])

    def numbers(self, id: TrajectoryId) -> Numbers:
        """Of one."""
        record = self.records.get(id)
        if record is not None:
            return _numbers(record)
        batch, index = self._place(id)
        return next(_sealed_numbers(batch, slice(index, index + 1)))

    def steps(self, id: TrajectoryId) -> tuple[Step, ...]:
        """Committed steps, those inherited from the parent first."""
        record = self.record(id)
        if record.start is None:
            return tuple(record.steps)
        return self.steps(_parent(record))[: record.start.step] + tuple(record.steps)

    def snapshot(self, snapshot_id: str) -> Snapshot | None:
        """A committed snapshot; None when it is unknown."""
        return self.snapshots.get(snapshot_id) or self.sealed.snapshot(snapshot_id)

    def snapshot_of(self, id: TrajectoryId) -> Snapshot | None:
        """The sandbox after the newest committed step that has a snapshot."""
        record = self.record(id)
        after = [s.snapshot_after for s in record.steps if s.snapshot_after]
        found = after[-1] if after else record.start.snapshot_id if record.start else None
        return self.snapshot(found) if found else None

    def trajectory(self, id: TrajectoryId) -> Trajectory:
        """The carrier of what readers may see."""
        return self.record(id).trajectory(self.steps(id))

    # Tokens

    def ranges(self, id: TrajectoryId) -> dict[int, TokenRange]:
        """What a trajectory itself stores of its contexts, by number."""
        return self._holder(id).ranges()

    def end(self, id: TrajectoryId, context: int) -> int:
        """Committed tokens of a context, inherited ones included."""
        holder = self._holder(id)
        own, parent = holder.ranges(), holder.branched_from
        if context in own:
            return own[context].committed
        if parent is not None and 0 <= context < min(own):
            return self.end(parent, context)
        raise StoreError(f"trajectory {id} has no context {context}")

    def whole(self, ref: Ref) -> Ref:
        """The ref with its end filled in."""
        return ref if ref.end is not None else replace(ref, end=self.end(ref.id, ref.context))

    def ref_pieces(self, ref: Ref) -> list[Piece]:
        """Where committed tokens lie; the ref has an end."""
        assert ref.end is not None
        return self.pieces(ref.id, ref.context, ref.start, ref.end)

    def pieces(
        self, id: TrajectoryId, context: int, start: int, end: int, acked: bool = False
    ) -> list[Piece]:
        """Where tokens [start, end) of a context lie, through the chain of parents.

        Only committed tokens, unless `acked`: then those of the unfinished step too.
        """
        limit = self.ranges(id)[context].acked if acked else self.end(id, context)
        if not 0 <= start <= end <= limit:
            raise StoreError(f"trajectory {id}: tokens [{start}, {end}) of {limit} do not exist")
        return self._pieces(id, context, start, end)

    def _pieces(self, id: TrajectoryId, context: int, start: int, end: int) -> list[Piece]:
        holder = self._holder(id)
        own = holder.ranges().get(context)
        base = own.base if own else end
        found = []
        if start < min(base, end):
            parent = holder.branched_from
            if parent is None:
                raise StoreError(f"trajectory {id} has no parent")
            found = self._pieces(parent, context, start, min(base, end))
        if max(start, base) < end:
            found += holder.pieces(context, max(start, base), end)
        if sum(piece.high - piece.low for piece in found) != end - start:
            where = holder.batch.files["trajectories"].path if isinstance(holder, Place) else ""
            detail = (
                f"trajectory {id}: context {context}: tokens [{start}, {end}) are not all there"
            )
            raise CorruptData(str(self.sealed.files.root / where), 0, "segments", detail)
        return found

    def _holder(self, id: TrajectoryId) -> TrajectoryRecord | Place:
        return self.records.get(id) or self._place(id)

    def _place(self, id: TrajectoryId) -> Place:
        place = self.sealed.catalog.find(id)
        if place is None:
            raise StoreError(f"trajectory {id} is unknown")
        return place


def _order(record: TrajectoryRecord) -> tuple[int, int, TrajectoryId]:
    """By begin; imported ones, which have that of the last frame, by the record that sealed them.

    What is not sealed yet will be sealed by a later one.
    """
    sealed_seq = NOT_SEALED if record.sealed_seq is None else record.sealed_seq
    return record.begun_sequence, sealed_seq, record.id


def _parent(record: TrajectoryRecord) -> TrajectoryId:
    if record.header.parent is None:
        raise StoreError(f"trajectory {record.id} has no parent")
    return record.header.parent.id


def _numbers(record: TrajectoryRecord) -> Numbers:
    return Numbers(record.id, record.state, record.epoch, record.num_tokens, record.next_step)


def _sealed_numbers(batch: Batch, which: slice) -> Iterator[Numbers]:
    columns = batch.trajectories
    num_steps = columns.num_steps + columns.start_step.clip(0)
    numbers = (columns.epoch, columns.num_tokens, num_steps)
    lists = (column[which].tolist() for column in numbers)
    for id, *row in zip(hex_ids(columns.id[which]), *lists, strict=True):
        yield Numbers(id, FINISHED, *row)
