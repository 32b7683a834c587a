"""Text to token ids and back, with special ids that no text can produce.

Two vocabularies: the released tiktoken file (`TiktokenTokenizer`) and the nano vocabulary that is
checked in (`NanoTokenizer`). In both, ids below the specials are byte strings and every single byte
is one of them, so any text has ids and any ids have bytes.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol, runtime_checkable

import tiktoken

from k3rl.errors import UserInputError
from k3rl.rollout.xtml import CLOSE, END_OF_MSG, OPEN, SEP, Segment
from k3rl.types import Digest, JsonObject, digest_json

NANO_VOCAB = Path(__file__).with_name("nano_vocab.json")
NANO_SCHEMA = "k3rl-nano-vocab/1"
KEPT_SEGMENTS = 1024
"""Segments whose ids are remembered."""
_BYTES = tuple(bytes([byte]) for byte in range(256))

NUM_RELEASED_SPECIALS = 256
RELEASED_SPECIALS = {
    "[BOS]": 0,
    "[EOS]": 1,
    END_OF_MSG: 2,
    OPEN: 3,
    CLOSE: 4,
    SEP: 5,
    "[start_header_id]": 6,
    "[end_header_id]": 7,
    "[EOT]": 9,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "<osagent_mode>": 65,
    "[UNK]": 254,
    "[PAD]": 255,
}
"""Offsets above the base vocabulary (tokenizer_config.json of the release); the rest is unnamed."""

NANO_SPECIALS = (
    "[BOS]",
    "[EOS]",
    END_OF_MSG,
    OPEN,
    CLOSE,
    SEP,
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "[UNK]",
    "[PAD]",
)
"""The specials a nano model needs, in id order at the end of its vocabulary."""

_TAIL = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
RELEASED_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_TAIL}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_TAIL}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""How the release cuts text before merging (tokenization_kimi.py)."""
NANO_PATTERN = r"\p{N}|\P{N}+"
"""Every digit alone, nothing else cut: a merge may span a whole constant string."""

MAX_CHUNK_CHARS = 400_000
MAX_RUN_CHARS = 25_000
"""The release cuts longer texts and longer runs of (non-)whitespace before the pattern applies."""


