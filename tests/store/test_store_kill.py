"""SIGKILL at any moment loses no acknowledged token and duplicates none, judged by the ledger."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from k3rl.store.fsck import check, compare_ledger
from k3rl.store.reader import StoreReader
from k3rl.types import TrajectoryState

ROOT = Path(__file__).parents[2]


def start(root, ledgers, url, mode):
    command = [sys.executable, "-m", "tests.store.store_child"]
    command += [str(root), str(ledgers), url, mode, "3"]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def killed_under_load(root, ledgers, url, rng):
    """Lines that the child wrote before it was killed."""
    child = start(root, ledgers, url, "load")
    try:
        lines = [child.stdout.readline()]
        assert lines[0].startswith("open"), child.stderr.read()
        time.sleep(rng.uniform(0.05, 0.7))
        assert child.poll() is None, child.stderr.read()
    finally:
        child.kill()
        rest, _ = child.communicate()
    return lines + rest.splitlines()


def kill_and_compare(tmp_path, url, kills, seed):
    root, ledgers, rng = tmp_path / "store", tmp_path / "ledger", random.Random(seed)
    versions = []
    for _ in range(kills):
        lines = killed_under_load(root, ledgers, url, rng)
        versions += [int(line.split()[1]) for line in lines if line.startswith("version")]
        during = compare_ledger(root, ledgers)
        # What was durable but not answered is in the store and not yet in a ledger.
        assert (during.lost, during.duplicated, during.mismatched) == ([], [], [])
    child = start(root, ledgers, url, "drain")
    out, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    assert "closed" in out
    report = compare_ledger(root, ledgers)
    assert report.is_exact, report.summary()
    assert report.num_tokens > 1000
    fsck = check(root)
    assert fsck.findings == []
    reader = StoreReader(root)
    assert {t.state for t in reader.trajectories()} == {TrajectoryState.FINISHED}
    assert len(versions) == len(set(versions))
    stored = [row.policy_version for row in reader.versions()]
    assert len(stored) == len(set(stored))
    assert set(versions) <= set(stored)
    return report


def test_killed_a_few_times(tmp_path, valkey):
    kill_and_compare(tmp_path, valkey, kills=6, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_killed_many_times(tmp_path, valkey, seed):
    kill_and_compare(tmp_path, valkey, kills=12, seed=seed)
