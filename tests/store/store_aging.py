"""A store that has trained for a while: versions, updates, snapshots with layers of their own."""

import os
import time
from dataclasses import replace

from k3rl.blobs import BlobStore
from k3rl.sandboxes.files.layers import large_files, layer_of_files, pack
from k3rl.store.compaction import NEVER, Limits
from k3rl.store.events import VersionRow
from k3rl.store.protocol import UpdateRow
from k3rl.store.retention import Retention
from k3rl.store.upkeep import Policy
from k3rl.types import digest_json
from tests.store.store_builders import COMPLETED, header, policy, step
from tests.store.store_files import Root

NUM_UPDATES, PER_UPDATE, CHECKPOINT, KEPT = 6, 2, 4, 2
BIG = bytes(range(256)) * 100
POLICY = Policy(
    Limits(min_batches=NEVER),
    Retention(keep_updates=KEPT),
    grace_s=0.0,
    references=large_files,
    checkpoint=lambda: CHECKPOINT,
)
"""Updates 0 to 2 are older than the two that are kept up to the checkpoint."""


def put_layer(blobs, number):
    """A real layer: one small file inside, one large one as a blob of its own."""
    made, contents = layer_of_files({"small": b"%d" % number, "big": BIG + b"%d" % number})
    for entry in made.large_files():
        blobs.put(contents[entry.digest])
    return blobs.put(pack(made.entries, made.inline))


def play(root, numbers, blobs=None, parent=None, outcome=COMPLETED, version=1):
    """Two steps each; step 1 has a layer of its own upon one that all share."""
    ids = []
    for number in numbers:
        layers = []
        made = header(number)
        root.do(root.live.begin(made))
        root.do(root.live.claim(made.id, "w"))
        if blobs is not None:
            layers = [put_layer(blobs, -1), put_layer(blobs, number)]
        root.do(root.live.commit(made.id, 1, step(made.id, 1, 0, 0, 0, layers=layers[:1]))[0])
        root.do(root.live.append(policy(made.id, 1, 5, 40, number, version))[0])
        frame = step(made.id, 1, 1, 5, 45, seed=number, layers=layers)
        root.do(root.live.commit(made.id, 1, frame)[0])
        root.do(root.live.finish(made.id, 1, outcome))
        ids.append(made.id)
    return ids


def aged(folder):
    """Six updates of two trajectories each, a batch for each; returns the ids by update."""
    root, blobs, found = Root(folder), BlobStore(folder / "blobs"), []
    for update in range(NUM_UPDATES):
        first = update * PER_UPDATE
        ids = play(root, range(first, first + PER_UPDATE), blobs, version=update + 1)
        weights = blobs.put(b"weights %d" % update)
        root.do(VersionRow(update + 1, update, weights, weights))
        seq = root.seal(pin=True)
        root.do(row(update, ids, seq))
        found.append(ids)
    root.seal(pin=True)
    root.close()
    grow_old(folder)
    return found


def row(update, ids, seq):
    zeros = (0.0,) * len(ids)
    return UpdateRow(update, update, update + 1, seq, "key", tuple(ids), zeros, {}, zeros, 1.0,
                     digest_json(update))  # fmt: skip


def grow_old(folder, by_s=10_000.0):
    """All blobs were put a while ago."""
    past = time.time() - by_s
    for digest in BlobStore(folder / "blobs").digests():
        os.utime(BlobStore(folder / "blobs").path(digest), (past, past))


def keeping(**limits):
    return replace(POLICY, retention=Retention(**limits))


def tree(folder):
    """Every file and its bytes."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
