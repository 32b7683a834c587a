"""The Sandbox contract: a place to run code, addressed by id, with plain data in and out.

Every method takes and returns plain carriers, so that one host process can serve a backend to
others. What a command does (exit status, timeout, too much output) is a result; only a failure of
the infrastructure raises `SandboxError`. Layers of snapshots live in `k3rl.blobs`.

Times are seconds, sizes bytes. Paths inside a sandbox are POSIX paths relative to the workspace
unless they start with "/".
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

from k3rl.types import Digest, JsonObject, Snapshot, digest_json, to_plain

SandboxId = str
MIB = 1 << 20


class Capability(StrEnum):
    """What a backend may enforce; probed on the machine it runs on, never assumed."""

    ISOLATED_FILES = "isolated_files"
    """The host's files outside read-only system folders cannot be seen."""
    NO_NETWORK = "no_network"
    PROCESS_LIMIT = "process_limit"
    FILE_SIZE_LIMIT = "file_size_limit"
    MEMORY_LIMIT = "memory_limit"
    CPU_TIME_LIMIT = "cpu_time_limit"
    KILLS_DESCENDANTS = "kills_descendants"
    """After an exec ends or times out, none of its processes is left."""
    SNAPSHOT = "snapshot"
    FORK = "fork"


ENFORCED_BY_DEFAULT = (
    Capability.ISOLATED_FILES,
    Capability.NO_NETWORK,
    Capability.PROCESS_LIMIT,
    Capability.FILE_SIZE_LIMIT,
    Capability.KILLS_DESCENDANTS,
    Capability.SNAPSHOT,
)


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Resource limits of one exec."""

    max_processes: int = 64
    max_open_files: int = 256
    max_file_bytes: int = 64 * MIB
    address_space_bytes: int = 2048 * MIB
    """Per process."""
    cpu_s: int = 60
    """Per process."""
    tmp_bytes: int = 64 * MIB
    """Size of the private /tmp."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox must be. `required` that a backend lacks is refused by name."""

    limits: SandboxLimits = field(default_factory=SandboxLimits)
    environment: dict[str, str] = field(default_factory=dict)
    """The whole environment beside PATH, HOME, TMPDIR and LANG; nothing is inherited."""
    executables: tuple[str, ...] = ("sh",)
    """Programs that must be found on the sandbox's PATH at creation."""
    required: tuple[Capability, ...] = ENFORCED_BY_DEFAULT

    @property
    def digest(self) -> Digest:
        """Content hash of the spec."""
        return digest_json(to_plain(self))


class Stream(StrEnum):
    """Which output a chunk belongs to."""

    STDOUT = "stdout"
    STDERR = "stderr"


@dataclass(frozen=True, slots=True)
class ExecRequest:
    """One command."""

    argv: tuple[str, ...]
    stdin: bytes = b""
    deadline_s: float = 10.0
    """After it the command and all its descendants are killed; the result says timed_out."""
    max_output_bytes: int = 64 * 1024
    """Per stream; beyond it the head and the tail are kept and the dropped count is told."""
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """Output as it comes. `offset` counts bytes of its stream from 0."""

    stream: Stream
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class ExecExit:
    """The last event of an exec."""

    exit_code: int | None
    """None when `timed_out`; 128 + n after signal n."""
    timed_out: bool
    wall_s: float


ExecEvent = OutputChunk | ExecExit


@dataclass(frozen=True, slots=True)
class ExecResult:
    """A collected exec: head and tail of each stream within `max_output_bytes`."""

    exit_code: int | None
    timed_out: bool
    stdout: bytes
    stderr: bytes
    dropped_bytes: int
    """Bytes left out of the middle of both streams together."""
    wall_s: float


@dataclass(frozen=True, slots=True)
class SandboxStats:
    """Counters of one sandbox."""

    num_execs: int
    exec_s: float
    age_s: float
    workspace_bytes: int
    is_paused: bool


