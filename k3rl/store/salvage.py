"""Repairs: what of a damaged store can be kept, and the manifest record that says what cannot.

Nothing is deleted: damaged bytes go to `quarantine/`. The record comes before the files change, so
a repair that is interrupted is simply made again. It carries a floor for sequences and versions
above everything that was ever handed out, so that neither repeats.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from k3rl.blobs import fsync_folder
from k3rl.errors import CorruptData, StoreError
from k3rl.store.events import (
    KINDS,
    Begun,
    Claimed,
    Event,
    FileStart,
    Finished,
    Paused,
    Reaped,
    Requeued,
    StepCommitted,
    TrajectoryEvent,
    VersionRow,
)
from k3rl.store.journal import (
    HEADER_BYTES,
    MAGIC,
    Frame,
    event_of,
    frame_bytes,
    frame_kind,
    parse,
)
from k3rl.store.live import LiveState
from k3rl.store.manifest import Manifest
from k3rl.store.parquet import file_digest
from k3rl.store.protocol import UpdateRow
from k3rl.store.recovery import (
    Skips,
    free_path,
    journal_files,
    load_sealed,
    quarantine,
    scan_journal,
)
from k3rl.store.scan import is_torn
from k3rl.store.state import StoreState
from k3rl.types import TokenFrame, TrajectoryId

MIN_VERSION_BYTES = 150
"""No frame that hands out a policy version is shorter: bounds how many an unreadable end held."""

_ID = re.compile(rb'"id": "([0-9a-f]{32})"')


class Cut(NamedTuple):
    """Bytes [offset, end) of a journal file that hold no frame that can be kept."""

    path: Path
    offset: int
    end: int


@dataclass(slots=True)
class Salvage:
    """What is cut out of the journal and given up."""

    cuts: list[Cut] = field(default_factory=list)
    gaps: set[tuple[int, int]] = field(default_factory=set)
    drops: set[TrajectoryId] = field(default_factory=set)


def salvage_journal(root: Path, manifest: Manifest) -> Salvage:
    """Cut unreadable frames out of the journal; give up the trajectories that miss one of them.

    A trajectory misses a frame when what follows of it could not have been decided without, or when
    it finished although a lost frame may have been its own. One whose last frames are lost is kept
    as it was before them. Raises StoreError.
    """
    work = _Work(root, manifest)
    work.read()
    found = work.found
    for cut in found.cuts:
        _set_aside(root, cut)
    if found.cuts or found.gaps or found.drops:
        record = replace(
            manifest.next_record(),
            gaps=tuple(sorted(found.gaps)),
            drops=tuple(sorted(found.drops)),
            drops_through=work.floor,
            undrawable_from=work.state.first_sealed(found.drops),
            last_version=work.last_version,
        )
        manifest.take(manifest.write(record))
    for path in {cut.path for cut in found.cuts}:
        _rewrite(path, [cut for cut in found.cuts if cut.path == path])
    return found


def undo_compaction(root: Path, manifest: Manifest, broken: set[str]) -> bool:
    """Bring back what broken files were made of, if all of that is still there and whole."""
    culprits = [r for r in manifest.records if any(file.path in broken for file in r.adds)]
    restores = tuple(path for record in culprits for path in record.removes)
    for record in culprits:
        if not record.is_upkeep or not set(record.removes) <= manifest.retired.keys():
            return False
    for path in restores:
        if not (root / path).exists() or file_digest(root / path) != manifest.entry(path).blake3:
            return False
    added = [file.path for record in culprits for file in record.adds]
    removes = tuple(path for path in added if path in manifest.files)
    # Nothing is lost, so whatever could be drawn from can be still.
    no_loss = manifest.head.seq + 1
    record = replace(
        manifest.next_record(), removes=removes, restores=restores, undrawable_from=no_loss
    )
    manifest.take(manifest.write(record))
    _quarantine_all(root, removes)
    return True


def roll_back(root: Path, manifest: Manifest, broken: set[str]) -> bool:
    """Undo the sealing of broken files if the journal still has all that they held.

    It has when a crash or a full disk came between the record and the end of the journal files.
    What was imported it never had: that stays as it is. What was written again since, or let go,
    cannot be told apart any more.
    """
    culprits = [r for r in manifest.records if any(file.path in broken for file in r.adds)]
    if any(record.is_import for record in culprits):
        return False
    first = culprits[0].seq
    if any(r.is_upkeep and (r.removes or r.drops) for r in manifest.records[first:]):
        return False
    base, head = manifest.records[first - 1], manifest.head
    last = 0
    try:
        for item in scan_journal(journal_files(root, base)[0], base, manifest.gaps):
            last = max(last, item.frame.sequence if item.frame else 0)
    except CorruptData:
        return False
    if last < head.journal_low_water:
        return False
    undone = [record for record in manifest.records[first:] if not record.is_import]
    removes = [f.path for r in undone for f in r.adds if f.path in manifest.files]
    record = replace(
        manifest.next_record(),
        removes=tuple(removes),
        undrawable_from=first,
        journal_low_water=base.journal_low_water,
        journal_through=base.journal_through,
        journal_files=base.journal_files,
    )
    manifest.take(manifest.write(record))
    _quarantine_all(root, removes)
    return True


def drop_parentless(state: StoreState) -> None:
    """Give up branches whose parent is gone: their first tokens are gone with it."""
    gone = descendants(state.live, parentless(state.live))
    record = replace(
        state.next_record(),
        drops=tuple(sorted(gone)),
        drops_through=state.last_sequence,
        undrawable_from=state.first_sealed(gone),
    )
    state.manifest.take(state.manifest.write(record))


def parentless(live: LiveState) -> set[TrajectoryId]:
    """Branches whose own parent is gone."""
    return {id for id, parent in live.branches().items() if parent not in live}


def descendants(live: LiveState, ids: set[TrajectoryId]) -> set[TrajectoryId]:
    """`ids` and all that branched off them, at any remove."""
    branches, found, size = live.branches(), set(ids), -1
    while len(found) > size:
        size = len(found)
        found |= {id for id, parent in branches.items() if parent in found}
    return found


def _quarantine_all(root: Path, paths: Iterable[str]) -> None:
    for path in paths:
        if (root / path).exists():
            quarantine(root, root / path)


class _Work:
    """One pass over manifest, tables and journal."""

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self.root = root
        self.found = Salvage()
        self.state = load_sealed(root, manifest, {"frames": 0})
        self.skips = Skips(manifest)
        self.expected = manifest.head.journal_low_water + 1
        self.floor = manifest.sequence_floor
        self.last_version = 0
        self._tail_bytes = 0
        self._suspects: set[TrajectoryId] = set()
        """Being written when a frame was lost that may be theirs."""

    def read(self) -> None:
        head = self.state.manifest.head
        paths = sorted((self.root / "journal").glob("J-*.tj"))
        for path in paths:
            if path.name in head.journal_files or path.name > head.journal_through:
                self._read_file(path, path == paths[-1])
        lost = sum(after - first for first, after in self.found.gaps)
        self.last_version = self.state.last_version + lost + self._tail_bytes // MIN_VERSION_BYTES
        if self._tail_bytes:
            most = self._tail_bytes // HEADER_BYTES + 1
            self.floor = max(self.floor, self.expected - 1 + most)
        self.floor = max(self.floor, self.expected - 1)
        if self.floor >= self.expected and self.found.cuts:
            self.found.gaps.add((self.expected, self.floor + 1))
        self.found.drops = descendants(self.state.live, self.found.drops)

    def _read_file(self, path: Path, is_last: bool) -> None:
        data = path.read_bytes()
        is_new = path.name > self.state.manifest.head.journal_through
        expected, num_known = self.expected if is_new else None, 0
        for piece in _pieces(path, data):
            if isinstance(piece, Cut):
                if is_last and is_torn(data, piece.offset):
                    return
                self.found.cuts.append(piece)
                num_known += self._suspect_owner(data[piece.offset : piece.end])
                self._tail_bytes += (piece.end - piece.offset) * is_new
                continue
            frame, event = piece
            if expected is not None and frame.sequence < expected:
                offset = frame.place.offset
                self.found.cuts.append(Cut(path, offset, offset + frame.place.num_bytes))
                continue
            jump = (frame.sequence if expected is None else expected, frame.sequence)
            if jump[0] != jump[1] and jump not in self.skips.gaps:
                self.found.gaps.add(jump)
                if jump[1] - jump[0] > num_known:
                    self._suspect_all()
            expected, num_known = frame.sequence + 1, 0
            if is_new:
                self.expected, self._tail_bytes = expected, 0
            self._take(frame, event)

    def _take(self, frame: Frame, event: Event) -> None:
        if self.skips.is_sealed(self.state, event, frame.sequence):
            return
        if not isinstance(event, FileStart | UpdateRow | VersionRow):
            if event.id in self.found.drops:
                return
            is_doubtful = isinstance(event, Finished) and event.id in self._suspects
            if is_doubtful or not _fits(self.state.live, event):
                self.found.drops.add(event.id)
                return
            if isinstance(event, StepCommitted):
                # Its number and its range leave no room for a loss before it.
                self._suspects.discard(event.id)
        self.state.apply(event, frame.sequence, frame.place)

    def _suspect_owner(self, data: bytes) -> bool:
        """Whose frame was lost, if that can be told: its header is whole, and so is its id."""
        if frame_bytes(data, 0) != len(data):
            return False
        if KINDS.get(frame_kind(data)) in (FileStart, UpdateRow, VersionRow):
            return True
        found = _ID.search(data)
        id = found[1].decode() if found else ""
        self._suspects.add(id)
        return id in self.state.live

    def _suspect_all(self) -> None:
        """It may be anybody's who was being written; for others the next claim tells."""
        records = self.state.live.records.values()
        self._suspects |= {record.id for record in records if record.worker_id is not None}


