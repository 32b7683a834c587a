"""Which trajectories, segments or windows an update trains on; any draw can be made again.

A draw depends on the request and on what had been sealed as of a manifest record. Its uniform
numbers are the raw stream of Philox keyed by (seed, update), turned into choices here: no library
may come to read that stream in another way. Every rank that draws gets the same global batch, and
`shard` says what of it is whose.

The elements of a cohort lie on an axis, each as long as its weight; an axis of cohorts, in the
order of strata, is on top. So a draw costs the logarithm of the size of the store, and what a seal
adds is prepared once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from k3rl.errors import StoreError, UserInputError
from k3rl.store.catalog import Catalog
from k3rl.store.elements import (
    Cohort,
    Elements,
    Kind,
    cohorts_of,
    elements_of,
    priorities,
    refs_of,
    strata,
)
from k3rl.store.manifest import Manifest
from k3rl.store.protocol import Ref, SampleRequest
from k3rl.types import TrajectoryId, philox

MAX_KINDS = 8
"""Whose axes are kept."""


class Part(NamedTuple):
    """The elements of a cohort, by stratum."""

    cohort: Cohort
    elements: Elements
    ends: NDArray[np.float64]
    """[E + 1] of the elements on the axis, from 0 on."""
    values: NDArray[np.int64]
    """[V] the strata, rising."""
    at: NDArray[np.int64]
    """[V + 1] first element of each."""
    sizes: NDArray[np.float64]
    """[V] how much of the axis is theirs."""
    shift: float
    """Logarithm of what the weights are divided by."""


@dataclass(frozen=True, slots=True, eq=False)
class Axis:
    """All parts as of a record, by stratum, then by record."""

    part: NDArray[np.int64]
    """[B] which part a block of elements is of."""
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    """[B] its elements [first, last)."""
    scale: NDArray[np.float64]
    """[B] what its weights are multiplied with."""
    ends: NDArray[np.float64]
    """[B + 1]."""
    strata: NDArray[np.int64]
    """[S + 1] first block of each stratum."""


class Population:
    """All elements of a kind, cohort by cohort."""

    def __init__(
        self, kind: Kind, weights: Mapping[int, NDArray[np.float64]] | None = None
    ) -> None:
        """Empty. `weights` [N] of the trajectories of a batch, by its record; none elsewhere."""
        self.kind = kind
        self.parts: list[Part | None] = []
        """By cohort; None: it has no elements."""
        self._weights = weights
        self._axis: tuple[int, Axis] | None = None

    def extend(self, cohorts: Sequence[Cohort], base: Population | None) -> None:
        """Take in those of `cohorts` that are new; `base` has the same without `min_version`."""
        oldest = self.kind.min_version
        for n in range(len(self.parts), len(cohorts)):
            cohort = cohorts[n]
            is_old = oldest is not None and cohort.newest < oldest
            if is_old or (self._weights is not None and cohort.batch.seq not in self._weights):
                self.parts.append(None)
            elif oldest is not None and base is not None and cohort.oldest >= oldest:
                self.parts.append(base.parts[n])
            else:
                self.parts.append(self._part(cohort, elements_of(cohort, self.kind)))

    def draw(self, request: SampleRequest, num_cohorts: int) -> list[Ref]:
        """The refs of a request as of the first `num_cohorts`."""
        axis, raw = self._as_of(num_cohorts), _Uniforms(request)
        is_replaced = (
            request.window is not None
            or request.weights is not None
            or request.reward_temperature is not None
        )
        spots = _spots(axis, request.n, is_replaced, raw)
        where, shuffled = raw.take(request.n), np.argsort(raw.take(request.n), kind="stable")
        blocks = np.searchsorted(axis.ends, spots, "right") - 1
        refs = []
        for n in shuffled.tolist():
            part, element = self._element(axis, int(blocks[n]), float(spots[n]))
            u = float(where[n])
            refs += refs_of(part.cohort, part.elements, element, request.window, u)
        return refs

    def _element(self, axis: Axis, block: int, spot: float) -> tuple[Part, int]:
        block = min(block, len(axis.part) - 1)
        part = self.parts[int(axis.part[block])]
        assert part is not None
        first, last = int(axis.first[block]), int(axis.last[block])
        within = part.ends[first] + (spot - axis.ends[block]) / axis.scale[block]
        found = int(np.searchsorted(part.ends[first : last + 1], within, "right")) - 1
        return part, first + min(max(found, 0), last - first - 1)

    def _part(self, cohort: Cohort, elements: Elements) -> Part:
        weights, shift = elements.weight, 0.0
        if self._weights is not None:
            weights = weights * self._weights[cohort.batch.seq][elements.row]
        elif self.kind.reward_temperature is not None:
            factor, shift = priorities(cohort, self.kind.reward_temperature)
            weights = weights * factor[elements.row]
        values = strata(cohort, elements, self.kind.stratify)
        order = np.argsort(values, kind="stable")
        order = order[weights[order] > 0]
        found, first = np.unique(values[order], return_index=True)
        ends, at = np.concatenate([[0.0], np.cumsum(weights[order])]), np.append(first, len(order))
        return Part(cohort, elements.take(order), ends, found, at, np.diff(ends[at]), shift)

    def _as_of(self, num_cohorts: int) -> Axis:
        if self._axis is None or self._axis[0] != num_cohorts:
            self._axis = (num_cohorts, _axis(self.parts[:num_cohorts]))
        return self._axis[1]


class Sampler:
    """Draws from what a catalog holds."""

    def __init__(self, manifest: Manifest, catalog: Catalog) -> None:
        """Both may grow."""
        self._manifest, self._catalog = manifest, catalog
        self._cohorts: list[Cohort] = []
        self._num_batches = self._num_swaps = 0
        self._populations: OrderedDict[Kind, Population] = OrderedDict()

    def draw(self, request: SampleRequest, seq: int) -> list[Ref]:
        """The refs of a request as of a manifest record.

        Raises StoreError when there are fewer than asked for, or the record cannot be drawn from.
        """
        check_drawable(self._manifest, seq)
        self._follow()
        num_cohorts = bisect_right(self._cohorts, seq, key=lambda cohort: cohort.seq)
        kind = Kind.of(request)
        if request.weights is not None:
            population = Population(kind, self._by_batch(request.weights))
            population.extend(self._cohorts[:num_cohorts], None)
        else:
            population = self._population(kind)
        return population.draw(request, num_cohorts)

    def _by_batch(self, weights: Mapping[TrajectoryId, float]) -> dict[int, NDArray[np.float64]]:
        found: dict[int, NDArray[np.float64]] = {}
        for id, weight in weights.items():
            place = self._catalog.find(id)
            if place is not None:
                batch = place.batch
                found.setdefault(batch.seq, np.zeros(len(batch)))[place.at] = weight
        return found

    def _follow(self) -> None:
        batches = self._catalog.batches
        if self._num_swaps != self._catalog.num_swaps:
            self._cohorts, self._num_batches = [], 0
            self._populations.clear()
            self._num_swaps = self._catalog.num_swaps
        for batch in batches[self._num_batches :]:
            self._cohorts += cohorts_of(batch)
        if self._num_batches == 0:
            self._cohorts.sort(key=lambda cohort: cohort.seq)
        self._num_batches = len(batches)

    def _population(self, kind: Kind) -> Population:
        base = None
        if kind.min_version is not None:
            base = self._population(kind._replace(min_version=None))
        found = self._populations.pop(kind, None) or Population(kind)
        found.extend(self._cohorts, base)
        self._populations[kind] = found
        if len(self._populations) > MAX_KINDS:
            self._populations.popitem(last=False)
        return found


def check_drawable(manifest: Manifest, seq: int) -> None:
    """Raises StoreError when there is no such record, or trajectories that it had are gone."""
    if not 0 <= seq <= manifest.head.seq:
        raise StoreError(f"sample: there is no manifest record {seq}")
    if any(first <= seq < following for first, following in manifest.undrawable):
        raise StoreError(f"sample: trajectories that manifest record {seq} had are gone")


def shard(refs: Sequence[Ref], num_ranks: int) -> list[list[Ref]]:
    """The refs of each rank: about equally many tokens, in the order of `refs`.

    The longest goes first, always to the rank that has the fewest tokens (Graham 1969: at most 4/3
    of the best there is). Refs have an end. Raises UserInputError.
    """
    if num_ranks < 1:
        raise UserInputError(f"shard: {num_ranks} ranks")
    sizes = [_size(ref) for ref in refs]
    loads, owner = [(0, rank) for rank in range(num_ranks)], [0] * len(refs)
    for n in sorted(range(len(refs)), key=lambda n: (-sizes[n], n)):
        load, rank = heappop(loads)
        owner[n] = rank
        heappush(loads, (load + sizes[n], rank))
    return [
        [ref for ref, its in zip(refs, owner, strict=True) if its == rank]
        for rank in range(num_ranks)
    ]


def _size(ref: Ref) -> int:
    if ref.end is None:
        raise UserInputError(f"shard: {ref} has no end")
    return ref.end - ref.start


class _Uniforms:
    """Numbers in [0, 1), 53 bits each."""

    def __init__(self, request: SampleRequest) -> None:
        self._bits = philox(request.seed, "sample", request.update).bit_generator

    def take(self, count: int) -> NDArray[np.float64]:
        raw = np.asarray(self._bits.random_raw(count), np.uint64)
        return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _axis(all_parts: Sequence[Part | None]) -> Axis:
    present = [(n, part) for n, part in enumerate(all_parts) if part is not None]
    parts = [part for _, part in present]
    highest = max((part.shift for part in parts if len(part.values)), default=0.0)
    counts = [len(part.values) for part in parts]
    values = _joined([part.values for part in parts])
    scales = np.repeat(np.exp([part.shift - highest for part in parts]), counts)
    sizes = _joined([part.sizes for part in parts], np.float64) * scales
    order = np.argsort(values, kind="stable")
    starts = np.unique(values[order], return_index=True)[1]
    return Axis(
        part=np.repeat(np.array([n for n, _ in present], np.int64), counts)[order],
        first=_joined([part.at[:-1] for part in parts])[order],
        last=_joined([part.at[1:] for part in parts])[order],
        scale=scales[order],
        ends=np.concatenate([[0.0], np.cumsum(sizes[order])]),
        strata=np.append(starts, len(order)),
    )


def _joined(arrays: list[NDArray[Any]], dtype: type = np.int64) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _spots(axis: Axis, n: int, is_replaced: bool, raw: _Uniforms) -> NDArray[np.float64]:
    """[n] places on the axis, equally many of each stratum."""
    low, high = axis.ends[axis.strata[:-1]], axis.ends[axis.strata[1:]]
    capacity = np.full(len(low), n) if is_replaced else np.rint(high - low).astype(np.int64)
    if not len(low):
        capacity = np.zeros(0, np.int64)
    quotas = _quotas(capacity, n, raw)
    spots = []
    for stratum in np.flatnonzero(quotas).tolist():
        quota, start, end = int(quotas[stratum]), low[stratum], high[stratum]
        if is_replaced:
            found = start + raw.take(quota) * (end - start)
            spots.append(np.minimum(found, np.nextafter(end, start)))
        else:
            spots.append(start + 0.5 + _distinct(int(capacity[stratum]), quota, raw))
    return _joined(spots, np.float64)


def _quotas(capacity: NDArray[np.int64], n: int, raw: _Uniforms) -> NDArray[np.int64]:
    """[S] how many of each stratum: as equal as their capacities allow, the rest by lot."""
    total = int(capacity.sum())
    if total < n:
        raise StoreError(f"sample: {n} asked for, {total} can be drawn")
    low, high = 0, n
    while low < high:
        middle = (low + high + 1) // 2
        is_enough = int(np.minimum(capacity, middle).sum()) <= n
        low, high = (middle, high) if is_enough else (low, middle - 1)
    quotas = np.minimum(capacity, low)
    lots = np.argsort(raw.take(len(capacity)), kind="stable")
    more = lots[capacity[lots] > low][: n - int(quotas.sum())]
    quotas[more] += 1
    return quotas


def _distinct(total: int, count: int, raw: _Uniforms) -> NDArray[np.float64]:
    """`count` different numbers below `total` (Floyd's algorithm: its cost is that of `count`)."""
    chosen: dict[int, None] = {}
    lots = raw.take(count).tolist()
    for u, top in zip(lots, range(total - count, total), strict=True):
        lot = int(u * (top + 1))
        chosen[top if lot in chosen else lot] = None
    return np.array(list(chosen), np.float64)
