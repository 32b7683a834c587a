"""Ledgers, and what the comparison finds when a store disagrees with them."""

import asyncio
import errno
import json
import os
import resource

import pytest

from k3rl.errors import CorruptData, StoreError
from k3rl.store.fsck import compare_ledger
from k3rl.store.ledger import Ledger, read_ledgers
from k3rl.store.protocol import Ack
from tests.store.store_builders import claim_one, header, play, policy, step

ACK = Ack("ab" * 16, 0, 5, 64, "cd" * 32)


def test_a_ledger_survives_being_cut_short(tmp_path):
    ledger = Ledger(tmp_path / "w.jsonl")
    ledger.write(ACK)
    ledger.close()
    with open(tmp_path / "w.jsonl", "ab") as file:
        file.write(b'{"id": "abab')
    assert read_ledgers(tmp_path) == {ACK}
    again = Ledger(tmp_path / "w.jsonl")
    again.write(ACK)
    again.write(Ack(ACK.id, 0, 69, 1, ACK.content_hash))
    again.close()
    assert len(read_ledgers(tmp_path)) == 2


def test_several_acknowledgements_are_noted_at_once(tmp_path):
    acks = [Ack(ACK.id, 0, offset, 64, ACK.content_hash) for offset in (5, 69, 133)]
    ledger = Ledger(tmp_path / "w.jsonl")
    ledger.write(*acks)
    ledger.close()
    assert read_ledgers(tmp_path) == set(acks)


def test_sectors_that_were_never_written_are_told_from_damage(tmp_path):
    """The last write may be torn anywhere; before it, zeros are damage."""
    path = tmp_path / "w.jsonl"
    more = [Ack(ACK.id, 0, offset, 64, ACK.content_hash) for offset in range(69, 900, 64)]
    ledger = Ledger(path)
    ledger.write(ACK)
    first = path.stat().st_size
    ledger.write(*more)
    ledger.close()
    whole = path.read_bytes()
    assert read_ledgers(tmp_path) == {ACK, *more}
    for sector in range(0, len(whole), 512):
        low, high = max(sector, first), min(sector + 512, len(whole))
        path.write_bytes(whole[:low] + bytes(high - low) + whole[high:])
        kept = [ack for ack in (ACK, *more) if ack in read_ledgers(tmp_path)]
        assert kept == [ACK, *more][: len(kept)]
        assert len(kept) == whole[:low].count(b"\n")
        again = Ledger(path)
        again.write(more[-1])
        again.close()
        assert read_ledgers(tmp_path) == {*kept, more[-1]}
    path.write_bytes(bytes(first - 1) + whole[first - 1 :])
    with pytest.raises(CorruptData, match=r"w\.jsonl: byte 0: line"):
        read_ledgers(tmp_path)


def test_a_bad_line_is_named(tmp_path):
    (tmp_path / "w.jsonl").write_bytes(b'{"id": "ab"}\n')
    with pytest.raises(CorruptData, match=r"w\.jsonl: byte 0: line"):
        read_ledgers(tmp_path)


@pytest.fixture
def recorded(tmp_path, open_store):
    """A store with a finished, a paused and a branched-off trajectory, and its true ledger."""
    acks = []

    async def go():
        async with open_store() as store:
            await store.begin([header(0), header(1)])
            for n, claim in enumerate(await store.claim("w", 2, [], 5.0)):
                await play(store, claim, note=acks.append, finish=n == 0)
                if n == 1:
                    id, epoch = claim.header.id, claim.epoch
                    acks.append(await store.append(policy(id, epoch, 275, 7)))
                    await store.pause(id, epoch)

    asyncio.run(go())
    return tmp_path / "store", acks


