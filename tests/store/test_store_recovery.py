"""Restarts: what is kept, every crash point of sealing, torn tails, damage, one owner."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from k3rl.errors import CorruptData, Fenced, SchemaTooNew, StoreError
from k3rl.store.fsck import check
from k3rl.store.protocol import Ref, SampleRequest
from k3rl.store.reader import StoreReader
from k3rl.store.recovery import recover
from k3rl.types import LineageKind, ParentRef, TrajectoryState, digest_json
from tests.store.store_builders import (
    COMPLETED,
    claim_one,
    header,
    play,
    played,
    policy,
    service,
    step,
)


def journals(root):
    return sorted((root / "journal").glob("J-*.tj"))


def with_frames(root):
    """Journal files that hold more than their first frame."""
    return [path for path in journals(root) if path.stat().st_size > 200]


async def mixed(store):
    """One finished, one paused with tokens of an unfinished step, one active, one queued."""
    finished = await played(store, 0)
    await store.begin([header(n) for n in (1, 2, 3)])
    paused, active = await store.claim("w", 2, [], 5.0)
    for claim in (paused, active):
        id, epoch = claim.header.id, claim.epoch
        await store.commit_step(id, epoch, step(id, epoch, 0, 0, 0))
        await store.append(policy(id, epoch, 5, 64))
    await store.pause(paused.header.id, paused.epoch)
    return finished, paused, active, header(3).id


def test_a_restart_keeps_everything(open_store):
    async def go():
        async with open_store() as store:
            finished, paused, active, queued = await mixed(store)
            before = [await store.trajectories(), await store.read(Ref(finished))]
            version = await store.next_version(0, digest_json("a"), None)
            cursor = (await store.changes(0, 0.0)).cursor
            seq = await store.pin()
            sample = await store.sample(SampleRequest(0, 1, seed=3))
        async with open_store() as store:
            assert await store.trajectories() == before[0]
            again = await store.read(Ref(finished))
            assert again.token_ids.tobytes() == before[1].token_ids.tobytes()
            assert again.spans == before[1].spans
            assert (await store.changes(cursor, 0.0)).items == ()
            assert await store.next_version(version, digest_json("b"), None) == version + 1
            assert await store.sample(SampleRequest(0, 1, seed=3)) == sample
            assert (await store.stats()).manifest_seq >= seq
            # The worker that held it goes on under its old claim.
            await store.append(policy(active.header.id, active.epoch, 69, 4))
            assert await store.requeue_paused() == 1
            one, two = await store.claim("x", 2, [], 1.0)
            assert [one.header.id, two.header.id] == [paused.header.id, queued]
            assert len(one.tokens.token_ids) == 69
            assert [(a.offset, a.count) for a in one.acks] == [(0, 5), (5, 64)]
            with pytest.raises(Fenced):
                await store.append(policy(one.header.id, paused.epoch, 69, 4))

    asyncio.run(go())


def test_a_branch_of_a_sealed_parent_is_resumed_after_a_restart(tmp_path, open_store):
    async def go():
        async with open_store() as store:
            parent = await played(store, 0, num_steps=4, turn=3000)
            await store.pin()
            at = (await store.get(parent)).steps[2]
            ref = ParentRef(parent, 0, at.token_start + 100, 2, LineageKind.BRANCH)
            child = header(1, parent=ref)
            await store.branch(child)
        async with open_store() as store:
            await store.branch(child)
            claim = await claim_one(store)
            assert claim.header == child
            assert claim.steps == (await store.get(parent)).steps[:2]
            assert claim.snapshot.snapshot_id == claim.steps[1].snapshot_after
            prefix = await store.read(Ref(parent, 0, at.token_start + 100))
            assert claim.tokens.token_ids.tobytes() == prefix.token_ids.tobytes()
            await play(store, claim, num_steps=4, turn=3000)
            before = [await store.get(child.id), await store.read(Ref(child.id))]
        async with open_store() as store:
            assert await store.get(child.id) == before[0]
            again = await store.read(Ref(child.id))
            assert again.token_ids.tobytes() == before[1].token_ids.tobytes()
            assert again.spans == before[1].spans
            # A branch of the sealed branch begins in the tokens of the first parent.
            ref = ParentRef(child.id, 0, at.token_start - 50, 1, LineageKind.BRANCH)
            await store.branch(header(2, parent=ref))
            claim = await claim_one(store)
            count = at.token_start - 50
            assert claim.tokens.token_ids.tobytes() == prefix.token_ids[:count].tobytes()
        assert check(tmp_path / "store").findings == []

    asyncio.run(go())


def test_sealed_journals_go_and_paused_ones_stay(tmp_path, open_store):
    root = tmp_path / "store"

    async def go():
        async with open_store(journal_file_bytes=4000) as store:
            _, paused, active, _ = await mixed(store)
            for n in range(10, 16):
                await played(store, n)
            count = len(journals(root))
            await store.pin()
            assert len(journals(root)) < count / 2
            assert (await store.get(paused.header.id)).state is TrajectoryState.PAUSED
            id, epoch = active.header.id, active.epoch
            await store.commit_step(id, epoch, step(id, epoch, 1, 5, 69))
            await store.finish(id, epoch, COMPLETED)
            await store.requeue_paused()
            for claim in await store.claim("w", 2, [id], 1.0):
                if claim.outcome is None:
                    await play(store, claim)
        assert len(journals(root)) == 1

    asyncio.run(go())
    assert check(root).findings == []


def test_every_crash_point_of_sealing_recovers(tmp_path, open_store, monkeypatch):
    """The root is copied before every call that makes something durable or takes it away."""
    root, copies = tmp_path / "store", []

    def spied(call):
        def spy(*args, **kwargs):
            if root.exists():
                copies.append(shutil.copytree(root, tmp_path / f"crash-{len(copies)}"))
            return call(*args, **kwargs)

        return spy

    async def go():
        async with open_store(journal_file_bytes=6000) as store:
            ids = await mixed(store)
            for n in range(10, 13):
                await played(store, n)
            await store.next_version(0, digest_json("w"), None)
            want = [await store.trajectories(), await store.read(Ref(ids[0]))]
            acked = StoreReader(root).num_acknowledged_tokens(ids[1].header.id)
            with monkeypatch.context() as patch:
                for module, name in (
                    (os, "link"),
                    (os, "fsync"),
                    (os, "fdatasync"),
                    (Path, "unlink"),
                ):
                    patch.setattr(module, name, spied(getattr(module, name)))
                await store.pin()
            return want, ids[1].header.id, acked

    (trajectories, tokens), paused, acked = asyncio.run(go())
    assert len(copies) > 20
    for copy in [*copies, root]:
        state = recover(copy, owner=True)
        assert state.live.listing()() == trajectories
        assert state.last_version == 1
        reader = StoreReader(copy)
        assert (
            reader.read(Ref(trajectories[0].id)).token_ids.tobytes() == tokens.token_ids.tobytes()
        )
        assert reader.num_acknowledged_tokens(paused) == acked
        assert check(copy).findings == []


def test_a_torn_tail_is_set_aside(tmp_path, open_store):
    root = tmp_path / "store"

    async def go():
        async with open_store() as store:
            ids = await mixed(store)
        last = journals(root)[-1]
        whole = last.read_bytes()
        donor = with_frames(root)[0].read_bytes()
        last.write_bytes(whole + donor[:50])
        torn = last.stat().st_size - len(whole)
        assert StoreReader(root).recovery["torn_bytes"] == torn
        assert check(root).findings == []
        async with open_store() as store:
            assert (await store.stats()).recovery["torn_bytes"] == torn
            assert (await store.get(ids[0])).state is TrajectoryState.FINISHED
        assert last.read_bytes() == whole
        (aside,) = (root / "quarantine").iterdir()
        assert aside.stat().st_size == torn
        async with open_store() as store:
            assert (await store.stats()).recovery["torn_bytes"] == 0

    asyncio.run(go())


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def test_a_corrupt_frame_is_named_and_repaired(tmp_path, open_store):
    root = tmp_path / "store"

    async def go():
        async with open_store(journal_file_bytes=2000) as store:
            await mixed(store)
        victim = with_frames(root)[0]
        sizes = {path: path.read_bytes() for path in journals(root)}
        flip(victim, victim.stat().st_size - 3)
        with pytest.raises(CorruptData, match=r"k3rl traj fsck --repair") as caught:
            async with open_store():
                pass
        assert caught.value.file == str(victim)
        assert "\n" not in str(caught.value)
        with pytest.raises(CorruptData):
            StoreReader(root)
        found = check(root).findings
        assert [(f.file, f.offset) for f in found] == [(str(victim), caught.value.offset)]
        repaired = check(root, repair=True).findings
        assert repaired[0].repaired
        assert check(root).findings == []
        moved = sum(path.stat().st_size for path in (root / "quarantine").iterdir())
        left = sum(path.stat().st_size for path in journals(root))
        assert moved + left == sum(map(len, sizes.values()))
        async with open_store() as store:
            assert (await store.get(header(0).id)).state is TrajectoryState.FINISHED
            await played(store, 50)
        assert check(root).findings == []

    asyncio.run(go())


def test_a_missing_journal_is_named(tmp_path, open_store):
    root = tmp_path / "store"

    async def go():
        async with open_store(journal_file_bytes=2000) as store:
            await mixed(store)
        async with open_store(journal_file_bytes=2000) as store:
            for n in (60, 61):
                await store.begin([header(n)])
                await play(store, await claim_one(store, "p"), finish=False)

    asyncio.run(go())
    for path in journals(root)[:-1]:
        kept = path.read_bytes()
        path.unlink()
        with pytest.raises(CorruptData, match="missing"):
            recover(root, owner=False)
        path.write_bytes(kept)
    recover(root, owner=False)


def test_a_damaged_manifest_is_named_and_a_torn_record_set_aside(tmp_path, open_store):
    root = tmp_path / "store"

    async def go():
        async with open_store() as store:
            await played(store, 0)
            await store.pin()
            await played(store, 1)
        records = sorted((root / "_log").iterdir())
        assert len(records) == 3
        for path in records:
            whole = path.read_bytes()
            flip(path, len(whole) // 2)
            with pytest.raises(CorruptData, match="restore it from a copy") as caught:
                StoreReader(root)
            assert caught.value.file == str(path)
            assert check(root).findings
            path.write_bytes(whole)
        kept = records[1].read_bytes()
        records[1].unlink()
        with pytest.raises(CorruptData, match="is missing"):
            StoreReader(root)
        records[1].write_bytes(kept)
        torn = records[-1].with_name(f"{len(records):020d}.json")
        for content in (b"", records[-1].read_bytes()[:40]):
            torn.write_bytes(content)
            async with open_store() as store:
                assert (await store.stats()).recovery["torn_manifest_records"] == 1
                assert len(await store.trajectories(TrajectoryState.FINISHED)) == 2
            assert not torn.exists()

    asyncio.run(go())


def test_a_lost_last_manifest_record_is_noticed(tmp_path, open_store):
    """Its journal files are gone, so it was relied upon: that is damage, not a torn write."""
    root = tmp_path / "store"

    async def go():
        async with open_store() as store:
            await played(store, 0)

    asyncio.run(go())
    record = sorted((root / "_log").iterdir())[-1]
    record.write_bytes(record.read_bytes()[:50])
    with pytest.raises(CorruptData, match="missing"):
        StoreReader(root)


def test_a_corrupt_page_is_named_and_repaired(tmp_path, open_store):
    root = tmp_path / "store"

    async def go():
        async with open_store() as store:
            first = await played(store, 0, turn=2000)
            await store.pin()
            second = await played(store, 1)
            await store.next_version(0, digest_json("w"), None)
        segments = sorted((root / "sealed").glob("segments-*.parquet"))
        flip(segments[0], 1500)
        reader = StoreReader(root)
        reader.read(Ref(second))
        with pytest.raises(CorruptData, match="segments-") as caught:
            reader.read(Ref(first))
        assert caught.value.field.split(".")[0] in ("token_ids", "rollout_logprobs", "loss_mask")
        assert [f.file for f in check(root).findings] == [str(segments[0])]
        check(root, repair=True)
        assert check(root).findings == []
        async with open_store() as store:
            assert [t.id for t in await store.trajectories()] == [second]
            assert await store.next_version(1, digest_json("x"), None) == 2
        assert (root / "quarantine" / segments[0].name).exists()

    asyncio.run(go())


def test_a_newer_table_is_refused(tmp_path, open_store):
    root = tmp_path / "store"

    async def go():
        async with open_store() as store:
            await played(store, 0)

    asyncio.run(go())
    record = sorted((root / "_log").iterdir())[-1]
    import json

    from k3rl.store.manifest import ManifestRecord, sealed_record
    from k3rl.types import canonical_json, from_plain, to_plain

    plain = json.loads(record.read_bytes())
    for file in plain["adds"]:
        file["schema_id"] = file["schema_id"].replace("/1.", "/2.")
    plain = to_plain(sealed_record(from_plain(ManifestRecord, plain)))
    record.write_bytes(canonical_json(plain) + b"\n")
    with pytest.raises(SchemaTooNew, match=r"/2\.\d is newer"):
        StoreReader(root)


def test_one_service_per_root(tmp_path, open_store):
    async def go():
        async with open_store():
            with pytest.raises(StoreError, match=f"pid {os.getpid()}"):
                async with open_store():
                    pass
            with pytest.raises(StoreError, match="owns this root"):
                check(tmp_path / "store", repair=True)
        async with open_store():
            pass

    asyncio.run(go())


def test_a_reader_beside_a_running_service(tmp_path, open_store):
    async def go():
        async with open_store() as store:
            first = await played(store, 0)
            reader = StoreReader(tmp_path / "store")
            before = reader.read(Ref(first))
            await store.pin()
            assert journals(tmp_path / "store")
            after = reader.read(Ref(first))
            assert before.token_ids.tobytes() == after.token_ids.tobytes()
            assert (await store.get(first)) == reader.get(first[:10])
            await played(store, 1)
            reader.refresh()
            assert len(reader.trajectories(TrajectoryState.FINISHED)) == 2
        with pytest.raises(StoreError, match="no trajectory store"):
            StoreReader(tmp_path / "nothing")

    asyncio.run(go())


def test_requests_after_close_are_refused(tmp_path, valkey):
    async def go():
        async with service(tmp_path / "store", valkey) as store:
            waiting = asyncio.create_task(store.claim("w", 1, [], 30.0))
            await asyncio.sleep(0.05)
        assert await asyncio.wait_for(waiting, 5.0) == []
        with pytest.raises(StoreError, match="closed"):
            await store.begin([header(0)])

    asyncio.run(go())


def test_missing_layers_and_orphans_are_found(tmp_path, open_store):
    from k3rl.blobs import BlobStore

    root = tmp_path / "store"
    blobs = BlobStore(root / "blobs")

    async def go():
        layer = blobs.put(b"layer")
        async with open_store() as store:
            await store.begin([header(0)])
            claim = await claim_one(store)
            id, epoch = claim.header.id, claim.epoch
            await store.commit_step(id, epoch, step(id, epoch, 0, 0, 0, layers=[layer]))
            await store.finish(id, epoch, COMPLETED)
        assert check(root).findings == []
        flip(blobs.path(layer), -1)
        assert [f.field for f in check(root).findings] == ["blob"]
        blobs.path(layer).unlink()
        assert "layer of snapshot" in str(check(root).findings[0])
        (root / "sealed" / "segments-99-dead.parquet").write_bytes(b"PAR1")
        async with open_store() as store:
            assert (await store.stats()).recovery["orphans"] == 1

    asyncio.run(go())
