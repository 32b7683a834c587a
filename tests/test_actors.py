"""Proxies carry contracts across processes: same behaviour, same errors, no pickle of ours."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from k3rl import actors, errors, proxy
from k3rl import config as configs
from k3rl.blobs import BlobStore
from k3rl.learner.protocol import Trainer, UpdatePlan
from k3rl.store.protocol import TrajectoryStore
from k3rl.store.redis_server import EmbeddedServer
from k3rl.supervisor import WorkerLost
from k3rl.weights.blob import fetch
from tests.store.store_builders import service
from tests.store.store_contract import CASES

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def valkey(tmp_path_factory):
    server = EmbeddedServer(tmp_path_factory.mktemp("valkey"))
    asyncio.run(server.start())
    yield server.url
    asyncio.run(server.stop())


def proxied(store):
    """A proxy whose calls and answers are bytes, without a process between."""

    async def send(method, arguments):
        assert all(type(argument) is bytes for argument in arguments)
        reply = await proxy.answer(lambda: proxy.serve(TrajectoryStore, store, method, arguments))
        assert type(reply) is bytes
        return reply

    return proxy.Proxy(TrajectoryStore, send)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_store_contract_holds_through_a_proxy(case, tmp_path, valkey):
    async def go():
        async with service(tmp_path / "store", valkey) as store:
            await asyncio.wait_for(case(proxied(store)), 30)

    asyncio.run(go())


@pytest.mark.parametrize(
    "error",
    [
        errors.StoreError("disk full"),
        errors.Fenced("epoch 3"),
        errors.CorruptData("file", 7, "crc", "bad"),
        errors.UserInputError("no"),
        errors.CapabilityMissing("no_network"),
    ],
)
def test_errors_arrive_as_what_they_were(error):
    async def fail():
        raise error

    with pytest.raises(type(error)) as caught:
        proxy.result(asyncio.run(proxy.answer(fail)))
    assert str(caught.value) == str(error)
    assert vars(caught.value) == vars(error)


def test_an_error_that_is_not_ours_is_not_hidden():
    async def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(proxy.answer(fail))


def test_a_proxy_has_the_contracts_methods_only():
    store = proxied(SimpleNamespace())
    assert isinstance(store, TrajectoryStore)
    with pytest.raises(AttributeError):
        _ = store.drop_everything
    with pytest.raises(TypeError):
        asyncio.run(store.pause("only one argument"))


@pytest.fixture(scope="module")
def cluster():
    ray.init(
        "local",
        num_cpus=2,
        resources={"rollout": 1, "store": 2, "learner": 1},
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
    )
    yield
    ray.shutdown()


def config_in(folder, valkey, *more):
    (folder / "c.yaml").write_text("envs: [{id: k3rl/Reason-v0, kwargs: {preset: arithmetic}}]\n")
    overrides = [f"run.folder={folder}", f"run.name={folder.name}", f"store.redis={valkey}"]
    return configs.load(folder / "c.yaml", [*overrides, *more])


@pytest.mark.ray
@pytest.mark.parametrize("case", CASES[:4], ids=lambda case: case.__name__)
def test_the_store_contract_holds_through_ray(case, tmp_path, valkey, cluster):
    async def go():
        handle = actors.start_store(config_in(tmp_path, valkey))
        store = actors.store_proxy(handle)
        await asyncio.wait_for(case(store), 60)
        await store.aclose()
        ray.kill(handle)

    asyncio.run(go())


@pytest.mark.ray
def test_a_trainer_in_an_actor_publishes_its_first_weights_and_refuses_out_of_order_updates(
    tmp_path, valkey, cluster
):
    async def go():
        config = config_in(
            tmp_path,
            valkey,
            "algorithm=k2_5",
            "engine.kind=native",
            f"policy.model={ROOT / 'configs/model/k3_nano.yaml'}",
        )
        store = actors.start_store(config)
        trainer = actors.trainer_proxy(actors.start_learner(config, store))
        assert isinstance(trainer, Trainer)
        state = await trainer.start()
        assert (state.next_update, state.policy_version, state.consumed) == (0, 0, ())
        assert fetch(BlobStore(config.run_folder / "store" / "blobs"), state.manifest)
        assert await trainer.start() == state
        with pytest.raises(errors.UserInputError, match="update"):
            await trainer.update(UpdatePlan(7, ()))
        await actors.store_proxy(store).aclose()

    asyncio.run(go())


def test_calls_that_follow_a_message_wait_for_each_other():
    messages = []

    async def send_all(calls):
        messages.append([method for method, _ in calls])
        return [proxy.OK + method.encode() for method, _ in calls]

    async def later(together, method, delay_s):
        await asyncio.sleep(delay_s)
        return proxy.result(await together.send(method, []))

    async def go():
        together = actors.Together(send_all, distance_s=0.5)
        assert proxy.result(await together.send("a", [])) == b"a"
        calls = [later(together, method, n / 100) for n, method in enumerate("bcd")]
        assert await asyncio.gather(*calls) == [b"b", b"c", b"d"]
        await asyncio.sleep(0.6)
        began = asyncio.get_running_loop().time()
        await together.send("e", [])
        assert asyncio.get_running_loop().time() - began < 0.4, "nothing to keep a distance from"

    asyncio.run(go())
    assert messages == [["a"], ["b", "c", "d"], ["e"]]


@pytest.mark.ray
def test_a_lost_worker_is_told_and_revived_as_a_new_process(tmp_path, valkey, cluster):
    async def go():
        config = config_in(tmp_path, valkey)
        store = actors.start_store(config)
        worker = actors.RayWorker("w", config, store)
        running = asyncio.create_task(worker.run("w-0"))
        await worker.resume()
        os.kill(await worker.pid(), 9)
        with pytest.raises(WorkerLost):
            await asyncio.wait_for(running, 60)
        await worker.revive()
        again = asyncio.create_task(worker.run("w-1"))
        await worker.stop()
        await asyncio.wait_for(again, 60)
        await actors.store_proxy(store).aclose()

    asyncio.run(go())