@runtime_checkable
class Tokenizer(Protocol):
    """What a renderer needs of a vocabulary. `specials` maps name to id."""

    @property
    def vocab_size(self) -> int:
        """Ids are 0 .. vocab_size - 1."""
        ...

    @property
    def digest(self) -> Digest:
        """Content hash: equal digests tokenise alike."""
        ...

    @property
    def specials(self) -> Mapping[str, int]:
        """Special name to id; none of these ids is ever produced from text."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text; names of specials in it are text. Lone surrogates become U+FFFD."""
        ...

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Ids of rendered segments; only those that allow it may hold specials."""
        ...

    def special(self, name: str) -> int:
        """The id of a special. Raises UserInputError for an unknown name."""
        ...

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The exact bytes behind ids; a special gives its name. Raises UserInputError."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """`decode_bytes` as UTF-8, U+FFFD where the bytes are not."""
        ...


class _RankTokenizer:
    """Byte-level BPE over `entries` (id order), `specials` above them, text cut by `pattern`."""

    def __init__(self, entries: Sequence[bytes], specials: Sequence[str], pattern: str) -> None:
        ranks = {entry: rank for rank, entry in enumerate(entries)}
        missing = [byte for byte in _BYTES if byte not in ranks]
        if missing or len(ranks) != len(entries):
            raise UserInputError(f"vocabulary lacks bytes {missing} or repeats an entry")
        self._specials = {name: len(entries) + offset for offset, name in enumerate(specials)}
        self._bytes = [*entries, *(name.encode() for name in specials)]
        self._encoding = tiktoken.Encoding(
            "k3rl", pat_str=pattern, mergeable_ranks=ranks, special_tokens=self._specials
        )
        self._digest = _digest(entries, specials, pattern)
        # Structure and tool declarations are the same few segments in every conversation.
        self._segment = lru_cache(KEPT_SEGMENTS)(self._encode_segment)

    @property
    def vocab_size(self) -> int:
        """Entries and specials."""
        return len(self._bytes)

    @property
    def digest(self) -> Digest:
        """Hash of entries, specials, pattern and kind."""
        return self._digest

    @property
    def specials(self) -> Mapping[str, int]:
        """Special name to id."""
        return self._specials

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text; never a special."""
        return [i for chunk in _chunks(text) for i in self._encoding.encode_ordinary(chunk)]

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Ids of each segment by itself, as the release does."""
        return [i for text, allow_special in segments for i in self._segment(text, allow_special)]

    def _encode_segment(self, text: str, allow_special: bool) -> tuple[int, ...]:
        if allow_special:
            return tuple(self._encoding.encode(text, allowed_special="all"))
        return tuple(self.encode_text(text))

    def special(self, name: str) -> int:
        """The id of a special."""
        try:
            return self._specials[name]
        except KeyError:
            raise UserInputError(f"vocabulary has no special {name!r}") from None

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The exact bytes behind ids."""
        size = len(self._bytes)
        unknown = [int(i) for i in ids if not 0 <= i < size]
        if unknown:
            raise UserInputError(f"token id {unknown[0]} is outside the vocabulary of {size}")
        return b"".join(self._bytes[i] for i in ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text behind ids."""
        return self.decode_bytes(ids).decode("utf-8", "replace")


class TiktokenTokenizer(_RankTokenizer):
    """The released file format: lines of `base64(bytes) rank`, and 256 specials above them."""

    def __init__(self, path: Path | str) -> None:
        """Raises UserInputError naming the file when it is not such a vocabulary."""
        entries = _read_ranks(Path(path))
        names = {offset: name for name, offset in RELEASED_SPECIALS.items()}
        super().__init__(
            entries,
            [
                names.get(offset, f"<|reserved_token_{len(entries) + offset}|>")
                for offset in range(NUM_RELEASED_SPECIALS)
            ],
            RELEASED_PATTERN,
        )


class NanoTokenizer(_RankTokenizer):
    """256 bytes (id = byte), trained entries, then `NANO_SPECIALS`.

    Unlike the release it tokenises neighbouring plain segments as one text, so that a whole tag
    with its attributes can be one token: structure would fill a small context otherwise.
    """

    def __init__(self, path: Path | str) -> None:
        """Raises UserInputError naming file and field when the file is not what was trained."""
        super().__init__(_read_nano(Path(path)), NANO_SPECIALS, NANO_PATTERN)

    @classmethod
    def shipped(cls) -> NanoTokenizer:
        """The vocabulary that comes with the package."""
        return cls(NANO_VOCAB)

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Ids of the segments, runs of plain ones joined."""
        return super().encode_segments(join_plain(segments))


def join_plain(segments: Iterable[Segment]) -> Iterator[Segment]:
    """The same text with each run of neighbouring plain segments as one segment."""
    run = ""
    for text, allow_special in segments:
        if not allow_special:
            run += text
            continue
        if run:
            yield Segment(run)
        run = ""
        yield Segment(text, True)
    if run:
        yield Segment(run)


def write_nano(path: Path, entries: Sequence[bytes], training: JsonObject) -> None:
    """Write a nano vocabulary: `entries` above the 256 bytes, with the digest of the whole.

    `training` records how it was made and takes no part in the digest.
    """
    content = {
        "schema": NANO_SCHEMA,
        "digest": _digest([*_BYTES, *entries], NANO_SPECIALS, NANO_PATTERN),
        "training": training,
        "entries": [entry.decode("latin-1") for entry in entries],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def _read_nano(path: Path) -> list[bytes]:
    try:
        content = json.loads(path.read_text())
        schema, digest = content["schema"], content["digest"]
        entries = [*_BYTES, *(entry.encode("latin-1") for entry in content["entries"])]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserInputError(f"{path}: not a nano vocabulary: {error!r}") from None
    if schema != NANO_SCHEMA:
        raise UserInputError(f"{path}: schema: {schema!r}, this version reads {NANO_SCHEMA!r}")
    if digest != _digest(entries, NANO_SPECIALS, NANO_PATTERN):
        raise UserInputError(f"{path}: digest: {digest!r} is not that of its entries")
    return entries


def _read_ranks(path: Path) -> list[bytes]:
    entries = []
    try:
        for rank, line in enumerate(path.read_bytes().splitlines()):
            word, number = line.split()
            if int(number) != rank:
                raise ValueError(f"line {rank + 1}: rank {int(number)}, expected {rank}")
            entries.append(base64.b64decode(word, validate=True))
    except (OSError, ValueError) as error:
        raise UserInputError(f"{path}: not a tiktoken vocabulary: {error}") from None
    return entries


def _digest(entries: Sequence[bytes], specials: Sequence[str], pattern: str) -> Digest:
    return digest_json([pattern, [entry.decode("latin-1") for entry in entries], list(specials)])


def _chunks(text: str) -> Iterator[str]:
    """The pieces the release hands to its tokeniser one by one."""
    for start in range(0, len(text), MAX_CHUNK_CHARS):
        chunk = text[start : start + MAX_CHUNK_CHARS]
        begin = 0
        if len(chunk) > MAX_RUN_CHARS:
            for run in re.finditer(r"\s+|\S+", chunk):
                for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                    yield chunk[begin:cut]
                    begin = cut
        yield chunk[begin:]
