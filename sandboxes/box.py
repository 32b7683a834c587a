"""One sandbox on the inside of a backend: its workspace, what runs in it, what of it is durable."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from k3rl.sandboxes.base import SandboxId
from k3rl.sandboxes.files.weights import NO_WEIGHT, Weight
from k3rl.sandboxes.files.workspace import Workspace
from k3rl.sandboxes.processes.launch import Child
from k3rl.sandboxes.processes.live import Live
from k3rl.sandboxes.snapshots import Job
from k3rl.sandboxes.spec import SandboxSpec


@dataclass(slots=True, eq=False)
class Box:
    """One sandbox, on the inside of a backend."""

    id: SandboxId
    spec: SandboxSpec
    workspace: Workspace
    job: Job
    """The last one to make it durable."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    child: Child | None = None
    live: Live | None = None
    """What runs its commands, in backends that keep one."""
    weight: Weight = NO_WEIGHT
    """Of the workspace, when it was last looked at."""
    gone: Weight | None = None
    """What the file system had lost until then; see disk.py."""
    is_paused: bool = False
    is_closed: bool = False
    created: float = field(default_factory=time.monotonic)
    num_execs: int = 0
    exec_s: float = 0.0


def rest(box: Box) -> None:
    """End what runs a sandbox's commands: its mount would not see a change from outside."""
    if box.live is not None:
        box.live.destroy()
        box.live = None
