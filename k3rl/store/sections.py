"""A file of checked sections: how something travels from store to store by itself.

    file     magic 8 | version u16 | zero u16 | crc32 of these 12 bytes
             sections; the last one is of kind END and holds blake3 of the checks of all others
    section  kind u8 | zero 3 | number u32 | stored bytes u64 | content bytes u64
             crc32 of these 24 bytes
             the content as one zstd frame
             check: blake3 of all of the section before it, 32 bytes

Numbers are little-endian, sections are numbered from 0. Every byte is under a check, so that damage
of any kind is told, and told from a version that is newer. A file appears whole or not at all, and
never replaces another.
"""

from __future__ import annotations

import os
import secrets
import stat
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import zstandard
from blake3 import blake3

from k3rl.blobs import ZSTD_LEVEL, fsync_folder
from k3rl.errors import CorruptData, SchemaTooNew, StoreError, UserInputError

MAGIC = b"K3RLTRAJ"
VERSION = 1
END = 255
MAX_BYTES = 1 << 32
"""Of one content, which is held in memory."""
_PRELUDE = struct.Struct("<8sHH")
_HEAD = struct.Struct("<B3xIQQ")
_CRC = struct.Struct("<I")
PRELUDE_BYTES, HEAD_BYTES = _PRELUDE.size + _CRC.size, _HEAD.size + _CRC.size
CHECK_BYTES = 32


class Section(NamedTuple):
    """Where a section lies."""

    kind: int
    number: int
    offset: int
    num_stored: int
    num_bytes: int
    """Of its content."""


class SectionWriter:
    """Writes one file; leaving the `with` block without an error makes it durable under its name.

    Raises UserInputError when the name is taken, StoreError when the disk refuses.
    """

    def __init__(self, path: Path) -> None:
        """Writes to a temp file beside `path`."""
        self.path = path
        self._temp = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        self._checks = blake3()
        self._number = 0

    def __enter__(self) -> Self:
        """Open."""
        if self.path.exists():
            raise UserInputError(f"{self.path}: exists: name another file")
        try:
            self._file = open(self._temp, "xb")
        except OSError as error:
            raise self._refused(error) from error
        self._write(_checked(_PRELUDE.pack(MAGIC, VERSION, 0)))
        return self

    def add(self, kind: int, content: bytes) -> None:
        """Append a section."""
        if len(content) > MAX_BYTES:
            raise StoreError(f"{self.path}: {len(content)} bytes are too many for one section")
        stored = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(content)
        head = _checked(_HEAD.pack(kind, self._number, len(stored), len(content)))
        check = blake3(head).update(stored).digest()
        self._write(head + stored + check)
        self._checks.update(check)
        self._number += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the file its name, or leave nothing."""
        try:
            if error is None:
                self.add(END, self._checks.digest())
                self._settle()
        finally:
            self._file.close()
            self._temp.unlink(missing_ok=True)

    def _settle(self) -> None:
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            os.link(self._temp, self.path)
            fsync_folder(self.path.parent)
        except FileExistsError:
            raise UserInputError(f"{self.path}: exists: name another file") from None
        except OSError as error:
            raise self._refused(error) from error

    def _write(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> StoreError:
        return StoreError(f"{self.path}: cannot write: {error.strerror}")


class SectionFile:
    """A file to be read. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        """Opens it and checks its first bytes.

        Raises UserInputError when it is no regular file, CorruptData, SchemaTooNew.
        """
        self.path = path
        try:
            self._handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise UserInputError(f"{path}: cannot be read: {error.strerror}") from None
        try:
            found = os.fstat(self._handle)
            if not stat.S_ISREG(found.st_mode):
                raise UserInputError(f"{path}: is not a file")
            self.num_bytes = found.st_size
            self._check_prelude()
        except BaseException:
            os.close(self._handle)
            raise

    def __enter__(self) -> Self:
        """It is open."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        with suppress(OSError):
            os.close(self._handle)

    def __iter__(self) -> Iterator[tuple[Section, bytes]]:
        """Every section but the last and its content, checked. Raises CorruptData.

        What was read is all there is only when the iterator has come to its end.
        """
        offset, number, checks = PRELUDE_BYTES, 0, blake3()
        while True:
            section = self._section(offset, number)
            content, check = self._content(section)
            offset += HEAD_BYTES + section.num_stored + CHECK_BYTES
            if section.kind == END:
                break
            yield section, content
            checks.update(check)
            number += 1
        if content != checks.digest():
            raise self.bad(section.offset, "end", "does not match the sections before it")
        if offset != self.num_bytes:
            raise self.bad(offset, "end", f"{self.num_bytes - offset} bytes follow it")

    def content(self, section: Section) -> bytes:
        """The content of a section, checked again."""
        return self._content(section)[0]

    def bad(self, offset: int, field: str, detail: str) -> CorruptData:
        """The error for damage in this file."""
        return CorruptData(str(self.path), offset, field, detail)

    def _check_prelude(self) -> None:
        data = self._read(0, PRELUDE_BYTES, "magic")
        magic, version, _ = _PRELUDE.unpack_from(data)
        if magic != MAGIC:
            raise self.bad(0, "magic", "this is no exported trajectory")
        if data != _checked(data[: _PRELUDE.size]):
            raise self.bad(len(MAGIC), "version", "checksum does not match")
        if version > VERSION:
            raise SchemaTooNew(
                f"{self.path}: byte {len(MAGIC)}: version: {version} is newer than {VERSION}: "
                "import it with a newer k3rl"
            )

    def _section(self, offset: int, number: int) -> Section:
        head = self._read(offset, HEAD_BYTES, "section header")
        if head != _checked(head[: _HEAD.size]):
            raise self.bad(offset, "section header", "checksum does not match")
        kind, found, num_stored, num_bytes = _HEAD.unpack_from(head)
        if found != number:
            raise self.bad(offset, "section number", f"is {found}, not {number}")
        if num_bytes > MAX_BYTES:
            raise self.bad(offset, "content bytes", f"{num_bytes} are too many")
        return Section(kind, number, offset, num_stored, num_bytes)

    def _content(self, section: Section) -> tuple[bytes, bytes]:
        size = HEAD_BYTES + section.num_stored
        where = f"section {section.number}"
        data = self._read(section.offset, size + CHECK_BYTES, where)
        whole, check = memoryview(data)[:size], data[size:]
        if blake3(whole).digest() != check:
            raise self.bad(section.offset, where, "checksum does not match")
        stored = whole[HEAD_BYTES:]
        try:
            if zstandard.frame_content_size(stored) != section.num_bytes:
                raise self.bad(section.offset, "content bytes", "are not those of the content")
            return zstandard.ZstdDecompressor().decompress(stored), check
        except zstandard.ZstdError as error:
            raise self.bad(section.offset, where, str(error)) from None

    def _read(self, offset: int, size: int, what: str) -> bytes:
        if offset + size > self.num_bytes:
            raise self.bad(offset, what, "the file ends inside it")
        data = bytearray()
        while len(data) < size:
            piece = os.pread(self._handle, size - len(data), offset + len(data))
            if not piece:
                raise self.bad(offset, what, "the file ends inside it")
            data += piece
        return bytes(data)


def _checked(head: bytes) -> bytes:
    return head + _CRC.pack(zlib.crc32(head))
