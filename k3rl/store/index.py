"""The live index of one store: rows, work queue and leases in a Redis-protocol server.

The service's memory and files are the truth; everything here can be thrown away and rebuilt.
Invariants: an id is queued or leased, never both, so it is handed out once; and an index that
forgot anything is noticed by the very next write, because its owner numbers the writes.

    index = LiveIndex.from_url(url, prefix)
    await index.open()
    await index.rebuild(rows, queued, leases)      # before the first write
    try:
        ids = await index.pop(worker_id, 4)
    except IndexLost:                              # FLUSHALL, restart, rollback, a second owner
        await index.rebuild(rows, queued, leases)  # from the truth, then the same call again

The queue is a sorted set and not a stream: a stream has no front insertion, may go back in
its last-delivered id after a restart, and loses its groups with its keys (redis #7105, opik #5525).

Numbered writes: a generation is a random token and a count of writes, both kept by the owner.
Each write carries (token, n); `index.lua` applies it only on top of write n - 1 and remembers its
answer, which it gives again when the write is sent again. On anything else the index was emptied,
rolled back or rebuilt by somebody else: IndexLost. Epochs and versions never come from Redis.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from typing import Any, TypeVar, cast

from redis import exceptions

from k3rl.errors import StoreError, UserInputError
from k3rl.store.redis_url import SafeUrl
from k3rl.types import TrajectoryId, TrajectoryState

LEASE_TTL_S = 60.0
"""How long a worker that never renewed keeps what it popped."""
RETRY_S = 5.0
"""How long a call keeps trying to reach the server before its one StoreError."""
FIRST_DELAY_S = 0.02
LONGEST_DELAY_S = 0.5
REBUILD_ROWS_PER_S = 20_000
"""A rebuild's time limit grows by a second for so many rows; measured: about 200,000 a second."""
BATCH_ITEMS = 1000
MIN_MAJOR_VERSION = 7
"""Of Redis (Valkey names the one it equals): older ones do not know the first line of index.lua."""
KEY_NAMES = ("generation", "rows", "queue", "leases", "workers")
LOGIN_ERRORS = (exceptions.AuthenticationError, exceptions.AuthorizationError)
SORTED_SETS = ("queue", "workers")

T = TypeVar("T")


class IndexLost(StoreError):
    """The index does not hold what its owner wrote: call `rebuild`, then the same call again."""


@dataclass(frozen=True, slots=True)
class TrajectoryRow:
    """What the index knows of a trajectory. All numbers are the service's own."""

    id: TrajectoryId
    state: TrajectoryState
    epoch: int
    num_tokens: int = 0
    num_steps: int = 0


@dataclass(frozen=True, slots=True)
class Lease:
    """Who holds a trajectory."""

    worker_id: str
    epoch: int
    """The epoch of the trajectory's row; 0 when no row was put."""


@dataclass(slots=True)
class _Generation:
    token: str
    num_writes: int = 0


