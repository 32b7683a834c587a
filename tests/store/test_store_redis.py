"""A Redis of somebody else: TLS, users, servers that forgot, and a network that is cut."""

import asyncio
import contextlib
import shutil
import time
from functools import partial

import pytest
from redis import Redis

from k3rl.errors import StoreError
from k3rl.store.host import StoreHost
from k3rl.types import TrajectoryState
from tests.builders import load_config
from tests.store.store_builders import claim_one, header, play, policy, service
from tests.store.store_network import Network, certificates, tcp_server

USER = ["--user", "default", "off", "--user", "k3rl", "on", ">p@ss/w#rd", "~{k3rl:r}:*", "+@all"]
NAME = "k3rl:p%40ss%2Fw%23rd"
RETRY_S = 2.0


async def lives(url, folder):
    """A run's own store, its server from the config, plays a trajectory."""
    host = StoreHost(load_config(folder, f"store.redis={url}"))
    store = await host.open()
    try:
        await store.begin([header(0)])
        await play(store, await claim_one(store))
    finally:
        await host.aclose()


async def refused(url, folder):
    with pytest.raises(StoreError) as caught:
        await lives(url, folder)
    said = str(caught.value)
    assert "p@ss" not in said
    assert "p%40ss" not in said
    return said


def test_tls_and_a_user_from_the_config(tmp_path):
    ca, context = certificates(tmp_path)

    async def go(port):
        async with Network(port, context) as network:
            where = f"localhost:{network.port}/0"
            await lives(f"rediss://{NAME}@{where}?ssl_ca_certs={ca}", tmp_path / "a")
            said = await refused(f"rediss://{NAME}@{where}", tmp_path / "b")
            assert "certificate verify failed" in said
            said = await refused(f"rediss://k3rl:p%40ss@{where}?ssl_ca_certs={ca}", tmp_path / "c")
            assert "check user, password" in said

    with tcp_server(tmp_path / "redis", *USER) as port:
        asyncio.run(go(port))


def test_a_user_sees_only_what_is_the_stores(tmp_path):
    """The rights that the index needs are all on keys of its prefix."""

    async def go(port):
        url = f"redis://{NAME}@127.0.0.1:{port}/0"
        await lives(url, tmp_path / "a")
        with Redis.from_url(url, decode_responses=True) as redis:
            redis.set("{k3rl:r}:x", 1)
            assert redis.acl_whoami() == "k3rl"
            # Another run's prefix is another's.
            host = StoreHost(load_config(tmp_path / "b", f"store.redis={url}", "run.name=q"))
            with pytest.raises(StoreError, match=r"refused a command .*check user"):
                await host.open()
        await refused(f"redis://127.0.0.1:{port}/0", tmp_path / "c")

    with tcp_server(tmp_path / "redis", *USER) as port:
        asyncio.run(go(port))


async def once_each(store, first, worker="w"):
    """Everything that is queued is handed out once, in order, and played."""
    found = []
    while claims := await store.claim(worker, 2, [], 0.0):
        for claim in claims:
            await play(store, claim)
            found.append(claim.header.id)
    assert found == [header(n).id for n in first]


def test_an_old_rdb_is_noticed(tmp_path):
    """The server comes back as it was before the last claims: nothing is handed out again."""

    async def go():
        with tcp_server(tmp_path / "redis") as port:
            async with Network(port) as network:
                url = f"redis://127.0.0.1:{network.port}"
                async with service(tmp_path / "store", url) as store:
                    await store.begin([header(n) for n in range(4)])
                    with Redis(port=port) as redis:
                        redis.save()
                    old = shutil.copytree(tmp_path / "redis", tmp_path / "old")
                    first = await claim_one(store)
                    await play(store, first)
                    with tcp_server(old) as older:
                        with Redis(port=older) as redis:
                            assert redis.zcard(f"{{{tmp_path}/store}}:queue") == 4
                        network.heal(older)
                        await once_each(store, (1, 2, 3))
                        assert (await store.stats()).num_index_rebuilds == 1

    asyncio.run(go())


def test_an_empty_replica_that_was_promoted_is_filled(tmp_path):
    async def go(stack):
        a, b = (stack.enter_context(tcp_server(tmp_path / name)) for name in "ab")
        replica = stack.enter_context(Redis(port=b))
        # Of a master that it never reached.
        replica.replicaof("127.0.0.1", "1")
        assert replica.info("replication")["role"] == "slave"
        async with Network(a) as network:
            url = f"redis://127.0.0.1:{network.port}"
            async with service(tmp_path / "store", url) as store:
                await store.begin([header(n) for n in range(3)])
                network.heal(b)
                # Not promoted yet it refuses to write: one clear error.
                with pytest.raises(StoreError, match=f"127.0.0.1:{network.port}.*read only"):
                    await store.claim("w", 1, [], 0.0)
                replica.replicaof("NO", "ONE")
                await once_each(store, (0, 1, 2))
                assert (await store.stats()).num_index_rebuilds == 1
                assert replica.hlen(f"{{{tmp_path}/store}}:rows") == 3

    with contextlib.ExitStack() as stack:
        asyncio.run(go(stack))


@pytest.mark.parametrize("mode", ["drop", "hang"])
def test_a_cut_network_is_bounded_and_costs_nothing_durable(tmp_path, valkey, mode):
    async def go():
        with tcp_server(tmp_path / "redis") as port:
            async with Network(port) as network:
                url = f"redis://127.0.0.1:{network.port}"
                async with service(tmp_path / "store", url) as store:
                    with Redis(port=port, decode_responses=True) as redis:
                        rows = partial(rows_follow, store, redis, f"{{{tmp_path}/store}}:rows")
                        await cut_in_the_middle(store, network, mode, rows)
                        await rows()

    asyncio.run(go())


async def cut_in_the_middle(store, network, mode, rows):
    await store.begin([header(n) for n in range(6)])
    claim = await claim_one(store)
    network.cut(mode)
    begun = time.monotonic()
    asked = [store.claim(f"v{n}", 1, [], 0.0) for n in range(20)]
    # What is durable goes on meanwhile.
    await play(store, claim)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    # All wait together, not one after the other.
    assert time.monotonic() - begun < 3 * RETRY_S
    for answer in answers:
        assert isinstance(answer, StoreError), answer
        assert f"no Redis server answered in {RETRY_S:g} s" in str(answer)
    assert (await store.get(claim.header.id)).state is TrajectoryState.FINISHED
    network.heal()
    # Without anybody asking for anything.
    await rows()
    (second,) = await store.claim("w", 1, [], 0.0)
    assert second.header.id == header(1).id
    await store.append(policy(second.header.id, second.epoch, 0, 3))
    await store.pause(second.header.id, second.epoch)
    await once_each(store, (2, 3, 4, 5))


async def rows_follow(store, redis, key):
    """The rows of the index become those of the store."""
    wanted = {t.id: t.state.value for t in await store.trajectories()}
    for _ in range(200):
        found = {id: row.split(" ")[0] for id, row in redis.hgetall(key).items()}
        if found == wanted:
            return
        await asyncio.sleep(0.05)
    assert found == wanted
