"""Timings of a sandbox backend, each the median of real runs and each with its bar.

What is timed is what a rollout waits for: a sandbox's first command, a command, a seal and its
snapshot, a restored sandbox's first command, many forks of one tree.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from k3rl.errors import SandboxError
from k3rl.sandboxes.admission import PoolLimits, room
from k3rl.sandboxes.base import ExecRequest, ExecResult, SandboxBackend, SandboxId, run
from k3rl.sandboxes.pool import Pool
from k3rl.sandboxes.spec import SandboxSpec
from k3rl.types import Snapshot

SPEC = SandboxSpec()
FILES = {f"f{number}": b"x" * 100 for number in range(20)}
DIRTY_FILES, DIRTY_BYTES = 5, 400_000
"""New files between two snapshots: 2 MB."""
DIRTY = f"for k in $(seq {DIRTY_FILES}); do head -c {DIRTY_BYTES} /dev/urandom > d{{0}}_$k; done"
MANY_FILES = 10_000
"""Of the tree in which one file changes between two snapshots."""
NUM_FORKS, TREE_FILES = 64, 100
"""Files of 1 MB in the tree that is forked."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One measured quantity."""

    name: str
    median_s: float
    worst_s: float
    bar_s: float

    @property
    def is_met(self) -> bool:
        """Whether the median is within the bar."""
        return self.median_s <= self.bar_s


@dataclass(frozen=True, slots=True)
class Idle:
    """Many sandboxes alive at once."""

    count: int
    start_s: float
    """For all of them, one after the other."""
    num_bytes: int
    """By which the machine's available memory shrank."""
    command_s: float
    """Median of one command in each."""


BARS_S = {
    "bwrap": {
        "create to first command": 0.030,
        "command": 0.002,
        "seal of 2 MB": 0.015,
        "restore to first command": 0.035,
        "warm create to first command": 0.003,
        "warm restore to first command": 0.010,
        f"{NUM_FORKS} forks of 100 MB": 1.0,
    },
    "docker": {
        "create to first command": 0.250,
        "command": 0.002,
        "snapshot of 2 MB": 0.100,
    },
}
"""By backend; a quantity without a bar is only printed."""


async def measure(backend: SandboxBackend, num_runs: int) -> list[Timing]:
    """Time a backend, each quantity `num_runs` times. Raises SandboxError when a command fails.

    The warm ones are timed through a pool over it.
    """
    await backend.capabilities()
    one = await backend.create(SPEC, FILES)
    await _command(backend, one, "true")
    snapshot = await backend.snapshot(one, {})
    creates_s = await _starts(backend, num_runs, lambda: backend.create(SPEC, FILES))
    many = {f"d{number // 100}/f{number}": b"x" * 100 for number in range(MANY_FILES)}
    restores_s = await _starts(backend, num_runs, lambda: backend.restore(SPEC, snapshot))
    timings = [
        _timing(backend, "create to first command", creates_s),
        _timing(backend, "command", await _repeat(num_runs, _runs(backend, one))),
        *await _snapshots(backend, num_runs, "2 MB", FILES, DIRTY),
        *await _snapshots(backend, num_runs, f"1 in {MANY_FILES}", many, "echo {0} > d7/f700"),
        _timing(backend, "restore to first command", restores_s),
        _timing(backend, f"{NUM_FORKS} forks of 100 MB", [await _forks(backend)]),
        *await _warm(backend, num_runs, snapshot),
    ]
    await backend.close(one)
    return timings


def _timing(backend: SandboxBackend, name: str, runs_s: list[float]) -> Timing:
    bar_s = BARS_S.get(backend.name, {}).get(name, float("inf"))
    return Timing(name, statistics.median(runs_s), max(runs_s), bar_s)


