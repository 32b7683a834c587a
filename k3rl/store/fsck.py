"""Check every hash of a store, and set aside what is broken.

`check` looks at the manifest chain, every sealed file (size, file hash, page checksums, content
hashes), every journal frame, whether the frames make sense, whether each context is whole, and the
blobs that snapshots and versions name. With `repair` it moves what is broken to `quarantine/`,
deleting nothing, and gives up only what misses something: trajectories that lost a frame of the
journal, or those of a broken sealed batch, with all that branched off them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from k3rl.blobs import BlobStore
from k3rl.errors import CorruptData, SchemaTooNew, StoreError
from k3rl.store.audit import LedgerReport, compare_ledger
from k3rl.store.manifest import Manifest, SealedFile, load_manifest
from k3rl.store.parquet import file_digest, open_sealed, read_groups, read_rows
from k3rl.store.record import Piece, TrajectoryRecord
from k3rl.store.recovery import (
    RootLock,
    disk_error,
    journal_files,
    quarantine,
    recover,
    scan_journal,
    sealed_extents,
)
from k3rl.store.salvage import drop_parentless, parentless, roll_back, salvage_journal
from k3rl.store.state import StoreState
from k3rl.store.tokens import TokenFiles

__all__ = ["Finding", "FsckReport", "LedgerReport", "check", "compare_ledger"]
BATCH_TABLES = ("segments", "steps", "trajectories", "snapshots")
"""Tables that only make sense together: a repair takes out all of a batch."""


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


def check(root: Path, blobs: BlobStore | None = None, repair: bool = False) -> FsckReport:
    """Check a store root; `blobs` defaults to `<root>/blobs`. No service may run on it.

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
            _check_whole(report, blobs or BlobStore(root / "blobs"), repair)
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
        if roll_back(report.root, manifest, set(errors)):
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
    names = opened.schema_arrow.names
    for group in range(opened.metadata.num_row_groups):
        read_groups(root, file, opened, [group], names)
    if file_digest(path) != file.blake3:
        raise CorruptData(str(path), 0, "blake3", "the file is not what was sealed")
    if file.table != "segments":
        return 0
    files = TokenFiles(root, lambda _: file)
    extents = [extent for found in sealed_extents(root, file).values() for extent in found]
    for extent in extents:
        files.load([Piece(extent, 0, extent.num_tokens)])
    return len(extents)


def _given_up(ids: set[str]) -> str:
    return f"given up: {', '.join(sorted(ids)) or 'no trajectory'}"


def _take_out(root: Path, manifest: Manifest, broken: set[str]) -> set[str]:
    """Move broken files, and what was sealed with them, to quarantine by a manifest record.

    Returns the trajectories given up.
    """
    removes, drops = set(broken), set[str]()
    for record in manifest.records:
        batch = [f for f in record.adds if f.path in manifest.files and f.table in BATCH_TABLES]
        if any(file.path in broken for file in batch):
            removes |= {file.path for file in batch}
            drops |= _ids(root, batch)
    record = replace(
        manifest.next_record(),
        removes=tuple(sorted(removes)),
        drops=tuple(sorted(drops)),
        drops_through=manifest.head.journal_low_water,
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


def _check_whole(report: FsckReport, blobs: BlobStore, repair: bool) -> None:
    """Whether what the files say together makes sense."""
    try:
        state = recover(report.root, False)
    except CorruptData as error:
        if not any(found.file == error.file for found in report.findings):
            manifest, _ = load_manifest(report.root)
            _journal_error(report, manifest, error, repair and error.field == "event")
        return
    except StoreError as error:
        report.add(CorruptData(str(report.root), 0, "store", str(error)))
        return
    if orphans := parentless(state.live):
        if repair:
            drop_parentless(state)
        for id in sorted(orphans):
            detail = "its parent is gone"
            what = "given up, with all that branched off it" if repair else ""
            report.add(CorruptData(str(report.root), 0, f"trajectory {id}", detail), what)
    for record in state.live.records.values():
        report.counts["trajectories"] += 1
        for problem in _problems(state, record):
            where = f"trajectory {record.id}"
            report.add(CorruptData(str(report.root), 0, where, problem))
    layers = {layer: s for s in state.live.snapshots.values() for layer in s.layers}
    for layer, snapshot in layers.items():
        report.counts["blobs"] += 1
        try:
            blobs.get(layer)
        except CorruptData as error:
            report.add(error)
        except StoreError as error:
            field = f"layer of snapshot {snapshot.snapshot_id}"
            report.add(CorruptData(str(blobs.path(layer)), 0, field, str(error)))


def _problems(state: StoreState, record: TrajectoryRecord) -> Iterator[str]:
    for number, context in record.contexts.items():
        end = context.base
        for extent in context.extents:
            if extent.start != end:
                yield f"context {number}: tokens [{end}, {extent.start}) are missing"
            end = extent.start + extent.num_tokens
        if end != context.acked:
            yield f"context {number}: has tokens up to {end}, not {context.acked}"
    for step in record.steps:
        if step.snapshot_after and step.snapshot_after not in state.live.snapshots:
            yield f"step {step.index}: snapshot {step.snapshot_after} is missing"
