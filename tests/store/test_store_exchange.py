"""One trajectory as one file: everything comes back, and nothing that is amiss comes in."""

import asyncio
import json
import os
import re
import signal
import struct
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from k3rl.blobs import BlobStore
from k3rl.errors import CorruptData, SchemaTooNew, StoreError, UserInputError
from k3rl.sandboxes.files.layers import large_files, layer_of_files
from k3rl.sandboxes.files.layers import pack as pack_layer
from k3rl.store.audit import compare_ledger
from k3rl.store.exchange import export_trajectory, import_trajectory
from k3rl.store.fsck import check
from k3rl.store.ledger import Ledger
from k3rl.store.manifest import load_manifest
from k3rl.store.parcel import Kind, pack
from k3rl.store.parquet import read_rows
from k3rl.store.protocol import Ref, SampleRequest, SampleUnit
from k3rl.store.reader import StoreReader
from k3rl.store.sections import END, SectionFile, SectionWriter
from k3rl.types import LineageKind, ParentRef, digest_bytes, digest_json
from tests.store.store_builders import COMPLETED, claim_one, header, play, played, policy, step
from tests.store.store_faults import fail, flip
from tests.store.store_golden import branch, cut_off, two_contexts

BIG = bytes(range(256)) * 100
SMALL = Path(__file__).parents[1] / "data" / "store" / "branch-1.k3t"
"""A file of few bytes, with sections of every kind."""


def layer(blobs, number):
    """A real layer: one small file inside, one large one as a blob of its own."""
    files = {"small": b"%d" % number, "big": BIG + b"%d" % number}
    made, contents = layer_of_files(files)
    for entry in made.large_files():
        blobs.put(contents[entry.digest])
    return blobs.put(pack_layer(made.entries, made.inline))


async def with_layers(store, number=0, num_steps=3, blobs=None):
    """A finished trajectory whose every step adds a layer."""
    await store.begin([header(number)])
    claim = await claim_one(store)
    id, epoch, acked, layers = claim.header.id, claim.epoch, 0, []
    for index in range(num_steps):
        start = acked
        if index:
            await store.append(policy(id, epoch, acked, 30))
            acked += 30
        layers.append(layer(blobs, index))
        await store.commit_step(id, epoch, step(id, epoch, index, start, acked, layers=layers))
        acked += 5
    await store.finish(id, epoch, COMPLETED)
    return id


def filled(tmp_path, open_store, fill):
    """Run `fill(store)` on a fresh root; returns (root, what it returned)."""

    async def go():
        async with open_store() as store:
            return await fill(store)

    return tmp_path / "store", asyncio.run(go())


@pytest.fixture
def exported(tmp_path, open_store):
    """(root, id, file) of a trajectory with layers and large files."""
    blobs = BlobStore(tmp_path / "store" / "blobs")
    root, id = filled(tmp_path, open_store, lambda s: with_layers(s, blobs=blobs))
    export_trajectory(root, id, tmp_path / "one.k3t", large_files)
    return root, id, tmp_path / "one.k3t"


def content(root, id):
    """All that a reader gives of a trajectory, blobs included."""
    reader, blobs = StoreReader(root), BlobStore(root / "blobs")
    found = reader.get(id)
    reads = [reader.read(Ref(id, context=context)) for context in range(found.num_contexts)]
    arrays = [(r.token_ids, r.loss_mask, r.rollout_logprobs) for r in reads]
    snapshots = [reader.snapshot(s.snapshot_after) for s in found.steps if s.snapshot_after]
    return (
        found,
        [[array.tobytes() for array in three] for three in arrays],
        [read.spans for read in reads],
        snapshots,
        [blobs.get(layer) for snapshot in snapshots for layer in snapshot.layers],
    )


def log_of(root):
    """The manifest records of a root."""
    return sorted(path.name for path in (root / "_log").glob("[0-9]*"))


# There and back


