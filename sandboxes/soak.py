"""Owners that are killed at any moment, again and again, and what is left of them: nothing.

Each owner is a process that makes, uses, forks and closes sandboxes until a SIGKILL hits it. The
next opening of the scratch folder clears up, as it does for every user; then `census` counts.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from k3rl.blobs import BlobStore
from k3rl.errors import SandboxError
from k3rl.sandboxes.base import ExecRequest, run
from k3rl.sandboxes.census import Census, take_census
from k3rl.sandboxes.factory import open_backend
from k3rl.sandboxes.local import LocalBackend
from k3rl.sandboxes.spec import SandboxSpec

SPEC = SandboxSpec(required=())
SCRIPT = "echo x > new; sleep 0.005 & (setsid sleep 60 &) ; echo done"
CHUNK_SANDBOXES = 10
"""An owner is killed after at most so many creations."""
LATEST_S = 0.05
"""The longest pause between its last creation and the kill: any phase of a sandbox's life."""
SETTLE_S = 0.05
"""How long dead processes may take to leave the kernel's lists."""


@dataclass(slots=True)
class Soaked:
    """What a soak has seen."""

    num_created: int = 0
    num_kills: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    """By kind, kills right behind which the census found something: it can see."""
    leaked: list[Census] = field(default_factory=list)
    """What it found behind the next owner's opening and closing."""


def soak(kind: str, folder: Path, num_cycles: int, seed: int = 0) -> Soaked:
    """Create at least `num_cycles` sandboxes under owners that are killed. Blocks.

    Must run in a process without threads, because it forks. Raises SandboxError when owners die by
    themselves.
    """
    moments = random.Random(seed)
    soaked = Soaked()
    owners: set[str] = set()
    scratch = asyncio.run(_clear(_open(kind, folder)))
    while soaked.num_created < num_cycles:
        soaked.num_created += _kill_one(kind, folder, moments)
        soaked.num_kills += 1
        right_behind = take_census(scratch)
        soaked.seen.update(right_behind.kinds())
        owners.update(right_behind.folders)
        asyncio.run(_clear(_open(kind, folder)))
        time.sleep(SETTLE_S)
        census = take_census(scratch, owners)
        if census:
            soaked.leaked.append(census)
    return soaked


def _kill_one(kind: str, folder: Path, moments: random.Random) -> int:
    """Returns how many sandboxes the owner had made."""
    told, tell = os.pipe()
    owner = os.fork()
    if not owner:
        try:
            os.close(told)
            asyncio.run(_live(_open(kind, folder), tell, moments.random()))
        finally:
            os._exit(1)
    os.close(tell)
    try:
        num_created, wanted = 0, moments.randint(1, CHUNK_SANDBOXES)
        while num_created < wanted:
            if not os.read(told, 1):
                raise SandboxError("an owner ended before it was killed")
            num_created += 1
        time.sleep(moments.uniform(0, LATEST_S))
    finally:
        os.close(told)
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
    return num_created


def _open(kind: str, folder: Path) -> LocalBackend:
    backend = open_backend(kind, BlobStore(folder / "blobs"), folder / "scratch", True)
    assert isinstance(backend, LocalBackend)
    return backend


async def _clear(backend: LocalBackend) -> Path:
    """Open and close; returns where the scratch folder is."""
    await backend.connect()
    await backend.aclose()
    return backend.scratch.root


async def _live(backend: LocalBackend, tell: int, seed: float) -> None:
    """Several trajectories side by side, for ever."""
    await backend.connect()
    await asyncio.gather(*(_play(backend, tell, random.Random(f"{seed} {n}")) for n in range(3)))


async def _play(backend: LocalBackend, tell: int, moments: random.Random) -> None:
    while True:
        box = await backend.open_box(SPEC, {"given": b"x"})
        held = [box.id]
        os.write(tell, b"x")
        await run(backend, box.id, ExecRequest(("sh", "-c", SCRIPT)))
        if moments.random() < 0.5:
            await backend.snapshot(box.id, {})
        if moments.random() < 0.3:
            held += await backend.fork(box.id, 2)
            await asyncio.gather(*(run(backend, i, ExecRequest(("true",))) for i in held))
        for each in held:
            await backend.close(each)
