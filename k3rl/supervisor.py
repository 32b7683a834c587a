"""Keeps rollout workers running, and makes all of them play, pause or stop together.

A worker whose process is lost is fenced in the store (`reap`), revived, and told what all of them
are to do at that moment, before it runs: a pause or a stop holds for processes that start later.
One lock per worker puts what is told to it in order; a revival holds that lock.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any, Literal, Protocol, TypeVar

from k3rl.errors import EngineError
from k3rl.store.protocol import TrajectoryStore

T = TypeVar("T")
Verb = Literal["resume", "pause", "stop"]
CANCEL_WAIT_S = 20.0
"""How long cancelled work may take to clean up."""


class WorkerLost(Exception):
    """A worker's process is gone, or cannot be reached; its handle can be revived."""


class WorkerHandle(Protocol):
    """A rollout worker, here or elsewhere. Calls raise WorkerLost when its process is gone."""

    name: str

    async def run(self, worker_id: str) -> None:
        """Play until stopped; returns at once when it was stopped before."""
        ...

    async def pause(self) -> None:
        """Give everything back, and claim nothing until `resume`."""
        ...

    async def resume(self) -> None:
        """Claim again."""
        ...

    async def apply(self, manifest: str) -> None:
        """Serve this published policy version (JSON) from the next token on."""
        ...

    async def stop(self) -> None:
        """Give everything back and end `run`."""
        ...

    async def revive(self) -> None:
        """End the old process for sure and stand up a new one, after WorkerLost."""
        ...


class Supervisor:
    """Runs workers; `num_restarts` counts the revivals of all of them."""

    def __init__(
        self,
        workers: list[WorkerHandle],
        store: TrajectoryStore,
        max_restarts: int,
        on_start: Callable[[str], None] = lambda worker_id: None,
    ) -> None:
        """`on_start` hears of every worker id before its worker runs."""
        self.workers, self.store, self.max_restarts = workers, store, max_restarts
        self.num_restarts = 0
        self._on_start = on_start
        self._wanted: Verb = "pause"
        self._manifest: str | None = None
        self._ids: dict[str, str] = {}
        self._locks = {worker.name: asyncio.Lock() for worker in workers}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start all workers, paused."""
        self._tasks = [asyncio.create_task(self._keep(worker)) for worker in self.workers]

    async def play(self) -> None:
        """Let all of them claim and play."""
        await self._want("resume")

    async def pause(self) -> None:
        """Returns when nobody holds a trajectory."""
        await self._want("pause")

    async def apply(self, manifest: str) -> None:
        """Returns when all of them serve this policy version; later ones start with it."""
        self._manifest = manifest
        await self._tell_all("apply", manifest)

    async def stop(self) -> None:
        """Returns when all have ended."""
        await self._want("stop")
        await asyncio.gather(*self._tasks)

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, unless a worker fails for good first: then its error."""
        task = asyncio.create_task(work)
        waiting: set[asyncio.Task[Any]] = {task, *self._tasks}
        try:
            while not task.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for finished in done - {task}:
                    await finished
            return await task
        finally:
            await cancelled(task)

    async def aclose(self) -> None:
        """End what still runs."""
        await cancelled(*self._tasks)

    async def _keep(self, worker: WorkerHandle) -> None:
        """Keep one worker running until it is stopped."""
        incarnation = 0
        while True:
            worker_id = f"{worker.name}-{incarnation}-{os.getpid()}"
            self._ids[worker.name] = worker_id
            self._on_start(worker_id)
            async with self._locks[worker.name]:
                if self._manifest is not None:
                    await self._say(worker, "apply", self._manifest)
                await self._say(worker, self._wanted)
            try:
                return await worker.run(worker_id)
            except WorkerLost as error:
                await self._replace(worker, error)
                incarnation += 1
                if self._wanted == "stop":
                    return None

    async def _replace(self, worker: WorkerHandle, error: WorkerLost) -> None:
        async with self._locks[worker.name]:
            await self.store.reap(self._ids[worker.name])
            if self._wanted == "stop":
                return
            self.num_restarts += 1
            if self.num_restarts > self.max_restarts:
                raise EngineError(
                    f"workers were lost {self.num_restarts} times, more often than"
                    f" rollout.max_worker_restarts allows; the last was {worker.name}: {error}"
                )
            await worker.revive()

    async def _want(self, verb: Verb) -> None:
        self._wanted = verb
        await self._tell_all(verb)

    async def _tell_all(self, verb: str, *arguments: str) -> None:
        async def tell(worker: WorkerHandle) -> None:
            async with self._locks[worker.name]:
                await self._say(worker, verb, *arguments)

        await asyncio.gather(*(tell(worker) for worker in self.workers))

    async def _say(self, worker: WorkerHandle, verb: str, *arguments: str) -> None:
        try:
            await getattr(worker, verb)(*arguments)
        except WorkerLost:
            # Whoever paused or stopped it may rely on nothing being held any more.
            await self.store.reap(self._ids[worker.name])


async def cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Returns when all have ended; one that does not end must not hide what ended the run."""
    for task in tasks:
        task.cancel()
    if tasks:
        done, _ = await asyncio.wait(tasks, timeout=CANCEL_WAIT_S)
        await asyncio.gather(*done, return_exceptions=True)
