"""Builders shared by the sandbox tests."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from k3rl.blobs import BlobStore
from k3rl.sandboxes.base import ExecRequest, ExecResult, SandboxBackend, SandboxSpec, run
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
