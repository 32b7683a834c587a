"""Files of every version of the schemas are read by field id, and golden ones stay readable."""

import asyncio
import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from k3rl.errors import CorruptData, SchemaTooNew
from k3rl.store import manifest, schemas
from k3rl.store.events import VersionRow
from k3rl.store.exchange import export_trajectory, import_trajectory
from k3rl.store.fsck import check
from k3rl.store.manifest import ManifestRecord, SealedFile, load_manifest, sealed_record
from k3rl.store.parquet import file_digest, open_sealed, read_rows
from k3rl.store.protocol import Ref
from k3rl.store.reader import StoreReader
from k3rl.store.schemas import FIELD_ID, SCHEMA_KEY, TABLES, UPCASTS, numbered, schema, select
from k3rl.store.tables import versions_from
from k3rl.types import canonical_json, digest_json, from_plain, to_plain
from tests.store.store_golden import make

GOLDEN = Path(__file__).parents[1] / "data" / "store"
VERSIONS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())


def content(root):
    """All that a reader gives of a root."""
    reader = StoreReader(root)
    tokens = [
        (array.tobytes() for array in (read.token_ids, read.loss_mask, read.rollout_logprobs))
        for t in reader.trajectories()
        for context in range(t.num_contexts)
        for read in [reader.read(Ref(t.id, context=context))]
    ]
    names = {s.snapshot_after for t in reader.trajectories() for s in t.steps}
    return (
        reader.trajectories(),
        [list(arrays) for arrays in tokens],
        {name: reader.snapshot(name) for name in names},
        reader.updates(),
        reader.versions(),
    )


@pytest.fixture
def golden(tmp_path):
    """A copy of a golden store, to be opened."""

    def copy(version):
        return Path(shutil.copytree(GOLDEN / version, tmp_path / version))

    return copy


def test_the_present_version_has_a_golden_store_with_the_present_schemas():
    assert VERSIONS[-1] == f"{schemas.MAJOR}.{schemas.MINOR}"
    root = GOLDEN / VERSIONS[-1]
    for table in TABLES:
        for _, file in load_manifest(root)[0].files_of(table):
            found = open_sealed(root, file).schema_arrow
            assert found.equals(schema(table), check_metadata=True), table


def test_each_version_only_adds_to_the_one_before():
    """What is in a golden file stays where it is, as wide or wider; nothing changes its id."""
    for old, new in pairwise(VERSIONS):
        for table in TABLES:
            before, after = (types_by_id(GOLDEN / version, table) for version in (old, new))
            assert before.items() <= after.items(), (old, new, table)


def types_by_id(root, table):
    (_, file), *_ = load_manifest(root)[0].files_of(table)
    found = open_sealed(root, file).schema_arrow
    return {field.metadata[FIELD_ID]: (field.name, str(field.type)) for field in found}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_store_reads_as_one_written_today(version, golden, tmp_path, valkey):
    asyncio.run(make(tmp_path / "today", valkey))
    root = golden(version)
    assert content(root) == content(tmp_path / "today")
    assert check(root).findings == []


@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_store_goes_on_being_used(version, golden, tmp_path):
    """Export reads everything in it; an import puts files of today beside those it has."""
    root, other = golden(version), tmp_path / "other"
    before = content(root)
    (child,) = (t for t in StoreReader(root).trajectories() if t.header.parent)
    export_trajectory(root, child.id, tmp_path / "file", lambda *_: [])
    import_trajectory(other, tmp_path / "file", lambda *_: [])
    assert StoreReader(other).trajectories() == [child]
    import_trajectory(other, GOLDEN / "branch-1.k3t", lambda *_: [])
    assert content(root) == before


def test_an_exported_file_of_the_first_version_is_the_one_written_today(golden, tmp_path):
    root = golden(VERSIONS[-1])
    (child,) = (t for t in StoreReader(root).trajectories() if t.header.parent)
    export_trajectory(root, child.id, tmp_path / "file", lambda *_: [])
    import_trajectory(tmp_path / "new", GOLDEN / "branch-1.k3t", lambda *_: [])
    assert not import_trajectory(tmp_path / "new", tmp_path / "file", lambda *_: []).is_new


