"""SIGKILL at every point of compaction and of garbage collection: the store is whole at each."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from k3rl.blobs import BlobStore
from k3rl.sandboxes.files.layers import large_files
from k3rl.store.compaction import Limits
from k3rl.store.fsck import check, compare_ledger
from k3rl.store.manifest import load_manifest
from k3rl.store.offline import collect_root, compact_root
from k3rl.store.reader import StoreReader
from k3rl.store.recovery import recover
from tests.store.store_aging import POLICY, aged
from tests.store.test_store_compaction import draws, filled, told
from tests.store.test_store_gc import clean, content, every

ROOT = Path(__file__).parents[2]


def killed_copies(kind, root, folder):
    """Copies of a root, each killed at another point; the last one was not."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.store.store_points", kind, str(root), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300,
                          check=True)  # fmt: skip
    *killed, last = done.stdout.splitlines()
    assert last == "done", done.stderr
    assert [int(line.split()[0]) for line in killed] == list(range(len(killed)))
    return [folder / str(n) for n in range(len(killed) + 1)], [k.split()[1] for k in killed]


def test_compaction_killed_at_every_point(tmp_path):
    filled(tmp_path / "store", [[1, -2], [4100], [3]])
    before, drawn = told(tmp_path / "store"), draws(tmp_path / "store", range(4))
    copies, calls = killed_copies("compact", tmp_path / "store", tmp_path / "copies")
    # Four files, then a record, then a file and a record for updates and for versions.
    assert calls.count("link") == 4 + 1 + 2 * 2
    assert len(calls) >= 30
    num_records = len(load_manifest(tmp_path / "store")[0].records)
    grown = []
    for copy in copies:
        assert told(copy) == before
        recover(copy, True)
        manifest, _ = load_manifest(copy)
        grown.append(len(manifest.records) - num_records)
        names = {path.name for path in (copy / "sealed").iterdir()}
        known = {Path(path).name for path in (*manifest.files, *manifest.retired)}
        assert names == known
        assert draws(copy, range(4)) == drawn
    for copy in copies[::3]:
        assert check(copy).findings == []
        compact_root(copy, Limits(min_batches=2))
        assert told(copy) == before
        assert len(recover(copy, False).manifest.files) == 6
    assert grown == sorted(grown)
    assert set(grown) == {0, 1, 2, 3}


@pytest.mark.parametrize("num_rounds", [0, 1])
def test_garbage_collection_killed_at_every_point(tmp_path, num_rounds):
    """In the round that lets go and marks, and in the one that deletes."""
    updates = aged(tmp_path / "store")
    kept = every(updates[3:])
    before = content(tmp_path / "store", kept)
    for _ in range(num_rounds):
        collect_root(tmp_path / "store", POLICY)
    copies, calls = killed_copies("gc", tmp_path / "store", tmp_path / "copies")
    assert calls.count("unlink") >= (24 if num_rounds else 2)
    final = set()
    for copy in copies:
        assert content(copy, kept) == before
        assert check(copy, references=large_files).findings == []
        for _ in range(3):
            collect_root(copy, POLICY)
        assert content(copy, kept) == before
        counts = clean(copy)
        assert counts["garbage_files"] == counts["garbage_blobs"] == 0
        assert set(StoreReader(copy).state.live.ids()) == set(kept)
        assert list((copy / "blobs").rglob(".gone-*")) == []
        final.add(frozenset(BlobStore(copy / "blobs").digests()))
    assert len(final) == 1


def killed_service(root, ledgers, url, rng):
    """A service that compacts and collects all the time is killed under load."""
    command = [sys.executable, "-m", "tests.store.store_upkeep_child"]
    command += [str(root), str(ledgers), url, "upkeep", "3"]
    child = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        lines = [child.stdout.readline()]
        assert lines[0].startswith("open"), child.stderr.read()
        while not lines[-1].startswith("upkeep"):
            lines.append(child.stdout.readline())
            assert lines[-1], child.stderr.read()
        time.sleep(rng.uniform(0.0, 0.4))
        assert child.poll() is None, child.stderr.read()
    finally:
        child.kill()
        rest, errors = child.communicate()
    assert "upkeep failed" not in errors, errors
    return lines + rest.splitlines()


def test_a_service_killed_while_it_compacts_and_collects(tmp_path, valkey):
    root, ledgers, rng = tmp_path / "store", tmp_path / "ledger", random.Random(5)
    count = 0
    for _ in range(4):
        lines = killed_service(root, ledgers, valkey, rng)
        count += sum(line.startswith("upkeep") for line in lines)
        during = compare_ledger(root, ledgers)
        assert (during.lost, during.duplicated, during.mismatched) == ([], [], [])
        assert check(root).findings == []
    assert count >= 4
    manifest, _ = load_manifest(root)
    assert sum(r.is_upkeep and bool(r.adds) for r in manifest.records) >= 2
    assert any(not os.path.exists(root / path) for path in manifest.retired)
