"""Sealed batches: files of an older version, files written again, damage that opening or reading
meets."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from k3rl.errors import CorruptData
from k3rl.store.fsck import check
from k3rl.store.protocol import Ref, SampleRequest, SampleUnit, Stratum
from k3rl.store.reader import StoreReader
from k3rl.store.recovery import recover
from k3rl.store.sampler import Sampler
from tests.store.store_builders import played, snapshot
from tests.store.store_faults import flip
from tests.store.store_files import Root, compact, rewrite

REQUESTS = [
    SampleRequest(3, 4, 1),
    SampleRequest(3, 5, 1, unit=SampleUnit.SEGMENT),
    SampleRequest(3, 9, 1, unit=SampleUnit.TOKEN, window=33),
    SampleRequest(3, 4, 1, stratify=Stratum.GROUP),
    SampleRequest(3, 4, 1, unit=SampleUnit.SEGMENT, min_version=2, reward_temperature=0.3),
]


def filled(folder, rounds=3):
    """Rounds of five sealed trajectories, one of them of several segments; returns all ids."""
    root, ids = Root(folder), []
    for n in range(rounds):
        ids += root.play(range(10 * n, 10 * n + 4), version=n + 2)
        ids += root.play([10 * n + 4], num_steps=4, turn=5000, version=n + 1)
        root.seal(pin=True)
    return root, ids


def told(live, ids):
    return [(live.trajectory(id), live.numbers(id), live.snapshot_of(id)) for id in ids]


def drawn(state, seqs):
    sampler = Sampler(state.manifest, state.live.sealed.catalog)
    return [sampler.draw(request, seq) for request in REQUESTS for seq in seqs]


def test_files_of_version_1_0_give_the_same_columns(tmp_path):
    root, ids = filled(tmp_path, rounds=1)
    (want,) = root.live.sealed.catalog.batches
    before, draws = told(root.live, ids), drawn(root.state, [1])
    root.close()
    new = ["sealed_seq", "segments"]
    rewrite(tmp_path, "trajectories", lambda t: t.drop_columns(new), "k3rl.trajectories/1.0")
    state = recover(tmp_path, False)
    (got,) = state.live.sealed.catalog.batches
    for table in ("trajectories", "contexts", "segments"):
        for name in getattr(want, table).__slots__:
            a, b = getattr(getattr(want, table), name), getattr(getattr(got, table), name)
            assert (a.dtype, a.tolist()) == (b.dtype, b.tolist())
    assert (told(state.live, ids), drawn(state, [1])) == (before, draws)
    assert check(tmp_path).findings == []
    more = Root(tmp_path)
    ids += more.play([77])
    more.seal()
    more.close()
    live = recover(tmp_path, False).live
    assert told(live, ids[:-1]) == before
    assert check(tmp_path).findings == []


def test_batches_are_replaced_by_one_record(tmp_path):
    root, ids = filled(tmp_path)
    before, draws = told(root.live, ids), drawn(root.state, [1, 2, 3])
    pinned, late = StoreReader(tmp_path), StoreReader(tmp_path)
    refs = [ref for request in REQUESTS for ref in drawn(root.state, [3])[0]]
    tokens = [read.token_ids.tobytes() for read in pinned.read_many(refs)]
    pieces = [root.live.ref_pieces(ref) for ref in refs]
    assert [t.token_ids.tobytes() for t in root.files.load_many(pieces)] == tokens
    gone = compact(root, [1, 3])
    assert [batch.seq for batch in root.live.sealed.catalog.batches] == [2, 4]
    assert told(root.live, ids) == before
    assert drawn(root.state, [1, 2, 3]) == draws
    # Places looked up before are void, and those looked up now hold the same.
    with pytest.raises(FileNotFoundError):
        root.files.load_many(pieces)
    again = root.files.load_many([root.live.ref_pieces(ref) for ref in refs])
    assert [t.token_ids.tobytes() for t in again] == tokens
    # Who reads as of the old record does so until the files are gone, and then looks again.
    assert [read.token_ids.tobytes() for read in pinned.read_many(refs)] == tokens
    assert pinned.state.manifest.head.seq == 3
    for path in gone:
        (tmp_path / path).unlink()
    for reader in (pinned, late):
        reader.state.live.sealed.files.close()
        assert [read.token_ids.tobytes() for read in reader.read_many(refs)] == tokens
        assert [reader.get(id) for id in ids] == [trajectory for trajectory, _, _ in before]
        assert reader.state.manifest.head.seq == 4
    root.close()
    state = recover(tmp_path, False)
    assert (told(state.live, ids), drawn(state, [1, 2, 3])) == (before, draws)
    assert check(tmp_path).findings == []


def test_a_read_whose_files_are_replaced_looks_again(tmp_path, open_store, monkeypatch):
    async def go():
        async with open_store() as store:
            ids = []
            for n in range(2):
                ids.append(await played(store, n))
                await store.pin()
            before = [
                read.token_ids.tobytes() for read in await store.read_many(list(map(Ref, ids)))
            ]
            requests = [replace(REQUESTS[0], n=1), replace(REQUESTS[2], manifest_seq=1)]
            draws = [await store.sample(request) for request in requests]
            real, whole = (
                store._files.load_many,
                SimpleNamespace(root=store.root, state=store._state, live=store._live),
            )

            def load_many(*arguments):
                if len(store._live.sealed.catalog.batches) == 2:
                    for path in compact(whole, [1, 2]):
                        (store.root / path).unlink()
                return real(*arguments)

            monkeypatch.setattr(store._files, "load_many", load_many)
            again = await store.read_many(list(map(Ref, ids)))
            assert [read.token_ids.tobytes() for read in again] == before
            assert [await store.sample(request) for request in requests] == draws
            assert len(store._live.sealed.catalog.batches) == 1
        assert check(tmp_path / "store").findings == []

    asyncio.run(go())


def page(path, column):
    """Where in a file the data of a column's first row group lie."""
    group = pq.ParquetFile(path).metadata.row_group(0)
    chunks = [group.column(n) for n in range(group.num_columns)]
    chunk = next(c for c in chunks if c.path_in_schema.split(".")[0] == column)
    end = chunk.total_compressed_size + (chunk.dictionary_page_offset or chunk.data_page_offset)
    return end - 3


