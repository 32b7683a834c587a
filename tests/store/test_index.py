"""The live index against a real server: hand-out, loss detection, retries, a model.

`asyncio.Runner` keeps one loop per test, as an index lives on one loop.
"""

import asyncio
import os
import shutil
import signal
import time
from contextlib import asynccontextmanager
from urllib.parse import unquote

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

from k3rl.errors import StoreError, UserInputError
from k3rl.store.index import IndexLost, Lease, LiveIndex, TrajectoryRow
from k3rl.store.redis_server import EmbeddedServer
from k3rl.store.redis_url import SafeUrl
from k3rl.types import TrajectoryState

A, B, C, D, E, F = (f"{n:032x}" for n in range(6))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = EmbeddedServer(tmp_path_factory.mktemp("index") / "redis")
    asyncio.run(server.start())
    yield server
    asyncio.run(server.stop())


@pytest.fixture
def own_server(tmp_path):
    server = EmbeddedServer(tmp_path / "redis")
    asyncio.run(server.start())
    yield server
    asyncio.run(server.stop())


def raw(server) -> Redis:
    return Redis.from_url(server.url, decode_responses=True)


def row(id: str, epoch: int = 0, state: TrajectoryState = TrajectoryState.QUEUED) -> TrajectoryRow:
    return TrajectoryRow(id, state, epoch, num_tokens=3 * epoch, num_steps=epoch)


@asynccontextmanager
async def opened(url, queued=(), rows=(), leases=None, prefix="test", **options):
    index = LiveIndex.from_url(url, prefix, **options)
    try:
        await index.open()
        await index.rebuild(list(rows), list(queued), leases or {})
        yield index
    finally:
        await index.aclose()


@asynccontextmanager
async def proxy(target_url, path):
    """A server between index and server that can swallow answers: `cut` says of how many writes."""
    state = {"cut": 0, "calls": 0}

    async def serve(reader, writer):
        far_reader, far_writer = await asyncio.open_unix_connection(
            unquote(target_url.removeprefix("unix://"))
        )
        try:
            while data := await reader.read(1 << 16):
                far_writer.write(data)
                answer = await far_reader.read(1 << 16)
                if b"EVALSHA" in data:
                    state["calls"] += 1
                    if state["cut"]:
                        state["cut"] -= 1
                        return
                writer.write(answer)
        finally:
            writer.close()
            far_writer.close()

    listener = await asyncio.start_unix_server(serve, path)
    try:
        yield f"unix://{path}", state
    finally:
        listener.close()


def test_rows_and_leases_are_what_was_put(server):
    async def run():
        rows = [row(A, 1), row(B, 2, TrajectoryState.ACTIVE)]
        async with opened(server.url, [A], rows, {B: Lease("w", 2)}) as index:
            assert await index.rows() == rows
            assert await index.leases() == {B: Lease("w", 2)}
            await index.put([row(B, 7, TrajectoryState.FINISHED), row(C)])
            assert (await index.rows())[1:] == [row(B, 7, TrajectoryState.FINISHED), row(C)]
            assert await index.leases() == {B: Lease("w", 7)}
            await index.release([B, C])
            assert await index.leases() == {}

    asyncio.run(run())


def test_front_and_back_keep_the_order_given(server):
    async def run():
        async with opened(server.url, [A]) as index:
            await index.push([B, C])
            await index.push([D, E], front=True)
            await index.push([F], front=True)
            await index.push([A, F])
            assert await index.queued() == [F, D, E, A, B, C]
            assert await index.pop("w", 2) == [F, D]
            assert await index.pop("w", 0) == []
            assert await index.pop("v", 9) == [E, A, B, C]
            assert await index.pop("v", 9) == []
            await index.push([D])
            assert await index.queued() == [D]
            assert {id: lease.worker_id for id, lease in (await index.leases()).items()} == {
                F: "w",
                **dict.fromkeys([E, A, B, C], "v"),
            }

    asyncio.run(run())


def test_many_concurrent_workers_get_each_id_once(server):
    ids = [f"{n:032x}" for n in range(500)]

    async def worker(index, name, got):
        while taken := await index.pop(name, 1 + hash(name) % 4):
            got.extend((id, name) for id in taken)
            await index.put([row(id, 1, TrajectoryState.ACTIVE) for id in taken])

    async def run():
        async with opened(server.url, ids, [row(id) for id in ids]) as index:
            got: list[tuple[str, str]] = []
            await asyncio.gather(*(worker(index, f"w{n}", got) for n in range(40)))
            assert sorted(id for id, _ in got) == ids
            assert await index.leases() == {id: Lease(name, 1) for id, name in got}
            assert len({name for _, name in got}) > 1

    asyncio.run(run())


