"""The TrajectoryStore contract: append, commit, claim, sample, read, branch.

Files are the truth; Redis is a live index that can be rebuilt from them. One service per store
root owns journal, manifest and Redis; everyone else appends and reads through it. An
acknowledgement (`Ack`) means durable. Tokens of an unfinished step are durable and resumable, but
readers see a step only once it is committed together with its snapshot.

Every write names the writer's `epoch`; a writer whose claim was taken over gets `Fenced`. Sending
the same write again is a no-op with the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

from k3rl.errors import UserInputError
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
    num_sampled: int = 0
    """Acknowledged tokens of the policy, over all contexts."""


@dataclass(frozen=True, slots=True)
class Ref:
    """Tokens [start, end) of one context, for `read`."""

    id: TrajectoryId
    start: int = 0
    end: int | None = None
    """None: to the last committed token."""
    context: int = 0


class SampleUnit(StrEnum):
    """What is equally likely to be drawn, before strata and priorities."""

    TRAJECTORY = "trajectory"
    """Each trajectory. Drawn without replacement."""
    SEGMENT = "segment"
    """Each stored segment. Drawn without replacement."""
    TOKEN = "token"
    """Each position of a window inside a context."""


class Stratum(StrEnum):
    """What all elements of a stratum have in common."""

    GROUP = "group"
    LEVEL = "level"
    OUTCOME = "outcome"
    VERSION = "version"
    """The oldest policy version that wrote any of the element's tokens."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One draw from the finished, rewarded trajectories as of a manifest record.

    Imported trajectories are not among them: no update of this run may train on them.
    Equal requests give equal refs as long as the record can be drawn from, whatever was sealed
    since and however the files are laid out.
    """

    update: int
    n: int
    """How many elements: trajectories, segments or windows."""
    seed: int
    manifest_seq: int | None = None
    """None: the newest pinned record."""
    unit: SampleUnit = SampleUnit.TRAJECTORY
    window: int | None = None
    """Tokens of a window, which lies inside one context; all of a context that is shorter.

    Needed by unit token; of a trajectory one window is drawn; not for unit segment.
    """
    is_inherited: bool = False
    """Whether a window may reach into the tokens that a branch has from its parent."""
    stratify: Stratum | None = None
    """Equally many elements of each stratum, as far as it has so many."""
    min_version: int | None = None
    """Only elements none of whose own tokens are of an older policy version.

    A window is drawn where all segments that it touches are so new.
    """
    weights: dict[TrajectoryId, float] | None = None
    """How much more likely each trajectory is; not named: never. Drawn with replacement."""
    reward_temperature: float | None = None
    """Weights of exp(reward / temperature). Drawn with replacement."""


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
    free_bytes: int = 0
    """On the store's disk, at the last look."""
    num_refused: int = 0
    """Beginnings that failed for want of room on the disk."""
    num_rewritten: int = 0
    """Sealed batches that compaction wrote again."""
    num_deleted_bytes: int = 0
    """Of garbage."""
    recovery: JsonObject = field(default_factory=dict)
    """What the last start found: frames replayed, bytes of a torn tail set aside."""


def check_digests(header: TrajectoryHeader, present: Mapping[str, Digest]) -> None:
    """Whether a reader may make anything of a trajectory: what it was made with, and what is here.

    `present` by name (tokenizer, env, ...); one that the header does not name is not compared.
    Raises UserInputError for a digest that differs.
    """
    for name, digest in present.items():
        stored = header.digests.get(name, digest)
        if stored != digest:
            raise UserInputError(
                f"trajectory {header.id}: its {name} digest is {stored[:12]}, this installation's"
                f" is {digest[:12]}: use the version that made it"
            )


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

    async def read_many(self, refs: list[Ref], fields: tuple[str, ...] = ()) -> list[TokenRead]:
        """What `read` gives for each ref, for less than reading them one by one."""
        ...

    async def branch(self, header: TrajectoryHeader) -> None:
        """Begin a child that shares the committed prefix of `header.parent` by reference."""
        ...

    async def sample(self, request: SampleRequest) -> list[Ref]:
        """Draw elements by Philox(seed, update); of a trajectory a ref to each of its contexts.

        Raises StoreError when there are fewer than `n`, or the record cannot be drawn from.
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

    async def pin(self, name: str = "") -> int:
        """Seal what is finished; `sample` draws from the resulting manifest record; its sequence.

        Under a name, all that is there as of that record is kept, whatever the retention policy
        says, until `unpin`; a name that is taken moves to the new record.
        """
        ...

    async def unpin(self, name: str) -> None:
        """Let go of what a name keeps; one that keeps nothing is let go already."""
        ...

    async def stats(self) -> StoreStats:
        """Counters."""
        ...

    async def aclose(self) -> None:
        """Seal what is finished, stop, and leave the files complete."""
        ...
