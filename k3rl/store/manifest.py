"""The manifest: a chain of records that alone says which sealed files exist.

Record N is the file `_log/<N, 20 digits>.json`: one line of canonical JSON that ends in a newline,
names the hash of record N - 1 (`prev_hash`) and carries its own (`self_hash`). A record is written
to a temp file, synced, and linked to its name, which fails when the name is taken. Once linked it
may survive whatever goes wrong next: such a failure is CommitInDoubt, what the record names must
stay, and nothing more is written until a restart has seen what the disk kept.

Recovery takes the whole chain. A last record that is cut short (empty or without its final newline)
was never relied upon: it is set aside. Anything else that does not fit is CorruptData.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from k3rl.blobs import fsync_folder
from k3rl.errors import CorruptData, SchemaTooNew, StoreError, UserInputError
from k3rl.types import Digest, TrajectoryId, canonical_json, digest_json, from_plain, to_plain

NO_HASH = "0" * 64
VERSION = 1
"""Of a record's format. Fields are only ever added, with a default; else the version rises."""


class CommitInDoubt(StoreError):
    """A manifest record has its name, but perhaps not durably: keep all that it names."""


@dataclass(frozen=True, slots=True)
class SealedFile:
    """A sealed Parquet file, as the manifest names it."""

    path: str
    """Relative to the store root."""
    table: str
    schema_id: str
    num_rows: int
    num_bytes: int
    blake3: Digest
    """Of the whole file."""


@dataclass(frozen=True, slots=True)
class ManifestRecord:
    """One record. Frames of the journal are told apart by their sequence and file.

    Frames up to `journal_low_water` that concern finished trajectories, updates or versions are in
    sealed files; those of other trajectories are still in `journal_files`. Files that sort after
    `journal_through` are all needed.
    """

    seq: int
    prev_hash: Digest = NO_HASH
    adds: tuple[SealedFile, ...] = ()
    removes: tuple[str, ...] = ()
    """Paths taken out of the store: quarantined, or, if `is_upkeep`, deleted after a grace."""
    restores: tuple[str, ...] = ()
    """Paths that compaction took out and a repair brings back: what was made of them is broken."""
    drops: tuple[TrajectoryId, ...] = ()
    """Trajectories given up by a repair, or, if `is_upkeep`, let go as the retention policy says.

    It concerns what sealed files and journal have of them so far.
    """
    drops_through: int = 0
    """Last sequence that `drops` covers; begun again later, the same trajectory counts."""
    gaps: tuple[tuple[int, int], ...] = ()
    """[first, next) sequences given up by a repair: `next` may follow `first - 1`."""
    journal_low_water: int = 0
    journal_through: str = ""
    """Last journal file that this record accounts for."""
    journal_files: tuple[str, ...] = ()
    """Which of the files up to `journal_through` are still needed."""
    last_version: int = 0
    """Highest policy version handed out so far."""
    is_pinned: bool = False
    """Whether `sample` draws from the store as of this record until a later one is pinned."""
    is_import: bool = False
    """Whether what it adds came from a file: the journal never had it."""
    is_upkeep: bool = False
    """Whether compaction or garbage collection wrote it: what it takes out was not damaged."""
    undrawable_from: int | None = None
    """Records from this one on, up to this record, had trajectories that are gone since."""
    pins: tuple[tuple[str, int], ...] = ()
    """(name, record): what is there as of that record stays until the name is let go."""
    garbage: tuple[tuple[Digest, float], ...] | None = None
    """(blob, Unix time of its first mention) that nothing names; replaces the last such list."""
    written_at: float = 0.0
    """Unix time; 0: unknown."""
    version: int = VERSION
    self_hash: Digest = NO_HASH
    """digest_json of the record without this field."""