async def every_kind(store, blobs):
    ids = [await two_contexts(store, (layer(blobs, 0), layer(blobs, 1)))]
    await branch(store, ids[0])
    await cut_off(store)
    await store.begin([header(3)])
    claim = await claim_one(store)
    await store.finish(claim.header.id, claim.epoch, COMPLETED)
    await played(store, 4, num_steps=4, turn=9000, chunk=3000)
    await store.begin([header(5)])
    claim = await claim_one(store)
    await store.append(policy(claim.header.id, claim.epoch, 0, 3, context=1))
    await store.finish(claim.header.id, claim.epoch, COMPLETED)
    return [t.id for t in await store.trajectories()]


@pytest.mark.parametrize("is_sealed", [True, False])
def test_everything_comes_back_and_goes_out_again_as_the_same_bytes(
    tmp_path, open_store, is_sealed
):
    blobs = BlobStore(tmp_path / "store" / "blobs")
    root, new = tmp_path / "store", tmp_path / "new"

    async def go():
        async with open_store() as store:
            ids = await every_kind(store, blobs)
            if is_sealed:
                await store.pin()
            # A reader beside the service: what is not sealed comes from the journal.
            return [export_trajectory(root, id, tmp_path / id, large_files) for id in ids]

    reports = asyncio.run(go())
    assert len(reports) == 6
    for report in reports:
        file = tmp_path / report.id
        assert report.num_bytes == file.stat().st_size
        assert import_trajectory(new, file, large_files) == report
        assert content(new, report.id) == content(root, report.id)
        export_trajectory(new, report.id, tmp_path / "again", large_files)
        assert (tmp_path / "again").read_bytes() == file.read_bytes()
        (tmp_path / "again").unlink()
    assert check(new).findings == []
    assert [t.id for t in StoreReader(new).trajectories()] == [r.id for r in reports]
    assert reports[0].num_blobs == 4
    assert reports[4].num_tokens == 5 + 3 * 9005


def test_large_files_of_layers_travel(exported, tmp_path):
    _, _, file = exported
    report = import_trajectory(tmp_path / "new", file, large_files)
    assert (report.num_snapshots, report.num_blobs) == (3, 6)
    blobs = BlobStore(tmp_path / "new" / "blobs")
    for number in range(3):
        data = BIG + b"%d" % number
        assert blobs.get(digest_bytes(data)) == data


def test_a_branch_stands_by_itself_and_names_its_parent(tmp_path, open_store):
    async def fill(store):
        parent = await two_contexts(store, ())
        await branch(store, parent)
        return parent, (await store.trajectories())[1].id

    root, (parent, child) = filled(tmp_path, open_store, fill)
    export_trajectory(root, child, tmp_path / "child", large_files)
    import_trajectory(tmp_path / "new", tmp_path / "child", large_files)
    reader = StoreReader(tmp_path / "new")
    assert [t.id for t in reader.trajectories()] == [child]
    found = reader.get(child)
    assert found.header.parent == ParentRef(parent, 0, 30, 1, LineageKind.BRANCH)
    assert [s.index for s in found.steps] == [0, 1]
    assert reader.read(Ref(child)).ref.end == 45
    assert check(tmp_path / "new").findings == []


def test_a_service_goes_on_from_what_was_imported(exported, tmp_path, open_store, valkey):
    from tests.store.store_builders import service

    root, id, file = exported
    import_trajectory(tmp_path / "new", file, large_files)

    async def go():
        async with service(tmp_path / "new", valkey) as store:
            assert await store.claim("w", 9, [], 0.0) == []
            assert [found for found, _ in (await store.changes(0, 0.0)).items] == [id]
            await store.begin([header(0)])
            at = (await store.get(id)).steps[2].token_start
            child = header(1, parent=ParentRef(id, 0, at, 2, LineageKind.BRANCH))
            await store.branch(child)
            await play(store, await claim_one(store), num_steps=4)
            await store.pin()
            assert (await store.get(child.id)).steps[:2] == (await store.get(id)).steps[:2]
        assert check(tmp_path / "new").findings == []

    asyncio.run(go())
    assert content(tmp_path / "new", id) == content(root, id)


