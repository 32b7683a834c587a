"""Catalogs from arrays in memory: no files, so they may be as large as memory allows."""

import numpy as np

from k3rl.store.catalog import Catalog
from k3rl.store.columns import (
    Batch,
    ContextColumns,
    SegmentColumns,
    TrajectoryColumns,
    offsets,
)
from k3rl.store.manifest import Manifest, ManifestRecord, SealedFile
from k3rl.store.sampler import Sampler


def columns(seq, lengths, rng, sealed_seq=None, base=0, versions=None, levels=3, group_size=8):
    """A batch of trajectories, each a list of lengths of its contexts, in segments of 4,096.

    The last context of each begins with `base` tokens of a parent. `versions` [S] or drawn.
    """
    count = len(lengths)
    own = np.array([n for one in lengths for n in one], np.int64)
    context_at = offsets(np.array([len(one) for one in lengths], np.int64))
    counts = -(-own // 4096)
    segment_at = offsets(counts)
    num_segments = int(counts.sum())
    within = np.arange(num_segments) - np.repeat(segment_at[:-1], counts)
    bases = np.zeros(len(own), np.int64)
    bases[context_at[:-1]] = base
    starts = within * 4096 + np.repeat(bases, counts)
    sizes = np.minimum(np.repeat(own, counts) - within * 4096, 4096)
    if versions is None:
        versions = rng.integers(0, 5, num_segments)
    zeros, rows = np.zeros(count, np.int64), np.arange(count, dtype=np.int32)
    totals = np.add.reduceat(own, context_at[:-1])
    trajectories = TrajectoryColumns(
        id=rng.integers(0, 256, (count, 16), dtype=np.uint8),
        parent=np.zeros((count, 16), np.uint8),
        row=rows,
        first_step=zeros,
        num_steps=rows * 0,
        start_step=rows * 0 + (0 if base else -1),
        sealed_seq=zeros + seq if sealed_seq is None else np.asarray(sealed_seq),
        epoch=zeros + 1,
        begun=zeros + seq * 10**6 + rows,
        finished=zeros + seq * 10**6 + rows,
        num_tokens=totals + base,
        num_policy_tokens=totals,
        num_own_tokens=totals,
        reward=rng.random(count),
        outcome=rng.integers(0, 2, count),
        level=rng.integers(0, levels, count),
        group=rng.permutation(count) // group_size + seq * 10**6,
        is_imported=np.zeros(count, np.bool_),
    )
    numbers = np.arange(len(own)) - np.repeat(context_at[:-1], np.diff(context_at))
    table = SegmentColumns(
        start=starts,
        num_tokens=sizes.astype(np.int32),
        num_policy_tokens=sizes.astype(np.int32),
        version_min=np.asarray(versions).astype(np.int32),
        version_max=np.asarray(versions).astype(np.int32),
        row_group=(np.arange(num_segments) // 4).astype(np.int32),
        row=(np.arange(num_segments) % 4).astype(np.int32),
        content_hash=np.zeros((num_segments, 32), np.uint8),
    )
    names = {"trajectories": count, "segments": num_segments}
    files = {t: SealedFile(f"sealed/{t}-{seq}", t, "", n, 0, "") for t, n in names.items()}
    contexts = ContextColumns(numbers.astype(np.int32), bases, bases + own)
    empty = np.empty(0, np.int64)
    return Batch(seq, files, trajectories, contexts, table, context_at, segment_at, empty)


class Columns:
    """A catalog of batches, its manifest, and a sampler on both."""

    def __init__(self, *batches):
        self.catalog, self.manifest = Catalog(), Manifest(None)
        self.manifest.take(ManifestRecord(0))
        self.sampler = Sampler(self.manifest, self.catalog)
        for batch in batches:
            self.take(batch)

    def take(self, batch, removed=()):
        """A record that adds a batch and removes others."""
        while self.manifest.head.seq < batch.seq - 1:
            self.manifest.take(ManifestRecord(self.manifest.head.seq + 1))
        gone = [f.path for b in self.catalog.batches if b.seq in removed for f in b.files.values()]
        had = sum(len(b) for b in self.catalog.batches if b.seq in removed)
        record = ManifestRecord(
            batch.seq,
            adds=tuple(batch.files.values()),
            removes=tuple(gone),
            is_upkeep=True,
            undrawable_from=min(removed) if len(batch) < had else None,
        )
        self.manifest.take(record)
        self.catalog.take(batch, removed)

    def draw(self, request, seq=None):
        return self.sampler.draw(request, self.manifest.head.seq if seq is None else seq)

    def place(self, ref):
        return self.catalog.find(ref.id)


def merged(seq, *batches):
    """The trajectories of several batches as one, in another order, as a record rewrites them."""
    pick = np.random.default_rng(seq)
    parts = []
    for batch in batches:
        for index in range(len(batch)):
            mask = np.zeros(len(batch), bool)
            mask[index] = True
            parts.append(batch.select(mask))
    parts = [parts[n] for n in pick.permutation(len(parts))]

    def joined(name):
        tables = [getattr(part, name) for part in parts]
        return type(tables[0])(
            *(np.concatenate([getattr(t, f) for t in tables]) for f in tables[0].__slots__)
        )

    counts = [np.diff(part.context_at) for part in parts]
    sizes = [np.diff(part.segment_at) for part in parts]
    files = {
        t: SealedFile(f"sealed/{t}-{seq}", t, "", sum(b.files[t].num_rows for b in batches), 0, "")
        for t in ("trajectories", "segments")
    }
    return Batch(
        seq, files, joined("trajectories"), joined("contexts"), joined("segments"),
        offsets(np.concatenate(counts)), offsets(np.concatenate(sizes)), np.empty(0, np.int64),
    )  # fmt: skip
