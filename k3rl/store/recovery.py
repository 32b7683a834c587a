"""From files to state: the checked manifest, columns of the sealed, then the journal's frames.

`recover` as owner also tidies what a crash may leave: the torn end of the last journal file and a
torn manifest record go to `quarantine/` (neither was ever acknowledged), temp files and sealed
files that no record names too, journal files that were sealed are deleted. Before any of that it
syncs what it is about to rely on: after a kill frames and records may be in the page cache only.
Damage to anything that was acknowledged is CorruptData, and nothing is touched.
"""

from __future__ import annotations

import fcntl
import os
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from k3rl.blobs import fsync_folder, fsync_parents
from k3rl.errors import CorruptData, StoreError
from k3rl.store.archive import Archive
from k3rl.store.columns import Batch, id_key
from k3rl.store.events import Event, FileStart, VersionRow
from k3rl.store.journal import Frame, event_of, file_epoch
from k3rl.store.live import LiveState
from k3rl.store.load_columns import BATCH_TABLES, load_batch
from k3rl.store.manifest import Manifest, ManifestRecord, SealedFile, load_manifest
from k3rl.store.open_files import SealedFiles
from k3rl.store.parquet import REWRITTEN, read_rows
from k3rl.store.protocol import UpdateRow
from k3rl.store.scan import Scan
from k3rl.store.state import StoreState
from k3rl.store.tables import updates_from, versions_from
from k3rl.types import JsonObject, TrajectoryId

FOLDERS = ("journal", "sealed", "_log", "quarantine")


class JournalItem(NamedTuple):
    """A frame and its event, or (both None) the torn end of the last file."""

    path: Path
    frame: Frame | None
    event: Event | None
    torn_offset: int = 0
    torn_bytes: int = 0


