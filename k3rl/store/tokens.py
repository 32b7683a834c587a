"""Token arrays from where they lie: journal frames by pread, sealed segments by row group.

Every read checks what it reads: the frame's checksum, Parquet's page checksums and, when all three
arrays are read, the segment's content hash. What is asked for together reads a row group once.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from k3rl.errors import CorruptData, UserInputError
from k3rl.store.arrow import flags, numbers, whole
from k3rl.store.events import StepCommitted
from k3rl.store.journal import Place, event_of, parse
from k3rl.store.open_files import SealedFiles, read_at
from k3rl.store.pages import LEAVES, GroupRows, Unusual
from k3rl.store.record import Extent, Piece, Row
from k3rl.types import Author, BoolArray, Float32Array, Int32Array, Span, TokenFrame, digest_bytes

ARRAYS = ("token_ids", "loss_mask", "rollout_logprobs")
FIELDS = (*ARRAYS, "spans")


class Tokens(NamedTuple):
    """Consecutive tokens; an array or the spans that were not asked for are empty."""

    token_ids: Int32Array
    loss_mask: BoolArray
    rollout_logprobs: Float32Array
    spans: tuple[Span, ...]


Part: TypeAlias = tuple[int, int, Piece]
"""A piece, which request it belongs to, and its place there."""


class TokenFiles:
    """Reads pieces of trajectories under one store root. Safe to use from several threads.

    Raises FileNotFoundError for a file that is gone: its tokens were sealed, or written again,
    meanwhile, so the caller looks up their places again.
    """

    def __init__(self, root: Path, sealed: SealedFiles) -> None:
        """`sealed` is shared with whoever else reads sealed files."""
        self._root = root
        self._sealed = sealed
        self._journals: dict[str, FileIO] = {}
        self._guard = threading.Lock()

    def load(self, pieces: Sequence[Piece], fields: tuple[str, ...] = FIELDS) -> Tokens:
        """The pieces end to end. `fields` of FIELDS; equal neighbouring spans come out as one."""
        return self.load_many([pieces], fields)[0]

    def load_many(
        self,
        requests: Sequence[Sequence[Piece]],
        fields: tuple[str, ...] = FIELDS,
        may_wait: bool = True,
    ) -> list[Tokens]:
        """What `load` gives for each of several lists of pieces.

        Raises BlockingIOError when it may not wait for the disk, and would have to.
        """
        found: dict[tuple[int, int], Tokens] = {}
        groups: defaultdict[tuple[str, int], list[Part]] = defaultdict(list)
        for owner, pieces in enumerate(requests):
            for at, piece in enumerate(pieces):
                place = piece.extent.place
                if isinstance(place, Row):
                    groups[place.file, place.row_group].append((owner, at, piece))
                else:
                    frame = self.frame_tokens(piece.extent, may_wait)
                    found[owner, at] = _cut(frame, piece, fields)
        for path, group in sorted(groups):
            parts = groups[path, group]
            for part, tokens in self._group(path, group, parts, fields, may_wait):
                found[part[:2]] = tokens
        return [
            join([found[owner, at] for at in range(len(pieces))], fields)
            for owner, pieces in enumerate(requests)
        ]

    def frame_tokens(self, extent: Extent, may_wait: bool = True) -> TokenFrame:
        """The tokens of an extent that is one journal frame."""
        place = extent.place
        assert isinstance(place, Place)
        path = str(self._root / "journal" / place.file)
        # Held until it was read: `forget` drops the last other reference, and that closes it.
        file = self._journal(place.file)
        data = bytes(read_at(file, place.num_bytes, place.offset, may_wait))
        frame = parse(data, 0, path, place.offset)
        if frame is None:
            raise CorruptData(path, place.offset, "frame", "the file ends inside it")
        event = event_of(frame, path)
        found = event.frame.tokens if isinstance(event, StepCommitted) else event
        if not isinstance(found, TokenFrame):
            raise CorruptData(path, place.offset, "kind", "the frame holds no tokens")
        is_its = (found.offset, len(found.token_ids)) == (extent.start, extent.num_tokens)
        if not is_its or found.content_hash() != extent.content_hash:
            raise CorruptData(path, place.offset, "tokens", "the frame holds other tokens")
        return found

    def forget(self, names: Iterable[str]) -> None:
        """Journal files that have gone. Reads under way keep their open file."""
        with self._guard:
            for name in names:
                self._journals.pop(name, None)

    def _journal(self, name: str) -> FileIO:
        with self._guard:
            if name not in self._journals:
                self._journals[name] = FileIO(self._root / "journal" / name)
            return self._journals[name]

    def _group(
        self,
        path: str,
        group: int,
        parts: list[Part],
        fields: tuple[str, ...],
        may_wait: bool,
    ) -> Iterator[tuple[Part, Tokens]]:
        """Tokens of parts that lie in one row group of a sealed file."""
        places = [piece.extent.place for _, _, piece in parts]
        rows = [place.row for place in places if isinstance(place, Row)]
        where = (str(self._root / path), group)
        found = self._rows(path, group, rows, fields, may_wait)
        for part, tokens in zip(parts, found, strict=True):
            piece = part[2]
            if set(ARRAYS) <= set(fields):
                _check_hash(*where, piece, tokens)
            yield part, _cut(tokens, piece, fields)

    def _rows(
        self, path: str, group: int, rows: list[int], fields: tuple[str, ...], may_wait: bool
    ) -> list[Tokens]:
        """Rows of a row group. Whatever our own decoding stumbles over, pyarrow judges."""
        try:
            found = self._sealed.group_rows(path, group, fields, may_wait)
            return [_from_pages(found, row, fields) for row in rows]
        except (Unusual, LookupError, ValueError) as error:
            if not may_wait:
                raise BlockingIOError from error
        table = self._sealed.read(path, [group], list(fields))
        if max(rows) >= table.num_rows:
            detail = f"row group {group}: has {table.num_rows} rows"
            raise CorruptData(str(self._root / path), 0, "rows", detail)
        arrow = ArrowRows(table, fields)
        return [arrow.tokens(row) for row in rows]


class ArrowRows:
    """Rows of a table of segments, as tokens."""

    def __init__(self, table: Any, fields: tuple[str, ...]) -> None:
        """`fields` of FIELDS are its columns."""
        columns = {name: whole(table.column(name)) for name in fields}
        self._offsets = {name: numbers(column.offsets) for name, column in columns.items()}
        self._values = {
            name: flags(column.values) if name == "loss_mask" else numbers(column.values)
            for name, column in columns.items()
            if name != "spans"
        }
        self._spans = columns["spans"].values if "spans" in columns else None

    def tokens(self, row: int) -> Tokens:
        """One row; arrays are views."""
        return Tokens(
            self._array("token_ids", row, np.int32),
            self._array("loss_mask", row, np.bool_),
            self._array("rollout_logprobs", row, np.float32),
            self._row_spans(row),
        )

    def _range(self, name: str, row: int) -> tuple[int, int]:
        offsets = self._offsets[name]
        return int(offsets[row]), int(offsets[row + 1])

    def _array(self, name: str, row: int, dtype: type) -> Any:
        if name not in self._values:
            return np.empty(0, dtype)
        low, high = self._range(name, row)
        return self._values[name][low:high]

    def _row_spans(self, row: int) -> tuple[Span, ...]:
        if self._spans is None:
            return ()
        low, high = self._range("spans", row)
        found = self._spans.slice(low, high - low)
        names = ("start", "author", "policy_version", "state_version")
        start, author, *versions = (found.field(name).to_pylist() for name in names)
        return tuple(map(Span, start, map(Author, author), *versions))


def _from_pages(rows: GroupRows, row: int, fields: tuple[str, ...]) -> Tokens:
    ids, mask, logprobs = (LEAVES[name][0] for name in ARRAYS)
    spans: tuple[Span, ...] = ()
    if "spans" in fields:
        start, author, policy, state = LEAVES["spans"]
        versions = (rows.integers(name, row).tolist() for name in (policy, state))
        authors = map(Author, rows.texts(author, row))
        spans = tuple(map(Span, rows.integers(start, row).tolist(), authors, *versions))
    return Tokens(
        rows.integers(ids, row) if "token_ids" in fields else np.empty(0, np.int32),
        rows.booleans(mask, row) if "loss_mask" in fields else np.empty(0, np.bool_),
        rows.floats(logprobs, row) if "rollout_logprobs" in fields else np.empty(0, np.float32),
        spans,
    )


def check_fields(fields: tuple[str, ...]) -> tuple[str, ...]:
    """`fields`, or all when empty. Raises UserInputError for an unknown one."""
    for name in fields:
        if name not in FIELDS:
            raise UserInputError(f"read: field {name!r} is none of {', '.join(FIELDS)}")
    return tuple(name for name in FIELDS if name in fields) if fields else FIELDS


def join(parts: Sequence[Tokens], fields: tuple[str, ...] = FIELDS) -> Tokens:
    """Parts end to end, with spans that start at 0 and differ from their neighbours."""
    empty = Tokens(np.empty(0, np.int32), np.empty(0, bool), np.empty(0, np.float32), ())

    def whole(name: str) -> Any:
        if not parts or name not in fields:
            return getattr(empty, name)
        arrays = [getattr(part, name) for part in parts]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    spans: list[Span] = []
    for span in (span for part in parts for span in part.spans):
        if not spans or _moved(spans[-1], span.start) != span:
            spans.append(span)
    if spans:
        first = spans[0].start
        spans = [_moved(span, span.start - first) for span in spans]
    arrays = (whole("token_ids"), whole("loss_mask"), whole("rollout_logprobs"))
    return Tokens(*arrays, tuple(spans))


def content_hash(tokens: Tokens, low: int = 0, high: int | None = None) -> str:
    """`TokenFrame.content_hash` of tokens [low, high)."""
    return digest_bytes(b"".join(getattr(tokens, name)[low:high].tobytes() for name in ARRAYS))


def _cut(tokens: Tokens | TokenFrame, piece: Piece, fields: tuple[str, ...]) -> Tokens:
    """The piece of an extent's tokens, in arrays of its own: what it was cut from may go.

    Spans count from the context's start.
    """
    low, high, start = piece.low, piece.high, piece.extent.start
    spans: list[Span] = []
    if "spans" in fields:
        ends = [span.start for span in tokens.spans[1:]] + [piece.extent.num_tokens]
        spans = [
            _moved(span, start + max(span.start, low))
            for span, end in zip(tokens.spans, ends, strict=True)
            if end > low and span.start < high
        ]
    return Tokens(
        tokens.token_ids[low:high].copy(),
        tokens.loss_mask[low:high].copy(),
        tokens.rollout_logprobs[low:high].copy(),
        tuple(spans),
    )


def _moved(span: Span, start: int) -> Span:
    return Span(start, span.author, span.policy_version, span.state_version)


def _check_hash(path: str, row_group: int, piece: Piece, tokens: Tokens) -> None:
    if content_hash(tokens) != piece.extent.content_hash:
        detail = f"row group {row_group}: tokens do not match their hash"
        raise CorruptData(path, 0, "content_hash", detail)
