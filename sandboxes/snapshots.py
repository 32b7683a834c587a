"""Seals on their way to the blob store: hashed, made durable and named, behind what goes on.

    workspace.seal -> Sealed -> Job: hash --> persist --> (flatten) --> Snapshot

The jobs of a sandbox run one after the other, in threads, each on the standing that the one before
has left. One that fails leaves the standing as it was; what it could not make durable is work of
the next. So a snapshot's layers are always durable, whole and in order.
"""

from __future__ import annotations

import asyncio
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import reduce

from k3rl.blobs import BlobStore
from k3rl.errors import SandboxError, SandboxLost
from k3rl.sandboxes.base import Durability, SandboxId, Seal
from k3rl.sandboxes.files.layers import Layer, load, persist
from k3rl.sandboxes.files.merged import EMPTY_TREE, difference, merge, tree_digest
from k3rl.sandboxes.files.seals import Sealed
from k3rl.types import Digest, JsonObject, ProcessState, Snapshot, digest_json

MAX_LAYERS = 32
"""A stack that would have more is written as two."""
NUM_THREADS = 4
KEPT_SEALS = 4096
"""Seals that can be settled, or settled once more; beyond them the oldest are forgotten."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What of a sandbox is durable."""

    layers: tuple[Digest, ...] = ()
    """Bottom first."""
    owed: tuple[Sealed, ...] = ()
    """States, oldest first, whose layers come on top of these and are not durable yet."""
    fresh: tuple[Digest, ...] = ()
    """Layers made since `last`."""
    last: Snapshot | None = None


@dataclass(slots=True, eq=False)
class Ticket:
    """What the holder of a seal may ask about."""

    sandbox_id: SandboxId
    durability: Durability = Durability.SEALED
    snapshot: Snapshot | None = None
    error: Exception | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    is_settled: bool = False


@dataclass(slots=True, eq=False)
class Job:
    """The way of one state of a sandbox, from sealed to durable."""

    sealed: Sealed
    standing: Standing
    """What the job found, and in the end what it leaves."""
    session: JsonObject | None = None
    """None: no snapshot is wanted."""
    process_state: ProcessState = ProcessState.NONE
    ticket: Ticket | None = None
    """None: it has ended long ago."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing happens any more."""
        return self.ticket is None or self.ticket.ended.is_set()


