"""Nothing is answered, shown or relied upon before the disk has it."""

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from k3rl.errors import StoreError
from k3rl.store.fsck import check
from k3rl.store.journal import event_of
from k3rl.store.protocol import Ack
from k3rl.store.recovery import RootLock, recover
from k3rl.store.scan import Scan
from k3rl.types import TokenFrame, TrajectoryState, digest_json
from tests.store.store_builders import (
    COMPLETED,
    claim_one,
    header,
    played,
    policy,
    service,
    step,
)
from tests.store.store_faults import fail, hold, note

ROOT = Path(__file__).parents[2]
JOURNAL = r"/journal/J-"
KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from tests.store.store_builders import claim_one, header, policy, service

async def go():
    async with service(Path(sys.argv[1]), sys.argv[2]) as store:
        await store.begin([header(0)])
        claim = await claim_one(store)
        await store.append(policy(claim.header.id, claim.epoch, 0, 8))
        os.fdatasync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
        await store.append(policy(claim.header.id, claim.epoch, 8, 8))

asyncio.run(go())
"""


def journals(root):
    return sorted((root / "journal").glob("J-*.tj"))


def token_frames(root):
    events = [event_of(f, str(path)) for path in journals(root) for f in Scan(path)]
    return [(e.offset, len(e.token_ids)) for e in events if isinstance(e, TokenFrame)]


def test_what_a_kill_left_unsynced_is_synced_before_it_is_relied_upon(
    tmp_path, valkey, monkeypatch
):
    """Killed between write and sync: the frames are whole, but in the page cache only."""
    root = tmp_path / "store"
    done = subprocess.run([sys.executable, "-c", KILLED, root, valkey], cwd=ROOT, check=False)
    assert done.returncode == -9
    (killed,) = journals(root)

    async def go():
        calls = note(monkeypatch, root)
        async with service(root, valkey) as store:
            synced = {path for call, path in calls if call == "sync"}
            assert {f"journal/{killed.name}", "journal", "_log", "sealed"} <= synced
            (claim,) = await store.claim("w", 1, [], 1.0)
            assert [(a.offset, a.count) for a in claim.acks] == [(0, 8), (8, 8)]
            await store.finish(claim.header.id, claim.epoch, COMPLETED)

    asyncio.run(go())


def test_left_over_files_go_only_after_what_replaces_them_is_durable(
    tmp_path, open_store, monkeypatch
):
    root, kept = tmp_path / "store", {}

    async def go():
        async with open_store() as store:
            await played(store, 0)
            kept.update({path: path.read_bytes() for path in journals(root)})
            await store.pin()

    asyncio.run(go())
    for path, data in kept.items():
        path.write_bytes(data)
    calls = note(monkeypatch, root)
    recover(root, owner=True)
    gone = [n for n, call in enumerate(calls) if call[0] == "unlink" and "J-" in call[1]]
    assert len(gone) == len(kept)
    for folder in ("_log", "sealed", "journal"):
        assert calls.index(("sync", folder)) < min(gone)


def test_a_disk_that_refuses_at_the_start_is_one_clear_error(tmp_path, open_store, monkeypatch):

    async def go():
        async with open_store() as store:
            await played(store, 0)
        for where in (r"/_log$", JOURNAL, r"/sealed$"):
            with monkeypatch.context() as patch:
                fail(patch, "fsync", where)
                with pytest.raises(StoreError, match=r"Input/output error: check this disk"):
                    async with open_store():
                        pass
        async with open_store() as store:
            assert len(await store.trajectories()) == 1

    asyncio.run(go())


@pytest.mark.parametrize("call", ["mkdir", "truncate"])
def test_start_up_errors_name_a_path(tmp_path, open_store, monkeypatch, call):
    root = tmp_path / "store"

    async def go():
        async with open_store() as store:
            await played(store, 0)

    asyncio.run(go())
    with monkeypatch.context() as patch:
        if call == "mkdir":
            patch.setattr(Path, "mkdir", refuse)
        else:
            with open(journals(root)[-1], "ab") as file:
                file.write(b"K3TJ")
            patch.setattr(os, "fsync", refuse)
        with pytest.raises(StoreError, match=f"{root}.*No space left"):
            recover(root, owner=True)
    recover(root, owner=True)


def refuse(*_arguments, **_options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_lock_on_a_full_disk_is_let_go(tmp_path, monkeypatch):
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        with pytest.raises(StoreError, match=r"LOCK: No space left on device"):
            RootLock(tmp_path / "store")
    assert len(os.listdir("/proc/self/fd")) == before
    RootLock(tmp_path / "store").release()


def test_nothing_is_answered_or_shown_before_the_sync_returns(tmp_path, open_store, monkeypatch):
    async def go():
        async with open_store() as store:
            await store.begin([header(0)])
            claim = await claim_one(store)
            id, epoch = claim.header.id, claim.epoch
            await store.commit_step(id, epoch, step(id, epoch, 0, 0, 0))
            cursor = (await store.changes(0, 0.0)).cursor
            with monkeypatch.context() as patch:
                waits, go_on = hold(patch, "fdatasync", JOURNAL)
                append = asyncio.create_task(store.append(policy(id, epoch, 5, 8)))
                commit = asyncio.create_task(
                    store.commit_step(id, epoch, step(id, epoch, 1, 5, 13))
                )
                finish = asyncio.create_task(store.finish(id, epoch, COMPLETED))
                version = asyncio.create_task(store.next_version(0, digest_json("w"), None))
                assert await asyncio.to_thread(waits.wait, 10)
                await asyncio.sleep(0.1)
                assert not any(task.done() for task in (append, commit, finish, version))
                found = await store.get(id)
                assert (found.num_tokens, found.state) == (5, TrajectoryState.ACTIVE)
                assert (await store.changes(cursor, 0.0)).items == ()
                go_on.set()
                await asyncio.gather(append, commit, finish, version)
            assert (await store.get(id)).num_tokens == 18
            assert len((await store.changes(cursor, 0.0)).items) == 1

    asyncio.run(go())


def test_a_sync_that_fails_fails_all_who_wait_for_it(tmp_path, open_store, monkeypatch):
    root = tmp_path / "store"

    async def go():
        async with open_store() as store:
            await store.begin([header(n) for n in range(4)])
            claims = await store.claim("w", 4, [], 1.0)
            for claim in claims:
                await store.append(policy(claim.header.id, claim.epoch, 0, 8))
            last = journals(root)[-1]
            before = last.read_bytes()
            with monkeypatch.context() as patch:
                fail(patch, "fdatasync", JOURNAL)
                writes = [store.append(policy(c.header.id, c.epoch, 8, 8)) for c in claims]
                writes.append(store.next_version(0, digest_json("w"), None))
                results = await asyncio.gather(*writes, return_exceptions=True)
            assert [type(result) for result in results] == [StoreError] * 5
            assert all("Input/output error" in str(result) for result in results)
            assert last.read_bytes() == before
            for claim in claims:
                assert (await store.get(claim.header.id)).state is TrajectoryState.ACTIVE
                with pytest.raises(StoreError, match="start the run again"):
                    await store.append(policy(claim.header.id, claim.epoch, 8, 8))
        assert check(root).findings == []
        async with open_store() as store:
            assert (await store.stats()).recovery["torn_bytes"] == 0
            for claim in claims:
                await store.append(policy(claim.header.id, claim.epoch, 8, 8))

    asyncio.run(go())


def test_a_retry_behind_a_cancelled_caller_is_journaled_once(tmp_path, open_store, monkeypatch):
    root = tmp_path / "store"

    async def go():
        async with open_store() as store:
            await store.begin([header(0)])
            claim = await claim_one(store)
            frame = policy(claim.header.id, claim.epoch, 0, 8)
            with monkeypatch.context() as patch:
                waits, go_on = hold(patch, "fdatasync", JOURNAL)
                first = asyncio.create_task(store.append(frame))
                assert await asyncio.to_thread(waits.wait, 10)
                first.cancel()
                retries = [asyncio.create_task(store.append(frame)) for _ in range(3)]
                await asyncio.sleep(0)
                following = policy(claim.header.id, claim.epoch, 8, 4)
                after = asyncio.create_task(store.append(following))
                await asyncio.sleep(0)
                # Neither the first in line nor the one right ahead may let anybody overtake.
                retries[0].cancel()
                retries[2].cancel()
                await asyncio.sleep(0.05)
                assert first.cancelled()
                assert not retries[1].done()
                assert not after.done()
                go_on.set()
                ack, _ = await asyncio.gather(retries[1], after)
            assert ack == Ack(frame.id, 0, 0, 8, frame.content_hash())
            assert token_frames(root) == [(0, 8), (8, 4)]

    asyncio.run(go())
