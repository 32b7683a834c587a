"""Garbage: files and blobs that nothing names any more, and when they go.

Two phases. What becomes garbage is first written down, in the manifest record that takes it out (a
file) or in one that lists it (a blob), and stays for a grace: readers in other processes may still
use it, and a blob may be named a moment after it was put. After the grace it is deleted if nothing
names it then, no pin holds it, and nobody put it again. A crash leaves what is not deleted yet, and
the next round goes on.

A blob is named by a snapshot (its layers, and the large files that these name), a policy version,
an update or a segment. A layer that cannot be read stops the collection of blobs: it may name any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pyarrow.compute as pc

from k3rl.blobs import BlobStore, fsync_folder
from k3rl.store.archive import Archive
from k3rl.store.events import VersionRow
from k3rl.store.manifest import Manifest
from k3rl.store.protocol import UpdateRow
from k3rl.types import Digest, Snapshot, TrajectoryId

GRACE_S = 3600.0
MAX_MARKS = 20_000
"""Blobs that wait at the same time; a record lists them."""
GROUPS = 64
"""Row groups read at a time."""
References = Callable[[bytes, str], Iterable[Digest]]
"""(a layer blob, its place for messages) -> the other blobs that it needs."""


@dataclass(slots=True)
class GcReport:
    """What a round deleted, or would delete; sizes in bytes."""

    dropped: dict[TrajectoryId, float] = field(default_factory=dict)
    """Trajectories let go, and their share of their files."""
    num_rewritten: int = 0
    """Batches of which much was dropped."""
    files: dict[str, int] = field(default_factory=dict)
    """Deleted."""
    blobs: dict[Digest, int] = field(default_factory=dict)
    """Deleted."""
    waiting_files: dict[str, int] = field(default_factory=dict)
    """Garbage in its grace, or held by a pin."""
    waiting_blobs: dict[Digest, int] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """One for each kind."""
        dropped = f"{len(self.dropped)} trajectories, {int(sum(self.dropped.values()))} bytes"
        yield f"let go: {dropped}; batches written again without them: {self.num_rewritten}"
        for name, files, blobs in (
            ("deleted", self.files, self.blobs),
            ("waiting", self.waiting_files, self.waiting_blobs),
        ):
            total = sum(files.values()) + sum(blobs.values())
            yield f"{name}: {len(files)} files, {len(blobs)} blobs, {total} bytes"


class BlobAge(NamedTuple):
    """A blob that nothing names."""

    since: float
    """Unix time from which on nothing named it."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class BlobGarbage:
    """Blobs that nothing names."""

    due: dict[Digest, BlobAge]
    waiting: dict[Digest, BlobAge]

    @property
    def marks(self) -> dict[Digest, float]:
        """What a record lists."""
        return {digest: age.since for digest, age in self.waiting.items()}


def due_files(
    root: Path, manifest: Manifest, now: float, grace_s: float
) -> tuple[dict[str, int], dict[str, int]]:
    """(files to delete now, files that wait) and their sizes."""
    pins = [seq for _, seq in manifest.head.pins]
    due, waiting = dict[str, int](), dict[str, int]()
    for path, record in list(manifest.retired.items()):
        try:
            num_bytes = (root / path).stat().st_size
        except FileNotFoundError:
            continue
        is_held = any(manifest.added_by[path] <= pin < record.seq for pin in pins)
        is_due = not is_held and record.written_at + grace_s <= now
        (due if is_due else waiting)[path] = num_bytes
    return due, waiting


def delete_files(root: Path, paths: Iterable[str]) -> None:
    """Delete sealed files that no record names."""
    for path in paths:
        (root / path).unlink(missing_ok=True)
    fsync_folder(root / "sealed")


class Names:
    """Which blobs are named; remembers what layers and sealed files name, as neither changes."""

    def __init__(self, blobs: BlobStore, references: References) -> None:
        """Reads nothing yet."""
        self._blobs, self._references = blobs, references
        self._layers: dict[Digest, tuple[Digest, ...]] = {}
        self._files: dict[str, frozenset[Digest]] = {}

    def all(
        self,
        unsealed: Iterable[Snapshot],
        archive: Archive,
        rows: Iterable[UpdateRow | VersionRow],
        check: Callable[[], None] = lambda: None,
    ) -> set[Digest]:
        """All that is named; `rows` of the updates and versions tables.

        `check` is called now and then: to stop, it raises. Raises StoreError or CorruptData for a
        layer or a table that cannot be read.
        """
        named = set[Digest]()
        layers = {layer for snapshot in unsealed for layer in snapshot.layers}
        for row in rows:
            blob = row.checkpoint if isinstance(row, UpdateRow) else row.blob
            named.update([blob] if blob is not None else [])
        known, self._files = self._files, {}
        for batch in archive.catalog.batches:
            check()
            for table, names in (("snapshots", layers), ("segments", named)):
                if table in batch.files:
                    path = batch.files[table].path
                    found = known[path] if path in known else _of_file(archive, table, path)
                    self._files[path] = found
                    names |= found
        for layer in layers:
            check()
            named.add(layer)
            named.update(self.of_layer(layer))
        self._layers = {layer: self._layers[layer] for layer in layers}
        return named

    def of_layer(self, layer: Digest) -> tuple[Digest, ...]:
        """The other blobs that a layer needs. Raises StoreError, CorruptData."""
        if layer not in self._layers:
            content = self._blobs.get(layer)
            place = str(self._blobs.path(layer))
            self._layers[layer] = tuple(self._references(content, place))
        return self._layers[layer]


def blob_garbage(
    blobs: BlobStore,
    named: set[Digest],
    marks: Mapping[Digest, float],
    now: float,
    grace_s: float,
    put_before: float | None = None,
) -> BlobGarbage:
    """What nothing names. Only what was put before a Unix time counts, when one is given.

    `marks` is what was listed so far; what was named or put again in between starts anew.
    """
    due, waiting = dict[Digest, BlobAge](), dict[Digest, BlobAge]()
    for digest in blobs.digests():
        age = blobs.age(digest) if digest not in named else None
        if age is None or (put_before is not None and age[0] >= put_before):
            continue
        put_at, num_bytes = age
        since = marks.get(digest)
        if since is not None and put_at < since and since + grace_s <= now:
            due[digest] = BlobAge(since, num_bytes)
        elif since is not None and put_at < since:
            waiting[digest] = BlobAge(since, num_bytes)
        elif now - put_at >= grace_s and len(waiting) < MAX_MARKS:
            waiting[digest] = BlobAge(now, num_bytes)
    return BlobGarbage(due, waiting)


def _of_file(archive: Archive, table: str, path: str) -> frozenset[Digest]:
    """The layers that a file of snapshots names, or the blobs that one of segments does."""
    found = set[Digest]()
    columns = {"snapshots": ["layers"], "segments": ["media", "expert_ids"]}[table]
    groups = list(range(len(archive.files.group_ends(path))))
    for low in range(0, len(groups), GROUPS):
        data = archive.files.read(path, groups[low : low + GROUPS], columns)
        if table == "snapshots":
            layers = pc.list_flatten(data.column("layers")).unique()
            found.update(raw.hex() for raw in layers.to_pylist())
            continue
        found.update(raw.hex() for raw in data.column("expert_ids").to_pylist() if raw)
        media = pc.list_flatten(data.column("media"))
        found.update(one["blob"].hex() for one in media.to_pylist())
    return frozenset(found)
