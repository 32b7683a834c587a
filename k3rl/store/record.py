"""One trajectory as the store's memory holds it: offsets and steps, never token arrays."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from k3rl.errors import StoreError
from k3rl.store.events import Begun, BranchStart
from k3rl.store.journal import Place
from k3rl.store.protocol import Ack
from k3rl.types import (
    Author,
    Digest,
    Outcome,
    Span,
    Step,
    TokenFrame,
    Trajectory,
    TrajectoryHeader,
    TrajectoryId,
    TrajectoryState,
)


class Row(NamedTuple):
    """Where a sealed segment lies."""

    file: str
    """Path relative to the store root."""
    row_group: int
    row: int
    """Within the row group."""


class Extent(NamedTuple):
    """Tokens [start, start + num_tokens) of a context, written in one piece."""

    start: int
    num_tokens: int
    content_hash: Digest
    """`TokenFrame.content_hash` of these tokens."""
    place: Place | Row
    spans: tuple[Span, ...] = ()
    """Of the frame, while it is in the journal: what a repeated append must equal."""


class Piece(NamedTuple):
    """Tokens [low, high) of an extent, relative to it."""

    extent: Extent
    low: int
    high: int


class TokenRange(NamedTuple):
    """What a trajectory itself stores of a context: tokens [base, acked).

    Readers see tokens [0, committed).
    """

    base: int
    committed: int
    acked: int


@dataclass(slots=True)
class ContextRecord:
    """One context: tokens [0, base) are the parent's, the rest lies in `extents`, gapless."""

    base: int = 0
    acked: int = 0
    committed: int = 0
    extents: list[Extent] = field(default_factory=list)

    def extent_at(self, offset: int) -> Extent | None:
        """The extent that holds a token; None outside [base, acked)."""
        at = bisect_right(self.extents, offset, key=lambda extent: extent.start) - 1
        if at < 0 or offset >= self.extents[at].start + self.extents[at].num_tokens:
            return None
        return self.extents[at]

    def pieces(self, start: int, end: int) -> Iterator[Piece]:
        """The parts of extents that make up [start, end)."""
        at = max(bisect_right(self.extents, start, key=lambda extent: extent.start) - 1, 0)
        while start < end:
            extent = self.extents[at]
            high = min(end - extent.start, extent.num_tokens)
            yield Piece(extent, start - extent.start, high)
            start, at = extent.start + high, at + 1


@dataclass(slots=True)
class TrajectoryRecord:
    """All there is to know of a trajectory except its tokens."""

    header: TrajectoryHeader
    start: BranchStart | None
    begun_sequence: int
    state: TrajectoryState = TrajectoryState.QUEUED
    epoch: int = 0
    worker_id: str | None = None
    """Who holds the claim; None: nobody, so nobody may write."""
    contexts: dict[int, ContextRecord] = field(default_factory=dict)
    """Own contexts by number; a child's first own one is its parent's."""
    steps: list[Step] = field(default_factory=list)
    """Own steps."""
    outcome: Outcome | None = None
    finished_sequence: int = 0
    num_policy_tokens: int = 0
    """Committed ones, inherited ones included."""
    num_policy_tokens_pending: int = 0
    """Of the unfinished step."""
    sealed_seq: int | None = None
    """Manifest record that sealed it; None: its tokens are in the journal."""
    origin: Digest | None = None
    """Content digest of the file that it was imported from; None: it was played here."""
    id: TrajectoryId = field(init=False)
    """That of the header, which makes it anew each time it is asked."""

    def __post_init__(self) -> None:
        """Fill in the id."""
        self.id = self.header.id

    @classmethod
    def begun(cls, event: Begun, sequence: int) -> TrajectoryRecord:
        """A trajectory that has just begun."""
        record = cls(event.header, event.start, sequence)
        start = event.start
        if start is None:
            record.contexts[0] = ContextRecord()
        else:
            base, committed = start.token_offset, start.committed
            record.contexts[start.context] = ContextRecord(base, base, committed)
            record.num_policy_tokens = start.num_policy_tokens
            record.num_policy_tokens_pending = start.num_policy_tokens_pending
        return record

    @property
    def context_number(self) -> int:
        """The present context."""
        return max(self.contexts)

    @property
    def next_step(self) -> int:
        """Index of the step that comes next."""
        return len(self.steps) + (self.start.step if self.start else 0)

    @property
    def num_tokens(self) -> int:
        """Committed tokens of all contexts, inherited ones included."""
        before = self.start.num_tokens_before if self.start else 0
        return before + sum(context.committed for context in self.contexts.values())

    @property
    def num_own_tokens(self) -> int:
        """Acknowledged tokens that this trajectory itself stores."""
        return sum(context.acked - context.base for context in self.contexts.values())

    def add(self, frame: TokenFrame, place: Place) -> None:
        """Tokens were acknowledged."""
        context = self.contexts.setdefault(frame.context, ContextRecord())
        count = len(frame.token_ids)
        if frame.offset != context.acked:
            raise StoreError(
                f"trajectory {self.id}: {frame.offset} does not follow {context.acked}"
            )
        extent = Extent(frame.offset, count, frame.content_hash(), place, frame.spans)
        context.extents.append(extent)
        context.acked = frame.offset + count
        self.num_policy_tokens_pending += num_policy_tokens(frame)

    def commit(self, step: Step) -> None:
        """A step was committed."""
        self.contexts.setdefault(step.context, ContextRecord()).committed = step.token_end
        self.steps.append(step)
        self._settle()

    def finish(self, outcome: Outcome, sequence: int) -> None:
        """It ended."""
        present = self.contexts[self.context_number]
        present.committed = present.acked
        self.outcome, self.finished_sequence = outcome, sequence
        self._settle()

    @property
    def branched_from(self) -> TrajectoryId | None:
        """Whose tokens it begins with; None: it begins with nothing."""
        parent = self.header.parent
        return parent.id if self.start is not None and parent is not None else None

    def ranges(self) -> dict[int, TokenRange]:
        """Of own contexts, by number."""
        return {n: TokenRange(c.base, c.committed, c.acked) for n, c in self.contexts.items()}

    def pieces(self, context: int, start: int, end: int) -> list[Piece]:
        """The parts of extents that make up tokens [start, end) that it stores of a context."""
        return list(self.contexts[context].pieces(start, end))

    def acks(self) -> Iterator[Ack]:
        """Every acknowledgement of own tokens, while they are in the journal."""
        if self.sealed_seq is not None:
            return
        for number, context in self.contexts.items():
            for extent in context.extents:
                yield Ack(self.id, number, extent.start, extent.num_tokens, extent.content_hash)

    def trajectory(self, steps: tuple[Step, ...]) -> Trajectory:
        """The carrier; `steps` are own and inherited ones."""
        return Trajectory(
            header=self.header,
            state=self.state,
            num_tokens=self.num_tokens,
            num_policy_tokens=self.num_policy_tokens,
            steps=steps,
            outcome=self.outcome,
            num_contexts=self.context_number + 1,
        )

    def _settle(self) -> None:
        self.num_policy_tokens += self.num_policy_tokens_pending
        self.num_policy_tokens_pending = 0


def num_policy_tokens(frame: TokenFrame) -> int:
    """Tokens in spans that the policy wrote."""
    if len(frame.spans) == 1:
        return len(frame.token_ids) if frame.spans[0].author is Author.POLICY else 0
    ends = [span.start for span in frame.spans[1:]] + [len(frame.token_ids)]
    spans = zip(frame.spans, ends, strict=True)
    return sum(end - span.start for span, end in spans if span.author is Author.POLICY)
