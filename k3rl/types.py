"""The nouns of k3rl as frozen carriers, and how they travel.

Anyone may import this leaf. A carrier holds data and checks its own claims; behaviour lives with
the parts that use it. Between processes and in the journal a carrier is what `encode` makes of it:
a JSON head followed by raw array bytes, so nothing stored or exchanged is a pickle.

Array axes: T tokens of one context.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Any, TypeVar, cast

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from pydantic import PlainValidator, ValidationError

from k3rl.errors import UserInputError
from k3rl.wire import AS_IS, BYTES, MARK, Arrays, adapter, writer

JSON = Any  # str, int, float, bool, None, or lists and dicts of them
JsonObject = dict[str, JSON]
TrajectoryId = str  # 32 hex digits, see TrajectoryKey.id
Digest = str  # 64 hex digits of blake3
T = TypeVar("T")


def canonical_json(value: JSON) -> bytes:
    """UTF-8 JSON with sorted keys and no spaces: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def digest_bytes(data: bytes) -> Digest:
    """blake3 of `data` as 64 hex digits."""
    return blake3(data).hexdigest()


def digest_json(value: JSON) -> Digest:
    """blake3 of the canonical JSON of `value`."""
    return digest_bytes(canonical_json(value))


def philox(seed: int, *parts: int | str) -> np.random.Generator:
    """A counter-based generator keyed by `seed` and `parts`.

    Equal keys give equal streams in any process, so there is no generator state to save when a
    trajectory pauses or moves (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
    """
    raw = blake3(canonical_json([seed, *parts])).digest(16)
    return np.random.Generator(np.random.Philox(key=int.from_bytes(raw, "little")))


Array = NDArray[Any]


def _one_axis(dtype: str) -> PlainValidator:
    def check(value: Any) -> Array:
        array = np.asarray(value, dtype=dtype)
        if array.ndim != 1:
            raise ValueError(f"expected one axis, got shape {array.shape}")
        return array

    return PlainValidator(check)


Int32Array = Annotated[NDArray[np.int32], _one_axis("int32"), AS_IS]
Float32Array = Annotated[NDArray[np.float32], _one_axis("float32"), AS_IS]
BoolArray = Annotated[NDArray[np.bool_], _one_axis("bool"), AS_IS]


class Author(StrEnum):
    """Who wrote a span of tokens."""

    POLICY = "policy"
    ENVIRONMENT = "environment"


