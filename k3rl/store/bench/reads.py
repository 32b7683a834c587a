"""Sealing, reading at random, drawing, opening: what does not depend on how much there is."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import numpy as np

from k3rl.store.bench.load import (
    MILLION,
    Measure,
    claims,
    index_url,
    opened,
    random_ids,
    segments,
    service,
    tokens,
    write,
)
from k3rl.store.protocol import SEGMENT_TOKENS, Ref, SampleRequest, SampleUnit
from k3rl.store.service import StoreService

NUM_SEALS = 5
NUM_READS = 200
NUM_CHOSEN, NUM_DRAWS = 64, 50
STORES = (1, 100)
"""Millions of tokens in a store that is drawn from."""
MANY, MANY_TOKENS, TOGETHER = 10_000, 400, 500
"""Trajectories, tokens of each, and how many are written at a time."""


async def seals_and_reads(folder: Path) -> list[Measure]:
    """Sealing a million tokens, then random segments of it; hot: each was read once before."""
    runs_s = []
    async with opened(folder) as store:
        for number in range(NUM_SEALS):
            (claim,) = await claims(store, 1, number)
            await write(store, claim, segments(MILLION, number))
            runs_s.append(await _timed(store.pin))
        refs = await _random_segments(store)
        await _read_all(store, refs)
        hot_s = await _read_all(store, refs)
        cold_s = await _read_all(store, refs, lambda: _drop_cache(store.root / "sealed"))
    return [
        _median("seal 1M tokens, durable", runs_s, 150.0),
        _median("random segment, hot", hot_s, 0.3),
        _median("random segment, cold", cold_s, 1.5),
    ]


async def choices(folder: Path) -> list[Measure]:
    """Drawing segments of stores of very different size, and reading them."""
    found = []
    frames = segments(MILLION, 0)
    for size in STORES:
        async with opened(folder / str(size)) as store:
            for first in range(0, size, 4):
                count = min(4, size - first)
                held = await claims(store, count, first)
                await asyncio.gather(*(write(store, claim, frames) for claim in held))
                await store.pin()
            found += await _draws(store, f"{NUM_CHOSEN} of {size}M tokens")
    return found


async def _draws(store: StoreService, what: str) -> list[Measure]:
    choose_s, both_s = [], []
    for update in range(NUM_DRAWS):
        request = SampleRequest(update, NUM_CHOSEN, 0, unit=SampleUnit.SEGMENT)
        begun = time.perf_counter()
        refs = await store.sample(request)
        choose_s.append(time.perf_counter() - begun)
        await store.read_many(refs)
        begun = time.perf_counter()
        await store.read_many(await store.sample(request))
        both_s.append(time.perf_counter() - begun)
    return [
        _median(f"{what}, chosen", choose_s, 2.0),
        _median(f"{what}, chosen and read", both_s, 25.0),
    ]


async def opening(folder: Path) -> list[Measure]:
    """A root of many trajectories, from files to an open service with its index filled."""
    frame = tokens(random_ids(MANY_TOKENS))
    runs_s = []
    async with index_url(folder) as url:
        store = service(folder, url)
        await store.open()
        for first in range(0, MANY, TOGETHER):
            held = await claims(store, TOGETHER, first)
            await asyncio.gather(*(write(store, claim, [frame]) for claim in held))
            if first % (4 * TOGETHER) == 0:
                await store.pin()
        await store.aclose()
        for _ in range(NUM_SEALS):
            store = service(folder, url)
            runs_s.append(await _timed(store.open))
            await store.aclose()
    return [_median(f"open {MANY:,} trajectories", runs_s, 1000.0)]


async def _random_segments(store: StoreService) -> list[Ref]:
    rng = np.random.default_rng(0)
    ids = [trajectory.id for trajectory in await store.trajectories()]
    refs = []
    for _ in range(NUM_READS):
        start = int(rng.integers(MILLION // SEGMENT_TOKENS)) * SEGMENT_TOKENS
        refs.append(Ref(ids[int(rng.integers(len(ids)))], start, start + SEGMENT_TOKENS))
    return refs


async def _read_all(
    store: StoreService, refs: Iterable[Ref], before: Callable[[], None] = lambda: None
) -> list[float]:
    runs_s = []
    for ref in refs:
        before()
        begun = time.perf_counter()
        await store.read(ref)
        runs_s.append(time.perf_counter() - begun)
    return runs_s


async def _timed(work: Callable[[], Awaitable[object]]) -> float:
    begun = time.perf_counter()
    await work()
    return time.perf_counter() - begun


def _median(name: str, runs_s: list[float], bar_ms: float) -> Measure:
    return Measure(name, statistics.median(runs_s) * 1e3, "ms", bar_ms)


def _drop_cache(folder: Path) -> None:
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