# Field ids


def ids_of(field):
    kind = field.type
    nested = [kind.value_field] if pa.types.is_list(kind) else []
    nested += list(kind) if pa.types.is_struct(kind) else []
    return [int(field.metadata[FIELD_ID]), *(id for member in nested for id in ids_of(member))]


@pytest.mark.parametrize("table", TABLES)
def test_every_column_and_every_member_has_an_id_of_its_own(table):
    ids = [id for field in schema(table) for id in ids_of(field)]
    assert len(set(ids)) == len(ids)
    assert [ids_of(field)[0] for field in schema(table)] == list(range(1, len(schema(table)) + 1))


def test_ids_are_those_in_the_files():
    root = GOLDEN / VERSIONS[-1]
    (_, file), *_ = load_manifest(root)[0].files_of("segments")
    column = pq.ParquetFile(root / file.path).schema_arrow.field("spans")
    assert ids_of(column) == [9, 901, 90101, 90102, 90103, 90104]


# Other versions


def write(root, fields, rows, version, table="versions"):
    """A sealed file with columns (id, name, type) under a version of a table's schema."""
    named = [pa.field(name, kind, metadata={FIELD_ID: str(id)}) for id, name, kind in fields]
    key = f"k3rl.{table}/{version}"
    data = pa.Table.from_pylist(rows, pa.schema(named, metadata={SCHEMA_KEY: key.encode()}))
    path = root / "sealed" / "file.parquet"
    path.parent.mkdir()
    pq.write_table(data, path)
    return SealedFile(
        "sealed/file.parquet", table, key, len(rows), path.stat().st_size, file_digest(path)
    )


def test_columns_are_found_by_id_widened_and_null_when_missing(tmp_path):
    fields = [
        (3, "sum_of_it", pa.binary(32)),
        (99, "later", pa.string()),
        (1, "number", pa.int16()),
        (2, "parent", pa.int64()),
    ]
    digest = digest_json("w")
    row = {"number": 7, "parent": 6, "sum_of_it": bytes.fromhex(digest), "later": "x"}
    for version in ("1.0", "1.9"):
        root = tmp_path / version
        root.mkdir()
        file = write(root, fields, [row, {**row, "number": None}], version)
        assert versions_from(read_rows(root, file)[:1]) == [VersionRow(7, 6, digest, None)]
        assert read_rows(root, file, ["blob", "policy_version"]) == [
            {"blob": None, "policy_version": 7},
            {"blob": None, "policy_version": None},
        ]


def test_a_column_of_another_kind_is_damage(tmp_path):
    file = write(tmp_path, [(1, "policy_version", pa.string())], [{"policy_version": "7"}], "1.0")
    with pytest.raises(CorruptData, match=r"file\.parquet: byte 0: policy_version: is string"):
        read_rows(tmp_path, file)


def test_members_of_nested_columns_grow_too():
    old = numbered("spans", pa.list_(pa.struct([("start", pa.int32()), ("who", pa.string())])), 4)
    more = [("start", pa.int64()), ("author", pa.string()), ("parts", pa.list_(pa.int8()))]
    new = numbered("spans", pa.list_(pa.struct(more)), 4)
    rows = [[{"start": 1, "who": "a"}, None], None, [], [{"start": None, "who": "b"}]]
    data = pa.Table.from_pylist([{"spans": row} for row in rows], pa.schema([old]))
    found = select("f", data, pa.schema([new])).column("spans").to_pylist()
    assert found == [
        [{"start": 1, "author": "a", "parts": None}, None],
        None,
        [],
        [{"start": None, "author": "b", "parts": None}],
    ]
    back = select("f", select("f", data, pa.schema([new])), pa.schema([new]))
    assert back.column("spans").to_pylist() == found


