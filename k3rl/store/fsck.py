"""Check every hash of a store, and set aside what is broken.

`check` looks at the manifest chain, every sealed file (size, file hash, page checksums, content
hashes), every journal frame, every blob, whether the frames make sense, whether each context is
whole, and whether the layers of snapshots and the weights of versions are there. With `repair` it
moves what is broken to `quarantine/`, deleting nothing, and gives up only what misses something:
trajectories that lost a frame of the journal, or those of a broken sealed batch, with all that
branched off them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path

import numpy as np

from k3rl.blobs import BlobStore
from k3rl.errors import CorruptData, SchemaTooNew, StoreError
from k3rl.store.audit import LedgerReport, compare_ledger
from k3rl.store.columns import Batch
from k3rl.store.gc import References
from k3rl.store.live import LiveState
from k3rl.store.load_columns import BATCH_TABLES, load_batch, segments_from_file
from k3rl.store.manifest import Manifest, ManifestRecord, SealedFile, load_manifest
from k3rl.store.open_files import SealedFiles
from k3rl.store.parquet import check_pages, file_digest, open_sealed, read_rows
from k3rl.store.record import Piece, TrajectoryRecord
from k3rl.store.recovery import (
    RootLock,
    disk_error,
    journal_files,
    quarantine,
    recover,
    scan_journal,
)
from k3rl.store.salvage import (
    drop_parentless,
    parentless,
    roll_back,
    salvage_journal,
    undo_compaction,
)
from k3rl.store.state import StoreState
from k3rl.store.tokens import TokenFiles
from k3rl.types import Digest

__all__ = ["Finding", "FsckReport", "LedgerReport", "check", "compare_ledger"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    file: str
    offset: int
    """Bytes from the start of `file`."""
    field: str
    detail: str
    repaired: str = ""
    """What was done about it; empty: nothing."""

    def __str__(self) -> str:
        """One line."""
        moved = f" -> {self.repaired}" if self.repaired else ""
        return f"{self.file}: byte {self.offset}: {self.field}: {self.detail}{moved}"


@dataclass(slots=True)
class FsckReport:
    """All findings, and how much was checked."""

    root: Path
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """manifest_records, sealed_files, segments, journal_files, frames, torn_bytes, blobs, ..."""

    def summary(self) -> str:
        """One line."""
        counts = ", ".join(f"{number} {name}" for name, number in self.counts.items())
        return f"{self.root}: {len(self.findings)} findings; checked {counts or 'nothing'}"

    def add(self, error: CorruptData, repaired: str = "") -> None:
        """Note an error."""
        self.findings.append(Finding(error.file, error.offset, error.field, error.detail, repaired))


def check(
    root: Path,
    blobs: BlobStore | None = None,
    repair: bool = False,
    references: References | None = None,
) -> FsckReport:
    """Check a store root; `blobs` defaults to `<root>/blobs`. No service may run on it.

    Without `references` blobs that only layers name are not looked at.
    Raises StoreError when one does, when there is no store, or the disk refuses a repair.
    """
    root = Path(root)
    if not (root / "_log").is_dir():
        raise StoreError(f"{root}: no trajectory store here (no _log folder)")
    report = FsckReport(root)
    lock = RootLock(root)
    try:
        manifest = _check_manifest(report)
        if manifest is not None:
            _check_sealed(report, manifest, repair)
            _check_journal(report, manifest, repair)
            store = blobs or BlobStore(root / "blobs")
            damaged = _check_blobs(report, store, repair)
            state = _check_whole(report, repair)
            if state is not None:
                _check_named(report, state, store, references, damaged)
            _count_garbage(report, manifest)
    except OSError as error:
        raise disk_error(root, error) from error
    finally:
        lock.release()
    return report


def _check_manifest(report: FsckReport) -> Manifest | None:
    """None: it is broken, so nothing else can be judged."""
    try:
        manifest, torn = load_manifest(report.root)
    except CorruptData as error:
        report.add(error)
        return None
    report.counts["manifest_records"] = len(manifest.records)
    report.counts["torn_manifest_records"] = len(torn)
    return manifest if manifest.records else None


def _check_sealed(report: FsckReport, manifest: Manifest, repair: bool) -> None:
    errors: dict[str, CorruptData] = {}
    for file in manifest.files.values():
        report.counts["sealed_files"] += 1
        try:
            report.counts["segments"] += _check_file(report.root, file)
        except CorruptData as error:
            errors[file.path] = error
        except SchemaTooNew as error:
            report.add(CorruptData(str(report.root / file.path), 0, "schema_id", str(error)))
    repaired = ""
    if errors and repair:
        if undo_compaction(report.root, manifest, set(errors)):
            repaired = "compaction undone: what it was made of is still there"
        elif roll_back(report.root, manifest, set(errors)):
            repaired = "unsealed: the journal still has all of it"
        else:
            drops = _take_out(report.root, manifest, set(errors))
            repaired = f"{report.root / 'quarantine'}; {_given_up(drops)}"
    for found in errors.values():
        report.add(found, repaired)


def _check_file(root: Path, file: SealedFile) -> int:
    """Checks one sealed file; returns its number of segments."""
    path = root / file.path
    opened = open_sealed(root, file)
    if path.stat().st_size != file.num_bytes:
        detail = f"{path.stat().st_size} bytes, the manifest says {file.num_bytes}"
        raise CorruptData(str(path), file.num_bytes, "num_bytes", detail)
    check_pages(root, file, opened)
    if file_digest(path) != file.blake3:
        raise CorruptData(str(path), 0, "blake3", "the file is not what was sealed")
    if file.table != "segments":
        return 0
    sealed = SealedFiles(root, {file.path: file}.get)
    files, (_, _, segments) = TokenFiles(root, sealed), segments_from_file(sealed, file.path)
    for n in range(len(segments)):
        extent = segments.extent(file.path, n)
        files.load([Piece(extent, 0, extent.num_tokens)])
    return len(segments)


def _given_up(ids: set[str]) -> str:
    return f"given up: {', '.join(sorted(ids)) or 'no trajectory'}"


def _take_out(root: Path, manifest: Manifest, broken: set[str]) -> set[str]:
    """Move broken files, and what was sealed with them, to quarantine by a manifest record.

    Returns the trajectories given up.
    """
    removes, drops, lost = set(broken), set[str](), set[int]()
    for record in manifest.records:
        batch = [f for f in record.adds if f.path in manifest.files and f.table in BATCH_TABLES]
        if any(file.path in broken for file in batch):
            removes |= {file.path for file in batch}
            drops |= _ids(root, batch)
            lost.add(_first_sealed(root, record, batch))
    record = replace(
        manifest.next_record(),
        removes=tuple(sorted(removes)),
        drops=tuple(sorted(drops)),
        drops_through=manifest.head.journal_low_water,
        undrawable_from=min(lost, default=manifest.head.seq + 1),
    )
    manifest.take(manifest.write(record))
    for path in removes:
        if (root / path).exists():
            quarantine(root, root / path)
    return drops


def _ids(root: Path, batch: list[SealedFile]) -> set[str]:
    """Trajectories of a batch, from the first of its files that can still be read."""
    for table in ("trajectories", "segments", "steps"):
        for file in (file for file in batch if file.table == table):
            try:
                return {row["trajectory"].hex() for row in read_rows(root, file, ["trajectory"])}
            except StoreError:
                continue
    raise StoreError(f"{root}: a sealed batch is broken beyond naming its trajectories: restore it")


def _first_sealed(root: Path, record: ManifestRecord, batch: list[SealedFile]) -> int:
    """The first record that had any trajectory of a batch; 0 when that cannot be read."""
    if not record.is_upkeep:
        return record.seq
    try:
        files = [file for file in batch if file.table == "trajectories"]
        rows = [row for file in files for row in read_rows(root, file, ["sealed_seq"])]
    except StoreError:
        return 0
    return min((row["sealed_seq"] for row in rows), default=record.seq)


def _check_journal(report: FsckReport, manifest: Manifest, repair: bool) -> None:
    try:
        paths, _ = journal_files(report.root, manifest.head)
        report.counts["journal_files"] = len(paths)
        for item in scan_journal(paths, manifest.head, manifest.gaps):
            report.counts["frames"] += item.frame is not None
            report.counts["torn_bytes"] += item.torn_bytes
    except CorruptData as error:
        _journal_error(report, manifest, error, repair)


def _journal_error(
    report: FsckReport, manifest: Manifest, error: CorruptData, repair: bool
) -> None:
    path, repaired = Path(error.file), ""
    if repair and path.parent.name == "journal" and path.is_file():
        found = salvage_journal(report.root, manifest)
        num_bytes = sum(cut.end - cut.offset for cut in found.cuts)
        aside = f"{num_bytes} bytes to {report.root / 'quarantine'}"
        repaired = f"{aside}; {_given_up(found.drops)}"
    report.add(error, repaired)


def _check_whole(report: FsckReport, repair: bool) -> StoreState | None:
    """Whether what the files say together makes sense; None: too little to go on."""
    try:
        state = recover(report.root, False)
    except CorruptData as error:
        if not any(found.file == error.file for found in report.findings):
            manifest, _ = load_manifest(report.root)
            _journal_error(report, manifest, error, repair and error.field == "event")
        return None
    except StoreError as error:
        report.add(CorruptData(str(report.root), 0, "store", str(error)))
        return None
    if orphans := parentless(state.live):
        if repair:
            drop_parentless(state)
        for id in sorted(orphans):
            detail = "its parent is gone"
            what = "given up, with all that branched off it" if repair else ""
            report.add(CorruptData(str(report.root), 0, f"trajectory {id}", detail), what)
    try:
        _check_trajectories(report, state)
    except CorruptData as error:
        if not any(found.file == error.file for found in report.findings):
            report.add(error)
        return None
    return state


def _check_named(
    report: FsckReport,
    state: StoreState,
    blobs: BlobStore,
    references: References | None,
    damaged: set[Digest],
) -> None:
    """Weights, layers and large files of these must be there; `damaged` were found before."""
    for row in state.versions:
        if row.blob is not None:
            _is_there(report, blobs, row.blob, f"weights of version {row.policy_version}", damaged)
    layers = {layer: s for s in state.live.all_snapshots() for layer in s.layers}
    large: dict[Digest, Digest] = {}
    for layer, snapshot in layers.items():
        if _is_there(report, blobs, layer, f"layer of snapshot {snapshot.snapshot_id}", damaged):
            try:
                named = references(blobs.get(layer), str(blobs.path(layer))) if references else ()
                large |= dict.fromkeys(named, layer)
            except CorruptData as error:
                report.add(error)
    for digest, layer in large.items():
        report.counts["large_files"] += 1
        _is_there(report, blobs, digest, f"large file of layer {layer}", damaged)


def _is_there(
    report: FsckReport, blobs: BlobStore, digest: Digest, field: str, damaged: set[Digest]
) -> bool:
    if digest in damaged:
        return False
    if not blobs.has(digest):
        report.add(CorruptData(str(blobs.path(digest)), 0, field, "no such blob"))
        return False
    return True


def _check_blobs(report: FsckReport, blobs: BlobStore, repair: bool) -> set[Digest]:
    """Reads every blob, what layers name included; returns those that are damaged.

    One that is set aside can be put again: as long as it lies there it passes for stored.
    """
    damaged = set()
    for digest in sorted(blobs.digests()):
        report.counts["blobs"] += 1
        try:
            for _ in blobs.blocks(digest):
                pass
        except CorruptData as error:
            damaged.add(digest)
            aside = quarantine(report.root, blobs.path(digest), digest) if repair else ""
            report.add(error, str(aside))
    return damaged


def _count_garbage(report: FsckReport, manifest: Manifest) -> None:
    """What waits for its deletion is no finding."""
    waiting = sum((report.root / path).exists() for path in manifest.retired)
    report.counts["garbage_files"] = waiting
    report.counts["garbage_blobs"] = len(manifest.garbage)


def _check_trajectories(report: FsckReport, state: StoreState) -> None:
    live = state.live
    snapshots = {snapshot.snapshot_id for snapshot in live.all_snapshots()}
    for batch in live.sealed.catalog.batches:
        _check_keys(report, live.sealed.files, batch)
    sealed = (live.sealed.records(batch) for batch in live.sealed.catalog.batches)
    for record in chain(live.records.values(), *sealed):
        report.counts["trajectories"] += 1
        for problem in _problems(live, record, snapshots):
            where = f"trajectory {record.id}"
            report.add(CorruptData(str(report.root), 0, where, problem))


def _check_keys(report: FsckReport, files: SealedFiles, batch: Batch) -> None:
    """Whether a batch's `trajectories` file says of segments what their own file says."""
    derived = load_batch(files, batch.seq, batch.files, is_derived=True)
    derived = derived.select(np.isin(derived.ids, batch.ids))
    pairs = [
        (getattr(derived.segments, f.name), getattr(batch.segments, f.name))
        for f in fields(batch.segments)
    ]
    if not all(np.array_equal(a, b) for a, b in pairs):
        path = str(files.root / batch.files["trajectories"].path)
        report.add(CorruptData(path, 0, "segments", "are not those of the segments file"))


def _problems(live: LiveState, record: TrajectoryRecord, snapshots: set[str]) -> Iterator[str]:
    for number, (base, _, acked) in live.ranges(record.id).items():
        end = base
        try:
            for piece in live.pieces(record.id, number, base, acked, acked=True):
                end += piece.high - piece.low
        except StoreError as error:
            yield f"context {number}: {error}"
        if end != acked:
            yield f"context {number}: has tokens up to {end}, not {acked}"
    for step in record.steps:
        if step.snapshot_after and step.snapshot_after not in snapshots:
            yield f"step {step.index}: snapshot {step.snapshot_after} is missing"
