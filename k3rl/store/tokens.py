"""Token arrays from where they lie: journal frames by pread, sealed segments by row group.

Every read checks what it reads: the frame's checksum, Parquet's page checksums and, when all three
arrays are read, the segment's content hash.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from io import FileIO
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from k3rl.errors import CorruptData, UserInputError
from k3rl.store.events import StepCommitted
from k3rl.store.journal import Place, event_of, parse
from k3rl.store.manifest import SealedFile
from k3rl.store.parquet import open_sealed, read_groups
from k3rl.store.record import Extent, Piece, Row
from k3rl.types import Author, BoolArray, Float32Array, Int32Array, Span, TokenFrame, digest_bytes

ARRAYS = ("token_ids", "loss_mask", "rollout_logprobs")
FIELDS = (*ARRAYS, "spans")
MAX_FOOTERS = 64


class Tokens(NamedTuple):
    """Consecutive tokens; an array or the spans that were not asked for are empty."""

    token_ids: Int32Array
    loss_mask: BoolArray
    rollout_logprobs: Float32Array
    spans: tuple[Span, ...]


class TokenFiles:
    """Reads pieces of trajectories under one store root. Safe to use from several threads.

    Raises FileNotFoundError for a journal file that is gone: its tokens were sealed meanwhile, so
    the caller looks up their places again.
    """

    def __init__(self, root: Path, sealed: Callable[[str], SealedFile]) -> None:
        """`sealed` finds the manifest entry of a path."""
        self._root = root
        self._sealed = sealed
        self._journals: dict[str, FileIO] = {}
        self._footers: OrderedDict[str, Any] = OrderedDict()
        self._guard = threading.Lock()

    def load(self, pieces: Sequence[Piece], fields: tuple[str, ...] = FIELDS) -> Tokens:
        """The pieces end to end. `fields` of FIELDS; equal neighbouring spans come out as one."""
        parts: list[Tokens] = []
        for group, run in groupby(pieces, key=_group_of):
            if group is None:
                parts.extend(_cut(self.frame_tokens(p.extent), p, fields) for p in run)
            else:
                parts.extend(self._segments(group, list(run), fields))
        return join(parts, fields)

    def frame_tokens(self, extent: Extent) -> TokenFrame:
        """The tokens of an extent that is one journal frame."""
        place = extent.place
        assert isinstance(place, Place)
        path = str(self._root / "journal" / place.file)
        # Held until it was read: `forget` drops the last other reference, and that closes it.
        file = self._journal(place.file)
        data = os.pread(file.fileno(), place.num_bytes, place.offset)
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

    def _segments(
        self, group: tuple[str, int], run: list[Piece], fields: tuple[str, ...]
    ) -> Iterator[Tokens]:
        path, row_group = group
        file = self._sealed(path)
        opened = open_sealed(self._root, file, self._footers.get(path))
        with self._guard:
            self._footers[path] = opened.metadata
            if len(self._footers) > MAX_FOOTERS:
                self._footers.popitem(last=False)
        table = read_groups(self._root, file, opened, [row_group], list(fields))
        columns = {name: table.column(name).combine_chunks() for name in fields}
        for piece in run:
            assert isinstance(piece.extent.place, Row)
            tokens = _row_tokens(columns, piece.extent.place.row)
            if set(ARRAYS) <= set(fields):
                _check_hash(str(self._root / path), row_group, piece, tokens)
            yield _cut(tokens, piece, fields)


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
        return np.concatenate([getattr(part, name) for part in parts])

    spans: list[Span] = []
    for span in (span for part in parts for span in part.spans):
        if not spans or replace(spans[-1], start=span.start) != span:
            spans.append(span)
    if spans:
        first = spans[0].start
        spans = [replace(span, start=span.start - first) for span in spans]
    arrays = (whole("token_ids"), whole("loss_mask"), whole("rollout_logprobs"))
    return Tokens(*arrays, tuple(spans))


def content_hash(tokens: Tokens, low: int = 0, high: int | None = None) -> str:
    """`TokenFrame.content_hash` of tokens [low, high)."""
    return digest_bytes(b"".join(getattr(tokens, name)[low:high].tobytes() for name in ARRAYS))


def _group_of(piece: Piece) -> tuple[str, int] | None:
    place = piece.extent.place
    return (place.file, place.row_group) if isinstance(place, Row) else None


def _cut(tokens: Tokens | TokenFrame, piece: Piece, fields: tuple[str, ...]) -> Tokens:
    """The piece of an extent's tokens; spans count from the context's start."""
    low, high, start = piece.low, piece.high, piece.extent.start
    spans: list[Span] = []
    if "spans" in fields:
        ends = [span.start for span in tokens.spans[1:]] + [piece.extent.num_tokens]
        spans = [
            replace(span, start=start + max(span.start, low))
            for span, end in zip(tokens.spans, ends, strict=True)
            if end > low and span.start < high
        ]
    return Tokens(
        tokens.token_ids[low:high],
        tokens.loss_mask[low:high],
        tokens.rollout_logprobs[low:high],
        tuple(spans),
    )


def _row_tokens(columns: dict[str, Any], row: int) -> Tokens:
    def values(name: str, dtype: type) -> Any:
        if name not in columns:
            return np.empty(0, dtype)
        offsets = columns[name].offsets
        low, high = offsets[row].as_py(), offsets[row + 1].as_py()
        return columns[name].values.slice(low, high - low).to_numpy(zero_copy_only=False)

    found = columns["spans"][row].as_py() if "spans" in columns else ()
    return Tokens(
        values("token_ids", np.int32),
        values("loss_mask", np.bool_),
        values("rollout_logprobs", np.float32),
        tuple(Span(**{**span, "author": Author(span["author"])}) for span in found),
    )


def _check_hash(path: str, row_group: int, piece: Piece, tokens: Tokens) -> None:
    if content_hash(tokens) != piece.extent.content_hash:
        detail = f"row group {row_group}: tokens do not match their hash"
        raise CorruptData(path, 0, "content_hash", detail)