class Seals:
    """The jobs of one backend."""

    def __init__(self, blobs: BlobStore) -> None:
        """Puts into `blobs`."""
        self.blobs = blobs
        self._tickets: dict[str, Ticket] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pool = ThreadPoolExecutor(NUM_THREADS, "seals")

    def begin(
        self,
        sandbox_id: SandboxId,
        before: Job,
        sealed: Sealed,
        session: JsonObject | None,
        process_state: ProcessState,
    ) -> tuple[Job, Seal]:
        """Start a job behind the sandbox's last one; it has ended at once if nothing is to do."""
        ticket = Ticket(sandbox_id)
        job = Job(sealed, before.standing, session, process_state, ticket)
        if before.has_ended and before.sealed is sealed and not before.standing.owed:
            _name(job, 0)
            ticket.ended.set()
        else:
            task = asyncio.create_task(self._run(job, before, _line(before.sealed, sealed)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        seal = Seal(f"seal-{secrets.token_hex(8)}", ticket.durability)
        if session is not None:
            self._tickets[seal.id] = ticket
            self._forget()
        return job, seal

    async def settle(self, sandbox_id: SandboxId, seal: Seal) -> Snapshot:
        """Wait for the end of a seal's job. Raises what the job raised, SandboxLost."""
        ticket = self._tickets.get(seal.id)
        if ticket is None or ticket.sandbox_id != sandbox_id:
            raise SandboxLost(f"sandbox {sandbox_id} has no seal {seal.id}, or no longer")
        await ticket.ended.wait()
        ticket.is_settled = True
        if ticket.error is not None:
            raise ticket.error
        if ticket.snapshot is None:
            raise SandboxLost(f"sandbox {sandbox_id}: the work on seal {seal.id} was called off")
        return ticket.snapshot

    def states(self, sandbox_id: SandboxId) -> dict[str, Durability]:
        """How far the seals of a sandbox have come that nobody has settled."""
        found = {id: each for id, each in self._tickets.items() if each.sandbox_id == sandbox_id}
        return {id: each.durability for id, each in found.items() if not each.is_settled}

    async def aclose(self) -> None:
        """Wait for all jobs; the seals can still be settled."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._pool.shutdown(wait=False)

    def _forget(self) -> None:
        surplus = len(self._tickets) - KEPT_SEALS
        if surplus > 0:
            ended = [id for id, each in self._tickets.items() if each.ended.is_set()]
            for id in ended[:surplus]:
                del self._tickets[id]

    async def _run(self, job: Job, before: Job, line: tuple[Sealed, ...]) -> None:
        ticket = job.ticket
        assert ticket is not None
        try:
            if before.ticket is not None:
                await before.ticket.ended.wait()
            found = before.standing
            job.standing = replace(found, owed=(*found.owed, *line))
            await asyncio.get_running_loop().run_in_executor(self._pool, self._work, job)
        except OSError as error:
            ticket.error = SandboxError(f"sandbox files: {error}")
        except Exception as error:
            # Raised by whoever settles the seal.
            ticket.error = error
        finally:
            ticket.ended.set()

    def _work(self, job: Job) -> None:
        ticket, standing = job.ticket, job.standing
        assert ticket is not None
        ids = [state.layer_id for state in standing.owed]
        ticket.durability = Durability.HASHED
        num_bytes = sum(state.persist(self.blobs) for state in standing.owed)
        added = tuple(layer for layer in ids if layer is not None)
        layers = (*standing.layers, *added)
        if len(layers) > MAX_LAYERS:
            layers, more_bytes = flatten(self.blobs, layers)
            num_bytes += more_bytes
        job.standing = Standing(layers, (), (*standing.fresh, *added), standing.last)
        _name(job, num_bytes)


def _line(old: Sealed, new: Sealed) -> tuple[Sealed, ...]:
    """The states behind `old` up to `new`, oldest first; cuts them off from what lies before."""
    line: list[Sealed] = []
    state: Sealed | None = new
    while state is not None and state is not old:
        line.insert(0, state)
        state.before, state = None, state.before
    return tuple(line)


def flatten(blobs: BlobStore, layers: tuple[Digest, ...]) -> tuple[tuple[Digest, ...], int]:
    """Make durable, as one layer on the bottom one, what these durable layers add up to.

    The bottom one is what all trajectories of a task share, and may be large. Returns the new
    layers and the bytes put.
    """
    loaded = [load(blobs, layer) for layer in layers]
    tree = reduce(merge, loaded, EMPTY_TREE)
    entries = difference(merge(EMPTY_TREE, loaded[0]), tree)
    if not entries:
        return layers[:1], 0
    inline = {digest: data for layer in loaded for digest, data in layer.inline.items()}
    flat = Layer.of(entries, inline)
    num_bytes = persist(blobs, flat, lambda entry: blobs.blocks(entry.digest))
    return (layers[0], flat.id), num_bytes


def _name(job: Job, num_bytes: int) -> None:
    """Make the snapshot of a durable state; the last one again when nothing is new."""
    standing, session = job.standing, job.session
    assert job.ticket is not None
    job.ticket.durability = Durability.DURABLE
    if session is None:
        return
    last = standing.last
    is_same_tree = last is not None and not standing.fresh
    if last is not None and is_same_tree and session == last.session:
        job.ticket.snapshot = last
        return
    parent = last.snapshot_id if last else None
    job.ticket.snapshot = Snapshot(
        snapshot_id=digest_json([parent, standing.fresh, session]),
        parent=parent,
        layers=standing.layers,
        session=session,
        tree_digest=tree_digest(job.sealed.tree),
        num_bytes=num_bytes,
        process_state=job.process_state,
    )
    job.standing = replace(standing, fresh=(), last=job.ticket.snapshot)
