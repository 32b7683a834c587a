"""A disk that is nearly full: nothing new begins, what runs ends well, all resumes by itself."""

import asyncio
import os
import subprocess
import time

import pytest

from k3rl.errors import StoreFull
from k3rl.proxy import failure, result
from k3rl.store.compaction import Limits
from k3rl.store.fsck import check
from k3rl.store.protocol import Ref
from k3rl.store.space import DiskGate
from k3rl.store.upkeep import Policy
from k3rl.types import LineageKind, ParentRef
from tests.store.store_builders import claim_one, header, play, played, policy, service, step

MIN_FREE = 2 << 20
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="mounting a small tmpfs as the disk needs root"
)


@pytest.fixture
def disk(tmp_path):
    """A disk of 6 MiB, and functions that fill it up to the watermark and clear it."""
    root = tmp_path / "disk"
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(root)], check=True)
    ballast = root / "ballast"

    def fill(left):
        free = os.statvfs(root)
        ballast.write_bytes(b"x" * (free.f_bavail * free.f_frsize - left))

    yield root, fill, lambda: ballast.unlink()
    # Lazily: an error that a test caught keeps the store's open files alive for a while.
    subprocess.run(["umount", "-l", str(root)], check=True)


@needs_root
def test_nothing_new_begins_and_what_runs_goes_on(disk, valkey):
    root, fill, clear = disk
    kept = Policy(min_free_bytes=MIN_FREE, admission_wait_s=0.6)

    async def go():
        async with service(root, valkey, policy=kept) as store:
            await store.begin([header(0), header(1)])
            claim = await claim_one(store)
            id, epoch = claim.header.id, claim.epoch
            await store.commit_step(id, epoch, step(id, epoch, 0, 0, 0))
            fill(MIN_FREE - 100_000)
            await asyncio.sleep(0.6)
            with pytest.raises(StoreFull, match=r"make room on this disk") as caught:
                await store.begin([header(2)])
            assert str(root) in str(caught.value)
            parent = ParentRef(id, 0, 5, 0, LineageKind.BRANCH)
            with pytest.raises(StoreFull):
                await store.branch(header(3, parent=parent))
            # What is queued stays there; what was begun may be begun again, which changes nothing.
            assert await store.claim("other", 1, [], 0.1) == []
            await store.begin([header(0), header(1)])
            (again,) = await store.claim("w", 1, [], 0.1)
            assert again.header.id == id
            await play(store, again, num_steps=2)
            assert await store.pin() == 1
            assert len((await store.read(Ref(id))).token_ids) == 140
            stats = await store.stats()
            assert stats.num_refused == 2
            assert 0 < stats.free_bytes < MIN_FREE
            # It resumes by itself: who waits is let in, who asks for work gets it.
            beginning = asyncio.create_task(store.begin([header(4)]))
            asking = asyncio.create_task(store.claim("other", 1, [], 10.0))
            await asyncio.sleep(0.1)
            began = time.monotonic()
            clear()
            await beginning
            (claim,) = await asking
            assert time.monotonic() - began < 5.0
            assert claim.header.id == header(1).id
            await play(store, claim)
            assert (await store.stats()).free_bytes > MIN_FREE
        assert check(root).findings == []

    asyncio.run(go())


@needs_root
def test_without_room_nothing_is_compacted_but_garbage_goes(disk, valkey):
    root, fill, clear = disk
    kept = Policy(Limits(min_batches=2, level=1), min_free_bytes=MIN_FREE, grace_s=0.0)

    async def go():
        async with service(root, valkey) as store:
            for n in range(2):
                await played(store, n, turn=2000)
                await store.pin()
        async with service(root, valkey, policy=kept) as store:
            fill(MIN_FREE - 100_000)
            await asyncio.sleep(0.6)
            store._upkeep.sealed()
            await asyncio.sleep(0.5)
            assert store._upkeep.num_rewritten == 0
            clear()
            await asyncio.sleep(0.6)
            store._upkeep.sealed()
            for _ in range(50):
                await asyncio.sleep(0.1)
                if store._upkeep.num_rewritten:
                    break
            assert store._upkeep.num_rewritten == 2
            fill(MIN_FREE - 100_000)
            for _ in range(50):
                await asyncio.sleep(0.1)
                if store._upkeep.num_deleted_bytes:
                    break
            assert store._upkeep.num_deleted_bytes > 0
        assert check(root).findings == []

    asyncio.run(go())


def test_a_gate_does_not_flutter(tmp_path, monkeypatch):
    """It opens again only with an eighth more than it needs to stay open."""
    free = iter((1000, 800, 799, 800, 899, 900, 800, 799, 0))

    def statvfs(path):
        return os.statvfs_result((1, 1, 0, 0, next(free), 0, 0, 0, 0, 255))

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr("k3rl.store.space.LOOK_S", 0.0)
    gate = DiskGate(tmp_path, 800, 0.0)
    seen = [gate.is_open for _ in range(8)]
    assert seen == [True, True, False, False, False, True, True, False]
    assert DiskGate(tmp_path, 0, 0.0).is_open


def test_the_error_keeps_its_type_on_its_way(tmp_path):
    with pytest.raises(StoreFull, match="too little"):
        result(failure(StoreFull("too little room")))


def test_a_late_commit_is_no_beginning(tmp_path, open_store):
    """A gate that is shut from the start lets everything but beginnings through."""

    async def go():
        async with open_store() as store:
            await store.begin([header(0)])
            claim = await claim_one(store)
        shut = Policy(min_free_bytes=1 << 60, admission_wait_s=0.0)
        async with open_store(policy=shut) as store:
            id = claim.header.id
            await store.append(policy(id, claim.epoch, 0, 8))
            await store.pause(id, claim.epoch)
            assert await store.requeue_paused() == 1
            with pytest.raises(StoreFull):
                await store.begin([header(1)])

    asyncio.run(go())
