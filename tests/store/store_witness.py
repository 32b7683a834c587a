"""What a store has promised: noted beside it, and looked for in what a fault has left of it."""

import asyncio

from k3rl.errors import StoreError
from k3rl.store.fsck import check, compare_ledger
from k3rl.store.ledger import Ledger, read_ledgers
from k3rl.store.reader import StoreReader
from k3rl.store.recovery import RootLock, recover
from k3rl.store.rules import ack_of
from k3rl.types import TrajectoryState

NOT_KEPT = "nothing unacknowledged was kept"


class Witness:
    """Passes requests on to a store and notes each before it goes out and once it is answered.

    `facts` holds (kind, value) in the order of the answers; `sent` every frame that was ever sent,
    and `refused` those of which it was said that they were not kept.
    With a `ledger`, a file beside the store's root, it also writes down what a worker would.
    """

    def __init__(self):
        self.facts, self.sent, self.refused = [], set(), set()
        self.store = self.ledger = None

    def __getattr__(self, name):
        return getattr(self.store, name)

    async def begin(self, headers):
        await self.store.begin(headers)
        self.facts += [("begun", header.id) for header in headers]

    async def branch(self, header):
        await self.store.branch(header)
        self.facts.append(("begun", header.id))

    async def append(self, frame):
        self.sent.add(ack_of(frame))
        try:
            ack = await self.store.append(frame)
        except StoreError as error:
            if NOT_KEPT in str(error):
                self.refused.add(ack_of(frame))
            raise
        self.facts.append(("ack", ack))
        if self.ledger is not None:
            await asyncio.to_thread(self.ledger.write, ack)
            self.facts.append(("noted", ack))
        return ack

    async def commit_step(self, id, epoch, frame):
        if frame.tokens is not None:
            self.sent.add(ack_of(frame.tokens))
        acks = await self.store.commit_step(id, epoch, frame)
        self.facts += [("ack", ack) for ack in acks]
        self.facts.append(("step", (id, frame.step)))
        return acks

    async def finish(self, id, epoch, outcome):
        await self.store.finish(id, epoch, outcome)
        self.facts.append(("finished", (id, outcome)))

    async def next_version(self, *arguments):
        version = await self.store.next_version(*arguments)
        self.facts.append(("version", version))
        return version

    async def record_update(self, row):
        await self.store.record_update(row)
        self.facts.append(("update", row.update))

    async def pin(self):
        seq = await self.store.pin()
        self.facts.append(("pinned", seq))
        return seq


def judge(root, witness, ledgers, noted=None):
    """Open a root as its owner; all of the first `noted` facts must hold, and nothing be unsent."""
    facts = witness.facts[:noted]
    lock = RootLock(root)
    try:
        recover(root, True)
    finally:
        lock.release()
    reader = StoreReader(root)
    acked = {value for kind, value in facts if kind == "ack"}
    report = _compare(reader, ledgers / "acked", acked)
    assert (report.lost, report.duplicated, report.mismatched) == ([], [], []), report
    refused = witness.refused - acked
    report = _compare(reader, ledgers / "refused", refused)
    gone = {(lost.id, lost.context, lost.start) for lost in report.lost}
    assert gone == {(ack.id, ack.context, ack.offset) for ack in refused}
    # What is there without an answer is a whole frame that was sent.
    report = _compare(reader, ledgers / "sent", witness.sent)
    assert (report.unknown, report.duplicated, report.mismatched) == ([], [], []), report
    assert reader.recovery["torn_bytes"] == 0
    noted = {value for kind, value in facts if kind == "noted"}
    assert noted <= read_ledgers(root.parent)
    _check_facts(reader, facts)
    found = check(root).findings
    assert found == [], [str(one) for one in found]


def _compare(reader, folder, acks):
    (folder / "w.jsonl").unlink(missing_ok=True)
    ledger = Ledger(folder / "w.jsonl")
    ledger.write(*acks)
    ledger.close()
    return compare_ledger(reader.state.manifest.root, folder, reader)


def _check_facts(reader, facts):
    known = {trajectory.header.id: trajectory for trajectory in reader.trajectories()}
    versions = [row.policy_version for row in reader.versions()]
    assert len(versions) == len(set(versions))
    updates = {row.update for row in reader.state.updates}
    for kind, value in facts:
        match kind:
            case "begun":
                assert value in known, f"{value} was begun"
            case "step":
                id, step = value
                assert step in known[id].steps, f"step {step.index} of {id}"
            case "finished":
                id, outcome = value
                assert known[id].state is TrajectoryState.FINISHED
                assert known[id].outcome == outcome
            case "version":
                assert value in versions
            case "update":
                assert value in updates
            case "pinned":
                assert (reader.state.manifest.pinned_seq or 0) >= value