def test_take_over_returns_what_a_dead_worker_held(server):
    async def run():
        async with opened(server.url, [C, A, B]) as index:
            assert await index.pop("dead", 2) == [C, A]
            assert await index.pop("alive", 2) == [B]
            assert await index.take_over("dead") == [A, C]
            assert await index.take_over("dead") == []
            await index.push([A, C], front=True)
            assert await index.queued() == [A, C]
            assert list(await index.leases()) == [B]

    asyncio.run(run())


def test_leases_expire_unless_renewed(server):
    async def run():
        leases = {F: Lease("rebuilt", 0)}
        async with opened(server.url, [A, B], [row(F)], leases, lease_ttl_s=0.2) as index:
            await index.renew("renewed", 60)
            await index.pop("renewed", 1)
            await index.pop("silent", 1)
            await index.renew("short", 0.05)
            assert await index.expired() == []
            await asyncio.sleep(0.3)
            assert await index.expired() == ["short", "rebuilt", "silent"]
            await index.renew("short", 60)
            assert await index.take_over("silent") == [B]
            assert await index.take_over("rebuilt") == [F]
            assert await index.expired() == []

    asyncio.run(run())


def test_an_index_is_invalid_until_its_owner_rebuilt_it(server):
    async def run():
        async with opened(server.url, [A]) as first:
            second = LiveIndex.from_url(server.url, "test")
            assert await second.queued() == [A]
            assert not await second.generation_ok()
            with pytest.raises(IndexLost):
                await second.pop("w", 1)
            await second.rebuild([], [B], {})
            assert not await first.generation_ok()
            with pytest.raises(IndexLost):
                await first.push([C])
            assert await second.pop("w", 5) == [B]
            await second.aclose()

    asyncio.run(run())


def test_stores_on_one_server_do_not_see_each_other(server):
    async def run():
        async with (
            opened(server.url, [A], prefix="one") as one,
            opened(server.url, [B], prefix="two") as two,
        ):
            assert await one.pop("w", 5) == [A]
            assert await one.generation_ok()
            assert await two.queued() == [B]
            assert await two.leases() == {}

    asyncio.run(run())


def test_flushall_is_noticed_by_the_next_write_and_rebuilt(server):
    async def run():
        async with opened(server.url, [A, B]) as index:
            assert await index.pop("w", 1) == [A]
            assert await index.generation_ok()
            raw(server).flushall()
            with pytest.raises(IndexLost, match="rebuild it"):
                await index.pop("w", 1)
            assert not await index.generation_ok()
            await index.rebuild([row(A, 1), row(B)], [B], {A: Lease("w", 1)})
            assert await index.generation_ok()
            assert await index.pop("w", 5) == [B]
            raw(server).flushall()
            with pytest.raises(IndexLost):
                await index.expired()

    asyncio.run(run())


def test_a_server_killed_and_restarted_goes_on_where_it_was(own_server):
    async def run():
        async with opened(own_server.url, [A, B, C]) as index:
            assert await index.pop("w", 1) == [A]
            os.kill(own_server.pid, signal.SIGKILL)
            pending = asyncio.create_task(index.pop("w", 1))
            await own_server.stop()
            await own_server.start()
            assert await pending == [B]
            assert await index.generation_ok()
            raw(own_server).script_flush()
            assert await index.pop("w", 1) == [C]

    asyncio.run(run())


def test_a_restart_with_empty_or_older_data_is_noticed(own_server, tmp_path):
    data, backup = own_server.folder / "appendonlydir", tmp_path / "backup"

    async def run():
        async with opened(own_server.url, [A, B, C]) as index:
            await own_server.stop()
            shutil.copytree(data, backup)
            await own_server.start()
            assert await index.pop("w", 1) == [A]
            await own_server.stop()
            shutil.rmtree(data)
            shutil.copytree(backup, data)
            await own_server.start()
            assert await index.queued() == [A, B, C]
            assert not await index.generation_ok()
            with pytest.raises(IndexLost):
                await index.pop("w", 1)
            await index.rebuild([row(A)], [B, C], {A: Lease("w", 0)})
            await own_server.stop()
            shutil.rmtree(data)
            await own_server.start()
            assert not await index.generation_ok()

    asyncio.run(run())


