"""What the journal records: one carrier per change of state, and the byte that names it.

An event is a decision already taken; `LiveState.apply` folds events into state, in the service
and in every replay alike. All of them travel as `k3rl.types.encode`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from k3rl.store.protocol import StepFrame, UpdateRow
from k3rl.types import Digest, Outcome, TokenFrame, TrajectoryHeader, TrajectoryId


@dataclass(frozen=True, slots=True)
class FileStart:
    """First frame of every journal file: which file it is."""

    service_epoch: int
    number: int


@dataclass(frozen=True, slots=True)
class BranchStart:
    """Where a child begins in its parent's coordinates, so that it can be resumed by itself.

    Contexts below `context` are the parent's, and so are tokens [0, token_offset) of `context`.
    Tokens from `committed` to `token_offset` belong to the turn that the child continues: durable,
    but the child shows them only once its own first step commits.
    """

    context: int
    token_offset: int
    committed: int
    step: int
    """Index of the child's first own step."""
    num_tokens_before: int
    """Tokens of the contexts below `context`."""
    num_policy_tokens: int
    """Policy tokens among the inherited committed ones."""
    num_policy_tokens_pending: int
    """Policy tokens in [committed, token_offset)."""
    snapshot_id: str | None
    """The sandbox before `step`; None when no earlier step has a snapshot."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A trajectory was created and queued at the back."""

    header: TrajectoryHeader
    start: BranchStart | None = None
    """None: it starts from nothing."""

    @property
    def id(self) -> TrajectoryId:
        """The trajectory's id."""
        return self.header.id


@dataclass(frozen=True, slots=True)
class Claimed:
    """A worker took it under a new epoch."""

    id: TrajectoryId
    epoch: int
    worker_id: str


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """A step with its environment tokens and its snapshot."""

    id: TrajectoryId
    epoch: int
    frame: StepFrame


@dataclass(frozen=True, slots=True)
class Paused:
    """Its worker gave it back."""

    id: TrajectoryId
    epoch: int


@dataclass(frozen=True, slots=True)
class Requeued:
    """A paused one was put at the front of the queue."""

    id: TrajectoryId


@dataclass(frozen=True, slots=True)
class Reaped:
    """Its worker is dead: fenced by a new epoch and put at the front of the queue."""

    id: TrajectoryId
    epoch: int
    worker_id: str


@dataclass(frozen=True, slots=True)
class Finished:
    """It ended; tokens of an unfinished step are committed."""

    id: TrajectoryId
    epoch: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class VersionRow:
    """A policy version that was handed out: a row of the `versions` table."""

    policy_version: int
    parent: int
    checksum: Digest
    blob: Digest | None = None


TrajectoryEvent: TypeAlias = (
    Begun | Claimed | TokenFrame | StepCommitted | Paused | Requeued | Reaped | Finished
)
Event: TypeAlias = TrajectoryEvent | UpdateRow | VersionRow | FileStart

KINDS: dict[int, type] = {
    1: FileStart,
    2: Begun,
    3: Claimed,
    4: TokenFrame,
    5: StepCommitted,
    6: Paused,
    7: Requeued,
    8: Reaped,
    9: Finished,
    10: UpdateRow,
    11: VersionRow,
}
"""The kind byte of a journal frame. Numbers are never reused."""
KIND_OF: dict[type, int] = {cls: kind for kind, cls in KINDS.items()}
