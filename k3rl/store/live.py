"""What the store knows of its trajectories: a plain state machine, no tokens.

It works in two halves. The *decide* methods (`begin`, `claim`, `append`, `commit`, ...) check a
request against the present state and return the event to journal, or None when the same request
was granted before. `apply` folds an event that is durable into the state; it is the only thing that
changes it, so a replay of the journal gives the same state as the run that wrote it.

What is sealed changes no more: it leaves the records here and is looked up in files (`View`).

Invariants: offsets of a context's extents are gapless from its base; committed <= acknowledged;
a step, its environment tokens and its snapshot appear in one `apply`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from k3rl.errors import Fenced, StoreError
from k3rl.store.archive import Archive
from k3rl.store.events import (
    Begun,
    BranchStart,
    Claimed,
    Finished,
    Paused,
    Reaped,
    Requeued,
    StepCommitted,
    TrajectoryEvent,
)
from k3rl.store.journal import Place
from k3rl.store.protocol import Ack, StepFrame
from k3rl.store.record import TrajectoryRecord
from k3rl.store.rules import (
    ack_of,
    check_active,
    check_authors,
    check_offset,
    check_step,
    known,
    known_step,
    same,
)
from k3rl.store.view import View
from k3rl.types import (
    Author,
    LineageKind,
    Outcome,
    ParentRef,
    Step,
    TokenFrame,
    TrajectoryHeader,
    TrajectoryId,
    TrajectoryState,
)

ACTIVE, PAUSED = TrajectoryState.ACTIVE, TrajectoryState.PAUSED
MAX_BRANCH_DEPTH = 64
"""Longest chain of parents. A branch never takes its parent's tokens over, not even when files are
written again: ledgers, draws and exports count them as the parent's."""
FINISHED, QUEUED = TrajectoryState.FINISHED, TrajectoryState.QUEUED