def _fits(live: LiveState, event: TrajectoryEvent) -> bool:
    """Whether the event could have been decided in this state: then nothing before it is lost."""
    try:
        match event:
            case Begun(header=header, start=start):
                is_rooted = not start or (header.parent and header.parent.id in live)
                return bool(is_rooted) and live.begin(header, start) is not None
            case Claimed():
                return live.claim(event.id, event.worker_id) == event
            case TokenFrame():
                return live.append(event)[0] is event
            case StepCommitted():
                return live.commit(event.id, event.epoch, event.frame)[0] is not None
            case Paused():
                return live.pause(event.id, event.epoch) == event
            case Requeued():
                return live.requeue(event.id) == event
            case Reaped():
                return live.reap(event.id, event.worker_id) == event
            case Finished():
                return live.finish(event.id, event.epoch, event.outcome) is not None
    except (StoreError, LookupError):
        return False


def _pieces(path: Path, data: bytes) -> Iterator[tuple[Frame, Event] | Cut]:
    """The good frames of a file and what lies between them, in order."""
    at = bad = 0
    while at < len(data):
        good = _good_frame(path, data, at)
        if good is None:
            size = frame_bytes(data, at)
            following = data.find(MAGIC, at + 1) if size is None else at + size
            at = min(following, len(data)) if following >= 0 else len(data)
            continue
        if bad < at:
            yield Cut(path, bad, at)
        yield good
        at = bad = at + good[0].place.num_bytes
    if bad < len(data):
        yield Cut(path, bad, len(data))


def _good_frame(path: Path, data: bytes, at: int) -> tuple[Frame, Event] | None:
    try:
        frame = parse(data, at, str(path))
        return (frame, event_of(frame, str(path))) if frame else None
    except CorruptData:
        return None


def _set_aside(root: Path, cut: Cut) -> None:
    target = free_path(root / "quarantine" / f"{cut.path.name}.from-{cut.offset}")
    with open(cut.path, "rb") as file, open(target, "xb") as aside:
        file.seek(cut.offset)
        aside.write(file.read(cut.end - cut.offset))
        aside.flush()
        os.fsync(aside.fileno())
    fsync_folder(target.parent)


def _rewrite(path: Path, cuts: list[Cut]) -> None:
    data, kept, at = path.read_bytes(), [], 0
    for cut in cuts:
        kept.append(data[at : cut.offset])
        at = cut.end
    temp = path.with_name(f".tmp-{path.name}")
    with open(temp, "wb") as file:
        file.write(b"".join([*kept, data[at:]]))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temp, path)
    fsync_folder(path.parent)
