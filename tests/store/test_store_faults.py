"""A full disk, a lost or unreachable Redis, silent workers, callers that go away."""

import asyncio
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from redis import Redis

from k3rl.errors import Fenced, StoreError
from k3rl.store.core import Signal
from k3rl.store.fsck import check, compare_ledger
from k3rl.store.protocol import Ack, Ref
from k3rl.store.redis_server import EmbeddedServer
from k3rl.types import TrajectoryState
from tests.store.store_builders import COMPLETED, claim_one, header, play, played, policy, service

ROOT = Path(__file__).parents[2]


def test_a_file_size_limit_is_one_clear_error(tmp_path, valkey):
    root, ledgers = tmp_path / "store", tmp_path / "ledger"
    command = [sys.executable, "-m", "tests.store.store_child", root, ledgers, valkey, "fill"]

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, preexec_fn=limit, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    (refused,) = [line for line in lines if line.startswith("refused /")]
    assert str(root / "journal") in refused
    assert "File too large" in refused
    assert "make room" in refused
    assert lines[-3:] == ["refused again", "readable 5", "closed"]
    assert sorted((root / "journal").iterdir())[-1].stat().st_size <= 50_000
    assert check(root).findings == []
    report = compare_ledger(root, ledgers)
    assert (report.lost, report.duplicated, report.mismatched) == ([], [], [])
    # The opening step's five tokens are the only ones that the child did not note.
    assert [(r.start, r.end) for r in report.unknown] == [(0, 5)]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs as the disk needs root")
def test_a_full_disk_stops_sealing_but_loses_nothing(tmp_path, valkey):
    root = tmp_path / "disk"
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(root)], check=True)

    async def go():
        async with service(root, valkey, lease_ttl_s=60.0) as store:
            id = await played(store, 0, num_steps=3, turn=8000, chunk=1000)
            before = await store.read(Ref(id))
            ballast = root / "ballast"
            free = os.statvfs(root)
            ballast.write_bytes(b"x" * (free.f_bavail * free.f_bsize - 40_000))
            with pytest.raises(StoreError, match="No space left on device"):
                await store.pin()
            assert list((root / "sealed").iterdir()) == []
            again = await store.read(Ref(id))
            assert again.token_ids.tobytes() == before.token_ids.tobytes()
            ballast.unlink()
            assert await store.pin() == 1
            again = await store.read(Ref(id))
            assert again.token_ids.tobytes() == before.token_ids.tobytes()
        assert check(root).findings == []

    try:
        asyncio.run(go())
    finally:
        subprocess.run(["umount", str(root)], check=True)


def test_flushall_in_the_middle_is_survived(tmp_path, valkey):
    client = Redis.from_url(valkey)

    async def go():
        async with service(tmp_path / "store", valkey) as store:
            await store.begin([header(n) for n in range(12)])
            played_ids = []
            for n in range(12):
                if n % 3 == 0:
                    client.flushall()
                claim = await claim_one(store, f"w{n % 2}")
                await play(store, claim)
                played_ids.append(claim.header.id)
            assert played_ids == [header(n).id for n in range(12)]
            assert (await store.stats()).num_index_rebuilds >= 4
            assert await store.claim("w", 1, [], 0.0) == []

    asyncio.run(go())


def test_a_server_that_restarts_empty_is_filled_again(tmp_path):
    server = EmbeddedServer(tmp_path / "redis")

    async def go():
        url = await server.start()
        async with service(tmp_path / "store", url) as store:
            await store.begin([header(n) for n in range(4)])
            first = await claim_one(store, "a")
            await server.stop()
            for path in (tmp_path / "redis").glob("appendonlydir/*"):
                path.unlink()
            # Durability does not need the index.
            await play(store, first)
            await server.start()
            claims = await store.claim("b", 4, [], 5.0)
            assert [c.header.id for c in claims] == [header(n).id for n in (1, 2, 3)]
            assert (await store.stats()).num_index_rebuilds >= 1
        await server.stop()

    asyncio.run(go())


def test_an_unreachable_server_is_one_clear_error(tmp_path):
    server = EmbeddedServer(tmp_path / "redis")

    async def go():
        url = await server.start()
        async with service(tmp_path / "store", url) as store:
            await store.begin([header(0)])
            claim = await claim_one(store)
            await server.stop()
            with pytest.raises(StoreError, match="no Redis server answered"):
                await store.claim("w", 1, [claim.header.id], 0.0)
            await play(store, claim)
            assert (await store.get(claim.header.id)).outcome == COMPLETED
        with pytest.raises(StoreError, match="no Redis server answered"):
            async with service(tmp_path / "store", url):
                pass
        await server.start()
        async with service(tmp_path / "store", url) as store:
            assert (await store.get(claim.header.id)).outcome == COMPLETED
        await server.stop()

    asyncio.run(go())


