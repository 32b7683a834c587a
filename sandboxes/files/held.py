"""Reading file contents for a layer: digests, and contents that outlive the files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from blake3 import blake3

from k3rl.errors import SandboxError
from k3rl.sandboxes.files.layers import INLINE_BYTES, Entry
from k3rl.sandboxes.files.trees import copy_content, read_all, read_blocks
from k3rl.types import Digest, digest_bytes

ALIGNMENT = 1 << 16
"""Where copies begin in a file that may share blocks with what it copies."""

Reader = Callable[[int, int], tuple[Digest, int]]
"""Reads an open file of about this size: its digest, and the size that it had."""


class TooMuch(Exception):
    """There is more to look at, or to keep, than the caller wants to wait for."""


class Held:
    """Contents of files as they were when read, whatever becomes of the files.

    Small ones are in memory, and so are larger ones while there is room; the rest is copied to one
    nameless file, or too much.
    """

    def __init__(self, room: int, home: Path | None = None) -> None:
        """`room`: bytes of memory; `home`: where the nameless file is, None for none."""
        self.inline: dict[Digest, bytes] = {}
        """Contents by digest, all that are at most `INLINE_BYTES`."""
        self._room, self._home = room, home
        self._places: dict[Digest, int] = {}
        self._file: int | None = None
        self._end = 0

    def __del__(self) -> None:
        """Let the nameless file go."""
        if self._file is not None:
            os.close(self._file)

    def read(self, handle: int, size: int) -> tuple[Digest, int]:
        """A Reader. Raises TooMuch."""
        if size > self._room and self._home is None:
            raise TooMuch
        if size > self._room and size > INLINE_BYTES:
            return self._copy(handle)
        data = read_all(handle, size)
        self._room -= len(data)
        digest = digest_bytes(data)
        self.inline[digest] = data
        return digest, len(data)

    def blocks(self, entry: Entry) -> Iterator[bytes]:
        """The content of a file that was read. Raises KeyError for another one."""
        if entry.digest in self.inline:
            yield self.inline[entry.digest]
        elif entry.digest in self._places:
            assert self._file is not None
            yield from read_blocks(self._file, self._places[entry.digest], entry.size)
        else:
            raise KeyError(entry.path)

    def _copy(self, handle: int) -> tuple[Digest, int]:
        assert self._home is not None
        digest, size = _hash_large(handle)
        if digest not in self._places:
            if self._file is None:
                with tempfile.TemporaryFile(dir=self._home) as file:
                    self._file = os.dup(file.fileno())
            copy_content(handle, self._file, self._end)
            self._places[digest] = self._end
            self._end += -(-size // ALIGNMENT) * ALIGNMENT
        return digest, size


def _hash_large(handle: int) -> tuple[Digest, int]:
    hasher, size = blake3(), 0
    for block in read_blocks(handle, 0):
        hasher.update(block)
        size += len(block)
    if size <= INLINE_BYTES:
        raise SandboxError("a file of the workspace shrank while it was read: what runs there?")
    return hasher.hexdigest(), size


def inline_reader(inline: dict[Digest, bytes]) -> Reader:
    """A Reader that keeps what travels inside a layer blob in `inline`."""

    def read(handle: int, size: int) -> tuple[Digest, int]:
        if size > INLINE_BYTES:
            return _hash_large(handle)
        data = read_all(handle, size)
        digest = digest_bytes(data)
        inline[digest] = data
        return digest, len(data)

    return read
