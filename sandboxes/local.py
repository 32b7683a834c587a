"""What every backend on this machine shares: ids, locks, files, snapshots, restores and forks.

A sandbox is a workspace and a spec; one command runs in it at a time, and everything that touches
the workspace takes the sandbox's lock. Blocking file work runs in threads and is waited for even
when the caller is cancelled, so that a lock never opens on half-done work.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar

from k3rl.blobs import BlobStore
from k3rl.errors import CapabilityMissing, CorruptData, SandboxError, SandboxLost, UserInputError
from k3rl.sandboxes.base import (
    MIB,
    Capability,
    ExecEvent,
    ExecExit,
    ExecRequest,
    SandboxId,
    SandboxSpec,
    SandboxStats,
)
from k3rl.sandboxes.launch import Child, pump
from k3rl.sandboxes.layers import Entry, Layer, layer_of_files, load, persist, tree_digest
from k3rl.sandboxes.scratch import Scratch
from k3rl.sandboxes.workspace import Content, Stack, Workspace
from k3rl.types import Digest, JsonObject, Snapshot, digest_json

P = ParamSpec("P")
R = TypeVar("R")
PATH_ERRORS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP)
KEPT_LAYERS = 256
"""Decoded layers kept in memory."""


@dataclass(slots=True, eq=False)
class Box:
    """One sandbox, on the inside of a backend."""

    id: SandboxId
    spec: SandboxSpec
    workspace: Workspace
    num_durable: int = 0
    """Layers of the stack, from the bottom, that are in the blob store."""
    fresh: tuple[Digest, ...] = ()
    """Layers put on the stack since `last`."""
    last: Snapshot | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    child: Child | None = None
    is_paused: bool = False
    is_closed: bool = False
    created: float = field(default_factory=time.monotonic)
    num_execs: int = 0
    exec_s: float = 0.0


async def in_thread(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run blocking work in a thread; a cancelled caller still waits for it to end.

    Raises SandboxError for what the operating system refuses.
    """
    task = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except OSError as error:
        raise SandboxError(f"sandbox files: {error}") from error
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()
        raise


