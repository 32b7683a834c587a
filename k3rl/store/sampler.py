"""Which trajectories an update trains on, drawn so that the same draw can be made again."""

from __future__ import annotations

from collections.abc import Iterable

from k3rl.errors import StoreError
from k3rl.store.record import TrajectoryRecord
from k3rl.types import TrajectoryId, philox


def population(records: Iterable[TrajectoryRecord], manifest_seq: int) -> list[TrajectoryId]:
    """Ids of finished, rewarded trajectories that the manifest names as of a record, sorted."""
    return sorted(
        record.id
        for record in records
        if record.sealed_seq is not None
        and record.sealed_seq <= manifest_seq
        and record.outcome is not None
        and record.outcome.reward is not None
    )


def draw(ids: list[TrajectoryId], update: int, n: int, seed: int) -> list[TrajectoryId]:
    """`n` of `ids` without replacement; depends on (ids, update, n, seed) alone.

    Raises StoreError when there are fewer than `n`.
    """
    if not 0 <= n <= len(ids):
        raise StoreError(f"sample: {n} trajectories asked for, {len(ids)} are finished and pinned")
    chosen = philox(seed, "sample", update).choice(len(ids), n, replace=False)
    return [ids[index] for index in chosen]
