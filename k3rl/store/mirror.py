"""Keeps the live index in step with memory, and rebuilds it whenever it turns out to be lost.

Memory is the truth. The index hands out queued ids, and shows rows and leases to whoever looks.
What it says is checked: an id that memory does not hold queued is ignored, and an index that has
nothing while memory has something queued is rebuilt.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from k3rl.errors import StoreError
from k3rl.store.index import IndexLost, Lease, LiveIndex, TrajectoryRow
from k3rl.store.live import LiveState
from k3rl.types import TrajectoryId

FLUSH_S = 0.1
"""Rows that changed within this time are put together."""
RENEW_SHARE = 0.125
"""A lease is renewed again after this share of its time at the earliest."""
RETRY_S = 1.0
MAX_REBUILDS = 3
"""In one call, before it gives up."""
T = TypeVar("T")


class IndexMirror:
    """The only user of the live index; calls go one at a time."""

    def __init__(self, index: LiveIndex, live: LiveState) -> None:
        """Touches nothing yet."""
        self._index = index
        self._live = live
        self._turn = asyncio.Lock()
        self._is_stale = True
        self._failure: StoreError | None = None
        self._failed_at = 0.0
        self._dirty: dict[TrajectoryId, None] = {}
        self._has_dirty = asyncio.Event()
        self._flusher: asyncio.Task[None] | None = None
        self.claiming: dict[TrajectoryId, str] = {}
        """Popped ids whose claim is not durable yet, and by whom."""
        self._ended: dict[TrajectoryId, None] = {}
        """Claims that ended since the last release."""
        self._renewed: dict[str, float] = {}
        """When each worker's lease was renewed."""
        self.num_rebuilds = 0
        """Since opening; the first filling is not one."""

    async def open(self) -> None:
        """Reach the server and fill the index from memory. Raises StoreError when unreachable."""
        await self._index.open()
        await self._rebuild()
        self._flusher = asyncio.create_task(self._flush())

    async def aclose(self) -> None:
        """Stop; what the index holds is left there."""
        if self._flusher is not None:
            self._flusher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._flusher
        await self._index.aclose()

    def mark(self, id: TrajectoryId) -> None:
        """A row changed: it is put soon."""
        self._dirty[id] = None
        self._has_dirty.set()

    async def push(self, ids: Sequence[TrajectoryId], front: bool = False) -> None:
        """Queue those of `ids` that memory holds queued."""
        await self._call(lambda: self._index.push(self._queued(ids), front=front))

    async def pop(self, worker_id: str, n: int) -> list[TrajectoryId]:
        """Up to `n` queued ids, in `claiming` from here on: the caller claims them or gives up."""

        async def pop() -> list[TrajectoryId]:
            found = self._queued(await self._index.pop(worker_id, n))
            if not found and n > 0 and self._queued(list(self._live.queue)):
                raise IndexLost("the live index has an empty queue, the store does not")
            self.claiming.update(dict.fromkeys(found, worker_id))
            return found

        return await self._call(pop)

    async def renew(self, worker_id: str, ttl_s: float) -> None:
        """The worker is alive. Does nothing when its lease was renewed a moment ago."""
        now = time.monotonic()
        if now - self._renewed.get(worker_id, -math.inf) >= ttl_s * RENEW_SHARE:
            await self._call(lambda: self._index.renew(worker_id, ttl_s))
            self._renewed[worker_id] = now

    async def release(self, ids: Sequence[TrajectoryId]) -> None:
        """Claims that ended. Never fails: an index that cannot follow is rebuilt later."""
        self._ended.update(dict.fromkeys(ids))
        await self._follow(self._release_ended)

    async def _release_ended(self) -> None:
        """The first who comes to its turn releases for all who wait."""
        ended, self._ended = self._ended, {}
        await self._index.release([id for id in ended if not self._is_held(id)])

    def _is_held(self, id: TrajectoryId) -> bool:
        record = self._live.records.get(id)
        return id in self.claiming or (record is not None and record.worker_id is not None)

    async def requeue(self, ids: Sequence[TrajectoryId]) -> None:
        """Paused or reaped ids to the front. Never fails, like `release`."""
        await self._follow(lambda: self._index.push(self._queued(ids), front=True))

    async def take_over(self, worker_id: str, ids: Sequence[TrajectoryId]) -> None:
        """A dead worker's ids to the front. Never fails, like `release`."""

        async def move() -> None:
            self._renewed.pop(worker_id, None)
            await self._index.take_over(worker_id)
            await self._index.push(self._queued(ids), front=True)

        await self._follow(move)

    def _queued(self, ids: Sequence[TrajectoryId]) -> list[TrajectoryId]:
        return [id for id in ids if id in self._live.queue and id not in self.claiming]

    async def _call(self, operation: Callable[[], Awaitable[T]]) -> T:
        asked = time.monotonic()
        async with self._turn:
            if self._failure is not None and self._failed_at > asked:
                # It failed for the call before: this one has waited just as long.
                raise StoreError(str(self._failure))
            for _ in range(MAX_REBUILDS):
                try:
                    if self._is_stale:
                        await self._rebuild()
                        self.num_rebuilds += 1
                    return await operation()
                except IndexLost:
                    self._is_stale = True
                except StoreError as error:
                    self._is_stale, self._failure, self._failed_at = True, error, time.monotonic()
                    raise
                except BaseException:
                    self._is_stale = True
                    raise
            raise StoreError("the live index is lost again after every rebuild: does it have room?")

    async def _follow(self, operation: Callable[[], Awaitable[None]]) -> None:
        if not self._is_stale:
            with contextlib.suppress(StoreError):
                await self._call(operation)

    async def _rebuild(self) -> None:
        """Nothing is awaited between reading memory and handing it over."""
        live = self._live
        self._dirty.clear()
        self._ended.clear()
        self._renewed.clear()
        leases = {
            id: Lease(record.worker_id, record.epoch)
            for id, record in live.records.items()
            if record.worker_id is not None
        }
        for id, worker_id in self.claiming.items():
            leases[id] = Lease(worker_id, live.records[id].epoch)
        queued = [id for id in live.queue if id not in self.claiming]
        rows = [TrajectoryRow(*numbers) for numbers in live.all_numbers()]
        await self._index.rebuild(rows, queued, leases)
        self._is_stale = False

    async def _flush(self) -> None:
        while True:
            await self._has_dirty.wait()
            await asyncio.sleep(FLUSH_S)
            self._has_dirty.clear()
            rows = [TrajectoryRow(*self._live.numbers(id)) for id in self._dirty]
            self._dirty.clear()
            try:
                await self._call(partial(self._index.put, rows))
            except StoreError:
                await asyncio.sleep(RETRY_S)
                self._has_dirty.set()
