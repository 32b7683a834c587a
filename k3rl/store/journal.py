"""The journal: append-only files of framed events, made durable in groups.

    file    J-<service epoch, 8 digits>-<number, 8 digits>.tj
    frame   magic 4 | version u8 | kind u8 | flags u16 | length u32 | sequence u64
            crc32 of these 20 bytes
            payload (`k3rl.types.encode` of an event)
            blake3 of header and payload, first 8 bytes

Invariants: sequences rise by one from frame to frame; an acknowledged frame is whole and synced;
frames become visible (`apply`) in the order of their sequences. The header has a checksum of its
own, so that a damaged length is told from a frame that the end of the file cuts off. All frames of
a group but the first have the flag `FOLLOWS`: a group is written once the one before it is synced,
so that what a power loss tore is told from damage to what was synced (`scan.is_torn`).
"""

from __future__ import annotations

import asyncio
import os
import struct
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeAlias

from blake3 import blake3

from k3rl.blobs import fsync_folder
from k3rl.errors import CorruptData, SchemaTooNew, StoreError, UserInputError
from k3rl.store.events import KIND_OF, KINDS, Event, FileStart
from k3rl.types import decode, encode

MAGIC = b"K3TJ"
VERSION = 1
_HEAD = struct.Struct("<4sBBHIQ")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEAD.size + _CRC.size
CHECK_BYTES = 8
FOLLOWS = 1
"""Flag: one sync made this frame and the one before it durable."""
FILE_BYTES = 64 << 20
"""A file that reached this size is followed by the next one."""
BATCH_BYTES = 8 << 20
"""Most bytes written between two syncs."""


class Place(NamedTuple):
    """Where a frame lies: file name, byte offset, bytes with header and check."""

    file: str
    offset: int
    num_bytes: int


class Frame(NamedTuple):
    """One frame as read back."""

    kind: int
    sequence: int
    payload: bytes
    place: Place


Apply: TypeAlias = Callable[[Event, int, Place], None]
Entry: TypeAlias = tuple[Event, bytes, asyncio.Future[int]]
"""What was submitted: the event, its payload, and who waits for it."""


def file_name(service_epoch: int, number: int) -> str:
    """Name of a journal file; names sort in the order in which they were written."""
    return f"J-{service_epoch:08d}-{number:08d}.tj"


def file_epoch(name: str) -> int:
    """The service epoch in a journal file's name."""
    return int(name.split("-")[1])


def pack(kind: int, sequence: int, payload: bytes, flags: int = 0) -> bytes:
    """The bytes of one frame."""
    head = _HEAD.pack(MAGIC, VERSION, kind, flags, len(payload), sequence)
    body = b"".join([head, _CRC.pack(zlib.crc32(head)), payload])
    return body + blake3(body).digest(CHECK_BYTES)


def parse(data: bytes, offset: int, path: str, base: int = 0) -> Frame | None:
    """The frame at `offset` of `data`; None when `data` ends inside it.

    `base` is what `data[0]` is in the file, for messages. Raises CorruptData or SchemaTooNew.
    """
    at = base + offset
    if len(data) - offset < HEADER_BYTES:
        return None
    magic, version, kind, _, length, sequence = _HEAD.unpack_from(data, offset)
    (crc,) = _CRC.unpack_from(data, offset + _HEAD.size)
    if magic != MAGIC:
        raise CorruptData(path, at, "magic", f"{magic!r} is not {MAGIC!r}")
    if crc != zlib.crc32(data[offset : offset + _HEAD.size]):
        raise CorruptData(path, at, "header", "checksum does not match")
    if version > VERSION:
        raise SchemaTooNew(f"{path}: byte {at}: frame version {version} is newer than {VERSION}")
    end = offset + HEADER_BYTES + length
    if len(data) < end + CHECK_BYTES:
        return None
    if blake3(data[offset:end]).digest(CHECK_BYTES) != data[end : end + CHECK_BYTES]:
        raise CorruptData(path, at, "payload", "checksum does not match")
    if kind not in KINDS:
        raise CorruptData(path, at, "kind", f"{kind} is unknown")
    place = Place(os.path.basename(path), at, end + CHECK_BYTES - offset)
    return Frame(kind, sequence, data[offset + HEADER_BYTES : end], place)