class LiveIndex:
    """One store's index; one owner (the service), used from one event loop.

    Any method raises one StoreError when the server cannot be reached within `retry_s`. Writes and
    `expired` raise IndexLost before the first `rebuild`, once the index was lost, and after a write
    that failed or was cancelled half-way. Writes of one owner go one at a time.
    """

    def __init__(self, url: str, prefix: str, lease_ttl_s: float, retry_s: float) -> None:
        """Use `from_url`."""
        self._url = SafeUrl(url)
        self._client = self._url.client()
        self._keys = {name: f"{{{prefix}}}:{name}" for name in KEY_NAMES}
        script = files(__package__).joinpath("index.lua").read_text()
        self._script = self._client.register_script(script)
        self._lease_ttl_s, self._retry_s = lease_ttl_s, retry_s
        self._generation: _Generation | None = None
        self._turn = asyncio.Lock()
        self._num_rebuilds = 0

    @classmethod
    def from_url(
        cls, url: str, prefix: str, lease_ttl_s: float = LEASE_TTL_S, retry_s: float = RETRY_S
    ) -> LiveIndex:
        """Connects to nothing yet. `url`: redis://, rediss:// or unix:///absolute/path.

        `prefix` names the store on a shared server. Raises UserInputError for another url.
        """
        return cls(url, prefix, lease_ttl_s, retry_s)

    async def open(self) -> None:
        """Reach the server; refuse one that is too old or may evict keys (StoreError).

        Does not make the index valid: `rebuild` does.
        """
        info = await self._call(self._client.info)
        version = str(info.get("redis_version", "0"))
        if int(version.split(".")[0]) < MIN_MAJOR_VERSION:
            raise StoreError(f"{self._url}: has version {version}; {MIN_MAJOR_VERSION} is needed")
        policy = str(info.get("maxmemory_policy", "noeviction"))
        if int(info.get("maxmemory", 0)) and policy.startswith("allkeys"):
            raise StoreError(
                f"{self._url}: evicts keys at its memory limit ({policy});"
                " set its maxmemory-policy to noeviction"
            )

    async def aclose(self) -> None:
        """Close the connections; keys stay."""
        self._generation = None
        await self._client.aclose()

    async def generation_ok(self) -> bool:
        """Whether the server holds exactly what this owner wrote since its last `rebuild`."""
        try:
            await self.expired()
        except IndexLost:
            return False
        return True

    async def rebuild(
        self,
        rows: Sequence[TrajectoryRow],
        queued: Sequence[TrajectoryId],
        leases: Mapping[TrajectoryId, Lease],
    ) -> None:
        """Replace all keys of the prefix in one transaction and begin a new generation.

        Call it with the truth as of the call (no await in between): answers of calls still under
        way become void (IndexLost). Lease holders get `lease_ttl_s` to renew. A lease needs a row
        of the same epoch, and an id must not be both queued and leased (UserInputError).
        """
        _check_truth(rows, queued, leases)
        self._generation = None
        self._num_rebuilds += 1
        ticket, generation = self._num_rebuilds, _Generation(secrets.token_hex(8))
        deadline = self._deadline(self._lease_ttl_s)
        tables: dict[str, dict[str, Any]] = {
            "rows": {row.id: _pack(row) for row in rows},
            "leases": {id: lease.worker_id for id, lease in leases.items()},
            "queue": {id: place for place, id in enumerate(dict.fromkeys(queued))},
            "workers": {lease.worker_id: deadline for lease in leases.values()},
            "generation": {"token": generation.token, "num_writes": 0, "answer": "[]"},
        }

        async def replace() -> None:
            async with self._client.pipeline(transaction=True) as pipe:
                pipe.delete(*self._keys.values())
                for name, table in tables.items():
                    for batch in _batches(table):
                        if name in SORTED_SETS:
                            pipe.zadd(self._keys[name], batch)
                        else:
                            pipe.hset(self._keys[name], mapping=batch)
                await pipe.execute()

        async with self._turn:
            await self._call(replace, self._retry_s + len(rows) / REBUILD_ROWS_PER_S)
            # A rebuild that waits behind this one carries newer truth; nothing may come between.
            if ticket == self._num_rebuilds:
                self._generation = generation

    async def put(self, rows: Sequence[TrajectoryRow]) -> None:
        """Insert or replace rows."""
        if rows:
            await self._write("put", *(part for row in rows for part in (row.id, _pack(row))))

    async def push(self, ids: Sequence[TrajectoryId], front: bool = False) -> None:
        """Queue `ids` in this order at the back, or before everything when `front`.

        An id that is already queued keeps its place; a lease on an id ends.
        """
        if ids:
            await self._write("push", "front" if front else "back", *ids)

    async def pop(self, worker_id: str, n: int) -> list[TrajectoryId]:
        """Take up to `n` ids from the front and lease them to the worker, at once.

        A worker without a deadline gets one `lease_ttl_s` ahead; one that it has stays.
        """
        if n <= 0:
            return []
        return await self._write("pop", worker_id, n, self._deadline(self._lease_ttl_s))

    async def release(self, ids: Sequence[TrajectoryId]) -> None:
        """End the leases of `ids` (finished or paused); ids without one are ignored."""
        if ids:
            await self._write("release", *ids)

    async def renew(self, worker_id: str, ttl_s: float) -> None:
        """The worker is alive: its deadline is `ttl_s` from now on the owner's monotonic clock."""
        await self._write("renew", worker_id, self._deadline(ttl_s))

    async def expired(self) -> list[str]:
        """Workers past their deadline, longest dead first, until renewed or taken over."""
        generation = self._current()

        async def read() -> list[list[str]]:
            async with self._client.pipeline(transaction=True) as pipe:
                pipe.hmget(self._keys["generation"], ["token", "num_writes"])
                pipe.zrangebyscore(self._keys["workers"], "-inf", self._deadline(0))
                return cast(list[list[str]], await pipe.execute())

        async with self._turn:
            self._current(generation)
            held, workers = await self._call(read)
            if held != [generation.token, str(generation.num_writes)]:
                self._lose(generation)
            self._current(generation)
        return workers

    async def take_over(self, worker_id: str) -> list[TrajectoryId]:
        """Drop the worker's leases and deadline; returns the ids, sorted."""
        return await self._write("take_over", worker_id)

    async def rows(self) -> list[TrajectoryRow]:
        """All rows by id; like `queued` and `leases` for inspection, also by who is not owner."""
        found: dict[str, str] = await self._read("hgetall", "rows")
        return [_unpack(id, packed) for id, packed in sorted(found.items())]

    async def queued(self) -> list[TrajectoryId]:
        """The queue, front first."""
        found: list[str] = await self._read("zrange", "queue", 0, -1)
        return found

    async def leases(self) -> dict[TrajectoryId, Lease]:
        """Who holds what, by id."""
        found: dict[str, str] = await self._read("hgetall", "leases")
        epochs = {row.id: row.epoch for row in await self.rows()}
        return {id: Lease(worker_id, epochs.get(id, 0)) for id, worker_id in found.items()}

    def _deadline(self, ttl_s: float) -> int:
        """Milliseconds of this process's monotonic clock: a clock jump ends no lease."""
        return int((time.monotonic() + ttl_s) * 1000)

    def _current(self, expected: _Generation | None = None) -> _Generation:
        generation = self._generation
        if generation is None or (expected is not None and generation is not expected):
            raise IndexLost(f"{self._url}: the live index was lost; rebuild it and call again")
        return generation

    def _lose(self, generation: _Generation) -> None:
        if self._generation is generation:
            self._generation = None

    async def _write(self, operation: str, *arguments: str | int) -> list[str]:
        """Apply the next numbered write; whatever leaves it in doubt makes the index lost."""
        generation = self._current()
        async with self._turn:
            self._current(generation)
            numbered = [generation.token, generation.num_writes + 1, operation, *arguments]
            keys = list(self._keys.values())
            try:
                answer = await self._call(lambda: self._script(keys=keys, args=numbered))
            except BaseException:
                self._lose(generation)
                raise
            if answer is None:
                self._lose(generation)
            self._current(generation)
            generation.num_writes += 1
            return cast(list[str], answer)

    async def _read(self, command: str, name: str, *arguments: Any) -> Any:
        method = getattr(self._client, command)
        return await self._call(lambda: method(self._keys[name], *arguments))

    async def _call(self, attempt: Callable[[], Awaitable[T]], limit_s: float | None = None) -> T:
        """Try until the server answers or the time is over; no redis exception gets out.

        One attempt gets at most half of the time, so that a connection that died silently leaves
        time for a new one. An event loop that stood still says nothing of the server: after that
        there is always time for another attempt.
        """
        limit_s = self._retry_s if limit_s is None else limit_s
        begun = time.monotonic()
        end, delay_s = begun + limit_s, FIRST_DELAY_S
        while True:
            allowed_s = min(limit_s / 2, max(end - begun, 0))
            try:
                async with asyncio.timeout(allowed_s):
                    return await attempt()
            except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as error:
                # redis-py wraps a refused login in a plain ConnectionError.
                if any(isinstance(e, LOGIN_ERRORS) for e in (error, error.__context__)):
                    raise self._url.refused(error) from None
                reason = str(error) or "no answer"
            except exceptions.RedisError as error:
                raise self._url.refused(error) from None
            end = _after_stall(end, begun + allowed_s, limit_s)
            if time.monotonic() + delay_s >= end:
                raise self._url.unreachable(reason, limit_s) from None
            due = time.monotonic() + delay_s
            await asyncio.sleep(delay_s)
            end = _after_stall(end, due, limit_s)
            begun, delay_s = time.monotonic(), min(2 * delay_s, LONGEST_DELAY_S)


