"""The pool: warm sandboxes, waiting for room, idle pauses, leases, and clearing up."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from k3rl.blobs import BlobStore
from k3rl.errors import SandboxError, SandboxLost, UserInputError
from k3rl.sandboxes import admission
from k3rl.sandboxes.admission import Admission, AdmissionLimits, PoolLimits, Room, room
from k3rl.sandboxes.base import SandboxBackend
from k3rl.sandboxes.factory import open_backend
from k3rl.sandboxes.pool import Pool
from k3rl.sandboxes.spec import MIB, SandboxLimits, SandboxSpec
from tests.sandboxes.sandbox_helpers import ANY, sh, survivors

FILES = {"a": b"one", "d/b": b"two"}


def play(folder, body, limits=None, kind="bwrap"):
    async def main():
        backend = open_backend(kind, BlobStore(folder / "blobs"), folder / "scratch", True)
        pool = Pool(backend, limits)
        try:
            await body(pool)
        finally:
            await pool.aclose()

    asyncio.run(main())


def living(pool, sandbox_id):
    """Whether a sandbox's processes are there."""
    live = pool.backend._box(sandbox_id).live
    return live is not None and not live.is_over


async def until(is_true, limit_s=10.0):
    limit = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < limit, "it did not happen"
        await asyncio.sleep(0.01)


def test_a_pool_is_a_sandbox_backend(tmp_path):
    async def body(pool):
        assert isinstance(pool, SandboxBackend)
        assert await pool.capabilities() == await pool.backend.capabilities()

    play(tmp_path, body)


def test_a_warm_sandbox_is_started_holds_the_files_and_is_handed_out_once(tmp_path):
    async def body(pool):
        await pool.warm(ANY, 2, FILES)
        assert len(pool._shelves) == 2
        made = [await pool.create(ANY, FILES) for _ in range(3)]
        assert len(set(made)) == 3
        assert pool.counts["warm"] == 2
        assert pool.counts["cold"] == 1
        assert [living(pool, each) for each in made[:2]] == [True, True]
        for each in made:
            assert (await sh(pool, each, "cat a d/b; echo x > a")).stdout == b"onetwo"
        assert {(await pool.stats(each)).num_execs for each in made} == {1}

    play(tmp_path, body, PoolLimits(num_warm=2))


def test_another_spec_or_other_files_are_another_kind(tmp_path):
    async def body(pool):
        await pool.warm(ANY, 1, FILES)
        other = SandboxSpec(limits=SandboxLimits(max_processes=9), required=())
        await pool.create(other, FILES)
        await pool.create(ANY, {"a": b"other"})
        assert pool.counts["warm"] == 0
        await pool.create(ANY, dict(reversed(FILES.items())))
        assert pool.counts["warm"] == 1

    play(tmp_path, body, PoolLimits(num_warm=4))


def test_a_snapshot_can_be_kept_warm(tmp_path):
    async def body(pool):
        one = await pool.create(ANY, FILES)
        await sh(pool, one, "echo more > c")
        snapshot = await pool.snapshot(one, {"n": 1})
        await pool.warm(ANY, 1, snapshot)
        twin = await pool.restore(ANY, snapshot)
        assert pool.counts["warm"] == 1
        assert (await sh(pool, twin, "cat a c")).stdout == b"onemore\n"
        assert await pool.tree_digest(twin) == snapshot.tree_digest

    play(tmp_path, body, PoolLimits(num_warm=1))


def test_what_was_wanted_once_is_made_ready_again_and_the_longest_unwanted_goes(tmp_path):
    async def body(pool):
        for number in range(3):
            await pool.create(ANY, {"n": str(number).encode()})
        await until(lambda: len(pool._shelves) == 2 and not pool._tasks)
        await until(lambda: pool.admission.num_in == 5)
        for number, is_warm in ((2, True), (0, False)):
            before = pool.counts["warm"]
            await pool.create(ANY, {"n": str(number).encode()})
            assert (pool.counts["warm"] > before) is is_warm

    play(tmp_path, body, PoolLimits(num_warm=2))


def test_more_warm_ones_than_may_be_are_refused_and_none_are_kept_by_default(tmp_path):
    async def body(pool):
        with pytest.raises(UserInputError, match="num_warm is 0"):
            await pool.warm(ANY, 1)
        await pool.create(ANY)
        assert len(pool._shelves) == 0

    play(tmp_path, body)


