"""SIGKILL at any moment loses no acknowledged token and duplicates none, judged by the ledgers.

One service process and three writers with a ledger each, and who feeds them, all over one socket.
The service is killed again and again: at random times, and at the numbered points of a commit;
writers are killed too, now and then.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from k3rl.store.fsck import check, compare_ledger
from k3rl.store.reader import StoreReader
from k3rl.types import TrajectoryState
from tests.store.store_child import POINTS, WRITER_POINTS

ROOT = Path(__file__).parents[2]
WRITERS = ("w0", "w1", "w2")
SERVICE_POINTS = [name for name in POINTS if name not in WRITER_POINTS]
RARE = ("journal goes", "journal gone", "journal created")
PATIENCE_S = 120.0


class Load:
    """The processes; `kills` counts what was killed, by where."""

    def __init__(self, folder, url, seed):
        self.root, self.ledgers = folder / "store", folder / "ledger"
        self.rng, self.seed = random.Random(seed), seed
        self.kills, self.writers = {}, {}
        self.ledgers.mkdir()
        self.errors = open(folder / "errors", "w+")  # noqa: SIM115
        command = [sys.executable, "-m", "tests.store.store_child"]
        self.process = subprocess.Popen(
            [*command, str(self.root), str(self.ledgers), url],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
        )  # fmt: skip

    def start(self, *words):
        self.process.stdin.write("\t".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def start_writer(self, name, *where):
        self.writers[name] = self.start("write", name, f"{self.seed} {self.rng.random()}", *where)

    def wait_gone(self, pid, why):
        end = time.monotonic() + PATIENCE_S
        while is_alive(pid):
            assert time.monotonic() < end, f"{why}: still alive; {self.said()}"
            time.sleep(0.005)

    def kill(self, pid, where):
        assert is_alive(pid), f"{where}: {self.said()}"
        os.kill(pid, signal.SIGKILL)
        self.wait_gone(pid, where)
        self.kills[where] = self.kills.get(where, 0) + 1

    def said(self):
        self.errors.seek(0)
        return self.errors.read()[-3000:]

    def close(self):
        self.process.kill()
        self.process.communicate()
        self.errors.close()


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_open(load, pid):
    """Until the service that was just started listens: it makes the socket anew."""
    socket, end = load.root.parent / "socket", time.monotonic() + PATIENCE_S
    while not socket.exists():
        assert is_alive(pid), load.said()
        assert time.monotonic() < end, load.said()
        time.sleep(0.005)


def kill_at_random(load):
    """A moment after it listens, or while it is still opening."""
    (load.root.parent / "socket").unlink(missing_ok=True)
    pid = load.start("serve")
    if load.rng.random() < 0.8:
        wait_open(load, pid)
    time.sleep(load.rng.uniform(0.02, 0.5))
    if load.rng.random() < 0.3:
        name = load.rng.choice(WRITERS)
        load.kill(load.writers[name], "writer")
        load.start_writer(name)
        time.sleep(load.rng.uniform(0.0, 0.1))
    load.kill(pid, "random")


def kill_at_point(load, name):
    count = load.rng.randint(1, 2 if name in RARE else 8)
    pid = load.start("serve", name, count)
    load.wait_gone(pid, f"{name} {count}")
    load.kills[name] = load.kills.get(name, 0) + 1


def kill_at_writer_point(load, name):
    """The service goes on meanwhile, and is killed after that."""
    service, writer = load.start("serve"), load.rng.choice(WRITERS)
    load.kill(load.writers[writer], "writer")
    load.start_writer(writer, name, load.rng.randint(1, 3))
    load.wait_gone(load.writers[writer], name)
    load.kills[name] = load.kills.get(name, 0) + 1
    load.start_writer(writer)
    load.kill(service, "random")


def kill_and_compare(folder, url, num_random, points, seed):
    load = Load(folder, url, seed)
    try:
        for name in WRITERS:
            load.start_writer(name)
        feeder = load.start("feed")
        works = ["random"] * num_random + points
        load.rng.shuffle(works)
        for number, what in enumerate(works):
            if what == "random":
                kill_at_random(load)
            elif what in WRITER_POINTS:
                kill_at_writer_point(load, what)
            else:
                kill_at_point(load, what)
            if number % 10 == 9:
                check_between(load)
        for pid in (feeder, *load.writers.values()):
            load.kill(pid, "end")
        drain(load)
        return check_end(load)
    finally:
        load.close()


def check_between(load):
    """What was durable but not answered is in the store and not yet in a ledger."""
    report = compare_ledger(load.root, load.ledgers)
    assert (report.lost, report.duplicated, report.mismatched) == ([], [], [])


def drain(load):
    """Everything that was begun is played to its end, and every answer noted."""
    service = load.start("serve")
    for _ in range(2):
        drainers = [load.start("drain", name) for name in WRITERS]
        for pid in drainers:
            load.wait_gone(pid, "draining")
    os.kill(service, signal.SIGTERM)
    load.wait_gone(service, "closing")


def check_end(load):
    assert load.said() == ""
    report = compare_ledger(load.root, load.ledgers)
    assert report.is_exact, report.summary()
    assert report.num_tokens > 1000
    assert check(load.root).findings == []
    reader = StoreReader(load.root)
    assert {t.state for t in reader.trajectories()} == {TrajectoryState.FINISHED}
    versions = [int(line) for line in (load.ledgers / "versions").read_text().splitlines()]
    assert versions
    assert len(versions) == len(set(versions))
    stored = [row.policy_version for row in reader.versions()]
    assert len(stored) == len(set(stored))
    assert set(versions) <= set(stored)
    return report, load.kills


def test_killed_a_few_times(tmp_path, valkey):
    points = ["journal written", "sealed linked", "record linked", "record named", "answer"]
    _, kills = kill_and_compare(tmp_path, valkey, 5, points, seed=1)
    assert kills["random"] == 5
    assert set(points) <= set(kills)


@pytest.mark.slow
def test_killed_two_hundred_times(tmp_path, valkey):
    points = [name for name in SERVICE_POINTS for _ in range(6)]
    points += [name for name in WRITER_POINTS for _ in range(4)]
    begun = time.monotonic()
    report, kills = kill_and_compare(tmp_path, valkey, 104, points, seed=2)
    print(f"{report.summary()}; killed {kills} in {time.monotonic() - begun:.0f} s")
    at_points = {name: n for name, n in kills.items() if name in POINTS}
    assert set(at_points) == set(POINTS)
    assert sum(at_points.values()) >= 100
    assert kills["random"] >= 100