class RootLock:
    """One writer per store root, held until `release` or the end of the process (flock)."""

    def __init__(self, root: Path) -> None:
        """Raises StoreError when another process holds it, or the disk refuses."""
        path = root / "LOCK"
        self._handle = -1
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            owner = os.pread(self._handle, 64, 0).decode(errors="replace").strip() or "unknown"
            self.release()
            raise StoreError(
                f"{path}: another store service (pid {owner}) owns this root: "
                "stop it or use another root"
            ) from None
        except OSError as error:
            self.release()
            raise disk_error(path, error) from error

    def release(self) -> None:
        """Let go."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def recover(root: Path, owner: bool) -> StoreState:
    """The state of a store root. Only the holder of the RootLock may be `owner`.

    Raises CorruptData, SchemaTooNew, or StoreError when a reader finds no store here, or the disk
    refuses what the owner must do.
    """
    try:
        return _recover(root, owner)
    except CorruptData as error:
        path = Path(error.file)
        is_repairable = path.parent.name == "sealed" or (
            path.parent.name == "journal" and path.is_file()
        )
        way = f"see `k3rl traj fsck --repair {root}`" if is_repairable else "restore it from a copy"
        detail = f"{error.detail}; {way}"
        raise CorruptData(error.file, error.offset, error.field, detail) from None
    except OSError as error:
        if not owner:
            raise
        raise disk_error(root, error) from error


def disk_error(path: Path, error: OSError) -> StoreError:
    """One clear error for what the disk refused; `path` when the error itself names none."""
    return StoreError(f"{error.filename or path}: {error.strerror}: check this disk and its room")


def _recover(root: Path, owner: bool) -> StoreState:
    if owner:
        for name in FOLDERS:
            (root / name).mkdir(parents=True, exist_ok=True)
        fsync_parents(root)
        for name in ("", "_log", "sealed", "journal"):
            fsync_folder(root / name)
    manifest, torn = load_manifest(root)
    found = {"frames": 0, "torn_bytes": 0, "torn_manifest_records": len(torn), "orphans": 0}
    if owner:
        for path in torn:
            quarantine(root, path)
        if not manifest.records:
            manifest.take(manifest.write(ManifestRecord(seq=0)))
        found["orphans"] = _tidy(root, manifest)
    if not manifest.records:
        raise StoreError(f"{root}: no trajectory store here (no manifest record)")
    state = load_sealed(root, manifest, found)
    needed, left_over = journal_files(root, manifest.head)
    if owner:
        for path in needed:
            sync_file(path)
    _replay(state, root, needed, owner)
    if owner:
        for path in left_over:
            path.unlink()
    return state


def next_service_epoch(root: Path) -> int:
    """Above that of every journal file and manifest record so far."""
    epochs = [file_epoch(path.name) for path in (root / "journal").glob("J-*.tj")]
    through = load_manifest(root)[0].head.journal_through
    return max([0, *epochs, *([file_epoch(through)] if through else [])]) + 1


def quarantine(root: Path, path: Path, name: str = "") -> Path:
    """Move a file into `quarantine/` under its name (or `name`), or the next one that is free."""
    target = free_path(root / "quarantine" / (name or path.name))
    os.rename(path, target)
    fsync_folder(target.parent)
    fsync_folder(path.parent)
    return target


def sync_file(path: Path) -> None:
    """Make what a file holds durable, also if another process wrote it."""
    with open(path, "rb") as file:
        try:
            os.fsync(file.fileno())
        except OSError as error:
            error.filename = str(path)
            raise


def cut_off(root: Path, path: Path, offset: int) -> Path:
    """Move the bytes from `offset` on into `quarantine/`; the file stays, shorter."""
    with open(path, "r+b") as file:
        file.seek(offset)
        target = free_path(root / "quarantine" / f"{path.name}.from-{offset}")
        with open(target, "xb") as aside:
            aside.write(file.read())
            aside.flush()
            os.fsync(aside.fileno())
        fsync_folder(target.parent)
        file.truncate(offset)
        os.fsync(file.fileno())
    return target


def journal_files(root: Path, head: ManifestRecord) -> tuple[list[Path], list[Path]]:
    """(needed, left over) journal files in order. Raises CorruptData when a needed one is gone."""
    paths = sorted((root / "journal").glob("J-*.tj"))
    names = {path.name for path in paths}
    for name in head.journal_files:
        if name not in names:
            path = root / "journal" / name
            raise CorruptData(str(path), 0, "file", "named by the manifest but missing")
    newer = [path for path in paths if path.name > head.journal_through]
    if head.journal_through and not newer:
        path = root / "journal"
        raise CorruptData(str(path), 0, "file", f"no file follows {head.journal_through}")
    old = [path for path in paths if path.name <= head.journal_through]
    needed = [path for path in old if path.name in head.journal_files] + newer
    return needed, [path for path in old if path.name not in head.journal_files]


def free_path(target: Path) -> Path:
    """`target`, or the first of `target`.1, .2, ... that does not exist."""
    number = 0
    path = target
    while path.exists():
        number += 1
        path = target.with_name(f"{target.name}.{number}")
    return path


def _tidy(root: Path, manifest: Manifest) -> int:
    known = {Path(path).name for path in (*manifest.files, *manifest.retired)}
    strays = []
    for path in (root / "sealed").iterdir():
        if path.name in known:
            continue
        if path.name.endswith(REWRITTEN):
            # A compaction that a crash ended: what it copied from is still there.
            path.unlink()
        else:
            strays.append(path)
    strays += [path for name in ("_log", "journal") for path in (root / name).glob(".tmp-*")]
    for path in strays:
        quarantine(root, path)
    return len(strays)


def load_sealed(root: Path, manifest: Manifest, found: JsonObject) -> StoreState:
    """The state of what the manifest names, without what repairs gave up. `found`: see StoreState.

    Raises CorruptData, SchemaTooNew.
    """
    files = SealedFiles(root, manifest.files.get)
    state = StoreState(manifest, LiveState(Archive(files)), recovery=found)
    dropped = _Dropped(manifest)
    batches = defaultdict[int, dict[str, SealedFile]](dict)
    for table in BATCH_TABLES:
        for seq, file in manifest.files_of(table):
            batches[seq][table] = file
    for seq, adds in sorted(batches.items()):
        if "trajectories" in adds:
            batch = _load_batch(files, seq, adds)
            state.live.sealed.catalog.take(dropped.without(batch))
    for _, file in manifest.files_of("updates"):
        state.updates.extend(updates_from(read_rows(root, file)))
    for _, file in manifest.files_of("versions"):
        state.versions.extend(versions_from(read_rows(root, file)))
    versions = [row.policy_version for row in state.versions]
    versions += [row.policy_version_out for row in state.updates]
    state.last_version = max([manifest.head.last_version, *versions])
    return state


class _Dropped:
    """Trajectories that a manifest gives up; their number hardly matters to `without`."""

    def __init__(self, manifest: Manifest) -> None:
        self._records = {id: record.seq for id, record in manifest.drops.items()}
        self._keys = np.sort(np.array([id_key(id) for id in self._records], np.int64))

    def without(self, batch: Batch) -> Batch:
        """A batch without what was given up after its record."""
        if not len(self._keys) or not len(batch):
            return batch
        at = np.searchsorted(self._keys, batch.keys).clip(max=len(self._keys) - 1)
        kept = np.ones(len(batch), np.bool_)
        for row in np.flatnonzero(self._keys[at] == batch.keys).tolist():
            kept[row] = self._records.get(batch.id(row), -1) < batch.seq
        return batch if kept.all() else batch.select(kept)


def _load_batch(files: SealedFiles, seq: int, adds: dict[str, SealedFile]) -> Batch:
    try:
        return load_batch(files, seq, adds)
    except FileNotFoundError as error:
        detail = "named by the manifest but missing"
        raise CorruptData(str(error.filename), 0, "file", detail) from None


def scan_journal(
    paths: list[Path], head: ManifestRecord, gaps: Collection[tuple[int, int]]
) -> Iterator[JournalItem]:
    """Every frame of the needed files in order, then, if there is one, the torn tail.

    Raises CorruptData for a bad frame, a gap in the sequences that is none of `gaps`, or a torn
    file that is not the last.
    """
    expected = head.journal_low_water + 1
    for path in paths:
        scan = Scan(path, gaps)
        for frame in scan:
            if path.name > head.journal_through:
                if frame.sequence != expected and (expected, frame.sequence) not in gaps:
                    detail = f"{frame.sequence}, not {expected}: frames before it are missing"
                    raise CorruptData(str(path), frame.place.offset, "sequence", detail)
                expected = frame.sequence + 1
            yield JournalItem(path, frame, event_of(frame, str(path)))
        if scan.torn_bytes and path != paths[-1]:
            bad = scan.damage
            detail = f"{bad.detail}, but it is not the last file"
            raise CorruptData(str(path), scan.good_bytes, bad.field, detail)
        if scan.torn_bytes:
            yield JournalItem(path, None, None, scan.good_bytes, scan.torn_bytes)


class Skips:
    """What a manifest says of frames that a replay passes over."""

    def __init__(self, manifest: Manifest) -> None:
        """As of the manifest's head."""
        self.low_water = manifest.head.journal_low_water
        self.gaps = manifest.gaps
        self._drops = {id: record.drops_through for id, record in manifest.drops.items()}
        self._is_known: dict[TrajectoryId, bool] = {}

    def is_sealed(self, state: StoreState, event: Event, sequence: int) -> bool:
        """Whether the frame is in sealed files, or given up by a repair."""
        is_old = sequence <= self.low_water
        if isinstance(event, FileStart | UpdateRow | VersionRow):
            return is_old
        if sequence <= self._drops.get(event.id, -1):
            return True
        if not is_old:
            return False
        if event.id not in self._is_known:
            self._is_known[event.id] = state.live.sealed.catalog.find(event.id) is not None
        return self._is_known[event.id]


def _replay(state: StoreState, root: Path, needed: list[Path], owner: bool) -> None:
    manifest, skips = state.manifest, Skips(state.manifest)
    state.usage.update((path.name, set()) for path in needed)
    last = manifest.sequence_floor
    for item in scan_journal(needed, manifest.head, skips.gaps):
        if item.frame is None or item.event is None:
            state.recovery["torn_bytes"] = item.torn_bytes
            if owner:
                cut_off(root, item.path, item.torn_offset)
            continue
        last = max(last, item.frame.sequence)
        if skips.is_sealed(state, item.event, item.frame.sequence):
            continue
        try:
            state.apply(item.event, item.frame.sequence, item.frame.place)
        except (StoreError, LookupError) as error:
            at = item.frame.place.offset
            raise CorruptData(str(item.path), at, "event", str(error)) from None
        state.recovery["frames"] += 1
    state.last_sequence = last
