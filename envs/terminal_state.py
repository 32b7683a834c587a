"""Whether a workspace is in the state that a job asks for, seen from outside the sandbox.

The workspace comes as one archive, is bounded, and is read here: nothing of the policy's runs, and
a link is a link, wherever it points. A workspace that cannot be read so is the policy's doing and
is wrong. Only a `Script` is run, in a fork, on inputs that were never in the sandbox.
"""

from __future__ import annotations

import io
import json
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from k3rl.errors import UncapturableTree, UserInputError
from k3rl.sandboxes.base import ExecRequest, Sandbox, run
from k3rl.types import JsonObject

TREE_BYTES = 4 << 20
"""Of the archive; a job's workspace has some kilobytes."""
PACKED_BYTES = 1 << 20
PROBE_S = 5.0


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link."""

    target: str


@dataclass(frozen=True, slots=True)
class Packed:
    """A gzipped tar archive of exactly these regular files."""

    members: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Json:
    """A file that holds this JSON object, in any layout."""

    value: JsonObject


@dataclass(frozen=True, slots=True)
class Script:
    """A regular file of any content: the probes judge it."""


Entry = bytes | Link | Packed | Json | Script


@dataclass(frozen=True, slots=True)
class Probe:
    """A run of the policy's program."""

    argv: tuple[str, ...]
    stdin: bytes
    stdout: bytes
    """Exactly what it must print, with exit status 0."""


@dataclass(frozen=True, slots=True)
class Found:
    """A file or link of a workspace."""

    content: bytes | Link
    mode: int


async def read_tree(sandbox: Sandbox) -> dict[str, Found] | None:
    """All files and links by path; None when the workspace is more than could be right."""
    archive = bytearray()
    try:
        async for chunk in sandbox.backend.get_tree(sandbox.id, ".", TREE_BYTES):
            archive += chunk
        return _unpack(bytes(archive))
    except (UserInputError, UncapturableTree):
        return None


def _unpack(archive: bytes) -> dict[str, Found]:
    found: dict[str, Found] = {}
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as members:
        for member in members:
            if member.isdir():
                continue
            path = member.name.removeprefix("./")
            if member.issym():
                found[path] = Found(Link(member.linkname), member.mode)
            else:
                file = members.extractfile(member)
                found[path] = Found(file.read() if file else b"", member.mode)
    return found


def is_as_expected(
    found: Mapping[str, Found], expected: Mapping[str, Entry], modes: Mapping[str, int]
) -> bool:
    """Whether there is exactly what is expected, with the permission bits that matter."""
    if set(found) != set(expected):
        return False
    if any(found[path].mode & 0o7777 != mode for path, mode in modes.items()):
        return False
    return all(_matches(found[path].content, entry) for path, entry in expected.items())


def _matches(content: bytes | Link, entry: Entry) -> bool:
    if isinstance(entry, bytes | Link):
        return content == entry
    if isinstance(content, Link):
        return False
    if isinstance(entry, Packed):
        return _read_packed(content) == entry.members
    if isinstance(entry, Json):
        return _read_json(content) == entry.value
    return True


def _read_json(content: bytes) -> object:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _read_packed(content: bytes) -> dict[str, bytes] | None:
    """The files of a gzipped tar archive; None for what is no such archive or is too large."""
    inflate = zlib.decompressobj(wbits=31)
    try:
        plain = inflate.decompress(content, PACKED_BYTES)
        if not inflate.eof or inflate.unused_data:
            return None
        with tarfile.open(fileobj=io.BytesIO(plain), mode="r:") as archive:
            members = archive.getmembers()
            if not all(member.isreg() for member in members):
                return None
            files = [(m.name.removeprefix("./"), archive.extractfile(m)) for m in members]
            packed = {name: file.read() for name, file in files if file}
    except (zlib.error, tarfile.TarError, ValueError, OSError, RecursionError):
        return None
    return packed if len(packed) == len(members) else None


async def passes(sandbox: Sandbox, probes: Iterable[Probe]) -> bool:
    """Whether the program prints what each probe asks. The sandbox is a fork to be thrown away."""
    for probe in probes:
        request = ExecRequest(probe.argv, probe.stdin, PROBE_S)
        result = await run(sandbox.backend, sandbox.id, request)
        if result.exit_code != 0 or result.stdout != probe.stdout:
            return False
    return True
