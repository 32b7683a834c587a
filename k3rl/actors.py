"""Ray actors around plain classes, and the proxies that talk to them.

Calls cross process boundaries as `k3rl.proxy` has them: nothing exchanged is a pickle of ours.
The store actor restarts by itself and its callers' calls are sent again, which is safe because
every write of the store is idempotent. A worker actor never restarts by itself: the controller
fences it first. Nor does a sandbox host: its sandboxes die with it.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, WorkerCrashedError

from k3rl import config as configs
from k3rl.blobs import BlobStore
from k3rl.config import Config
from k3rl.errors import EngineError, K3rlError, SandboxLost, StoreError
from k3rl.learner.protocol import Trainer
from k3rl.proxy import Proxy, answer, failure, result, serve
from k3rl.rollout.worker import RolloutWorker
from k3rl.sandboxes.base import SandboxBackend
from k3rl.sandboxes.factory import open_backend
from k3rl.sandboxes.files.layers import large_files
from k3rl.sandboxes.remote import LEASE_S, RemoteBackend, SandboxHost
from k3rl.store.host import StoreHost
from k3rl.store.protocol import TrajectoryStore
from k3rl.supervisor import WorkerLost
from k3rl.types import encode

Call = tuple[str, list[bytes]]
TOGETHER = ("append", "commit_step", "pause", "finish", "get")
"""Calls of the store that come in numbers and are answered at once, or within a sync."""
DISTANCE_S = 0.05
"""Between two messages of such calls; a trajectory takes about a second between two of its own."""
START_WAIT_S = 60.0
"""How long an actor may wait for its resources."""
LOST = (ActorDiedError, ActorUnavailableError, WorkerCrashedError)


class StoreActor:
    """The StoreService of a run, opened at its first call."""

    def __init__(self, config: str) -> None:
        """`config` is the resolved config as JSON."""
        self._host = StoreHost(configs.from_json(json.loads(config)), large_files)
        self._opening = asyncio.Lock()
        self._is_closed = False

    async def call_all(self, calls: list[tuple[str, list[bytes]]]) -> list[bytes]:
        """Several calls at once; a reply frame for each. Effects keep the order of the calls."""
        return await asyncio.gather(*(self.call(*one) for one in calls))

    async def call(self, method: str, arguments: list[bytes]) -> bytes:
        """One call of the TrajectoryStore contract."""

        async def work() -> bytes:
            async with self._opening:
                if self._is_closed:
                    raise StoreError("the store of this run is closed")
                service = await self._host.open()
            if method != "aclose":
                return await serve(TrajectoryStore, service, method, arguments)
            self._is_closed = True
            await self._host.aclose()
            return encode(None, type(None))

        return await answer(work)


class WorkerActor:
    """One RolloutWorker."""

    def __init__(self, config: str, store: Any) -> None:
        """`store` is the handle of a StoreActor."""
        self._worker = RolloutWorker(configs.from_json(json.loads(config)), store_proxy(store))

    async def tell(self, verb: str, *arguments: str) -> bytes:
        """run, pause, resume, stop or apply."""

        async def work() -> bytes:
            await getattr(self._worker, verb)(*arguments)
            return b""

        return await answer(work)

    async def pid(self) -> int:
        """The process this worker runs in."""
        return os.getpid()


class LearnerActor:
    """The trainer of a run, made at its first call."""

    def __init__(self, config: str, store: Any) -> None:
        """`store` is the handle of a StoreActor."""
        self._config, self._store = configs.from_json(json.loads(config)), store_proxy(store)
        self._trainer: Trainer | None = None
        self._turn = asyncio.Lock()

    async def call(self, method: str, arguments: list[bytes]) -> bytes:
        """One call of the Trainer contract."""

        async def work() -> bytes:
            async with self._turn:
                if self._trainer is None:
                    # Imported here: only this actor is to pay for torch.
                    from k3rl.learner.trainer import make_trainer

                    self._trainer = make_trainer(self._config, self._store)
                return await serve(Trainer, self._trainer, method, arguments)

        return await answer(work)

    async def pid(self) -> int:
        """The process this learner runs in."""
        return os.getpid()


class SandboxHostActor:
    """A SandboxHost over a backend of its own, which the first call opens."""

    def __init__(
        self, kind: str, blobs: str, scratch: str, allow_unconfined: bool, lease_s: float
    ) -> None:
        """The folders are on the actor's machine; the rest is as `start_sandbox_host` has it."""
        self._options = kind, BlobStore(Path(blobs)), Path(scratch), allow_unconfined
        self._lease_s = lease_s
        self._host: SandboxHost | None = None

    async def call(self, client: str, method: str, arguments: list[bytes]) -> bytes:
        """One call of the SandboxBackend contract, or of a stream of it."""
        try:
            if self._host is None:
                self._host = SandboxHost(open_backend(*self._options), self._lease_s)
        except K3rlError as error:
            return failure(error)
        return await self._host.call(client, method, arguments)

    async def aclose(self) -> None:
        """Close every sandbox; the actor is of no use any more."""
        if self._host is not None:
            await self._host.aclose()

    async def pid(self) -> int:
        """The process this host runs in."""
        return os.getpid()


