"""Where the parts of a run stand up: in this process, or as actors of a Ray cluster.

A private cluster lasts as long as the run and is shut down with it; on an existing one
(`cluster.address`) only this run's actors are ended. The resource tags `rollout`, `store` and
`learner` are those that ray_cluster.yaml gives its node types.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from k3rl.config import Config
from k3rl.errors import ConfigError
from k3rl.learner.protocol import Trainer
from k3rl.rollout.worker import RolloutWorker
from k3rl.sandboxes.files.layers import large_files
from k3rl.store.host import StoreHost
from k3rl.store.protocol import TrajectoryStore
from k3rl.supervisor import WorkerHandle

MIB = 1 << 20
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Parts:
    """What a controller needs."""

    store: TrajectoryStore
    workers: list[WorkerHandle]
    trainer: Trainer | None
    """None with `algorithm: none`."""


class LocalWorker(RolloutWorker):
    """A worker in this process: it can only be lost together with the controller."""

    name = "worker0"

    async def revive(self) -> None:
        """Nothing to do."""


@asynccontextmanager
async def launch(config: Config) -> AsyncIterator[Parts]:
    """Stand the parts up, hand them out, and take them down in reverse order."""
    start = _local if config.cluster.backend == "local" else _ray
    async with start(config) as parts:
        yield parts


@asynccontextmanager
async def _local(config: Config) -> AsyncIterator[Parts]:
    host = StoreHost(config, large_files)
    try:
        store = await host.open()
        yield Parts(store, [LocalWorker(config, store)], _local_trainer(config, store))
    finally:
        await host.aclose()


def _local_trainer(config: Config, store: TrajectoryStore) -> Trainer | None:
    if config.algorithm == "none":
        return None
    from k3rl.learner.trainer import make_trainer

    return make_trainer(config, store)


@asynccontextmanager
async def _ray(config: Config) -> AsyncIterator[Parts]:
    import ray

    from k3rl import actors

    _connect(config)
    config = config.absolute()
    workers: list[actors.RayWorker] = []
    try:
        store_handle = actors.start_store(config)
        store = actors.store_proxy(store_handle)
        await _started("store", store.stats())
        trainer, starting = None, []
        if config.algorithm != "none":
            learner = actors.start_learner(config, store_handle)
            trainer = actors.trainer_proxy(learner)
            starting.append(_started("learner", actors.pid_of(learner)))
        try:
            workers += actors.start_workers(config, store_handle)
            await asyncio.gather(*starting, *(worker.started() for worker in workers))
            yield Parts(store, list(workers), trainer)
        finally:
            # Nothing may write any more while the store closes.
            for worker in workers:
                worker.kill()
            await store.aclose()
    finally:
        # Disconnecting ends the actors of this driver; a private cluster goes with it.
        ray.shutdown()


async def _started(resource: str, first_call: Coroutine[Any, Any, T]) -> T:
    """The answer to the first call of an actor, which waits for its resources."""
    from k3rl.actors import START_WAIT_S

    try:
        return await asyncio.wait_for(first_call, START_WAIT_S)
    except TimeoutError:
        raise ConfigError(
            f"no node has a free `{resource}` resource within {START_WAIT_S:g} s: is another run"
            " using the cluster?"
        ) from None


def _connect(config: Config) -> None:
    """Join `cluster.address`, or start a private cluster that fits the run."""
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if config.cluster.address is not None:
        try:
            ray.init(address=config.cluster.address, **quiet)
        except ConnectionError as error:
            raise ConfigError(f"cluster.address {config.cluster.address}: {error}") from None
        offered = ray.cluster_resources()  # type: ignore[no-untyped-call]
        workers = config.rollout.num_workers
        needed = {"CPU": workers, "rollout": workers, "store": 1}
        needed |= {"learner": 1} if config.algorithm != "none" else {}
        short = [f"{name} {n}" for name, n in needed.items() if offered.get(name, 0) < n]
        if short:
            ray.shutdown()
            raise ConfigError(
                f"cluster.address {config.cluster.address}: the nodes do not offer"
                f" {', '.join(short)}; see ray_cluster.yaml and rollout.num_workers"
            )
        return
    workers = config.rollout.num_workers
    ray.init(
        address="local",  # never the cluster that an environment variable or a file points to
        num_cpus=max(workers, os.cpu_count() or 1),
        resources={"rollout": workers, "store": 1, "learner": 1},
        object_store_memory=config.cluster.object_store_mib * MIB,
        include_dashboard=False,
        configure_logging=True,
        **quiet,
    )
