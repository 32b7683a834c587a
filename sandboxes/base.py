"""The Sandbox contract: a place to run code, addressed by id, with plain data in and out.

Every method takes and returns plain carriers, so that one host process can serve a backend to
others. What a command does (exit status, timeout, too much output) is a result; only a failure of
the infrastructure raises `SandboxError`. Layers of snapshots live in `k3rl.blobs`.

Times are seconds, sizes bytes. Paths inside a sandbox are POSIX paths relative to the workspace
unless they start with "/".
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

from k3rl.errors import SandboxError
from k3rl.sandboxes.spec import MIB, Capability, SandboxSpec
from k3rl.types import Digest, JsonObject, Snapshot

SandboxId = str
TREE_BYTES = 1024 * MIB
"""Of a folder as an archive."""
EXEC_GRACE_S = 60.0
"""How long after a command's deadline its backend may take to end it, or to start it at all."""


class Stream(StrEnum):
    """Which output a chunk belongs to."""

    STDOUT = "stdout"
    STDERR = "stderr"
    CHANNEL = "channel"
    """Descriptor 3 of a command, for what is not its output; see `ExecRequest.channel_bytes`."""


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
    channel_bytes: int = 0
    """What the command may write to its descriptor 3; more is read and dropped. 0: it has none."""


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
    """Bytes left out of the middle of stdout and stderr together."""
    wall_s: float
    channel: bytes = b""
    """What came on descriptor 3, at most `channel_bytes`."""


@dataclass(frozen=True, slots=True)
class SandboxStats:
    """Counters of one sandbox."""

    num_execs: int
    exec_s: float
    age_s: float
    workspace_bytes: int
    is_paused: bool
    seals: dict[str, Durability] = field(default_factory=dict)
    """Of seals that nobody has settled yet, by id."""


class Durability(StrEnum):
    """How far a seal has come."""

    SEALED = "sealed"
    """Frozen: no later command can change what it holds."""
    HASHED = "hashed"
    """Every content has its digest, and the layer its id."""
    DURABLE = "durable"
    """All of it is in the blob store: its snapshot may be named."""


@dataclass(frozen=True, slots=True)
class Seal:
    """A frozen state of a sandbox, to be settled."""

    id: str
    durability: Durability
    """When it was given out; `stats` tells the present one."""