class LiveState(View):
    """All trajectories, snapshots and the work queue."""

    def __init__(self, sealed: Archive | None = None) -> None:
        """Nothing but what is sealed."""
        super().__init__(sealed)
        self.queue: OrderedDict[TrajectoryId, None] = OrderedDict()
        self._named: Counter[str] = Counter()
        """How many steps that are not sealed end with a snapshot."""
        self._held: dict[str, dict[TrajectoryId, None]] = {}

    # Decide

    def begin(self, header: TrajectoryHeader, start: BranchStart | None = None) -> Begun | None:
        """A new trajectory; None when it exists with the same header, which says where it starts.

        The start itself may differ: the parent has moved on since.
        """
        known = self.known(header.id)
        if known is None:
            if start is None and header.parent and header.parent.kind is LineageKind.BRANCH:
                raise StoreError(f"trajectory {header.id}: a branch is begun with `branch`")
            return Begun(header, start)
        if not same(known.header, header) or (known.start is None) != (start is None):
            raise StoreError(f"trajectory {header.id} exists with another header")
        return None

    def branch_start(self, parent: ParentRef) -> BranchStart:
        """Where a child of `parent` begins; its policy tokens are for the caller to count."""
        record = self.record(parent.id)
        if min(parent.context, parent.token_offset, parent.step) < 0:
            raise StoreError(f"trajectory {parent.id}: a branch point counts from 0, got {parent}")
        if self.depth(parent.id) >= MAX_BRANCH_DEPTH:
            raise StoreError(
                f"trajectory {parent.id} is already {MAX_BRANCH_DEPTH} branches away from the first"
                " of its line: branch off one of its ancestors"
            )
        steps = self.steps(parent.id)
        low, high = self._branch_range(record, steps, parent)
        if not low <= parent.token_offset <= high:
            raise StoreError(
                f"trajectory {parent.id}: branch at token {parent.token_offset} is outside step "
                f"{parent.step} [{low}, {high}]"
            )
        before = [s.snapshot_after for s in steps[: parent.step] if s.snapshot_after]
        return BranchStart(
            context=parent.context,
            token_offset=parent.token_offset,
            committed=low,
            step=parent.step,
            num_tokens_before=sum(self.end(parent.id, c) for c in range(parent.context)),
            num_policy_tokens=0,
            num_policy_tokens_pending=0,
            snapshot_id=before[-1] if before else None,
        )

    def depth(self, id: TrajectoryId) -> int:
        """How many parents a read of all its tokens walks."""
        depth, parent = 0, self._holder(id).branched_from
        while parent is not None:
            depth, parent = depth + 1, self._holder(parent).branched_from
        return depth

    def _branch_range(
        self, record: TrajectoryRecord, steps: tuple[Step, ...], parent: ParentRef
    ) -> tuple[int, int]:
        if parent.step < len(steps):
            step = steps[parent.step]
            context, low, high = step.context, step.token_start, step.token_end
        elif parent.step == len(steps):
            context = record.context_number
            low = max([s.token_end for s in steps if s.context == context], default=0)
            high = self.end(record.id, context)
        else:
            raise StoreError(f"trajectory {record.id} has no committed step {parent.step}")
        if context != parent.context:
            raise StoreError(
                f"trajectory {record.id}: step {parent.step} is in context {context}, "
                f"not {parent.context}"
            )
        return low, high

    def claim(self, id: TrajectoryId, worker_id: str) -> Claimed | None:
        """Hand it to a worker; None when it is neither queued nor the worker's already."""
        record = self.records.get(id)
        if record is None or not (id in self.queue or record.worker_id == worker_id):
            return None
        return Claimed(id, record.epoch + 1, worker_id)

    def append(self, frame: TokenFrame) -> tuple[TokenFrame | None, Ack]:
        """Policy tokens; the frame is None when it was acknowledged before."""
        record = self._fenced(frame.id, frame.epoch)
        before = known(record, frame)
        if before is not None:
            return None, before
        check_active(record)
        check_authors(frame, Author.POLICY)
        check_offset(record, frame)
        return (frame if len(frame.token_ids) else None), ack_of(frame)

    def commit(
        self, id: TrajectoryId, epoch: int, frame: StepFrame
    ) -> tuple[StepCommitted | None, list[Ack]]:
        """A step; the event is None when it was committed before."""
        record = self._fenced(id, epoch)
        step, tokens = frame.step, frame.tokens
        whose = (id, epoch, step.context)
        if tokens is not None and (tokens.id, tokens.epoch, tokens.context) != whose:
            raise StoreError(f"trajectory {id}: step {step.index} carries tokens of another")
        if step.index < record.next_step:
            return None, known_step(record, frame)
        check_active(record)
        check_step(record, frame, self.snapshot)
        acks = [ack_of(tokens)] if tokens is not None and len(tokens.token_ids) else []
        return StepCommitted(id, epoch, frame), acks

    def pause(self, id: TrajectoryId, epoch: int) -> Paused | None:
        """Give back; None when this claim was given back before."""
        record = self._fenced(id, epoch)
        if record.state is PAUSED:
            return None
        check_active(record)
        return Paused(id, epoch)

    def requeue(self, id: TrajectoryId) -> Requeued | None:
        """Queue a paused trajectory; None when it is not paused or queued already."""
        return Requeued(id) if self.record(id).state is PAUSED and id not in self.queue else None

    def reap(self, id: TrajectoryId, worker_id: str) -> Reaped | None:
        """Take it from a dead worker; None when the worker does not hold it."""
        record = self.record(id)
        return Reaped(id, record.epoch + 1, worker_id) if record.worker_id == worker_id else None

    def finish(self, id: TrajectoryId, epoch: int, outcome: Outcome) -> Finished | None:
        """End it; None when it ended before with this outcome."""
        record = self._fenced(id, epoch)
        if record.state is FINISHED:
            if same(record.outcome, outcome):
                return None
            raise StoreError(f"trajectory {id} is finished with another outcome")
        check_active(record)
        return Finished(id, epoch, outcome)

    # Apply

    def apply(self, event: TrajectoryEvent, sequence: int, place: Place) -> None:
        """Fold a durable event in. `place` is where the journal keeps it."""
        if isinstance(event, Begun):
            self.records[event.id] = TrajectoryRecord.begun(event, sequence)
            self.queue[event.id] = None
            self._change(event.id, QUEUED, sequence)
            return
        record = self.record(event.id)
        match event:
            case TokenFrame():
                record.add(event, place)
            case StepCommitted(frame=frame):
                if frame.tokens is not None and len(frame.tokens.token_ids):
                    record.add(frame.tokens, place)
                record.commit(frame.step)
                if frame.step.snapshot_after is not None:
                    self._named[frame.step.snapshot_after] += 1
                if frame.snapshot is not None:
                    self.snapshots[frame.snapshot.snapshot_id] = frame.snapshot
            case Claimed():
                self.queue.pop(event.id, None)
                record.epoch = event.epoch
                self._hold(record, event.worker_id)
                self._change(event.id, ACTIVE, sequence)
            case Paused():
                self._hold(record, None)
                self._change(event.id, PAUSED, sequence)
            case Requeued():
                self._push_front(event.id)
            case Reaped():
                record.epoch = event.epoch
                self._hold(record, None)
                self._push_front(event.id)
            case Finished():
                self._hold(record, None)
                record.finish(event.outcome, sequence)
                self._change(event.id, FINISHED, sequence)

    def seal(self, record: TrajectoryRecord) -> None:
        """What is sealed is looked up among the sealed from here on."""
        del self.records[record.id]
        del self.changed[record.id]
        for step in record.steps:
            name = step.snapshot_after
            if name is not None:
                self._named[name] -= 1
                if not self._named[name]:
                    del self._named[name]
                    self.snapshots.pop(name, None)
        for context in record.contexts.values():
            context.extents = []
        self.sealed.keep(record)

    # Workers

    def held_by(self, worker_id: str) -> list[TrajectoryId]:
        """What a worker has claimed."""
        return list(self._held.get(worker_id, ()))

    def workers(self) -> list[str]:
        """Who holds anything."""
        return list(self._held)

    def _hold(self, record: TrajectoryRecord, worker_id: str | None) -> None:
        if record.worker_id is not None:
            held = self._held[record.worker_id]
            del held[record.id]
            if not held:
                del self._held[record.worker_id]
        record.worker_id = worker_id
        if worker_id is not None:
            self._held.setdefault(worker_id, {})[record.id] = None

    def _push_front(self, id: TrajectoryId) -> None:
        self.queue[id] = None
        self.queue.move_to_end(id, last=False)

    def _change(self, id: TrajectoryId, state: TrajectoryState, sequence: int) -> None:
        record = self.records[id]
        if record.state is not state or id not in self.changed:
            record.state = state
            self.changed[id] = sequence
            self.changed.move_to_end(id)

    def _fenced(self, id: TrajectoryId, epoch: int) -> TrajectoryRecord:
        record = self.record(id)
        if epoch < record.epoch:
            raise Fenced(f"trajectory {id}: epoch {epoch} was taken over by {record.epoch}: stop")
        if epoch > record.epoch:
            raise StoreError(f"trajectory {id}: epoch {epoch} was never handed out")
        return record
