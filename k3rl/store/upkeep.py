"""Compaction and garbage collection of one store, while it is in use or by itself.

The heavy work runs in threads, on what no longer changes; only the record at its end waits for the
turn that seals share. So appends, seals and reads go on all the while.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from k3rl.blobs import BlobStore
from k3rl.errors import StoreError
from k3rl.store import compaction
from k3rl.store.compaction import NEVER, Limits
from k3rl.store.events import VersionRow
from k3rl.store.gc import (
    GRACE_S,
    BlobGarbage,
    GcReport,
    Names,
    References,
    blob_garbage,
    delete_files,
    due_files,
)
from k3rl.store.manifest import ManifestRecord
from k3rl.store.protocol import UpdateRow
from k3rl.store.retention import (
    MAX_DROPS,
    Needs,
    Retention,
    Spent,
    expendable,
    needed,
    needs_of,
)
from k3rl.store.state import StoreState
from k3rl.types import TrajectoryId

PERIOD_S = 300.0
"""Between two looks for garbage."""
T = TypeVar("T")
_log = logging.getLogger(__name__)


class Stopped(StoreError):
    """The store is being closed: what was under way is given up, and nothing changed."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How a store is kept."""

    limits: Limits = field(default_factory=Limits)
    retention: Retention = field(default_factory=Retention)
    grace_s: float = GRACE_S
    """How long garbage stays."""
    references: References | None = None
    """Without it blobs are left alone: nobody can say what a layer names."""
    checkpoint: Callable[[], int | None] = lambda: None
    """The update of the oldest checkpoint there is; None: there is none."""
    min_free_bytes: int = 0
    """With less room on the disk nothing new begins, and nothing is compacted."""
    admission_wait_s: float = 60.0
    """How long what would begin waits for room before it fails."""


