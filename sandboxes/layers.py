"""Layers: canonical manifests of what changed in a workspace, and the trees that they stack to.

A layer is one blob: a JSON manifest with one record per path, sorted by path components, and the
contents of small files behind it. Its id is the digest of that blob, so equal changes have equal
ids. Deletions (whiteouts) and replaced folders (opaque) are records of their own, which is why a
folder that was deleted and made again never shows its old files. Files above `INLINE_BYTES` are
blobs of their own, named by the manifest; writing a layer of small files costs one blob.

Owners are not recorded: a workspace has one owner. Extended attributes and hard links between
files are not kept; a hard link comes back as a copy.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from k3rl.blobs import BlobStore
from k3rl.errors import CorruptData, UserInputError
from k3rl.types import JSON, Digest, canonical_json, digest_bytes, digest_json

INLINE_BYTES = 16 * 1024
LAYER_VERSION = 1
FILE_MTIME_NS = 1_577_836_800 * 10**9
"""Time stamp (2020-01-01) of files given at creation, so that equal files give equal layers."""


class EntryType(StrEnum):
    """What a path is. Whiteouts occur in layers, never in trees."""

    FILE = "file"
    DIR = "dir"
    LINK = "link"
    FIFO = "fifo"
    SOCKET = "socket"
    WHITEOUT = "whiteout"


@dataclass(frozen=True, slots=True)
class Entry:
    """One path of a layer or a tree; "" is the workspace folder itself."""

    path: str
    """Relative, "/" between parts; bytes that are not UTF-8 as surrogate escapes."""
    type: EntryType
    mode: int = 0
    """Permission bits; 0 for links and whiteouts."""
    mtime_ns: int = 0
    size: int = 0
    target: str = ""
    """Of a link."""
    digest: Digest = ""
    """Of a file's content."""
    is_opaque: bool = False
    """A folder that hides what lower layers hold at its path."""

    @property
    def is_inline(self) -> bool:
        """Whether its content travels inside the layer blob."""
        return self.type is EntryType.FILE and self.size <= INLINE_BYTES


Tree = Mapping[str, Entry]
"""The merged view of a stack of layers, by path."""
ROOT = Entry("", EntryType.DIR, 0o755, FILE_MTIME_NS)
EMPTY_TREE: Tree = {"": ROOT}


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Changes on top of lower layers. Build it with `Layer.of`, read it with `load`."""

    id: Digest
    entries: tuple[Entry, ...]
    """Sorted; the parent folder of each entry is an entry too."""
    inline: Mapping[Digest, bytes]
    """Contents of at most `INLINE_BYTES`."""

    @classmethod
    def of(cls, entries: Iterable[Entry], inline: Mapping[Digest, bytes]) -> Layer:
        """The layer of these entries, in any order, and the small contents they name."""
        ordered = tuple(sorted(entries, key=sort_key))
        named = {e.digest: inline[e.digest] for e in ordered if e.is_inline}
        return cls(digest_bytes(pack(ordered, named)), ordered, named)

    def large_files(self) -> list[Entry]:
        """Files whose contents are blobs of their own; a store must keep these with the layer."""
        return [e for e in self.entries if e.type is EntryType.FILE and not e.is_inline]


def wire_path(path: str) -> str:
    """The path's bytes as Latin-1 text: reversible for any name, sorted in byte order."""
    return os.fsencode(path).decode("latin-1")


def sort_key(entry: Entry) -> list[str]:
    """Sorts parents right before their children."""
    return wire_path(entry.path).split("/")


def parent_of(path: str) -> str:
    """The path of the folder that holds `path`."""
    return path.rpartition("/")[0]


def pack(entries: Iterable[Entry], inline: Mapping[Digest, bytes]) -> bytes:
    """The layer blob: uint32 manifest length, manifest, small contents in order of first use."""
    rows: list[JSON] = []
    bodies: dict[Digest, bytes] = {}
    for e in entries:
        target = wire_path(e.target)
        rows.append(
            [wire_path(e.path), e.type, e.mode, e.mtime_ns, e.size, target, e.digest, e.is_opaque]
        )
        if e.is_inline:
            bodies[e.digest] = inline[e.digest]
    head = canonical_json({"version": LAYER_VERSION, "entries": rows})
    return b"".join([struct.pack("<I", len(head)), head, *bodies.values()])


def unpack(blob: bytes, file: str) -> Layer:
    """The inverse of `pack`. Raises CorruptData naming `file` and the record that is wrong."""
    try:
        (size,) = struct.unpack_from("<I", blob)
        manifest = json.loads(blob[4 : 4 + size])
        if manifest["version"] != LAYER_VERSION:
            raise ValueError(f"version {manifest['version']}, this program reads {LAYER_VERSION}")
        entries = tuple(_entry(row) for row in manifest["entries"])
        _check_order(entries)
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise CorruptData(file, 4, "layer manifest", str(error)) from None
    inline: dict[Digest, bytes] = {}
    position = 4 + size
    for entry in entries:
        if entry.is_inline and entry.digest not in inline:
            inline[entry.digest] = blob[position : position + entry.size]
            if digest_bytes(inline[entry.digest]) != entry.digest:
                raise CorruptData(file, position, "layer content", f"wrong bytes of {entry.path}")
            position += entry.size
    return Layer(digest_bytes(blob), entries, inline)


