"""The pool: a backend over another one, for many sandboxes that live long and mostly wait.

    create, restore -> a warm sandbox of the same spec and content, started before it was wanted,
                       else in line for room (admission.py), made, and started in the background

A sandbox that nobody used for `idle_pause_s` is paused, which ends its processes and frees their
memory; the next call on it resumes it. One that nobody used for `lease_s` is closed: its owner has
forgotten it. When room is short the warm ones go first, then idle ones are paused early. What
crashed programs left on this machine is removed now and then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import partial

from k3rl.errors import SandboxError, UserInputError
from k3rl.sandboxes.admission import Admission, PoolLimits
from k3rl.sandboxes.base import (
    TREE_BYTES,
    ExecEvent,
    ExecRequest,
    SandboxBackend,
    SandboxId,
    SandboxStats,
    Seal,
)
from k3rl.sandboxes.lending import Lent
from k3rl.sandboxes.shelves import Shelf, Shelves
from k3rl.sandboxes.spec import MIB, Capability, SandboxSpec
from k3rl.types import Digest, JsonObject, Snapshot, digest_bytes, digest_json

_log = logging.getLogger(__name__)
BUSY_S = 1.0
"""A sandbox that was used so lately is not paused early, however short room is."""


class Pool:
    """Bounds, warms, pauses and expires the sandboxes of a backend, and is a backend itself."""

    def __init__(self, backend: SandboxBackend, limits: PoolLimits | None = None) -> None:
        """Owns `backend` from now on."""
        self.backend, self.limits = backend, limits or PoolLimits()
        self.name = backend.name
        self.admission = Admission(self.limits.admission)
        self.counts: Counter[str] = Counter()
        """Since the start: warm, cold, evicted, idle_paused, expired, reaped."""
        self._lent: dict[SandboxId, Lent] = {}
        self._shelves = Shelves()
        self._tasks: set[asyncio.Task[None]] = set()
        self._keeper: asyncio.Task[None] | None = None
        self._reaped = time.monotonic()
        self._is_drained = False

    async def capabilities(self) -> frozenset[Capability]:
        """Those of the backend."""
        return await self.backend.capabilities()

    async def create(
        self, spec: SandboxSpec, files: Mapping[str, bytes] | None = None
    ) -> SandboxId:
        """A warm sandbox that holds just these files, or a new one when there is room."""
        return await self._take(self._of_files(spec, files or {}))

    async def restore(self, spec: SandboxSpec, snapshot: Snapshot) -> SandboxId:
        """A warm sandbox that holds this snapshot, or a new one when there is room."""
        return await self._take(self._of_snapshot(spec, snapshot))

    async def fork(self, sandbox_id: SandboxId, n: int) -> list[SandboxId]:
        """New ones when there is room for all.

        One fork of each sandbox need not wait for others to end: who is to end by it, such as a
        session that is graded in it, would hold its own place and wait for ever.
        """
        async with self._call(sandbox_id) as host:
            hosts: list[Lent | None] = []
            try:
                for _ in range(n):
                    hosts.append(await self._enter_fork(host))
                twins = await self.backend.fork(sandbox_id, n)
            except BaseException:
                for each in hosts:
                    self._leave(each)
                raise
        for twin, each in zip(twins, hosts, strict=True):
            self._lend(twin).host = each
        return twins

    async def _enter_fork(self, host: Lent | None) -> Lent | None:
        """The sandbox whose extra place it got, if one did."""
        if host is None or host.has_extra or host.host is not None:
            await self.admission.enter(0, self._relieve)
            return None
        host.has_extra = True
        try:
            await self.admission.enter(0, self._relieve, is_extra=True)
        except BaseException:
            host.has_extra = False
            raise
        return host

    def _leave(self, host: Lent | None) -> None:
        if host is None:
            self.admission.leave()
        else:
            host.has_extra = False

    async def warm(
        self, spec: SandboxSpec, n: int, content: Mapping[str, bytes] | Snapshot | None = None
    ) -> None:
        """Have `n` sandboxes of that content started; returns when they are.

        Raises UserInputError when that is more than `num_warm`, SandboxError without room.
        """
        if n > self.limits.num_warm:
            raise UserInputError(
                f"{n} warm sandboxes asked for, num_warm is {self.limits.num_warm}"
            )
        if isinstance(content, Snapshot):
            shelf = self._of_snapshot(spec, content)
        else:
            shelf = self._of_files(spec, content or {})
        for _ in range(n - len(shelf.ready) - len(shelf.coming)):
            self._order(shelf, self._stock(shelf))
        await asyncio.gather(*shelf.coming)

    async def exec(
        self, sandbox_id: SandboxId, request: ExecRequest
    ) -> AsyncGenerator[ExecEvent, None]:
        """Run one command, once the sandbox has started."""
        async with self._call(sandbox_id) as lent:
            if lent is not None and lent.start is not None:
                await asyncio.shield(lent.start)
            async with aclosing(self.backend.exec(sandbox_id, request)) as events:  # type: ignore[type-var]
                async for event in events:
                    yield event

    async def prepare(self, sandbox_id: SandboxId) -> None:
        """Wait until the sandbox has started."""
        async with self._call(sandbox_id) as lent:
            if lent is not None and lent.start is not None:
                await asyncio.shield(lent.start)
            await self.backend.prepare(sandbox_id)

    async def put(self, sandbox_id: SandboxId, path: str, data: bytes, mode: int = 0o644) -> None:
        """As the backend does it."""
        async with self._call(sandbox_id):
            await self.backend.put(sandbox_id, path, data, mode)

    async def get(self, sandbox_id: SandboxId, path: str, max_bytes: int = 16 * MIB) -> bytes:
        """As the backend does it."""
        async with self._call(sandbox_id):
            return await self.backend.get(sandbox_id, path, max_bytes)

    async def put_tree(
        self,
        sandbox_id: SandboxId,
        path: str,
        chunks: AsyncIterator[bytes],
        max_bytes: int = TREE_BYTES,
    ) -> None:
        """As the backend does it."""
        async with self._call(sandbox_id):
            await self.backend.put_tree(sandbox_id, path, chunks, max_bytes)

    async def get_tree(
        self, sandbox_id: SandboxId, path: str, max_bytes: int = TREE_BYTES
    ) -> AsyncGenerator[bytes, None]:
        """As the backend does it."""
        async with self._call(sandbox_id):
            chunks = self.backend.get_tree(sandbox_id, path, max_bytes)
            async with aclosing(chunks):  # type: ignore[type-var]
                async for chunk in chunks:
                    yield chunk

    async def pause(self, sandbox_id: SandboxId) -> None:
        """Until `resume`, whatever the pool does."""
        async with self._call(sandbox_id) as lent:
            await self.backend.pause(sandbox_id)
            if lent is not None:
                lent.is_paused = True

    async def resume(self, sandbox_id: SandboxId) -> None:
        """Undo `pause`."""
        async with self._call(sandbox_id) as lent:
            await self.backend.resume(sandbox_id)
            if lent is not None:
                lent.is_paused = False

    async def seal(self, sandbox_id: SandboxId, session: JsonObject) -> Seal:
        """As the backend does it."""
        async with self._call(sandbox_id):
            return await self.backend.seal(sandbox_id, session)

    async def settle(self, sandbox_id: SandboxId, seal: Seal) -> Snapshot:
        """As the backend does it; the sandbox itself is not used by that."""
        return await self.backend.settle(sandbox_id, seal)

    async def snapshot(self, sandbox_id: SandboxId, session: JsonObject) -> Snapshot:
        """As the backend does it."""
        async with self._call(sandbox_id):
            return await self.backend.snapshot(sandbox_id, session)

    async def tree_digest(self, sandbox_id: SandboxId) -> Digest:
        """As the backend does it."""
        async with self._call(sandbox_id):
            return await self.backend.tree_digest(sandbox_id)

    async def stats(self, sandbox_id: SandboxId) -> SandboxStats:
        """As the backend tells it; a look at it is no use of it."""
        return await self.backend.stats(sandbox_id)

    async def close(self, sandbox_id: SandboxId) -> None:
        """Kill what runs and free its files and its room."""
        lent = self._lent.pop(sandbox_id, None)
        if lent is not None:
            self._leave(lent.host)
        await self.backend.close(sandbox_id)

    async def reap(self) -> list[str]:
        """As the backend does it."""
        return await self.backend.reap()

    async def drain(self) -> None:
        """Stop looking after sandboxes, and close the warm ones."""
        self._is_drained = True
        tasks = [*self._tasks, *([self._keeper] if self._keeper else [])]
        self._keeper = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while await self._evict():
            pass

    async def aclose(self) -> None:
        """Close every sandbox, warm ones too, and the backend."""
        await self.drain()
        await self.backend.aclose()

    def _of_files(self, spec: SandboxSpec, files: Mapping[str, bytes]) -> Shelf:
        held = dict(files)
        content = digest_json({path: digest_bytes(data) for path, data in held.items()})
        make = partial(self.backend.create, spec, held)
        return self._shelves.of((spec.digest, content), spec, make)

    def _of_snapshot(self, spec: SandboxSpec, snapshot: Snapshot) -> Shelf:
        make = partial(self.backend.restore, spec, snapshot)
        return self._shelves.of((spec.digest, snapshot.snapshot_id), spec, make)

    async def _take(self, shelf: Shelf) -> SandboxId:
        if not self._is_drained:
            self._keeper = self._keeper or asyncio.ensure_future(self._keep())
        taken = self._shelves.take(shelf)
        self.counts["cold" if taken is None else "warm"] += 1
        if taken is None:
            taken = await self._make(shelf)
            self._begin(taken, self._lend(taken))
        else:
            self._lend(taken)
        if self.limits.num_warm and not (shelf.ready or shelf.coming):
            self._order(shelf, self._restock(shelf))
        return taken

    def _lend(self, sandbox_id: SandboxId) -> Lent:
        lent = self._lent[sandbox_id] = Lent(time.monotonic())
        return lent

    async def _make(self, shelf: Shelf) -> SandboxId:
        await self.admission.enter(shelf.spec.limits.max_processes, self._relieve)
        try:
            return await shelf.make()
        except BaseException:
            self.admission.leave()
            raise

    async def _stock(self, shelf: Shelf) -> None:
        """One more warm sandbox of a kind, in the place of the oldest when there are enough."""
        made = await self._make(shelf)
        await self._prepare(made)
        self._shelves.add(shelf, made)
        while len(self._shelves) > self.limits.num_warm:
            await self._evict()

    def _order(self, shelf: Shelf, work: Coroutine[None, None, None]) -> None:
        task = self._spawn(work)
        shelf.coming.add(task)
        task.add_done_callback(shelf.coming.discard)

    async def _restock(self, shelf: Shelf) -> None:
        if self.admission.shortage(shelf.spec.limits.max_processes) is None:
            try:
                await self._stock(shelf)
            except SandboxError as error:
                _log.warning("no warm sandbox: %s", error)

    async def _evict(self) -> bool:
        """Close a warm sandbox; False when there is none."""
        oldest = self._shelves.oldest()
        if oldest is not None:
            await self._let_go(oldest)
        return oldest is not None

    async def _let_go(self, sandbox_id: SandboxId) -> None:
        self.counts["evicted"] += 1
        self.admission.leave()
        await self.backend.close(sandbox_id)

    def _begin(self, sandbox_id: SandboxId, lent: Lent) -> None:
        """Start a sandbox while its owner is still thinking about the first command."""
        lent.start = self._spawn(self._prepare(sandbox_id))

    async def _prepare(self, sandbox_id: SandboxId) -> None:
        async with self.admission.starting:
            try:
                await self.backend.prepare(sandbox_id)
            except SandboxError as error:  # the first command meets it again
                _log.info("sandbox %s did not start: %s", sandbox_id, error)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @asynccontextmanager
    async def _call(self, sandbox_id: SandboxId) -> AsyncIterator[Lent | None]:
        """Around every use of a sandbox: it is not idle, and awake."""
        lent = self._lent.get(sandbox_id)
        if lent is None:
            yield None  # the backend tells what is wrong with it
            return
        lent.num_calls += 1
        try:
            async with lent.lock:
                if lent.is_idle:
                    await self.backend.resume(sandbox_id)
                    lent.is_idle = False
                    self._begin(sandbox_id, lent)
            yield lent
        finally:
            lent.num_calls -= 1
            lent.used = time.monotonic()

    async def _relieve(self) -> bool:
        """Free some memory; False when nothing can be freed."""
        if await self._evict():
            return True
        idle = sorted(self._lent.items(), key=lambda item: item[1].used)
        for sandbox_id, lent in idle:
            if time.monotonic() - lent.used > BUSY_S and await self._pause(sandbox_id, lent):
                return True
        return False

    async def _pause(self, sandbox_id: SandboxId, lent: Lent) -> bool:
        """Pause a sandbox that nobody uses; False when that is not so."""
        async with lent.lock:
            if lent.num_calls or lent.is_idle or lent.is_paused:
                return False
            await self.backend.pause(sandbox_id)
            lent.is_idle, lent.start = True, None
            self.counts["idle_paused"] += 1
            return True

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self.limits.tick_s)
            try:
                await self._look_after()
            except SandboxError as error:
                _log.warning("the pool of backend %s: %s", self.name, error)

    async def _look_after(self) -> None:
        now = time.monotonic()
        for sandbox_id, lent in list(self._lent.items()):
            unused_s = now - lent.used
            if lent.num_calls:
                continue
            if unused_s > self.limits.lease_s:
                _log.warning("sandbox %s was forgotten: closed", sandbox_id)
                self.counts["expired"] += 1
                await self.close(sandbox_id)
            elif unused_s > self.limits.idle_pause_s:
                await self._pause(sandbox_id, lent)
        for sandbox_id in self._shelves.expired(self.limits.warm_s):
            await self._let_go(sandbox_id)
        if now - self._reaped > self.limits.reap_every_s:
            self._reaped = now
            self.counts["reaped"] += len(await self.reap())
