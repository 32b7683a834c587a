"""Compaction: fewer files, and nothing else that a reader, a draw or an export could see."""

import asyncio
import errno
import itertools
import os
import random
import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3rl.errors import CorruptData, StoreError
from k3rl.store import compaction
from k3rl.store.compaction import Limits
from k3rl.store.events import VersionRow
from k3rl.store.exchange import export_trajectory
from k3rl.store.fsck import check
from k3rl.store.live import MAX_BRANCH_DEPTH
from k3rl.store.manifest import CommitInDoubt
from k3rl.store.offline import compact_root
from k3rl.store.protocol import Ref, SampleRequest, SampleUnit, Stratum, UpdateRow
from k3rl.store.reader import StoreReader
from k3rl.store.recovery import recover
from k3rl.store.sampler import Sampler
from k3rl.store.upkeep import Policy
from k3rl.types import (
    LineageKind,
    Outcome,
    OutcomeKind,
    ParentRef,
    TrajectoryState,
    digest_json,
)
from tests.store.store_builders import (
    COMPLETED,
    claim_one,
    header,
    play,
    played,
    policy,
    step,
)
from tests.store.store_faults import flip
from tests.store.store_files import Root, rewrite

LOST = Outcome(OutcomeKind.INFRA_FAULT, detail="the sandbox is gone")
KINDS = [
    {},
    {"unit": SampleUnit.SEGMENT},
    {"unit": SampleUnit.TOKEN, "window": 33},
    {"unit": SampleUnit.TOKEN, "window": 50, "is_inherited": True},
    {"stratify": Stratum.GROUP},
    {"unit": SampleUnit.SEGMENT, "min_version": 2, "reward_temperature": 0.3},
]


def draws(root, seqs):
    """What every kind of request draws as of every record; a refusal is its message."""
    state = recover(root, False)
    sampler, found = Sampler(state.manifest, state.live.sealed.catalog), []
    for kind in KINDS:
        for seq in seqs:
            try:
                found.append(sampler.draw(SampleRequest(3, 2, 1, **kind), seq))
            except StoreError as error:
                found.append(str(error))
    return found


def told(root):
    """Everything that a reader can be told."""
    reader, found = StoreReader(root), []
    for trajectory in reader.trajectories():
        found.append(trajectory)
        for context in range(trajectory.num_contexts):
            read = reader.read(Ref(trajectory.id, context=context))
            arrays = (read.token_ids, read.loss_mask, read.rollout_logprobs)
            found.append([read.ref, read.spans, *(array.tobytes() for array in arrays)])
        found += [reader.snapshot(s.snapshot_after) for s in trajectory.steps if s.snapshot_after]
        found.append(reader.state.live.numbers(trajectory.id))
    return [found, reader.updates(), reader.versions()]


def update(number, seq=0):
    return UpdateRow(number, 0, 1, seq, "key", (), (), {"tokens": 60.0}, (), 1.5)


def branch(root, number, parent, finish=True):
    """A child that leaves `parent` in the middle of its step 1, then plays a step of its own."""
    id = root.branch(number, ParentRef(parent, 0, 25, 1, LineageKind.BRANCH))
    if finish:
        root.do(root.live.append(policy(id, 1, 25, 30, number))[0])
        root.do(root.live.commit(id, 1, step(id, 1, 1, 5, 55, seed=number))[0])
        root.do(root.live.finish(id, 1, COMPLETED))
    return id


def filled(folder, plan):
    """A root whose batches are made as `plan` says: for each the sizes of its trajectories."""
    root, number, parents = Root(folder), 0, []
    for seq, sizes in enumerate(plan, 1):
        for size in sizes:
            if size < 0 and parents:
                parents.append(branch(root, number, parents[size % len(parents)]))
            else:
                outcome = LOST if size % 5 == 0 else COMPLETED
                options = {"num_steps": 2 + size % 3, "turn": 20 + abs(size), "outcome": outcome}
                parents += root.play([number], version=seq, **options)
            number += 1
        root.do(VersionRow(seq, 0, digest_json(seq)))
        root.do(update(seq - seq % 2, seq))
        root.seal(pin=seq % 2 == 0)
    root.close()
    return number