@runtime_checkable
class SandboxBackend(Protocol):
    """Makes and runs sandboxes. All methods raise SandboxLost for an id that is gone.

    A sandbox does one thing at a time: each call waits for those before it to end. A backend may
    be elsewhere (`RemoteBackend`): when it dies, all of its sandboxes are lost.
    """

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

    async def prepare(self, sandbox_id: SandboxId) -> None:
        """Start what will run the commands, so that the first one need not wait for that."""
        ...

    def exec(self, sandbox_id: SandboxId, request: ExecRequest) -> AsyncIterator[ExecEvent]:
        """Run one command, yielding its output as it comes and one ExecExit at the end.

        Output is read only when the consumer asks for more, so a slow consumer slows the command,
        though not its deadline. A consumer that is cancelled or goes away kills the command.
        Nothing that a command starts outlives it where `kills_descendants` holds.
        """
        ...

    async def put(self, sandbox_id: SandboxId, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a regular file inside the workspace, making its folders."""
        ...

    async def get(self, sandbox_id: SandboxId, path: str, max_bytes: int = 16 * MIB) -> bytes:
        """Read a regular file inside the workspace; links, devices and FIFOs are refused."""
        ...

    async def put_tree(
        self,
        sandbox_id: SandboxId,
        path: str,
        chunks: AsyncIterator[bytes],
        max_bytes: int = TREE_BYTES,
    ) -> None:
        """Unpack a tar archive (pax or older, not compressed) into a folder of the workspace.

        `path`: the folder, "." for the workspace; it and what leads to it are made. Regular files,
        folders, links (kept as links, wherever they point) and hard links to files of the same
        archive are taken, with their permission bits and times, and replace what is of their own
        type; owners are dropped. The whole archive is looked through before anything is written:
        one of more than `max_bytes`, or with any member that is something else, leads out of the
        folder, passes through a link (the workspace's or its own), comes twice or is cut short,
        is a UserInputError that names the member. Only names that the file system takes for one
        another show later, as a UserInputError too. No archive is ever held in memory.
        """
        ...

    def get_tree(
        self, sandbox_id: SandboxId, path: str, max_bytes: int = TREE_BYTES
    ) -> AsyncIterator[bytes]:
        """A folder of the workspace ("." is all of it) as a pax archive, for `put_tree`.

        Equal trees give equal bytes: members are sorted, owners are 0 and times 2020-01-01. Hard
        links come as files of their own. Raises UserInputError, before the first bytes, when there
        is no folder, when it holds a FIFO or a socket or when the archive exceeds `max_bytes`;
        UncapturableTree for what no snapshot could hold either.
        """
        ...

    async def pause(self, sandbox_id: SandboxId) -> None:
        """Wait for a running command to end, then end its processes and refuse exec.

        Until `resume` it holds no process and no memory but the backend's record of it; its files
        can be read, written and made a snapshot of.
        """
        ...

    async def resume(self, sandbox_id: SandboxId) -> None:
        """Undo `pause`; the next exec starts what it needs."""
        ...

    async def seal(self, sandbox_id: SandboxId, session: JsonObject) -> Seal:
        """Freeze the workspace as it is and return; the work on its snapshot goes on behind.

        Commands may run in the meantime. Raises UncapturableTree, SandboxError: nothing is sealed.
        """
        ...

    async def settle(self, sandbox_id: SandboxId, seal: Seal) -> Snapshot:
        """Wait until a seal is durable. The snapshot of an unchanged tree adds no layer.

        The sandbox may be closed by then. Raises SandboxError or StoreError when it cannot be made
        durable; the next snapshot tries again to.
        """
        ...

    async def snapshot(self, sandbox_id: SandboxId, session: JsonObject) -> Snapshot:
        """`seal` and `settle`.

        `session` is kept with it as it is: what else a resumed session must know, such as the
        state of a `Shell`.
        """
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

    async def reap(self) -> list[str]:
        """Remove what crashed programs left on this machine; returns the names of its owners."""
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


async def run(
    backend: SandboxBackend,
    sandbox_id: SandboxId,
    request: ExecRequest,
    grace_s: float = EXEC_GRACE_S,
) -> ExecResult:
    """Collect an exec's events into one result, bounded in memory.

    Raises SandboxError when the backend has not ended it `grace_s` after its deadline: a command
    that hangs is the policy's, a backend that hangs is not.
    """
    limit = asyncio.timeout(request.deadline_s + grace_s)
    try:
        async with limit:
            return await _collect(backend, sandbox_id, request)
    except TimeoutError:
        if not limit.expired():
            raise
        late = f"{request.argv[0]} still runs {grace_s:g} s after its deadline"
        raise SandboxError(f"sandbox {sandbox_id}: {late}") from None


async def _collect(
    backend: SandboxBackend, sandbox_id: SandboxId, request: ExecRequest
) -> ExecResult:
    outputs = (Stream.STDOUT, Stream.STDERR)
    kept = {stream: _Kept(request.max_output_bytes) for stream in outputs}
    channel = bytearray()
    async for event in backend.exec(sandbox_id, request):
        if isinstance(event, ExecExit):
            out, err = (kept[stream] for stream in outputs)
            dropped = out.dropped + err.dropped
            told = (out.text(), err.text(), dropped, event.wall_s, bytes(channel))
            return ExecResult(event.exit_code, event.timed_out, *told)
        if event.stream is Stream.CHANNEL:
            channel += event.data
        else:
            kept[event.stream].add(event.data)
    raise AssertionError("an exec stream ends with ExecExit")