@pytest.mark.parametrize("times", [1, 3])
def test_a_lost_answer_is_given_again_and_applied_once(server, tmp_path, times):
    async def run():
        async with (
            proxy(server.url, str(tmp_path / "proxy")) as (url, state),
            opened(url, [A, B, C, D]) as index,
        ):
            await index.pop("w", 1)
            state["cut"], state["calls"] = times, 0
            assert await index.pop("w", 1) == [B]
            assert state["calls"] == times + 1
            state["cut"] = times
            assert await index.take_over("w") == [A, B]
            state["cut"] = times
            await index.push([A, B], front=True)
            assert await index.queued() == [A, B, C, D]
            assert await index.generation_ok()

    asyncio.run(run())


def test_no_server_is_one_clear_error_within_the_bound(tmp_path):
    url = f"unix://{tmp_path}/nothing.sock"

    async def run():
        index = LiveIndex.from_url(url, "test", retry_s=0.5)
        started = time.monotonic()
        with pytest.raises(StoreError, match=f"^{url}: no Redis server answered in 0.5 s") as error:
            await index.open()
        assert 0.3 < time.monotonic() - started < 2
        assert "store.redis=embedded" in str(error.value)
        assert error.value.__suppress_context__
        await index.aclose()

    asyncio.run(run())


def test_a_server_that_hangs_is_one_error_and_no_answer_is_mixed_up_later(own_server):
    async def run():
        async with opened(own_server.url, [A, B], retry_s=0.6) as index:
            os.kill(own_server.pid, signal.SIGSTOP)
            started = time.monotonic()
            try:
                with pytest.raises(StoreError, match=r"no Redis server answered in 0\.6 s"):
                    await index.pop("w", 1)
                assert time.monotonic() - started < 2.5
            finally:
                os.kill(own_server.pid, signal.SIGCONT)
            with pytest.raises(IndexLost):
                await index.pop("w", 1)
            await index.rebuild([], [A, B], {})
            assert await index.pop("w", 1) == [A]
            assert await index.queued() == [B]
            assert await index.generation_ok()

    asyncio.run(run())


def test_a_cancelled_write_leaves_the_index_in_doubt(own_server):
    async def run():
        async with opened(own_server.url, [A, B]) as index:
            os.kill(own_server.pid, signal.SIGSTOP)
            pending = asyncio.create_task(index.pop("w", 1))
            await asyncio.sleep(0.05)
            pending.cancel()
            os.kill(own_server.pid, signal.SIGCONT)
            with pytest.raises(asyncio.CancelledError):
                await pending
            with pytest.raises(IndexLost):
                await index.pop("w", 1)

    asyncio.run(run())


def test_an_answer_that_crosses_a_rebuild_is_void(server):
    async def run():
        async with opened(server.url, [A, B]) as index:
            crossing = asyncio.create_task(index.pop("w", 1))
            await asyncio.sleep(0)
            rebuilds = [
                asyncio.create_task(index.rebuild([], [A, B], {})),
                asyncio.create_task(index.rebuild([], [B, A], {})),
            ]
            between = asyncio.create_task(index.pop("w", 1))
            with pytest.raises(IndexLost):
                await crossing
            with pytest.raises(IndexLost):
                await between
            await asyncio.gather(*rebuilds)
            assert await index.queued() == [B, A]
            assert await index.leases() == {}
            assert await index.generation_ok()

    asyncio.run(run())


def test_a_truth_that_contradicts_itself_is_refused_and_changes_nothing(server):
    async def run():
        async with opened(server.url, [A]) as index:
            with pytest.raises(UserInputError, match="both queued and leased"):
                await index.rebuild([row(A)], [A], {A: Lease("w", 0)})
            with pytest.raises(UserInputError, match="epoch 3, its row 2"):
                await index.rebuild([row(A, 2)], [], {A: Lease("w", 3)})
            assert await index.queued() == [A]
            assert await index.generation_ok()

    asyncio.run(run())