def compare(tmp_path, root, acks):
    folder = tmp_path / "ledger"
    folder.mkdir(exist_ok=True)
    lines = [
        {"id": a.id, "context": a.context, "offset": a.offset, "count": a.count}
        | {"hash": a.content_hash}
        for a in acks
    ]
    (folder / "w.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = compare_ledger(root, folder)
    names = ("lost", "unknown", "duplicated", "mismatched")
    return report, {name: len(getattr(report, name)) for name in names if getattr(report, name)}


def test_an_exact_ledger(recorded, tmp_path):
    report, found = compare(tmp_path, *recorded)
    assert found == {}
    assert report.is_exact
    assert report.num_tokens == 275 + 275 + 7
    assert "0 lost, 0 duplicated" in report.summary()
    root, acks = recorded
    assert compare(tmp_path, root, acks + acks)[0].is_exact


def test_every_disagreement_is_found(recorded, tmp_path):
    root, acks = recorded
    last = acks[-1]
    after = Ack(last.id, 0, last.offset + last.count, 3, last.content_hash)
    assert compare(tmp_path, root, [*acks, after])[1] == {"lost": 1}
    stranger = Ack("0" * 32, 0, 0, 3, last.content_hash)
    assert compare(tmp_path, root, [*acks, stranger])[1] == {"lost": 1}
    assert compare(tmp_path, root, acks[:-1])[1] == {"unknown": 1}
    assert compare(tmp_path, root, acks[:2] + acks[3:])[1] == {"unknown": 1}
    wrong = Ack(last.id, 0, last.offset, last.count, "0" * 64)
    assert compare(tmp_path, root, [*acks[:-1], wrong])[1] == {"mismatched": 1}
    assert compare(tmp_path, root, [*acks, wrong])[1] == {"duplicated": 1}
    part = Ack(last.id, 0, last.offset + 1, 2, last.content_hash)
    assert compare(tmp_path, root, [*acks, part])[1] == {"duplicated": 1}


def test_a_branch_answers_for_its_own_tokens(recorded, tmp_path, open_store):
    from k3rl.types import LineageKind, ParentRef

    root, acks = recorded
    parent = acks[0].id

    async def go():
        async with open_store() as store:
            start = (await store.get(parent)).steps[2].token_start
            ref = ParentRef(parent, 0, start + 10, 2, LineageKind.BRANCH)
            await store.branch(header(7, parent=ref))
            claim = await claim_one(store, "b")
            frame = policy(claim.header.id, claim.epoch, start + 10, 20)
            acks.append(await store.append(frame))
            commit = step(claim.header.id, claim.epoch, 2, start, start + 30)
            acks.extend(await store.commit_step(claim.header.id, claim.epoch, commit))

    asyncio.run(go())
    assert compare(tmp_path, root, acks)[0].is_exact


def test_a_line_that_is_written_in_part_is_not_noted(tmp_path):
    """A file size limit stops in the middle of a line: the first write is short, the next fails."""
    ledger = Ledger(tmp_path / "w.jsonl")
    ledger.write(ACK)
    size = (tmp_path / "w.jsonl").stat().st_size
    more = Ack(ACK.id, 0, 69, 64, ACK.content_hash)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, limits[1]))
    try:
        with pytest.raises(StoreError, match=r"w\.jsonl: cannot note: File too large"):
            ledger.write(more)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "w.jsonl").stat().st_size == size
    assert read_ledgers(tmp_path) == {ACK}
    ledger.write(more)
    assert read_ledgers(tmp_path) == {ACK, more}


def test_a_line_that_cannot_be_cut_off_at_once_is_cut_off_later(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path / "w.jsonl")
    real = os.write

    def refuse(*_arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def write(handle, data):
        monkeypatch.setattr(os, "write", refuse)
        return real(handle, bytes(data)[:7])

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(StoreError, match="cannot note"):
        ledger.write(ACK)
    monkeypatch.undo()
    assert (tmp_path / "w.jsonl").stat().st_size == 7
    ledger.write(ACK)
    assert read_ledgers(tmp_path) == {ACK}


def test_a_short_write_goes_on(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path / "w.jsonl")
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, bytes(data)[:7]))
    ledger.write(ACK)
    monkeypatch.undo()
    assert read_ledgers(tmp_path) == {ACK}