class TrajectoryState(StrEnum):
    """Where a trajectory stands; `paused` is a state, not an outcome."""

    QUEUED = "queued"
    ACTIVE = "active"
    PAUSED = "paused"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why sampling stopped (vLLM's word)."""

    STOP = "stop"
    LENGTH = "length"
    BUDGET = "budget"
    ABORT = "abort"


class OutcomeKind(StrEnum):
    """How a trajectory ended. Only the first three may carry a reward (design.md 2b)."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    POLICY_FAULT = "policy_fault"
    INFRA_FAULT = "infra_fault"
    GRADER_FAULT = "grader_fault"
    CANCELLED = "cancelled"


REWARDED = frozenset({OutcomeKind.COMPLETED, OutcomeKind.TRUNCATED, OutcomeKind.POLICY_FAULT})


class TruncationCause(StrEnum):
    """Which limit cut a trajectory off."""

    TURNS = "turns"
    CONTEXT = "context"
    BUDGET = "budget"
    TIME = "time"


class ToolStatus(StrEnum):
    """How one tool call went. All of them are answers to the policy."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"


class ProcessState(StrEnum):
    """What became, in a snapshot, of processes that ran between commands."""

    NONE = "none"
    """There were none: nothing outlives a command."""
    RESTARTED = "restarted"
    LOST = "lost"
    """There may have been some, and a restore has none of them."""


class LineageKind(StrEnum):
    """Why a trajectory has a parent."""

    BRANCH = "branch"
    SUB_AGENT = "sub_agent"
    COMPACTION = "compaction"
    RETRY = "retry"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a trajectory ended, with its reward where the ending is the policy's doing."""

    kind: OutcomeKind
    reward: float | None = None
    """None for infra_fault, grader_fault and cancelled: out of mean, count and denominator."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Named parts (correct, complete, num_steps, format); `reward` is what training uses."""
    cause: TruncationCause | None = None
    """Set exactly when `kind` is truncated."""
    detail: str = ""

    def __post_init__(self) -> None:
        """Hold the rule that an infrastructure failure is never a reward."""
        if (self.reward is not None) != (self.kind in REWARDED):
            raise ValueError(f"outcome {self.kind}: reward {self.reward} breaks the reward rule")
        if (self.cause is not None) != (self.kind is OutcomeKind.TRUNCATED):
            raise ValueError(f"outcome {self.kind}: cause {self.cause} breaks the cause rule")


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as the policy sees it."""

    name: str
    description: str
    parameters: JsonObject
    """JSON Schema of the arguments object."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call inside an assistant message."""

    tool: str
    arguments: JsonObject
    index: int
    """From 1 within the message."""
    raw: str | None = None
    """The text of an argument block that was not valid JSON; `arguments` is then empty."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The answer to one call; `content` is exactly what the policy reads."""

    tool: str
    index: int
    content: str
    status: ToolStatus = ToolStatus.OK


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. `think` and `tool_calls` belong to assistants."""

    role: str
    """system, user, assistant or tool."""
    content: str = ""
    think: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool: str | None = None
    """For role tool: which tool answers."""
    index: int | None = None
    """For role tool: the call's index."""
    malformed: str | None = None
    """For role assistant: why the sampled tokens do not parse; the policy is told."""


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """Where a trajectory of the task is cut off."""

    max_turns: int = 16
    max_context_tokens: int = 4096
    max_time_s: float = 600.0
    """Wall-clock seconds of live (not paused) time."""


@dataclass(frozen=True, slots=True)
class Task:
    """One problem. What the grader needs is derived from it, never shown to the policy."""

    env_id: str
    seed: int
    split: str = "train"
    """train or heldout; the two share no task."""
    metadata: JsonObject = field(default_factory=dict)
    limits: TaskLimits = field(default_factory=TaskLimits)

    @property
    def key(self) -> str:
        """32 hex digits that name the content of the task."""
        return digest_json([self.env_id, self.seed, self.split, self.metadata])[:32]


@dataclass(frozen=True, slots=True)
class TrajectoryKey:
    """What makes a trajectory the same trajectory; sending its appends again is a no-op."""

    run_id: str
    task_key: str
    level: str
    group_index: int
    sample_index: int
    attempt: int = 0

    @property
    def id(self) -> TrajectoryId:
        """blake3 of the six fields, 16 bytes as hex (design.md 2b)."""
        return _trajectory_id(self)


@lru_cache(maxsize=1 << 16)
def _trajectory_id(key: TrajectoryKey) -> TrajectoryId:
    """Asked for far more often than there are trajectories."""
    fields = [key.run_id, key.task_key, key.level]
    return digest_json([*fields, key.group_index, key.sample_index, key.attempt])[:32]


@dataclass(frozen=True, slots=True)
class ParentRef:
    """Where a trajectory branched off; its sandbox is the snapshot before `step`."""

    id: TrajectoryId
    context: int
    token_offset: int
    step: int
    kind: LineageKind


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens with one author and one version; ends where the next one starts."""

    start: int
    """Token offset, relative to the array it travels with."""
    author: Author
    policy_version: int
    state_version: int
    """The oldest version that computed any part of the state sampled from."""


@dataclass(frozen=True, slots=True)
class Media:
    """One image in a context: one media id in the tokens, expanded by the model."""

    index: int
    blob: Digest
    grid: tuple[int, int, int]
    num_features: int


@dataclass(frozen=True, slots=True)
class ToolRecord:
    """One executed call, as replay compares it."""

    call: ToolCall
    status: ToolStatus
    output: str
    """What the policy read; longer than 4 KiB: its first 4 KiB."""
    output_digest: Digest
    """Of the whole output."""
    wall_s: float


@dataclass(frozen=True, slots=True)
class Step:
    """The commit unit: one policy turn and the tool results it caused.

    Step 0 is the opening: the environment's first observation and the first snapshot, no turn.
    """

    index: int
    token_start: int
    token_end: int
    """Tokens [token_start, token_end) of the context: the turn, then its results."""
    calls: tuple[ToolRecord, ...] = ()
    snapshot_before: str | None = None
    snapshot_after: str | None = None
    tree_digest: Digest | None = None
    finish_reason: FinishReason | None = None
    is_terminal: bool = False
    """The world ended with this step; only grading is left."""
    env_state: JsonObject = field(default_factory=dict)
    """What the environment itself must remember to resume after this step."""
    context: int = 0
    generate_s: float = 0.0
    act_s: float = 0.0
    snapshot_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An immutable stack of content-addressed layers and a session descriptor."""

    snapshot_id: str
    """hash(parent, layer, session): names the stack, for exact restore."""
    parent: str | None
    layers: tuple[Digest, ...]
    """Bottom first."""
    session: JsonObject
    tree_digest: Digest
    """Names the content (path, type, mode, bytes, link target): what replay compares."""
    num_bytes: int = 0
    process_state: ProcessState = ProcessState.NONE


@dataclass(frozen=True, slots=True)
class TrajectoryHeader:
    """What is known when a trajectory is created."""

    key: TrajectoryKey
    task: Task
    budget: int | None = None
    """Sampled tokens allowed at this level; None: no budget."""
    parent: ParentRef | None = None
    digests: dict[str, str] = field(default_factory=dict)
    """Of env, harness, tokenizer and sandbox: what a reader must match."""
    capabilities: tuple[str, ...] = ()
    """What the run's sandboxes enforce, probed where it was started; workers refuse to run less."""
    iteration: int = 0
    temperature: float = 1.0
    """Of the law to sample from: 1 is the law that is trained, 0 takes the most likely token."""

    @property
    def id(self) -> TrajectoryId:
        """The trajectory's id."""
        return self.key.id


@dataclass(frozen=True, slots=True)
class Trajectory:
    """What the store knows of a trajectory, without its token arrays."""

    header: TrajectoryHeader
    state: TrajectoryState
    num_tokens: int
    """Committed tokens, visible to readers."""
    num_policy_tokens: int
    steps: tuple[Step, ...] = ()
    outcome: Outcome | None = None
    num_contexts: int = 1

    @property
    def id(self) -> TrajectoryId:
        """The trajectory's id."""
        return self.header.id


class _Hashed:
    """Room for a content hash beside the fields of a carrier."""

    __slots__ = ("_content_hash",)
    _content_hash: Digest


@dataclass(frozen=True, slots=True, eq=False)
class TokenFrame(_Hashed):
    """Tokens [offset, offset + T) of one context, as a writer appends them."""

    id: TrajectoryId
    epoch: int
    """Fencing number of the writer's claim."""
    offset: int
    token_ids: Int32Array
    loss_mask: BoolArray
    rollout_logprobs: Float32Array
    """NaN where the environment wrote."""
    spans: tuple[Span, ...]
    context: int = 0

    def __post_init__(self) -> None:
        """Hold that the arrays are of one length and dtype, and the spans cover it from 0."""
        dtypes = [self.token_ids.dtype, self.loss_mask.dtype, self.rollout_logprobs.dtype]
        if dtypes != [np.int32, np.bool_, np.float32]:
            raise ValueError(f"expected int32, bool and float32 arrays, got {dtypes}")
        count = len(self.token_ids)
        if not len(self.loss_mask) == len(self.rollout_logprobs) == count:
            raise ValueError("token_ids, loss_mask and rollout_logprobs differ in length")
        starts = [span.start for span in self.spans]
        if count and (not starts or starts[0] != 0 or starts != sorted(set(starts))):
            raise ValueError(f"spans must start at 0 and rise, got {starts}")
        if starts and starts[-1] >= max(count, 1):
            raise ValueError(f"span start {starts[-1]} is beyond {count} tokens")

    def content_hash(self) -> Digest:
        """blake3 over ids, mask and log-prob bits: what a ledger records. Computed once."""
        try:
            return self._content_hash
        except AttributeError:
            arrays = (self.token_ids, self.loss_mask, self.rollout_logprobs)
            found = digest_bytes(b"".join([each.tobytes() for each in arrays]))
            object.__setattr__(self, "_content_hash", found)
            return found


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Up to 4,096 consecutive tokens of one context: the stored row and unit of random read."""

    id: TrajectoryId
    context: int
    index: int
    token_start: int
    token_ids: Int32Array
    loss_mask: BoolArray
    rollout_logprobs: Float32Array
    spans: tuple[Span, ...]
    content_hash: Digest
    media: tuple[Media, ...] = ()
    expert_ids: Digest | None = None
    """Blob of uint16 [T, layers, k]; None: not recorded."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """What the learner eats: trajectories packed end to end, T tokens in all."""

    token_ids: Int32Array
    cu_seqlens: Int32Array
    """[N + 1] start of each trajectory, then T."""
    loss_mask: BoolArray
    rollout_logprobs: Float32Array
    advantages: Float32Array
    token_weight: Float32Array
    policy_version: Int32Array
    trajectory_index: Int32Array
    initial_state: tuple[Digest, ...] | None = None
    expert_ids: Digest | None = None
    media: tuple[Media, ...] = ()
    returns: Float32Array | None = None
    values: Float32Array | None = None
    teacher_logprobs: Float32Array | None = None
    ref_logprobs: Float32Array | None = None
    prefix_parent: Int32Array | None = None


def to_plain(value: Any, cls: Any = None) -> JSON:
    """A carrier without arrays as plain JSON values."""
    return adapter(cast(Any, cls or type(value))).dump_python(value, mode="json")


def from_plain(cls: type[T], value: JSON) -> T:
    """The inverse of `to_plain`. Raises UserInputError naming the field that does not fit."""
    try:
        return cast(T, adapter(cast(Any, cls)).validate_python(value))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        raise UserInputError(": ".join(filter(None, (_name(cls), where, reason)))) from None


def _name(cls: Any) -> str:
    return getattr(cls, "__name__", str(cls))


def encode(value: Any, cls: Any = None) -> bytes:
    """A carrier as bytes: uint32 head length, JSON head, then the arrays it names in order.

    Byte strings travel like arrays. A set becomes a sorted list.
    """
    arrays: Arrays = []
    head = writer(cast(Any, cls or type(value)))(value, arrays).encode()
    parts = [each if isinstance(each, bytes) else each.tobytes() for each in arrays]
    return b"".join([struct.pack("<I", len(head)), head, *parts])


def decode(cls: type[T], data: bytes) -> T:
    """The inverse of `encode`. Raises UserInputError on bytes that are not such a carrier."""
    try:
        (position,) = struct.unpack_from("<I", data)
        position += 4
        head = data[4:position]
    except struct.error as error:
        raise UserInputError(f"{cls}: not an encoded carrier: {error}") from None

    def drop(node: JsonObject) -> Any:
        nonlocal position
        if MARK in node:
            kind, count = node[MARK]
            if kind == BYTES:
                position += count
                if not 0 <= count <= position <= len(data):
                    raise ValueError(f"{count} bytes are not there")
                return data[position - count : position]
            dtype = np.dtype(kind)
            array = np.frombuffer(data, dtype, count, position)
            position += array.nbytes
            return array
        return {key.removeprefix("$"): item for key, item in node.items()}

    try:
        # Objects come in the order in which they end; arrays hold none, so they come in order.
        plain = json.loads(head, object_hook=drop if b'"$' in head else None)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserInputError(f"{cls}: not an encoded carrier: {error}") from None
    return from_plain(cls, plain)
