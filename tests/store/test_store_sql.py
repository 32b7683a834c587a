"""Sealed files in other people's readers, and SQL over them that reaches nothing else."""

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pytest

from k3rl.errors import CorruptData, SchemaTooNew, StoreError, UserInputError
from k3rl.store import schemas, sql
from k3rl.store.fsck import check
from k3rl.store.manifest import load_manifest
from k3rl.store.protocol import Ref
from k3rl.store.reader import StoreReader
from k3rl.store.schemas import TABLES, schema
from k3rl.store.sql import query
from k3rl.types import LineageKind, ParentRef
from tests.store.store_builders import claim_one, header, play, played
from tests.store.store_faults import flip
from tests.store.store_golden import make

GOLDEN = Path(__file__).parents[1] / "data" / "store"


@pytest.fixture
def root(tmp_path, valkey):
    """The golden store, made afresh: two sealed batches of four trajectories."""
    asyncio.run(make(tmp_path / "store", valkey))
    return tmp_path / "store"


def rows(root, statement):
    with query(root, statement) as answer:
        return list(answer.rows)


def sealed(root, table):
    """The files of a table, as the manifest names them."""
    return [str(root / file.path) for _, file in load_manifest(root)[0].files_of(table)]


def tokens_of(root):
    """{(trajectory, context): (first own token, ids, mask, log-prob bits, spans)}."""
    reader, found = StoreReader(root), {}
    for t in reader.trajectories():
        parent = t.header.parent
        for context in range(parent.context if parent else 0, t.num_contexts):
            base = parent.token_offset if parent and parent.context == context else 0
            read = reader.read(Ref(t.id, base, None, context))
            if len(read.token_ids):
                arrays = (read.token_ids, read.loss_mask, read.rollout_logprobs)
                plain = [array.tobytes() for array in arrays]
                starts = [(span.start, str(span.author)) for span in read.spans]
                found[t.id, context] = (base, *plain, starts)
    return found


# Other readers, on the files as they are


def found_by(segments):
    """The same as `tokens_of`, of rows as dicts; here a context is one segment."""
    return {
        (bytes(row["trajectory"]).hex(), row["context"]): (
            row["token_start"],
            np.array(row["token_ids"], np.int32).tobytes(),
            np.array(row["loss_mask"], bool).tobytes(),
            np.array(row["rollout_logprobs"], np.float32).tobytes(),
            [(span["start"], span["author"]) for span in row["spans"]],
        )
        for row in segments
    }


def test_duckdb_reads_the_files(root):
    connection = duckdb.connect()
    found = connection.execute("FROM read_parquet(?)", [sealed(root, "segments")])
    names = [column[0] for column in found.description]
    assert found_by(dict(zip(names, row, strict=True)) for row in found.fetchall()) == tokens_of(
        root
    )
    for table in TABLES:
        found = connection.execute("DESCRIBE FROM read_parquet(?)", [sealed(root, table)])
        assert [row[0] for row in found.fetchall()] == schema(table).names


def test_duckdb_finds_columns_by_their_ids(root):
    """With the names of another reader; an id that no file has is null."""
    columns = "{4: {name: 'at', type: 'BIGINT', default_value: NULL}, "
    columns += "99: {name: 'later', type: 'VARCHAR', default_value: NULL}}"
    paths = sealed(root, "segments")
    found = duckdb.sql(f"FROM read_parquet({paths}, schema = MAP {columns})").fetchall()
    assert sorted(found) == sorted((base, None) for base, *_ in tokens_of(root).values())


def test_polars_reads_the_files(root):
    frame = pl.read_parquet(sealed(root, "segments"))
    assert found_by(frame.to_dicts()) == tokens_of(root)
    steps = pl.scan_parquet(sealed(root, "steps"))
    counts = steps.group_by("trajectory").len().collect()
    stored = {}
    for t in StoreReader(root).trajectories():
        own = t.steps[t.header.parent.step if t.header.parent else 0 :]
        stored |= {t.id: len(own)} if own else {}
    assert {id.hex(): count for id, count in counts.rows()} == stored
    for table in TABLES:
        assert pl.read_parquet(sealed(root, table)).columns == schema(table).names


