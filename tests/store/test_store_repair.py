"""What `fsck --repair` keeps of a damaged store, and that nothing comes back or repeats."""

import asyncio
import os
import random
import shutil

import pytest

from k3rl.errors import CorruptData, StoreError
from k3rl.store import journal
from k3rl.store.events import KIND_OF, Finished, StepCommitted, VersionRow
from k3rl.store.fsck import check
from k3rl.store.protocol import Ref
from k3rl.store.reader import StoreReader
from k3rl.store.recovery import recover
from k3rl.store.scan import Scan
from k3rl.types import LineageKind, ParentRef, TokenFrame, TrajectoryState, digest_json
from tests.store.store_builders import (
    COMPLETED,
    claim_one,
    header,
    play,
    played,
    policy,
    service,
)
from tests.store.store_faults import flip


def journals(root):
    return sorted((root / "journal").glob("J-*.tj"))


def frames_of(root, kind):
    """(path, place) of all frames of a kind, in order."""
    found = []
    for path in journals(root):
        found += [(path, f.place) for f in Scan(path) if f.kind == KIND_OF[kind]]
    return found


async def begun(store, number, **options):
    """A trajectory that is played but not finished, and its claim."""
    await store.begin([header(number)])
    claim = await claim_one(store, f"w{number}")
    await play(store, claim, finish=False, **options)
    return claim


async def listing(open_store):
    async with open_store() as store:
        return {t.id: (t.state, t.num_tokens) for t in await store.trajectories()}


def test_sealed_files_that_are_gone_come_back_from_the_journal(tmp_path, open_store, monkeypatch):
    """The disk lost them before the journal files went: what a record in doubt may leave."""
    root, copy = tmp_path / "store", tmp_path / "copy"

    async def go():
        async with open_store(journal_file_bytes=4000) as store:
            paused = await begun(store, 0, num_steps=2)
            await store.pause(paused.header.id, paused.epoch)
            first = await played(store, 1)
            await store.pin()
            ids = [await played(store, n) for n in (2, 3)]
            await store.next_version(0, digest_json("w"), None)
            before = {id: (await store.read(Ref(id))).token_ids.tobytes() for id in [first, *ids]}
            real = type(root).unlink

            def unlink(path, *arguments, **options):
                if path.name.startswith("J-") and not copy.exists():
                    shutil.copytree(root, copy)
                return real(path, *arguments, **options)

            monkeypatch.setattr(type(root), "unlink", unlink)
            await store.pin()
            monkeypatch.undo()
        return before

    before = asyncio.run(go())
    newest = sorted((copy / "sealed").glob("*-00000002-*"))
    assert {path.name.split("-")[0] for path in newest} >= {"segments", "steps", "versions"}
    for path in newest[1:]:
        path.unlink()
    flip(newest[0], 10)
    with pytest.raises(CorruptData, match=r"sealed/.*k3rl traj fsck --repair"):
        StoreReader(copy)
    findings = check(copy, repair=True).findings
    assert len(findings) == len(newest)
    assert all("the journal still has all of it" in str(f) for f in findings)
    assert check(copy).findings == []
    shutil.rmtree(root)
    os.rename(copy, root)

    async def again():
        async with open_store() as store:
            for id, tokens in before.items():
                assert (await store.read(Ref(id))).token_ids.tobytes() == tokens
            assert await store.next_version(1, digest_json("x"), None) == 2
            await store.pin()
            for id, tokens in before.items():
                assert (await store.read(Ref(id))).token_ids.tobytes() == tokens

    asyncio.run(again())
    assert check(root).findings == []


