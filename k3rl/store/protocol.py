"""The TrajectoryStore contract: append, commit, claim, sample, read, branch.

Files are the truth; Redis is a live index that can be rebuilt from them. One service per store
root owns journal, manifest and Redis; everyone else appends and reads through it. An
acknowledgement (`Ack`) means durable. Tokens of an unfinished step are durable and resumable, but
readers see a step only once it is committed together with its snapshot.

Every write names the writer's `epoch`; a writer whose claim was taken over gets `Fenced`. Sending
the same write again is a no-op with the same answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from k3rl.types import (
    BoolArray,
    Digest,
    Float32Array,
    Int32Array,
    JsonObject,
    Outcome,
    Snapshot,
    Span,
    Step,
    TokenFrame,
    Trajectory,
    TrajectoryHeader,
    TrajectoryId,
    TrajectoryState,
)

SEGMENT_TOKENS = 4096
"""Most tokens of one stored segment; cut at a step end when one lies in the last 512."""
SEGMENT_SLACK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Ack:
    """Tokens [offset, offset + count) of a context are durable; what a ledger writes down."""

    id: TrajectoryId
    context: int
    offset: int
    count: int
    content_hash: Digest
    """`TokenFrame.content_hash` of the frame."""


@dataclass(frozen=True, slots=True)
class StepFrame:
    """A step and, in the same commit, the environment's tokens that end it and its snapshot."""

    step: Step
    tokens: TokenFrame | None
    """None when the step ends without environment tokens."""
    snapshot: Snapshot | None
    """None when no snapshot was taken at this step."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A trajectory handed to a worker, with everything needed to start or resume it."""

    header: TrajectoryHeader
    epoch: int
    state: TrajectoryState
    """What it was before the claim: queued (fresh), paused, or active (its worker died)."""
    steps: tuple[Step, ...]
    snapshot: Snapshot | None
    """Of the last committed step; None before step 0 is committed."""
    tokens: TokenFrame | None
    """All acknowledged tokens of the present context, those of an unfinished step included."""
    acks: tuple[Ack, ...]
    """Every acknowledgement given so far, for a ledger that missed the last one."""
    outcome: Outcome | None = None
    """Set when it turned out to be finished: only the ledger is left to write."""


@dataclass(frozen=True, slots=True)
class Ref:
    """Tokens [start, end) of one context, for `read`."""

    id: TrajectoryId
    start: int = 0
    end: int | None = None
    """None: to the last committed token."""
    context: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TokenRead:
    """What `read` returns; arrays of a field that was not asked for are empty."""

    ref: Ref
    token_ids: Int32Array
    loss_mask: BoolArray
    rollout_logprobs: Float32Array
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class UpdateRow:
    """One optimiser step, as replay recomputes it. Consumed = named by such a row."""

    update: int
    policy_version_in: int
    policy_version_out: int
    manifest_seq: int
    rng_key: str
    members: tuple[TrajectoryId, ...]
    advantages: tuple[float, ...]
    denominators: dict[str, float]
    loss: tuple[float, ...]
    gradient_norm: float
    checkpoint: Digest | None = None


@dataclass(frozen=True, slots=True)
class Changes:
    """Trajectories whose state changed after `cursor`, oldest first."""

    cursor: int
    items: tuple[tuple[TrajectoryId, TrajectoryState], ...] = ()


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters for metrics and the summary."""

    num_trajectories: dict[str, int] = field(default_factory=dict)
    """By state."""
    num_tokens: int = 0
    num_frames: int = 0
    journal_bytes: int = 0
    sealed_bytes: int = 0
    num_index_rebuilds: int = 0
    manifest_seq: int = 0
    recovery: JsonObject = field(default_factory=dict)
    """What the last start found: frames replayed, bytes of a torn tail set aside."""


@runtime_checkable
class TrajectoryStore(Protocol):
    """The store as its users see it: the service itself, or a proxy to one elsewhere."""

    async def begin(self, headers: list[TrajectoryHeader]) -> None:
        """Create trajectories in state queued and put them on the work queue, in this order."""
        ...

    async def requeue_paused(self) -> int:
        """Put every paused trajectory at the front of the work queue; returns how many."""
        ...

    async def claim(
        self, worker_id: str, capacity: int, holding: list[TrajectoryId], wait_s: float
    ) -> list[Claim]:
        """Take up to `capacity` trajectories, waiting up to `wait_s` for the first.

        `holding` names what the worker has; what is leased to it but not named (an answer that got
        lost) is handed out again. Also renews the worker's lease. An empty list is normal.
        """
        ...

    async def append(self, frame: TokenFrame) -> Ack:
        """Make policy tokens of an unfinished step durable.

        Raises Fenced, or StoreError for a gap, other content at a known offset, or a full disk.
        """
        ...

    async def commit_step(self, id: TrajectoryId, epoch: int, frame: StepFrame) -> list[Ack]:
        """Commit a step, its environment tokens and its snapshot together."""
        ...

    async def pause(self, id: TrajectoryId, epoch: int) -> None:
        """Give a claim back as paused; acknowledged tokens of an unfinished step are kept."""
        ...

    async def finish(self, id: TrajectoryId, epoch: int, outcome: Outcome) -> None:
        """End a trajectory. Tokens of an unfinished step are committed with it."""
        ...

    async def reap(self, worker_id: str) -> list[TrajectoryId]:
        """A worker is dead: fence its claims and put them at the front of the queue."""
        ...

    async def changes(self, cursor: int, wait_s: float) -> Changes:
        """State changes after `cursor` (0: since the beginning), waiting up to `wait_s` for one."""
        ...

    async def trajectories(self, state: TrajectoryState | None = None) -> list[Trajectory]:
        """Trajectories, in the order they were begun."""
        ...

    async def get(self, id: TrajectoryId) -> Trajectory:
        """One trajectory; an unambiguous prefix of its id will do. Raises StoreError if unknown."""
        ...

    async def snapshot(self, snapshot_id: str) -> Snapshot:
        """A committed snapshot's record. Raises StoreError if unknown."""
        ...

    async def read(self, ref: Ref, fields: tuple[str, ...] = ()) -> TokenRead:
        """Committed tokens; `fields` limits what is read (default: all)."""
        ...

    async def branch(self, header: TrajectoryHeader) -> None:
        """Begin a child that shares the committed prefix of `header.parent` by reference."""
        ...

    async def sample(self, update: int, n: int, seed: int) -> list[Ref]:
        """Draw `n` finished, rewarded trajectories without replacement by Philox(seed, update).

        Equal (seed, update, pinned manifest) give equal refs. Fewer than `n` exist: StoreError.
        """
        ...

    async def record_update(self, row: UpdateRow) -> None:
        """Append to the `updates` table."""
        ...

    async def updates(self) -> list[UpdateRow]:
        """The `updates` table, in the order in which it was written.

        An update that was made again after a rollback has several rows; the last one counts.
        """
        ...

    async def next_version(self, parent: int, checksum: Digest, blob: Digest | None) -> int:
        """The next policy version, never repeated, recorded with its parent."""
        ...

    async def pin(self) -> int:
        """Seal what is finished and keep the resulting manifest sequence readable; returns it."""
        ...

    async def stats(self) -> StoreStats:
        """Counters."""
        ...

    async def aclose(self) -> None:
        """Seal what is finished, stop, and leave the files complete."""
        ...
