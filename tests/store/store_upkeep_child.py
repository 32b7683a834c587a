"""A store service that compacts and collects all the time under load, in a process of its own.

    python -m tests.store.store_upkeep_child ROOT LEDGERS REDIS_URL MODE [NUMBER]

`upkeep` plays NUMBER new trajectories at a time until it is killed; `drain` plays what is there to
its end. Each line on stdout says how far it is.
"""

import asyncio
import random
import sys
from pathlib import Path

from k3rl.blobs import BlobStore
from k3rl.store.compaction import Limits
from k3rl.store.index import LiveIndex
from k3rl.store.ledger import Ledger
from k3rl.store.service import StoreService
from k3rl.store.upkeep import Policy
from k3rl.types import digest_json
from tests.store.store_builders import header, play, policy

NUM_WRITERS = 4


def say(*words):
    print(*words, flush=True)


async def write(store, ledgers, name, rng, is_draining):
    """Claim and play; now and then pause halfway."""
    ledger = Ledger(ledgers / f"{name}.jsonl")
    while True:
        claims = await store.claim(name, 1, [], 0.0 if is_draining else 1.0)
        if not claims and is_draining:
            return
        for claim in claims:
            is_whole = is_draining or rng.random() < 0.7
            sizes = {"turn": rng.randint(20, 400), "chunk": rng.randint(1, 64)}
            length = rng.randint(2, 5) if is_whole else rng.randint(1, 2)
            length = max(length, len(claim.steps))
            await play(store, claim, num_steps=length, note=ledger.write, finish=is_whole, **sizes)
            if not is_whole:
                acked = await unfinished(store, claim, ledger)
                await store.pause(claim.header.id, claim.epoch)
                say("paused", acked)
            say("played", claim.header.id)


async def unfinished(store, claim, ledger):
    """A few tokens of a step that is not committed."""
    steps = (await store.get(claim.header.id)).steps
    acked = steps[-1].token_end if steps else 0
    had = len(claim.tokens.token_ids) if claim.tokens else 0
    if had <= acked:
        ledger.write(await store.append(policy(claim.header.id, claim.epoch, acked, 7)))
    return acked


async def feed(store, number, rng):
    """Keep the queue filled; versions and pins on the side."""
    first = len(await store.trajectories())
    while True:
        await store.begin([header(first + n) for n in range(number)])
        first += number
        say("version", await store.next_version(0, digest_json(first), None))
        await asyncio.sleep(rng.random() * 0.2)
        await store.requeue_paused()
        if rng.random() < 0.3:
            await store.pin()


async def keep(store):
    """Compact and collect, again and again."""
    while True:
        count = await store._upkeep.compact()
        report = await store._upkeep.collect()
        if count or report.files:
            say("upkeep", count, len(report.files))
        await asyncio.sleep(0.01)


async def main():
    root, ledgers, url, mode = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    is_draining = mode == "drain"
    index = LiveIndex.from_url(url, str(root))
    options = {"seal_tokens": 3000, "journal_file_bytes": 20_000}
    if not is_draining:
        options["policy"] = Policy(Limits(max_tokens=20_000, min_batches=2, level=1), grace_s=0.3)
    store = StoreService(root, BlobStore(root / "blobs"), index, **options)
    await store.open()
    say("open", (await store.stats()).recovery)
    rng = random.Random(str(root) + str((await store.stats()).manifest_seq))
    if is_draining:
        await store.requeue_paused()
    writers = [write(store, ledgers, f"w{n}", rng, is_draining) for n in range(NUM_WRITERS)]
    others = [] if is_draining else [feed(store, int(sys.argv[5]), rng), keep(store)]
    await asyncio.gather(*writers, *others)
    await store.aclose()
    say("closed")


asyncio.run(main())