def test_imports_beside_unfinished_work(exported, tmp_path, open_store, valkey):
    """What is in the journal of the other store, a torn end included, is as it was."""
    from tests.store.store_builders import service

    _, id, file = exported
    new = tmp_path / "new"

    async def before():
        async with service(new, valkey) as store:
            await store.begin([header(7)])
            claim = await claim_one(store)
            await play(store, claim, num_steps=2, finish=False)
            await store.pause(claim.header.id, claim.epoch)
            return claim.header.id, await store.get(claim.header.id)

    other, stood = asyncio.run(before())
    newest = sorted((new / "journal").iterdir())[-1]
    newest.write_bytes(newest.read_bytes() + b"K3T")
    import_trajectory(new, file, large_files)
    assert StoreReader(new).get(other) == stood

    async def after():
        async with service(new, valkey) as store:
            await store.requeue_paused()
            await play(store, await claim_one(store), num_steps=4)
            return [t.id for t in await store.trajectories()]

    assert sorted(asyncio.run(after())) == sorted([other, id])
    assert check(new).findings == []


def test_ledgers_do_not_judge_what_was_imported(exported, tmp_path, open_store, valkey):
    from tests.store.store_builders import service

    _, id, file = exported
    new = tmp_path / "new"
    import_trajectory(new, file, large_files)

    async def go():
        ledger = Ledger(tmp_path / "ledger" / "w.jsonl")
        async with service(new, valkey) as store:
            await store.begin([header(5)])
            await play(store, await claim_one(store), note=ledger.write)
        ledger.close()

    asyncio.run(go())
    report = compare_ledger(new, tmp_path / "ledger")
    assert report.is_exact
    assert report.num_trajectories == 1
    origins = {}
    for _, file in load_manifest(new)[0].files_of("trajectories"):
        rows = read_rows(new, file, ["trajectory", "origin"])
        origins |= {row["trajectory"].hex(): row["origin"] for row in rows}
    assert origins.pop(id) is not None
    assert list(origins.values()) == [None]


def test_what_was_imported_is_never_drawn(exported, tmp_path, valkey):
    from tests.store.store_builders import service

    _, id, file = exported
    new = tmp_path / "new"
    import_trajectory(new, file, large_files)

    async def go():
        async with service(new, valkey) as store:
            own = await played(store, 5)
            await store.pin()
            for unit in SampleUnit:
                window = 1 if unit is SampleUnit.TOKEN else None
                requests = [SampleRequest(n, 1, 0, unit=unit, window=window) for n in range(8)]
                drawn = [ref.id for request in requests for ref in await store.sample(request)]
                assert set(drawn) == {own}
            with pytest.raises(StoreError, match="2 asked for, 1 can be drawn"):
                await store.sample(SampleRequest(0, 2, 0))
            with pytest.raises(StoreError, match="1 asked for, 0 can be drawn"):
                await store.sample(SampleRequest(0, 1, 0, weights={id: 1.0}))

    asyncio.run(go())


def test_a_repair_does_not_look_for_it_in_the_journal(exported, tmp_path, valkey):
    """Neither when its own batch is broken, nor when one sealed just before it is."""
    from tests.store.store_builders import service

    _, id, file = exported
    for number in (1, 2):
        new = tmp_path / str(number)

        async def go(root=new):
            async with service(root, valkey) as store:
                return await played(store, 5)

        own = asyncio.run(go())
        import_trajectory(new, file, large_files)
        (path,) = (new / "sealed").glob(f"steps-{number:08d}-*")
        flip(path, 40)
        report = check(new, repair=True)
        wanted = own if number == 1 else id
        assert [f.repaired.endswith(f"given up: {wanted}") for f in report.findings] == [True]
        assert {t.id for t in StoreReader(new).trajectories()} == {own, id} - {wanted}
        assert check(new).findings == []


# Again, and against what is there


def test_importing_again_is_a_no_op(exported, tmp_path):
    root, _, file = exported
    new = tmp_path / "new"
    assert import_trajectory(new, file, large_files).is_new
    for store in (new, root):
        before = log_of(store)
        assert not import_trajectory(store, file, large_files).is_new
        assert log_of(store) == before


