"""The one content-addressed store: bytes in, blake3 digest out; durable before it is named.

A blob lies at `<root>/<2 hex>/<62 hex>` as one zstd frame. Putting is temp file, fsync, rename,
fsync of the folder, so a crash leaves a whole blob or none. Putting known bytes again only sets the
time of their file. Every read checks the digest. Large contents go through in blocks, never whole.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import zstandard
from blake3 import blake3

from k3rl.errors import CorruptData, StoreError
from k3rl.types import Digest, digest_bytes

ZSTD_LEVEL = 3
BLOCK_BYTES = 1 << 20
GONE = ".gone-"
"""Prefix of a blob that is being deleted."""
FLUSHED_TOGETHER = 64
"""Blobs that wait, as open files, to be flushed one right after the other."""

Blocks = Callable[[], Iterable[bytes]]
"""Opens a content to be read once, from its beginning to its end."""


@dataclass(frozen=True, slots=True)
class _Unnamed:
    """A blob on its way: a temp file, open, and the name that it will have."""

    handle: int
    temp: str
    path: Path


class BlobStore:
    """Blobs under one folder; safe for many processes and threads at once."""

    def __init__(self, root: Path) -> None:
        """Uses `root`, making it on the first put."""
        self.root = Path(root)
        self._anchored: set[Path] = set()
        """Folders whose own names are known to be durable."""

    def path(self, digest: Digest) -> Path:
        """Where a blob lies."""
        return self.root / digest[:2] / digest[2:]

    def has(self, digest: Digest) -> bool:
        """Whether the blob exists."""
        return self.path(digest).exists()

    def put(self, data: bytes) -> Digest:
        """Store `data` durably; returns its digest. Raises StoreError when the disk refuses."""
        digest = digest_bytes(data)
        self.put_all({digest: lambda: [data]})
        return digest

    def put_all(self, contents: Mapping[Digest, Blocks]) -> None:
        """Store many contents durably, with fewer waits for the disk than one after the other.

        A content whose digest is known is not opened; its blob counts as put again (`discard`).
        Raises StoreError when the disk refuses or a content is not what its digest says; which of
        the others are stored is then open.
        """
        waiting: list[_Unnamed] = []
        path = self.root
        try:
            for digest, blocks in contents.items():
                path = self.path(digest)
                if not _touched(path):
                    self._write(path, blocks, waiting)
                    if len(waiting) == FLUSHED_TOGETHER:
                        _name(waiting)
            _name(waiting)
            # Another process may have named one and not yet made the name durable.
            folders = {self.path(digest).parent for digest in contents}
            for path in folders:
                fsync_folder(path)
            self._anchor(folders)
        except OSError as error:
            raise StoreError(f"{path}: cannot store a blob: {error.strerror}") from error
        finally:
            for each in waiting:
                os.close(each.handle)
                with suppress(FileNotFoundError):
                    os.unlink(each.temp)

    def get(self, digest: Digest) -> bytes:
        """The bytes. Raises StoreError when missing, CorruptData when they are not what was put."""
        whole = io.BytesIO()
        for block in self.blocks(digest):
            whole.write(block)
        return whole.getvalue()

    def blocks(self, digest: Digest) -> Iterator[bytes]:
        """The bytes in blocks, to be trusted only when the last one has come.

        Raises StoreError when missing, CorruptData at the latest in the place of an end.
        """
        path = self.path(digest)
        try:
            file = path.open("rb")
        except FileNotFoundError:
            raise StoreError(f"{path}: no such blob") from None
        hasher = blake3()
        with file, zstandard.ZstdDecompressor().stream_reader(file) as reader:
            try:
                while block := reader.read(BLOCK_BYTES):
                    hasher.update(block)
                    yield block
            except zstandard.ZstdError as error:
                raise CorruptData(str(path), 0, "blob", str(error)) from None
        if hasher.hexdigest() != digest:
            raise CorruptData(str(path), 0, "blob", "content does not match its digest")

    def digests(self) -> Iterator[Digest]:
        """Every blob there is, in no order."""
        for folder in self.root.glob("[0-9a-f][0-9a-f]"):
            for path in folder.iterdir():
                if len(path.name) == 62:
                    yield folder.name + path.name

    def age(self, digest: Digest) -> tuple[float, int] | None:
        """(Unix time it was put last, bytes on disk); None when it is not there."""
        try:
            found = self.path(digest).stat()
        except FileNotFoundError:
            return None
        return found.st_mtime, found.st_size

    def discard(self, digest: Digest, put_before: float) -> int:
        """Delete a blob, unless it was put since a Unix time; returns the bytes that this frees.

        Who puts it meanwhile finds it gone and writes it again, or has put it in time.
        """
        path = self.path(digest)
        aside = path.with_name(f"{GONE}{path.name}")
        try:
            os.rename(path, aside)
        except FileNotFoundError:
            return 0
        found = aside.stat()
        if found.st_mtime >= put_before:
            os.rename(aside, path)
            return 0
        aside.unlink()
        return found.st_size

    def undo_discards(self) -> None:
        """Put back what a crash in the middle of `discard` left aside."""
        for aside in self.root.glob(f"[0-9a-f][0-9a-f]/{GONE}*"):
            os.rename(aside, aside.with_name(aside.name.removeprefix(GONE)))

    def _anchor(self, folders: set[Path]) -> None:
        """Make the names of folders durable, whoever made them: they may have been killed since."""
        if folders <= self._anchored:
            return
        found = set(self.root.glob("[0-9a-f][0-9a-f]")) if not self._anchored else folders
        fsync_folder(self.root)
        if not self._anchored:
            fsync_parents(self.root)
        self._anchored |= found

    def _write(self, path: Path, blocks: Blocks, waiting: list[_Unnamed]) -> None:
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._anchored.discard(path.parent)
        handle, temp = tempfile.mkstemp(prefix=".tmp-", dir=path.parent)
        waiting.append(_Unnamed(handle, temp, path))
        compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compressobj()
        hasher = blake3()
        for block in blocks():
            hasher.update(block)
            _write_all(handle, compressor.compress(block))
        _write_all(handle, compressor.flush())
        if hasher.hexdigest() != path.parent.name + path.name:
            raise StoreError(f"{path}: the content changed while it was stored")
        # Starts the writing without a wait for its end.
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _touched(path: Path) -> bool:
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    except PermissionError:
        # Another user's: not ours to delete either.
        return True
    return True


def _name(waiting: list[_Unnamed]) -> None:
    for each in waiting:
        os.fsync(each.handle)
    while waiting:
        each = waiting[-1]
        os.replace(each.temp, each.path)
        os.close(waiting.pop().handle)


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def replace_file(path: Path, text: str) -> None:
    """Give a small file new content, durably: a crash leaves the old content or the new one."""
    temp = path.with_name(f".{path.name}.tmp")
    with temp.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temp, path)
    fsync_folder(path.parent)


def fsync_parents(path: Path) -> None:
    """Make the names of a folder and of all that it lies in durable, whoever made them."""
    for folder in path.resolve().parents:
        # Nobody but its owner can have made anything in one that we may not read.
        with suppress(PermissionError):
            fsync_folder(folder)


def fsync_folder(folder: Path) -> None:
    """Make the folder's entries durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