class Together:
    """Sends calls that meet as one message: what comes while one is under way goes with the next.

    A message costs both sides a millisecond or two of Ray's own work, far more than a write of the
    store, and the replies of writes come together anyway, with one sync of the journal. So messages
    keep a distance: a call that comes right after one waits for others to go with.
    """

    def __init__(
        self,
        send_all: Callable[[list[Call]], Awaitable[list[bytes]]],
        distance_s: float = DISTANCE_S,
    ) -> None:
        """`send_all` returns a reply frame for each call; calls of it begin `distance_s` apart."""
        self._send_all, self._distance_s = send_all, distance_s
        self._last_sent = -math.inf
        self._pending: list[tuple[Call, asyncio.Future[bytes]]] = []
        self._sender: asyncio.Task[None] | None = None

    async def send(self, method: str, arguments: list[bytes]) -> bytes:
        """The reply frame of one call. A caller that goes away does not take its call back."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._pending.append(((method, arguments), future))
        if self._sender is None:
            self._sender = asyncio.create_task(self._drain())
        return await future

    async def _drain(self) -> None:
        try:
            while self._pending:
                # Even without a wait, whoever is about to call as well comes along.
                wait_s = self._last_sent + self._distance_s - time.monotonic()
                await asyncio.sleep(max(wait_s, 0.0))
                self._last_sent = time.monotonic()
                batch, self._pending = self._pending, []
                try:
                    replies = await self._send_all([call for call, _ in batch])
                except Exception as error:
                    for _, future in batch:
                        if not future.done():
                            future.set_exception(error)
                    continue
                for (_, future), reply in zip(batch, replies, strict=True):
                    if not future.done():
                        future.set_result(reply)
        finally:
            self._sender = None


def store_proxy(handle: Any) -> TrajectoryStore:
    """The store behind a StoreActor's handle. Calls that come in numbers travel together."""

    async def send_all(calls: list[Call]) -> list[bytes]:
        return cast(list[bytes], await handle.call_all.remote(calls))

    together = Together(send_all)

    async def send(method: str, arguments: list[bytes]) -> bytes:
        if method in TOGETHER:
            return await together.send(method, arguments)
        return cast(bytes, await handle.call.remote(method, arguments))

    return cast(TrajectoryStore, Proxy(TrajectoryStore, send))


def trainer_proxy(handle: Any) -> Trainer:
    """The trainer behind a LearnerActor's handle."""

    async def send(method: str, arguments: list[bytes]) -> bytes:
        return cast(bytes, await handle.call.remote(method, arguments))

    return cast(Trainer, Proxy(Trainer, send))