PLANS = st.lists(
    st.lists(st.integers(-9, 9) | st.integers(3000, 9000), max_size=4), min_size=2, max_size=5
)


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(plan=PLANS, max_tokens=st.sampled_from([500, 40_000, 10**7]), level=st.sampled_from([1, 9]))
def test_nothing_but_the_files_changes(tmp_path_factory, plan, max_tokens, level):
    folder = tmp_path_factory.mktemp("compact") / "store"
    filled(folder, plan)
    seqs = range(len(plan) + 1)
    before, drawn = told(folder), draws(folder, seqs)
    count = compact_root(folder, Limits(max_tokens, 2, level))
    assert told(folder) == before
    assert draws(folder, seqs) == drawn
    assert check(folder).findings == []
    state = recover(folder, False)
    small = [b for b in state.live.sealed.catalog.batches if b.trajectories.num_own_tokens.sum() <
             max_tokens // 2]  # fmt: skip
    assert len(small) <= 1 or not count
    for table in ("updates", "versions"):
        assert len(state.manifest.files_of(table)) == 1
    # Again there is nothing to do, and what was written is opened by an owner just as well.
    assert compact_root(folder, Limits(max_tokens, 2, level)) == 0
    assert told(folder) == before


def test_many_small_batches_become_one(tmp_path):
    number = filled(tmp_path, [[1, 2, -1, 4]] * 6)
    before = {file.path for file in recover(tmp_path, False).manifest.files.values()}
    assert compact_root(tmp_path, Limits(min_batches=7)) == 0
    assert compact_root(tmp_path, Limits(min_batches=6)) == 6
    state = recover(tmp_path, False)
    (batch,) = state.live.sealed.catalog.batches
    assert len(batch) == number == 24
    assert len(state.manifest.files) == 6
    assert {p.split("-")[0] for p in state.manifest.files} == {
        f"sealed/{t}" for t in
        ("segments", "steps", "trajectories", "snapshots", "updates", "versions")
    }  # fmt: skip
    # What was taken out is garbage for a while, and no start takes it for a stray.
    assert set(state.manifest.retired) == before
    recover(tmp_path, True)
    assert all((tmp_path / path).exists() for path in before)
    assert list((tmp_path / "quarantine").iterdir()) == []
    # Siblings lie side by side.
    assert (np.diff(batch.trajectories.group) >= 0).all()


def test_it_is_smaller(tmp_path):
    """Text repeats itself; small batches cost footers, and level 9 finds more than level 3."""
    root = Root(tmp_path)
    words = np.random.default_rng(0).integers(0, 160_000, 300).astype(np.int32)
    rng = np.random.default_rng(1)
    for number in range(8):
        (id,) = root.play([number], num_steps=1)
        frame = policy(id, 1, 5, 8000)
        frame = replace(frame, token_ids=words[rng.integers(0, 300, 8000)])
        frame = replace(frame, rollout_logprobs=np.zeros(8000, np.float32))
        other = header(100 + number)
        root.do(root.live.begin(other))
        root.do(root.live.claim(other.id, "w"))
        root.do(root.live.append(replace(frame, id=other.id, offset=0))[0])
        root.do(root.live.finish(other.id, 1, COMPLETED))
        root.seal()
    root.close()
    before = sum(f.num_bytes for f in recover(tmp_path, False).manifest.files.values())
    assert compact_root(tmp_path, Limits(min_batches=2)) == 8
    after = sum(f.num_bytes for f in recover(tmp_path, False).manifest.files.values())
    assert after < 0.8 * before


def test_exports_give_the_same_bytes(tmp_path):
    number = filled(tmp_path / "store", [[1, 2], [-1, 4000], [-2, 3]])

    def export(name):
        found = []
        for n in range(number):
            path = tmp_path / f"{name}-{n}.k3t"
            export_trajectory(tmp_path / "store", header(n).id, path, lambda content, file: [])
            found.append(path.read_bytes())
        return found

    before = export("before")
    assert compact_root(tmp_path / "store", Limits(min_batches=2)) == 3
    assert export("after") == before


def test_damage_is_not_copied(tmp_path):
    """What is read is checked: a damaged batch stays as it is, and so does the store."""
    filled(tmp_path, [[4000], [4001]])
    state = recover(tmp_path, False)
    path = tmp_path / state.live.sealed.catalog.batches[0].files["segments"].path
    before = sorted(p.name for p in (tmp_path / "sealed").iterdir())
    flip(path, path.stat().st_size // 3)
    with pytest.raises(CorruptData) as caught:
        compact_root(tmp_path, Limits(min_batches=2))
    assert caught.value.file == str(path)
    assert sorted(p.name for p in (tmp_path / "sealed").iterdir()) == before
    assert recover(tmp_path, False).manifest.head.seq == state.manifest.head.seq


def test_tokens_that_are_not_what_their_hash_says_are_not_copied(tmp_path):
    """Pages that are whole, of a file that holds other tokens."""
    filled(tmp_path, [[4000], [4001]])

    def change(table):
        rows = table.column("token_ids").to_pylist()
        rows[0][0] += 1
        at = table.schema.get_field_index("token_ids")
        field = table.schema.field(at)
        return table.set_column(at, field, pa.array(rows, field.type))

    rewrite(tmp_path, "segments", change)
    with pytest.raises(CorruptData, match="row group 0: tokens do not match their hash") as caught:
        compact_root(tmp_path, Limits(min_batches=2))
    path = recover(tmp_path, False).live.sealed.catalog.batches[1].files["segments"].path
    assert caught.value.file == str(tmp_path / path)


def test_a_name_that_is_taken_leaves_the_store_as_it_was(tmp_path):
    filled(tmp_path, [[1], [2]])
    state = recover(tmp_path, True)
    before = sorted(p.name for p in (tmp_path / "sealed").iterdir())
    done = compaction.rewrite(tmp_path, state.manifest, state.live.sealed.catalog.batches)
    draft = compaction.draft(state, done)
    (tmp_path / "_log" / f"{state.manifest.head.seq + 1:020d}.json").write_text("taken")
    with pytest.raises(StoreError, match="another service"):
        compaction.write(state.manifest, draft)
    assert sorted(p.name for p in (tmp_path / "sealed").iterdir()) == before


def refuse_at(patch, number):
    """Call `number`, from 0, of those that make something durable or name it finds a full disk."""
    calls = itertools.count()

    def refusing(real):
        def call(*arguments, **options):
            if next(calls) == number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments, **options)

        return call

    for name in ("fsync", "link"):
        patch.setattr(os, name, refusing(getattr(os, name)))
    return calls


def test_a_disk_that_refuses_at_any_call_leaves_the_store_as_it_was(tmp_path, monkeypatch):
    """Or, when only the folder of the manifest could not be synced, one that may be either."""
    filled(tmp_path / "store", [[1], [4100]])
    before = told(tmp_path / "store")
    for number in itertools.count():
        root = shutil.copytree(tmp_path / "store", tmp_path / str(number))
        state = recover(root, True)
        names = sorted(p.name for p in (root / "sealed").iterdir())
        batches = state.live.sealed.catalog.batches
        with monkeypatch.context() as patch:
            calls = refuse_at(patch, number)
            try:
                done = compaction.rewrite(root, state.manifest, batches)
                compaction.write(state.manifest, compaction.draft(state, done))
            except StoreError as error:
                refused = error
            else:
                refused = None
        if next(calls) <= number:
            assert refused is None
            break
        assert "No space left on device" in str(refused)
        is_in_doubt = isinstance(refused, CommitInDoubt)
        assert (state.manifest.doubt is not None) is is_in_doubt
        left = sorted(p.name for p in (root / "sealed").iterdir())
        assert is_in_doubt or left == names
        assert told(root) == before
        assert check(root).findings == []
    assert number == 4 * 3 + 3


def test_what_a_kill_left_half_written_is_a_copy_and_goes(tmp_path):
    filled(tmp_path, [[1], [2]])
    state = recover(tmp_path, False)
    compaction.rewrite(tmp_path, state.manifest, state.live.sealed.catalog.batches)
    assert len(list((tmp_path / "sealed").glob("*-again.parquet"))) == 4
    before = told(tmp_path)
    recover(tmp_path, True)
    assert list((tmp_path / "sealed").glob("*-again.parquet")) == []
    assert list((tmp_path / "quarantine").iterdir()) == []
    assert told(tmp_path) == before


def test_a_line_of_branches_has_a_greatest_length(tmp_path):
    root = Root(tmp_path)
    (parent,) = root.play([0])
    for number in range(1, MAX_BRANCH_DEPTH + 1):
        parent = branch(root, number, parent)
    assert root.live.depth(parent) == MAX_BRANCH_DEPTH
    with pytest.raises(StoreError, match="branch off one of its ancestors"):
        branch(root, 99, parent)
    root.seal()
    with pytest.raises(StoreError, match="branch off one of its ancestors"):
        branch(root, 99, parent)
    branch(root, 99, header(MAX_BRANCH_DEPTH - 1).id)
    root.close()
    reader = StoreReader(tmp_path)
    assert len(reader.read(Ref(parent)).token_ids) == 60


def test_readers_see_the_same_tokens_all_the_while(tmp_path, open_store):
    """In the service: writers, seals and readers go on while batches are replaced."""
    limits = Limits(max_tokens=20_000, min_batches=2, level=1)

    async def go():
        async with open_store(policy=Policy(limits)) as store:
            ids = []
            for n in range(4):
                ids.append(await played(store, n, turn=900))
                await store.pin()
            want = {id: (await store.read(Ref(id))).token_ids.tobytes() for id in ids}
            request = SampleRequest(1, 2, 5, manifest_seq=4)
            drawn = await store.sample(request)
            is_done, num_reads = asyncio.Event(), 0

            async def read(seed):
                nonlocal num_reads
                rng = random.Random(seed)
                while not is_done.is_set():
                    some = rng.sample(ids, 2)
                    found = await store.read_many(list(map(Ref, some)))
                    assert [f.token_ids.tobytes() for f in found] == [want[id] for id in some]
                    assert (await store.get(some[0])).num_tokens == len(found[0].token_ids)
                    assert await store.sample(request) == drawn
                    listed = [t.id for t in await store.trajectories(TrajectoryState.FINISHED)]
                    assert listed[:4] == ids
                    num_reads += 1

            async def outside():
                reader = StoreReader(tmp_path / "store")
                while not is_done.is_set():
                    found = await asyncio.to_thread(reader.read_many, list(map(Ref, ids)))
                    assert [f.token_ids.tobytes() for f in found] == list(want.values())
                    await asyncio.sleep(0)

            readers = [asyncio.create_task(read(n)) for n in range(3)]
            readers.append(asyncio.create_task(outside()))
            for n in range(10, 22):
                await store.begin([header(n)])
                await play(store, await claim_one(store), turn=700)
                await store.pin()
                await asyncio.sleep(0.05)
            for _ in range(100):
                if store._upkeep.num_rewritten >= 10:
                    break
                await asyncio.sleep(0.1)
            is_done.set()
            await asyncio.gather(*readers)
            assert store._upkeep.num_rewritten >= 10
            assert num_reads > 20
            assert len(store._live.sealed.catalog.batches) < 12
            assert len(await store.trajectories()) == 16
        assert check(tmp_path / "store").findings == []

    asyncio.run(go())


def test_a_listing_whose_files_are_replaced_looks_again(tmp_path, open_store, monkeypatch):
    async def go():
        async with open_store() as store:
            for n in range(3):
                await played(store, n)
                await store.pin()
            want = await store.trajectories()
            loop, archive = asyncio.get_running_loop(), store._live.sealed
            real, done = archive.records, []

            def records(batch):
                """The first batch is listed; then all of them are replaced."""
                yield from real(batch)
                if not done:
                    limits = Limits(min_batches=2)
                    done.append(asyncio.run_coroutine_threadsafe(
                        store._upkeep._compact(limits), loop).result(30))  # fmt: skip

            monkeypatch.setattr(archive, "records", records)
            assert await store.trajectories() == want
            assert done == [3]

    asyncio.run(go())


def test_closing_gives_up_what_is_under_way(tmp_path, open_store, monkeypatch):
    async def go():
        async with open_store() as store:
            for n in range(3):
                await played(store, n, turn=2000)
                await store.pin()
        root = tmp_path / "store"
        before, files = told(root), sorted(p.name for p in (root / "sealed").iterdir())
        async with open_store(policy=Policy(Limits(min_batches=2))) as store:
            real = compaction.rewrite

            def slow(*arguments):
                # The store is being closed by the time that the second chunk is asked for.
                assert store._upkeep._stop.wait(10)
                return real(*arguments)

            monkeypatch.setattr(compaction, "rewrite", slow)
            monkeypatch.setattr("k3rl.store.reorder.BATCH_SEGMENTS", 1)
            store._upkeep.sealed()
            await asyncio.sleep(0.2)
            assert store._upkeep._round is not None
        assert sorted(p.name for p in (root / "sealed").iterdir()) == files
        assert told(root) == before

    asyncio.run(go())


@pytest.mark.parametrize("table", ["segments", "trajectories", "snapshots", "updates"])
def test_a_repair_takes_what_a_broken_file_was_made_of(tmp_path, table):
    filled(tmp_path, [[1, 4000], [2, -1], [3]])
    before, drawn = told(tmp_path), draws(tmp_path, range(4))
    assert compact_root(tmp_path, Limits(min_batches=3)) == 3
    (path,) = (tmp_path / "sealed").glob(f"{table}-*-again.parquet")
    flip(path, path.stat().st_size // 3)
    (found,) = check(tmp_path, repair=True).findings
    assert found.file == str(path)
    assert "compaction undone" in found.repaired
    assert check(tmp_path).findings == []
    assert told(tmp_path) == before
    assert draws(tmp_path, range(4)) == drawn
    assert (tmp_path / "quarantine" / path.name).exists()
    # And all goes on from there.
    assert compact_root(tmp_path, Limits(min_batches=3)) == (0 if table == "updates" else 3)
    assert told(tmp_path) == before
    assert check(tmp_path).findings == []


def test_a_broken_file_whose_originals_are_gone_is_given_up(tmp_path):
    filled(tmp_path, [[1, 4000], [2, -1]])
    compact_root(tmp_path, Limits(min_batches=2))
    root = Root(tmp_path)
    (kept,) = root.play([50])
    root.seal()
    root.close()
    for path in recover(tmp_path, False).manifest.retired:
        (tmp_path / path).unlink()
    (path,) = (tmp_path / "sealed").glob("segments-*-again.parquet")
    flip(path, path.stat().st_size // 3)
    (found,) = check(tmp_path, repair=True).findings
    assert "given up" in found.repaired
    assert check(tmp_path).findings == []
    reader = StoreReader(tmp_path)
    assert reader.state.live.ids() == [kept]
    # What records had before they were written again is gone with it.
    for seq in range(5):
        with pytest.raises(StoreError, match=f"record {seq} had|can be drawn"):
            Sampler(reader.state.manifest, reader.state.live.sealed.catalog).draw(
                SampleRequest(0, 1, 0), seq
            )
