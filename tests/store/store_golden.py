"""A small store with something of everything that tables hold; its files are golden.

`python -m tests.store.store_golden FOLDER` makes one of the present version, to be committed as
`tests/data/store/<version>` when a version is released, and never changed again.
"""

import asyncio
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from k3rl.blobs import BlobStore
from k3rl.store.protocol import UpdateRow
from k3rl.store.redis_server import EmbeddedServer
from k3rl.types import (
    LineageKind,
    Outcome,
    OutcomeKind,
    ParentRef,
    TruncationCause,
    digest_json,
)
from tests.store.store_builders import (
    COMPLETED,
    claim_one,
    header,
    play,
    policy,
    service,
    step,
)

FOLDERS = ("_log", "sealed", "journal", "blobs")
CUT_OFF = Outcome(OutcomeKind.TRUNCATED, -1.0, cause=TruncationCause.BUDGET)
LOST = Outcome(OutcomeKind.INFRA_FAULT, detail="the sandbox is gone")


async def fill(store, blobs):
    """Two batches to seal; nothing is left unfinished."""
    layers = tuple(blobs.put(b"layer %d" % n) for n in range(2))
    first = await two_contexts(store, layers)
    await branch(store, first)
    await store.next_version(0, digest_json("weights"), layers[0])
    row = UpdateRow(0, 0, 1, 0, "key", (first,), (0.5,), {"tokens": 60.0}, (-0.25,), 1.5)
    await store.record_update(row)
    await store.pin()
    await cut_off(store)
    await store.begin([header(3)])
    claim = await claim_one(store)
    await store.finish(claim.header.id, claim.epoch, LOST)
    await store.record_update(replace(row, update=1, policy_version_in=1, checkpoint=layers[1]))


async def two_contexts(store, layers):
    """Two steps in context 0, one in context 1; tokens of two versions; the id is returned."""
    await store.begin([header(0)])
    claim = await claim_one(store)
    id, epoch = claim.header.id, claim.epoch
    await store.commit_step(id, epoch, step(id, epoch, 0, 0, 0, layers=layers[:1]))
    await store.append(policy(id, epoch, 5, 20))
    await store.append(policy(id, epoch, 25, 20, version=2))
    await store.commit_step(id, epoch, step(id, epoch, 1, 5, 45, layers=layers))
    await store.append(policy(id, epoch, 0, 20, context=1))
    await store.commit_step(id, epoch, step(id, epoch, 2, 0, 20, context=1, layers=layers))
    await store.finish(id, epoch, COMPLETED)
    return id


async def branch(store, parent):
    """A child that leaves its parent in the middle of step 1."""
    await store.branch(header(1, parent=ParentRef(parent, 0, 30, 1, LineageKind.BRANCH)))
    claim = await claim_one(store)
    id, epoch = claim.header.id, claim.epoch
    await store.append(policy(id, epoch, 30, 10, seed=1, version=2))
    await store.commit_step(id, epoch, step(id, epoch, 1, 5, 40, seed=1))
    await store.finish(id, epoch, COMPLETED)


async def cut_off(store):
    """A trajectory whose last tokens belong to no step."""
    await store.begin([header(2)])
    claim = await claim_one(store)
    id, epoch = claim.header.id, claim.epoch
    await play(store, claim, num_steps=2, turn=20, finish=False)
    await store.append(policy(id, epoch, 30, 7))
    await store.finish(id, epoch, CUT_OFF)


async def make(root, url):
    """A filled and closed store root."""
    async with service(root, url) as store:
        await fill(store, BlobStore(root / "blobs"))


async def main(folder):
    server = EmbeddedServer(Path(tempfile.mkdtemp()))
    await server.start()
    try:
        with tempfile.TemporaryDirectory() as place:
            await make(Path(place, "store"), server.url)
            for name in FOLDERS:
                shutil.copytree(Path(place, "store", name), folder / name)
    finally:
        await server.stop()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
