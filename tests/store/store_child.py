"""A store service, and those who write to it, in processes of their own.

    python -m tests.store.store_child ROOT LEDGERS REDIS_URL

Reads one command a line and forks a process for it, whose id it answers: `serve [POINT COUNT]`, a
service that kills itself when it comes to a point for that many times; `write NAME SEED [POINT
COUNT]`, a worker; `drain NAME`, one that ends when there is no more work; `feed`. All of them are
killed with this one. `fill`, instead, appends in this process until the disk refuses.
"""

import asyncio
import ctypes
import os
import random
import re
import signal
import sys
from pathlib import Path

from k3rl.blobs import BlobStore
from k3rl.errors import Fenced, StoreError
from k3rl.store.index import LiveIndex
from k3rl.store.ledger import Ledger
from k3rl.store.service import StoreService
from k3rl.types import digest_json
from tests.store.store_builders import claim_one, header, play, policy, step
from tests.store.store_faults import path_of
from tests.store.store_wire import RemoteStore, serve

SMALL = {"seal_tokens": 3000, "journal_file_bytes": 20_000}
MOST_QUEUED = 8
POINTS = {
    # 1: blobs, by whoever puts them
    "blob written": ("replace", r"/blobs/", "before"),
    "blob named": ("replace", r"/blobs/", "after"),
    # journal: a group of frames
    "journal half written": ("write", r"/journal/J-", "half"),
    "journal written": ("fdatasync", r"/journal/J-", "before"),
    "journal synced": ("fdatasync", r"/journal/J-", "after"),
    "journal created": ("fsync", r"/journal$", "before"),
    # 2 and 3: sealed files
    "sealed written": ("fsync", r"/sealed/\.tmp-", "before"),
    "sealed synced": ("link", r"/sealed/", "before"),
    "sealed linked": ("link", r"/sealed/", "after"),
    "sealed named": ("fsync", r"/sealed$", "after"),
    # 4: the manifest's record
    "record written": ("fsync", r"/_log/\.tmp-", "before"),
    "record synced": ("link", r"/_log/", "before"),
    "record linked": ("link", r"/_log/", "after"),
    "record named": ("fsync", r"/_log$", "after"),
    # 5, 6 and 7
    "publish": None,
    "answer": None,
    "journal goes": ("unlink", r"/journal/J-", "before"),
    "journal gone": ("unlink", r"/journal/J-", "after"),
}
WRITER_POINTS = ("blob written", "blob named")