def test_warm_ones_that_nobody_wants_are_closed(tmp_path):
    async def body(pool):
        await pool.create(ANY)
        await pool.warm(ANY, 2)
        await until(lambda: pool.counts["evicted"] >= 2 and len(pool._shelves) == 0)
        await until(lambda: pool.admission.num_in == 1)

    play(tmp_path, body, PoolLimits(num_warm=2, warm_s=0.2, tick_s=0.05))


def test_a_sandbox_starts_while_its_owner_thinks(tmp_path):
    async def body(pool):
        one = await pool.create(ANY, FILES)
        await until(lambda: living(pool, one))

    play(tmp_path, body)


def test_an_idle_sandbox_holds_no_process_and_wakes_by_itself(tmp_path):
    async def body(pool):
        one = await pool.create(ANY, FILES)
        await sh(pool, one, "echo kept > c")
        await until(lambda: pool.counts["idle_paused"] == 1)
        assert not living(pool, one)
        assert not [line for line in survivors(tmp_path) if "agent" in line]
        assert (await sh(pool, one, "cat c")).stdout == b"kept\n"
        assert living(pool, one)

    play(tmp_path, body, PoolLimits(idle_pause_s=0.1, tick_s=0.05))


def test_a_busy_sandbox_is_neither_paused_nor_expired(tmp_path):
    async def body(pool):
        one = await pool.create(ANY)
        assert (await sh(pool, one, "sleep 1; echo done")).stdout == b"done\n"
        assert not pool.counts["idle_paused"]
        assert not pool.counts["expired"]

    play(tmp_path, body, PoolLimits(idle_pause_s=0.1, lease_s=0.3, tick_s=0.05))


def test_what_its_owner_paused_stays_paused(tmp_path):
    async def body(pool):
        one = await pool.create(ANY)
        await pool.pause(one)
        await asyncio.sleep(0.3)
        with pytest.raises(SandboxError, match="paused"):
            await sh(pool, one, "true")
        await pool.resume(one)
        assert (await sh(pool, one, "echo on")).stdout == b"on\n"

    play(tmp_path, body, PoolLimits(idle_pause_s=0.1, tick_s=0.05))


def test_a_forgotten_sandbox_is_closed_and_its_room_given_back(tmp_path):
    async def body(pool):
        one = await pool.create(ANY)
        await until(lambda: pool.counts["expired"] == 1)
        assert pool.admission.num_in == 0
        with pytest.raises(SandboxLost):
            await sh(pool, one, "true")

    play(tmp_path, body, PoolLimits(lease_s=0.2, tick_s=0.05))


def test_no_more_than_max_sandboxes_are_alive(tmp_path):
    async def body(pool):
        held = [await pool.create(ANY) for _ in range(2)]
        waiting = asyncio.ensure_future(pool.create(ANY))
        await asyncio.sleep(0.4)
        assert not waiting.done()
        await pool.close(held[0])
        assert (await sh(pool, await waiting, "echo in")).stdout == b"in\n"
        with pytest.raises(SandboxError, match=r"no room for a sandbox in 0.6 s: 2 .* are alive"):
            await pool.create(ANY)
        assert pool.admission.num_in == 2

    few = AdmissionLimits(max_sandboxes=2, wait_s=0.6)
    play(tmp_path, body, PoolLimits(few))


def test_each_sandbox_may_have_one_fork_when_the_pool_is_full(tmp_path):
    """All of them end by being graded in a fork, while others wait in line for their places."""

    async def graded(pool, held):
        (twin,) = await pool.fork(held, 1)
        assert (await sh(pool, twin, "echo in")).stdout == b"in\n"
        with pytest.raises(SandboxError, match="2 sandboxes are alive"):
            await pool.fork(twin, 1)
        with pytest.raises(SandboxError, match="2 sandboxes are alive"):
            await pool.fork(held, 1)
        await pool.close(twin)
        (again,) = await pool.fork(held, 1)
        await pool.close(again)

    async def body(pool):
        held = [await pool.create(ANY) for _ in range(2)]
        waiting = asyncio.ensure_future(pool.create(ANY))
        await asyncio.gather(*(graded(pool, each) for each in held))
        with pytest.raises(SandboxError, match="no room"):
            await waiting
        for each in held:
            await pool.close(each)
        assert pool.admission.num_in == 0

    few = AdmissionLimits(max_sandboxes=2, wait_s=0.3)
    play(tmp_path, body, PoolLimits(few))