@dataclass(slots=True)
class Manifest:
    """A checked chain, and what it adds up to."""

    root: Path
    records: list[ManifestRecord] = field(default_factory=list)
    files: dict[str, SealedFile] = field(default_factory=dict)
    """Sealed files that exist, by path, in the order in which they were added."""
    retired: dict[str, ManifestRecord] = field(default_factory=dict)
    """What upkeep took out, by path, and the record that did; the file may be deleted by now."""
    added_by: dict[str, int] = field(default_factory=dict)
    """The record that added each file that there ever was."""
    undrawable: list[tuple[int, int]] = field(default_factory=list)
    """[first, next) records whose trajectories are not all there any more."""
    garbage: dict[Digest, float] = field(default_factory=dict)
    """Blobs that nothing named at the last look, and since when."""
    doubt: CommitInDoubt | None = None
    """Why nothing more may be written; None: all is well."""

    @property
    def head(self) -> ManifestRecord:
        """The last record."""
        return self.records[-1]

    @property
    def pinned_seq(self) -> int | None:
        """The newest pinned record; None before the first pin."""
        return next((r.seq for r in reversed(self.records) if r.is_pinned), None)

    @property
    def drops(self) -> dict[TrajectoryId, ManifestRecord]:
        """Trajectories given up by repairs, and the last record that did so."""
        return {id: record for record in self.records for id in record.drops}

    @property
    def let_go(self) -> frozenset[TrajectoryId]:
        """Trajectories that the retention policy took out, whether they came back or not."""
        return frozenset(id for r in self.records if r.is_upkeep for id in r.drops)

    @property
    def gaps(self) -> frozenset[tuple[int, int]]:
        """Jumps of the journal's sequences that repairs left behind."""
        return frozenset(gap for record in self.records for gap in record.gaps)

    @property
    def sequence_floor(self) -> int:
        """No frame written from now on may have a sequence up to this one."""
        return max([self.head.journal_low_water, *(after - 1 for _, after in self.gaps)])

    def next_record(self) -> ManifestRecord:
        """A record after the head that changes nothing, to be filled in."""
        return replace(
            self.head,
            adds=(),
            removes=(),
            restores=(),
            drops=(),
            drops_through=0,
            gaps=(),
            is_pinned=False,
            is_import=False,
            is_upkeep=False,
            undrawable_from=None,
            garbage=None,
        )

    def check_writable(self) -> None:
        """Raises StoreError while an earlier record is in doubt."""
        if self.doubt is not None:
            raise StoreError(str(self.doubt))

    def files_of(self, table: str) -> list[tuple[int, SealedFile]]:
        """The sealed files of a table that exist, with the record that added each."""
        return [
            (record.seq, file)
            for record in self.records
            for file in record.adds
            if file.table == table and file.path in self.files
        ]

    def entry(self, path: str) -> SealedFile:
        """What some record said of a sealed file that exists or existed."""
        adds = self.records[self.added_by[path]].adds
        return next(file for file in adds if file.path == path)

    def take(self, record: ManifestRecord) -> None:
        """Add the next record of the chain."""
        for path in record.removes:
            self.files.pop(path, None)
            if record.is_upkeep:
                self.retired[path] = record
        self.files.update({file.path: file for file in record.adds})
        self.added_by.update({file.path: record.seq for file in record.adds})
        for path in record.restores:
            self.files[path] = self.entry(path)
            del self.retired[path]
        is_loss = bool(record.drops or (record.removes and not record.is_upkeep))
        if is_loss or record.undrawable_from is not None:
            self.undrawable.append((record.undrawable_from or 0, record.seq))
        if record.garbage is not None:
            self.garbage = dict(record.garbage)
            record = replace(record, garbage=())
        self.records.append(record)

    def write(self, record: ManifestRecord) -> ManifestRecord:
        """Write the record after the head durably, with hashes and seq filled in; `take` it next.

        What the record does not name (journal files, last version) is for the caller to carry on.
        Raises StoreError, then nothing happened, or CommitInDoubt, then it may have.
        """
        self.check_writable()
        last = self.records[-1] if self.records else None
        record = sealed_record(
            replace(
                record,
                seq=last.seq + 1 if last else 0,
                prev_hash=last.self_hash if last else NO_HASH,
                version=VERSION,
                written_at=time.time(),
            )
        )
        try:
            _write(self.root / "_log", record)
        except CommitInDoubt as error:
            self.doubt = error
            raise
        return record