def frame_bytes(data: bytes, offset: int) -> int | None:
    """Length of the frame at `offset`, whatever its payload is; None when its header is damaged."""
    head = data[offset : offset + HEADER_BYTES]
    if len(head) < HEADER_BYTES or _CRC.unpack_from(head, _HEAD.size) != (
        zlib.crc32(head[: _HEAD.size]),
    ):
        return None
    magic, _, _, _, length, _ = _HEAD.unpack_from(head)
    return HEADER_BYTES + int(length) + CHECK_BYTES if magic == MAGIC else None


def follows(data: bytes, offset: int) -> bool:
    """Whether the whole frame at `offset` was written in one group with the frame before it."""
    return bool(_HEAD.unpack_from(data, offset)[3] & FOLLOWS)


def frame_kind(data: bytes) -> int:
    """The kind byte of the frame at the start of `data`."""
    return int(_HEAD.unpack_from(data)[2])


def event_of(frame: Frame, path: str) -> Event:
    """The event in a frame. Raises CorruptData when the payload does not decode."""
    try:
        event: Event = decode(KINDS[frame.kind], frame.payload)
    except (UserInputError, ValueError) as error:
        raise CorruptData(path, frame.place.offset, "payload", str(error)) from None
    return event


class JournalWriter:
    """The blocking half: one file open for append, used by one thread at a time.

    A failed write leaves the file cut back to its last whole group and refuses all further ones.
    """

    def __init__(
        self, folder: Path, service_epoch: int, next_sequence: int, file_bytes: int = FILE_BYTES
    ) -> None:
        """Creates the epoch's first file. Raises StoreError; then nothing is left open."""
        self.folder = folder
        self.service_epoch = service_epoch
        self.next_sequence = next_sequence
        self.file_bytes = file_bytes
        self.error: StoreError | None = None
        self._number = -1
        self._handle = -1
        self._size = 0
        self.name = ""
        try:
            self.rotate()
        except BaseException:
            self.close()
            raise

    def write(self, batch: list[tuple[int, bytes]]) -> list[tuple[int, Place]]:
        """Append (kind, payload) pairs and sync once; returns their sequences and places."""
        if self._size >= self.file_bytes:
            self.rotate()
        frames, places, offset = [], [], self._size
        for index, (kind, payload) in enumerate(batch):
            flags = FOLLOWS if index else 0
            frame = pack(kind, self.next_sequence + index, payload, flags)
            places.append((self.next_sequence + index, Place(self.name, offset, len(frame))))
            frames.append(frame)
            offset += len(frame)
        self._append(b"".join(frames))
        self.next_sequence += len(batch)
        return places

    def rotate(self) -> tuple[int, str]:
        """Start the next file; returns the last sequence and the name of the one before it."""
        self._refuse_if_broken()
        self.close()
        closed = (self.next_sequence - 1, self.name)
        self._number += 1
        self.name = file_name(self.service_epoch, self._number)
        path = self.folder / self.name
        try:
            self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
            fsync_folder(self.folder)
        except OSError as error:
            raise self._break(path, error) from error
        self._size = 0
        start = encode(FileStart(self.service_epoch, self._number))
        self._append(pack(KIND_OF[FileStart], self.next_sequence, start))
        self.next_sequence += 1
        return closed

    def close(self) -> None:
        """Close the file; everything acknowledged is synced already."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _append(self, data: bytes) -> None:
        self._refuse_if_broken()
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._handle, view) :]
            os.fdatasync(self._handle)
        except OSError as error:
            broken = self._break(self.folder / self.name, error)
            self._cut_back()
            raise broken from error
        self._size += len(data)

    def _cut_back(self) -> None:
        try:
            os.ftruncate(self._handle, self._size)
            os.fsync(self._handle)
        except OSError as error:
            self.error = StoreError(f"{self.error}; its last group could not be cut off: {error}")

    def _break(self, path: Path, error: OSError) -> StoreError:
        self.error = StoreError(
            f"{path}: cannot write the journal: {error.strerror}; nothing unacknowledged was kept: "
            "make room on this disk (or raise its limit) and start the run again"
        )
        return self.error

    def _refuse_if_broken(self) -> None:
        if self.error is not None:
            raise StoreError(str(self.error))


class Journal:
    """The asynchronous half: group commit, one sync at a time, off the event loop's thread.

    A frame that finds the disk idle is synced at once; those that arrive meanwhile share the next
    sync. Both callbacks run on the event loop, in sequence order: `apply` when an event is durable,
    before it is acknowledged, and then `ended`, which is called when it has failed, too.
    """

    def __init__(self, writer: JournalWriter, apply: Apply, ended: Callable[[Event], None]) -> None:
        """`writer` is used by no one else from here on."""
        self._writer = writer
        self._apply, self._ended = apply, ended
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="k3rl-journal")
        self._pending: list[Entry] = []
        self._task: asyncio.Task[None] | None = None
        self._exclusive = asyncio.Lock()
        self.num_frames = 0
        self.num_syncs = 0
        self.num_bytes = 0

    @property
    def error(self) -> StoreError | None:
        """Why the journal refuses further writes; None while it is healthy."""
        return self._writer.error

    @property
    def current_file(self) -> str:
        """Name of the file being appended to."""
        return self._writer.name

    def submit(self, event: Event) -> asyncio.Future[int]:
        """Queue an event; the future is its sequence once durable and applied.

        Who waits for it may go away: a future that is cancelled does not cancel the write.
        """
        if self.error is not None:
            raise StoreError(str(self.error))
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._pending.append((event, encode(event), future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._drain())
        return future

    async def rotate(self) -> tuple[int, str]:
        """Close the present file; returns the last sequence in the closed files, and its name."""
        await self.flush()
        async with self._exclusive:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._writer.rotate)

    async def flush(self) -> None:
        """Wait until what was submitted is durable, or has failed."""
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    async def aclose(self) -> None:
        """Flush and close."""
        await self.flush()
        self._writer.close()
        self._thread.shutdown()

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        while self._pending:
            async with self._exclusive:
                group = self._take_group()
                batch = [(KIND_OF[type(event)], payload) for event, payload, _ in group]
                try:
                    done = await loop.run_in_executor(self._thread, self._writer.write, batch)
                except StoreError as error:
                    self._fail(group + self._pending, error)
                    self._pending = []
                    return
                self._settle(group, done)

    def _take_group(self) -> list[Entry]:
        size = count = 0
        while count < len(self._pending) and (count == 0 or size < BATCH_BYTES):
            size += len(self._pending[count][1])
            count += 1
        group, self._pending = self._pending[:count], self._pending[count:]
        return group

    def _settle(self, group: list[Entry], done: list[tuple[int, Place]]) -> None:
        self.num_syncs += 1
        self.num_frames += len(group)
        for (event, _, future), (sequence, place) in zip(group, done, strict=True):
            self.num_bytes += place.num_bytes
            error = self._try_apply(event, sequence, place)
            if not future.done():
                if error is None:
                    future.set_result(sequence)
                else:
                    future.set_exception(error)
            self._ended(event)

    def _try_apply(self, event: Event, sequence: int, place: Place) -> Exception | None:
        try:
            self._apply(event, sequence, place)
        except Exception as error:
            return error
        return None

    def _fail(self, group: list[Entry], error: StoreError) -> None:
        for event, _, future in group:
            if not future.done():
                future.set_exception(StoreError(str(error)))
                future.exception()
            self._ended(event)
