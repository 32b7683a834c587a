"""Places for sessions, shared fairly: whoever waits longest behind the emptiest queue is next."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from k3rl.errors import UserInputError


class FairSlots:
    """`num_slots` places. A free one goes to the waiting queue that holds the fewest.

    So queues that have enough to do get equal shares of the places however long each of their
    holders keeps one, and what a queue cannot use goes to the others. Queues that hold equally
    many take turns; within a queue it is first come, first served.
    """

    def __init__(self, num_slots: int) -> None:
        """Raises UserInputError for less than one."""
        if num_slots < 1:
            raise UserInputError(f"{num_slots} slots: there must be at least one")
        self._free = list(range(num_slots))[::-1]
        self._waiting: dict[str, deque[asyncio.Future[int]]] = {}
        self._num_held: Counter[str] = Counter()
        self._served: dict[str, int] = {}
        """When each queue was last given a place."""
        self._num_served = 0

    @property
    def num_held(self) -> Counter[str]:
        """Places by queue."""
        return +self._num_held

    @asynccontextmanager
    async def take(self, queue: str) -> AsyncIterator[int]:
        """Wait for a place and hold it; gives its number."""
        place: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(queue, deque()).append(place)
        self._hand_out()
        try:
            yield await place
        finally:
            if place.done() and not place.cancelled():
                self._give_back(queue, place.result())

    def _hand_out(self) -> None:
        while self._free and (queue := self._next_queue()) is not None:
            place = self._waiting[queue].popleft()
            if not self._waiting[queue]:
                del self._waiting[queue]
            if not place.done():
                self._num_held[queue] += 1
                self._num_served += 1
                self._served[queue] = self._num_served
                place.set_result(self._free.pop())

    def _next_queue(self) -> str | None:
        def standing(queue: str) -> tuple[int, int]:
            return self._num_held[queue], self._served.get(queue, 0)

        return min(self._waiting, key=standing, default=None)

    def _give_back(self, queue: str, slot: int) -> None:
        self._num_held[queue] -= 1
        if not self._num_held[queue]:
            del self._num_held[queue]
        self._free.append(slot)
        self._hand_out()
