"""The watermark of the disk: with too little room left nothing new begins.

What runs goes on: it may append, finish and be sealed, and garbage is collected. Nothing is handed
out of the work queue, and what would begin a trajectory waits, then fails. As soon as there is room
again, an eighth more than the watermark, all goes on by itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from k3rl.errors import StoreFull

LOOK_S = 0.5
_log = logging.getLogger(__name__)


class DiskGate:
    """Whether a root's disk has room for more trajectories."""

    def __init__(self, root: Path, min_free_bytes: int, wait_s: float) -> None:
        """0 bytes: always open. What begins waits for room for `wait_s`."""
        self.free_bytes = 0
        """At the last look."""
        self.num_refused = 0
        """Beginnings that failed."""
        self._root, self._min, self._wait_s = root, min_free_bytes, wait_s
        self._is_open = True
        self._looked = -LOOK_S

    @property
    def is_open(self) -> bool:
        """Looks again when the last look is `LOOK_S` ago."""
        now = time.monotonic()
        if now - self._looked >= LOOK_S:
            self._looked = now
            self._look()
        return self._is_open

    async def admit(self) -> None:
        """Return once there is room. Raises StoreFull when that takes too long."""
        end = time.monotonic() + self._wait_s
        while not self.is_open:
            if time.monotonic() >= end:
                self.num_refused += 1
                raise StoreFull(
                    f"{self._root}: {self.free_bytes} bytes free, fewer than the"
                    f" {self._min} of store.min_free_bytes: make room on this disk; what runs"
                    " goes on, and so does the rest once there is room"
                )
            await asyncio.sleep(min(LOOK_S, self._wait_s / 4))

    async def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` whenever room runs out or is there again, until cancelled."""
        was_open = True
        while True:
            if self.is_open != was_open:
                was_open = not was_open
                changed()
            await asyncio.sleep(LOOK_S)

    def _look(self) -> None:
        try:
            found = os.statvfs(self._root)
        except OSError as error:
            _log.warning("%s: cannot see how much room is left: %s", self._root, error)
            return
        self.free_bytes = found.f_bavail * found.f_frsize
        low = self._min if self._is_open else self._min + self._min // 8
        is_open = self.free_bytes >= low
        if is_open != self._is_open:
            word = "has room again" if is_open else "is nearly full: nothing new begins"
            _log.warning("%s: %d bytes free: the disk %s", self._root, self.free_bytes, word)
        self._is_open = is_open
