"""`k3rl traj compact`, `gc`, `pin` and `unpin` as a user meets them."""

import json
import re

import pytest

from k3rl.store.reader import StoreReader
from tests.store.store_aging import aged, tree


@pytest.fixture
def run(user):
    """A run folder with an aged store, the two newest updates of which are kept."""
    user.run_folder.mkdir(parents=True)
    text = (user.folder / "e2e.yaml").read_text()
    text += "\nstore: {retention: {keep_updates: 2, grace_s: 0.0}}\n"
    (user.run_folder / "config.yaml").write_text(text)
    for update in (4, 5):
        folder = user.run_folder / "checkpoints" / f"update-{update:08d}"
        folder.mkdir(parents=True)
        (folder / "meta.json").write_text(json.dumps({}))
    user.updates = aged(user.run_folder / "store")
    return user


def ids(run):
    return {t.id for t in StoreReader(run.run_folder / "store").trajectories()}


def test_compact(run):
    before = ids(run)
    out = run.run("traj", "compact", "runs/e2e")
    assert out.strip() == "runs/e2e/store: 6 batches written again"
    assert run.run("traj", "compact", "runs/e2e/store").endswith("0 batches written again\n")
    assert ids(run) == before
    assert " 0 findings" in run.run("traj", "fsck", "runs/e2e/store")
    assert "36 garbage_files" in run.run("traj", "fsck", "runs/e2e/store")


def test_gc_with_the_policy_of_the_run(run):
    before = tree(run.run_folder)
    said = run.run("traj", "gc", "runs/e2e", "--dry-run").splitlines()
    assert tree(run.run_folder) == before
    assert said[0].startswith("would be let go: 6 trajectories, ")
    assert said[1] == "would be deleted: 0 files, 0 blobs, 0 bytes"
    listed = {line.split()[1] for line in said if line.startswith("trajectory ")}
    old = {id for members in run.updates[:3] for id in members}
    assert listed == old
    done = run.run("traj", "gc", "runs/e2e/store").splitlines()
    assert done[0] == said[0].removeprefix("would be ")
    assert not ids(run) & old
    again = run.run("traj", "gc", "runs/e2e").splitlines()
    assert re.fullmatch(r"deleted: 12 files, 12 blobs, \d+ bytes", again[1])
    assert " 0 findings" in run.run("traj", "fsck", "runs/e2e/store")


def test_gc_without_a_run_deletes_garbage_only(run):
    (run.run_folder / "config.yaml").unlink()
    before = ids(run)
    out = run.run("traj", "gc", "runs/e2e/store").splitlines()
    assert out[0].startswith("let go: 0 trajectories, 0 bytes")
    assert ids(run) == before
    # Options make a policy; without a checkpoint any update may still be rolled back.
    run.run("traj", "gc", "runs/e2e/store", "--max-bytes", "0", "--untrained")
    assert ids(run) == before


def test_pins(run):
    out = run.run("traj", "pin", "runs/e2e", "audit")
    assert out.strip().endswith("is pinned as audit")
    assert "let go: 0 trajectories" in run.run("traj", "gc", "runs/e2e")
    (line,) = run.run("traj", "unpin", "runs/e2e", "other", code=2).strip().splitlines()
    assert line == "error: pin 'other' is unknown; there are: audit"
    run.run("traj", "unpin", "runs/e2e", "audit")
    assert "let go: 6 trajectories" in run.run("traj", "gc", "runs/e2e")


@pytest.mark.parametrize("command", [("compact",), ("gc",), ("gc", "--dry-run"), ("pin", "x")])
def test_where_there_is_no_store_it_is_one_line(user, command):
    name, *rest = command
    (line,) = user.run("traj", name, "nowhere", *rest, code=2).strip().splitlines()
    assert line.startswith("error: nowhere: no trajectory store here")
    assert not (user.folder / "nowhere").exists()
