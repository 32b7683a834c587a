"""Garbage collection: what goes, what never goes, in two phases; a dry run that touches nothing."""

import asyncio
import os
import time
from dataclasses import replace
from itertools import chain

import pyarrow as pa
import pytest

from k3rl.blobs import BlobStore
from k3rl.errors import CorruptData, StoreError, UserInputError
from k3rl.sandboxes.files.layers import large_files
from k3rl.store.audit import compare_ledger
from k3rl.store.compaction import Limits
from k3rl.store.exchange import export_trajectory, import_trajectory
from k3rl.store.fsck import check
from k3rl.store.host import oldest_checkpoint
from k3rl.store.ledger import Ledger
from k3rl.store.manifest import load_manifest, with_pin
from k3rl.store.offline import collect_root, compact_root, pin_root, preview, unpin_root
from k3rl.store.protocol import Ack, Ref, SampleRequest
from k3rl.store.reader import StoreReader
from k3rl.store.recovery import recover
from k3rl.store.sampler import Sampler
from k3rl.store.sql import query
from k3rl.types import LineageKind, Outcome, OutcomeKind, ParentRef
from tests.store.store_aging import (
    POLICY,
    aged,
    grow_old,
    keeping,
    play,
    put_layer,
    row,
    tree,
)
from tests.store.store_builders import COMPLETED, claim_one, header, policy, step
from tests.store.store_files import Root, rewrite

LOST = Outcome(OutcomeKind.INFRA_FAULT, detail="the sandbox is gone")


def every(updates):
    return list(chain.from_iterable(updates))


def ids_of(root):
    return set(recover(root, False).live.ids())


def content(root, ids):
    """Tokens, steps, snapshots and blobs of trajectories."""
    reader, blobs, found = StoreReader(root), BlobStore(root / "blobs"), []
    for id in ids:
        trajectory, read = reader.get(id), reader.read(Ref(id))
        layers = [
            layer
            for step in trajectory.steps
            for layer in reader.snapshot(step.snapshot_after).layers
        ]
        whole = [blobs.get(layer) for layer in layers]
        large = [blobs.get(d) for data in whole for d in large_files(data, "")]
        found.append((trajectory, read.token_ids.tobytes(), whole, large))
    return found


def clean(root):
    report = check(root, references=large_files)
    assert report.findings == []
    return report.counts


def test_what_is_spent_goes_in_two_rounds(tmp_path):
    updates = aged(tmp_path)
    old, kept = every(updates[:3]), every(updates[3:])
    before, blobs = content(tmp_path, kept), BlobStore(tmp_path / "blobs")
    files, digests = set(recover(tmp_path, False).manifest.files), set(blobs.digests())
    first = collect_root(tmp_path, POLICY)
    assert set(first.dropped) == set(old)
    assert ids_of(tmp_path) == set(kept)
    assert content(tmp_path, kept) == before
    # Marked, not deleted: three batches of four files, and the layers and large files of six.
    assert (len(first.files), len(first.blobs)) == (0, 0)
    assert len(first.waiting_files) == 12
    assert all((tmp_path / path).exists() for path in files)
    assert len(first.waiting_blobs) == 12
    assert set(blobs.digests()) == digests
    counts = clean(tmp_path)
    assert (counts["garbage_files"], counts["garbage_blobs"]) == (12, 12)
    assert counts["large_files"] == 7
    second = collect_root(tmp_path, POLICY)
    assert (second.dropped, set(second.files)) == ({}, set(first.waiting_files))
    assert set(second.blobs) == set(first.waiting_blobs)
    assert set(blobs.digests()) == digests - set(first.waiting_blobs)
    assert not any((tmp_path / path).exists() for path in first.waiting_files)
    assert content(tmp_path, kept) == before
    counts = clean(tmp_path)
    assert (counts["garbage_files"], counts["garbage_blobs"]) == (0, 0)
    # Weights of all versions stay, and so do the rows of all updates.
    reader = StoreReader(tmp_path)
    assert len(reader.updates()) == 6
    assert all(blobs.has(version.blob) for version in reader.versions())
    third = collect_root(tmp_path, POLICY)
    assert (third.dropped, third.files, third.blobs, third.waiting_blobs) == ({}, {}, {}, {})
    head = recover(tmp_path, False).manifest.head.seq
    collect_root(tmp_path, POLICY)
    assert recover(tmp_path, False).manifest.head.seq == head


