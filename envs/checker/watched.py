"""A backend that keeps count of what is open, and of what failed, on the way to a real one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

from k3rl.errors import SandboxError
from k3rl.sandboxes.base import ExecEvent, ExecRequest, SandboxBackend, SandboxId
from k3rl.sandboxes.spec import SandboxSpec
from k3rl.types import Snapshot


class Watched:
    """Passes every call on to `inner`; see `of`. `aclose` closes what was opened here, only."""

    def __init__(self, inner: SandboxBackend) -> None:
        self.inner = inner
        self.name = inner.name
        self.live: set[SandboxId] = set()
        """Opened here and not closed."""
        self.num_refused = 0
        """Commands that ended in a SandboxError."""

    def as_backend(self) -> SandboxBackend:
        """Itself, for who asks for the whole protocol: what is not here the inner one does."""
        return cast(SandboxBackend, self)

    def __getattr__(self, name: str) -> Any:
        """Every other method is the inner one's."""
        return getattr(self.inner, name)

    async def create(
        self, spec: SandboxSpec, files: Mapping[str, bytes] | None = None
    ) -> SandboxId:
        """See `SandboxBackend.create`."""
        id = await self.inner.create(spec, files)
        self.live.add(id)
        return id

    async def restore(self, spec: SandboxSpec, snapshot: Snapshot) -> SandboxId:
        """See `SandboxBackend.restore`."""
        id = await self.inner.restore(spec, snapshot)
        self.live.add(id)
        return id

    async def fork(self, sandbox_id: SandboxId, n: int) -> list[SandboxId]:
        """See `SandboxBackend.fork`."""
        try:
            ids = await self.inner.fork(sandbox_id, n)
        except SandboxError:
            self.num_refused += 1
            raise
        self.live.update(ids)
        return ids

    async def exec(self, sandbox_id: SandboxId, request: ExecRequest) -> AsyncIterator[ExecEvent]:
        """See `SandboxBackend.exec`."""
        try:
            async for event in self.inner.exec(sandbox_id, request):
                yield event
        except SandboxError:
            self.num_refused += 1
            raise

    async def get(self, sandbox_id: SandboxId, path: str, *rest: Any) -> bytes:
        """See `SandboxBackend.get`."""
        try:
            return await self.inner.get(sandbox_id, path, *rest)
        except SandboxError:
            self.num_refused += 1
            raise

    async def close(self, sandbox_id: SandboxId) -> None:
        """See `SandboxBackend.close`."""
        await self.inner.close(sandbox_id)
        self.live.discard(sandbox_id)

    async def aclose(self) -> None:
        """Close what was opened here and is still open."""
        for id in sorted(self.live):
            await self.close(id)
