"""Warm sandboxes by kind: which to hand out, and which to let go of first."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from k3rl.sandboxes.base import SandboxId
from k3rl.sandboxes.spec import SandboxSpec
from k3rl.types import Digest

Make = Callable[[], Awaitable[SandboxId]]
Kind = tuple[Digest, Digest]
"""Digests of a spec and of what the workspace holds at first."""


@dataclass(slots=True)
class Shelf:
    """The warm sandboxes of one kind."""

    spec: SandboxSpec
    make: Make
    ready: deque[tuple[SandboxId, float]] = field(default_factory=deque)
    """With the time of each arrival; the oldest first."""
    coming: set[asyncio.Task[None]] = field(default_factory=set)
    """Those that put one more here when they are done."""


class Shelves:
    """All of them; the kind that was wanted last comes last."""

    def __init__(self) -> None:
        """Empty."""
        self._shelves: OrderedDict[Kind, Shelf] = OrderedDict()

    def of(self, kind: Kind, spec: SandboxSpec, make: Make) -> Shelf:
        """The shelf of a kind that is wanted now, made where there is none."""
        self._sweep()
        shelf = self._shelves.setdefault(kind, Shelf(spec, make))
        self._shelves.move_to_end(kind)
        return shelf

    @staticmethod
    def add(shelf: Shelf, sandbox_id: SandboxId) -> None:
        """Put a started sandbox on its shelf."""
        shelf.ready.append((sandbox_id, time.monotonic()))

    @staticmethod
    def take(shelf: Shelf) -> SandboxId | None:
        """The oldest of a shelf."""
        return shelf.ready.popleft()[0] if shelf.ready else None

    def __len__(self) -> int:
        """How many sandboxes are warm."""
        return sum(len(shelf.ready) for shelf in self._shelves.values())

    def oldest(self) -> SandboxId | None:
        """Take the oldest of the kind that was wanted longest ago."""
        for shelf in self._shelves.values():
            if shelf.ready:
                return self.take(shelf)
        return None

    def expired(self, warm_s: float) -> list[SandboxId]:
        """Take all that have waited for longer."""
        limit = time.monotonic() - warm_s
        found = []
        for shelf in self._shelves.values():
            while shelf.ready and shelf.ready[0][1] < limit:
                found.append(shelf.ready.popleft()[0])
        return found

    def _sweep(self) -> None:
        for kind, shelf in list(self._shelves.items()):
            if not (shelf.ready or shelf.coming):
                del self._shelves[kind]
