"""Sealed trajectories as columns: what one manifest record added, without headers, steps, tokens.

About 0.2 KB for a trajectory, 0.03 KB for each of its contexts and 0.08 KB for each of its segments
(of up to 4,096 tokens). Nothing here changes once it is made, so any thread may read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from k3rl.store.manifest import SealedFile
from k3rl.store.record import Extent, Piece, Row, TokenRange
from k3rl.store.segment_keys import NO_VERSION
from k3rl.types import TrajectoryId

Ints: TypeAlias = NDArray[np.signedinteger[Any]]
SIGN = 1 << 63


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Arrays of one length."""

    def __len__(self) -> int:
        """Rows."""
        return len(getattr(self, fields(self)[0].name))

    def take(self, rows: Any) -> Self:
        """The rows that a mask or an array of indices picks."""
        return type(self)(*(getattr(self, field.name)[rows] for field in fields(self)))


@dataclass(frozen=True, slots=True, eq=False)
class TrajectoryColumns(Columns):
    """[N], in the order of the table."""

    id: NDArray[np.uint8]
    """[N, 16]."""
    parent: NDArray[np.uint8]
    """[N, 16], zeros where there is none."""
    row: NDArray[np.int32]
    """In the `trajectories` file."""
    first_step: NDArray[np.int64]
    """Its row in the `steps` file."""
    num_steps: NDArray[np.int32]
    """Own ones."""
    start_step: NDArray[np.int32]
    """First own step of a branch; -1: it is none."""
    sealed_seq: NDArray[np.int64]
    """The record that first sealed it."""
    epoch: NDArray[np.int64]
    begun: NDArray[np.int64]
    finished: NDArray[np.int64]
    """Sequences of its begin and its end."""
    num_tokens: NDArray[np.int64]
    num_policy_tokens: NDArray[np.int64]
    num_own_tokens: NDArray[np.int64]
    reward: NDArray[np.float64]
    """NaN where there is none."""
    outcome: NDArray[np.int64]
    level: NDArray[np.int64]
    group: NDArray[np.int64]
    """Digests: equal numbers, equal outcome kind; level; run, task, level and group index."""
    is_imported: NDArray[np.bool_]
    """Whether it has an `origin`."""


@dataclass(frozen=True, slots=True, eq=False)
class ContextColumns(Columns):
    """[C], by trajectory, then number."""

    number: NDArray[np.int32]
    base: NDArray[np.int64]
    """Tokens [0, base) are the parent's."""
    end: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class SegmentColumns(Columns):
    """[S], by trajectory, context, then tokens."""

    start: NDArray[np.int64]
    """First token, in the context."""
    num_tokens: NDArray[np.int32]
    num_policy_tokens: NDArray[np.int32]
    version_min: NDArray[np.int32]
    version_max: NDArray[np.int32]
    """See `SegmentKey`."""
    row_group: NDArray[np.int32]
    row: NDArray[np.int32]
    content_hash: NDArray[np.uint8]
    """[S, 32]."""

    def extent(self, path: str, segment: int) -> Extent:
        """A segment of the file `path`."""
        place = Row(path, int(self.row_group[segment]), int(self.row[segment]))
        digest = self.content_hash[segment].tobytes().hex()
        return Extent(int(self.start[segment]), int(self.num_tokens[segment]), digest, place)