class Point:
    """Ends this process the `count`-th time that it comes to a point."""

    def __init__(self, name="", count="0"):
        self.name, self.left = name, int(count)
        where = POINTS.get(name)
        if where is not None:
            setattr(os, where[0], self._hook(getattr(os, where[0]), *where[1:]))

    def reach(self, name):
        self.left -= name == self.name
        if name == self.name and self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def _hook(self, real, pattern, when):
        def hooked(target, *arguments, **options):
            path = path_of(target) if isinstance(target, int) else str(target)
            if not re.search(pattern, path):
                return real(target, *arguments, **options)
            if when == "half" and self.left == 1:
                real(target, bytes(arguments[0])[: len(arguments[0]) // 2])
            if when != "after":
                self.reach(self.name)
            answer = real(target, *arguments, **options)
            if when == "after":
                self.reach(self.name)
            return answer

        return hooked


class Places:
    """Where everything lies."""

    def __init__(self, root, ledgers, url):
        self.root, self.ledgers, self.url = Path(root), Path(ledgers), url
        self.socket = self.root.parent / "socket"
        self.blobs = BlobStore(self.root / "blobs")

    def service(self, **options):
        index = LiveIndex.from_url(self.url, str(self.root))
        return StoreService(self.root, self.blobs, index, **options)


async def run_service(places, point):
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    put = LiveIndex.put

    async def published(index, rows):
        point.reach("publish")
        await put(index, rows)

    LiveIndex.put = published
    store = places.service(**SMALL)
    await store.open()
    places.socket.unlink(missing_ok=True)
    await serve(store, places.socket, lambda: point.reach("answer"))
    await stop.wait()
    await store.aclose()


async def connected(places, work):
    """Work over one connection after the other, until it returns True."""
    while True:
        try:
            store = await RemoteStore.connect(places.socket)
        except OSError:
            await asyncio.sleep(0.01)
            continue
        try:
            if await work(store):
                return
        except (ConnectionError, Fenced):
            # The answer is lost, or the claim: what is held comes back with the next one.
            continue
        finally:
            store.close()


async def write(places, name, rng, is_draining):
    """Claim and play; now and then pause halfway."""
    ledger = Ledger(places.ledgers / f"{name}.jsonl")

    def layers():
        return [places.blobs.put(rng.randbytes(100))] if rng.random() < 0.3 else []

    async def work(store):
        if is_draining:
            await store.requeue_paused()
        while True:
            claims = await store.claim(name, 1, [], 0.0 if is_draining else 1.0)
            if not claims and is_draining:
                return True
            for claim in claims:
                await write_one(store, claim, ledger, rng, is_draining, layers)

    await connected(places, work)


async def write_one(store, claim, ledger, rng, is_draining, layers):
    is_whole = is_draining or rng.random() < 0.7
    sizes = {"turn": rng.randint(20, 400), "chunk": rng.randint(1, 64), "layers": layers}
    length = rng.randint(2, 5) if is_whole else rng.randint(1, 2)
    length = max(length, len(claim.steps))
    acked = await play(store, claim, length, note=ledger.write, finish=is_whole, **sizes)
    if not is_whole and claim.outcome is None:
        # A few tokens of a step that is not committed.
        ledger.write(await store.append(policy(claim.header.id, claim.epoch, acked, 7)))
        await store.pause(claim.header.id, claim.epoch)


async def feed(places, rng):
    """Keep something in the queue; versions and pins on the side, each version noted."""
    noted = open(places.ledgers / "versions", "a", buffering=1)  # noqa: SIM115, ASYNC230
    number = 0

    async def work(store):
        nonlocal number
        while True:
            if (await store.stats()).num_trajectories.get("queued", 0) < MOST_QUEUED:
                await store.begin([header(number + n) for n in range(4)])
                number += 4
            noted.write(f"{await store.next_version(0, digest_json(number), None)}\n")
            await asyncio.sleep(rng.random() * 0.2)
            await store.requeue_paused()
            if rng.random() < 0.5:
                await store.pin()

    await connected(places, work)


async def fill(places):
    def say(*words):
        print(*words, flush=True)

    store = places.service()
    await store.open()
    await store.begin([header(0)])
    claim = await claim_one(store)
    id, epoch, offset = claim.header.id, claim.epoch, 5
    await store.commit_step(id, epoch, step(id, epoch, 0, 0, 0))
    ledger = Ledger(places.ledgers / "w.jsonl")
    while True:
        try:
            ledger.write(await store.append(policy(id, epoch, offset, 640)))
        except StoreError as error:
            say("refused", error)
            break
        offset += 640
    try:
        await store.append(policy(id, epoch, offset, 1))
    except StoreError:
        say("refused again")
    say("readable", (await store.get(id)).num_tokens)
    await store.aclose()
    say("closed")


def run(places, command, *words):
    """What a forked process does."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    match command:
        case "serve":
            asyncio.run(run_service(places, Point(*words)))
        case "write":
            name, seed, *where = words
            Point(*where)
            asyncio.run(write(places, name, random.Random(f"{name} {seed}"), False))
        case "drain":
            asyncio.run(write(places, words[0], random.Random(words[0]), True))
        case "feed":
            asyncio.run(feed(places, random.Random(0)))


def main():
    places = Places(*sys.argv[1:4])
    if sys.argv[4:] == ["fill"]:
        asyncio.run(fill(places))
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            run(places, *line.rstrip("\n").split("\t"))
            os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