def test_a_fork_that_fails_gives_all_its_places_back(tmp_path):
    async def body(pool):
        held = await pool.create(ANY)
        with pytest.raises(SandboxError, match="1 sandboxes are alive"):
            await pool.fork(held, 2)
        (twin,) = await pool.fork(held, 1)
        await pool.close(twin)
        assert pool.admission.num_in == 1

    few = AdmissionLimits(max_sandboxes=1, wait_s=0.3)
    play(tmp_path, body, PoolLimits(few))


def test_warm_ones_make_room_for_wanted_ones(tmp_path):
    async def body(pool):
        await pool.warm(ANY, 2, {"a": b"1"})
        made = [await pool.create(ANY, {"a": b"2"}) for _ in range(2)]
        assert len(set(made)) == 2
        assert pool.counts["evicted"] == 2

    few = AdmissionLimits(max_sandboxes=2, wait_s=2)
    play(tmp_path, body, PoolLimits(few, num_warm=2))


def test_short_memory_pauses_the_longest_idle_one_before_anybody_waits(tmp_path, monkeypatch):
    async def body(pool):
        one, two = await pool.create(ANY), await pool.create(ANY)
        for each in (one, two):
            await sh(pool, each, "true")
        await asyncio.sleep(1.1)
        await sh(pool, two, "true")
        looks = iter([Room(0, 10_000)])
        monkeypatch.setattr(admission, "room", lambda: next(looks, Room(1 << 40, 10_000)))
        await pool.create(ANY)
        assert pool.counts["idle_paused"] == 1
        assert not living(pool, one)
        assert living(pool, two)

    play(tmp_path, body)


@pytest.mark.parametrize(
    ("left", "why"),
    [
        (Room(1 << 40, 10_000), None),
        (Room(1100 * MIB, 10_000), "1100 MiB of memory"),
        (Room(1 << 40, 300), "300 process numbers"),
    ],
)
def test_admission_looks_at_memory_and_process_numbers(left, why, monkeypatch):
    monkeypatch.setattr(admission, "room", lambda: left)
    limits = AdmissionLimits(footprint_bytes=100 * MIB)
    shortage = Admission(limits).shortage(64)
    assert shortage is None if why is None else why in shortage


def test_those_let_in_a_moment_ago_count_with_what_they_will_take(monkeypatch):
    async def main():
        monkeypatch.setattr(admission, "room", lambda: Room(1024 * MIB + 250 * MIB, 10_000))
        line = Admission(AdmissionLimits(footprint_bytes=100 * MIB, wait_s=0.1))

        async def nothing():
            return False

        await line.enter(64, nothing)
        await line.enter(64, nothing)
        with pytest.raises(SandboxError, match="1274 MiB of memory are available"):
            await line.enter(64, nothing)

    asyncio.run(main())


def test_room_is_what_the_kernel_tells():
    left = room()
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert pages // 2 < left.available_bytes <= os.sysconf("SC_PHYS_PAGES") * 4096
    assert 0 < left.free_processes < int(Path("/proc/sys/kernel/pid_max").read_text())


def test_only_so_many_start_at_once(tmp_path):
    async def body(pool):
        most = 0
        made = [await pool.backend.create(ANY) for _ in range(8)]
        prepare = pool.backend.prepare
        now = 0

        async def counted(sandbox_id):
            nonlocal most, now
            now += 1
            most = max(most, now)
            await prepare(sandbox_id)
            now -= 1

        pool.backend.prepare = counted
        await asyncio.gather(*(pool._prepare(each) for each in made))
        assert most == 3

    play(tmp_path, body, PoolLimits(AdmissionLimits(max_starting=3)))


def test_what_a_killed_owner_left_is_reaped_while_the_pool_lives(tmp_path):
    async def body(pool):
        pid = os.fork()
        if not pid:
            os.setsid()
            open_backend("bwrap", BlobStore(tmp_path / "blobs"), tmp_path / "scratch")
            os._exit(0)
        await asyncio.to_thread(os.waitpid, pid, 0)
        root = pool.backend.scratch.root
        assert len(list(root.glob("owner-*"))) == 2
        await pool.create(ANY)
        await until(lambda: pool.counts["reaped"] == 1)
        assert len(list(root.glob("owner-*"))) == 1

    play(tmp_path, body, PoolLimits(reap_every_s=0.1, tick_s=0.05))


def test_the_unconfined_backend_pools_too(tmp_path):
    async def body(pool):
        await pool.warm(ANY, 1, FILES)
        one = await pool.create(ANY, FILES)
        assert (await sh(pool, one, "cat a")).stdout == b"one"

    play(tmp_path, body, PoolLimits(num_warm=1), "process")