def test_a_dry_run_changes_nothing_and_is_right(tmp_path):
    aged(tmp_path)
    for _ in range(3):
        before = tree(tmp_path)
        said = preview(tmp_path, POLICY)
        assert tree(tmp_path) == before
        done = collect_root(tmp_path, POLICY)
        assert said.dropped.keys() == done.dropped.keys()
        assert (said.files, said.blobs) == (done.files, done.blobs)
        assert list(said.lines())[1] == list(done.lines())[1]


def test_the_grace_is_waited_for(tmp_path):
    aged(tmp_path)
    patient = replace(POLICY, grace_s=3600.0)
    blobs = BlobStore(tmp_path / "blobs")
    digests = set(blobs.digests())
    for _ in range(3):
        report = collect_root(tmp_path, patient)
        assert (report.files, report.blobs) == ({}, {})
    assert set(blobs.digests()) == digests
    # Blobs that were put within the grace are not even garbage yet.
    fresh = put_layer(blobs, 99)
    report = collect_root(tmp_path, patient)
    assert fresh not in report.waiting_blobs
    assert len(report.waiting_blobs) == 12
    assert set(collect_root(tmp_path, POLICY).blobs) == set(report.waiting_blobs)


def child(root, number, parent, finish):
    id = root.branch(number, ParentRef(parent, 0, 25, 1, LineageKind.BRANCH))
    if finish:
        root.do(root.live.append(policy(id, 1, 25, 30, number))[0])
        root.do(root.live.commit(id, 1, step(id, 1, 1, 5, 55, seed=number))[0])
        root.do(root.live.finish(id, 1, COMPLETED))
    return id


def named_again(root, updates):
    """An update above the checkpoint names one that an old one named."""
    root.do(row(5, updates[0][:1], 1))
    return updates[0][:1]


def branched_off(root, updates):
    return [updates[1][0], child(root, 50, updates[1][0], finish=False)]


def branched_off_and_finished(root, updates):
    return [updates[1][0], child(root, 50, updates[1][0], finish=True)]


def far_ancestor(root, updates):
    """A grandchild that is not finished; the child is spent."""
    near = child(root, 50, updates[1][0], finish=True)
    root.do(row(0, [*updates[0], near], 1))
    far = child(root, 51, near, finish=False)
    return [updates[1][0], near, far]


def rewarded_but_not_trained_on(root, updates):
    return play(root, [60])


def rolled_back(root, updates):
    """Update 3 was made again with other members: what the first one named is not spent."""
    root.do(row(3, updates[4], 4))
    return updates[3]


@pytest.mark.parametrize(
    "need",
    [
        named_again,
        branched_off,
        branched_off_and_finished,
        far_ancestor,
        rewarded_but_not_trained_on,
        rolled_back,
    ],
)
def test_what_something_needs_never_goes(tmp_path, need):
    updates = aged(tmp_path)
    root = Root(tmp_path)
    needed = need(root, updates)
    root.seal()
    root.close()
    before = [StoreReader(tmp_path).read(Ref(id)).token_ids.tobytes() for id in needed]
    for _ in range(2):
        collect_root(tmp_path, POLICY)
    assert set(needed) <= ids_of(tmp_path)
    after = [StoreReader(tmp_path).read(Ref(id)).token_ids.tobytes() for id in needed]
    assert after == before
    assert not set(updates[2]) & ids_of(tmp_path)
    clean(tmp_path)


def test_a_child_that_is_spent_goes_with_its_parent(tmp_path):
    updates = aged(tmp_path)
    root = Root(tmp_path)
    near = child(root, 50, updates[1][0], finish=True)
    root.do(row(1, [*updates[1], near], 1))
    root.seal()
    root.close()
    collect_root(tmp_path, POLICY)
    assert not {near, updates[1][0]} & ids_of(tmp_path)
    clean(tmp_path)


