"""Any sequence of requests, crashes and losses of Redis leaves what a model in memory holds.

A crash is a copy of the files at that moment, which a new service opens; the old one is given up.
Compaction and garbage collection only move files about: no request may tell that they were.
"""

import asyncio
import itertools
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis import Redis

from k3rl.blobs import BlobStore
from k3rl.errors import Fenced, StoreError
from k3rl.store.compaction import NEVER, Limits
from k3rl.store.fsck import check
from k3rl.store.index import LiveIndex
from k3rl.store.protocol import Ref, SampleRequest, UpdateRow
from k3rl.store.reader import StoreReader
from k3rl.store.service import StoreService
from k3rl.store.upkeep import Policy
from k3rl.types import Outcome, OutcomeKind, digest_json
from tests.store.store_builders import COMPLETED, header, policy, step
from tests.store.store_model import PAUSED, Model

WORKERS = st.sampled_from(["u", "v"])
PICK = st.integers(0, 1 << 16)
COUNT = st.integers(0, 40)
UPKEEP = Policy(Limits(min_batches=NEVER), grace_s=0.0, references=lambda layer, place: ())
"""Nothing by itself: a copy of files is no moment when threads move them. Layers name nothing."""
COMPACTS = replace(UPKEEP, limits=Limits(min_batches=2, level=1))
LOST = Outcome(OutcomeKind.INFRA_FAULT, detail="lost")


def needs(what):
    return precondition(lambda machine: bool(what(machine.model)))


