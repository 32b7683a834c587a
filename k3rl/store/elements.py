"""What can be drawn from: trajectories, segments or windows of what one record sealed.

The order of elements follows ids, contexts and tokens alone, so that files may be written again
without a draw coming out differently.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from k3rl.store.columns import Batch, Ints
from k3rl.store.protocol import Ref, SampleRequest, SampleUnit, Stratum
from k3rl.store.segment_keys import NO_VERSION

WHOLE = -1
"""Instead of a context: all of a trajectory."""


@dataclass(frozen=True, eq=False)
class Cohort:
    """Rewarded trajectories, played here, that one record sealed first; all are in one batch."""

    seq: int
    batch: Batch
    rows: Ints
    """Of the batch, by id."""

    @cached_property
    def versions(self) -> NDArray[np.int32]:
        """[S] the oldest version in each segment."""
        return self.batch.segments.version_min[self.segments[0]]

    @cached_property
    def oldest(self) -> int:
        """The lowest of `versions`; NO_VERSION when there is none."""
        return int(self.versions.min(initial=NO_VERSION))

    @cached_property
    def newest(self) -> int:
        """The highest of `versions`; NO_VERSION when a trajectory has none."""
        whole = self.batch.version_min[self.rows]
        return int(max(self.versions.max(initial=0), whole.max(initial=0)))

    @cached_property
    def contexts(self) -> tuple[Ints, Ints]:
        """([C] contexts of the batch, [C] their trajectories)."""
        at = self.batch.context_at
        return _spread(self.rows, at[self.rows], at[self.rows + 1])

    @cached_property
    def segments(self) -> tuple[Ints, Ints]:
        """([S] segments of the batch, [S] their contexts)."""
        own, at = self.contexts[0], self.batch.segment_at
        return _spread(own, at[own], at[own + 1])


@dataclass(frozen=True, slots=True, eq=False)
class Elements:
    """[E] of a cohort."""

    row: Ints
    """The trajectory, in the batch."""
    context: Ints
    """The context, in the batch, or WHOLE."""
    low: Ints
    high: Ints
    """Tokens [low, high) of it."""
    count: Ints
    """Positions of the window in them; 1 where there is no window."""
    version: Ints
    """The oldest."""
    weight: NDArray[np.float64]
    """Before any priority."""

    def __len__(self) -> int:
        """How many."""
        return len(self.row)

    def take(self, which: NDArray[np.bool_] | Ints) -> Elements:
        """Some of them."""
        return Elements(*(getattr(self, field.name)[which] for field in fields(self)))


class Kind(NamedTuple):
    """What of a request says which elements there are, and how likely they are."""

    unit: SampleUnit
    window: int | None
    is_inherited: bool
    stratify: Stratum | None
    min_version: int | None
    reward_temperature: float | None

    @classmethod
    def of(cls, request: SampleRequest) -> Kind:
        """That of a request."""
        return cls(*(getattr(request, name) for name in cls._fields))


def cohorts_of(batch: Batch) -> list[Cohort]:
    """What can be drawn from in a batch, oldest record first."""
    columns = batch.trajectories
    found = []
    for seq in np.unique(columns.sealed_seq).tolist():
        can_be_drawn = ~np.isnan(columns.reward) & ~columns.is_imported
        rows = np.flatnonzero((columns.sealed_seq == seq) & can_be_drawn)
        words = np.ascontiguousarray(columns.id[rows]).view(">u8").reshape(-1, 2)
        found.append(Cohort(seq, batch, rows[np.lexsort((words[:, 1], words[:, 0]))]))
    return found


def elements_of(cohort: Cohort, kind: Kind) -> Elements:
    """The elements of a kind."""
    if kind.unit is SampleUnit.SEGMENT:
        found = _segments(cohort)
    elif kind.window is None:
        found = _trajectories(cohort)
    else:
        found = _windows(cohort, kind)
    if kind.min_version is None:
        return found
    return found.take(found.version >= kind.min_version)


def strata(cohort: Cohort, elements: Elements, stratify: Stratum | None) -> NDArray[np.int64]:
    """[E] which stratum each element is in: a number that is the same in every process."""
    columns = cohort.batch.trajectories
    match stratify:
        case Stratum.GROUP:
            return columns.group[elements.row]
        case Stratum.LEVEL:
            return columns.level[elements.row]
        case Stratum.OUTCOME:
            return columns.outcome[elements.row]
        case Stratum.VERSION:
            return elements.version.astype(np.int64)
    return np.zeros(len(elements), np.int64)


def priorities(cohort: Cohort, temperature: float) -> tuple[NDArray[np.float64], float]:
    """([N] exp(reward / temperature) of each trajectory of the batch / exp(shift), shift)."""
    scaled = cohort.batch.trajectories.reward / temperature
    shift = float(scaled[cohort.rows].max(initial=-np.inf))
    return np.exp(scaled - shift), shift


def refs_of(
    cohort: Cohort, elements: Elements, chosen: int, window: int | None, u: float
) -> list[Ref]:
    """What an element stands for; `u` in [0, 1) says where a window lies."""
    batch, row = cohort.batch, int(elements.row[chosen])
    id, context = batch.id(row), int(elements.context[chosen])
    if context == WHOLE:
        return [Ref(id, 0, own.committed, n) for n, own in batch.ranges(row).items()]
    low, high = int(elements.low[chosen]), int(elements.high[chosen])
    if window is not None:
        low += int(u * int(elements.count[chosen]))
        high = min(low + window, high)
    return [Ref(id, low, high, int(batch.contexts.number[context]))]


def _trajectories(cohort: Cohort) -> Elements:
    rows = cohort.rows
    zeros, ones = np.zeros(len(rows), np.int64), np.ones(len(rows), np.int64)
    versions = cohort.batch.version_min[rows]
    return Elements(rows, zeros + WHOLE, zeros, zeros, ones, versions, ones.astype(np.float64))


def _segments(cohort: Cohort) -> Elements:
    (which, context), columns = cohort.segments, cohort.batch.segments
    low, ones = columns.start[which], np.ones(len(which), np.int64)
    high, row = low + columns.num_tokens[which], _rows_of(cohort, context)
    return Elements(row, context, low, high, ones, cohort.versions, ones.astype(np.float64))


def _windows(cohort: Cohort, kind: Kind) -> Elements:
    """Runs of segments that may be drawn from: whole contexts, unless some segment is too old."""
    assert kind.window is not None
    (which, context), columns = cohort.segments, cohort.batch.segments
    versions, at = cohort.versions, np.arange(len(which))
    if kind.unit is SampleUnit.TOKEN and kind.min_version is not None:
        at = np.flatnonzero(versions >= kind.min_version)
    which, context, versions = which[at], context[at], versions[at]
    if not len(which):
        return _segments(cohort).take(which)
    is_first = np.append(True, (np.diff(at) != 1) | (np.diff(context) != 0))
    first = np.flatnonzero(is_first)
    last = np.append(first[1:], len(which)) - 1
    context, begin = context[first], which[first]
    low, high = columns.start[begin], columns.start[which[last]] + columns.num_tokens[which[last]]
    if kind.is_inherited:
        low = np.where(begin == cohort.batch.segment_at[context], 0, low)
    row = _rows_of(cohort, context)
    oldest = np.minimum.reduceat(versions, first)
    count = np.maximum(high - low - kind.window + 1, 1)
    weight = count.astype(np.float64)
    if kind.unit is SampleUnit.TRAJECTORY:
        weight /= np.bincount(row, weight)[row]
        oldest = cohort.batch.version_min[row]
    return Elements(row, context, low, high, count, oldest, weight)


def _rows_of(cohort: Cohort, contexts: Ints) -> Ints:
    return np.searchsorted(cohort.batch.context_at, contexts, "right") - 1


def _spread(owners: Ints, starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """All of [start, end) for each owner, one after the other, and whose each is."""
    counts = (ends - starts).astype(np.int64)
    first = np.cumsum(counts) - counts
    within = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(first, counts)
    return np.repeat(starts.astype(np.int64), counts) + within, np.repeat(owners, counts)
