"""What every backend on this machine shares: ids, locks, files, snapshots, restores and forks.

A sandbox is a workspace and a spec; one command runs in it at a time, and everything that touches
the workspace takes the sandbox's lock. Blocking file work runs in threads and is waited for even
when the caller is cancelled, so that a lock never opens on half-done work.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path

from k3rl.blobs import BlobStore
from k3rl.errors import CapabilityMissing, CorruptData, SandboxError, SandboxLost, UserInputError
from k3rl.sandboxes import transfer
from k3rl.sandboxes.base import (
    TREE_BYTES,
    ExecEvent,
    ExecExit,
    ExecRequest,
    SandboxId,
    SandboxStats,
    Seal,
)
from k3rl.sandboxes.blocking import in_thread, in_workspace, unbroken
from k3rl.sandboxes.box import Box, rest
from k3rl.sandboxes.disk import DiskWatch
from k3rl.sandboxes.files.layers import Entry, Layer, layer_of_files, load
from k3rl.sandboxes.files.merged import tree_digest
from k3rl.sandboxes.files.seals import Change, Sealed
from k3rl.sandboxes.files.workspace import Content, Stack, Workspace
from k3rl.sandboxes.processes.launch import Child, finish, pump
from k3rl.sandboxes.scratch import Scratch, reap
from k3rl.sandboxes.snapshots import Job, Seals, Standing
from k3rl.sandboxes.spec import MIB, Capability, SandboxSpec, check_environment
from k3rl.types import Digest, JsonObject, ProcessState, Snapshot

PREPARE = ("true",)
PREPARE_DEADLINE_S = 60.0
KEPT_LAYERS = 256
"""Decoded layers kept in memory."""


class LocalBackend(ABC):
    """A SandboxBackend less how a command is started and what can be enforced."""

    name: str
    is_live = True
    """Whether something of a sandbox runs between its commands."""

    def __init__(self, blobs: BlobStore, scratch: Scratch) -> None:
        """Owns `scratch` from now on."""
        self.blobs, self.scratch = blobs, scratch
        self._boxes: dict[SandboxId, Box] = {}
        self._layers: dict[Digest, Layer] = {}
        self._seals = Seals(blobs)
        self._capabilities: frozenset[Capability] | None = None
        self._programs: set[str] = set()
        """Those that were found on the sandboxes' PATH."""
        self._probing = asyncio.Lock()
        self._disk = DiskWatch(scratch.owner)
        self._is_closed = False

    @abstractmethod
    def _workspace(self, folder: Path, stack: Stack, content: Content) -> Workspace: ...

    @abstractmethod
    async def _start(self, box: Box, request: ExecRequest) -> Child: ...

    @abstractmethod
    async def _probe(self) -> frozenset[Capability]: ...

    @abstractmethod
    def _finds(self, executable: str) -> bool: ...

    async def capabilities(self) -> frozenset[Capability]:
        """What probes found, once per backend object."""
        async with self._probing:
            if self._capabilities is None:
                self._capabilities = await self._probe()
        return self._capabilities

    async def create(
        self, spec: SandboxSpec, files: Mapping[str, bytes] | None = None
    ) -> SandboxId:
        """A fresh sandbox; equal `files` share one extracted layer."""
        await self._check(spec)
        return (await self.open_box(spec, files or {})).id

    async def connect(self) -> None:  # noqa: B027 (most have nothing to reach)
        """Reach whatever runs the sandboxes; only Docker needs to. Raises CapabilityMissing."""

    async def open_box(self, spec: SandboxSpec, files: Mapping[str, bytes]) -> Box:
        """`create` without its checks: what the checks themselves run in."""
        await self.connect()
        (box,) = await self._made(lambda: [self._open(spec, files)])
        return box

    async def _made(self, make: Callable[[], list[Box]]) -> list[Box]:
        """What `make` makes in a thread; of a caller that is cancelled nothing stays."""
        made: list[Box] = []
        try:
            await in_thread(lambda: made.extend(make()))
        except asyncio.CancelledError:
            await unbroken(self._close_boxes(made))
            raise
        return made

    async def _close_boxes(self, boxes: Iterable[Box]) -> None:
        await asyncio.gather(*(self.close(box.id) for box in boxes))

    async def exec(
        self, sandbox_id: SandboxId, request: ExecRequest
    ) -> AsyncGenerator[ExecEvent, None]:
        """Run one command; a second one waits for the first to end."""
        _check_request(request)
        box = self._box(sandbox_id)
        async with box.lock:
            self._alive(box)
            if box.is_paused:
                raise SandboxError(f"sandbox {sandbox_id} is paused; resume it first")
            box.child = await self._start(box, request)
            box.num_execs += 1
            start = time.monotonic()
            if box.is_closed:
                box.child.kill()
            try:
                output = pump(box.child, request.deadline_s, request.channel_bytes)
                async with aclosing(self._disk.watched(box, output)) as events:
                    async for event in events:
                        if isinstance(event, ExecExit):
                            last = event
                        else:
                            yield event
            except SandboxError:
                self._alive(box)
                raise
            finally:
                box.child = None
                box.exec_s += time.monotonic() - start
            self._alive(box)
        yield last

    async def prepare(self, sandbox_id: SandboxId) -> None:
        """Have a live sandbox started, and its first command, which counts for nothing, done."""
        box = self._box(sandbox_id)
        async with box.lock:
            self._alive(box)
            if self.is_live and not box.is_paused and (box.live is None or box.live.is_over):
                child = await self._start(box, ExecRequest(PREPARE))
                await finish(child, PREPARE_DEADLINE_S)

    async def put(self, sandbox_id: SandboxId, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a regular file; the mode's permission bits are kept."""
        box = self._box(sandbox_id)
        async with box.lock:
            self._alive(box)
            await transfer.put(box, self._start, path, data, mode)

    async def get(self, sandbox_id: SandboxId, path: str, max_bytes: int = 16 * MIB) -> bytes:
        """Read a regular file. Raises UserInputError when there is none of at most `max_bytes`."""
        box = self._box(sandbox_id)
        async with box.lock:
            return await in_thread(in_workspace, path, self._alive(box).read, path, max_bytes)

    async def put_tree(
        self,
        sandbox_id: SandboxId,
        path: str,
        chunks: AsyncIterator[bytes],
        max_bytes: int = TREE_BYTES,
    ) -> None:
        """The archive is collected on disk first; a live sandbox that would not see it ends."""
        box = self._box(sandbox_id)
        async with transfer.collected(chunks, self.scratch.owner, max_bytes) as archive, box.lock:
            self._alive(box)
            await transfer.put_tree(box, path, archive)

    async def get_tree(
        self, sandbox_id: SandboxId, path: str, max_bytes: int = TREE_BYTES
    ) -> AsyncGenerator[bytes, None]:
        """The archive of one moment; the sandbox is free again before the first bytes come."""
        box = self._box(sandbox_id)
        async with transfer.spool(self.scratch.owner) as archive:
            async with box.lock:
                self._alive(box)
                await transfer.get_tree(box, path, archive, max_bytes)
            async for chunk in transfer.chunks_of(archive):
                yield chunk

    async def pause(self, sandbox_id: SandboxId) -> None:
        """Wait for a running command to end, end what ran it, and refuse further ones."""
        box = self._box(sandbox_id)
        async with box.lock:
            box.is_paused = True
            await in_thread(rest, box)

    async def resume(self, sandbox_id: SandboxId) -> None:
        """Undo `pause`."""
        self._box(sandbox_id).is_paused = False

    @property
    def process_state(self) -> ProcessState:
        """What snapshots say of processes: nothing outlives a command, where that is enforced."""
        ends_all = Capability.KILLS_DESCENDANTS in (self._capabilities or ())
        return ProcessState.NONE if ends_all else ProcessState.LOST

    async def seal(self, sandbox_id: SandboxId, session: JsonObject) -> Seal:
        """Freezes by reading a small change, or by moving or copying a large one."""
        box = self._box(sandbox_id)
        async with box.lock:
            workspace = self._alive(box)
            sealed = workspace.sealed
            if not workspace.is_untouched():
                sealed = await in_thread(workspace.seal, partial(rest, box))
            return self._start_job(box, sealed, session)

    def _start_job(self, box: Box, sealed: Sealed, session: JsonObject | None) -> Seal:
        box.job, seal = self._seals.begin(box.id, box.job, sealed, session, self.process_state)
        return seal

    async def settle(self, sandbox_id: SandboxId, seal: Seal) -> Snapshot:
        """Also of a sandbox that was closed meanwhile."""
        return await self._seals.settle(sandbox_id, seal)

    async def snapshot(self, sandbox_id: SandboxId, session: JsonObject) -> Snapshot:
        """Durable when it returns. Nothing changed since the last one: the same snapshot."""
        return await self.settle(sandbox_id, await self.seal(sandbox_id, session))

    async def restore(self, spec: SandboxSpec, snapshot: Snapshot) -> SandboxId:
        """A new sandbox, checked to have the snapshot's tree digest."""
        await self._check(spec)
        (box,) = await self._made(lambda: [self._restore(spec, snapshot)])
        return box.id

    async def fork(self, sandbox_id: SandboxId, n: int) -> list[SandboxId]:
        """`n` sandboxes that share this one's layers; what is new becomes a layer behind that."""
        box = self._box(sandbox_id)
        async with box.lock:
            self._alive(box)
            twins = await self._made(lambda: self._fork(box, n))
            self._start_job(box, box.workspace.sealed, None)
            for twin in twins:
                twin.job = box.job
            return [twin.id for twin in twins]

    async def tree_digest(self, sandbox_id: SandboxId) -> Digest:
        """Digest of the present tree."""
        box = self._box(sandbox_id)
        async with box.lock:
            return await in_thread(lambda: tree_digest(self._alive(box).tree()))

    async def stats(self, sandbox_id: SandboxId) -> SandboxStats:
        """Counters; `workspace_bytes` is the sum of file sizes."""
        box = self._box(sandbox_id)
        async with box.lock:
            tree = await in_thread(self._alive(box).tree)
        size = sum(entry.size for entry in tree.values())
        age_s, seals = time.monotonic() - box.created, self._seals.states(box.id)
        return SandboxStats(box.num_execs, box.exec_s, age_s, size, box.is_paused, seals)

    async def close(self, sandbox_id: SandboxId) -> None:
        """Kill what runs, then delete the workspace; its seals go on to be durable.

        A caller, however often cancelled, waits for it to end.
        """
        box = self._boxes.pop(sandbox_id, None)
        if box is None:
            return
        box.is_closed = True
        if box.child is not None:
            box.child.kill()
        await unbroken(self._tear_down(box))

    async def _tear_down(self, box: Box) -> None:
        async with box.lock:
            await in_thread(rest, box)
            await in_thread(box.workspace.remove)

    async def reap(self) -> list[str]:
        """Remove the folders, control groups and processes of dead owners of this scratch."""
        return await in_thread(reap, self.scratch.root, self.scratch.identity)

    async def aclose(self) -> None:
        """Close every sandbox and delete the owner's folder; the backend is not usable again."""
        self._is_closed = True
        await self._close_boxes(list(self._boxes.values()))
        await self._seals.aclose()
        await in_thread(self.scratch.remove)

    async def _check(self, spec: SandboxSpec) -> None:
        check_environment(spec.environment)
        wanted = {*spec.required, *([Capability.IMAGES] if spec.image is not None else [])}
        missing = sorted(wanted - await self.capabilities())
        if missing:
            raise CapabilityMissing(f"backend {self.name} cannot enforce {', '.join(missing)} here")
        absent = await self._absent(spec)
        if absent:
            names = ", ".join(absent)
            raise CapabilityMissing(f"not on the PATH of backend {self.name}'s sandboxes: {names}")

    async def _absent(self, spec: SandboxSpec) -> list[str]:
        """Which of the spec's programs its sandboxes would not find."""
        unknown = set(spec.executables) - self._programs
        self._programs |= {program for program in unknown if self._finds(program)}
        return [program for program in spec.executables if program not in self._programs]

    def _box(self, sandbox_id: SandboxId) -> Box:
        box = self._boxes.get(sandbox_id)
        if box is None:
            raise SandboxLost(f"sandbox {sandbox_id} is gone")
        return box

    def _alive(self, box: Box) -> Workspace:
        if box.is_closed:
            raise SandboxLost(f"sandbox {box.id} is gone")
        return box.workspace

    def _add(self, spec: SandboxSpec, make: Callable[[Path], Workspace], standing: Standing) -> Box:
        if self._is_closed:
            raise SandboxError(f"backend {self.name} is closed")
        number = secrets.token_hex(8)
        try:
            workspace = make(self.scratch.owner / number)
        except OSError as error:
            raise SandboxError(f"{self.scratch.owner}: cannot make a workspace: {error}") from error
        job = Job(workspace.sealed, standing)
        box = Box(f"{self.name}-{number}", spec, workspace, job, weight=workspace.weigh())
        self._boxes[box.id] = box
        return box

    def _open(self, spec: SandboxSpec, files: Mapping[str, bytes]) -> Box:
        stack, owed = Stack(), tuple[Sealed, ...]()
        contents: Mapping[Digest, bytes] = {}
        if files:
            layer, contents = layer_of_files(files)
            stack = stack.push(layer)

        def content(entry: Entry) -> list[bytes]:
            return [contents[entry.digest]]

        if files:
            first = Change(stack.tree, layer, content)
            owed = (Sealed(lambda: first),)
        return self._add(
            spec, lambda folder: self._workspace(folder, stack, content), Standing(owed=owed)
        )

    def _restore(self, spec: SandboxSpec, snapshot: Snapshot) -> Box:
        stack = Stack()
        for layer_id in snapshot.layers:
            stack = stack.push(self._load(layer_id))
        if tree_digest(stack.tree) != snapshot.tree_digest:
            detail = "its layers do not add up to its tree"
            name = f"snapshot {snapshot.snapshot_id}"
            raise CorruptData(name, 0, "tree_digest", detail)
        small = {digest: data for layer in stack.layers for digest, data in layer.inline.items()}

        def content(entry: Entry) -> Iterable[bytes]:
            return [small[entry.digest]] if entry.is_inline else self.blobs.blocks(entry.digest)

        standing = Standing(snapshot.layers, last=snapshot)
        return self._add(spec, lambda folder: self._workspace(folder, stack, content), standing)

    def _load(self, layer_id: Digest) -> Layer:
        layer = self._layers.get(layer_id)
        if layer is None:
            layer = load(self.blobs, layer_id)
            while len(self._layers) >= KEPT_LAYERS:
                self._layers.pop(next(iter(self._layers)), None)
            self._layers[layer_id] = layer
        return layer

    def _fork(self, box: Box, n: int) -> list[Box]:
        box.workspace.seal(partial(rest, box), is_shared=True)
        return [self._add(box.spec, box.workspace.copy, box.job.standing) for _ in range(n)]


def _check_request(request: ExecRequest) -> None:
    if not request.argv or not request.argv[0] or any("\0" in word for word in request.argv):
        raise UserInputError("an exec needs a program, and no word may hold a NUL byte")
    if request.channel_bytes < 0:
        raise UserInputError(f"channel_bytes: {request.channel_bytes} is negative")
    check_environment(request.environment)
