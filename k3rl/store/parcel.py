"""What the file of an exported trajectory holds, section by section, and the check of all of it.

Order: one head, the steps, the tokens (cut as segments, contexts one after the other), the
snapshots that the steps name, and the blobs that these need. Steps and tokens inherited from a
parent are in it like its own, so a branch stands by itself; its header still names the parent. The
same trajectory gives the same contents, whichever store it lies in.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
from blake3 import blake3

from k3rl.errors import CorruptData
from k3rl.store.checks import (
    check_frame,
    check_header,
    check_snapshot_fits,
    check_step_fits,
)
from k3rl.store.journal import Place
from k3rl.store.protocol import TokenRead
from k3rl.store.record import ContextRecord, Extent, num_policy_tokens
from k3rl.store.sealing import segment_ranges
from k3rl.store.sections import Section, SectionFile
from k3rl.store.tokens import TokenFiles
from k3rl.types import (
    Digest,
    Outcome,
    Snapshot,
    Span,
    Step,
    TokenFrame,
    Trajectory,
    TrajectoryHeader,
    TrajectoryId,
    digest_bytes,
    from_plain,
    to_plain,
)

References = Callable[[bytes, str], Iterable[Digest]]
"""(a layer blob, its place for messages) -> the other blobs that it needs."""
T = TypeVar("T")
_LENGTH = struct.Struct("<I")
UNREADABLE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)
"""What a content that is no carrier of ours makes its readers raise; a UserInputError is one."""


class Kind(IntEnum):
    """Of a section. Numbers are never reused."""

    HEAD = 1
    STEP = 2
    TOKENS = 3
    SNAPSHOT = 4
    BLOB = 5


@dataclass(frozen=True, slots=True)
class Head:
    """What is known of a finished trajectory beside its steps and tokens."""

    header: TrajectoryHeader
    outcome: Outcome
    contexts: tuple[int, ...]
    """Tokens of each context."""
    num_policy_tokens: int


@dataclass(frozen=True, slots=True)
class _Place:
    """Where tokens belong."""

    context: int
    start: int
    spans: tuple[Span, ...]
    """Relative to `start`."""


def head_of(trajectory: Trajectory) -> Head:
    """The head of a finished trajectory. A context but the last ends where its last step does."""
    assert trajectory.outcome is not None
    ends = {step.context: step.token_end for step in trajectory.steps}
    before = [ends.get(context, 0) for context in range(trajectory.num_contexts - 1)]
    contexts = (*before, trajectory.num_tokens - sum(before))
    return Head(trajectory.header, trajectory.outcome, contexts, trajectory.num_policy_tokens)


def token_ranges(head: Head, steps: Iterable[Step]) -> Iterator[tuple[int, int, int]]:
    """(context, start, end) of the sections of tokens, in order."""
    ends = defaultdict(list)
    for step in steps:
        ends[step.context].append(step.token_end)
    for context, count in enumerate(head.contexts):
        for start, end in segment_ranges(0, count, ends[context]):
            yield context, start, end


def pack(value: Any) -> bytes:
    """A carrier without arrays; ASCII, as texts may hold what UTF-8 cannot."""
    return json.dumps(to_plain(value)).encode()


def unpack(cls: type[T], content: bytes) -> T:
    """The inverse of `pack`. Raises one of UNREADABLE."""
    return from_plain(cls, json.loads(content))


def pack_tokens(read: TokenRead) -> bytes:
    """uint32 length of a JSON head, the head, then ids int32, mask bytes, log-probs float32."""
    head = pack(_Place(read.ref.context, read.ref.start, read.spans))
    arrays = (read.token_ids, read.loss_mask, read.rollout_logprobs)
    little = [array.astype(array.dtype.newbyteorder("<"), copy=False) for array in arrays]
    return b"".join([_LENGTH.pack(len(head)), head, *(array.tobytes() for array in little)])


def unpack_tokens(content: bytes, id: TrajectoryId) -> TokenFrame:
    """The inverse of `pack_tokens`. Raises one of UNREADABLE."""
    (size,) = _LENGTH.unpack_from(content)
    body = _LENGTH.size + size
    place = unpack(_Place, content[_LENGTH.size : body])
    count, rest = divmod(len(content) - body, 9)
    if rest or np.any(np.frombuffer(content, np.uint8, count, body + 4 * count) > 1):
        raise ValueError("the arrays are cut short, or the mask is none")
    frame = TokenFrame(
        id,
        0,
        place.start,
        np.frombuffer(content, "<i4", count, body).astype(np.int32),
        np.frombuffer(content, np.bool_, count, body + 4 * count),
        np.frombuffer(content, "<f4", count, body + 5 * count).astype(np.float32),
        place.spans,
        place.context,
    )
    check_frame(frame)
    return frame


def digest_of(contents: Iterable[tuple[int, bytes]]) -> Digest:
    """The content digest: of all sections but the blobs, which snapshots name by their digests."""
    hasher = blake3()
    for kind, content in contents:
        hasher.update(struct.pack("<BQ", kind, len(content))).update(content)
    return hasher.hexdigest()


@dataclass(slots=True)
class Parcel:
    """A file that was checked as a whole; tokens and blobs stay in it."""

    file: SectionFile
    references: References
    head: Head
    steps: list[Step] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    contexts: dict[int, ContextRecord] = field(default_factory=dict)
    """As a store's memory holds them; places are those of sections."""
    tokens: dict[int, Section] = field(default_factory=dict)
    """By offset in the file."""
    blobs: dict[Digest, Section] = field(default_factory=dict)
    content: Digest = ""
    _layers: set[Digest] = field(default_factory=set)
    _needed: set[Digest] = field(default_factory=set)
    _num_policy: int = 0
    _kind: int = Kind.HEAD

    @classmethod
    def read(cls, file: SectionFile, references: References) -> Parcel:
        """Check every byte and what the sections say together. Raises CorruptData."""
        found: Parcel | None = None

        def carriers() -> Iterator[tuple[int, bytes]]:
            nonlocal found
            for section, content in file:
                try:
                    if found is None:
                        found = cls(file, references, _head(section, content))
                    else:
                        found._take(section, content)
                except CorruptData:
                    raise
                except UNREADABLE as error:
                    where = f"section {section.number}"
                    raise file.bad(section.offset, where, str(error)) from None
                if section.kind != Kind.BLOB:
                    yield section.kind, content

        content = digest_of(carriers())
        if found is None:
            raise file.bad(0, "head", "the file holds nothing")
        found._check_whole()
        found.content = content
        return found

    def _take(self, section: Section, content: bytes) -> None:
        if not self._kind <= section.kind <= Kind.BLOB or section.kind == Kind.HEAD:
            raise ValueError(f"kind {section.kind} cannot follow kind {self._kind}")
        self._kind = section.kind
        match section.kind:
            case Kind.STEP:
                step = unpack(Step, content)
                check_step_fits(step)
                self.steps.append(step)
            case Kind.TOKENS:
                self._take_tokens(section, unpack_tokens(content, self.head.header.id))
            case Kind.SNAPSHOT:
                taken = unpack(Snapshot, content)
                check_snapshot_fits(taken)
                self.snapshots.append(taken)
                self._layers.update(taken.layers)
                self._needed.update(taken.layers)
            case Kind.BLOB:
                self._take_blob(section, content)

    def _take_tokens(self, section: Section, frame: TokenFrame) -> None:
        number, count = frame.context, len(frame.token_ids)
        may_be = range(max(self.contexts, default=0), len(self.head.contexts))
        context = self.contexts.setdefault(number, ContextRecord())
        if number not in may_be or frame.offset != context.acked or not count:
            where = f"{count} at {frame.offset} of context {number}"
            raise ValueError(f"these tokens do not follow those before them: {where}")
        place = Place(str(self.file.path), section.offset, section.num_stored)
        context.extents.append(Extent(frame.offset, count, frame.content_hash(), place))
        context.acked = context.committed = frame.offset + count
        self._num_policy += num_policy_tokens(frame)
        self.tokens[section.offset] = section

    def _take_blob(self, section: Section, content: bytes) -> None:
        digest = digest_bytes(content)
        if digest in self.blobs or digest not in self._needed:
            raise ValueError(f"blob {digest} is there twice, or nothing before it needs it")
        self.blobs[digest] = section
        if digest in self._layers:
            self._needed.update(self.references(content, f"{self.file.path}: layer {digest}"))

    def _check_steps(self) -> None:
        """They tile each context from its start; only the last one has tokens after them."""
        ends = [0] * len(self.head.contexts)
        last = 0
        for number, step in enumerate(self.steps):
            is_next = step.index == number and 0 <= step.context - last <= 1
            last = step.context
            if not is_next or last >= len(ends) or step.token_start != ends[last]:
                raise ValueError(f"step {step.index} does not follow the one before it")
            if step.token_end < step.token_start:
                raise ValueError(f"step {step.index} ends before it starts")
            ends[last] = step.token_end
        if tuple(ends[:-1]) != self.head.contexts[:-1] or ends[-1] > self.head.contexts[-1]:
            raise ValueError(f"the steps end at {ends} of {self.head.contexts} tokens")

    def _check_whole(self) -> None:
        """What only shows when all sections were read."""
        try:
            self._check_steps()
            for number in range(len(self.head.contexts)):
                self.contexts.setdefault(number, ContextRecord())
            found = tuple(self.contexts[number].acked for number in sorted(self.contexts))
            if found != self.head.contexts:
                raise ValueError(f"{found} tokens, the head says {self.head.contexts}")
            if self._num_policy != self.head.num_policy_tokens:
                said = self.head.num_policy_tokens
                raise ValueError(f"{self._num_policy} policy tokens, the head says {said}")
            named = snapshots_of(self.steps)
            if [taken.snapshot_id for taken in self.snapshots] != named:
                raise ValueError(f"the snapshots are not those of the steps: {', '.join(named)}")
            if absent := self._needed - self.blobs.keys():
                raise ValueError(f"blob {min(absent)} is missing")
        except UNREADABLE as error:
            raise self.file.bad(0, "content", str(error)) from None


def snapshots_of(steps: Iterable[Step]) -> list[str]:
    """The snapshots that steps left behind, each once, in order."""
    return list(dict.fromkeys(step.snapshot_after for step in steps if step.snapshot_after))


def _head(section: Section, content: bytes) -> Head:
    if section.kind != Kind.HEAD:
        raise ValueError(f"the first section is of kind {section.kind}, not {Kind.HEAD:d}")
    head = unpack(Head, content)
    check_header(head.header)
    if not head.contexts or min(*head.contexts, head.num_policy_tokens) < 0:
        raise ValueError("a context is missing, or a number is negative")
    return head


class ParcelTokens(TokenFiles):
    """The tokens of a checked file, for sealing: a frame is a section of it."""

    def __init__(self, parcel: Parcel) -> None:
        """Reads nothing else."""
        self._parcel = parcel

    def frame_tokens(self, extent: Extent, may_wait: bool = True) -> TokenFrame:
        """The tokens of a section, checked again."""
        assert isinstance(extent.place, Place)
        parcel = self._parcel
        content = parcel.file.content(parcel.tokens[extent.place.offset])
        return unpack_tokens(content, parcel.head.header.id)
