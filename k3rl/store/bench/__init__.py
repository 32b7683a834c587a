"""Timings and sizes of the store on this machine, fsync on, each beside its bar.

The service is the real one, over an embedded server, driven inside its own process: what a worker
pays to reach it is not in these figures.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

from k3rl.store.arrow import warm
from k3rl.store.bench.load import Measure
from k3rl.store.bench.memory import memory
from k3rl.store.bench.reads import choices, opening, seals_and_reads
from k3rl.store.bench.sizes import sizes
from k3rl.store.bench.writes import commits, ingest

Part: TypeAlias = Callable[[Path], Awaitable[list[Measure]]]
PARTS: dict[str, Part] = {
    "ingest": ingest,
    "commits": commits,
    "seal": seals_and_reads,
    "choices": choices,
    "opening": opening,
    "memory": memory,
    "sizes": sizes,
}


async def measure(folder: Path, names: list[str]) -> list[Measure]:
    """The named parts, one store after the other below `folder`. All take about five minutes."""
    warm()  # opening a store does so in the background: the first part would pay for it
    found: list[Measure] = []
    for name in names:
        found += await PARTS[name](folder / name)
    return found