@dataclass(frozen=True, eq=False)
class Batch:
    """What one manifest record added; it is replaced as a whole or not at all."""

    seq: int
    files: Mapping[str, SealedFile]
    """By table, at most one of each."""
    trajectories: TrajectoryColumns
    contexts: ContextColumns
    segments: SegmentColumns
    context_at: NDArray[np.int32]
    """[N + 1] first context of each trajectory."""
    segment_at: NDArray[np.int32]
    """[C + 1] first segment of each context."""
    snapshot_keys: NDArray[np.int64]
    """`snapshot_key` of each row of the `snapshots` file."""

    def __len__(self) -> int:
        """Trajectories."""
        return len(self.trajectories)

    @property
    def ids(self) -> list[TrajectoryId]:
        """In the order of the table."""
        return hex_ids(self.trajectories.id)

    @cached_property
    def keys(self) -> NDArray[np.int64]:
        """[N] the first 8 bytes of each id; their order is that of the ids."""
        return id_keys(self.trajectories.id)

    @cached_property
    def last_finished(self) -> int:
        """Highest sequence of an end."""
        return int(self.trajectories.finished.max(initial=0))

    @cached_property
    def version_min(self) -> NDArray[np.int32]:
        """[N] the oldest version that wrote any own token of a trajectory, else NO_VERSION."""
        found = np.full(len(self), NO_VERSION, np.int32)
        at = self.segment_at[self.context_at]
        has = np.flatnonzero(at[:-1] < at[1:])
        if len(has):
            found[has] = np.minimum.reduceat(self.segments.version_min, at[:-1][has])
        return found

    def id(self, index: int) -> TrajectoryId:
        """Of a trajectory."""
        return hex_ids(self.trajectories.id[index])[0]

    def parent(self, index: int) -> TrajectoryId | None:
        """Whose tokens a branch begins with; None when it is none."""
        if self.trajectories.start_step[index] < 0:
            return None
        return hex_ids(self.trajectories.parent[index])[0]

    def branches(self) -> dict[TrajectoryId, TrajectoryId]:
        """Trajectories that begin with tokens of a parent, and their parents."""
        rows = self.trajectories.start_step >= 0
        ids, parents = self.trajectories.id[rows], self.trajectories.parent[rows]
        return dict(zip(hex_ids(ids), hex_ids(parents), strict=True))

    def ranges(self, index: int) -> dict[int, TokenRange]:
        """Of own contexts, by number."""
        own, columns = self._contexts(index), self.contexts
        numbers, base = columns.number[own].tolist(), columns.base[own].tolist()
        return {
            number: TokenRange(low, end, end)
            for number, low, end in zip(numbers, base, columns.end[own].tolist(), strict=True)
        }

    def pieces(self, index: int, context: int, start: int, end: int) -> list[Piece]:
        """The parts of segments that make up tokens [start, end) of an own context.

        They end early where no segment follows the last one.
        """
        own = self._contexts(index)
        at = own.start + int(np.searchsorted(self.contexts.number[own], context))
        low, high = int(self.segment_at[at]), int(self.segment_at[at + 1])
        starts, path = self.segments.start, self.files["segments"].path if high > low else ""
        first = low + max(int(np.searchsorted(starts[low:high], start, "right")) - 1, 0)
        last = low + int(np.searchsorted(starts[low:high], end))
        found = []
        for n in range(first, last):
            extent = self.segments.extent(path, n)
            stop = min(end - extent.start, extent.num_tokens)
            if not 0 <= start - extent.start < stop:
                break
            found.append(Piece(extent, start - extent.start, stop))
            start = extent.start + stop
        return found

    def select(self, mask: NDArray[np.bool_]) -> Batch:
        """Only some of the trajectories."""
        contexts = np.repeat(mask, np.diff(self.context_at))
        segments = np.repeat(contexts, np.diff(self.segment_at))
        return Batch(
            self.seq,
            self.files,
            self.trajectories.take(mask),
            self.contexts.take(contexts),
            self.segments.take(segments),
            offsets(np.diff(self.context_at)[mask]),
            offsets(np.diff(self.segment_at)[contexts]),
            self.snapshot_keys,
        )

    def _contexts(self, index: int) -> slice:
        return slice(int(self.context_at[index]), int(self.context_at[index + 1]))


def offsets(counts: Ints) -> NDArray[np.int32]:
    """[N + 1] where each run of so many begins."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def hex_ids(ids: NDArray[np.uint8]) -> list[TrajectoryId]:
    """[N, 16], or [16], as text."""
    text = ids.tobytes().hex()
    return [text[at : at + 32] for at in range(0, len(text), 32)]


def id_keys(ids: NDArray[np.uint8]) -> NDArray[np.int64]:
    """[N] the first 8 bytes of ids [N, 16], in their order."""
    first = np.ascontiguousarray(ids[:, :8]).view(">u8").reshape(-1).astype(np.uint64)
    return (first ^ np.uint64(SIGN)).view(np.int64)


def id_key(id: TrajectoryId) -> int:
    """`id_keys` of one id as text. Raises ValueError for what is no id."""
    return int.from_bytes(bytes.fromhex(id[:16]), "big") - SIGN


def snapshot_key(snapshot_id: str) -> int:
    """A number for an id that may be any text; holds in this process only."""
    return hash(snapshot_id)
