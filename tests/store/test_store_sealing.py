"""Sealing when the disk, the caller or a row fails: nothing acknowledged is lost or stuck."""

import asyncio
import logging
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from k3rl.errors import StoreError, UserInputError
from k3rl.store import checks
from k3rl.store.fsck import check
from k3rl.store.protocol import Ref, StepFrame, UpdateRow
from tests.store.store_builders import (
    COMPLETED,
    claim_one,
    header,
    played,
    policy,
    service,
    step,
)
from tests.store.store_faults import fail, hold


def open_paths():
    handles = Path("/proc/self/fd").iterdir()
    return [os.readlink(handle) for handle in handles if handle.is_symlink()]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_manifest_record_in_doubt_keeps_what_it_names(tmp_path, open_store, monkeypatch):
    root = tmp_path / "store"

    async def go():
        async with open_store() as store:
            id = await played(store, 0)
            before = await store.read(Ref(id))
            with monkeypatch.context() as patch:
                fail(patch, "fsync", "/_log$")
                with pytest.raises(StoreError, match=r"_log/0+1\.json.*does not confirm"):
                    await store.pin()
            sealed, log = names(root / "sealed"), names(root / "_log")
            assert len(log) == 2
            assert any(name.startswith("segments-") for name in sealed)
            other = await played(store, 1)
            with pytest.raises(StoreError, match="start the run again"):
                await store.pin()
            assert (names(root / "sealed"), names(root / "_log")) == (sealed, log)
            again = await store.read(Ref(id))
            assert again.token_ids.tobytes() == before.token_ids.tobytes()
            with pytest.raises(StoreError, match="start the run again"):
                await store.aclose()
        assert check(root).findings == []
        async with open_store() as store:
            again = await store.read(Ref(id))
            assert again.token_ids.tobytes() == before.token_ids.tobytes()
            assert (await store.get(other)).outcome == COMPLETED
            assert await store.pin() > 1
        assert check(root).findings == []

    asyncio.run(go())


def test_a_record_that_was_not_written_takes_its_files_with_it(tmp_path, open_store, monkeypatch):
    root = tmp_path / "store"

    async def go():
        async with open_store() as store:
            await played(store, 0)
            with monkeypatch.context() as patch:
                fail(patch, "fsync", "/_log/.tmp-")
                with pytest.raises(StoreError, match="cannot write the manifest"):
                    await store.pin()
            assert names(root / "sealed") == []
            assert len(names(root / "_log")) == 1
            assert await store.pin() == 1

    asyncio.run(go())


def test_the_root_stays_locked_while_a_manifest_record_is_written(
    tmp_path, open_store, monkeypatch
):
    """Closing does not seal when the journal is broken, but a pin may still be under way."""
    root = tmp_path / "store"

    async def go():
        async with open_store() as store:
            await played(store, 0)
            with monkeypatch.context() as patch:
                waits, go_on = hold(patch, "fsync", "/_log$")
                pin = asyncio.create_task(store.pin())
                assert await asyncio.to_thread(waits.wait, 10)
                fail(patch, "fdatasync", "/journal/")
                with pytest.raises(StoreError, match="cannot write the journal"):
                    await store.begin([header(1)])
                closing = asyncio.create_task(store.aclose())
                await asyncio.sleep(0.1)
                with pytest.raises(StoreError, match="owns this root"):
                    await asyncio.to_thread(check, root)
                go_on.set()
                await asyncio.gather(pin, closing)
        assert check(root).findings == []

    asyncio.run(go())


@pytest.mark.parametrize("ends", ["pin", "close"])
def test_a_caller_that_goes_away_does_not_wedge_sealing(tmp_path, open_store, monkeypatch, ends):
    """It goes while the record is being written; the root stays locked until that has ended."""
    root = tmp_path / "store"

    async def go():
        async with open_store() as store:
            first = await played(store, 0)
            with monkeypatch.context() as patch:
                waits, go_on = hold(patch, "fsync", "/_log$")
                call = asyncio.create_task(store.pin() if ends == "pin" else store.aclose())
                assert await asyncio.to_thread(waits.wait, 10)
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
                closing = asyncio.create_task(store.aclose()) if ends == "close" else None
                await asyncio.sleep(0.1)
                if closing:
                    assert not closing.done()
                    with pytest.raises(StoreError, match="owns this root"):
                        await asyncio.to_thread(check, root)
                go_on.set()
                if closing:
                    await closing
            if ends == "pin":
                second = await played(store, 1)
                assert await store.pin() >= 2
                await store.read(Ref(second))
        async with open_store() as store:
            await store.read(Ref(first))
        assert check(root).findings == []

    asyncio.run(go())