@pytest.mark.parametrize("has_more", [False, True])
def test_a_dropped_trajectory_begun_again_keeps_its_new_tokens(tmp_path, open_store, has_more):
    root = tmp_path / "store"

    async def go():
        async with open_store(journal_file_bytes=4000) as store:
            id = await played(store, 0, turn=2000)
            keep = await begun(store, 9, num_steps=1)
            await store.pause(keep.header.id, keep.epoch)
            await store.pin()
        flip(next((root / "sealed").glob("segments-*")), 1500)
        assert id in str(check(root, repair=True).findings[0])
        async with open_store() as store:
            claim = await begun(store, 0, num_steps=2)
            assert claim.header.id == id
            await store.pause(id, claim.epoch)
            await played(store, 20)
            await store.pin()
            want = (await store.read(Ref(id))).token_ids.tobytes()
            count = (await store.get(id)).num_tokens
            if has_more:
                await store.requeue_paused()
                for claim in await store.claim("w", 2, [], 1.0):
                    if claim.header.id == id:
                        await store.append(policy(id, claim.epoch, count, 8))
        async with open_store() as store:
            assert (await store.read(Ref(id))).token_ids.tobytes() == want
            assert len(want) == 4 * count > 0
            await store.requeue_paused()
            for claim in await store.claim("w", 2, [], 1.0):
                await play(store, claim, num_steps=4)
        # Sealed again, it is not taken for what the repair gave up either.
        async with open_store() as store:
            assert (await store.get(id)).state is TrajectoryState.FINISHED
            assert (await store.read(Ref(id, 0, count))).token_ids.tobytes() == want
        assert check(root).findings == []

    asyncio.run(go())


async def busy(root, open_store):
    """Paused, active and sealed ones, versions and a cursor, in many journal files, as a kill
    leaves them."""
    async with open_store(journal_file_bytes=3000, seal_tokens=10**9) as store:
        for n in (0, 1):
            claim = await begun(store, n, num_steps=2)
            await store.pause(claim.header.id, claim.epoch)
        await played(store, 2)
        await store.pin()
        for n in (3, 4):
            await begun(store, n)
            await played(store, n + 2)
        versions = [await store.next_version(0, digest_json(n), None) for n in range(5)]
        await begun(store, 7)
        cursor = (await store.changes(0, 0.0)).cursor
        before = {t.id: (t.state, t.num_tokens) for t in await store.trajectories()}
        killed = shutil.copytree(root, root.with_name("killed"))
    shutil.rmtree(root)
    killed.rename(root)
    return before, versions[-1], cursor


async def check_goes_on(open_store, version, cursor, most=20):
    """Versions do not repeat, and whoever waits behind the old cursor sees what happens next."""
    async with open_store() as store:
        assert version < await store.next_version(version, digest_json("n"), None) <= version + most
        id = await played(store, 50)
        changed = await store.changes(cursor, 0.0)
        assert (id, TrajectoryState.FINISHED) in changed.items
        assert changed.cursor > cursor
        await store.pin()


def test_only_the_trajectory_that_misses_a_frame_is_given_up(tmp_path, open_store):
    root = tmp_path / "store"

    async def go():
        before, version, cursor = await busy(root, open_store)
        path, place = frames_of(root, TokenFrame)[0]
        victim = header(0).id
        flip(path, place.offset + place.num_bytes - 20)
        with pytest.raises(CorruptData, match="fsck --repair"):
            StoreReader(root)
        assert victim in str(check(root, repair=True).findings[0])
        assert check(root).findings == []
        del before[victim]
        assert await listing(open_store) == before
        await check_goes_on(open_store, version, cursor)
        assert check(root).findings == []
        async with open_store() as store:
            claim = await begun(store, 0, num_steps=3)
            await store.pause(victim, claim.epoch)
        assert (await listing(open_store))[victim] == (TrajectoryState.PAUSED, 275)

    asyncio.run(go())


def test_a_frame_of_a_sealed_trajectory_is_missed_by_nobody(tmp_path, open_store):
    """It lies in a file that stays for the sake of a paused trajectory."""
    root = tmp_path / "store"

    async def go():
        async with open_store() as store:
            claim = await begun(store, 0, num_steps=2)
            await store.pause(claim.header.id, claim.epoch)
            sealed = await played(store, 1)
            await store.pin()
        before = await listing(open_store)
        path, place = frames_of(root, TokenFrame)[-1]
        flip(path, place.offset + place.num_bytes - 20)
        assert "given up: no trajectory" in str(check(root, repair=True).findings[0])
        assert check(root).findings == []
        assert await listing(open_store) == before
        async with open_store() as store:
            await store.read(Ref(sealed))

    asyncio.run(go())