def test_what_cannot_be_read_does_not_pass_for_unknown(exported, tmp_path):
    """Neither the trajectory nor its snapshots: both are read only when they are asked for."""
    for table, column in (("trajectories", "header_json"), ("snapshots", "session_json")):
        new = tmp_path / table
        import_trajectory(new, exported[2], large_files)
        (path,) = (new / "sealed").glob(f"{table}-*")
        group = pq.read_metadata(path).row_group(0)
        chunks = [group.column(n) for n in range(group.num_columns)]
        (chunk,) = (chunk for chunk in chunks if chunk.path_in_schema == column)
        flip(path, chunk.data_page_offset + chunk.total_compressed_size - 4)
        before = log_of(new)
        with pytest.raises(CorruptData, match=column):
            import_trajectory(new, exported[2], large_files)
        assert log_of(new) == before


def test_importing_again_brings_back_blobs(exported, tmp_path):
    root, id, file = exported
    blobs = BlobStore(root / "blobs")
    before = content(root, id)
    for digest in list(blobs.digests()):
        blobs.path(digest).unlink()
    assert not import_trajectory(root, file, large_files).is_new
    assert content(root, id) == before


def test_another_trajectory_of_that_name_is_refused(exported, tmp_path, valkey):
    from tests.store.store_builders import service

    _, id, file = exported
    new = tmp_path / "new"

    async def begun(finish):
        async with service(new, valkey) as store:
            await store.begin([header(0)])
            claim = await claim_one(store)
            if finish:
                await play(store, claim, num_steps=1)
            else:
                await store.pause(claim.header.id, claim.epoch)
                await store.requeue_paused()

    for finish, match in ((False, "exists here and is paused"), (True, "with another content")):
        asyncio.run(begun(finish))
        before = StoreReader(new).get(id)
        with pytest.raises(StoreError, match=f"{id} exists here|snapshot .* {match}") as error:
            import_trajectory(new, file, large_files)
        assert match in str(error.value)
        assert StoreReader(new).get(id) == before
        assert list(BlobStore(new / "blobs").digests()) == []


def test_another_snapshot_of_that_name_is_refused(exported, tmp_path, valkey):
    from tests.store.store_builders import service

    _, id, file = exported
    new = tmp_path / "new"

    async def go():
        async with service(new, valkey) as store:
            await store.begin([header(9)])
            claim = await claim_one(store)
            taken = step(id, claim.epoch, 0, 0, 0)
            mine = step(claim.header.id, claim.epoch, 0, 0, 0)
            after = replace(mine.step, snapshot_after=taken.snapshot.snapshot_id)
            frame = replace(mine, step=after, snapshot=replace(taken.snapshot, num_bytes=1))
            await store.commit_step(claim.header.id, claim.epoch, frame)

    asyncio.run(go())
    with pytest.raises(StoreError, match=r"snapshot snap-\S+ exists here with another content"):
        import_trajectory(new, file, large_files)


def test_a_root_in_use_is_left_alone(exported, tmp_path, valkey):
    from tests.store.store_builders import service

    _, _, file = exported

    async def go():
        async with service(tmp_path / "new", valkey):
            with pytest.raises(StoreError, match="owns this root"):
                await asyncio.to_thread(import_trajectory, tmp_path / "new", file, large_files)

    asyncio.run(go())


# Refusals of an export


def test_only_finished_trajectories_are_exported(tmp_path, open_store):
    async def go():
        async with open_store() as store:
            await store.begin([header(0)])
            path = tmp_path / "f"
            with pytest.raises(StoreError, match="is queued: only finished"):
                export_trajectory(tmp_path / "store", header(0).id, path, large_files)
            with pytest.raises(StoreError, match="unknown"):
                export_trajectory(tmp_path / "store", "ff", path, large_files)
            assert not path.exists()

    asyncio.run(go())


def test_a_file_that_exists_is_never_replaced(exported, tmp_path):
    root, id, file = exported
    before = file.read_bytes()
    with pytest.raises(UserInputError, match="exists"):
        export_trajectory(root, id, file, large_files)
    assert file.read_bytes() == before
    with pytest.raises(StoreError, match="cannot write: No such file"):
        export_trajectory(root, id, tmp_path / "nowhere" / "f", large_files)