def test_without_a_reward_one_goes_with_its_group(tmp_path):
    """A second attempt was trained on; of a group that nothing was trained on all stay."""
    root = Root(tmp_path)
    tried = header(60)
    retried = replace(tried, key=replace(tried.key, attempt=1))
    for made, outcome in ((tried, LOST), (retried, COMPLETED), (header(61), LOST)):
        root.do(root.live.begin(made))
        root.do(root.live.claim(made.id, "w"))
        root.do(root.live.finish(made.id, 1, outcome))
    root.seal()
    root.do(row(0, [retried.id], 1))
    root.seal()
    root.close()
    assert set(preview(tmp_path, POLICY).dropped) == {tried.id, retried.id}
    two = replace(POLICY, checkpoint=lambda: 1)
    assert preview(tmp_path, two).dropped == {}


def test_without_a_checkpoint_nothing_is_spent(tmp_path):
    updates = aged(tmp_path)
    for policy_ in (POLICY, keeping(max_age_s=0.0), keeping(max_bytes=0)):
        report = collect_root(tmp_path, replace(policy_, checkpoint=lambda: None))
        assert report.dropped == {}
    assert ids_of(tmp_path) == set(every(updates))


def test_the_oldest_checkpoint_is_found(tmp_path):
    assert oldest_checkpoint(tmp_path) is None
    for name in ("update-00000011", "update-00000007", ".tmp-update-00000003", "update-00000005"):
        (tmp_path / name).mkdir()
    for name in ("update-00000011", "update-00000007", ".tmp-update-00000003"):
        (tmp_path / name / "meta.json").write_text("{}")
    assert oldest_checkpoint(tmp_path) == 7