def with_pin(record: ManifestRecord, name: str | None, seq: int) -> ManifestRecord:
    """The record, which will be record `seq`, pinned, and under a name if that is not empty.

    None: as it is.
    """
    if name is None:
        return record
    others = tuple(pin for pin in record.pins if pin[0] != name)
    pins = (*others, (name, seq)) if name else record.pins
    return replace(record, is_pinned=True, pins=pins)


def record_path(root: Path, seq: int) -> Path:
    """Where a record lies."""
    return root / "_log" / f"{seq:020d}.json"


def load_manifest(root: Path) -> tuple[Manifest, list[Path]]:
    """The chain of a store and the paths of a torn last record (at most one).

    Raises CorruptData for a hole, a bad hash, or no record where there are other files;
    SchemaTooNew.
    """
    manifest = Manifest(root)
    paths = sorted((root / "_log").glob("[0-9]*.json"))
    torn: list[Path] = []
    for seq, path in enumerate(paths):
        if path != record_path(root, seq):
            raise CorruptData(str(record_path(root, seq)), 0, "seq", f"is missing; {path} exists")
        data = path.read_bytes()
        if not data.endswith(b"\n") and path == paths[-1]:
            torn.append(path)
            break
        manifest.take(_parse(path, data, manifest.records[-1] if seq else None))
    if not manifest.records and any((root / "journal").glob("J-*.tj")):
        raise CorruptData(str(root / "_log"), 0, "seq", "no manifest, but the journal has files")
    return manifest, torn


def sealed_record(record: ManifestRecord) -> ManifestRecord:
    """The record with its `self_hash`."""
    plain = to_plain(record)
    del plain["self_hash"]
    return replace(record, self_hash=digest_json(plain))


def _parse(path: Path, data: bytes, last: ManifestRecord | None) -> ManifestRecord:
    try:
        plain = json.loads(data)
        self_hash = plain.pop("self_hash")
        if self_hash != digest_json(plain):
            raise CorruptData(str(path), 0, "self_hash", "does not match the record")
        if plain.get("version", VERSION) > VERSION:
            raise SchemaTooNew(
                f"{path}: version: {plain['version']} is newer than {VERSION}: read it with a "
                "newer k3rl"
            )
        record = from_plain(ManifestRecord, {**plain, "self_hash": self_hash})
    except (UserInputError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise CorruptData(str(path), 0, "record", str(error)) from None
    if record.prev_hash != (last.self_hash if last else NO_HASH):
        raise CorruptData(str(path), 0, "prev_hash", "is not the hash of the record before")
    if record.seq != (last.seq + 1 if last else 0):
        raise CorruptData(str(path), 0, "seq", f"is {record.seq}, not what the name says")
    return record


def _write(folder: Path, record: ManifestRecord) -> None:
    path = folder / f"{record.seq:020d}.json"
    temp = folder / f".tmp-{record.seq:020d}"
    try:
        with open(temp, "wb") as file:
            file.write(canonical_json(to_plain(record)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(temp, path)
    except FileExistsError:
        raise StoreError(f"{path}: exists: another service writes to this store") from None
    except OSError as error:
        raise StoreError(
            f"{path}: cannot write the manifest: {error.strerror}: make room on this disk"
        ) from error
    finally:
        # One that stays is set aside at the next start.
        with contextlib.suppress(OSError):
            temp.unlink(missing_ok=True)
    try:
        fsync_folder(folder)
    except OSError as error:
        raise CommitInDoubt(
            f"{path}: written, but the disk does not confirm it: {error.strerror}: nothing more is "
            "sealed; check this disk and start the run again"
        ) from error
