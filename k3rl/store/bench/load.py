"""What the timings write and read, and how one quantity is told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from k3rl.blobs import BlobStore
from k3rl.store.index import LiveIndex
from k3rl.store.protocol import SEGMENT_TOKENS, Claim, StepFrame
from k3rl.store.redis_server import EmbeddedServer
from k3rl.store.service import StoreService
from k3rl.types import (
    Author,
    Int32Array,
    Outcome,
    OutcomeKind,
    Span,
    Step,
    Task,
    TokenFrame,
    TrajectoryHeader,
    TrajectoryKey,
)

VOCAB = 160_000
MILLION = 1_000_000
COMPLETED = Outcome(OutcomeKind.COMPLETED, 1.0)


@dataclass(frozen=True, slots=True)
class Measure:
    """One measured quantity."""

    name: str
    value: float | None
    """None: it could not be measured, `unit` says why."""
    unit: str
    bar: float
    is_rate: bool = False
    """Then more is better."""

    @property
    def is_met(self) -> bool:
        """Whether the value is on the right side of the bar."""
        if self.value is None:
            return False
        return self.value >= self.bar if self.is_rate else self.value <= self.bar


@asynccontextmanager
async def opened(root: Path) -> AsyncIterator[StoreService]:
    """A service that seals only when it is told to, over a server of its own."""
    async with index_url(root) as url:
        store = service(root, url)
        await store.open()
        try:
            yield store
        finally:
            await store.aclose()


@asynccontextmanager
async def index_url(root: Path) -> AsyncIterator[str]:
    """A Redis server for one root."""
    server = EmbeddedServer(root / "redis")
    try:
        yield await server.start()
    finally:
        await server.stop()


def service(root: Path, url: str) -> StoreService:
    """The service of a root, still closed."""
    place = root / "store"
    index = LiveIndex.from_url(url, root.name)
    return StoreService(place, BlobStore(place / "blobs"), index, seal_tokens=1 << 40)


def header(number: int) -> TrajectoryHeader:
    """Of a trajectory of no environment."""
    task = Task("k3rl/Bench-v0", number)
    return TrajectoryHeader(TrajectoryKey("bench", task.key, "max", number, 0), task)


async def claims(store: StoreService, count: int, first: int = 0) -> list[Claim]:
    """So many new trajectories, begun and claimed."""
    await store.begin([header(first + number) for number in range(count)])
    held: list[Claim] = []
    while len(held) < count:
        names = [claim.header.id for claim in held]
        held += await store.claim("bench", count - len(held), names, 1.0)
    return held


def tokens(ids: Int32Array, author: Author = Author.POLICY) -> TokenFrame:
    """A frame of one author at offset 0 of nobody's trajectory."""
    is_policy = author is Author.POLICY
    mask = np.full(len(ids), is_policy)
    logprobs = np.full(len(ids), np.nan, np.float32)
    if is_policy:
        rng = np.random.default_rng(len(ids))
        logprobs = -rng.exponential(size=len(ids)).astype(np.float32)
    return TokenFrame("", 0, 0, ids, mask, logprobs, (Span(0, author, 1, 1),))


def random_ids(count: int, seed: int = 0) -> Int32Array:
    """Zipf-like, as text is."""
    rng = np.random.default_rng(seed)
    return (rng.zipf(1.2, count) % VOCAB).astype(np.int32)


def segments(num_tokens: int, seed: int) -> list[TokenFrame]:
    """So many policy tokens as frames of a segment each."""
    ids = random_ids(num_tokens, seed)
    return [tokens(ids[at : at + SEGMENT_TOKENS]) for at in range(0, num_tokens, SEGMENT_TOKENS)]


async def write(store: StoreService, claim: Claim, frames: Sequence[TokenFrame]) -> None:
    """Append frames one after the other, commit them as one step, and finish."""
    id, epoch = claim.header.id, claim.epoch
    offset = 0
    for frame in frames:
        await store.append(replace(frame, id=id, epoch=epoch, offset=offset))
        offset += len(frame.token_ids)
    await store.commit_step(id, epoch, StepFrame(Step(0, 0, offset), None, None))
    await store.finish(id, epoch, COMPLETED)