class StoreMachine(RuleBasedStateMachine):
    """A service on real files and a real server beside the model."""

    url, memory = "", Path()

    def __init__(self):
        super().__init__()
        self.runner, self.model = asyncio.Runner(), Model()
        self.folder = Path(tempfile.mkdtemp(prefix="machine-", dir=self.memory))
        self.roots = (self.folder / f"{n}" for n in itertools.count())
        self.root, self.numbers = next(self.roots), itertools.count()
        self.open()

    def run(self, request):
        return self.runner.run(request)

    def open(self):
        index = LiveIndex.from_url(self.url, str(self.folder), retry_s=5.0)
        blobs = BlobStore(self.root / "blobs")
        self.store = StoreService(self.root, blobs, index, journal_file_bytes=4000, policy=UPKEEP)
        self.run(self.store.open())

    def teardown(self):
        try:
            self.run(self.store.aclose())
            assert check(self.root).findings == []
        finally:
            self.runner.close()
            shutil.rmtree(self.folder)

    def held(self, number):
        """One that a worker holds; begun and claimed if there is none."""
        if not any(self.model.held.values()):
            self.begin(2)
            self.claim("u", 3, False)
        ids = [id for ids in self.model.held.values() for id in ids]
        return self.model.known[ids[number % len(ids)]]

    # Requests

    @rule(count=st.integers(1, 3))
    def begin(self, count):
        headers = [header(next(self.numbers)) for _ in range(count)]
        self.run(self.store.begin(headers))
        self.run(self.store.begin(headers[:1]))
        for each in headers:
            self.model.begin(each)

    @needs(lambda model: model.queue or any(model.held.values()))
    @rule(worker=WORKERS, capacity=st.integers(0, 3), forgets=st.booleans())
    def claim(self, worker, capacity, forgets):
        model = self.model
        holding = [] if forgets else list(model.held.get(worker, []))
        ids = model.claimed_by(worker, capacity, holding)
        claims = self.run(self.store.claim(worker, capacity, holding, 0.0))
        assert [claim.header.id for claim in claims] == ids
        for claim in claims:
            known = model.known[claim.header.id]
            was = known.state
            model.claim(worker, claim.header.id)
            self.check_claim(claim, known, was)

    def check_claim(self, claim, known, was):
        assert (claim.header, claim.epoch, claim.state) == (known.header, known.epoch, was)
        assert claim.steps == tuple(known.steps)
        last = known.steps[-1].snapshot_after if known.steps else None
        assert (claim.snapshot and claim.snapshot.snapshot_id) == last
        assert [(a.context, a.offset, a.count) for a in claim.acks] == known.acks
        if known.acked:
            frame = claim.tokens
            same(known.contexts[-1], (frame.token_ids, frame.loss_mask, frame.rollout_logprobs))
        else:
            assert claim.tokens is None

    @rule(number=PICK, count=st.integers(1, 40), opens=st.booleans(), times=st.integers(1, 2))
    def append(self, number, count, opens, times):
        known = self.held(number)
        frame = self.frame(known, count, opens)
        acks = [self.run(self.store.append(frame)) for _ in range(times)]
        assert {(a.context, a.offset, a.count, a.content_hash) for a in acks} == {
            (frame.context, frame.offset, count, frame.content_hash())
        }
        known.add(frame)

    def frame(self, known, count, opens):
        opens = opens and known.acked == known.committed[-1] > 0
        where = (0, known.context + 1) if opens else (known.acked, known.context)
        id, seed = known.header.id, len(known.acks)
        return policy(id, known.epoch, where[0], count, seed=seed, context=where[1])

    @rule(number=PICK, count=COUNT, times=st.integers(1, 2))
    def commit(self, number, count, times):
        known = self.held(number)
        id, epoch = known.header.id, known.epoch
        place = (len(known.steps), known.committed[-1], known.acked)
        frame = step(id, epoch, *place, count=count, context=known.context)
        for _ in range(times):
            acks = self.run(self.store.commit_step(id, epoch, frame))
            assert [ack.count for ack in acks] == [count] * bool(count)
        known.commit(frame)

    @rule(number=PICK)
    def pause(self, number):
        known = self.held(number)
        self.run(self.store.pause(known.header.id, known.epoch))
        self.model.pause(known.header.id)

    @rule(number=PICK, is_good=st.booleans())
    def finish(self, number, is_good):
        known = self.held(number)
        outcome = COMPLETED if is_good and known.acked else LOST
        self.run(self.store.finish(known.header.id, known.epoch, outcome))
        self.model.finish(known.header.id, outcome)

    @needs(lambda model: model.of_state(PAUSED))
    @rule()
    def requeue_paused(self):
        assert self.run(self.store.requeue_paused()) == self.model.requeue_paused()

    @needs(lambda model: any(model.held.values()))
    @rule(worker=WORKERS)
    def reap(self, worker):
        assert self.run(self.store.reap(worker)) == self.model.reap(worker)

    @needs(lambda model: any(model.branch_points()))
    @rule(number=PICK)
    def branch(self, number):
        points = list(self.model.branch_points())
        child = header(next(self.numbers), parent=points[number % len(points)])
        self.run(self.store.branch(child))
        self.model.branch(child)

    @needs(lambda model: model.taken_over())
    @rule(number=PICK, count=st.integers(1, 9))
    def write_with_an_old_epoch(self, number, count):
        ids = self.model.taken_over()
        known = self.model.known[ids[number % len(ids)]]
        id, epoch = known.header.id, known.epoch - 1
        place = (len(known.steps), known.committed[-1], known.acked)
        for request in (
            self.store.append(policy(id, epoch, known.acked, count, context=known.context)),
            self.store.commit_step(id, epoch, step(id, epoch, *place, context=known.context)),
            self.store.pause(id, epoch),
            self.store.finish(id, epoch, LOST),
        ):
            with pytest.raises(Fenced):
                self.run(request)

    @rule(update=st.integers(0, 3), loss=st.sampled_from([0.5, 1.5]))
    def record_update(self, update, loss):
        last = self.model.last_version
        row = UpdateRow(update, last, last, self.model.pinned or 0, "k", (), (), {}, (), loss)
        self.run(self.store.record_update(row))
        self.model.add_update(row)

    @rule()
    def next_version(self):
        last = self.model.last_version
        assert self.run(self.store.next_version(last, digest_json(last), None)) == last + 1
        self.model.last_version += 1

    # Sealing and drawing

    @rule(number=PICK, num_steps=st.integers(1, 3))
    def play(self, number, num_steps):
        """To its end, so that there is something to seal and to draw."""
        for n in range(num_steps):
            self.append(number, 30 + n, opens=False, times=1)
            self.commit(number, 5, times=1)
        self.finish(number, is_good=True)

    @rule()
    def pin(self):
        self.model.pin(self.run(self.store.pin()))

    @rule(update=st.integers(0, 9), n=st.integers(1, 3))
    def sample(self, update, n):
        model = self.model
        if not model.rewarded():
            self.play(update, 1)
        if not model.drawable:
            self.pin()
        request = SampleRequest(update, n, seed=7, manifest_seq=model.pinned)
        if n > len(model.drawable):
            with pytest.raises(StoreError):
                self.run(self.store.sample(request))
            return
        refs = self.run(self.store.sample(request))
        ids = {ref.id for ref in refs}
        assert len(ids) == n
        assert ids <= set(model.drawable)
        model.draws.append((request, refs))
        self.draw_again()

    @needs(lambda model: model.draws)
    @rule()
    def draw_again(self):
        """Once something else was sealed and pinned."""
        self.play(0, 1)
        self.pin()
        for request, refs in self.model.draws:
            assert self.run(self.store.sample(request)) == refs

    # Faults

    @rule()
    def restart(self):
        self.run(self.store.aclose())
        self.open()

    @rule()
    def crash(self):
        copy = next(self.roots)
        shutil.copytree(self.root, copy)
        self.go_on_from(copy)

    def go_on_from(self, copy):
        self.run(self.store.aclose())
        shutil.rmtree(self.root)
        self.root = copy
        self.open()

    @rule(number=PICK, count=st.integers(1, 40), num_turns=st.integers(0, 6))
    def crash_while_writing(self, number, count, num_turns):
        """What was on its way is there as a whole, or not at all."""
        known, copy = self.held(number), next(self.roots)
        frame = self.frame(known, count, False)

        async def write():
            writing = asyncio.create_task(self.store.append(frame))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            shutil.copytree(self.root, copy)
            await writing

        self.run(write())
        found = StoreReader(copy).num_acknowledged_tokens(known.header.id)
        before = sum(len(ids) for ids, *_ in known.contexts)
        assert found in (before, before + count)
        if found > before:
            known.add(frame)
        self.go_on_from(copy)

    @rule()
    def compact(self):
        upkeep = self.store._upkeep
        upkeep.policy = COMPACTS
        self.run(upkeep.compact())
        upkeep.policy = UPKEEP

    @rule()
    def collect_garbage(self):
        """With no grace: what one round marks the next one deletes."""
        for _ in range(2):
            report = self.run(self.store._upkeep.collect())
            assert report.dropped == {}

    @rule()
    def flush_redis(self):
        with Redis.from_url(self.url) as redis:
            redis.flushall()

    # What readers see

    @invariant()
    def store_equals_model(self):
        found = self.run(self.store.trajectories())
        assert [t.header for t in found] == [k.header for k in self.model.known.values()]
        for trajectory, known in zip(found, self.model.known.values(), strict=True):
            assert (trajectory.state, trajectory.outcome) == (known.state, known.outcome)
            assert trajectory.steps == tuple(known.steps)
            assert trajectory.num_tokens == sum(known.committed)
            assert trajectory.num_policy_tokens == known.num_policy
        self.tokens_equal_model()
        assert self.run(self.store.updates()) == self.model.updates
        changes = self.run(self.store.changes(0, 0.0)).items
        assert dict(changes) == {id: known.state for id, known in self.model.known.items()}

    def tokens_equal_model(self):
        pairs = [
            (Ref(id, context=c), known.visible(c))
            for id, known in self.model.known.items()
            for c in range(len(known.contexts))
        ]
        reads = self.run(self.store.read_many([ref for ref, _ in pairs]))
        for read, (_, visible) in zip(reads, pairs, strict=True):
            same(visible, (read.token_ids, read.loss_mask, read.rollout_logprobs))


def same(expected, found):
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)


def run_machine(url, memory, **options):
    machine = type("Machine", (StoreMachine,), {"url": url, "memory": memory})
    run_state_machine_as_test(
        machine,
        settings=settings(deadline=None, suppress_health_check=list(HealthCheck), **options),
    )


def test_any_sequence_of_requests_equals_the_model(valkey, memory):
    run_machine(valkey, memory, max_examples=10, stateful_step_count=30, derandomize=True)


@pytest.mark.slow
def test_any_long_sequence_of_requests_equals_the_model(valkey, memory):
    run_machine(valkey, memory, max_examples=150, stateful_step_count=60)