def test_an_export_that_fails_leaves_nothing(exported, tmp_path, monkeypatch):
    root, id, _ = exported
    place = tmp_path / "out"
    place.mkdir()
    with monkeypatch.context() as patch:
        fail(patch, "fsync", r"/out/\.f\.")
        with pytest.raises(StoreError, match="cannot write: Input/output error"):
            export_trajectory(root, id, place / "f", large_files)
    blobs = BlobStore(root / "blobs")
    lost = blobs.path(digest_bytes(BIG + b"1"))
    lost.unlink()
    with pytest.raises(StoreError, match=re.escape(str(lost))):
        export_trajectory(root, id, place / "f", large_files)
    assert list(place.iterdir()) == []


# Damage


def refused(path, root, error=CorruptData, references=large_files):
    """The error of importing `path`, before which nothing was written."""
    with pytest.raises(error) as found:
        import_trajectory(root, path, references)
    assert str(path) in str(found.value)
    assert not root.exists()
    return found.value


def damage(path):
    """The error of reading all sections of a damaged file."""
    with pytest.raises(CorruptData) as found, SectionFile(path) as file:
        list(file)
    assert found.value.file == str(path)
    return found.value


def test_a_flipped_bit_anywhere_is_found(tmp_path):
    data, path, fields = SMALL.read_bytes(), tmp_path / "bad", set()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        error = damage(path)
        assert error.offset <= at
        fields.add(re.sub(r"\d+", "N", error.field))
        if at % 97 == 0:
            found = refused(path, tmp_path / "new", references=lambda *_: [])
            assert str(found) == str(error)
    assert fields == {"magic", "version", "section header", "section N"}


def test_a_file_that_is_cut_short_anywhere_is_found(tmp_path):
    data, path = SMALL.read_bytes(), tmp_path / "bad"
    for size in range(len(data)):
        path.write_bytes(data[:size])
        error = damage(path)
        assert error.offset <= size
        assert "the file ends inside it" in error.detail
        if size % 97 == 0:
            found = refused(path, tmp_path / "new", references=lambda *_: [])
            assert str(found) == str(error)
    path.write_bytes(data + b"\0")
    assert damage(path).offset == len(data)


def test_a_newer_version_is_refused_by_file_and_field(exported, tmp_path):
    _, _, file = exported
    head = struct.pack("<8sHH", b"K3RLTRAJ", 2, 0)
    path = tmp_path / "newer"
    path.write_bytes(head + struct.pack("<I", zlib.crc32(head)) + file.read_bytes()[16:])
    error = refused(path, tmp_path / "new", SchemaTooNew)
    assert "byte 8: version: 2 is newer than 1" in str(error)


def sections_of(path):
    with SectionFile(path) as file:
        return [(section.kind, content) for section, content in file]


def forged(path, sections):
    """A file with these sections, all of whose checks are right."""
    path.unlink(missing_ok=True)
    with SectionWriter(path) as out:
        for kind, content in sections:
            out.add(kind, content)
    return path


def test_sections_of_two_files_do_not_mix(exported, tmp_path):
    """Each section is whole and says what can be; the last one knows the others."""
    _, _, file = exported
    sections = sections_of(file)
    end = struct.pack("<B3xI", END, len(sections))
    other = forged(tmp_path / "other", edited(Kind.STEP, generate_s=1.5)(sections))
    assert len(sections_of(other)) == len(sections)
    whole, mixed = file.read_bytes(), other.read_bytes()
    path = tmp_path / "mixed"
    path.write_bytes(mixed[: mixed.rindex(end)] + whole[whole.rindex(end) :])
    assert refused(path, tmp_path / "new").detail == "does not match the sections before it"


def changed(kind, change):
    """Sections in which the first of a kind is another."""

    def make(sections):
        at = [k for k, _ in sections].index(kind)
        return [*sections[:at], (kind, change(sections[at][1])), *sections[at + 1 :]]

    return make


def edited(kind, **fields):
    return changed(kind, lambda content: json.dumps(json.loads(content) | fields).encode())


