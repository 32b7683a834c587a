"""The live sandboxes of this machine as /proc shows them, and clearing away after dead owners."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from k3rl.sandboxes.processes.guarded import GUARD_SHAPE
from k3rl.sandboxes.processes.orphans import SHAPE, Process, look

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class LiveSandbox:
    """One bubblewrap, or one guard of backend landlock, and what runs inside."""

    pid: int
    """Of the outer process."""
    owner: int
    """The process that started it; it may be gone."""
    uid: int
    is_orphan: bool
    """Its owner is dead, and nothing has ended it yet."""
    age_s: float
    num_processes: int
    """Inside, the agent among them."""
    rss_bytes: int
    """Of all of them; shared pages count for each."""


def live_sandboxes() -> list[LiveSandbox]:
    """Every sandbox of bwrap and landlock that this process may see, oldest first."""
    parents = {pid: parent for pid in _pids() if (parent := _parent(pid)) is not None}
    found = []
    for pid in parents:
        process = look(pid)
        owner = _owner(process) if process else None
        if process is None or owner is None:
            continue
        inside = _below(pid, parents)
        rss_bytes = sum(_rss_bytes(each) for each in [pid, *inside])
        is_left = process.is_ours and process.parent != owner
        found.append(
            LiveSandbox(pid, owner, process.uid, is_left, _age_s(pid), len(inside), rss_bytes)
        )
    return sorted(found, key=lambda each: -each.age_s)


def _owner(process: Process) -> int | None:
    """The process that started an outer process; None for any other process."""
    if shape := SHAPE.match(process.argv):
        return None if process.is_init else int(shape[1])
    if shape := GUARD_SHAPE.match(process.argv):
        above = look(process.parent)
        is_agent = above is not None and GUARD_SHAPE.match(above.argv)
        return None if is_agent else int(shape[1])
    return None


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _fields(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _parent(pid: int) -> int | None:
    fields = _fields(pid)
    return None if fields is None else int(fields[1])


def _below(pid: int, parents: dict[int, int]) -> list[int]:
    """All descendants."""
    found, newest = [], {pid}
    while newest:
        newest = {child for child, parent in parents.items() if parent in newest}
        found += sorted(newest)
    return found


def _age_s(pid: int) -> float:
    fields = _fields(pid)
    if fields is None:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / TICKS_PER_S


def _rss_bytes(pid: int) -> int:
    fields = _fields(pid)
    return 0 if fields is None else int(fields[21]) * PAGE_BYTES
