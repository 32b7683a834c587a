"""Power loss at any call: whatever was answered is there, whatever was not is there whole or not.

A run with everything that writes is recorded once; each recorded moment is turned into folders as
a disk might leave them (`store_power`): each must open, keep every promise and pass fsck.
"""

import asyncio
import os
import random
import re
import shutil

import pytest

from k3rl.blobs import BlobStore
from k3rl.store.ledger import Ledger
from k3rl.store.protocol import UpdateRow
from k3rl.types import LineageKind, ParentRef, digest_json
from tests.store.store_builders import header, play, policy, service, step
from tests.store.store_files import Root
from tests.store.store_power import Recorder, image
from tests.store.store_witness import Witness, judge

ROOT = "runs/run/store"
SMALL = {"journal_file_bytes": 6000, "seal_tokens": 10**9}
KINDS = {
    "nothing unsynced": ("none", "old"),
    "names without contents": ("all", "old"),
    "contents without names": ("none", "new"),
    "everything": ("all", "new"),
    "torn": ("all", "torn"),
    "torn, some names": ("some", "torn"),
    "torn again, some names": ("some", "torn"),
}


async def life(root, url, witness):
    """Two services one after the other; what the second finds was left by an unfinished step."""
    blobs = BlobStore(root / "blobs")
    witness.ledger = Ledger(root.parent / "w.jsonl")
    async with service(root, url, **SMALL) as witness.store:
        await witness.begin([header(n) for n in range(4)])
        claims = await witness.claim("w", 4, [], 5.0)
        await asyncio.gather(*(play(witness, c, turn=90, chunk=30) for c in claims[:2]))
        layer = blobs.put(b"layer" * 300)
        await begun(witness, claims[2], layer)
        await witness.next_version(0, digest_json("w"), None)
        seq = await witness.pin()
        members = tuple(c.header.id for c in claims[:2])
        row = UpdateRow(0, 0, 1, seq, "key", members, (0.5, -0.5), {"n": 1.0}, (1.0, 2.0), 0.5)
        await witness.record_update(row)
        parent = await witness.get(claims[0].header.id)
        at = parent.steps[1]
        ref = ParentRef(parent.id, 0, at.token_start + 7, 1, LineageKind.BRANCH)
        await witness.branch(header(5, parent=ref))
        await witness.pause(claims[2].header.id, claims[2].epoch)
    async with service(root, url, **SMALL) as witness.store:
        await witness.requeue_paused()
        taken = await witness.claim("x", 2, [], 5.0)
        await asyncio.gather(*(play(witness, c, turn=90, chunk=30, num_steps=4) for c in taken))
        await witness.next_version(1, digest_json("x"), layer)
        await witness.pin()
    witness.ledger.close()


async def begun(store, claim, layer):
    """One committed step with a layer, one that is not; its tokens come in one group of frames."""
    id, epoch = claim.header.id, claim.epoch
    await store.commit_step(id, epoch, step(id, epoch, 0, 0, 0, layers=[layer]))
    frames = [policy(id, epoch, 5 + 300 * n, 300) for n in range(4)]
    await asyncio.gather(*map(store.append, frames))


@pytest.fixture(scope="module")
def recorded(memory, valkey):
    disk, witness = memory / "power", Witness()
    disk.mkdir()
    recorder = Recorder(disk, witness.facts)
    with pytest.MonkeyPatch.context() as patch:
        recorder.install(patch)
        asyncio.run(life(disk / ROOT, valkey, witness))
    recorder.close()
    return recorder, witness


def leave(crash, kind, seed, folder):
    """The store root that `kind` of loss leaves in `folder`."""
    image(crash, folder, *KINDS[kind], random.Random(f"{kind} {seed}"))
    return folder / ROOT


def judge_crash(recorder, witness, number, kind, folder):
    crash = recorder.crashes[number]
    root = leave(crash, kind, number, folder / "disk")
    try:
        with pytest.MonkeyPatch.context() as patch:
            # Judging goes no further than this process: the disk may take its time.
            patch.setattr(os, "fsync", lambda handle: None)
            patch.setattr(os, "fdatasync", lambda handle: None)
            judge(root, witness, folder / "ledgers", crash.noted)
    except Exception as error:
        error.add_note(f"crash {number}, {kind}, before {crash.call}")
        raise
    shutil.rmtree(folder / "disk")


def test_a_power_loss_keeps_what_was_answered(recorded, quick_path):
    """One kind of loss at every other call; which one goes round."""
    kinds = list(KINDS)
    for number in range(0, len(recorded[0].crashes), 2):
        judge_crash(*recorded, number, kinds[number % len(kinds)], quick_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_power_loss_keeps_what_was_answered(recorded, quick_path, kind):
    for number in range(len(recorded[0].crashes)):
        judge_crash(*recorded, number, kind, quick_path)


def recovery_crashes(recorded, number, folder):
    """Every moment of the recovery from one torn end, and of what is written after it."""
    crash = recorded[0].crashes[number]
    root = leave(crash, "torn", number, folder)
    again = Recorder(folder, recorded[1].facts[: crash.noted])
    with pytest.MonkeyPatch.context() as patch:
        again.install(patch)
        opened = Root(root)
        found = opened.state.recovery
        opened.do(opened.live.begin(header(90)))
        opened.close()
    again.close()
    return again, found


def judge_recoveries(recorded, numbers, kinds, folder):
    """Returns what was set aside: the tests that use it say how much that must be."""
    num_torn = 0
    for number in numbers:
        again, found = recovery_crashes(recorded, number, folder / "first")
        num_torn += found["torn_bytes"] > 0
        for each in range(len(again.crashes)):
            for kind in kinds:
                judge_crash(again, recorded[1], each, kind, folder)
        shutil.rmtree(folder / "first")
    return num_torn


def test_a_second_power_loss_during_recovery(recorded, quick_path):
    numbers = unsynced_groups(recorded)[2::16]
    assert judge_recoveries(recorded, numbers, ["torn, some names"], quick_path) >= 2


def unsynced_groups(recorded):
    """Crashes between the writing of a group and its sync."""
    crashes = recorded[0].crashes
    return [n for n, crash in enumerate(crashes) if re.match("fdatasync.*/J-", crash.call)]


@pytest.mark.slow
def test_any_second_power_loss_during_recovery(recorded, quick_path):
    numbers = unsynced_groups(recorded)[::6]
    kinds = ["nothing unsynced", "everything", "torn, some names"]
    assert judge_recoveries(recorded, numbers, kinds, quick_path) >= 4