def without(kind, which=0):
    def make(sections):
        at = [n for n, (k, _) in enumerate(sections) if k == kind][which]
        return sections[:at] + sections[at + 1 :]

    return make


LIES = {
    "nothing": lambda s: [],
    "no head": without(Kind.HEAD),
    "two heads": lambda s: [s[0], *s],
    "unknown kind": lambda s: [*s, (6, b"")],
    "wrong order": lambda s: [s[0], *s[1:][::-1]],
    "not json": changed(Kind.STEP, lambda content: b"\xff{"),
    "deep json": changed(Kind.STEP, lambda content: b"[" * 100_000),
    "pickle": changed(Kind.HEAD, lambda content: b"\x80\x04K\x00."),
    "not a step": changed(Kind.STEP, lambda content: b"[]"),
    "a step less": without(Kind.STEP),
    "the last step less": without(Kind.STEP, -1),
    "step out of range": edited(Kind.STEP, token_end=2**70),
    "step elsewhere": edited(Kind.STEP, context=1),
    "step backwards": edited(Kind.STEP, token_end=-5),
    "tokens less": without(Kind.TOKENS),
    "tokens twice": lambda s: sorted([*s, next(x for x in s if x[0] == Kind.TOKENS)], key=KEY),
    "tokens cut short": changed(Kind.TOKENS, lambda content: content[:-1]),
    "tokens cut by one": changed(Kind.TOKENS, lambda content: content[:-9]),
    "token head too long": changed(Kind.TOKENS, lambda c: b"\xff\xff\xff\xff" + c[4:]),
    "mask is no mask": changed(Kind.TOKENS, lambda c: c[:-301] + b"\2" + c[-300:]),
    "no contexts": edited(Kind.HEAD, contexts=[]),
    "negative context": edited(Kind.HEAD, contexts=[-1]),
    "a context too many": edited(Kind.HEAD, contexts=[75, 1]),
    "endless context": edited(Kind.HEAD, contexts=[2**62]),
    "other policy tokens": edited(Kind.HEAD, num_policy_tokens=1),
    "reward breaks the rule": edited(Kind.HEAD, outcome={"kind": "cancelled", "reward": 1.0}),
    "no outcome": edited(Kind.HEAD, outcome=None),
    "snapshot less": without(Kind.SNAPSHOT),
    "snapshot of another": edited(Kind.SNAPSHOT, snapshot_id="x"),
    "layer is a path": edited(Kind.SNAPSHOT, layers=["../../../../tmp/evil"]),
    "layer is absolute": edited(Kind.SNAPSHOT, layers=["/etc/passwd" + "0" * 53]),
    "layer is not hex": edited(Kind.SNAPSHOT, layers=["g" * 64]),
    "layer is missing": edited(Kind.SNAPSHOT, layers=["0" * 64]),
    "blob less": without(Kind.BLOB),
    "large file less": without(Kind.BLOB, -1),
    "blob of another": changed(Kind.BLOB, lambda content: content + b"x"),
    "blob too many": lambda s: [*s, (Kind.BLOB, b"not named")],
    "blob twice": lambda s: [*s, s[-1]],
}


def KEY(section):
    return section[0]


@pytest.mark.parametrize("name", LIES)
def test_a_file_that_says_what_cannot_be_is_refused(exported, tmp_path, name):
    """Its checks are right, so only what the sections say together tells."""
    _, _, file = exported
    path = forged(tmp_path / "bad", LIES[name](sections_of(file)))
    assert refused(path, tmp_path / "new").file.startswith(str(path))
    assert not Path("/tmp/evil").exists()


def test_a_header_that_no_table_can_hold_is_refused(exported, tmp_path):
    _, _, file = exported
    head = json.loads(sections_of(file)[0][1])
    head["header"]["iteration"] = 2**63
    path = forged(
        tmp_path / "bad", [(Kind.HEAD, json.dumps(head).encode()), *sections_of(file)[1:]]
    )
    assert "does not fit 64 bits" in refused(path, tmp_path / "new").detail