def test_rows_that_no_table_can_hold_are_refused_before_they_are_journaled(open_store):
    async def go():
        async with open_store(seal_tokens=10) as store:
            await store.begin([header(0)])
            claim = await claim_one(store)
            id, epoch = claim.header.id, claim.epoch
            odd = step(id, epoch, 0, 0, 0)
            far = replace(header(1), iteration=2**63)
            level = replace(header(1), key=replace(header(1).key, level="m\udc80"))
            before = (await store.stats()).num_frames
            for refused in (
                store.append(policy(id, epoch, 0, 20, version=2**31)),
                store.commit_step(
                    id, epoch, StepFrame(replace(odd.step, tree_digest="\udc80"), odd.tokens, None)
                ),
                store.begin([level]),
                store.begin([far]),
                store.claim("w\udc80", 1, [], 0.0),
                store.record_update(UpdateRow(0, 0, 1, 0, "k\udc80", (), (), {}, (), 0.0)),
                store.record_update(UpdateRow(2**63, 0, 1, 0, "k", (), (), {}, (), 0.0)),
            ):
                with pytest.raises(UserInputError):
                    await refused
            assert (await store.stats()).num_frames == before
            await store.append(policy(id, epoch, 0, 20, version=2**31 - 1))
            await store.finish(id, epoch, COMPLETED)
            assert await store.pin() >= 1
            assert (await store.get(id)).num_tokens == 20

    asyncio.run(go())


def test_a_row_that_cannot_be_sealed_is_named(tmp_path, open_store, monkeypatch):
    """Such a row may have been journaled before its check existed."""
    root = tmp_path / "store"

    async def go():
        async with open_store() as store:
            await played(store, 0)
            await store.begin([header(1)])
            claim = await claim_one(store)
            id, epoch = claim.header.id, claim.epoch
            with monkeypatch.context() as patch:
                patch.setattr(checks, "INT32", 2**63)
                await store.append(policy(id, epoch, 0, 20, version=2**31))
            await store.finish(id, epoch, COMPLETED)
            for _ in range(2):
                with pytest.raises(StoreError, match=f"trajectory {id}: cannot be a row of table"):
                    await store.pin()
            assert names(root / "sealed") == []
            with pytest.raises(StoreError, match=id):
                await store.aclose()

    asyncio.run(go())


def test_sealing_goes_on_after_any_error(tmp_path, open_store, monkeypatch, caplog):
    """A fault that no StoreError describes is logged; the next round seals."""
    root = tmp_path / "store"

    async def go():
        async with open_store(seal_tokens=10) as store:
            with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
                fault = threading.Event()

                def link(*_arguments, **_options):
                    fault.set()
                    raise RuntimeError("out of the blue")

                patch.setattr(os, "link", link)
                await played(store, 0)
                assert await asyncio.to_thread(fault.wait, 10)
                await asyncio.sleep(0.1)
            assert "out of the blue" in caplog.text
            await played(store, 1)
            for _ in range(100):
                if names(root / "sealed"):
                    break
                await asyncio.sleep(0.05)
            assert names(root / "sealed")

    asyncio.run(go())


def test_a_read_keeps_its_journal_file_open(tmp_path, valkey, monkeypatch):
    """Sealing forgets the file between the look-up of its handle and the read from it."""

    async def go():
        async with service(tmp_path / "store", valkey) as store:
            id = await played(store, 0)
            before = await store.read(Ref(id))
            journals = names(tmp_path / "store" / "journal")
            real, others = os.pread, []

            def pread(handle, size, offset):
                store._files.forget(journals)
                others.append(os.open("/dev/zero", os.O_RDONLY))
                return real(handle, size, offset)

            with monkeypatch.context() as patch:
                patch.setattr(os, "pread", pread)
                again = await store.read(Ref(id))
            assert again.token_ids.tobytes() == before.token_ids.tobytes()
            for handle in others:
                os.close(handle)

    asyncio.run(go())


def test_a_frame_of_other_tokens_is_not_taken_for_the_right_one(tmp_path, valkey, monkeypatch):
    async def go():
        async with service(tmp_path / "store", valkey) as store:
            id = await played(store, 0, num_steps=3, chunk=50, turn=100)
            extents = store._live.records[id].contexts[0].extents
            wrong = next(e for e in extents if e.num_tokens == 50).place
            real = os.pread

            def pread(handle, size, offset):
                return real(handle, wrong.num_bytes, wrong.offset)

            with monkeypatch.context() as patch:
                patch.setattr(os, "pread", pread)
                with pytest.raises(StoreError, match="other tokens"):
                    await store.read(Ref(id))

    asyncio.run(go())


def test_no_sealed_journal_file_stays_open(tmp_path, open_store, monkeypatch):
    """A read between the decision to delete a file and its end opens it once more."""

    async def go():
        async with open_store() as store:
            id = await played(store, 0)
            pieces = store._live.pieces(id, 0, 0, 5)
            real = Path.unlink

            def unlink(path, *arguments, **options):
                if path.name.startswith("J-"):
                    store._files.load(pieces)
                return real(path, *arguments, **options)

            with monkeypatch.context() as patch:
                patch.setattr(Path, "unlink", unlink)
                await store.pin()
            folder = str(tmp_path / "store" / "journal")
            assert not [p for p in open_paths() if p.startswith(folder) and "deleted" in p]

    asyncio.run(go())
