"""The one content-addressed store: bytes in, blake3 digest out; durable before it is named.

A blob lies at `<root>/<2 hex>/<62 hex>` as one zstd frame. Putting is temp file, fsync, rename,
fsync of the folder, so a crash leaves a whole blob or none. Putting known bytes again writes
nothing. Every read checks the digest.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import zstandard

from k3rl.errors import CorruptData, StoreError
from k3rl.types import Digest, digest_bytes

ZSTD_LEVEL = 3


class BlobStore:
    """Blobs under one folder; safe for many processes at once."""

    def __init__(self, root: Path) -> None:
        """Uses `root`, making it on the first put."""
        self.root = Path(root)

    def path(self, digest: Digest) -> Path:
        """Where a blob lies."""
        return self.root / digest[:2] / digest[2:]

    def has(self, digest: Digest) -> bool:
        """Whether the blob exists."""
        return self.path(digest).exists()

    def put(self, data: bytes) -> Digest:
        """Store `data` durably; returns its digest. Raises StoreError when the disk refuses."""
        digest = digest_bytes(data)
        path = self.path(digest)
        try:
            if path.exists():
                # Another process may have named it and not yet made the name durable.
                fsync_folder(path.parent)
            else:
                self._write(path, zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(data))
        except OSError as error:
            raise StoreError(f"{path}: cannot store a blob: {error.strerror}") from error
        return digest

    def get(self, digest: Digest) -> bytes:
        """The bytes. Raises StoreError when missing, CorruptData when they are not what was put."""
        path = self.path(digest)
        try:
            packed = path.read_bytes()
        except FileNotFoundError:
            raise StoreError(f"{path}: no such blob") from None
        try:
            data = zstandard.ZstdDecompressor().decompress(packed)
        except zstandard.ZstdError as error:
            raise CorruptData(str(path), 0, "blob", str(error)) from None
        if digest_bytes(data) != digest:
            raise CorruptData(str(path), 0, "blob", "content does not match its digest")
        return data

    def digests(self) -> Iterator[Digest]:
        """Every blob there is, in no order."""
        for folder in self.root.glob("[0-9a-f][0-9a-f]"):
            for path in folder.iterdir():
                if len(path.name) == 62:
                    yield folder.name + path.name

    def _write(self, path: Path, packed: bytes) -> None:
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            fsync_folder(self.root)
        handle, temp = tempfile.mkstemp(prefix=".tmp-", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(packed)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temp, path)
        except BaseException:
            os.unlink(temp)
            raise
        fsync_folder(path.parent)


def replace_file(path: Path, text: str) -> None:
    """Give a small file new content, durably: a crash leaves the old content or the new one."""
    temp = path.with_name(f".{path.name}.tmp")
    with temp.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temp, path)
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Make the folder's entries durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
