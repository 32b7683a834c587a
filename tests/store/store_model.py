"""What a store should hold: the same requests on plain lists and dicts, in memory only."""

from dataclasses import dataclass, field

import numpy as np

from k3rl.types import LineageKind, ParentRef, Step, TrajectoryHeader, TrajectoryState

ACTIVE, PAUSED = TrajectoryState.ACTIVE, TrajectoryState.PAUSED
FINISHED, QUEUED = TrajectoryState.FINISHED, TrajectoryState.QUEUED
NOTHING = (np.zeros(0, np.int32), np.zeros(0, bool), np.zeros(0, np.float32))


@dataclass
class Known:
    """One trajectory."""

    header: TrajectoryHeader
    state: TrajectoryState = QUEUED
    epoch: int = 0
    worker: str | None = None
    contexts: list = field(default_factory=lambda: [NOTHING])
    """Per context the acknowledged (ids, mask, log-probs), inherited ones included."""
    committed: list[int] = field(default_factory=lambda: [0])
    steps: list[Step] = field(default_factory=list)
    acks: list[tuple[int, int, int]] = field(default_factory=list)
    outcome: object = None

    @property
    def context(self):
        return len(self.contexts) - 1

    @property
    def acked(self):
        return len(self.contexts[-1][0])

    def open_context(self, number):
        if number == len(self.contexts):
            self.contexts.append(NOTHING)
            self.committed.append(0)

    def add(self, frame):
        self.open_context(frame.context)
        arrays = (frame.token_ids, frame.loss_mask, frame.rollout_logprobs)
        pairs = zip(self.contexts[-1], arrays, strict=True)
        self.contexts[-1] = tuple(np.concatenate(pair) for pair in pairs)
        self.acks.append((frame.context, frame.offset, len(frame.token_ids)))

    def commit(self, frame):
        self.open_context(frame.step.context)
        if frame.tokens is not None:
            self.add(frame.tokens)
        self.committed[-1] = self.acked
        self.steps.append(frame.step)

    def visible(self, context):
        return tuple(array[: self.committed[context]] for array in self.contexts[context])

    @property
    def num_policy(self):
        return sum(int(self.visible(c)[1].sum()) for c in range(len(self.contexts)))


@dataclass
class Model:
    """All of them, the queue, and who holds what in the order of the claims."""

    known: dict[str, Known] = field(default_factory=dict)
    queue: list[str] = field(default_factory=list)
    held: dict[str, list[str]] = field(default_factory=dict)
    updates: list = field(default_factory=list)
    last_version: int = 0
    pinned: int | None = None
    drawable: list[str] = field(default_factory=list)
    draws: list = field(default_factory=list)
    """(request, refs) of every draw so far."""

    def begin(self, header):
        self.known[header.id] = Known(header)
        self.queue.append(header.id)

    def branch(self, header):
        parent, at = self.known[header.parent.id], header.parent
        child = Known(header)
        child.contexts = [*parent.contexts[: at.context]]
        child.contexts.append(tuple(a[: at.token_offset] for a in parent.contexts[at.context]))
        child.committed = [len(context[0]) for context in child.contexts]
        child.committed[-1] = parent.steps[at.step].token_start
        child.steps = parent.steps[: at.step]
        self.known[header.id] = child
        self.queue.append(header.id)

    def branch_points(self):
        """Of every committed step, as a parent of a child to come."""
        for id, known in self.known.items():
            for n, step in enumerate(known.steps):
                for at in {step.token_start, step.token_end}:
                    yield ParentRef(id, step.context, at, n, LineageKind.BRANCH)

    def claimed_by(self, worker, capacity, holding):
        """Ids that such a claim hands out, in order."""
        lost = [id for id in self.held.get(worker, []) if id not in holding]
        lost = lost[:capacity]
        return lost + self.queue[: capacity - len(lost)]

    def claim(self, worker, id):
        known = self.known[id]
        if id in self.queue:
            self.queue.remove(id)
        self.let_go(id)
        self.held.setdefault(worker, []).append(id)
        known.state, known.worker, known.epoch = ACTIVE, worker, known.epoch + 1

    def let_go(self, id):
        known = self.known[id]
        if known.worker is not None:
            self.held[known.worker].remove(id)
            known.worker = None

    def pause(self, id):
        self.let_go(id)
        self.known[id].state = PAUSED

    def finish(self, id, outcome):
        self.let_go(id)
        known = self.known[id]
        known.state, known.outcome = FINISHED, outcome
        known.committed[-1] = known.acked

    def requeue_paused(self):
        waiting = [id for id, k in self.known.items() if k.state is PAUSED]
        moved = [id for id in waiting if id not in self.queue]
        self.queue = moved + self.queue
        return len(moved)

    def reap(self, worker):
        taken = list(self.held.get(worker, []))
        for id in taken:
            self.let_go(id)
            self.known[id].epoch += 1
        self.queue = taken + self.queue
        return taken

    def pin(self, seq):
        self.pinned = seq
        self.drawable = self.rewarded()

    def rewarded(self):
        return [id for id, k in self.known.items() if k.outcome and k.outcome.reward is not None]

    def add_update(self, row):
        last = next((r for r in reversed(self.updates) if r.update == row.update), None)
        if last != row:
            self.updates.append(row)

    def of_state(self, *states):
        return [id for id, known in self.known.items() if known.state in states]

    def taken_over(self):
        """Ids of which there was an earlier claim."""
        return [id for id, known in self.known.items() if known.epoch >= 2]