def test_an_age_and_a_size_are_limits_too(tmp_path):
    updates = aged(tmp_path)
    spent = every(updates[:5])
    assert collect_root(tmp_path, keeping(max_age_s=3600.0)).dropped == {}
    # What is sealed weighs about as much for each trajectory: half of it is the half of them.
    manifest, _ = load_manifest(tmp_path)
    total = sum(f.num_bytes for f in manifest.files.values() if f.table not in
                ("updates", "versions"))  # fmt: skip
    rows = sum(f.num_bytes for f in manifest.files.values()) - total
    gone = set(preview(tmp_path, keeping(max_bytes=rows + total // 2)).dropped)
    assert 5 <= len(gone) <= 7
    assert set(spent[: len(gone) // 2 * 2]) <= gone <= set(spent[: len(gone) + 1])
    assert set(preview(tmp_path, keeping(max_bytes=0)).dropped) == set(spent)
    assert set(preview(tmp_path, keeping(max_age_s=0.0)).dropped) == set(spent)
    untrained = keeping(max_age_s=0.0, untrained=True)
    above = set(updates[5])
    assert set(preview(tmp_path, untrained).dropped) == set(spent)
    everything = replace(untrained, checkpoint=lambda: 5)
    assert set(preview(tmp_path, everything).dropped) == set(spent) | above


def test_a_pin_keeps_all_that_there_was(tmp_path):
    updates = aged(tmp_path)
    before = content(tmp_path, every(updates))
    seq = pin_root(tmp_path, "audit")
    for _ in range(2):
        assert collect_root(tmp_path, POLICY).dropped == {}
    # Files that were there as of the pin stay as well.
    assert collect_root(tmp_path, POLICY).files == {}
    assert content(tmp_path, every(updates)) == before
    assert load_manifest(tmp_path)[0].head.pins == (("audit", seq),)
    with pytest.raises(UserInputError, match="pin 'x' is unknown; there are: audit"):
        unpin_root(tmp_path, "x")
    unpin_root(tmp_path, "audit")
    assert len(collect_root(tmp_path, POLICY).dropped) == 6


def test_a_pin_keeps_the_files_of_its_record_and_no_later_ones(tmp_path):
    root = Root(tmp_path)
    for number in range(2):
        play(root, [number])
        root.seal()
    root.close()
    pin_root(tmp_path, "early")
    early = set(load_manifest(tmp_path)[0].files)
    root = Root(tmp_path)
    for number in range(2, 4):
        play(root, [number])
        root.seal()
    root.close()
    late = set(load_manifest(tmp_path)[0].files) - early
    assert compact_root(tmp_path, Limits(min_batches=4)) == 4
    quiet = keeping()
    report = collect_root(tmp_path, quiet)
    assert (set(report.files), set(report.waiting_files)) == (late, early)
    # Who reads as of the pinned record still finds what it names.
    assert all((tmp_path / path).exists() for path in early)
    unpin_root(tmp_path, "early")
    assert set(collect_root(tmp_path, quiet).files) == early


def test_what_was_sealed_after_a_pin_is_not_kept_by_it(tmp_path):
    root = Root(tmp_path)
    (early,) = play(root, [90])
    root.seal()
    root.close()
    pin_root(tmp_path, "early")
    updates = aged(tmp_path)
    root = Root(tmp_path)
    root.do(row(0, [*updates[0], early], 1))
    root.close()
    assert set(collect_root(tmp_path, POLICY).dropped) == set(every(updates[:3]))
    assert early in ids_of(tmp_path)


def test_what_was_imported_stays(tmp_path):
    updates = aged(tmp_path / "a")
    export_trajectory(tmp_path / "a", updates[0][0], tmp_path / "f", large_files)
    import_trajectory(tmp_path / "b", tmp_path / "f", large_files)
    assert collect_root(tmp_path / "b", keeping(max_bytes=0, untrained=True)).dropped == {}


def test_part_of_a_batch_goes_when_the_batch_is_written_again(tmp_path):
    root = Root(tmp_path)
    blobs = BlobStore(tmp_path / "blobs")
    ids = play(root, range(5), blobs)
    seq = root.seal(pin=True)
    root.do(row(0, ids[:3], seq))
    root.seal()
    root.close()
    grow_old(tmp_path)
    before = content(tmp_path, ids[3:])
    policy_ = keeping(max_age_s=0.0)
    report = collect_root(tmp_path, policy_)
    assert (set(report.dropped), report.num_rewritten) == (set(ids[:3]), 1)
    (batch,) = recover(tmp_path, False).live.sealed.catalog.batches
    assert batch.files["trajectories"].num_rows == 2
    assert batch.files["snapshots"].num_rows == 4
    assert collect_root(tmp_path, policy_).blobs.keys() == report.waiting_blobs.keys()
    assert len(report.waiting_blobs) == 6
    assert content(tmp_path, ids[3:]) == before
    clean(tmp_path)


def test_a_small_part_of_a_batch_stays_in_its_files_unseen(tmp_path):
    root = Root(tmp_path)
    ids = play(root, range(10))
    root.do(row(0, ids[:1], 1))
    root.seal(pin=True)
    root.close()
    policy_ = keeping(max_age_s=0.0)
    report = collect_root(tmp_path, policy_)
    assert (set(report.dropped), report.num_rewritten) == ({ids[0]}, 0)
    state = recover(tmp_path, True)
    (batch,) = state.live.sealed.catalog.batches
    assert (batch.files["trajectories"].num_rows, len(batch)) == (10, 9)
    assert set(state.live.ids()) == set(ids[1:])
    for table, count in (("trajectories", 9), ("steps", 18), ("segments", 9)):
        statement = f"SELECT count(DISTINCT trajectory), count(*) FROM {table}"
        with query(tmp_path, statement) as answer:
            assert list(answer.rows) == [(9, count)]
    clean(tmp_path)
    # Another one goes: now it is worth while.
    root = Root(tmp_path)
    root.do(row(0, ids[:2], 1))
    root.close()
    assert collect_root(tmp_path, policy_).num_rewritten == 1
    with query(tmp_path, "SELECT count(*) FROM trajectories") as answer:
        assert list(answer.rows) == [(8,)]
    clean(tmp_path)


def test_a_draw_never_misses_what_was_let_go_silently(tmp_path):
    updates = aged(tmp_path)
    collect_root(tmp_path, POLICY)
    state = recover(tmp_path, False)
    sampler, head = Sampler(state.manifest, state.live.sealed.catalog), state.manifest.head.seq
    pinned = state.manifest.pinned_seq
    for seq in range(1, pinned):
        with pytest.raises(StoreError, match=f"trajectories that manifest record {seq} had"):
            sampler.draw(SampleRequest(0, 1, 0), seq)
    for seq in range(pinned, head + 1):
        found = sampler.draw(SampleRequest(0, 6, 0), seq)
        assert {ref.id for ref in found} == set(every(updates[3:]))


def test_what_was_let_go_may_begin_again(tmp_path):
    """Its old frames may still lie in a journal file that something else needs."""
    root = Root(tmp_path)
    paused = header(70)
    root.do(root.live.begin(paused))
    ids = play(root, [0, 1])
    root.seal()
    root.do(row(0, ids, 1))
    root.seal()
    root.close()
    assert set(collect_root(tmp_path, keeping(max_age_s=0.0)).dropped) == set(ids)
    root = Root(tmp_path)
    assert set(root.live.ids()) == {paused.id}
    root.do(root.live.begin(header(0)))
    root.do(root.live.claim(header(0).id, "w"))
    root.do(root.live.append(policy(header(0).id, 1, 0, 9))[0])
    root.close()
    root = Root(tmp_path)
    assert root.live.numbers(header(0).id).epoch == 1
    root.do(root.live.finish(header(0).id, 1, COMPLETED))
    root.seal()
    root.close()
    assert len(StoreReader(tmp_path).read(Ref(header(0).id)).token_ids) == 9
    clean(tmp_path)


def test_a_ledger_does_not_miss_what_was_let_go(tmp_path):
    updates = aged(tmp_path / "store")
    ledger = Ledger(tmp_path / "ledger" / "w.jsonl")
    reader = StoreReader(tmp_path / "store")
    for id in every(updates):
        frame = reader.read(Ref(id))
        _, tokens = reader.read_acknowledged(id, 0)
        assert len(tokens.token_ids) == frame.ref.end
        ledger.write(Ack(id, 0, 0, 5, _hash(tokens, 0, 5)), Ack(id, 0, 5, 45, _hash(tokens, 5, 50)))
    assert compare_ledger(tmp_path / "store", tmp_path / "ledger").is_exact
    collect_root(tmp_path / "store", POLICY)
    assert compare_ledger(tmp_path / "store", tmp_path / "ledger").is_exact


def _hash(tokens, low, high):
    from k3rl.store.tokens import content_hash

    return content_hash(tokens, low, high)


# Blobs


def garbage(tmp_path):
    """A store with one blob that nothing names, marked; its digest."""
    aged(tmp_path)
    digest = BlobStore(tmp_path / "blobs").put(b"nobody's")
    grow_old(tmp_path)
    quiet = keeping()
    assert set(collect_root(tmp_path, quiet).waiting_blobs) == {digest}
    return digest, quiet


def test_a_blob_that_is_put_again_starts_anew(tmp_path):
    digest, quiet = garbage(tmp_path)
    blobs = BlobStore(tmp_path / "blobs")
    assert blobs.put(b"nobody's") == digest
    assert blobs.age(digest)[0] > time.time() - 60
    report = collect_root(tmp_path, quiet)
    assert (report.blobs, set(report.waiting_blobs)) == ({}, {digest})
    assert set(collect_root(tmp_path, quiet).blobs) == {digest}


def test_a_blob_that_is_named_again_starts_anew(tmp_path):
    digest, quiet = garbage(tmp_path)
    root = Root(tmp_path)
    root.do(row(7, [], 1).__class__(**{**_fields(row(7, [], 1)), "checkpoint": digest}))
    root.close()
    report = collect_root(tmp_path, quiet)
    assert (report.blobs, report.waiting_blobs) == ({}, {})
    assert load_manifest(tmp_path)[0].garbage == {}
    assert BlobStore(tmp_path / "blobs").has(digest)


def _fields(carrier):
    return {name: getattr(carrier, name) for name in carrier.__slots__}


def test_a_discard_gives_way_to_a_put(tmp_path):
    blobs = BlobStore(tmp_path)
    digest = blobs.put(b"x")
    assert blobs.discard(digest, time.time() - 3600) == 0
    assert blobs.get(digest) == b"x"
    size = blobs.path(digest).stat().st_size
    assert blobs.discard(digest, time.time() + 3600) == size
    assert not blobs.has(digest)
    assert blobs.discard(digest, time.time() + 3600) == 0
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_a_discard_that_a_crash_ended_is_undone(tmp_path, monkeypatch):
    blobs = BlobStore(tmp_path)
    digest = blobs.put(b"x")

    def killed(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "unlink", killed)
    with pytest.raises(KeyboardInterrupt):
        blobs.discard(digest, time.time() + 3600)
    monkeypatch.undo()
    assert not blobs.has(digest)
    blobs.undo_discards()
    assert blobs.get(digest) == b"x"


def test_a_layer_that_cannot_be_read_stops_the_collection(tmp_path):
    digest, quiet = garbage(tmp_path)
    blobs = BlobStore(tmp_path / "blobs")
    snapshot = next(recover(tmp_path, False).live.all_snapshots())
    path = blobs.path(snapshot.layers[0])
    data = path.read_bytes()
    path.write_bytes(data[:-3])
    with pytest.raises(CorruptData):
        collect_root(tmp_path, quiet)
    path.unlink()
    with pytest.raises(StoreError, match="no such blob"):
        collect_root(tmp_path, quiet)
    assert blobs.has(digest)
    path.write_bytes(data)
    assert set(collect_root(tmp_path, quiet).blobs) == {digest}


def test_without_knowing_layers_blobs_are_left_alone(tmp_path):
    aged(tmp_path)
    blobs = BlobStore(tmp_path / "blobs")
    digests = set(blobs.digests())
    for _ in range(3):
        report = collect_root(tmp_path, replace(POLICY, references=None))
    assert (report.blobs, report.waiting_blobs) == ({}, {})
    assert set(blobs.digests()) == digests


@pytest.mark.parametrize("damage", ["missing", "broken"])
def test_fsck_looks_at_the_large_files_of_layers(tmp_path, damage):
    aged(tmp_path)
    blobs = BlobStore(tmp_path / "blobs")
    layers = {la for s in recover(tmp_path, False).live.all_snapshots() for la in s.layers}
    (digest, *_) = sorted(d for la in layers for d in large_files(blobs.get(la), ""))
    assert check(tmp_path, references=large_files).counts["large_files"] == 13
    path = blobs.path(digest)
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-5])
    unasked = check(tmp_path).findings
    (found,) = check(tmp_path, references=large_files).findings
    assert unasked == ([] if damage == "missing" else [found])
    assert found.file == str(path)


# In the service


def test_the_service_collects_while_it_works(tmp_path, open_store):
    updates = aged(tmp_path / "store")
    kept = every(updates[3:])
    before = content(tmp_path / "store", kept)
    served = replace(POLICY, limits=Limits(min_batches=2, level=1))

    async def go():
        async with open_store(policy=served) as store:
            blobs = BlobStore(tmp_path / "store" / "blobs")
            fresh = blobs.put(b"put while the service runs, named by nothing yet")
            await store.begin([header(80)])
            claim = await claim_one(store)
            id, epoch = claim.header.id, claim.epoch
            await store.commit_step(id, epoch, step(id, epoch, 0, 0, 0))
            pinned = await store.pin("mine")
            await store.unpin("nobody's")
            assert (await store._upkeep.collect()).dropped == {}
            assert await store.pin("mine") == pinned
            await store.unpin("mine")
            reads = [store.read(Ref(one)) for one in every(updates)]
            collecting = asyncio.create_task(store._upkeep.collect())
            found = await asyncio.gather(*reads)
            assert all(len(read.token_ids) == 50 for read in found)
            await store.append(policy(id, epoch, 5, 40))
            await store.commit_step(id, epoch, step(id, epoch, 1, 5, 45))
            assert set((await collecting).dropped) == set(every(updates[:3]))
            report = await store._upkeep.collect()
            assert len(report.files) >= 12
            assert blobs.has(fresh)
            assert fresh not in report.waiting_blobs
            with pytest.raises(StoreError, match="unknown"):
                await store.get(updates[0][0])
            await store.finish(id, epoch, COMPLETED)
            assert await store.sample(SampleRequest(0, 6, 0))
            assert {t.id for t in await store.trajectories()} == {*kept, id}
            stats = await store.stats()
            assert stats.num_deleted_bytes == sum(report.files.values()) + sum(
                report.blobs.values()
            )

    asyncio.run(go())
    assert content(tmp_path / "store", kept) == before
    clean(tmp_path / "store")


def test_what_comes_to_need_something_at_the_last_moment_keeps_it(tmp_path, open_store):
    """It was chosen already when somebody pinned it, or an update named it again."""
    updates = aged(tmp_path / "store")

    async def go():
        async with open_store(policy=POLICY) as store:
            async with store._seal_lock:
                collecting = asyncio.create_task(store._upkeep.collect())
                await asyncio.sleep(0.5)
                await store.record_update(row(6, updates[1], 7))
                assert not collecting.done()
            assert set((await collecting).dropped) == {*updates[0], *updates[2]}
            later = replace(POLICY, checkpoint=lambda: 6)
            store._upkeep.policy = later
            async with store._seal_lock:
                collecting = asyncio.create_task(store._upkeep.collect())
                await asyncio.sleep(0.5)
                state = store._state
                pinned = with_pin(state.next_record(), "p", state.manifest.head.seq + 1)
                state.take(state.manifest.write(pinned), None)
            assert (await collecting).dropped == {}
            await store.unpin("p")
            assert set((await store._upkeep.collect()).dropped) == {*updates[3], *updates[4]}

    asyncio.run(go())
    clean(tmp_path / "store")


def test_a_branch_and_a_drop_at_the_same_time(tmp_path, open_store):
    """Either the child is made and its parent stays, or the parent goes and nothing branches."""
    updates = aged(tmp_path / "store")
    parent = updates[0][0]

    async def go():
        outcomes = set()
        async with open_store(policy=POLICY) as store:
            made = header(81, parent=ParentRef(parent, 0, 25, 1, LineageKind.BRANCH))
            branching = asyncio.create_task(store.branch(made))
            await asyncio.sleep(0)
            report = await store._upkeep.collect()
            await branching
            assert parent not in report.dropped
            assert len(report.dropped) == 5
            assert len((await store.read(Ref(made.id, 0, 5))).token_ids) == 5
            other = header(82, parent=ParentRef(updates[1][0], 0, 25, 1, LineageKind.BRANCH))
            with pytest.raises(StoreError, match="unknown"):
                await store.branch(other)
            store._upkeep.dropping = frozenset([parent])
            with pytest.raises(StoreError, match="being let go"):
                await store.branch(replace(made, key=header(83).key))
        return outcomes

    asyncio.run(go())
    clean(tmp_path / "store")


def test_what_segments_name_is_named(tmp_path):
    """Media and expert ids, which no writer fills in yet."""
    aged(tmp_path)
    blobs = BlobStore(tmp_path / "blobs")
    media, experts = blobs.put(b"an image"), blobs.put(b"expert ids")
    grow_old(tmp_path)
    root = Root(tmp_path)
    play(root, [40])
    root.seal()
    root.close()

    def change(table):
        names = {"media": [[{"index": 0, "blob": bytes.fromhex(media), "grid": [1], "num_features":
                             1}]], "expert_ids": [bytes.fromhex(experts)]}  # fmt: skip
        for name, values in names.items():
            at = table.schema.get_field_index(name)
            field = table.schema.field(at)
            column = pa.array(values * table.num_rows, field.type)
            table = table.set_column(at, field, column)
        return table

    rewrite(tmp_path, "segments", change)
    report = collect_root(tmp_path, keeping())
    assert report.waiting_blobs == {}
    assert blobs.has(media)
    assert blobs.has(experts)