@pytest.mark.parametrize(
    "damage", ["a header", "a version", "rest of a file", "a file", "the last files"]
)
def test_damage_of_unknown_length_rewinds_no_number(tmp_path, open_store, damage):
    root = tmp_path / "store"

    async def go():
        before, version, cursor = await busy(root, open_store)
        path, place = frames_of(root, VersionRow)[-1 if damage == "a version" else 0]
        if damage == "a header":
            flip(path, place.offset + 9)
        elif damage == "a version":
            flip(path, place.offset + place.num_bytes - 20)
        elif damage == "the last files":
            for path in journals(root)[-8:]:
                path.write_bytes(b"\xff" * path.stat().st_size)
        elif damage == "a file":
            path = journals(root)[journals(root).index(path) - 1]
            path.unlink()
        else:
            data = path.read_bytes()
            path.write_bytes(data[: place.offset] + b"\xff" * (len(data) - place.offset))
        with pytest.raises(CorruptData):
            StoreReader(root)
        assert check(root, repair=True).findings
        assert check(root).findings == []
        found = await listing(open_store)
        for id, (state, num_tokens) in found.items():
            assert num_tokens <= before[id][1]
            assert state is not TrajectoryState.FINISHED or before[id] == (state, num_tokens)
        assert len(found) >= 3
        # How many versions unreadable bytes held is bounded by their number only.
        most = 1000 if damage == "the last files" else 20
        await check_goes_on(open_store, version, cursor, most)
        assert check(root).findings == []

    asyncio.run(go())


def test_a_lost_end_is_kept_as_it_was_before(tmp_path, open_store):
    """Nothing follows the lost frame, so the trajectory is whole up to there, and goes on."""
    root = tmp_path / "store"

    async def go():
        async with open_store(seal_tokens=10**9) as store:
            claim = await begun(store, 0)
            await store.finish(claim.header.id, claim.epoch, COMPLETED)
            shutil.copytree(root, tmp_path / "copy")
        shutil.rmtree(root)
        os.rename(tmp_path / "copy", root)
        path, place = frames_of(root, Finished)[0]
        flip(path, place.offset + 30)
        check(root, repair=True)
        id = claim.header.id
        assert await listing(open_store) == {id: (TrajectoryState.ACTIVE, 275)}
        async with open_store() as store:
            await store.finish(id, claim.epoch, COMPLETED)
        assert await listing(open_store) == {id: (TrajectoryState.FINISHED, 275)}

    asyncio.run(go())


@pytest.mark.parametrize("is_child_sealed", [False, True])
def test_what_branched_off_a_dropped_trajectory_goes_with_it(tmp_path, open_store, is_child_sealed):
    root = tmp_path / "store"

    async def go():
        async with open_store() as store:
            id = await played(store, 0, turn=2000)
            await store.pin()
            at = (await store.get(id)).steps[2].token_start + 3
            child = header(1, parent=ParentRef(id, 0, at, 2, LineageKind.BRANCH))
            await store.branch(child)
            claim = await claim_one(store, "b")
            await play(store, claim, num_steps=4, finish=is_child_sealed)
            if not is_child_sealed:
                await store.pause(child.id, claim.epoch)
            end = (await store.get(child.id)).steps[3].token_end
            other = await played(store, 5) if not is_child_sealed else None
            grandchild = header(2, parent=ParentRef(child.id, 0, end, 4, LineageKind.BRANCH))
            await store.branch(grandchild)
        flip(next((root / "sealed").glob("segments-00000001*")), 1500)
        said = " ".join(str(found) for found in check(root, repair=True).findings)
        assert id in said
        assert f"trajectory {child.id}: its parent is gone -> given up" in said
        assert check(root).findings == []
        assert [t.id for t in StoreReader(root).trajectories()] == [other] * (other is not None)
        async with open_store() as store:
            await store.pin()
            await played(store, 6)
            assert len(await store.trajectories()) == 1 + (other is not None)
            # The whole family may be begun again.
            assert await played(store, 0) == id
            await store.pin()
            at = (await store.get(id)).steps[2].token_start + 3
            again = header(1, parent=ParentRef(id, 0, at, 2, LineageKind.BRANCH))
            await store.branch(again)
            await play(store, await claim_one(store, "b"), num_steps=4)
        assert len(await listing(open_store)) == 3 + (other is not None)
        assert check(root).findings == []

    asyncio.run(go())


def test_a_repair_that_was_interrupted_is_made_again(tmp_path, open_store, monkeypatch):
    root = tmp_path / "store"

    async def go():
        before, version, cursor = await busy(root, open_store)
        path, place = frames_of(root, TokenFrame)[0]
        flip(path, place.offset + place.num_bytes - 20)
        with monkeypatch.context() as patch:

            def replace(*_arguments):
                raise OSError(28, "No space left on device", str(path))

            patch.setattr(os, "replace", replace)
            with pytest.raises(StoreError, match="No space left"):
                check(root, repair=True)
        assert check(root).findings
        check(root, repair=True)
        assert check(root).findings == []
        del before[header(0).id]
        assert await listing(open_store) == before
        await check_goes_on(open_store, version, cursor)

    asyncio.run(go())