def test_unchanged_sections_make_the_same_file(exported, tmp_path):
    """The control of the forgeries above."""
    _, id, file = exported
    path = forged(tmp_path / "good", sections_of(file))
    assert path.read_bytes() == file.read_bytes()
    assert import_trajectory(tmp_path / "new", path, large_files).id == id


# Paths


def test_what_is_no_file_is_refused(exported, tmp_path):
    new, pipe = tmp_path / "new", tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, match in (
        (tmp_path, "is not a file"),
        (pipe, "is not a file"),
        (tmp_path / "nowhere", "No such file"),
        (Path("/dev/zero"), "is not a file"),
    ):
        with pytest.raises(UserInputError, match=match):
            import_trajectory(new, path, large_files)
    assert not new.exists()


def test_a_folder_of_something_else_does_not_become_a_store(exported, tmp_path):
    _, _, file = exported
    other = tmp_path / "home"
    other.mkdir()
    (other / "letter.txt").write_text("dear")
    with pytest.raises(UserInputError, match="neither a store nor empty"):
        import_trajectory(other, file, large_files)
    assert [path.name for path in other.iterdir()] == ["letter.txt"]
    with pytest.raises(UserInputError, match="not a folder"):
        import_trajectory(other / "letter.txt", file, large_files)


# Faults


def is_whole(root, id, wanted):
    """Whether the trajectory is there; then it is all there. What else there is makes sense."""
    if not log_of(root):
        return False
    ids = [t.id for t in StoreReader(root).trajectories()]
    if not ids:
        return False
    assert ids == [id]
    assert content(root, id) == wanted
    return True


def failure(root, file):
    """What an import failed with; None: it did not."""
    try:
        import_trajectory(root, file, large_files)
    except StoreError as error:
        return str(error)
    return None


@pytest.mark.parametrize("call", ["fsync", "link"])
def test_a_disk_that_fails_at_any_call_leaves_all_or_nothing(exported, tmp_path, monkeypatch, call):
    root, id, file = exported
    wanted, real, num_failed = content(root, id), getattr(os, call), 0
    for at in range(200):
        new, count = tmp_path / f"new-{at}", iter(range(10_000))

        def failing(*args, at=at, count=count, **options):
            if next(count) == at:
                raise OSError(28, "No space left on device")
            return real(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            error = failure(new, file)
        if error is None:
            break
        assert re.search(r"No space|does not confirm", error)
        num_failed += 1
        was_there = (new / "_log").exists() and is_whole(new, id, wanted)
        assert import_trajectory(new, file, large_files).is_new is not was_there
        assert is_whole(new, id, wanted)
        assert check(new).findings == []
    assert num_failed >= 5


CHILD = """
import os, signal, sys
from pathlib import Path
from k3rl.sandboxes.files.layers import large_files
from k3rl.store.exchange import import_trajectory
root, file, at = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
count = 0
def dying(real):
    def call(*args, **options):
        global count
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)
    return call
for name in ("fsync", "link", "replace"):
    setattr(os, name, dying(getattr(os, name)))
import_trajectory(root, file, large_files)
print(count)
"""


def test_a_kill_at_any_time_leaves_all_or_nothing(exported, tmp_path):
    root, id, file = exported
    wanted = content(root, id)

    def run(new, at):
        command = [sys.executable, "-c", CHILD, str(new), str(file), str(at)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    total = int(run(tmp_path / "whole", -1).stdout)
    found = set()
    for at in [*range(1, total - 6, total // 3), *range(total - 6, total + 1)]:
        new = tmp_path / f"new-{at}"
        assert run(new, at).returncode == -signal.SIGKILL
        was_there = (new / "_log").exists() and is_whole(new, id, wanted)
        found.add(was_there)
        assert import_trajectory(new, file, large_files).is_new is not was_there
        assert is_whole(new, id, wanted)
        assert check(new).findings == []
    assert found == {True, False}


def test_pack_keeps_what_utf8_cannot_hold(exported):
    root, id, _ = exported
    found = StoreReader(root).get(id).steps[1]
    assert found.calls[0].output == "2\udc80"
    assert b"\\udc80" in pack(found)
    assert digest_json("2") == found.calls[0].output_digest
