"""`k3rl traj sql`, `export` and `import` as a user meets them."""

import asyncio
import csv
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from k3rl.store.host import StoreHost
from k3rl.store.reader import StoreReader
from tests.builders import load_config
from tests.store.store_builders import claim_one, header, play

GOLDEN = Path(__file__).parents[1] / "data" / "store"


@pytest.fixture
def root(tmp_path):
    newest = sorted(path for path in GOLDEN.iterdir() if path.is_dir())[-1]
    return shutil.copytree(newest, tmp_path / "root")


def the_line(text):
    (line,) = text.strip().splitlines()
    assert line.startswith("error: ")
    return line


def test_sql_answers_in_three_ways(user, root):
    statement = "SELECT trajectory, num_tokens, rollout_logprobs[1:2] AS p FROM segments LIMIT 2"
    lines = user.run("traj", "sql", root, statement, "--format", "json").splitlines()
    first, _ = map(json.loads, lines)
    assert first == {"trajectory": first["trajectory"], "num_tokens": 50, "p": [None, None]}
    assert len(first["trajectory"]) == 32
    out = user.run("traj", "sql", root, statement, "--format", "csv")
    rows = list(csv.reader(io.StringIO(out)))
    assert rows[0] == ["trajectory", "num_tokens", "p"]
    assert rows[1] == [first["trajectory"], "50", "[null, null]"]
    table = user.run("traj", "sql", root, "SELECT * FROM steps", "--limit", "1").splitlines()
    assert table[0].split()[:3] == ["trajectory", "step", "context"]
    assert table[1].split()[:3] == [first["trajectory"], "0", "0"]
    assert table[2:] == ["there are more rows; --limit 0 shows all"]


def test_sql_finds_the_store_of_a_run_folder(user, root):
    user.run_folder.mkdir(parents=True)
    (user.run_folder / "config.yaml").write_text((user.folder / "e2e.yaml").read_text())
    shutil.copytree(root, user.run_folder / "store")
    out = user.run("traj", "sql", "runs/e2e", "SELECT count(*) FROM trajectories")
    assert out.split() == ["count_star()", "4"]


def test_tokens_are_not_shown_by_another_tokenizer(user, tmp_path):
    """Written here with a digest of no tokenizer; the header alone can still be shown."""
    made = replace(header(0), digests={"tokenizer": "0" * 64})

    async def write():
        config = load_config(tmp_path / "runs")
        host = StoreHost(config)
        store = await host.open()
        try:
            await store.begin([made])
            await play(store, await claim_one(store), num_steps=2)
        finally:
            await host.aclose()
        (config.run_folder / "config.yaml").write_text(config.to_yaml())

    asyncio.run(write())
    show = ("traj", "show", made.id, "--run", "runs/r")
    assert "outcome completed" in user.run(*show)
    line = the_line(user.run(*show, "--tokens", code=2))
    assert f"trajectory {made.id}: its tokenizer digest is 000000000000, this" in line


def test_sql_errors_are_one_line(user, root):
    line = the_line(user.run("traj", "sql", root, "SELEC 1", code=2))
    assert "sql: Parser Error: syntax error" in line
    line = the_line(user.run("traj", "sql", root, "FROM read_csv('/etc/passwd')", code=2))
    assert "Permission Error" in line
    line = the_line(user.run("traj", "sql", "nowhere", "SELECT 1", code=2))
    assert "nowhere: no trajectory store here" in line
    twice = ("SELECT 1 AS a, 2 AS a", "--format", "json")
    assert "same name" in the_line(user.run("traj", "sql", root, *twice, code=2))


def test_a_trajectory_goes_from_store_to_store(user, root):
    found = StoreReader(root).trajectories()[2]
    out = user.run("traj", "export", root, found.id[:8], "one.k3t")
    assert out.startswith(f"one.k3t: trajectory {found.id}, 37 tokens, 2 steps, 2 snapshots")
    assert user.run("traj", "import", "new", "one.k3t").endswith(": added\n")
    assert user.run("traj", "import", "new", "one.k3t").endswith(": was there already\n")
    assert StoreReader(user.folder / "new").trajectories() == [found]
    ids = user.run("traj", "sql", "new", "SELECT trajectory, origin FROM trajectories").split()
    assert ids[2] == found.id
    assert len(ids[3]) == 64
    assert user.run("traj", "fsck", "new").endswith("\n")


def test_export_and_import_errors_are_one_line(user, root):
    found = StoreReader(root).trajectories()[2]
    file = user.folder / "one.k3t"
    user.run("traj", "export", root, found.id, file)
    line = the_line(user.run("traj", "export", root, found.id, file, code=2))
    assert f"{file}: exists" in line
    data = file.read_bytes()
    file.write_bytes(data[:-40] + b"x" + data[-39:])
    line = the_line(user.run("traj", "import", "new", file, code=2))
    assert f"{file}: byte " in line
    assert "checksum does not match" in line
    assert "cannot be read" in the_line(user.run("traj", "import", "new", "nowhere", code=2))
    assert not (user.folder / "new").exists()