def test_a_repair_is_only_suggested_where_it_acts(tmp_path, open_store):
    root = tmp_path / "store"

    async def go():
        async with open_store() as store:
            claim = await begun(store, 0)
            await store.pause(claim.header.id, claim.epoch)
            await played(store, 1)

    asyncio.run(go())
    journals(root)[0].unlink()
    with pytest.raises(CorruptData, match=r"missing; restore it from a copy"):
        StoreReader(root)


def test_a_length_is_trusted_only_with_its_header():
    frame = journal.pack(6, 1, b"{}")
    assert journal.frame_bytes(frame, 0) == len(frame)
    for at in range(journal.HEADER_BYTES):
        damaged = bytearray(frame)
        damaged[at] ^= 1
        assert journal.frame_bytes(bytes(damaged), 0) is None


@pytest.mark.parametrize("is_owner_known", [True, False])
def test_a_step_lost_before_the_end_does_not_pass_for_a_whole_trajectory(
    tmp_path, open_store, is_owner_known
):
    """What follows it would fit: tokens of an unfinished step are committed by `finish`.

    The other one is being written too, but a later commit shows that it lost nothing.
    """
    root = tmp_path / "store"

    async def go():
        async with open_store(seal_tokens=10**9) as store:
            other = await begun(store, 1, num_steps=1)
            id = await played(store, 0)
            await play(store, other, num_steps=2)
            killed = shutil.copytree(root, tmp_path / "killed")
        shutil.rmtree(root)
        killed.rename(root)
        steps = frames_of(root, StepCommitted)
        path, place = next(f for f in steps[::-1] if id.encode() in bytes_of(*f))
        at = bytes_of(path, place).rindex(b"generate_s")
        flip(path, place.offset + (at if is_owner_known else 9))
        with pytest.raises(CorruptData):
            StoreReader(root)
        assert f"given up: {id}" in str(check(root, repair=True).findings[0])
        assert await listing(open_store) == {
            other.header.id: (TrajectoryState.FINISHED, 140),
        }

    asyncio.run(go())


def bytes_of(path, place):
    return path.read_bytes()[place.offset : place.offset + place.num_bytes]


@pytest.mark.parametrize("seed", range(30))
def test_what_is_kept_of_any_damage_is_whole(tmp_path, damaged_root, seed):
    """Bytes flipped, zeroed or cut out anywhere in the journal, up to three times."""
    source, before = damaged_root
    root, rng = tmp_path / "store", random.Random(seed)
    shutil.copytree(source, root)
    for _ in range(rng.randint(1, 3)):
        path = rng.choice([p for p in journals(root) if p.stat().st_size])
        data = bytearray(path.read_bytes())
        at, count = rng.randrange(len(data)), rng.choice([1, 1, 40, 2000])
        match rng.choice(["flip", "zero", "cut"]):
            case "flip":
                data[at] ^= 1 << rng.randrange(8)
            case "zero":
                data[at : at + count] = bytes(len(data[at : at + count]))
            case "cut":
                del data[at : at + count]
        path.write_bytes(data)
    check(root, repair=True)
    assert check(root).findings == []
    state = recover(root, owner=True)
    assert state.last_version >= before.state.last_version
    # A frame that the very end cuts short was never acknowledged.
    assert state.recovery["torn_bytes"] or state.last_sequence >= before.state.last_sequence
    reader = StoreReader(root)
    for found in reader.trajectories():
        whole = before.get(found.id)
        if found.state is TrajectoryState.FINISHED:
            assert found == whole
        assert found.steps == whole.steps[: len(found.steps)]
        tokens = reader.read(Ref(found.id)).token_ids
        wanted = before.read(Ref(found.id, 0, len(tokens))).token_ids
        assert tokens.tobytes() == wanted.tobytes()


@pytest.fixture(scope="module")
def damaged_root(tmp_path_factory, valkey):
    """A store as a kill leaves it, and what it holds."""
    root = tmp_path_factory.mktemp("whole") / "store"

    def open_store(**options):
        return service(root, valkey, **options)

    asyncio.run(busy(root, open_store))
    return root, StoreReader(root)