def sealed_file(folder, table):
    (path,) = (folder / "sealed").glob(f"{table}-*")
    return path


@pytest.mark.parametrize(
    ("table", "column"),
    [
        ("trajectories", "header_json"),
        ("steps", "step_json"),
        ("snapshots", "session_json"),
        ("segments", "token_ids"),
        ("segments", "spans"),
    ],
)
def test_damage_that_only_a_read_meets_is_named(tmp_path, table, column):
    root, ids = filled(tmp_path, rounds=1)
    root.close()
    path = sealed_file(tmp_path, table)
    flip(path, page(path, column))
    reader = StoreReader(tmp_path)
    assert len(reader.state.live.ids()) == 5
    assert len(drawn(reader.state, [1])) == len(REQUESTS)
    reads = {
        "trajectories": lambda: [reader.get(id) for id in ids],
        "steps": lambda: reader.trajectories(),
        "snapshots": lambda: [reader.snapshot(snapshot(id, 0).snapshot_id) for id in ids],
        "segments": lambda: reader.read_many([Ref(id) for id in ids]),
    }
    for name in {"snapshots", "segments"} - {table}:
        assert len(reads[name]()) == 5
    with pytest.raises(CorruptData, match="row group 0") as caught:
        reads[table]()
    assert caught.value.file == str(path)
    assert caught.value.field.split(".")[0] == column
    assert {f.file for f in check(tmp_path).findings} == {str(path)}
    assert check(tmp_path, repair=True).findings
    assert check(tmp_path).findings == []


@pytest.mark.parametrize("column", ["trajectory", "begun_sequence", "segments", "contexts_json"])
def test_damage_to_what_is_kept_in_memory_is_met_by_opening(tmp_path, column):
    root, _ = filled(tmp_path, rounds=1)
    root.close()
    path = sealed_file(tmp_path, "trajectories")
    flip(path, page(path, column))
    for owner in (False, True):
        with pytest.raises(CorruptData) as caught:
            recover(tmp_path, owner)
        assert caught.value.file == str(path)
        assert caught.value.field.split(".")[0] == column


@pytest.mark.parametrize("table", ["segments", "steps", "trajectories", "snapshots"])
@pytest.mark.parametrize("damage", ["missing", "footer", "rows"])
def test_opening_looks_at_every_footer(tmp_path, table, damage):
    root, _ = filled(tmp_path, rounds=1)
    root.close()
    path = sealed_file(tmp_path, table)
    if damage == "missing":
        path.unlink()
    elif damage == "footer":
        path.write_bytes(path.read_bytes()[:-20])
    else:
        pq.write_table(pq.read_table(path).slice(1), path)
    with pytest.raises(CorruptData) as caught:
        recover(tmp_path, False)
    assert caught.value.file == str(path)


@pytest.mark.parametrize("table", ["segments", "steps"])
def test_a_file_of_fewer_rows_than_its_trajectories_say_is_named(tmp_path, table):
    """The manifest agrees with the file, so only the two tables together show it."""
    root, _ = filled(tmp_path, rounds=1)
    root.close()
    rewrite(tmp_path, table, lambda t: t.slice(1))
    with pytest.raises(CorruptData, match=rf"{table}: names \d+, their file has \d+"):
        recover(tmp_path, False)


@pytest.mark.parametrize("field", ["content_hash", "token_start", "row", "version_min"])
def test_a_trajectories_file_that_belies_the_segments_file_is_found(tmp_path, field):
    root, ids = filled(tmp_path, rounds=1)
    root.close()

    def change(table):
        rows = table.column("segments").to_pylist()
        at = next(n for n, row in enumerate(rows) if len(row) > 1)
        one, other = rows[at][:2]
        if field in ("token_start", "version_min"):
            one[field] += 1
        else:
            one[field], other[field] = other[field], one[field]
        where = table.schema.get_field_index("segments")
        column = pa.array(rows, table.schema.field("segments").type)
        return table.set_column(where, table.schema.field("segments"), column)

    rewrite(tmp_path, "trajectories", change)
    said = [str(found) for found in check(tmp_path).findings]
    assert any("are not those of the segments file" in line for line in said), said
    if field != "version_min":
        with pytest.raises(CorruptData):
            StoreReader(tmp_path).read_many([Ref(id) for id in ids])


def test_rows_of_another_trajectory_are_not_taken_for_its_own(tmp_path):
    root, ids = filled(tmp_path, rounds=1)
    root.close()
    rewrite(tmp_path, "steps", lambda t: t.take(np.roll(np.arange(t.num_rows), 1)))
    reader = StoreReader(tmp_path)
    with pytest.raises(CorruptData, match="are another's") as caught:
        [reader.get(id) for id in ids]
    assert caught.value.file == str(sealed_file(tmp_path, "steps"))