def test_pandas_reads_the_files(root):
    frame = pd.concat(pd.read_parquet(path) for path in sealed(root, "segments"))
    assert found_by(frame.to_dict("records")) == tokens_of(root)
    frame = pd.concat(pd.read_parquet(path) for path in sealed(root, "trajectories"))
    outcomes = {t.id: str(t.outcome.kind) for t in StoreReader(root).trajectories()}
    assert {t.hex(): o for t, o in zip(frame.trajectory, frame.outcome, strict=True)} == outcomes


# Views


def test_views_hold_the_tables_with_ids_as_hex(root):
    reader = StoreReader(root)
    found = rows(root, "SELECT trajectory, parent, outcome, reward, num_tokens FROM trajectories")
    assert sorted(found) == sorted(
        (
            t.id,
            t.header.parent.id if t.header.parent else None,
            str(t.outcome.kind),
            t.outcome.reward,
            t.num_tokens,
        )
        for t in reader.trajectories()
    )
    found = rows(root, "SELECT snapshot, layers, tree_digest FROM snapshots")
    names = {s.snapshot_after for t in reader.trajectories() for s in t.steps}
    snapshots = [reader.snapshot(name) for name in names]
    wanted = [(s.snapshot_id, list(s.layers), s.tree_digest) for s in snapshots]
    assert sorted(found) == sorted(wanted)
    found = rows(root, "SELECT update, members, checkpoint FROM updates ORDER BY update")
    assert found == [(u.update, list(u.members), u.checkpoint) for u in reader.updates()]
    found = rows(root, "SELECT policy_version, checksum, blob FROM versions")
    assert found == [(v.policy_version, v.checksum, v.blob) for v in reader.versions()]
    shown = [name for (name,) in rows(root, "SHOW TABLES") if not name.startswith("_")]
    assert sorted(shown) == sorted(TABLES)


def test_nested_columns_can_be_queried(root):
    found = rows(
        root,
        "SELECT s.policy_version, count(*) FROM segments, unnest(spans) AS t(s)"
        " WHERE s.author = 'policy' GROUP BY 1 ORDER BY 1",
    )
    assert found == [(1, 4), (2, 2)]
    found = rows(
        root,
        "SELECT c.tool, c.arguments->>'code', c.status, c.output, c.wall_s, count(*)"
        " FROM steps, unnest(calls) AS t(c) GROUP BY ALL",
    )
    # The builders' output ends in half a character, which no text column can hold.
    assert found == [("python", "1+1", "ok", "2?", 0.25, 4)]
    found = rows(root, "SELECT header_json->>'$.task.seed' FROM trajectories ORDER BY 1")
    assert found == [("0",), ("1",), ("2",), ("3",)]
    (masked,) = rows(root, "SELECT sum(len(list_filter(loss_mask, lambda x: x))) FROM segments")
    own = "SELECT sum(num_policy_tokens) FROM trajectories WHERE parent IS NULL"
    assert masked[0] == rows(root, own)[0][0] + 10


def test_only_what_the_manifest_names_is_seen(root, tmp_path):
    path = sealed(root, "versions")[0]
    shutil.copy(path, Path(path).with_name("versions-stray.parquet"))
    assert rows(root, "SELECT count(*) FROM versions") == [(1,)]
    empty = tmp_path / "empty"
    shutil.copytree(root / "_log", empty / "_log")
    for record in sorted((empty / "_log").iterdir())[1:]:
        record.unlink()
    for table in TABLES:
        assert rows(empty, f"SELECT * FROM {table}") == []
    with pytest.raises(StoreError, match="no trajectory store here"):
        rows(tmp_path / "nowhere", "SELECT 1")


def test_rows_that_a_repair_gave_up_are_not_seen(tmp_path, open_store):
    """The child's rows are whole, but its parent is gone."""
    root = tmp_path / "store"

    async def go():
        async with open_store() as store:
            parent = await played(store, 0, turn=2000)
            await store.pin()
            start = (await store.get(parent)).steps[2].token_start
            child = header(1, parent=ParentRef(parent, 0, start, 2, LineageKind.BRANCH))
            await store.branch(child)
            await play(store, await claim_one(store))
            other = await played(store, 2)
        return child.id, other

    child, other = asyncio.run(go())
    ids = "SELECT trajectory FROM {} GROUP BY 1 ORDER BY 1"
    assert len(rows(root, ids.format("trajectories"))) == 3
    flip(next((root / "sealed").glob("segments-00000001-*")), 1500)
    assert child in str(check(root, repair=True).findings)
    assert load_manifest(root)[0].drops
    for table in ("trajectories", "steps", "segments"):
        assert rows(root, ids.format(table)) == [(other,)]