def test_a_silent_worker_is_reaped(open_store):
    async def go():
        async with open_store(lease_ttl_s=0.4) as store:
            await store.begin([header(0), header(1)])
            dead, alive = (
                await store.claim("dead", 1, [], 1.0),
                await store.claim("alive", 1, [], 1.0),
            )
            id = alive[0].header.id
            found = await store.claim("patient", 1, [], 0.2)
            for _ in range(40):
                await store.claim("alive", 0, [id], 0.0)
                found = found or await store.claim("patient", 1, [], 0.05)
                if found:
                    break
            assert [c.header.id for c in found] == [dead[0].header.id]
            assert found[0].state is TrajectoryState.ACTIVE
            with pytest.raises(Fenced):
                await store.append(policy(dead[0].header.id, dead[0].epoch, 0, 4))
            await store.append(policy(id, alive[0].epoch, 0, 4))

    asyncio.run(go())


@pytest.mark.parametrize("pause_s", [0.0, 0.1, 0.2, 0.3])
def test_a_stalled_event_loop_is_not_the_workers_silence(open_store, pause_s):
    async def go():
        async with open_store(lease_ttl_s=1.0) as store:
            await store.begin([header(0)])
            claim = await claim_one(store, "w")
            id = claim.header.id

            async def beat():
                while True:
                    await asyncio.sleep(0.33)
                    await store.claim("w", 0, [id], 0.0)

            beating = asyncio.create_task(beat())
            await asyncio.sleep(pause_s)
            # Nothing in this process runs meanwhile, so nobody can be heard.
            time.sleep(1.6)  # noqa: ASYNC251
            await asyncio.sleep(0.5)
            await store.append(policy(id, claim.epoch, 0, 4))
            beating.cancel()
            # Once it really is silent it is reaped.
            (taken,) = await store.claim("patient", 1, [], 5.0)
            assert taken.epoch > claim.epoch

    asyncio.run(go())


def test_waiting_for_work_keeps_a_lease(open_store):
    async def go():
        async with open_store(lease_ttl_s=0.3) as store:
            await store.begin([header(0)])
            claim = await claim_one(store, "w")
            assert await store.claim("w", 1, [claim.header.id], 1.0) == []
            await store.append(policy(claim.header.id, claim.epoch, 0, 4))

    asyncio.run(go())


def test_cancelled_callers_leave_no_gap(open_store):
    """Whoever goes away in the middle of a write does not undo it, or let others overtake it."""

    async def go():
        async with open_store() as store:
            await store.begin([header(0)])
            claim = await claim_one(store, "w")
            id, epoch = claim.header.id, claim.epoch
            frames = [policy(id, epoch, 8 * n, 8) for n in range(40)]
            tasks = [asyncio.create_task(store.append(frame)) for frame in frames]
            await asyncio.sleep(0)
            for task in tasks[::3]:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            # The first is being written, so those behind it go on; the fourth never is, and
            # whoever would leave a gap there is refused.
            cancelled = asyncio.CancelledError
            assert [type(r) for r in results[:4]] == [cancelled, Ack, Ack, cancelled]
            for n, result in enumerate(results[4:], 4):
                assert type(result) is (StoreError if n % 3 else cancelled)
                assert n % 3 == 0 or "leaves a gap" in str(result)
            acked = 0
            for frame in frames:
                acked += (await store.append(frame)).count
            assert acked == 320

    asyncio.run(go())


def test_a_cancelled_claim_is_handed_out_again(open_store):
    async def go():
        async with open_store() as store:
            await store.begin([header(n) for n in range(20)])
            found = []
            for n in range(20):
                waiting = asyncio.create_task(store.claim("w", 1, [], 1.0))
                for _ in range(n):
                    await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
            while claims := await store.claim("w", 3, found, 0.2):
                found += [claim.header.id for claim in claims]
            assert sorted(found) == sorted(header(n).id for n in range(20))
            assert len(set(found)) == 20

    asyncio.run(go())


def test_waiting_does_not_swallow_a_cancellation_that_meets_a_wake_up():
    async def go():
        signal = Signal()
        waiting = asyncio.create_task(signal.arm()(10.0))
        await asyncio.sleep(0)
        signal.wake()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(go())