class Upkeep:
    """Compacts and collects one store; one round at a time."""

    def __init__(
        self,
        root: Path,
        state: StoreState,
        blobs: BlobStore,
        policy: Policy,
        record_turn: asyncio.Lock,
        put_before: float | None = None,
        has_room: Callable[[], bool] = lambda: True,
    ) -> None:
        """`record_turn` is held by whoever writes a record. Without room it only collects.

        Blobs put after `put_before` (Unix time) are nobody's business here: processes that are
        alive may rely on them although nothing names them yet.
        """
        self.policy = policy
        self.num_rewritten = 0
        """Batches, since opening."""
        self.num_deleted_bytes = 0
        self.branching: Counter[TrajectoryId] = Counter()
        """Off which trajectories children are about to branch."""
        self.dropping: frozenset[TrajectoryId] = frozenset()
        """What the record that is being written lets go."""
        self._root, self._state, self._blobs = root, state, blobs
        self._record_turn, self._put_before = record_turn, put_before
        self._has_room = has_room
        self._names = Names(blobs, policy.references) if policy.references else None
        self._turn = asyncio.Lock()
        self._stop = threading.Event()
        self._wanted = asyncio.Event()
        self._round: asyncio.Task[None] | None = None

    @contextmanager
    def about_to_branch(self, parent: TrajectoryId) -> Iterator[None]:
        """A child is being made: its parent stays. Raises StoreError when it is going."""
        if parent in self.dropping:
            raise StoreError(f"trajectory {parent} is unknown: it is being let go")
        self.branching[parent] += 1
        try:
            yield
        finally:
            self.branching[parent] -= 1
            self.branching += Counter()

    def sealed(self) -> None:
        """A batch was added: there may be enough of them."""
        if compaction.plan(self._state.live.sealed.catalog, self.policy.limits):
            self.wake()

    def wake(self) -> None:
        """Look now."""
        self._wanted.set()

    async def run(self) -> None:
        """Compact when there is enough, and collect now and then, until cancelled."""
        collected = time.monotonic()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await self._wanted.wait()
            self._wanted.clear()
            if self._stop.is_set():
                return
            is_time = time.monotonic() - collected >= PERIOD_S
            collected = time.monotonic() if is_time else collected
            self._round = asyncio.create_task(self._one_round(is_time))
            await asyncio.shield(self._round)

    async def aclose(self) -> None:
        """Give up what is under way; returns once nothing writes any more."""
        self._stop.set()
        if self._round is not None:
            await asyncio.wait([self._round])

    async def unpin(self, name: str) -> None:
        """Let go of what a name keeps, if it keeps anything."""
        async with self._record_turn:
            state = self._state
            pins = tuple(pin for pin in state.manifest.head.pins if pin[0] != name)
            if pins != state.manifest.head.pins:
                draft = replace(state.next_record(), pins=pins)
                state.take(await asyncio.to_thread(state.manifest.write, draft), None)

    async def compact(self) -> int:
        """Write small batches again as few; returns how many were."""
        async with self._turn:
            return await self._compact()

    async def collect(self) -> GcReport:
        """Let go what the policy lets go, and delete what is garbage since long enough."""
        async with self._turn:
            report, now = GcReport(), time.time()
            retired, marks = set(self._state.manifest.retired), dict(self._state.manifest.garbage)
            await self._drop(report, now)
            if self._has_room():
                report.num_rewritten = await self._compact(
                    self.policy.limits._replace(min_batches=NEVER)
                )
            due, waiting = due_files(self._root, self._state.manifest, now, self.policy.grace_s)
            report.files = {path: size for path, size in due.items() if path in retired}
            report.waiting_files = waiting | {p: s for p, s in due.items() if p not in retired}
            await asyncio.to_thread(delete_files, self._root, report.files)
            if self._names is not None:
                await self._collect_blobs(self._names, report, marks, now)
            self.num_deleted_bytes += sum(report.files.values()) + sum(report.blobs.values())
            return report

    async def _one_round(self, is_time: bool) -> None:
        try:
            has_room = self._has_room()
            if has_room:
                await self.compact()
            if is_time or not has_room:
                await self.collect()
        except Stopped:
            pass
        except Exception as error:
            is_known = isinstance(error, StoreError | OSError)
            _log.error("upkeep failed, the store is as it was: %s", error, exc_info=not is_known)

    async def _compact(self, limits: Limits | None = None) -> int:
        state, limits, count = self._state, limits or self.policy.limits, 0
        manifest = state.manifest
        while batches := compaction.plan(state.live.sealed.catalog, limits):
            snapshots = needs_of(state.live).snapshots
            done = await asyncio.to_thread(
                compaction.rewrite,
                self._root,
                manifest,
                batches,
                limits.level,
                snapshots,
                self._check,
            )
            async with self._record_turn:
                await self._write(compaction.draft(state, done), done)
            count += len(batches)
        for table in ("updates", "versions"):
            if len(manifest.files_of(table)) >= max(limits.min_batches, 2):
                # In its turn: rows that are sealed meanwhile must come after these.
                async with self._record_turn:
                    done = await asyncio.to_thread(
                        compaction.rewrite_rows, self._root, manifest, table, limits.level
                    )
                    await self._write(compaction.draft(state, done), done)
        self.num_rewritten += count
        return count

    async def _write(self, draft: ManifestRecord, done: compaction.Rewritten) -> None:
        record = await asyncio.to_thread(compaction.write, self._state.manifest, draft)
        compaction.take(self._state, record, done)

    async def _drop(self, report: GcReport, now: float) -> None:
        state, policy = self._state, self.policy
        while True:
            num_rows = len(state.updates)
            chosen = await asyncio.to_thread(
                expendable,
                state,
                self._needs(),
                policy.retention,
                await asyncio.to_thread(policy.checkpoint),
                now,
            )
            async with self._record_turn:
                ids = self._still(chosen, num_rows)
                if ids:
                    await self._write_drops(frozenset(ids))
            report.dropped |= {each.id: each.num_bytes for each in chosen if each.id in ids}
            if len(ids) < MAX_DROPS:
                return

    def _still(self, chosen: list[Spent], num_rows: int) -> set[TrajectoryId]:
        """What of it nothing has come to need: no pin, no update after so many, no branch."""
        state = self._state
        pinned = max((seq for _, seq in state.manifest.head.pins), default=-1)
        ids = {each.id for each in chosen if each.sealed_seq > pinned}
        ids -= {id for row in state.updates[num_rows:] for id in row.members}
        return ids - needed(state.live.sealed.catalog, self._needs(), ids)

    async def _write_drops(self, ids: frozenset[TrajectoryId]) -> None:
        state = self._state
        self.dropping = ids
        try:
            draft = drop_record(state, ids)
            state.take(await asyncio.to_thread(state.manifest.write, draft), None)
        finally:
            self.dropping = frozenset()

    def _needs(self) -> Needs:
        found = needs_of(self._state.live)
        found.parents.update({f"a child of {id}": id for id in self.branching})
        return found

    async def _collect_blobs(
        self, names: Names, report: GcReport, marks: dict[str, float], now: float
    ) -> None:
        state = self._state
        rows: list[UpdateRow | VersionRow] = [*state.updates, *state.versions]
        unsealed = list(state.live.snapshots.values())
        archive = state.live.sealed
        named = await asyncio.to_thread(names.all, unsealed, archive, rows, self._check)
        found = await asyncio.to_thread(
            blob_garbage,
            self._blobs,
            named,
            marks,
            now,
            self.policy.grace_s,
            self._put_before,
        )
        report.blobs = await asyncio.to_thread(self._delete_blobs, found)
        report.waiting_blobs = {digest: age.num_bytes for digest, age in found.waiting.items()}
        if found.marks != state.manifest.garbage:
            async with self._record_turn:
                marked = tuple(sorted(found.marks.items()))
                draft = replace(state.next_record(), garbage=marked, is_upkeep=True)
                state.take(await asyncio.to_thread(state.manifest.write, draft), None)

    def _delete_blobs(self, found: BlobGarbage) -> dict[str, int]:
        self._blobs.undo_discards()
        freed = {}
        for digest, age in found.due.items():
            self._check()
            freed[digest] = self._blobs.discard(digest, age.since)
        return {digest: size for digest, size in freed.items() if size}

    def _check(self) -> None:
        if self._stop.is_set():
            raise Stopped("the store is being closed")


def drop_record(state: StoreState, ids: frozenset[TrajectoryId]) -> ManifestRecord:
    """The record that lets trajectories go, and the files that have nothing else.

    What was pinned to be drawn from is so no more: the record takes its place.
    """
    catalog = state.live.sealed.catalog
    counts = Counter(place.batch.seq for place in filter(None, map(catalog.find, ids)))
    emptied = [batch for batch in catalog.batches if 0 < counts[batch.seq] == len(batch)]
    return replace(
        state.next_record(),
        removes=tuple(file.path for batch in emptied for file in batch.files.values()),
        drops=tuple(sorted(ids)),
        drops_through=state.last_sequence,
        undrawable_from=state.first_sealed(ids),
        is_pinned=state.manifest.pinned_seq is not None,
        is_upkeep=True,
    )
