"""Appends and commits: how fast tokens become durable."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from k3rl.store.bench.load import (
    COMPLETED,
    MILLION,
    Measure,
    claims,
    opened,
    random_ids,
    segments,
    tokens,
    write,
)
from k3rl.store.protocol import SEGMENT_TOKENS, Claim, StepFrame
from k3rl.store.service import StoreService
from k3rl.types import Author, Step

NUM_WRITERS = 8
INGEST_FRAMES = 250
"""Of 4,096 tokens, per writer."""
COMMIT_WRITERS, COMMITS = 256, 100
"""Trajectories at once, and steps of each."""
COMMIT_TOKENS = 100
ROUNDS = 5


async def ingest(folder: Path) -> list[Measure]:
    """Tokens in appends of a segment each, in a second of processor time and of the clock."""
    frames = segments(INGEST_FRAMES * SEGMENT_TOKENS, 0)
    count = NUM_WRITERS * INGEST_FRAMES * SEGMENT_TOKENS / MILLION
    async with opened(folder) as store:
        held = await claims(store, NUM_WRITERS)
        begun, begun_cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(write(store, claim, frames) for claim in held))
        took_s, cpu_s = time.perf_counter() - begun, time.process_time() - begun_cpu
    return [
        Measure("ingest, 4,096-token appends", count / took_s, "Mtok/s", 15.0, is_rate=True),
        Measure("  by CPU time", count / cpu_s, "Mtok/s", 15.0, is_rate=True),
    ]


async def commits(folder: Path) -> list[Measure]:
    """Steps of environment tokens, each durable before the next one of its trajectory."""
    rates, costs = [], []
    async with opened(folder) as store:
        for number in range(ROUNDS):
            rate, cost_s = await _commit_round(store, number * COMMIT_WRITERS)
            rates.append(rate)
            costs.append(cost_s)
    name = f"{COMMIT_TOKENS}-token commits, {COMMIT_WRITERS} at once"
    return [
        Measure(name, statistics.median(rates), "1/s", 20_000, is_rate=True),
        Measure("  CPU time of each", statistics.median(costs) * 1e6, "us", 50.0),
    ]


async def _commit_round(store: StoreService, first: int) -> tuple[float, float]:
    held = await claims(store, COMMIT_WRITERS, first)
    given = [list(_step_frames(claim)) for claim in held]

    async def commit(claim: Claim, frames: list[StepFrame]) -> None:
        id, epoch = claim.header.id, claim.epoch
        for frame in frames:
            await store.commit_step(id, epoch, frame)

    begun, begun_cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(commit(*each) for each in zip(held, given, strict=True)))
    took_s, cpu_s = time.perf_counter() - begun, time.process_time() - begun_cpu
    ends = (store.finish(claim.header.id, claim.epoch, COMPLETED) for claim in held)
    await asyncio.gather(*ends)
    count = COMMIT_WRITERS * COMMITS
    return count / took_s, cpu_s / count


def _step_frames(claim: Claim) -> Iterator[StepFrame]:
    base = tokens(random_ids(COMMIT_TOKENS), Author.ENVIRONMENT)
    for index in range(COMMITS):
        start = index * COMMIT_TOKENS
        frame = replace(base, id=claim.header.id, epoch=claim.epoch, offset=start)
        yield StepFrame(Step(index, start, start + COMMIT_TOKENS), frame, None)
