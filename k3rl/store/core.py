"""The engine room of the service: one change at a time per trajectory, sealing, reading.

decide (LiveState) -> journal (group commit) -> apply (StoreState) -> answer
                                                |
                                                +-> IndexMirror: Redis follows
finished trajectories -> seal -> Parquet + manifest record -> journal files go
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from k3rl.blobs import BlobStore, fsync_folder
from k3rl.errors import CorruptData, StoreError
from k3rl.store.arrow import warm
from k3rl.store.events import Event, FileStart, Finished, StepCommitted, VersionRow
from k3rl.store.index import LiveIndex
from k3rl.store.journal import FILE_BYTES, Journal, JournalWriter, Place
from k3rl.store.live import LiveState
from k3rl.store.manifest import with_pin
from k3rl.store.mirror import IndexMirror
from k3rl.store.protocol import UpdateRow
from k3rl.store.record import Piece
from k3rl.store.recovery import RootLock, next_service_epoch, recover
from k3rl.store.sampler import Sampler
from k3rl.store.sealing import MAX_BATCH_TOKENS, seal
from k3rl.store.space import DiskGate
from k3rl.store.state import StoreState
from k3rl.store.tokens import FIELDS, TokenFiles, Tokens
from k3rl.store.turns import Turns
from k3rl.store.upkeep import Policy, Upkeep
from k3rl.types import TokenFrame, TrajectoryId

LEASE_TTL_S = 60.0
"""A worker that neither claims nor writes for so long is taken for dead."""
SEAL_TOKENS = 2_000_000
"""Finished tokens in the journal that start a round of sealing."""
READ_ATTEMPTS = 5
"""A read whose file was sealed, or written again, under its hands looks again."""
READ_AT_ONCE = 2
"""Pieces that are read on the event loop when no disk is needed: 0.2 ms each."""
NO_TRAJECTORY = (UpdateRow, VersionRow, FileStart)
"""Events that are of none."""
NO_CHANGE = (TokenFrame, StepCommitted)
"""Events after which a trajectory is in the same state."""
T = TypeVar("T")
_log = logging.getLogger(__name__)


class Signal:
    """Wakes everybody who waits. Arm before looking, so that no wake-up is missed."""

    def __init__(self) -> None:
        """Nobody waits."""
        self._event = asyncio.Event()

    def wake(self) -> None:
        """Wake whoever armed before."""
        self._event.set()
        self._event = asyncio.Event()

    def arm(self) -> Callable[[float], Awaitable[None]]:
        """A function that waits up to so many seconds for a `wake` from now on."""
        event = self._event

        async def wait(timeout_s: float) -> None:
            # Not wait_for: on Python 3.11 it may swallow a cancellation that meets a wake-up.
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await event.wait()

        return wait


class StoreCore:
    """What `StoreService` is built on; see there."""

    def __init__(
        self,
        root: Path,
        blobs: BlobStore,
        index: LiveIndex,
        *,
        lease_ttl_s: float = LEASE_TTL_S,
        seal_tokens: int = SEAL_TOKENS,
        journal_file_bytes: int = FILE_BYTES,
        policy: Policy | None = None,
    ) -> None:
        """Touches nothing yet. `index` is opened and closed with the store."""
        self._policy = policy or Policy()
        self.root = Path(root)
        self._blobs = blobs
        self._index = index
        self._lease_ttl_s = lease_ttl_s
        self._seal_tokens = seal_tokens
        self._journal_file_bytes = journal_file_bytes
        self._is_open = False
        self._turns = Turns()
        self._seen: dict[str, float] = {}
        self._waiting: Counter[str] = Counter()
        self._work, self._changed = Signal(), Signal()
        self._seal_lock = asyncio.Lock()
        self._seal_wanted = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sealing: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Lock the root, recover, fill the index. Raises StoreError, CorruptData, SchemaTooNew."""
        lock = await asyncio.to_thread(RootLock, self.root)
        mirror: IndexMirror | None = None
        try:
            self._state: StoreState = await asyncio.to_thread(recover, self.root, True)
            self._live: LiveState = self._state.live
            self._files = TokenFiles(self.root, self._live.sealed.files)
            self._sampler = Sampler(self._state.manifest, self._live.sealed.catalog)
            self._mirror = mirror = IndexMirror(self._index, self._live)
            await mirror.open()
            writer = await asyncio.to_thread(self._writer)
            self._journal = Journal(writer, self._apply, self._ended)
            policy = self._policy
            self._gate = DiskGate(self.root, policy.min_free_bytes, policy.admission_wait_s)
            self._upkeep = Upkeep(
                self.root,
                self._state,
                self._blobs,
                policy,
                self._seal_lock,
                time.time() - 1,
                lambda: self._gate.is_open,
            )
        except BaseException:
            if mirror is not None:
                await mirror.aclose()
                self._live.sealed.files.close()
            lock.release()
            raise
        self._lock = lock
        self._state.usage.setdefault(self._journal.current_file, set())
        self._seen = dict.fromkeys(self._live.workers(), time.monotonic())
        self._is_open, self._closing = True, None
        self._spawn(self._reap_silent())
        self._spawn(self._seal_when_wanted())
        self._spawn(asyncio.to_thread(warm))
        self._spawn(self._upkeep.run())
        self._spawn(self._gate.watch(self._room_changed))

    def _room_changed(self) -> None:
        self._work.wake()
        self._upkeep.wake()

    async def aclose(self) -> None:
        """Seal what is finished, stop, and leave the files complete. Closing twice is fine.

        A caller that goes away does not stop it: the root stays locked until all writing has ended.
        """
        if self._is_open:
            self._is_open = False
            self._closing = asyncio.create_task(self._close())
        if self._closing is not None and not self._closing.done():
            await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._work.wake()
        self._changed.wake()
        try:
            await self._upkeep.aclose()
            await self._journal.flush()
            if self._journal.error is None:
                await self._seal()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.gather(*self._sealing, return_exceptions=True)
            await self._journal.aclose()
            await self._mirror.aclose()
            self._files.forget(list(self._state.usage))
            self._live.sealed.files.close()
            self._lock.release()

    async def reap(self, worker_id: str) -> list[TrajectoryId]:
        """Fence a dead worker's claims and queue them at the front."""
        self._check_open()
        held = self._live.held_by(worker_id)
        moved = await self._move(held, lambda id: self._live.reap(id, worker_id))
        await self._mirror.take_over(worker_id, moved)
        self._work.wake()
        return moved

    def _check_open(self) -> None:
        if not self._is_open:
            raise StoreError(f"{self.root}: the store is closed")

    async def _write(self, id: TrajectoryId, decide: Callable[[], tuple[Event | None, T]]) -> T:
        """Decide in the trajectory's turn, journal the event if there is one, then answer.

        A turn lasts until its event is durable, also when whoever asked has gone away.
        """
        self._check_open()
        if not self._turns.take(id):
            await self._turns.wait(id)
        try:
            self._check_open()
            self._is_alive(id)
            event, answer = decide()
            future = None if event is None else self._journal.submit(event)
        except BaseException:
            self._turns.end(id)
            raise
        if future is None:
            self._turns.end(id)
        else:
            await future
        return answer

    def _ended(self, event: Event) -> None:
        if not isinstance(event, NO_TRAJECTORY):
            self._turns.end(event.id)

    def _is_alive(self, id: TrajectoryId) -> None:
        """A write on a claimed trajectory is a sign of life of the worker that holds it."""
        record = self._live.records.get(id)
        if record is not None and record.worker_id is not None:
            self._seen[record.worker_id] = time.monotonic()

    async def _record(self, row: UpdateRow | VersionRow) -> None:
        await self._journal.submit(row)

    def _apply(self, event: Event, sequence: int, place: Place) -> None:
        """The event is durable: from here on it is visible."""
        self._state.apply(event, sequence, place)
        if isinstance(event, NO_TRAJECTORY):
            return
        self._mirror.mark(event.id)
        if not isinstance(event, NO_CHANGE):
            self._changed.wake()
        if isinstance(event, Finished) and self._state.unsealed_tokens >= self._seal_tokens:
            self._seal_wanted.set()

    async def _move(
        self, ids: list[TrajectoryId], decide: Callable[[TrajectoryId], Event | None]
    ) -> list[TrajectoryId]:
        """Journal a move to the front for each, the last one first, so that they keep order."""

        def decided(id: TrajectoryId) -> tuple[Event | None, bool]:
            event = decide(id)
            return event, event is not None

        backwards = ids[::-1]
        moves = [self._write(id, partial(decided, id)) for id in backwards]
        moved = await asyncio.gather(*moves)
        return [id for id, was in zip(backwards, moved, strict=True) if was][::-1]

    async def _load_many(
        self, places: Callable[[], list[list[Piece]]], fields: tuple[str, ...] = FIELDS
    ) -> list[Tokens]:
        """Tokens of each list of pieces.

        A few that are in memory are read here and now: a thread would take longer to come round.
        """
        wanted = places()
        if sum(map(len, wanted)) <= READ_AT_ONCE:
            with suppress(BlockingIOError, FileNotFoundError):
                return self._files.load_many(wanted, fields, False)
        return await self._still(lambda: partial(self._files.load_many, places(), fields))

    async def _still(self, look_up: Callable[[], Callable[[], T]]) -> T:
        """What is looked up here and read in a thread; again when its files went meanwhile."""
        for _ in range(READ_ATTEMPTS):
            try:
                return await asyncio.to_thread(look_up())
            except FileNotFoundError as error:
                missing = str(error.filename)
        raise CorruptData(missing, 0, "file", "holds tokens but is missing")

    async def _context_frame(self, id: TrajectoryId, epoch: int) -> TokenFrame | None:
        """All acknowledged tokens of the present context; None when there are none."""
        record = self._live.record(id)
        number = record.context_number
        end = record.contexts[number].acked
        if end == 0:
            return None
        pieces = partial(self._live.pieces, id, number, 0, end, acked=True)
        (tokens,) = await self._load_many(lambda: [pieces()])
        return TokenFrame(id, epoch, 0, *tokens, context=number)

    async def _seal(self, pin: str | None = None) -> None:
        """Seal what has finished so far, in rounds; the last record is pinned when asked.

        A pin with a name stays until it is let go.

        It runs to its end even when the caller goes away: memory must follow a record that is
        linked, or no later one could be written.
        """
        task = asyncio.create_task(self._seal_rounds(pin))
        self._sealing.add(task)
        task.add_done_callback(self._sealing.discard)
        await asyncio.shield(task)

    async def _seal_rounds(self, pin: str | None) -> None:
        async with self._seal_lock:
            state, target = self._state, self._state.last_sequence
            while state.has_unsealed(target):
                low_water, through = await self._journal.rotate()
                state.usage.setdefault(self._journal.current_file, set())
                batch = state.batch(low_water, through, MAX_BATCH_TOKENS)
                draft = with_pin(state.seal_record(batch), pin, state.manifest.head.seq + 1)
                record, added = await asyncio.to_thread(
                    seal, self.root, state.manifest, self._files, batch, draft
                )
                gone = state.sealed(batch, record, added)
                await asyncio.to_thread(_delete, self.root / "journal", gone)
                self._files.forget(gone)
                self._upkeep.sealed()
            head = state.manifest.head
            is_named = not pin or (pin, head.seq) in head.pins
            if pin is not None and not (head.is_pinned and is_named):
                pinned = with_pin(state.next_record(), pin, head.seq + 1)
                state.take(await asyncio.to_thread(state.manifest.write, pinned), None)

    async def _seal_when_wanted(self) -> None:
        while True:
            await self._seal_wanted.wait()
            self._seal_wanted.clear()
            try:
                await self._seal()
            except Exception as error:
                is_known = isinstance(error, StoreError)
                _log.error(
                    "sealing failed, tokens stay in the journal: %s", error, exc_info=not is_known
                )

    async def _reap_silent(self) -> None:
        """A round that comes late says nothing of the workers: nobody could be heard meanwhile."""
        period_s = self._lease_ttl_s / 4
        while True:
            asked = time.monotonic()
            await asyncio.sleep(period_s)
            late_s = time.monotonic() - asked - period_s
            if late_s > period_s:
                _log.warning("the store's event loop stood still for %.1f s", late_s)
                self._seen = {worker: at + late_s for worker, at in self._seen.items()}
                continue
            oldest = time.monotonic() - self._lease_ttl_s
            for worker_id in self._live.workers():
                if self._waiting[worker_id] <= 0 and self._seen.get(worker_id, 0.0) < oldest:
                    await self._reap_one(worker_id)

    async def _reap_one(self, worker_id: str) -> None:
        try:
            ids = await self.reap(worker_id)
        except StoreError as error:
            _log.error("worker %s is silent and cannot be reaped: %s", worker_id, error)
        else:
            _log.warning("worker %s is silent: reaped %d claims", worker_id, len(ids))

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _writer(self) -> JournalWriter:
        return JournalWriter(
            self.root / "journal",
            next_service_epoch(self.root),
            self._state.last_sequence + 1,
            self._journal_file_bytes,
        )


def _delete(folder: Path, names: list[str]) -> None:
    try:
        for name in names:
            (folder / name).unlink(missing_ok=True)
        fsync_folder(folder)
    except OSError as error:
        # Recovery knows them as left over.
        _log.warning("%s: sealed journal files stay until the next start: %s", folder, error)
