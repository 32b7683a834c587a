"""Rows of segments decoded straight from the pages of a row group.

A random read through pyarrow takes nearly twice the time, since it makes a reader for each of seven
leaf columns, and a footer that takes thirty times its bytes must stay in memory. What is read here
is what `write_sealed` makes of the columns below: one data page (v1) for each leaf, zstd, no nulls,
with a checksum, which is verified. Of anything else `Unusual` says to read it with pyarrow.

Formats: github.com/apache/parquet-format, README.md (data pages, nested encoding), Encodings.md
(run-length / bit-packing hybrid, byte stream split), thrift compact protocol (page headers).
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from zstandard import ZstdDecompressor, ZstdError

LEAVES = {
    "token_ids": ("token_ids.list.element",),
    "loss_mask": ("loss_mask.list.element",),
    "rollout_logprobs": ("rollout_logprobs.list.element",),
    "spans": tuple(
        f"spans.list.element.{name}"
        for name in ("start", "author", "policy_version", "state_version")
    ),
}
"""Leaf columns of each field."""
PLAIN, RLE, RLE_DICTIONARY, BYTE_STREAM_SPLIT = 0, 3, 8, 9
DATA_PAGE, DICTIONARY_PAGE = 0, 2
KEPT_BYTES = 256
PRESENT = {"spans": 4}
"""Definition level of a value that is there; 3 where elements are not nested further."""
_U32 = struct.Struct("<I")
_WEIGHTS = {width: (1 << np.arange(width)).astype(np.uint8) for width in range(1, 9)}
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
"""[256, 8] of each byte: a run of one byte is what most turns end with."""
_local = threading.local()


class Unusual(Exception):
    """Not what our own writer makes of these columns, or damaged."""


class Page(NamedTuple):
    """One page, decompressed."""

    kind: int
    num_values: int
    encoding: int
    body: slice
    """Where it lies in the column chunk, compressed."""
    crc: int
    data: bytes


class Plan(NamedTuple):
    """Where the values of a leaf column of a row group lie: lists without nulls, in one page."""

    body: slice
    """Of the column chunk: the page, compressed."""
    size: int
    """Bytes of the page, decompressed."""
    crc: int
    encoding: int
    values_at: int
    """Byte of the page behind its levels."""
    starts: list[int]
    """[rows + 1] first value of each row."""
    words: list[str]
    """The dictionary, when there is one."""
    kept: bytes | None
    """The page itself, when it is small: those of spans."""


Plans: TypeAlias = dict[str, Plan]
"""By leaf; what need not be found again when a row group is read again."""


class GroupRows:
    """The rows of one row group."""

    def __init__(self, chunks: Mapping[str, memoryview], plans: Plans) -> None:
        """`chunks`: whole column chunks by leaf. Fills `plans`. Raises Unusual."""
        known: dict[bytes, list[int]] = {}
        self._leaves: dict[str, tuple[Plan, memoryview]] = {}
        try:
            for name, chunk in chunks.items():
                plan = plans.get(name)
                if plan is None:
                    present = PRESENT.get(name.partition(".")[0], 3)
                    plan, data = _planned(chunk, present, known)
                    plans[name] = plan
                else:
                    data = plan.kept or _body(chunk, plan.body, plan.size, plan.crc)
                self._leaves[name] = (plan, memoryview(data)[plan.values_at :])
        except (LookupError, ValueError, struct.error, ZstdError) as error:
            raise Unusual(str(error)) from None

    def integers(self, name: str, row: int) -> NDArray[np.int32]:
        """Those of a row, in an int32 leaf; a view."""
        values, low, high = self._row(name, row, PLAIN)
        return np.frombuffer(values, "<i4")[low:high]

    def floats(self, name: str, row: int) -> NDArray[np.float32]:
        """Those of a row, in a float32 leaf."""
        values, low, high = self._row(name, row, BYTE_STREAM_SPLIT)
        planes = np.frombuffer(values, np.uint8).reshape(4, -1)
        return np.ascontiguousarray(planes[:, low:high].T).view("<f4").reshape(-1)

    def booleans(self, name: str, row: int) -> NDArray[np.bool_]:
        """Those of a row, in a boolean leaf."""
        values, low, high = self._row(name, row, RLE)
        section, _ = _section(values, 0)
        return _hybrid(section, 1, high)[low:].view(np.bool_)

    def texts(self, name: str, row: int) -> list[str]:
        """Those of a row, in a leaf of words."""
        values, low, high = self._row(name, row, RLE_DICTIONARY)
        indices = _hybrid(values[1:], values[0], high)[low:]
        words = self._leaves[name][0].words
        return [words[index] for index in indices.tolist()]

    def _row(self, name: str, row: int, encoding: int) -> tuple[memoryview, int, int]:
        plan, values = self._leaves[name]
        if plan.encoding != encoding or row + 1 >= len(plan.starts):
            raise Unusual(f"{name}: encoding {plan.encoding}, {len(plan.starts) - 1} rows")
        return values, plan.starts[row], plan.starts[row + 1]


def _planned(chunk: memoryview, present: int, known: dict[bytes, list[int]]) -> tuple[Plan, bytes]:
    """A column chunk and its page. `known`: where rows start, by levels seen before."""
    page = _page(chunk, 0)
    words: list[str] = []
    if page.kind == DICTIONARY_PAGE:
        words = _words(page)
        page = _page(chunk, page.body.stop)
    if page.kind != DATA_PAGE or page.body.stop != len(chunk):
        raise Unusual("more than one data page")
    data, count = memoryview(page.data), page.num_values
    repetition, at = _section(data, 0)
    definition, at = _section(data, at)
    levels = bytes(data[:at])
    if levels not in known:
        if (_hybrid(definition, present.bit_length(), count) != present).any():
            raise Unusual("nulls")
        known[levels] = [*np.flatnonzero(_hybrid(repetition, 1, count) == 0).tolist(), count]
    kept = page.data if len(data) <= KEPT_BYTES else None
    plan = Plan(page.body, len(data), page.crc, page.encoding, at, known[levels], words, kept)
    return plan, page.data


def _page(chunk: memoryview, at: int) -> Page:
    """The page that begins at a byte."""
    header, at = _struct(chunk, at)
    kind, size, stored, crc = header[1], header[2], header[3], header[4]
    about = header[7 if kind == DICTIONARY_PAGE else 5]
    body = slice(at, at + stored)
    data = _body(chunk, body, size, crc & 0xFFFFFFFF)
    return Page(kind, about[1], about[2], body, crc & 0xFFFFFFFF, data)


def _body(chunk: memoryview, where: slice, size: int, crc: int) -> bytes:
    body = chunk[where]
    if len(body) < where.stop - where.start or zlib.crc32(body) != crc:
        raise Unusual("checksum of a page does not match")
    return _decompressor().decompress(body, max_output_size=size)


def _struct(data: memoryview, at: int) -> tuple[dict[int, Any], int]:
    """Integers, booleans and structs of a struct of the thrift compact protocol, by field."""
    found: dict[int, Any] = {}
    field = 0
    while head := data[at]:
        kind, field = head & 15, field + (head >> 4)
        if kind in (5, 6):
            value, at = _varint(data, at + 1)
            found[field] = (value >> 1) ^ -(value & 1)
        elif kind in (1, 2):
            found[field], at = kind == 1, at + 1
        elif kind == 12:
            found[field], at = _struct(data, at + 1)
        else:
            raise Unusual(f"page header with type {kind}")
    return found, at + 1


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = data[at]
    if value < 128:
        return value, at + 1
    value, shift = value & 127, 7
    while (byte := data[at + 1]) & 128:
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
    return value | byte << shift, at + 2


def _section(data: memoryview, at: int) -> tuple[memoryview, int]:
    """Bytes behind their length, and where they end."""
    (size,) = _U32.unpack_from(data, at)
    return data[at + 4 : at + 4 + size], at + 4 + size


def _hybrid(data: memoryview, width: int, count: int) -> NDArray[np.uint8]:
    """[count] numbers of `width` bits in runs, bit-packed or of one value."""
    found = np.empty(count, np.uint8)
    n = at = 0
    while n < count:
        header, at = _varint(data, at)
        if header & 1:
            size = (header >> 1) * width
            run = _BITS[data[at]] if size == width == 1 else _unpacked(data[at : at + size], width)
            found[n : n + len(run)] = run[: count - n]
            n, at = n + len(run), at + size
        else:
            found[n : n + (header >> 1)] = data[at]
            n, at = n + (header >> 1), at + 1
    return found


def _unpacked(data: memoryview, width: int) -> NDArray[np.uint8]:
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    return bits if width == 1 else bits.reshape(-1, width) @ _WEIGHTS[width]


def _words(page: Page) -> list[str]:
    words, at = [], 0
    for _ in range(page.num_values):
        (size,) = _U32.unpack_from(page.data, at)
        words.append(page.data[at + 4 : at + 4 + size].decode())
        at += 4 + size
    return words


def _decompressor() -> ZstdDecompressor:
    """One for each thread: it keeps its work space."""
    found: ZstdDecompressor | None = getattr(_local, "zstd", None)
    if found is None:
        found = _local.zstd = ZstdDecompressor()
    return found
