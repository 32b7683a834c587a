"""What one session makes of a backend: every sandbox has one owner, and is closed in the end.

A session's tools and its grader make sandboxes too (forks, for instance), and any of them can be
cancelled or fail at any point. This view of a backend notes each sandbox before its maker can be
interrupted, so that `close_all` misses none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from k3rl.errors import SandboxError
from k3rl.sandboxes.base import SandboxBackend, SandboxId
from k3rl.sandboxes.blocking import unbroken
from k3rl.sandboxes.spec import SandboxSpec
from k3rl.types import Snapshot

M = TypeVar("M", SandboxId, list[SandboxId])
CLOSE_TRIES = 5
RETRY_S = 0.02
"""Before the second try to close; each further one waits twice as long."""
_log = logging.getLogger(__name__)


class OwnedBackend:
    """A SandboxBackend whose sandboxes are closed together; all else is the inner backend's."""

    def __init__(self, backend: SandboxBackend, close_s: float = 30.0) -> None:
        """`close_s`: seconds that one try to close a sandbox may take."""
        self._inner, self._close_s = backend, close_s
        self._ids: set[SandboxId] = set()
        self._making: set[asyncio.Task[Any]] = set()
        self._is_over = False

    def __getattr__(self, name: str) -> Any:
        """Whatever is not about owning."""
        return getattr(self._inner, name)

    async def create(
        self, spec: SandboxSpec, files: Mapping[str, bytes] | None = None
    ) -> SandboxId:
        """A sandbox of the inner backend, owned."""
        return await self._own(self._inner.create(spec, files))

    async def restore(self, spec: SandboxSpec, snapshot: Snapshot) -> SandboxId:
        """Likewise."""
        return await self._own(self._inner.restore(spec, snapshot))

    async def fork(self, sandbox_id: SandboxId, n: int) -> list[SandboxId]:
        """Likewise."""
        return await self._own(self._inner.fork(sandbox_id, n))

    async def close(self, sandbox_id: SandboxId) -> None:
        """Close one; if the backend refuses again and again, `close_all` tries once more."""
        await unbroken(self._close(sandbox_id))

    async def close_all(self) -> int:
        """Close whatever the session made; returns how many sandboxes had to be left behind.

        A caller, however often cancelled, waits for it to end.
        """
        return await unbroken(self._close_all())

    async def _own(self, making: Coroutine[Any, Any, M]) -> M:
        task = asyncio.create_task(self._make(making))
        self._making.add(task)
        try:
            made = await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            raise
        except BaseException:
            self._making.discard(task)
            raise
        self._making.discard(task)
        return made

    async def _make(self, making: Coroutine[Any, Any, M]) -> M:
        made = await making
        ids = [made] if isinstance(made, str) else made
        self._ids.update(ids)
        if self._is_over:
            await asyncio.gather(*map(self._close, ids))
        return made

    async def _close_all(self) -> int:
        self._is_over = True
        if self._making:
            ended, hanging = await asyncio.wait(self._making, timeout=self._close_s)
            for task in ended:
                if not task.cancelled():
                    task.exception()
        else:
            hanging = set()
        await asyncio.gather(*map(self._close, list(self._ids)))
        return len(self._ids) + len(hanging)

    async def _close(self, sandbox_id: SandboxId) -> None:
        error: Exception | None = None
        for attempt in range(CLOSE_TRIES):
            try:
                async with asyncio.timeout(self._close_s):
                    await self._inner.close(sandbox_id)
            except (SandboxError, TimeoutError) as refusal:
                error = refusal
                await asyncio.sleep(RETRY_S * 2**attempt)
            else:
                self._ids.discard(sandbox_id)
                return
        _log.warning("sandbox %s is left behind: %r", sandbox_id, error)