def test_damage_is_named(root):
    (path,) = sealed(root, "versions")
    flip(Path(path), 40)
    with pytest.raises(CorruptData, match=r"versions-.*byte \d+: policy_version"):
        rows(root, "SELECT sum(policy_version) FROM versions")
    assert len(rows(root, "SELECT * FROM trajectories")) == 4
    Path(path).unlink()
    with pytest.raises(CorruptData, match=r"versions-.*missing"):
        rows(root, "SELECT * FROM updates")


def test_digests_inside_of_nested_columns_are_hex(root):
    inside = rows(
        root, "SELECT s.content_hash, s.num_tokens FROM trajectories, unnest(segments) AS t(s)"
    )
    beside = rows(root, "SELECT content_hash, num_tokens FROM segments")
    assert sorted(inside) == sorted(beside)
    assert all(len(bytes.fromhex(digest)) == 32 for digest, _ in inside)


def test_every_released_version_gives_the_same_answers(root):
    """But for the columns that later versions added."""
    statement = (
        "SELECT COLUMNS(lambda c: c NOT IN ('sealed_seq', 'segments', 'origin')) "
        "FROM {} ORDER BY ALL"
    )
    for version in sorted(path for path in GOLDEN.iterdir() if path.is_dir()):
        for table in TABLES:
            assert repr(rows(version, statement.format(table))) == repr(
                rows(root, statement.format(table))
            )


def test_files_of_an_older_major_version_are_up_cast(root, monkeypatch):
    statements = [f"SELECT * FROM {table} ORDER BY ALL" for table in TABLES]
    before = [repr(rows(root, statement)) for statement in statements]
    monkeypatch.setattr(schemas, "MAJOR", 2)
    monkeypatch.setattr(sql, "MAJOR", 2)
    for table in TABLES:
        monkeypatch.setitem(schemas.UPCASTS, (table, 1), lambda data: data.slice(0, 1))
    assert rows(root, "SELECT count(*) FROM trajectories") == [(2,)]
    for table in TABLES:
        monkeypatch.setitem(schemas.UPCASTS, (table, 1), lambda data: data)
    assert [repr(rows(root, statement)) for statement in statements] == before


def test_a_newer_major_version_is_refused(root, monkeypatch):
    monkeypatch.setattr(schemas, "MAJOR", 0)
    with pytest.raises(SchemaTooNew, match=r"sealed/segments-.*k3rl\.schema_id: k3rl\.segments/1"):
        rows(root, "SELECT 1")


# Nothing else can be reached


@pytest.fixture
def secret(tmp_path):
    """A file that no statement may show, beside every kind that DuckDB would open."""
    path = tmp_path / "secret.csv"
    path.write_text("word\nhush\n")
    duckdb.sql("SELECT 'hush' AS word").write_parquet(str(tmp_path / "secret.parquet"))
    with duckdb.connect(str(tmp_path / "secret.db")) as connection:
        connection.execute("CREATE TABLE t AS SELECT 'hush' AS word")
    (tmp_path / "secret.json").write_text('{"word": "hush"}')
    return tmp_path / "secret"


READS = (
    "SELECT * FROM read_csv('{}.csv')",
    "SELECT * FROM '{}.csv'",
    "SELECT * FROM '{}.parquet'",
    "SELECT * FROM read_parquet('{}.parquet')",
    "SELECT * FROM parquet_metadata('{}.parquet')",
    "SELECT * FROM read_json('{}.json')",
    "SELECT content FROM read_text('{}.csv')",
    "SELECT content FROM read_blob('{}.csv')",
    "SELECT * FROM sniff_csv('{}.csv')",
    "SELECT * FROM glob('{}*')",
    "SELECT * FROM read_duckdb('{}.db', table_name = 't')",
    "SELECT * FROM query('FROM ''{}.csv''')",
)


@pytest.mark.parametrize("statement", READS)
def test_no_statement_reads_another_file(root, secret, statement):
    statement = statement.format(secret)
    # The same statement does read it where nothing forbids it.
    assert duckdb.connect().execute(statement).fetchall()
    with pytest.raises(UserInputError, match=r"Permission Error|does not exist"):
        rows(root, statement)


