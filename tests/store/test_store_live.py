"""The state machine of live trajectories against a plain model, and against its own replay."""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from k3rl.errors import Fenced, StoreError
from k3rl.store.events import KIND_OF, KINDS
from k3rl.store.journal import Place
from k3rl.store.live import LiveState
from k3rl.types import TrajectoryState, decode, encode
from tests.store.store_builders import COMPLETED, header, policy, step

WORKERS = ("a", "b")
PLACE = Place("J", 0, 0)
numbers = st.integers(0, 2)
sizes = st.integers(1, 5)


class Model:
    """One trajectory as a list of tokens and a few numbers."""

    def __init__(self):
        self.tokens, self.committed, self.steps = [], 0, 0
        self.epoch, self.worker, self.state = 0, None, TrajectoryState.QUEUED
        self.epochs_used = set()


class LiveMachine(RuleBasedStateMachine):
    """Applies every event twice: to the state, and later to a fresh one, through bytes."""

    def __init__(self):
        super().__init__()
        self.live, self.models, self.queue, self.log = LiveState(), {}, [], []

    def do(self, event):
        self.log.append((KIND_OF[type(event)], encode(event)))
        self.live.apply(event, len(self.log), PLACE)

    def pick(self, number, **wanted):
        model = self.models.get(header(number).id)
        if model is None or any(getattr(model, k) != v for k, v in wanted.items()):
            return None, None
        return header(number).id, model

    @rule(number=numbers)
    def begin(self, number):
        event = self.live.begin(header(number))
        assert (event is None) == (header(number).id in self.models)
        if event is not None:
            self.do(event)
            self.models[event.id] = Model()
            self.queue.append(event.id)

    @rule(worker=st.sampled_from(WORKERS))
    def claim_next(self, worker):
        if self.queue:
            id = self.queue.pop(0)
            assert next(iter(self.live.queue)) == id
            self.take(id, worker)

    @rule(number=numbers, worker=st.sampled_from(WORKERS))
    def claim_again(self, number, worker):
        id, model = self.pick(number)
        if id is None:
            return
        if model.worker == worker:
            self.take(id, worker)
        elif id not in self.queue:
            assert self.live.claim(id, worker) is None

    def take(self, id, worker):
        event = self.live.claim(id, worker)
        model = self.models[id]
        assert event.epoch not in model.epochs_used
        assert event.epoch > model.epoch
        self.do(event)
        model.epochs_used.add(event.epoch)
        model.epoch, model.worker, model.state = event.epoch, worker, TrajectoryState.ACTIVE

    @rule(number=numbers, count=sizes, seed=st.integers(0, 1))
    def append(self, number, count, seed):
        id, model = self.pick(number)
        if id is None or model.worker is None:
            return
        frame = policy(id, model.epoch, len(model.tokens), count, seed)
        event, ack = self.live.append(frame)
        assert (ack.offset, ack.count) == (len(model.tokens), count)
        self.do(event)
        model.tokens.extend(frame.token_ids.tolist())
        assert self.live.append(frame) == (None, ack)
        with pytest.raises(StoreError, match="other tokens"):
            self.live.append(policy(id, model.epoch, frame.offset, count, seed + 2))
        with pytest.raises(StoreError, match="gap"):
            self.live.append(policy(id, model.epoch, len(model.tokens) + 1, count))

    @rule(number=numbers, count=st.integers(0, 4))
    def commit(self, number, count):
        id, model = self.pick(number)
        if id is None or model.worker is None:
            return
        frame = step(id, model.epoch, model.steps, model.committed, len(model.tokens), count)
        event, acks = self.live.commit(id, model.epoch, frame)
        assert len(acks) == bool(count)
        assert self.live.end(id, 0) == model.committed
        self.do(event)
        if count:
            model.tokens.extend(frame.tokens.token_ids.tolist())
        model.committed, model.steps = len(model.tokens), model.steps + 1
        assert self.live.commit(id, model.epoch, frame) == (None, acks)
        assert self.live.snapshot_of(id) == frame.snapshot

    @rule(number=numbers)
    def stale_epochs_are_fenced(self, number):
        id, model = self.pick(number)
        if id is None or model.epoch == 0:
            return
        stale = model.epoch - 1
        for write in (
            lambda: self.live.append(policy(id, stale, len(model.tokens), 1)),
            lambda: self.live.commit(id, stale, step(id, stale, model.steps, 0, 0)),
            lambda: self.live.pause(id, stale),
            lambda: self.live.finish(id, stale, COMPLETED),
        ):
            with pytest.raises(Fenced):
                write()

    @rule(number=numbers)
    def writes_without_a_claim_are_refused(self, number):
        id, model = self.pick(number, worker=None)
        if id is None:
            return
        with pytest.raises(StoreError):
            self.live.append(policy(id, model.epoch, len(model.tokens), 1))

    @rule(number=numbers)
    def pause(self, number):
        id, model = self.pick(number)
        if id is None or model.worker is None:
            return
        self.do(self.live.pause(id, model.epoch))
        model.worker, model.state = None, TrajectoryState.PAUSED
        assert self.live.pause(id, model.epoch) is None

    @rule(number=numbers)
    def requeue(self, number):
        id, model = self.pick(number)
        if id is None:
            return
        event = self.live.requeue(id)
        may = model.state is TrajectoryState.PAUSED and id not in self.queue
        assert (event is not None) == may
        if event is not None:
            self.do(event)
            self.queue.insert(0, id)

    @rule(worker=st.sampled_from(WORKERS))
    def reap(self, worker):
        for id in reversed(self.live.held_by(worker)):
            event = self.live.reap(id, worker)
            self.do(event)
            self.models[id].worker, self.models[id].epoch = None, event.epoch
            self.queue.insert(0, id)
            assert self.live.reap(id, worker) is None

    @rule(number=numbers)
    def finish(self, number):
        id, model = self.pick(number)
        if id is None or model.worker is None:
            return
        self.do(self.live.finish(id, model.epoch, COMPLETED))
        model.worker, model.state = None, TrajectoryState.FINISHED
        model.committed = len(model.tokens)
        assert self.live.finish(id, model.epoch, COMPLETED) is None
        assert self.live.claim(id, "a") is None

    @invariant()
    def agrees_with_the_model(self):
        assert list(self.live.queue) == self.queue
        assert list(self.live.records) == list(self.models)
        for id, model in self.models.items():
            record = self.live.records[id]
            context = record.contexts[0]
            assert (context.acked, context.committed) == (len(model.tokens), model.committed)
            assert (record.epoch, record.worker_id) == (model.epoch, model.worker)
            assert (record.state, record.next_step) == (model.state, model.steps)
            starts = np.cumsum([0] + [e.num_tokens for e in context.extents]).tolist()
            assert [e.start for e in context.extents] == starts[:-1]
            assert id not in self.queue or record.worker_id is None

    @precondition(lambda self: self.log)
    @rule()
    def a_replay_gives_the_same_state(self):
        again = LiveState()
        for sequence, (kind, payload) in enumerate(self.log, 1):
            again.apply(decode(KINDS[kind], payload), sequence, PLACE)
        assert again.records == self.live.records
        assert again.snapshots == self.live.snapshots
        assert list(again.queue) == list(self.live.queue)
        assert again.changed == self.live.changed
        for worker in WORKERS:
            assert set(again.held_by(worker)) == set(self.live.held_by(worker))


LiveMachine.TestCase.settings = settings(
    max_examples=300,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestLive = LiveMachine.TestCase


def test_pieces_make_up_any_range():
    live = LiveState()
    live.apply(live.begin(header()), 1, PLACE)
    claim = live.claim(header().id, "w")
    live.apply(claim, 2, PLACE)
    offset = 0
    for sequence, count in enumerate([3, 1, 4, 1, 5, 9], 3):
        live.apply(policy(claim.id, claim.epoch, offset, count), sequence, PLACE)
        offset += count
    for start in range(offset + 1):
        for end in range(start, offset + 1):
            pieces = live.pieces(claim.id, 0, start, end, acked=True)
            got = [p.extent.start + t for p in pieces for t in range(p.low, p.high)]
            assert got == list(range(start, end))
