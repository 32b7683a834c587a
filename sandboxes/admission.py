"""Whether this machine has room for one more sandbox, and how many may start at once.

Room is memory and process numbers, as the kernel tells them: those of the machine, and those of
every control group that we are in ourselves. What was let in a moment ago has not taken its memory
yet, so it is counted with what it is expected to take.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from k3rl.errors import SandboxError
from k3rl.sandboxes.processes.cgroups import own_groups
from k3rl.sandboxes.spec import MIB

LOOK_S = 0.2
"""How often a sandbox that waits for room looks again."""
YOUNG_S = 5.0
"""After so long a sandbox's memory shows in what the kernel tells."""
UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """When a sandbox has to wait. Sizes in bytes, times in seconds."""

    max_sandboxes: int = 1024
    """Alive at the same time, those in the warm pool included, but for one fork of each."""
    max_starting: int = max(2, os.cpu_count() or 1)
    """Starting at the same time: more would only make each of them slower."""
    reserve_bytes: int = 1024 * MIB
    """Memory that must stay available to others."""
    footprint_bytes: int = 32 * MIB
    """What a sandbox is expected to take; its limits are what it may take."""
    reserve_processes: int = 256
    """Process numbers that must stay free beyond the new sandbox's own limit."""
    wait_s: float = 300.0
    """How long a sandbox waits for room before that is an error."""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """How a pool treats its sandboxes. Times in seconds."""

    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    num_warm: int = 0
    """Most sandboxes that wait, started, for somebody to ask for one like them.

    Whenever one was asked for, another like it is made ready: the trajectories of a group want the
    same. `warm` makes some ready by name.
    """
    warm_s: float = 60.0
    """After so long a warm sandbox that nobody asked for is closed."""
    idle_pause_s: float = 60.0
    lease_s: float = 3600.0
    reap_every_s: float = 300.0
    tick_s: float = 1.0
    """How often all this is looked after."""


@dataclass(frozen=True, slots=True)
class Room:
    """What is left on this machine for us."""

    available_bytes: int
    free_processes: int


def room() -> Room:
    """What the kernel tells now."""
    available, free = _machine()
    for folder in _groups():
        available = min(available, _memory_left(folder))
        free = min(free, _left(folder, "pids.max", "pids.current"))
    return Room(available, free)


@cache
def _groups() -> tuple[Path, ...]:
    """Our own control groups and those above them, where memory or processes may be bounded."""
    found = []
    for name, (folder, mount) in own_groups().items():
        if name in ("", "memory", "pids"):
            found += [each for each in (folder, *folder.parents) if each.is_relative_to(mount)]
    return tuple(dict.fromkeys(found))


def _machine() -> tuple[int, int]:
    fields = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
    )
    kernel = Path("/proc/sys/kernel")
    most = min(int((kernel / name).read_text()) for name in ("pid_max", "threads-max"))
    used = int(Path("/proc/loadavg").read_text().split()[3].split("/")[1])
    return int(fields["MemAvailable"].split()[0]) * 1024, most - used


def _memory_left(group: Path) -> int:
    """What a group may still take; its reclaimable page cache counts as free."""
    unified = _left(group, "memory.max", "memory.current")
    first = _left(group, "memory.limit_in_bytes", "memory.usage_in_bytes")
    left = min(unified, first)
    return left if left >= UNLIMITED // 2 else left + _cache_bytes(group)


def _cache_bytes(group: Path) -> int:
    for line in _text(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _left(group: Path, limit: str, usage: str) -> int:
    most, used = _text(group / limit).strip(), _text(group / usage).strip()
    if not most.isdigit() or not used.isdigit() or int(most) > UNLIMITED:
        return UNLIMITED
    return int(most) - int(used)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


class Admission:
    """Lets sandboxes in one after the other, as room allows."""

    def __init__(self, limits: AdmissionLimits) -> None:
        """Nothing is in yet."""
        self.limits = limits
        self.num_in = 0
        self._young: deque[float] = deque()
        self._line = asyncio.Lock()
        self.starting = asyncio.Semaphore(limits.max_starting)
        """Held while a sandbox starts."""

    def shortage(self, max_processes: int, is_extra: bool = False) -> str | None:
        """Why a sandbox of that process limit cannot be let in now; None when it can.

        How many are in does not matter for an extra one.
        """
        limits = self.limits
        if not is_extra and self.num_in >= limits.max_sandboxes:
            return f"{self.num_in} sandboxes are alive, as many as may be"
        now = time.monotonic()
        while self._young and now - self._young[0] > YOUNG_S:
            self._young.popleft()
        left = room()
        expected = (len(self._young) + 1) * limits.footprint_bytes
        if left.available_bytes - expected < limits.reserve_bytes:
            return f"{left.available_bytes // MIB} MiB of memory are available"
        if left.free_processes - max_processes < limits.reserve_processes:
            return f"{left.free_processes} process numbers are free"
        return None

    async def enter(
        self,
        max_processes: int,
        relieve: Callable[[], Awaitable[bool]],
        is_extra: bool = False,
    ) -> None:
        """Wait in line for room; `leave` gives it back. An extra one passes the line and need not.

        While there is none, `relieve` is asked to free something and tells whether it did. Raises
        SandboxError with the shortage after `wait_s`.
        """
        limit = time.monotonic() + self.limits.wait_s
        async with nullcontext() if is_extra else self._line:
            while (why := self.shortage(max_processes, is_extra)) is not None:
                if time.monotonic() > limit:
                    raise SandboxError(f"no room for a sandbox in {self.limits.wait_s} s: {why}")
                if not await relieve():
                    await asyncio.sleep(LOOK_S)
            self.num_in += not is_extra
            self._young.append(time.monotonic())

    def leave(self) -> None:
        """A sandbox that was let in is gone."""
        self.num_in -= 1