def test_a_server_that_may_evict_is_refused_and_a_full_one_says_so(own_server):
    async def run():
        with raw(own_server) as redis:
            async with opened(own_server.url, [A]) as index:
                redis.config_set("maxmemory", "100mb")
                await index.open()
                redis.config_set("maxmemory-policy", "allkeys-lru")
                with pytest.raises(StoreError, match=r"evicts keys .*allkeys-lru.*noeviction"):
                    await index.open()
                redis.config_set("maxmemory-policy", "noeviction")
                redis.config_set("maxmemory", "1")
                with pytest.raises(StoreError, match=r"refused .*maxmemory"):
                    await index.push([B])
                redis.config_set("maxmemory", "0")
                with pytest.raises(IndexLost):
                    await index.push([B])
                await index.rebuild([], [A, B], {})
                assert await index.pop("w", 5) == [A, B]

    asyncio.run(run())


def test_a_million_token_store_of_many_trajectories_rebuilds_in_seconds(server):
    ids = [f"{n:032x}" for n in range(20_000)]
    rows = [row(id, n % 5) for n, id in enumerate(ids)]
    leases = {id: Lease(f"w{n % 7}", n % 5) for n, id in enumerate(ids) if n % 2}

    async def run():
        async with opened(server.url) as index:
            started = time.monotonic()
            await index.rebuild(rows, ids[::2], leases)
            assert time.monotonic() - started < 5
            assert await index.rows() == rows
            assert await index.queued() == ids[::2]
            assert await index.leases() == leases
            await index.rebuild([], [], {})
            assert not raw(server).keys("{test}:[^g]*")

    asyncio.run(run())


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:hunter2@127.0.0.1:1/0",
        "redis://:hunter2@127.0.0.1:1",
        "redis://127.0.0.1:1/0?password=hunter2",
        "redis://:hunter2%2F@127.0.0.1:1",
        "rediss://:hunter2@127.0.0.1:1/0",
        "unix://:hunter2@{socket}",
        "unix://user:hunter2@{socket}",
        "unix://{socket}?password=hunter2",
        "redis://:hunter2@127.0.0.1:hunter2",
        "redis://:hun#ter2@127.0.0.1:1",
        "redis://:hunter2@127.0.0.1:1/0?no_such_option=1",
        "http://:hunter2@127.0.0.1",
        "redis://:hun/ter2@127.0.0.1:1",
        "redis://:hun@127.0.0.1/ter2",
        "redis://:hunter2@[127.0.0.1:1",
        "unix://:hun/ter2@{socket}",
        "unix://:hunter2@relative",
        "redis://",
        "",
    ],
)
def test_no_error_shows_a_password_or_is_a_redis_exception(own_server, url):
    path = unquote(own_server.url.removeprefix("unix://"))
    with raw(own_server) as redis:
        redis.config_set("requirepass", "another")

    async def run():
        with pytest.raises((StoreError, UserInputError)) as error:
            await LiveIndex.from_url(url.format(socket=path), "test", retry_s=0.1).open()
        said = str(error.value) + repr(error.value)
        assert "hunter2" not in said
        assert "ter2" not in said
        assert "\n" not in said

    asyncio.run(run())


@pytest.mark.parametrize("secret", ["hunter2", "hunter2/", "hunter2%2F"])
def test_what_a_server_says_is_passed_on_without_the_password(secret):
    url = SafeUrl("redis://user:hunter2%2F@host?password=hunter2")
    for error in (url.refused(ValueError(f"AUTH {secret} failed")), url.unreachable(secret, 1.0)):
        assert "***" in str(error)
        assert "hunter2" not in str(error)


def test_a_password_opens_a_protected_server(own_server):
    with raw(own_server) as redis:
        redis.config_set("requirepass", "s3cret")

    async def run():
        url = own_server.url.replace("unix://", "unix://:s3cret@")
        async with opened(url, [A]) as index:
            assert await index.pop("w", 1) == [A]
        for wrong in (own_server.url, url.replace("s3cret", "wrong")):
            with pytest.raises(StoreError, match=r"refused .*check user, password"):
                await LiveIndex.from_url(wrong, "test").open()

    asyncio.run(run())


@pytest.mark.parametrize("num_turns", range(1, 8))
def test_a_stalled_event_loop_is_not_the_servers_silence(server, num_turns):
    """The answer has long come when the loop goes on, but so has the end of the time limit."""

    async def run():
        async with opened(server.url, [A], retry_s=0.3) as index:
            popping = asyncio.create_task(index.pop("w", 1))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            time.sleep(0.5)  # noqa: ASYNC251
            assert await popping == [A]
            assert await index.generation_ok()

    asyncio.run(run())