@runtime_checkable
class SandboxBackend(Protocol):
    """Makes and runs sandboxes. All methods raise SandboxLost for an id that is gone."""

    name: str

    async def capabilities(self) -> frozenset[Capability]:
        """What this backend enforces on this machine, found by probing once."""
        ...

    async def create(
        self, spec: SandboxSpec, files: Mapping[str, bytes] | None = None
    ) -> SandboxId:
        """A fresh sandbox whose workspace holds `files` (path to content).

        Raises CapabilityMissing naming what `spec.required` or `spec.executables` lacks.
        """
        ...

    def exec(self, sandbox_id: SandboxId, request: ExecRequest) -> AsyncIterator[ExecEvent]:
        """Run one command, yielding its output as it comes and one ExecExit at the end."""
        ...

    async def put(self, sandbox_id: SandboxId, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a regular file inside the workspace, making its folders."""
        ...

    async def get(self, sandbox_id: SandboxId, path: str, max_bytes: int = 16 * MIB) -> bytes:
        """Read a regular file inside the workspace; links, devices and FIFOs are refused."""
        ...

    async def pause(self, sandbox_id: SandboxId) -> None:
        """Stop its processes and refuse exec until `resume`."""
        ...

    async def resume(self, sandbox_id: SandboxId) -> None:
        """Undo `pause`."""
        ...

    async def snapshot(self, sandbox_id: SandboxId, session: JsonObject) -> Snapshot:
        """Make the workspace durable as a snapshot; unchanged trees add no layer."""
        ...

    async def restore(self, spec: SandboxSpec, snapshot: Snapshot) -> SandboxId:
        """A new sandbox with exactly the snapshot's tree. Raises CorruptData on bad layers."""
        ...

    async def fork(self, sandbox_id: SandboxId, n: int) -> list[SandboxId]:
        """`n` new sandboxes that start from this one's present tree and then diverge."""
        ...

    async def tree_digest(self, sandbox_id: SandboxId) -> Digest:
        """Digest of the present workspace content."""
        ...

    async def stats(self, sandbox_id: SandboxId) -> SandboxStats:
        """Counters so far."""
        ...

    async def close(self, sandbox_id: SandboxId) -> None:
        """Kill what runs and free its files. Closing twice is fine."""
        ...

    async def aclose(self) -> None:
        """Close every sandbox of this backend."""
        ...


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A backend and one id: what an environment is handed."""

    backend: SandboxBackend
    id: SandboxId

    async def run(self, *argv: str, stdin: bytes = b"", deadline_s: float = 10.0) -> ExecResult:
        """Run a command to its end and collect its output."""
        return await run(self.backend, self.id, ExecRequest(argv, stdin, deadline_s))

    async def put(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a file."""
        await self.backend.put(self.id, path, data, mode)

    async def get(self, path: str) -> bytes:
        """Read a file."""
        return await self.backend.get(self.id, path)


class _Kept:
    """The head and the tail of one stream within a limit."""

    def __init__(self, limit: int) -> None:
        self.head, self.tail, self.dropped = bytearray(), bytearray(), 0
        self.half = max(limit // 2, 1)

    def add(self, data: bytes) -> None:
        room = self.half - len(self.head)
        self.head += data[: max(room, 0)]
        self.tail += data[max(room, 0) :]
        surplus = len(self.tail) - self.half
        if surplus > 0:
            del self.tail[:surplus]
            self.dropped += surplus

    def text(self) -> bytes:
        note = f"\n[... {self.dropped} bytes dropped ...]\n".encode() if self.dropped else b""
        return bytes(self.head) + note + bytes(self.tail)


async def run(backend: SandboxBackend, sandbox_id: SandboxId, request: ExecRequest) -> ExecResult:
    """Collect an exec's events into one result, bounded in memory."""
    kept = {stream: _Kept(request.max_output_bytes) for stream in Stream}
    async for event in backend.exec(sandbox_id, request):
        if isinstance(event, OutputChunk):
            kept[event.stream].add(event.data)
        else:
            out, err = kept[Stream.STDOUT], kept[Stream.STDERR]
            dropped = out.dropped + err.dropped
            texts = (out.text(), err.text())
            return ExecResult(event.exit_code, event.timed_out, *texts, dropped, event.wall_s)
    raise AssertionError("an exec stream ends with ExecExit")