def test_members_without_ids_are_found_by_name():
    """As version 1.0 wrote them."""
    kind = pa.struct([("b", pa.int32()), ("a", pa.int32())])
    old = pa.field("pair", kind, metadata={FIELD_ID: "1"})
    new = numbered("pair", pa.struct([("a", pa.int64()), ("b", pa.int64())]), 1)
    data = pa.Table.from_pylist([{"pair": {"a": 1, "b": 2}}], pa.schema([old]))
    found = select("f", data, pa.schema([new]))
    assert found.column("pair").to_pylist() == [{"a": 1, "b": 2}]


def test_a_narrower_type_is_refused():
    old, new = numbered("x", pa.int64(), 1), numbered("x", pa.int32(), 1)
    data = pa.Table.from_pylist([{"x": 1}], pa.schema([old]))
    with pytest.raises(CorruptData, match="never becomes int32"):
        select("f", data, pa.schema([new]))


def test_major_versions_are_up_cast_one_after_the_other(golden, monkeypatch):
    """Two versions on: the first up-cast brings `origin`, the second counts it up."""
    root = golden("1.0")

    def to_two(data):
        column = pa.array([b"\1" * 32] * len(data), pa.binary(32))
        return data.append_column(schema("trajectories").field("origin"), column)

    def to_three(data):
        at = data.schema.get_field_index("origin")
        column = [bytes([value[0] + 1]) * 32 for value in data.column(at).to_pylist()]
        return data.set_column(at, data.schema.field(at), pa.array(column, pa.binary(32)))

    monkeypatch.setattr(schemas, "MAJOR", 3)
    for table in TABLES:
        for version in (1, 2):
            monkeypatch.setitem(UPCASTS, (table, version), lambda data: data)
    monkeypatch.setitem(UPCASTS, ("trajectories", 1), to_two)
    monkeypatch.setitem(UPCASTS, ("trajectories", 2), to_three)
    origins = [
        row["origin"]
        for _, file in load_manifest(root)[0].files_of("trajectories")
        for row in read_rows(root, file)
    ]
    assert origins == [b"\2" * 32] * 4
    assert len(StoreReader(root).trajectories()) == 4


def test_every_older_major_version_has_its_up_casts():
    wanted = {(table, version) for table in TABLES for version in range(1, schemas.MAJOR)}
    assert set(UPCASTS) == wanted


def test_a_file_of_another_version_than_the_manifest_says_is_damage(tmp_path):
    file = write(tmp_path, [(1, "policy_version", pa.int64())], [{"policy_version": 7}], "1.0")
    said = replace(file, schema_id="k3rl.versions/1.1")
    with pytest.raises(CorruptData, match=r"k3rl\.schema_id: k3rl\.versions/1\.0, the manifest"):
        read_rows(tmp_path, said)


# Too new


def test_a_newer_major_version_is_refused_by_file_and_field(tmp_path):
    file = write(tmp_path, [(1, "policy_version", pa.int64())], [{"policy_version": 7}], "2.0")
    where = r"sealed/file\.parquet: k3rl\.schema_id: k3rl\.versions/2\.0 is newer than"
    with pytest.raises(SchemaTooNew, match=where):
        read_rows(tmp_path, file)
    hidden = replace(file, schema_id="k3rl.versions/1.1")
    with pytest.raises(SchemaTooNew, match=where):
        read_rows(tmp_path, hidden)


def test_a_newer_manifest_record_is_refused_by_file_and_field(golden, monkeypatch):
    root = golden(VERSIONS[-1])
    path = sorted((root / "_log").iterdir())[-1]
    record = from_plain(ManifestRecord, json.loads(path.read_bytes()))
    monkeypatch.setattr(manifest, "VERSION", 2)
    newer = to_plain(sealed_record(replace(record, version=2)))
    path.write_bytes(canonical_json(newer) + b"\n")
    assert StoreReader(root).trajectories()
    monkeypatch.undo()
    with pytest.raises(SchemaTooNew, match=rf"{path.name}: version: 2 is newer than 1"):
        StoreReader(root)
    plain = json.loads(path.read_bytes())
    path.write_bytes(canonical_json({**plain, "version": 3}) + b"\n")
    with pytest.raises(CorruptData, match="self_hash"):
        StoreReader(root)
