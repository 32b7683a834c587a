"""Layers: canonical manifests of what changed in a workspace.

A layer is one blob: a JSON manifest with one record per path, sorted by path components, and the
contents of small files behind it. Its id is the digest of that blob, so equal changes have equal
ids, whatever backend they were made in and whoever ran it. Deletions (whiteouts) and replaced
folders (opaque) are records of their own, which is why a folder that was deleted and made again
never shows its old files. Files above `INLINE_BYTES` are blobs of their own, named by the manifest;
writing a layer of small files costs one blob.

Owners are recorded as the code that made the files would see them: `OWN_ID` for itself. One file
under several names (hard links) is a group; each member is a whole record of its own, and a layer
that holds one member holds all.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import pairwise

from k3rl.blobs import BlobStore
from k3rl.errors import CorruptData, UserInputError
from k3rl.types import JSON, Digest, canonical_json, digest_bytes

INLINE_BYTES = 16 * 1024
LAYER_VERSION = 2
FILE_MTIME_NS = 1_577_836_800 * 10**9
"""Time stamp (2020-01-01) of files given at creation, so that equal files give equal layers."""
OWN_ID = 0
"""The uid and gid, in a record, of the code in the sandbox; its number there and here is no part
of the record. Other numbers stand for themselves: only unconfined code of root can make them."""
XATTR_PREFIX, OVERLAY_PREFIX = "user.", "user.overlay."
"""The attributes that code may set, and those among them that belong to overlayfs."""

DIGEST = re.compile("[0-9a-f]{64}")

Attributes = tuple[tuple[str, bytes], ...]


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
    uid: int = OWN_ID
    gid: int = OWN_ID
    group: str = ""
    """Of a file under several names: the first of these paths; "" for one with one name."""
    xattrs: Attributes = ()
    """Extended attributes of files and folders, sorted by name."""

    @property
    def is_inline(self) -> bool:
        """Whether its content travels inside the layer blob."""
        return self.type is EntryType.FILE and self.size <= INLINE_BYTES


ROOT = Entry("", EntryType.DIR, 0o755, FILE_MTIME_NS)


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
    return path if path.isascii() else os.fsencode(path).decode("latin-1")


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
        target, group = wire_path(e.target), wire_path(e.group)
        xattrs: JSON = [[wire_path(name), value.decode("latin-1")] for name, value in e.xattrs]
        owner: list[JSON] = [e.uid, e.gid]
        rows.append([wire_path(e.path), e.type, e.mode, *owner, e.mtime_ns, e.size, target,
                     e.digest, group, xattrs, e.is_opaque])  # fmt: skip
        if e.is_inline:
            bodies[e.digest] = inline[e.digest]
    head = canonical_json({"version": LAYER_VERSION, "entries": rows})
    return b"".join([struct.pack("<I", len(head)), head, *bodies.values()])


def large_files(blob: bytes, file: str) -> list[Digest]:
    """The other blobs that a layer names. Raises CorruptData like `unpack`."""
    return [entry.digest for entry in unpack(blob, file).large_files()]


def unpack(blob: bytes, file: str) -> Layer:
    """The inverse of `pack`. Raises CorruptData naming `file` and the record that is wrong."""
    try:
        (size,) = struct.unpack_from("<I", blob)
        manifest = json.loads(blob[4 : 4 + size])
        if manifest["version"] != LAYER_VERSION:
            raise ValueError(f"version {manifest['version']}, this program reads {LAYER_VERSION}")
        entries = tuple(_entry(row) for row in manifest["entries"])
        _check_order(entries)
        _check_groups(entries)
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
    path, kind, mode, uid, gid, mtime_ns, size, target, digest, group, xattrs, is_opaque = row
    if not type(mode) is type(uid) is type(gid) is type(mtime_ns) is type(size) is int:
        raise ValueError(f"{path!r}: mode, owner, time or size is not a number")
    if not (0 <= mode <= 0o7777 and 0 <= uid < 2**32 and 0 <= gid < 2**32):
        raise ValueError(f"{path!r}: no such mode or owner: {mode}, {uid}, {gid}")
    if size < 0 or (kind == EntryType.FILE) != bool(DIGEST.fullmatch(digest)):
        raise ValueError(f"{path!r}: size or digest does not fit a {kind}")
    name = _path(path)
    if name and split_path(name) != name.split("/"):
        raise ValueError(f"{path!r}: not a plain relative path")
    attributes = _attributes(path, xattrs) if xattrs else ()
    return Entry(name, EntryType(kind), mode, mtime_ns, size, _path(target), digest,
                 bool(is_opaque), uid, gid, _path(group), attributes)  # fmt: skip


def _path(wire: str) -> str:
    return wire if wire.isascii() else os.fsdecode(wire.encode("latin-1"))


def _attributes(path: str, wire: list[tuple[str, str]]) -> Attributes:
    found = tuple((_path(name), value.encode("latin-1")) for name, value in wire)
    is_ours = all(is_own_xattr(name) and "\0" not in name for name, _ in found)
    if not is_ours or list(found) != sorted(dict(found).items()):
        raise ValueError(f"{path!r}: extended attributes of a kind or order that is not ours")
    return found


def is_own_xattr(name: str) -> bool:
    """Whether an extended attribute is the code's, and neither the system's nor overlayfs's."""
    return name.startswith(XATTR_PREFIX) and not name.startswith(OVERLAY_PREFIX)


def _check_order(entries: tuple[Entry, ...]) -> None:
    if not entries or entries[0].path or entries[0].type is not EntryType.DIR:
        raise ValueError("the first record is not the workspace folder")
    folders = {""}
    keys = pairwise(map(sort_key, entries))
    for entry, (before, after) in zip(entries[1:], keys, strict=True):
        if before >= after:
            raise ValueError(f"{entry.path!r}: records are not sorted")
        if parent_of(entry.path) not in folders:
            raise ValueError(f"{entry.path!r}: its folder has no record")
        if entry.type is EntryType.DIR:
            folders.add(entry.path)


def _check_groups(entries: tuple[Entry, ...]) -> None:
    members: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.group:
            members.setdefault(entry.group, []).append(entry)
    for group, found in members.items():
        first = found[0]
        is_alike = all(replace(entry, path=group) == first for entry in found)
        if not is_alike or len(found) < 2 or first.type in (EntryType.DIR, EntryType.WHITEOUT):
            raise ValueError(f"{group!r}: records of one file under several names differ")


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


def persist(blobs: BlobStore, layer: Layer, content: Callable[[Entry], Iterable[bytes]]) -> int:
    """Make a layer durable; `content` reads a large file in blocks. Returns the bytes put.

    The layer blob goes last: where it exists, everything it names exists.
    """
    large = {entry.digest: entry for entry in layer.large_files()}
    blobs.put_all({digest: partial(content, entry) for digest, entry in large.items()})
    blob = pack(layer.entries, layer.inline)
    blobs.put(blob)
    return sum(entry.size for entry in large.values()) + len(blob)


def load(blobs: BlobStore, layer_id: Digest) -> Layer:
    """Read a layer's manifest and small contents. Raises CorruptData or StoreError."""
    return unpack(blobs.get(layer_id), str(blobs.path(layer_id)))
