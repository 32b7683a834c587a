"""Where each segment of a sealed trajectory lies, and whose tokens it holds.

The list column `segments` of the `trajectories` table repeats what opening a store must know of the
segments file, so that the many row groups of that file need not be read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from k3rl.store.record import TrajectoryRecord
from k3rl.types import Author, Span, TrajectoryId

NO_VERSION = 2**31 - 1
"""Oldest version of tokens none of which the policy wrote."""


class SegmentKey(NamedTuple):
    """One segment without its tokens; field by field an entry of `schemas.SEGMENTS`."""

    context: int
    token_start: int
    num_tokens: int
    num_policy_tokens: int
    version_min: int
    """Of the policy's spans; NO_VERSION when there are none."""
    version_max: int
    """-1 when there are none."""
    row_group: int
    row: int
    """Within the row group."""
    content_hash: bytes


class SealedRow(NamedTuple):
    """What a row of the `trajectories` table is made of."""

    record: TrajectoryRecord
    sealed_seq: int
    """The manifest record that first sealed it, also when its files are written again."""
    segments: list[SegmentKey]
    """In the order of contexts and tokens."""

    @property
    def id(self) -> TrajectoryId:
        """The trajectory's id."""
        return self.record.id


def span_numbers(spans: Iterable[Span], num_tokens: int) -> tuple[int, int, int]:
    """(policy tokens, their oldest version, their newest) of tokens with spans from 0 on."""
    found = list(spans)
    ends = [span.start for span in found[1:]] + [num_tokens]
    own = [(s, end) for s, end in zip(found, ends, strict=True) if s.author is Author.POLICY]
    versions = [span.policy_version for span, _ in own]
    count = sum(end - span.start for span, end in own)
    return count, min(versions, default=NO_VERSION), max(versions, default=-1)
