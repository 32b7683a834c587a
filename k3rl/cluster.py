"""Where the parts of a run stand up: in this process, or as actors of a Ray cluster.

A private cluster lasts as long as the run and is shut down with it; on an existing one
(`cluster.address`) only this run's actors are ended. The resource tags `rollout`, `store` and
`learner` are those that ray_cluster.yaml gives its node types.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from k3rl.config import Config
from k3rl.controller import WorkerHandle
from k3rl.errors import ConfigError
from k3rl.learner.idle import IdleLearner
from k3rl.learner.protocol import Learner
from k3rl.rollout.worker import RolloutWorker
from k3rl.store.host import StoreHost
from k3rl.store.protocol import TrajectoryStore

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Parts:
    """What a controller needs."""

    store: TrajectoryStore
    workers: list[WorkerHandle]
    learner: Learner


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
    host = StoreHost(config)
    try:
        store = await host.open()
        yield Parts(store, [LocalWorker(config, store)], IdleLearner())
    finally:
        await host.aclose()


@asynccontextmanager
async def _ray(config: Config) -> AsyncIterator[Parts]:
    import ray

    from k3rl import actors

    _connect(config)
    config = config.absolute()
    try:
        store_handle = actors.start_store(config)
        store = actors.store_proxy(store_handle)
        await store.stats()
        learner_handle = actors.start_learner(config)
        learner = await actors.learner_proxy(learner_handle)
        try:
            yield Parts(store, actors.start_workers(config, store_handle), learner)
        finally:
            await store.aclose()
    finally:
        # Disconnecting ends the actors of this driver; a private cluster goes with it.
        ray.shutdown()


def _connect(config: Config) -> None:
    """Join `cluster.address`, or start a private cluster that fits the run."""
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if config.cluster.address is not None:
        try:
            ray.init(address=config.cluster.address, **quiet)
        except ConnectionError as error:
            raise ConfigError(f"cluster.address {config.cluster.address}: {error}") from None
        missing = {"rollout", "store", "learner"} - set(ray.cluster_resources())  # type: ignore[no-untyped-call]
        if missing:
            ray.shutdown()
            raise ConfigError(
                f"cluster.address {config.cluster.address}: no node offers the resources"
                f" {sorted(missing)}; see ray_cluster.yaml"
            )
        return
    workers = config.rollout.num_workers
    ray.init(
        num_cpus=max(workers, os.cpu_count() or 1),
        resources={"rollout": workers, "store": 1, "learner": 1},
        object_store_memory=config.cluster.object_store_mib * MIB,
        include_dashboard=False,
        configure_logging=True,
        **quiet,
    )
