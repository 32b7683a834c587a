"""What the pool knows of a sandbox that somebody has."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass(slots=True)
class Lent:
    """A sandbox that somebody has."""

    used: float
    num_calls: int = 0
    """Going on now."""
    is_idle: bool = False
    """Paused by the pool."""
    is_paused: bool = False
    """Paused by its owner."""
    host: Lent | None = None
    """Whose extra place it has."""
    has_extra: bool = False
    """A fork of it has its extra place."""
    start: asyncio.Task[None] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is paused or resumed."""
