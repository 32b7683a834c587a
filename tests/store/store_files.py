"""A store root written without a service: the same journal, state and sealing, no Redis."""

from dataclasses import replace

import pyarrow.parquet as pq

from k3rl.store import compaction
from k3rl.store.events import KIND_OF
from k3rl.store.journal import JournalWriter
from k3rl.store.manifest import load_manifest, record_path, sealed_record
from k3rl.store.parquet import file_digest
from k3rl.store.record import num_policy_tokens
from k3rl.store.recovery import RootLock, next_service_epoch, recover
from k3rl.store.schemas import SCHEMA_KEY
from k3rl.store.sealing import MAX_BATCH_TOKENS, seal
from k3rl.store.tokens import TokenFiles
from k3rl.types import TokenFrame, canonical_json, encode, to_plain
from tests.store.store_builders import COMPLETED, header, policy, step


class Root:
    """Decides, journals, applies and seals."""

    def __init__(self, root):
        self.root, self.lock = root, RootLock(root)
        self.state = recover(root, owner=True)
        self.live = self.state.live
        self.files = TokenFiles(root, self.live.sealed.files)
        epoch = next_service_epoch(root)
        self.journal = JournalWriter(root / "journal", epoch, self.state.last_sequence + 1)
        self.state.usage.setdefault(self.journal.name, set())

    def do(self, *events):
        """Journal them together; they do not depend on each other."""
        frames = [(KIND_OF[type(event)], encode(event)) for event in events]
        for event, (sequence, place) in zip(events, self.journal.write(frames), strict=True):
            self.state.apply(event, sequence, place)

    def seal(self, pin=False):
        """Seal what is finished; returns the record's sequence."""
        low_water, through = self.journal.rotate()
        self.state.usage.setdefault(self.journal.name, set())
        batch = self.state.batch(low_water, through, MAX_BATCH_TOKENS)
        draft = replace(self.state.seal_record(batch), is_pinned=pin)
        record, added = seal(self.root, self.state.manifest, self.files, batch, draft)
        for name in self.state.sealed(batch, record, added):
            (self.root / "journal" / name).unlink()
        return record.seq

    def close(self):
        self.journal.close()
        self.lock.release()

    def branch(self, number, parent):
        """Begin and claim a child of a `ParentRef`; returns its id."""
        start = self.live.branch_start(parent)
        counts = [
            self._num_policy(parent.id, context, 0, self.live.end(parent.id, context))
            for context in range(start.context)
        ]
        counts.append(self._num_policy(parent.id, start.context, 0, start.committed))
        pending = (start.context, start.committed, start.token_offset)
        start = replace(
            start,
            num_policy_tokens=sum(counts),
            num_policy_tokens_pending=self._num_policy(parent.id, *pending),
        )
        self.do(self.live.begin(header(number, parent=parent), start))
        self.do(self.live.claim(header(number, parent=parent).id, "w"))
        return header(number).id

    def _num_policy(self, id, context, low, high):
        if low == high:
            return 0
        found = self.files.load(self.live.pieces(id, context, low, high))
        return num_policy_tokens(TokenFrame(id, 0, low, *found, context=context))

    def play(self, numbers, num_steps=2, turn=40, outcome=COMPLETED, version=1):
        """Whole trajectories side by side; returns their ids."""
        live, ids = self.live, [header(n).id for n in numbers]
        self.do(*(live.begin(header(n)) for n in numbers))
        self.do(*(live.claim(id, "w") for id in ids))
        at = 0
        for number in range(num_steps):
            if number:
                self.do(*(live.append(policy(id, 1, at, turn, n, version))[0]
                          for n, id in zip(numbers, ids, strict=True)))  # fmt: skip
            acked = at + turn * bool(number)
            frames = {id: step(id, 1, number, at, acked, seed=n)
                      for n, id in zip(numbers, ids, strict=True)}  # fmt: skip
            self.do(*(live.commit(id, 1, frame)[0] for id, frame in frames.items()))
            at = acked + 5
        self.do(*(live.finish(id, 1, outcome) for id in ids))
        return ids


def rewrite(root, table, change, schema_id=None):
    """Write the newest sealed file of a table again, changed; the last record then names that.

    `change` takes the Arrow table, or None to leave it out of the folder.
    """
    manifest, _ = load_manifest(root)
    head = manifest.head
    (old,) = (file for file in head.adds if file.table == table)
    data = change(pq.read_table(root / old.path))
    metadata = {**data.schema.metadata, SCHEMA_KEY: (schema_id or old.schema_id).encode()}
    data = data.replace_schema_metadata(metadata)
    pq.write_table(data, root / old.path, row_group_size=4, compression="zstd",
                   write_page_checksum=True)  # fmt: skip
    size, digest = (root / old.path).stat().st_size, file_digest(root / old.path)
    new = replace(old, schema_id=schema_id or old.schema_id, num_rows=data.num_rows,
                  num_bytes=size, blake3=digest)  # fmt: skip
    adds = tuple(new if file is old else file for file in head.adds)
    record = sealed_record(replace(head, adds=adds))
    record_path(root, head.seq).write_bytes(canonical_json(to_plain(record)) + b"\n")


def compact(root, seqs):
    """Write several sealed batches again as one, by one record; old files stay in the folder.

    Returns their paths.
    """
    old = [batch for batch in root.live.sealed.catalog.batches if batch.seq in seqs]
    done = compaction.rewrite(root.root, root.state.manifest, old)
    record = compaction.write(root.state.manifest, compaction.draft(root.state, done))
    compaction.take(root.state, record, done)
    return done.removes
