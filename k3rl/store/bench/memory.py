"""Whether memory stays flat while a trajectory of a million tokens passes through."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from k3rl.store.bench.load import COMPLETED, MILLION, Measure, claims, opened, random_ids, tokens
from k3rl.store.protocol import SEGMENT_TOKENS, Ref, StepFrame
from k3rl.store.service import StoreService
from k3rl.types import Step

NUM_WARM, NUM_MORE = 2, 3
"""Trajectories before and after the first look: what they add is what stays."""
ARRAYS_MB = 9.0
"""Ids, mask and log-probs of a million tokens: memory is flat when less than that is added."""


async def memory(folder: Path) -> list[Measure]:
    """Growth of the highest resident size from the first trajectories to later ones."""
    async with opened(folder) as store:
        peaks = [await _pass(store, number) for number in range(NUM_WARM + NUM_MORE)]
    growth = max(peaks[NUM_WARM:]) - max(peaks[:NUM_WARM])
    name = "RSS added: 3M more in, sealed, read"
    return [Measure(name, max(growth, 0.0), "MB", ARRAYS_MB)]


async def _pass(store: StoreService, number: int) -> float:
    """A million tokens are appended, sealed and read; the peak meanwhile."""
    _forget_peak()
    (claim,) = await claims(store, 1, number)
    id, epoch = claim.header.id, claim.epoch
    for start in range(0, MILLION, SEGMENT_TOKENS):
        frame = tokens(random_ids(SEGMENT_TOKENS, start))
        await store.append(replace(frame, id=id, epoch=epoch, offset=start))
    end = start + SEGMENT_TOKENS
    await store.commit_step(id, epoch, StepFrame(Step(0, 0, end), None, None))
    await store.finish(id, epoch, COMPLETED)
    await store.pin()
    for start in range(0, MILLION, SEGMENT_TOKENS):
        await store.read(Ref(id, start, start + SEGMENT_TOKENS))
    return _peak_mb()


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1e3