def _entry(row: list[JSON]) -> Entry:
    path, kind, mode, mtime_ns, size, target, digest, is_opaque = row
    numbers = (mode, mtime_ns, size)
    if not all(isinstance(number, int) for number in numbers) or not 0 <= mode <= 0o7777:
        raise ValueError(f"{path!r}: mode, time or size is not a number in range")
    if size < 0 or (kind == EntryType.FILE) != bool(re.fullmatch("[0-9a-f]{64}", digest)):
        raise ValueError(f"{path!r}: size or digest does not fit a {kind}")
    name = os.fsdecode(path.encode("latin-1"))
    if name and split_path(name) != name.split("/"):
        raise ValueError(f"{path!r}: not a plain relative path")
    link = os.fsdecode(target.encode("latin-1"))
    return Entry(name, EntryType(kind), mode, mtime_ns, size, link, digest, bool(is_opaque))


def _check_order(entries: tuple[Entry, ...]) -> None:
    if not entries or entries[0].path or entries[0].type is not EntryType.DIR:
        raise ValueError("the first record is not the workspace folder")
    folders = {""}
    for before, entry in pairwise(entries):
        if sort_key(before) >= sort_key(entry):
            raise ValueError(f"{entry.path!r}: records are not sorted")
        if parent_of(entry.path) not in folders:
            raise ValueError(f"{entry.path!r}: its folder has no record")
        if entry.type is EntryType.DIR:
            folders.add(entry.path)


def split_path(path: str) -> list[str]:
    """The parts of a relative path. Raises UserInputError on "..", NUL, "" or an absolute path."""
    if path.startswith("/") or "\0" in path:
        raise UserInputError(f"{path!r}: not a path inside the workspace")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or ".." in parts:
        raise UserInputError(f"{path!r}: not a path inside the workspace")
    return parts


def layer_of_files(files: Mapping[str, bytes]) -> tuple[Layer, Mapping[Digest, bytes]]:
    """A base layer of plain files and all their contents by digest. Equal files: equal layer."""
    entries: dict[str, Entry] = {"": ROOT}
    contents: dict[Digest, bytes] = {}
    for path, data in files.items():
        parts = split_path(path)
        for depth in range(1, len(parts)):
            folder = "/".join(parts[:depth])
            new = Entry(folder, EntryType.DIR, 0o755, FILE_MTIME_NS)
            if entries.setdefault(folder, new).type is not EntryType.DIR:
                raise UserInputError(f"{path!r}: {folder!r} is a file")
        name, digest = "/".join(parts), digest_bytes(data)
        if name in entries:
            raise UserInputError(f"{path!r}: given twice, or also a folder")
        mtime, size = FILE_MTIME_NS, len(data)
        entries[name] = Entry(name, EntryType.FILE, 0o644, mtime, size, digest=digest)
        contents[digest] = data
    return Layer.of(entries.values(), contents), contents


def merge(tree: Tree, layer: Layer) -> dict[str, Entry]:
    """`tree` after `layer`, as overlayfs would show it."""
    hidden = {
        entry.path
        for entry in layer.entries
        if entry.path in tree
        and (entry.type is not EntryType.DIR or entry.is_opaque)
        and (entry.type is EntryType.WHITEOUT or tree[entry.path].type is EntryType.DIR)
    }
    merged = {path: e for path, e in tree.items() if not (hidden and _is_under(path, hidden))}
    for e in layer.entries:
        if e.type is EntryType.WHITEOUT:
            continue
        plain = Entry(e.path, e.type, e.mode, e.mtime_ns, e.size, e.target, e.digest)
        merged[e.path] = plain if e.is_opaque else e
    return merged


def _is_under(path: str, roots: set[str]) -> bool:
    while path:
        if path in roots:
            return True
        path = parent_of(path)
    return "" in roots


def difference(old: Tree, new: Tree) -> list[Entry]:
    """The entries of a layer that turns `old` into `new`; empty when they are equal."""
    changed = {path for path, entry in new.items() if old.get(path) != entry}
    for path in old:
        above = new.get(parent_of(path))
        if path not in new and above is not None and above.type is EntryType.DIR:
            changed.add(path)
    entries: dict[str, Entry] = {}
    for path in changed:
        entries[path] = new[path] if path in new else Entry(path, EntryType.WHITEOUT)
        while path:
            path = parent_of(path)
            entries[path] = new[path]
    return list(entries.values())


def tree_digest(tree: Tree) -> Digest:
    """Digest of path, type, mode, bytes and link target; no times, owners or layer order."""
    rows = sorted(
        [wire_path(e.path), e.type, e.mode, e.digest, wire_path(e.target)] for e in tree.values()
    )
    return digest_json(rows)


def persist(blobs: BlobStore, layer: Layer, read: Callable[[Entry], bytes]) -> int:
    """Make a layer durable; `read` gives the bytes of a large file. Returns the bytes put.

    The layer blob goes last: where it exists, everything it names exists.
    """
    num_bytes = 0
    for entry in layer.large_files():
        if not blobs.has(entry.digest):
            blobs.put(read(entry))
        num_bytes += entry.size
    blob = pack(layer.entries, layer.inline)
    blobs.put(blob)
    return num_bytes + len(blob)


def load(blobs: BlobStore, layer_id: Digest) -> Layer:
    """Read a layer's manifest and small contents. Raises CorruptData or StoreError."""
    return unpack(blobs.get(layer_id), str(blobs.path(layer_id)))