def sandbox_proxy(handle: Any) -> SandboxBackend:
    """The backend behind a SandboxHostActor's handle, for one client: close it with `aclose`."""
    client = secrets.token_hex(8)

    async def send(method: str, arguments: list[bytes]) -> bytes:
        try:
            return cast(bytes, await handle.call.remote(client, method, arguments))
        except LOST as error:
            raise SandboxLost(f"the sandbox host: {str(error).splitlines()[0]}") from None

    return cast(SandboxBackend, RemoteBackend(send))


class RayWorker:
    """The controller's handle of a WorkerActor; `revive` ends it for sure and makes a new one."""

    def __init__(self, name: str, config: Config, store: Any) -> None:
        """Starts the first actor."""
        self.name, self._config, self._store = name, config, store
        self._actor = self._spawn()

    def _spawn(self) -> Any:
        actor = ray.remote(WorkerActor).options(
            num_cpus=1, resources={"rollout": 1}, max_restarts=0, max_concurrency=1000
        )
        return actor.remote(self._config.model_dump_json(), self._store)

    async def _tell(self, verb: str, *arguments: str) -> None:
        try:
            result(await self._actor.tell.remote(verb, *arguments))
        except LOST as error:
            raise WorkerLost(str(error).splitlines()[0]) from None

    async def run(self, worker_id: str) -> None:
        """Play until stopped."""
        await self._tell("run", worker_id)

    async def pause(self) -> None:
        """Give everything back."""
        await self._tell("pause")

    async def resume(self) -> None:
        """Claim again."""
        await self._tell("resume")

    async def stop(self) -> None:
        """End `run`."""
        await self._tell("stop")

    async def apply(self, manifest: str) -> None:
        """Serve a published policy version."""
        await self._tell("apply", manifest)

    async def pid(self) -> int:
        """The process of the present actor, for tests and for `ps`."""
        return await pid_of(self._actor)

    async def revive(self) -> None:
        """A new actor. An old one that only could not be reached must not play on."""
        self.kill()
        self._actor = self._spawn()
        await self.started()

    async def started(self) -> None:
        """Returns when the actor runs. Raises EngineError when it does not within START_WAIT_S."""
        try:
            await asyncio.wait_for(self.pid(), START_WAIT_S)
        except TimeoutError:
            raise EngineError(
                f"{self.name}: not started within {START_WAIT_S:g} s: no node has a free CPU and"
                " a free `rollout` resource"
            ) from None

    def kill(self) -> None:
        """End the actor's process, whatever it does."""
        ray.kill(self._actor, no_restart=True)


def start_store(config: Config) -> Any:
    """The handle of a new StoreActor that outlives its own process."""
    actor = ray.remote(StoreActor).options(
        num_cpus=0,
        resources={"store": 1},
        max_restarts=-1,
        max_task_retries=-1,
        max_concurrency=1000,
    )
    return actor.remote(config.model_dump_json())


def start_learner(config: Config, store: Any) -> Any:
    """The handle of a new LearnerActor."""
    actor = ray.remote(LearnerActor).options(num_cpus=0, resources={"learner": 1})
    return actor.remote(config.model_dump_json(), store)


def start_sandbox_host(
    kind: str,
    blobs: Path,
    scratch: Path,
    allow_unconfined: bool = False,
    lease_s: float = LEASE_S,
) -> Any:
    """The handle of a new SandboxHostActor; `kind` and what follows are `open_backend`'s.

    It closes the sandboxes of clients that it has not heard of for `lease_s`.
    """
    actor = ray.remote(SandboxHostActor).options(num_cpus=1, max_concurrency=1000)
    return actor.remote(kind, str(blobs), str(scratch), allow_unconfined, lease_s)


async def pid_of(handle: Any) -> int:
    """The process of an actor, once it runs."""
    return cast(int, await handle.pid.remote())


def start_workers(config: Config, store: Any) -> list[RayWorker]:
    """`rollout.num_workers` of them."""
    return [RayWorker(f"worker{i}", config, store) for i in range(config.rollout.num_workers)]