def _after_stall(end: float, due: float, limit_s: float) -> float:
    """When to give up, if what was due at `due` has come only now."""
    now = time.monotonic()
    return max(end, now + limit_s / 2) if now - due > limit_s / 4 else end


def _check_truth(
    rows: Sequence[TrajectoryRow],
    queued: Sequence[TrajectoryId],
    leases: Mapping[TrajectoryId, Lease],
) -> None:
    epochs = {row.id: row.epoch for row in rows}
    for id, lease in leases.items():
        if epochs.get(id) != lease.epoch:
            raise UserInputError(f"lease of {id}: epoch {lease.epoch}, its row {epochs.get(id)}")
    if both := leases.keys() & set(queued):
        raise UserInputError(f"{min(both)} is both queued and leased")


def _pack(row: TrajectoryRow) -> str:
    return f"{row.state.value} {row.epoch} {row.num_tokens} {row.num_steps}"


def _unpack(id: TrajectoryId, packed: str) -> TrajectoryRow:
    try:
        state, *numbers = packed.split(" ")
        epoch, num_tokens, num_steps = map(int, numbers)
        return TrajectoryRow(id, TrajectoryState(state), epoch, num_tokens, num_steps)
    except ValueError:
        raise IndexLost(f"live index row of {id}: {packed[:80]!r} is none; rebuild it") from None


def _batches(table: Mapping[str, Any]) -> Iterator[dict[Any, Any]]:
    rest = iter(table.items())
    while batch := dict(islice(rest, BATCH_ITEMS)):
        yield batch
