"""Compaction, garbage collection and pins of a store that no service runs on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from k3rl.blobs import BlobStore
from k3rl.errors import StoreError, UserInputError
from k3rl.store import compaction
from k3rl.store.checks import check_text
from k3rl.store.compaction import NEVER, Limits
from k3rl.store.events import VersionRow
from k3rl.store.gc import GcReport, Names, blob_garbage, due_files
from k3rl.store.manifest import with_pin
from k3rl.store.protocol import UpdateRow
from k3rl.store.recovery import RootLock, recover
from k3rl.store.retention import expendable, needs_of
from k3rl.store.state import StoreState
from k3rl.store.upkeep import Policy, Upkeep

T = TypeVar("T")


def compact_root(root: Path, limits: Limits) -> int:
    """Compact a store that no service runs on; returns how many batches were written again.

    Raises StoreError when a service runs, there is no store, or the disk refuses; CorruptData.
    """
    return _alone(root, lambda state: _upkeep(root, state, Policy(limits)).compact())


def collect_root(root: Path, policy: Policy) -> GcReport:
    """Collect the garbage of a store that no service runs on. Raises like `compact_root`."""
    return _alone(root, lambda state: _upkeep(root, state, policy).collect())


def pin_root(root: Path, name: str) -> int:
    """Keep all that is sealed now, until `unpin_root`; returns the record. Raises StoreError."""
    check_text("pin", name)
    if not name:
        raise UserInputError("pin: it needs a name")

    async def work(state: StoreState) -> int:
        head = state.manifest.head
        record = with_pin(state.next_record(), name, head.seq + 1)
        state.take(state.manifest.write(record), None)
        return head.seq + 1

    return _alone(root, work)


def unpin_root(root: Path, name: str) -> None:
    """Let go of what a name keeps. Raises UserInputError when there is no such pin, StoreError."""

    async def work(state: StoreState) -> None:
        names = [pinned for pinned, _ in state.manifest.head.pins]
        if name not in names:
            known = ", ".join(names) or "none"
            raise UserInputError(f"pin {name!r} is unknown; there are: {known}")
        await _upkeep(root, state, Policy()).unpin(name)

    _alone(root, work)


def preview(root: Path, policy: Policy) -> GcReport:
    """What `collect_root` would let go and delete now; nothing is written.

    Blobs of what it would let go are not among it: they become garbage once it is gone.
    """
    state, now, report = recover(root, False), time.time(), GcReport()
    blobs, catalog = BlobStore(root / "blobs"), state.live.sealed.catalog
    chosen = expendable(state, needs_of(state.live), policy.retention, policy.checkpoint(), now)
    report.dropped = {each.id: each.num_bytes for each in chosen}
    catalog.drop(report.dropped)
    dead = compaction.plan(catalog, policy.limits._replace(min_batches=NEVER))
    # Those without any trajectory left go by themselves.
    report.num_rewritten = sum(len(batch) > 0 for batch in dead)
    report.files, report.waiting_files = due_files(root, state.manifest, now, policy.grace_s)
    if policy.references is not None:
        rows: list[UpdateRow | VersionRow] = [*state.updates, *state.versions]
        unsealed = list(state.live.snapshots.values())
        named = Names(blobs, policy.references).all(unsealed, state.live.sealed, rows)
        found = blob_garbage(blobs, named, state.manifest.garbage, now, policy.grace_s)
        report.blobs = {digest: age.num_bytes for digest, age in found.due.items()}
        report.waiting_blobs = {digest: age.num_bytes for digest, age in found.waiting.items()}
    return report


def _alone(root: Path, work: Callable[[StoreState], Awaitable[T]]) -> T:
    if not (root / "_log").is_dir():
        raise StoreError(f"{root}: no trajectory store here (no _log folder)")
    lock = RootLock(root)
    try:
        state = recover(root, True)

        async def go() -> T:
            return await work(state)

        return asyncio.run(go())
    finally:
        lock.release()


def _upkeep(root: Path, state: StoreState, policy: Policy) -> Upkeep:
    return Upkeep(root, state, BlobStore(root / "blobs"), policy, asyncio.Lock())
