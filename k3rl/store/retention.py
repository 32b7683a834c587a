"""Which trajectories a store may let go: only what nothing can need any more.

A trajectory is spent once an update at or below the oldest checkpoint that may be rolled back to
has trained on it, and so are those of its group that have no reward. Of spent ones the policy says
how many are kept. Never let go, whatever the policy says: what a pin holds, what an update above
that checkpoint names, what was imported, what is not sealed, and whatever a trajectory that stays
branched off.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from k3rl.store.catalog import Catalog
from k3rl.store.columns import Batch, hex_ids, snapshot_key
from k3rl.store.live import LiveState
from k3rl.store.manifest import Manifest
from k3rl.store.protocol import UpdateRow
from k3rl.store.state import StoreState
from k3rl.types import TrajectoryId

MAX_DROPS = 10_000
"""Of one record; what is more waits for the next round."""


@dataclass(frozen=True, slots=True)
class Retention:
    """What is kept of spent trajectories; None: everything, as far as this goes."""

    keep_updates: int | None = None
    """Those of so many updates up to the checkpoint."""
    max_age_s: float | None = None
    """Those that were sealed not longer ago."""
    max_bytes: int | None = None
    """As many as all sealed files together may weigh, the newest."""
    untrained: bool = False
    """Whether rewarded trajectories that no update named count as spent, too."""

    @property
    def is_active(self) -> bool:
        """Whether anything may ever go."""
        return (self.keep_updates, self.max_age_s, self.max_bytes) != (None, None, None)


class Needs(NamedTuple):
    """What trajectories that are not sealed need of others."""

    parents: dict[TrajectoryId, TrajectoryId]
    """What each branched off."""
    snapshots: set[str]
    """Names that no unsealed trajectory has itself."""


class Spent(NamedTuple):
    """A trajectory that may go."""

    id: TrajectoryId
    sealed_seq: int
    num_bytes: float
    """Its share of its files."""
    update: int | None
    """Which trained on it, or on its group, last."""


def expendable(
    state: StoreState, needs: Needs, policy: Retention, checkpoint: int | None, now: float
) -> list[Spent]:
    """What goes at Unix time `now`, oldest first; `checkpoint` is the update of the oldest one.

    Reads memory only, which may move on meanwhile: ask `needed` again right before they go.
    """
    if not policy.is_active:
        return []
    manifest, rows = state.manifest, list(state.updates)
    catalog = state.live.sealed.catalog
    spent = sorted(
        _spent(state, needs, policy, rows, checkpoint), key=lambda s: (s.sealed_seq, s.id)
    )
    old = {each for each in spent if _is_old(manifest, policy, checkpoint, each, now)}
    if policy.max_bytes is not None:
        left = sum(file.num_bytes for file in list(manifest.files.values()))
        left -= int(sum(each.num_bytes for each in old))
        for each in spent:
            if left <= policy.max_bytes:
                break
            if each not in old:
                old.add(each)
                left -= int(each.num_bytes)
    chosen = {each.id for each in old}
    chosen -= needed(catalog, needs, chosen)
    return [each for each in spent if each.id in chosen][:MAX_DROPS]


def needs_of(live: LiveState) -> Needs:
    """What is not sealed needs. On the event loop of the service."""
    records = live.records.values()
    names = {s.snapshot_after for record in records for s in record.steps if s.snapshot_after}
    names |= {r.start.snapshot_id for r in records if r.start and r.start.snapshot_id}
    parents = {r.id: r.branched_from for r in records if r.branched_from is not None}
    return Needs(parents, names - live.snapshots.keys())


def needed(catalog: Catalog, needs: Needs, ids: Collection[TrajectoryId]) -> set[TrajectoryId]:
    """Those of `ids` that something which is not among them needs, at any remove."""
    parents = dict(needs.parents)
    for batch in catalog.batches:
        parents.update(batch.branches())
    found = set[TrajectoryId]()
    for child in parents.keys() - ids:
        at: TrajectoryId | None = parents[child]
        while at is not None and at not in found:
            if at in ids:
                found.add(at)
            at = parents.get(at)
    return found


def _spent(
    state: StoreState,
    needs: Needs,
    policy: Retention,
    rows: list[UpdateRow],
    checkpoint: int | None,
) -> Iterator[Spent]:
    catalog = state.live.sealed.catalog
    trained = _consumed(rows, checkpoint)
    groups = _groups_of(catalog, trained)
    later = {id for row in rows if not _is_kept(row, checkpoint) for id in row.members}
    pinned = max((seq for _, seq in state.manifest.head.pins), default=-1)
    keys = [snapshot_key(name) for name in needs.snapshots]
    for batch in catalog.batches:
        columns = batch.trajectories
        can_go = (columns.sealed_seq > pinned) & ~columns.is_imported
        is_held = bool(keys) and bool(np.isin(batch.snapshot_keys, keys).any())
        if is_held or not can_go.any():
            continue
        share = _bytes_per_token(batch)
        at = np.flatnonzero(can_go)
        lists = (columns.sealed_seq, columns.num_own_tokens, columns.group, columns.reward)
        values = (column[at].tolist() for column in lists)
        for id, seq, tokens, group, reward in zip(hex_ids(columns.id[at]), *values, strict=True):
            update = trained.get(id, groups.get(group) if math.isnan(reward) else None)
            if id not in later and (update is not None or policy.untrained):
                yield Spent(id, seq, tokens * share, update)


def _is_old(
    manifest: Manifest, policy: Retention, checkpoint: int | None, spent: Spent, now: float
) -> bool:
    sealed_at = manifest.records[spent.sealed_seq].written_at
    if policy.max_age_s is not None and sealed_at and now - sealed_at > policy.max_age_s:
        return True
    if policy.keep_updates is None or checkpoint is None or spent.update is None:
        return False
    return spent.update <= checkpoint - policy.keep_updates


def _groups_of(catalog: Catalog, trained: Mapping[TrajectoryId, int]) -> dict[int, int]:
    """The last update that trained on any member, by group."""
    found = dict[int, int]()
    for id, update in trained.items():
        place = catalog.find(id)
        if place is not None:
            group = int(place.batch.trajectories.group[place.at])
            found[group] = max(update, found.get(group, update))
    return found


def _consumed(rows: list[UpdateRow], checkpoint: int | None) -> Mapping[TrajectoryId, int]:
    """The last update that trained on each trajectory, of those that no rollback undoes."""
    last = {row.update: row for row in rows if _is_kept(row, checkpoint)}
    return {id: update for update, row in sorted(last.items()) for id in row.members}


def _is_kept(row: UpdateRow, checkpoint: int | None) -> bool:
    return checkpoint is not None and row.update <= checkpoint


def _bytes_per_token(batch: Batch) -> float:
    """Dropped rows count for the others: they go when the batch is written again."""
    num_bytes = sum(file.num_bytes for file in batch.files.values())
    return num_bytes / max(int(batch.trajectories.num_own_tokens.sum()), 1)