def test_a_stall_between_two_attempts_leaves_time_for_another(tmp_path, server):
    """The server is away at first, and back when the loop goes on after the limit."""
    path = tmp_path / "away"

    async def run():
        async with proxy(server.url, path) as (url, _), opened(url, [A], retry_s=0.3) as index:
            path.rename(tmp_path / "hidden")
            await index._client.connection_pool.disconnect()
            popping = asyncio.create_task(index.pop("w", 1))
            await asyncio.sleep(0.1)
            (tmp_path / "hidden").rename(path)
            time.sleep(0.5)  # noqa: ASYNC251
            assert await popping == [A]

    asyncio.run(run())


IDS = st.lists(st.sampled_from([A, B, C, D, E, F]), max_size=4)
WORKERS = st.sampled_from(["u", "v", "w"])


class IndexMachine(RuleBasedStateMachine):
    """The index beside a model of dicts and a list; emptied at any time, rebuilt from the model."""

    server: EmbeddedServer

    def __init__(self):
        super().__init__()
        self.runner = asyncio.Runner()
        self.index = LiveIndex.from_url(self.server.url, "machine")
        self.queue: list[str] = []
        self.leased: dict[str, str] = {}
        self.rows: dict[str, TrajectoryRow] = {}
        self.run(self.index.rebuild([], [], {}))

    def run(self, call):
        return self.runner.run(call)

    def write(self, make):
        """A write that finds the index lost is made again after a rebuild, as the service does."""
        try:
            return self.run(make())
        except IndexLost:
            self.rebuild()
            return self.run(make())

    def teardown(self):
        self.run(self.index.aclose())
        self.runner.close()

    def lease_of(self, id):
        return Lease(self.leased[id], self.rows[id].epoch if id in self.rows else 0)

    @rule()
    def rebuild(self):
        for id in self.leased:
            self.rows.setdefault(id, row(id))
        leases = {id: self.lease_of(id) for id in self.leased}
        self.run(self.index.rebuild(list(self.rows.values()), self.queue, leases))

    @rule(ids=IDS, epoch=st.integers(0, 9), state=st.sampled_from(TrajectoryState))
    def put(self, ids, epoch, state):
        rows = [row(id, epoch, state) for id in ids]
        self.write(lambda: self.index.put(rows))
        self.rows |= {r.id: r for r in rows}

    @rule(ids=IDS, front=st.booleans())
    def push(self, ids, front):
        self.write(lambda: self.index.push(ids, front))
        fresh = [id for id in dict.fromkeys(ids) if id not in self.queue]
        self.queue = fresh + self.queue if front else self.queue + fresh
        for id in ids:
            self.leased.pop(id, None)

    @rule(worker=WORKERS, n=st.integers(0, 4))
    def pop(self, worker, n):
        taken = self.write(lambda: self.index.pop(worker, n))
        assert taken == self.queue[:n]
        self.queue = self.queue[n:]
        self.leased |= dict.fromkeys(taken, worker)

    @rule(ids=IDS)
    def release(self, ids):
        self.write(lambda: self.index.release(ids))
        for id in ids:
            self.leased.pop(id, None)

    @rule(worker=WORKERS)
    def take_over(self, worker):
        taken = self.write(lambda: self.index.take_over(worker))
        assert taken == sorted(id for id, holder in self.leased.items() if holder == worker)
        for id in taken:
            del self.leased[id]

    @rule(keep_scripts=st.booleans())
    def empty_the_server(self, keep_scripts):
        with raw(self.server) as redis:
            redis.flushall()
            if not keep_scripts:
                redis.script_flush()

    def is_ok(self):
        return self.run(self.index.generation_ok())

    @precondition(is_ok)
    @invariant()
    def server_equals_model(self):
        assert self.run(self.index.queued()) == self.queue
        assert self.run(self.index.leases()) == {id: self.lease_of(id) for id in self.leased}
        assert self.run(self.index.rows()) == sorted(self.rows.values(), key=lambda r: r.id)


def test_any_sequence_of_calls_equals_the_model(server):
    machine = type("Machine", (IndexMachine,), {"server": server})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
