"""One change at a time of each trajectory; whoever else wants one waits in line."""

from __future__ import annotations

import asyncio

from k3rl.types import TrajectoryId


class Turns:
    """Who has the turn of which trajectory, and who waits for it."""

    def __init__(self) -> None:
        """Nobody has one."""
        self._waiting: dict[TrajectoryId, list[asyncio.Future[None]]] = {}

    def take(self, id: TrajectoryId) -> bool:
        """Take the turn if nobody has it."""
        if id in self._waiting:
            return False
        self._waiting[id] = []
        return True

    async def wait(self, id: TrajectoryId) -> None:
        """Until it is the caller's turn; whoever is cancelled neither breaks nor jumps the line."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[id].append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.end(id)
            raise

    def end(self, id: TrajectoryId) -> None:
        """Give the turn to the next in line."""
        waiting = self._waiting[id]
        while waiting:
            turn = waiting.pop(0)
            if not turn.done():
                turn.set_result(None)
                return
        del self._waiting[id]
