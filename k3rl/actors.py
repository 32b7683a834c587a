"""Ray actors around plain classes, and the proxies that talk to them.

Calls cross process boundaries as bytes of `k3rl.types.encode`, typed by the contract's own
annotations, and errors as their class name and arguments: nothing exchanged is a pickle of ours.
The store actor restarts by itself and its callers' calls are sent again, which is safe because
every write of the store is idempotent. A worker actor never restarts by itself: the controller
fences it first.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import time
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any, cast, get_type_hints

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, WorkerCrashedError

from k3rl import config as configs
from k3rl import errors
from k3rl.config import Config
from k3rl.errors import EngineError, K3rlError, StoreError
from k3rl.learner.protocol import Trainer
from k3rl.rollout.worker import RolloutWorker
from k3rl.store.host import StoreHost
from k3rl.store.protocol import TrajectoryStore
from k3rl.supervisor import WorkerLost
from k3rl.types import decode, encode

OK, FAILED = b"\0", b"\1"
Send = Callable[[str, list[bytes]], Awaitable[bytes]]
Call = tuple[str, list[bytes]]
TOGETHER = ("append", "commit_step", "pause", "finish", "get")
"""Calls of the store that come in numbers and are answered at once, or within a sync."""
DISTANCE_S = 0.05
"""Between two messages of such calls; a trajectory takes about a second between two of its own."""
START_WAIT_S = 60.0
"""How long an actor may wait for its resources."""
LOST = (ActorDiedError, ActorUnavailableError, WorkerCrashedError)


async def answer(work: Callable[[], Awaitable[bytes]]) -> bytes:
    """The reply frame of a call: its encoded result, or the k3rl error it raised."""
    try:
        return OK + await work()
    except K3rlError as error:
        arguments = cast(tuple[Any, ...], error.__reduce__())[1]
        return FAILED + json.dumps([type(error).__name__, arguments]).encode()


def result(reply: bytes) -> bytes:
    """The inverse of `answer`: the payload, or the error raised here."""
    if reply[:1] == OK:
        return reply[1:]
    name, arguments = json.loads(reply[1:])
    raise getattr(errors, name)(*arguments)


@cache
def _signature(contract: type, method: str) -> tuple[inspect.Signature, dict[str, Any]]:
    """Signature without `self`, and types, of a method."""
    function = getattr(contract, method)
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1:]
    return signature.replace(parameters=parameters), get_type_hints(function)


async def serve(contract: type, target: Any, method: str, arguments: list[bytes]) -> bytes:
    """Carry out one call of `contract` on `target`."""
    signature, hints = _signature(contract, method)
    pairs = zip(signature.parameters, arguments, strict=True)
    values = [decode(hints[name], data) for name, data in pairs]
    value = await getattr(target, method)(*values)
    return encode(value, hints["return"])


class Proxy:
    """Stands for an object elsewhere: methods of `contract` become `send(method, arguments)`."""

    def __init__(self, contract: type, send: Send) -> None:
        """`send` returns the reply frame of `answer`."""
        self._contract, self._send = contract, send

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        """An async method with the contract's signature."""
        if method.startswith("_") or not hasattr(self._contract, method):
            raise AttributeError(method)
        signature, hints = _signature(self._contract, method)

        async def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            data = [encode(value, hints[name]) for name, value in bound.arguments.items()]
            return decode(hints["return"], result(await self._send(method, data)))

        return call


class StoreActor:
    """The StoreService of a run, opened at its first call."""

    def __init__(self, config: str) -> None:
        """`config` is the resolved config as JSON."""
        self._host = StoreHost(configs.from_json(json.loads(config)))
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


async def pid_of(handle: Any) -> int:
    """The process of an actor, once it runs."""
    return cast(int, await handle.pid.remote())


def start_workers(config: Config, store: Any) -> list[RayWorker]:
    """`rollout.num_workers` of them."""
    return [RayWorker(f"worker{i}", config, store) for i in range(config.rollout.num_workers)]