async def _warm(backend: SandboxBackend, num_runs: int, snapshot: Snapshot) -> list[Timing]:
    """Each run takes the one warm sandbox, while the pool makes the next one ready."""
    pool = Pool(backend, PoolLimits(num_warm=1))
    timings = []
    for name, content, make in (
        ("create", FILES, lambda: pool.create(SPEC, FILES)),
        ("restore", snapshot, lambda: pool.restore(SPEC, snapshot)),
    ):
        runs_s = []
        for _ in range(num_runs):
            await pool.warm(SPEC, 1, content)
            runs_s += await _starts(pool, 1, make)
        timings.append(_timing(backend, f"warm {name} to first command", runs_s))
    await pool.drain()
    return timings


async def idle(backend: SandboxBackend, count: int) -> Idle:
    """Have so many sandboxes alive at once, each behind its first command, then close them."""
    await backend.capabilities()
    before, begun = room(), time.perf_counter()
    made = []
    for _ in range(count):
        made.append(await backend.create(SPEC, FILES))
        await _command(backend, made[-1], "true")
    took_s, after = time.perf_counter() - begun, room()
    commands_s = []
    for each in made:
        commands_s += await _repeat(1, _runs(backend, each))
    for each in made:
        await backend.close(each)
    taken = before.available_bytes - after.available_bytes
    return Idle(count, took_s, taken, statistics.median(commands_s))


async def _command(backend: SandboxBackend, sandbox_id: SandboxId, *argv: str) -> ExecResult:
    result = await run(backend, sandbox_id, ExecRequest(argv, deadline_s=60))
    if result.exit_code != 0:
        raise SandboxError(f"{argv[0]}: exit code {result.exit_code}: {result.stderr[-200:]!r}")
    return result


def _runs(backend: SandboxBackend, sandbox_id: SandboxId) -> Callable[[], Awaitable[object]]:
    return lambda: _command(backend, sandbox_id, "true")


async def _repeat(num_runs: int, work: Callable[[], Awaitable[object]]) -> list[float]:
    runs_s = []
    for _ in range(num_runs):
        begun = time.perf_counter()
        await work()
        runs_s.append(time.perf_counter() - begun)
    return runs_s


async def _starts(
    backend: SandboxBackend, num_runs: int, make: Callable[[], Awaitable[SandboxId]]
) -> list[float]:
    """From asking for a sandbox to the end of its first command."""
    runs_s = []
    for _ in range(num_runs):
        begun = time.perf_counter()
        made = await make()
        await _command(backend, made, "true")
        runs_s.append(time.perf_counter() - begun)
        await backend.close(made)
    return runs_s


async def _snapshots(
    backend: SandboxBackend, num_runs: int, what: str, files: Mapping[str, bytes], script: str
) -> list[Timing]:
    """Behind a command that has just changed the tree: until it is frozen, until it is durable."""
    made = await backend.create(SPEC, files)
    await backend.snapshot(made, {})
    seals_s, snapshots_s = [], []
    for number in range(num_runs):
        await _command(backend, made, "sh", "-c", script.format(number))
        begun = time.perf_counter()
        seal = await backend.seal(made, {})
        seals_s.append(time.perf_counter() - begun)
        await backend.settle(made, seal)
        snapshots_s.append(time.perf_counter() - begun)
    await backend.close(made)
    names = (f"seal of {what}", f"snapshot of {what}")
    return [_timing(backend, names[0], seals_s), _timing(backend, names[1], snapshots_s)]


async def _forks(backend: SandboxBackend) -> float:
    """All forks together, until each has run a command."""
    tree = {f"large/{number}": os.urandom(1 << 20) for number in range(TREE_FILES)}
    made = await backend.create(SPEC, tree)
    await backend.snapshot(made, {})
    begun = time.perf_counter()
    twins = await backend.fork(made, NUM_FORKS)
    await asyncio.gather(*(_command(backend, twin, "true") for twin in twins))
    took_s = time.perf_counter() - begun
    for each in (made, *twins):
        await backend.close(each)
    return took_s
