"""What workers write down outside the store: one line per acknowledgement, synced.

The ledger judges the store: whatever is in it must be stored, exactly once, with the same content.
A line is JSON {"id", "context", "offset", "count", "hash"}, with "follows": true when it was synced
together with the line before it. Noting an acknowledgement twice (a resumed worker repeats those it
was handed) does no harm.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path

from k3rl.blobs import fsync_parents
from k3rl.errors import CorruptData, StoreError
from k3rl.store.protocol import Ack
from k3rl.types import JsonObject


class Ledger:
    """One worker's file, for append. Safe to use from several threads of one process."""

    def __init__(self, path: Path) -> None:
        """Makes the file; lines that a kill or a power loss left unfinished are cut off."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._guard = threading.Lock()
        self._torn_at: int | None = _whole_bytes(self.path.read_bytes())
        """Where a line begins that is not whole; None: all are."""
        self._cut_torn()
        fsync_parents(self.path)

    def write(self, *acks: Ack) -> None:
        """Note acknowledgements durably, before the worker goes on.

        Raises StoreError when the disk refuses; the last lines are then not there, or only in part
        and cut off before the next one.
        """
        data = b"".join(_line(ack, index > 0) for index, ack in enumerate(acks))
        with self._guard:
            try:
                self._cut_torn()
                self._torn_at = os.fstat(self._handle).st_size
                view = memoryview(data)
                while view:
                    view = view[os.write(self._handle, view) :]
                os.fdatasync(self._handle)
                self._torn_at = None
            except OSError as error:
                with contextlib.suppress(OSError):
                    self._cut_torn()
                raise StoreError(f"{self.path}: cannot note: {error.strerror}") from error

    def _cut_torn(self) -> None:
        if self._torn_at is not None:
            os.ftruncate(self._handle, self._torn_at)
            self._torn_at = None

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        with self._guard:
            if self._handle >= 0:
                os.close(self._handle)
                self._handle = -1


def _line(ack: Ack, follows: bool) -> bytes:
    fields: JsonObject = {
        "id": ack.id,
        "context": ack.context,
        "offset": ack.offset,
        "count": ack.count,
        "hash": ack.content_hash,
    }
    if follows:
        fields["follows"] = True
    return json.dumps(fields).encode() + b"\n"


def _whole_bytes(data: bytes) -> int:
    """Up to where a file holds what was synced, if what follows is torn: else all of it.

    A torn line has no end, or zeros where a sector was not written; no later write follows it.
    """
    at = 0
    lines = data.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if not _is_whole(line):
            later = (each for each in lines[number + 1 :] if _is_whole(each))
            return at if all(b'"follows": true' in each for each in later) else len(data)
        at += len(line)
    return at


def _is_whole(line: bytes) -> bool:
    return line.endswith(b"\n") and b"\0" not in line


def read_ledgers(folder: Path) -> set[Ack]:
    """All acknowledgements in the `*.jsonl` files of a folder, each once.

    Torn lines at the end were never noted. Raises CorruptData for any other bad line.
    """
    acks: set[Ack] = set()
    for path in sorted(Path(folder).glob("*.jsonl")):
        offset, data = 0, path.read_bytes()
        for line in data[: _whole_bytes(data)].splitlines(keepends=True):
            acks.add(_parse(path, offset, line))
            offset += len(line)
    return acks


def _parse(path: Path, offset: int, line: bytes) -> Ack:
    try:
        found = json.loads(line)
        context, offset, count = (int(found[name]) for name in ("context", "offset", "count"))
        return Ack(str(found["id"]), context, offset, count, str(found["hash"]))
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptData(str(path), offset, "line", f"not a ledger line: {error}") from None
