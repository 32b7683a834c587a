"""Checkpoints of a run: `<run>/checkpoints/update-<n>/`, complete or not there at all.

A checkpoint is written to a temporary folder, synced and renamed. It holds the files that the
learner saves (safetensors) and `meta.json`: the digests of those files, the policy version they
are, and the row of the update that made it, so that a crash right after it loses neither.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from k3rl.blobs import fsync_folder
from k3rl.errors import CorruptData, SchemaTooNew, StoreError, UserInputError
from k3rl.learner.protocol import Learner
from k3rl.store.protocol import UpdateRow
from k3rl.types import Digest, JsonObject, from_plain, to_plain

SCHEMA = 1
NUM_KEPT = 2
META = "meta.json"
_NAME, _TEMP = "update-", ".tmp-"


@dataclass(frozen=True, slots=True)
class Meta:
    """What a checkpoint says of itself."""

    row: UpdateRow
    """Of the update whose weights it holds."""
    manifest: JsonObject
    """Of the policy version that these weights are."""
    files: dict[str, Digest]
    """blake3 of every other file of the folder."""
    schema: int = SCHEMA


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    meta: Meta


class Checkpoints:
    """The checkpoints in one folder; the newest NUM_KEPT stay."""

    def __init__(self, folder: Path) -> None:
        """Nothing is made before the first write."""
        self.folder = Path(folder)

    async def write(self, learner: Learner, row: UpdateRow, manifest: JsonObject) -> Checkpoint:
        """Save `learner` as the checkpoint of `row.update`. Raises StoreError on a bad disk."""
        name = f"{_NAME}{row.update:08d}"
        temp, path = self.folder / f"{_TEMP}{name}", self.folder / name
        try:
            self._sweep()
            temp.mkdir(parents=True)
            await learner.save(temp)
            meta = Meta(row, manifest, {file.name: _digest(file) for file in temp.iterdir()})
            (temp / META).write_text(json.dumps(to_plain(meta), indent=1))
            for file in temp.iterdir():
                _fsync(file)
            fsync_folder(temp)
            os.rename(temp, path)
            fsync_folder(self.folder)
            for old in self._complete()[:-NUM_KEPT]:
                shutil.rmtree(old)
        except OSError as error:
            raise StoreError(f"{path}: cannot write a checkpoint: {error.strerror}") from error
        return Checkpoint(path, meta)

    def newest(self) -> Checkpoint | None:
        """The complete checkpoint of the latest update, its files verified.

        Raises CorruptData when they are not what was written, SchemaTooNew.
        """
        complete = self._complete()
        if not complete:
            return None
        folder = complete[-1]
        meta = _read_meta(folder / META)
        for name, digest in meta.files.items():
            file = folder / name
            if not file.exists():
                raise CorruptData(str(file), 0, "file", "missing")
            if _digest(file) != digest:
                raise CorruptData(str(file), 0, "file", "content does not match its digest")
        return Checkpoint(folder, meta)

    def _complete(self) -> list[Path]:
        """Oldest first. A folder gets its name only once it is complete."""
        return sorted(self.folder.glob(f"{_NAME}*"))

    def _sweep(self) -> None:
        """Remove what a crash left half-written."""
        for path in self.folder.glob(f"{_TEMP}*"):
            shutil.rmtree(path)


def _read_meta(path: Path) -> Meta:
    try:
        plain = json.loads(path.read_text())
        schema = plain["schema"]
        if schema > SCHEMA:
            raise SchemaTooNew(f"{path}: schema {schema}; this version reads up to {SCHEMA}")
        return from_plain(Meta, plain)
    except FileNotFoundError:
        raise CorruptData(str(path), 0, "file", "missing") from None
    except (ValueError, TypeError, KeyError) as error:
        detail = str(error) if isinstance(error, UserInputError) else "not a checkpoint's meta"
        raise CorruptData(str(path), 0, "meta", detail) from None


def _digest(path: Path) -> Digest:
    return blake3(path.read_bytes()).hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
