"""All that one store root needs in one process: the Redis server, the index on it, the service.

With `store.redis: embedded` the host owns a private Valkey, starts it first, stops it last, and
starts it again when it dies; the service then rebuilds the index from the files.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path

from k3rl.blobs import BlobStore
from k3rl.config import Config
from k3rl.errors import StoreError
from k3rl.store.compaction import NEVER, Limits
from k3rl.store.gc import References
from k3rl.store.index import LiveIndex
from k3rl.store.redis_server import EmbeddedServer
from k3rl.store.retention import Retention
from k3rl.store.service import StoreService
from k3rl.store.upkeep import Policy

WATCH_S = 0.5
"""How often the embedded server is looked at; well below the index's own patience of 5 s."""
_log = logging.getLogger(__name__)


def policy_of(config: Config, references: References | None) -> Policy:
    """How the store of a run is kept."""
    settings, kept = config.store, config.store.retention
    return Policy(
        limits=Limits(min_batches=settings.compact_batches or NEVER, level=settings.compact_level),
        retention=Retention(kept.keep_updates, kept.max_age_s, kept.max_bytes, kept.untrained),
        grace_s=kept.grace_s,
        references=references,
        checkpoint=partial(oldest_checkpoint, config.run_folder / "checkpoints"),
        min_free_bytes=settings.min_free_bytes,
    )


def oldest_checkpoint(folder: Path) -> int | None:
    """The update of the oldest complete checkpoint, the furthest that a run may roll back to.

    Checkpoints are folders `update-<n>` with a `meta.json`, as the learner writes them.
    """
    folders = (path.parent.name for path in folder.glob("update-*/meta.json"))
    numbers = (name.removeprefix("update-") for name in folders)
    return min((int(number) for number in numbers if number.isdecimal()), default=None)


class StoreHost:
    """Opens the store of a run; `open` and `aclose` may be called again and again."""

    def __init__(self, config: Config, references: References | None = None) -> None:
        """Starts nothing yet. Without `references` blobs are never deleted."""
        self.config = config
        self._policy = policy_of(config, references)
        self.root: Path = config.run_folder / "store"
        self._server: EmbeddedServer | None = None
        self._service: StoreService | None = None
        self._watch: asyncio.Task[None] | None = None

    async def open(self) -> StoreService:
        """The open service. Raises what opening it raises; nothing is left running then."""
        if self._service is not None:
            return self._service
        try:
            url = await self._redis_url()
            settings = self.config.store
            index = LiveIndex.from_url(url, f"k3rl:{self.config.run.name}", settings.lease_ttl_s)
            blobs = BlobStore(self.root / "blobs")
            service = StoreService(
                self.root, blobs, index, lease_ttl_s=settings.lease_ttl_s, policy=self._policy
            )
            await service.open()
        except BaseException:
            await self._stop_server()
            raise
        self._service = service
        return service

    async def aclose(self) -> None:
        """Close the service, then the server."""
        service, self._service = self._service, None
        try:
            if service is not None:
                await service.aclose()
        finally:
            await self._stop_server()

    async def _redis_url(self) -> str:
        if self.config.store.redis != "embedded":
            return self.config.store.redis
        self._server = EmbeddedServer(self.root / "redis")
        url = await self._server.start()
        self._watch = asyncio.create_task(self._keep_running(self._server))
        return url

    async def _keep_running(self, server: EmbeddedServer) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            if not server.is_running:
                _log.warning("the embedded Redis server has died; starting it again")
                try:
                    await server.start()
                except StoreError as error:
                    _log.error("%s", error)

    async def _stop_server(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None
        if self._server is not None:
            await self._server.stop()
            self._server = None
