"""A sandbox backend for one command, in a folder that goes with it."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from k3rl.blobs import BlobStore
from k3rl.sandboxes.base import SandboxBackend
from k3rl.sandboxes.factory import open_backend

R = TypeVar("R")


async def with_backend(kind: str, work: Callable[[SandboxBackend, Path], Awaitable[R]]) -> R:
    """What `work(backend, folder)` gives; the backend is closed and the folder removed after it."""
    with tempfile.TemporaryDirectory(prefix="k3rl-sandbox-") as name:
        folder = Path(name)
        backend = open_backend(kind, BlobStore(folder / "blobs"), folder / "scratch", True)
        try:
            return await work(backend, folder)
        finally:
            await backend.aclose()