class LocalBackend(ABC):
    """A SandboxBackend less how a command is started and what can be enforced."""

    name: str

    def __init__(self, blobs: BlobStore, scratch: Scratch) -> None:
        """Owns `scratch` from now on."""
        self.blobs, self.scratch = blobs, scratch
        self._boxes: dict[SandboxId, Box] = {}
        self._layers: dict[Digest, Layer] = {}
        self._capabilities: frozenset[Capability] | None = None
        self._programs: set[str] = set()
        """Those that were found on the sandboxes' PATH."""
        self._probing = asyncio.Lock()
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

    async def open_box(self, spec: SandboxSpec, files: Mapping[str, bytes]) -> Box:
        """`create` without its checks: what the checks themselves run in."""
        return await in_thread(self._open, spec, files)

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
                async with aclosing(pump(box.child, request.deadline_s)) as events:
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

    async def put(self, sandbox_id: SandboxId, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a regular file; the mode's permission bits are kept."""
        box = self._box(sandbox_id)
        async with box.lock:
            await in_thread(_in_workspace, path, self._alive(box).write, path, data, mode)

    async def get(self, sandbox_id: SandboxId, path: str, max_bytes: int = 16 * MIB) -> bytes:
        """Read a regular file. Raises UserInputError when there is none of at most `max_bytes`."""
        box = self._box(sandbox_id)
        async with box.lock:
            return await in_thread(_in_workspace, path, self._alive(box).read, path, max_bytes)

    async def pause(self, sandbox_id: SandboxId) -> None:
        """Wait for a running command to end, then refuse further ones."""
        box = self._box(sandbox_id)
        async with box.lock:
            box.is_paused = True

    async def resume(self, sandbox_id: SandboxId) -> None:
        """Undo `pause`."""
        self._box(sandbox_id).is_paused = False

    async def snapshot(self, sandbox_id: SandboxId, session: JsonObject) -> Snapshot:
        """Durable when it returns. Nothing changed since the last one: the same snapshot."""
        box = self._box(sandbox_id)
        async with box.lock:
            workspace = self._alive(box)
            if box.num_durable == len(workspace.stack.layers) and workspace.is_untouched():
                return _note(box, session, 0)
            return await in_thread(self._snapshot, box, session)

    async def restore(self, spec: SandboxSpec, snapshot: Snapshot) -> SandboxId:
        """A new sandbox, checked to have the snapshot's tree digest."""
        await self._check(spec)
        return (await in_thread(self._restore, spec, snapshot)).id

    async def fork(self, sandbox_id: SandboxId, n: int) -> list[SandboxId]:
        """`n` sandboxes that share this one's layers; what is unsaved becomes a layer first."""
        box = self._box(sandbox_id)
        async with box.lock:
            self._alive(box)
            return [twin.id for twin in await in_thread(self._fork, box, n)]

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
        age_s = time.monotonic() - box.created
        return SandboxStats(box.num_execs, box.exec_s, age_s, size, box.is_paused)

    async def close(self, sandbox_id: SandboxId) -> None:
        """Kill what runs, then delete the workspace."""
        box = self._boxes.pop(sandbox_id, None)
        if box is None:
            return
        box.is_closed = True
        if box.child is not None:
            box.child.kill()
        async with box.lock:
            await in_thread(box.workspace.remove)

    async def aclose(self) -> None:
        """Close every sandbox and delete the owner's folder; the backend is not usable again."""
        self._is_closed = True
        await asyncio.gather(*(self.close(id) for id in list(self._boxes)))
        await in_thread(self.scratch.remove)

    async def _check(self, spec: SandboxSpec) -> None:
        missing = sorted(set(spec.required) - await self.capabilities())
        if missing:
            raise CapabilityMissing(f"backend {self.name} cannot enforce {', '.join(missing)} here")
        unknown = set(spec.executables) - self._programs
        self._programs |= {program for program in unknown if self._finds(program)}
        absent = [program for program in spec.executables if program not in self._programs]
        if absent:
            names = ", ".join(absent)
            raise CapabilityMissing(f"not on the PATH of backend {self.name}'s sandboxes: {names}")

    def _box(self, sandbox_id: SandboxId) -> Box:
        box = self._boxes.get(sandbox_id)
        if box is None:
            raise SandboxLost(f"sandbox {sandbox_id} is gone")
        return box

    def _alive(self, box: Box) -> Workspace:
        if box.is_closed:
            raise SandboxLost(f"sandbox {box.id} is gone")
        return box.workspace

    def _add(self, spec: SandboxSpec, make: Callable[[Path], Workspace]) -> Box:
        if self._is_closed:
            raise SandboxError(f"backend {self.name} is closed")
        number = secrets.token_hex(8)
        try:
            workspace = make(self.scratch.owner / number)
        except OSError as error:
            raise SandboxError(f"{self.scratch.owner}: cannot make a workspace: {error}") from error
        box = Box(f"{self.name}-{number}", spec, workspace)
        self._boxes[box.id] = box
        return box

    def _open(self, spec: SandboxSpec, files: Mapping[str, bytes]) -> Box:
        stack = Stack()
        contents: Mapping[Digest, bytes] = {}
        if files:
            layer, contents = layer_of_files(files)
            stack = stack.push(layer)

        def make(folder: Path) -> Workspace:
            return self._workspace(folder, stack, lambda entry: contents[entry.digest])

        box = self._add(spec, make)
        box.fresh = tuple(layer.id for layer in stack.layers)
        return box

    def _settle(self, box: Box) -> int:
        """Make every layer of the stack and what changed durable; returns the bytes added."""
        workspace = box.workspace
        change = workspace.change()
        pending = list(workspace.stack.layers[box.num_durable :])
        pending += [change] if change else []
        num_bytes = sum(persist(self.blobs, layer, workspace.read_large) for layer in pending)
        if change:
            workspace.seal(change)
            box.fresh += (change.id,)
        box.num_durable = len(workspace.stack.layers)
        return num_bytes

    def _snapshot(self, box: Box, session: JsonObject) -> Snapshot:
        return _note(box, session, self._settle(box))

    def _restore(self, spec: SandboxSpec, snapshot: Snapshot) -> Box:
        stack = Stack()
        for layer_id in snapshot.layers:
            stack = stack.push(self._load(layer_id))
        if tree_digest(stack.tree) != snapshot.tree_digest:
            detail = "its layers do not add up to its tree"
            name = f"snapshot {snapshot.snapshot_id}"
            raise CorruptData(name, 0, "tree_digest", detail)
        small = {digest: data for layer in stack.layers for digest, data in layer.inline.items()}

        def content(entry: Entry) -> bytes:
            return small[entry.digest] if entry.is_inline else self.blobs.get(entry.digest)

        box = self._add(spec, lambda folder: self._workspace(folder, stack, content))
        box.num_durable, box.last = len(stack.layers), snapshot
        return box

    def _load(self, layer_id: Digest) -> Layer:
        layer = self._layers.get(layer_id)
        if layer is None:
            layer = load(self.blobs, layer_id)
            while len(self._layers) >= KEPT_LAYERS:
                self._layers.pop(next(iter(self._layers)), None)
            self._layers[layer_id] = layer
        return layer

    def _fork(self, box: Box, n: int) -> list[Box]:
        self._settle(box)
        twins = []
        for _ in range(n):
            twin = self._add(box.spec, box.workspace.copy)
            twin.num_durable, twin.fresh, twin.last = box.num_durable, box.fresh, box.last
            twins.append(twin)
        return twins


def _note(box: Box, session: JsonObject, num_bytes: int) -> Snapshot:
    """The snapshot of a box whose whole tree is durable; the last one when nothing is new."""
    last, stack = box.last, box.workspace.stack
    is_same_tree = last is not None and not box.fresh
    if last is not None and is_same_tree and session == last.session:
        return last
    parent = last.snapshot_id if last else None
    box.last = Snapshot(
        snapshot_id=digest_json([parent, box.fresh, session]),
        parent=parent,
        layers=tuple(layer.id for layer in stack.layers),
        session=session,
        tree_digest=last.tree_digest if last and is_same_tree else tree_digest(stack.tree),
        num_bytes=num_bytes,
    )
    box.fresh = ()
    return box.last


def _in_workspace(path: str, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Tell failures that the path's owner caused from those of the machine."""
    try:
        return work(*args, **kwargs)
    except OSError as error:
        if error.errno in PATH_ERRORS:
            raise UserInputError(f"{path!r}: {error.strerror}") from None
        raise SandboxError(f"{path!r}: {error}") from error


def _check_request(request: ExecRequest) -> None:
    words = [*request.argv, *request.environment, *request.environment.values()]
    if not request.argv or not request.argv[0] or any("\0" in word for word in words):
        raise UserInputError("an exec needs a program, and no word may hold a NUL byte")
    if any("=" in name or not name for name in request.environment):
        raise UserInputError("names of environment variables are not empty and hold no '='")