def test_not_even_the_sealed_files_are_open_to_it(root):
    (path,) = sealed(root, "versions")
    with pytest.raises(UserInputError, match="Permission Error"):
        rows(root, f"SELECT * FROM read_parquet('{path}')")


@pytest.mark.parametrize(
    "statement",
    [
        "COPY (SELECT 1) TO '{}.out'",
        "COPY (SELECT 1) TO '{}.csv'",
        "EXPORT DATABASE '{}.out'",
        "ATTACH '{}.db' AS other",
        "ATTACH '{}.out'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "LOAD '{}.so'",
        "SET enable_external_access = true",
        "RESET enable_external_access",
        "SET lock_configuration = false",
        "SET allowed_paths = ['{}.csv']",
        "PRAGMA database_list",
        "CALL enable_logging(storage = 'file', storage_path = '{}.out')",
        "CREATE SECRET s (TYPE s3)",
        "CREATE TABLE t AS SELECT 1",
        "DROP VIEW segments",
        "INSERT INTO versions VALUES (1)",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{}.out'",
        "PREPARE p AS SELECT 1",
        "SELECT 1; COPY (SELECT 1) TO '{}.out'",
        "",
        "-- nothing",
    ],
)
def test_only_one_statement_that_reads_is_taken(root, secret, statement):
    before = sorted((path.name, path.read_bytes()) for path in secret.parent.glob("secret*"))
    with pytest.raises(UserInputError, match=r"one statement that reads|syntax error"):
        rows(root, statement.format(secret))
    after = sorted((path.name, path.read_bytes()) for path in secret.parent.glob("secret*"))
    assert after == before


def test_what_a_select_could_switch_on_is_locked(root, secret):
    for call in (
        f"enable_logging(storage = 'file', storage_path = '{secret}.out')",
        f"enable_profiling(save_location = '{secret}.out')",
    ):
        with pytest.raises(UserInputError, match="locked"):
            rows(root, f"SELECT * FROM {call}")
    settings = dict(rows(root, "SELECT name, value FROM duckdb_settings()"))
    assert settings["enable_external_access"] == "false"
    assert settings["lock_configuration"] == "true"
    assert settings["autoload_known_extensions"] == "false"
    assert settings["allowed_paths"] == "[]"
    assert not Path(f"{secret}.out").exists()


def test_variables_of_the_process_and_the_network_are_out_of_reach(root):
    hush = pd.DataFrame({"word": ["hush"]})
    assert duckdb.sql("SELECT * FROM hush").fetchall() == [tuple(hush.iloc[0])]
    with pytest.raises(UserInputError, match="does not exist"):
        rows(root, "SELECT * FROM hush")
    with pytest.raises(UserInputError, match="Permission Error"):
        rows(root, "SELECT * FROM 'https://127.0.0.1:1/x.csv'")


def test_nothing_is_left_on_disk(root, tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    before = sorted(os.walk(root))
    rows(root, "SELECT * FROM segments ORDER BY token_ids")
    assert sorted(os.walk(root)) == before
    assert list(home.iterdir()) == []


# Errors


@pytest.mark.parametrize(
    "statement",
    [
        "SELEC 1",
        "SELECT nope FROM steps",
        "SELECT * FROM nowhere",
        "SELECT 'a'::INT",
        "SELECT error('no')",
        "SELECT 1 FROM (",
        "SELECT '\udc80'",
        "SELECT * FROM range(3) t(x) WHERE clean_json('\\ud8') = ''",
    ],
)
def test_a_bad_statement_is_one_clear_line(root, statement):
    with pytest.raises(UserInputError) as error:
        rows(root, statement)
    assert str(error.value).startswith("sql: ")
    assert "\n" not in str(error.value)


def test_without_duckdb_the_package_is_named(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(UserInputError, match=r"duckdb is not installed.*k3rl\[sql\]"):
        rows(root, "SELECT 1")


def test_half_characters_do_not_spoil_the_others(root):
    (text,) = rows(root, r"""SELECT clean_json('{"a": "\ud83d\ude00\ud800", "b": [1, null]}')""")[0]
    assert json.loads(text) == {"a": "\U0001f600?", "b": [1, None]}
    assert rows(root, "SELECT clean_json(NULL)") == [(None,)]
