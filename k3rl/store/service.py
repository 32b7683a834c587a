"""The one service of a store root, as `k3rl.store.protocol.TrajectoryStore` describes it.

Invariants: nothing is acknowledged or visible before it is durable; requests for one trajectory
take effect one at a time, in the order in which they came; token arrays are never kept in memory.
The machinery is in `StoreCore`; here is what each request means.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from k3rl.errors import StoreError
from k3rl.store.checks import (
    check_commit,
    check_frame,
    check_header,
    check_sample,
    check_text,
    check_update,
    check_version,
)
from k3rl.store.core import StoreCore, T
from k3rl.store.events import Begun, BranchStart, Claimed, VersionRow
from k3rl.store.protocol import (
    Ack,
    Changes,
    Claim,
    Ref,
    SampleRequest,
    StepFrame,
    StoreStats,
    TokenRead,
    UpdateRow,
)
from k3rl.store.record import num_policy_tokens
from k3rl.store.tokens import check_fields
from k3rl.types import (
    Digest,
    Outcome,
    ParentRef,
    Snapshot,
    TokenFrame,
    Trajectory,
    TrajectoryHeader,
    TrajectoryId,
    TrajectoryState,
    encode,
)


class StoreService(StoreCore):
    """Use: `await open()`, any request of the protocol, `await aclose()`; one event loop."""

    # Work queue

    async def begin(self, headers: list[TrajectoryHeader]) -> None:
        """Create and queue; headers that exist already are left as they are."""
        self._check_open()

        def decide(header: TrajectoryHeader) -> tuple[Begun | None, None]:
            return self._live.begin(header), None

        for header in headers:
            check_header(header)
        if any(header.id not in self._live for header in headers):
            await self._gate.admit()
        writes = [self._write(h.id, partial(decide, h)) for h in headers]
        try:
            results = await asyncio.gather(*writes, return_exceptions=True)
            await self._mirror.push([header.id for header in headers])
        finally:
            self._work.wake()
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def branch(self, header: TrajectoryHeader) -> None:
        """Begin a child; its tokens and steps up to `header.parent` are its parent's."""
        self._check_open()
        parent = header.parent
        if parent is None:
            raise StoreError(f"trajectory {header.id}: a branch needs a parent")
        check_header(header)
        known = self._live.known(header.id)
        if known is None:
            await self._gate.admit()
        with self._upkeep.about_to_branch(parent.id):
            start = (known and known.start) or await self._branch_start(parent)
            await self._write(header.id, lambda: (self._live.begin(header, start), None))
        await self._mirror.push([header.id])
        self._work.wake()

    async def requeue_paused(self) -> int:
        """Put paused trajectories that are not queued yet at the front, in the order of begin."""
        self._check_open()
        paused = [r.id for r in self._live.records.values() if r.state is TrajectoryState.PAUSED]
        moved = await self._move(paused, self._live.requeue)
        await self._mirror.requeue(moved)
        self._work.wake()
        return len(moved)

    async def claim(
        self, worker_id: str, capacity: int, holding: list[TrajectoryId], wait_s: float
    ) -> list[Claim]:
        """See the protocol. What `holding` names that is finished comes back with its outcome.

        Being in this call keeps the worker's lease. A claim handed out again has a new epoch.
        """
        self._check_open()
        check_text("worker", worker_id)
        end = time.monotonic() + wait_s
        self._waiting[worker_id] += 1
        try:
            await self._mirror.renew(worker_id, self._lease_ttl_s)
            ended = [id for id in holding if self._is_finished(id)]
            claims = [await self._off_loop(self._finished, id) for id in ended]
            lost = [id for id in self._live.held_by(worker_id) if id not in set(holding)]
            while self._is_open:
                work = self._work.arm()
                # A caller that goes away must not leave ids popped but unclaimed.
                taking = self._spawn(self._take(worker_id, capacity, lost))
                claims += await asyncio.shield(taking)
                lost, left = [], end - time.monotonic()
                if claims or left <= 0 or capacity <= 0:
                    break
                await work(left)
            return claims
        finally:
            self._seen[worker_id] = time.monotonic()
            self._waiting[worker_id] -= 1

    # Writes

    async def append(self, frame: TokenFrame) -> Ack:
        """Make policy tokens durable."""
        check_frame(frame)
        return await self._write(frame.id, lambda: self._live.append(frame))

    async def commit_step(self, id: TrajectoryId, epoch: int, frame: StepFrame) -> list[Ack]:
        """Commit a step with its environment tokens and its snapshot, whose layers are durable."""
        self._check_open()
        check_commit(frame, self._blobs)
        return await self._write(id, lambda: self._live.commit(id, epoch, frame))

    async def pause(self, id: TrajectoryId, epoch: int) -> None:
        """Give a claim back."""
        await self._write(id, lambda: (self._live.pause(id, epoch), None))
        await self._mirror.release([id])

    async def finish(self, id: TrajectoryId, epoch: int, outcome: Outcome) -> None:
        """End a trajectory."""
        await self._write(id, lambda: (self._live.finish(id, epoch, outcome), None))
        await self._mirror.release([id])

    async def record_update(self, row: UpdateRow) -> None:
        """Append to the `updates` table; the newest row of an update sent again is a no-op."""
        self._check_open()
        check_update(row)
        last = next((r for r in reversed(self._state.updates) if r.update == row.update), None)
        if last is None or encode(last) != encode(row):
            await self._record(row)

    async def next_version(self, parent: int, checksum: Digest, blob: Digest | None) -> int:
        """The next policy version. Every call takes a number, also one whose answer gets lost."""
        self._check_open()
        check_version(parent, self._state.last_version, checksum, blob)
        row = VersionRow(self._state.last_version + 1, parent, checksum, blob)
        self._state.last_version = row.policy_version
        await self._record(row)
        return row.policy_version

    async def pin(self, name: str = "") -> int:
        """Seal what is finished; `sample` draws from that until the next pin."""
        self._check_open()
        check_text("pin", name)
        await self._seal(name)
        seq = self._state.manifest.pinned_seq
        assert seq is not None
        return seq

    async def unpin(self, name: str) -> None:
        """Let go of what a name holds; one that holds nothing is let go already."""
        self._check_open()
        await self._upkeep.unpin(name)

    # Reads

    async def changes(self, cursor: int, wait_s: float) -> Changes:
        """Trajectories whose last change is after `cursor`, with the state they are in now."""
        end = time.monotonic() + wait_s
        while True:
            self._check_open()
            changed = self._changed.arm()
            found = self._live.changes_after(cursor)
            left = end - time.monotonic()
            if found or left <= 0:
                items = tuple((id, self._live.state_of(id)) for _, id in found)
                return Changes(found[-1][0] if found else cursor, items)
            await changed(left)

    async def trajectories(self, state: TrajectoryState | None = None) -> list[Trajectory]:
        """In the order they were begun."""
        self._check_open()
        return await self._still(lambda: self._live.listing(state))

    async def get(self, id: TrajectoryId) -> Trajectory:
        """By id or unambiguous prefix."""
        self._check_open()
        return await self._off_loop(self._live.trajectory, self._live.find(id))

    async def snapshot(self, snapshot_id: str) -> Snapshot:
        """A committed snapshot's record."""
        self._check_open()
        found = await asyncio.to_thread(self._live.snapshot, snapshot_id)
        if found is None:
            raise StoreError(f"snapshot {snapshot_id} is unknown")
        return found

    async def read(self, ref: Ref, fields: tuple[str, ...] = ()) -> TokenRead:
        """Committed tokens; the ref that comes back has its end filled in."""
        (found,) = await self.read_many([ref], fields)
        return found

    async def read_many(self, refs: list[Ref], fields: tuple[str, ...] = ()) -> list[TokenRead]:
        """What `read` gives for each; each row group of a file is decoded once."""
        self._check_open()
        names = check_fields(fields)
        whole = [self._live.whole(ref) for ref in refs]
        tokens = await self._load_many(lambda: list(map(self._live.ref_pieces, whole)), names)
        return [TokenRead(ref, *found) for ref, found in zip(whole, tokens, strict=True)]

    async def sample(self, request: SampleRequest) -> list[Ref]:
        """Draw as of a manifest record: the newest pinned one, which the first draw may make."""
        self._check_open()
        check_sample(request)
        manifest, seq = self._state.manifest, request.manifest_seq
        if seq is None and manifest.pinned_seq is None:
            await self.pin()
        seq = manifest.pinned_seq if seq is None else seq
        assert seq is not None
        return self._sampler.draw(request, seq)

    async def updates(self) -> list[UpdateRow]:
        """Recorded ones, durable before they are seen."""
        self._check_open()
        return list(self._state.updates)

    async def stats(self) -> StoreStats:
        """Counters of this service's life and of the files as they are."""
        states, num_tokens = self._live.totals()
        paths = [self.root / "journal" / name for name in self._state.usage]
        return StoreStats(
            num_trajectories={str(state): count for state, count in states.items()},
            num_tokens=num_tokens,
            num_frames=self._journal.num_frames,
            journal_bytes=await asyncio.to_thread(_num_bytes, paths),
            sealed_bytes=sum(file.num_bytes for file in self._state.manifest.files.values()),
            num_index_rebuilds=self._mirror.num_rebuilds,
            manifest_seq=self._state.manifest.head.seq,
            free_bytes=self._gate.free_bytes,
            num_refused=self._gate.num_refused,
            num_rewritten=self._upkeep.num_rewritten,
            num_deleted_bytes=self._upkeep.num_deleted_bytes,
            recovery=dict(self._state.recovery),
        )

    # Parts of requests

    async def _take(self, worker_id: str, capacity: int, lost: list[TrajectoryId]) -> list[Claim]:
        ids = lost[:capacity]
        room = capacity - len(ids) if self._gate.is_open else 0
        ids += await self._mirror.pop(worker_id, room)
        claims = await asyncio.gather(*(self._hand_out(id, worker_id) for id in ids))
        return [claim for claim in claims if claim is not None]

    async def _hand_out(self, id: TrajectoryId, worker_id: str) -> Claim | None:
        """Claim one popped or lost id; None when memory says it is not to be had."""

        def decide() -> tuple[Claimed | None, tuple[Claimed | None, TrajectoryState]]:
            event = self._live.claim(id, worker_id)
            return event, (event, self._live.state_of(id))

        try:
            event, was = await self._write(id, decide)
        finally:
            self._mirror.claiming.pop(id, None)
        if event is None:
            return None
        record = self._live.record(id)
        return Claim(
            header=record.header,
            epoch=event.epoch,
            state=was,
            steps=self._live.steps(id),
            snapshot=self._live.snapshot_of(id),
            tokens=await self._context_frame(id, event.epoch),
            acks=tuple(record.acks()),
            num_sampled=record.num_policy_tokens + record.num_policy_tokens_pending,
        )

    async def _branch_start(self, parent: ParentRef) -> BranchStart:
        start = self._live.branch_start(parent)
        ranges = [(c, 0, self._live.end(parent.id, c)) for c in range(start.context)]
        ranges += [(start.context, 0, start.committed)]
        counts = [await self._num_policy(parent.id, *where) for where in ranges]
        pending = (start.context, start.committed, start.token_offset)
        return replace(
            start,
            num_policy_tokens=sum(counts),
            num_policy_tokens_pending=await self._num_policy(parent.id, *pending),
        )

    async def _off_loop(self, look_up: Callable[[TrajectoryId], T], id: TrajectoryId) -> T:
        """Of a sealed trajectory in a thread: it may read files."""
        if id in self._live.records:
            return look_up(id)
        return await asyncio.to_thread(look_up, id)

    def _is_finished(self, id: TrajectoryId) -> bool:
        return id in self._live and self._live.state_of(id) is TrajectoryState.FINISHED

    def _finished(self, id: TrajectoryId) -> Claim:
        """What a worker is told of a trajectory that it holds although it is finished."""
        record = self._live.record(id)
        return Claim(
            header=record.header,
            epoch=record.epoch,
            state=record.state,
            steps=self._live.steps(id),
            snapshot=self._live.snapshot_of(id),
            tokens=None,
            acks=tuple(record.acks()),
            outcome=record.outcome,
        )

    async def _num_policy(self, id: TrajectoryId, context: int, start: int, end: int) -> int:
        if start == end:
            return 0
        (tokens,) = await self._load_many(lambda: [self._live.pieces(id, context, start, end)])
        return num_policy_tokens(TokenFrame(id, 0, start, *tokens, context=context))


def _num_bytes(paths: list[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.exists())
