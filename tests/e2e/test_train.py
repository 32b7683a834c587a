"""`k3rl train` in one process: play, look, replay, carry on."""

import json

import pytest
import yaml

from k3rl.store.protocol import Ref
from k3rl.store.reader import StoreReader
from k3rl.types import TrajectoryState

pytestmark = pytest.mark.sandbox


def test_a_run_can_be_played_looked_at_checked_and_replayed(user):
    out = user.train()
    assert "nothing was trained" in out
    oracle_rows = [line for line in out.splitlines() if "oracle" in line]
    assert len(oracle_rows) == 2
    assert all("1.00" in row for row in oracle_rows)

    reader = StoreReader(user.run_folder / "store")
    trajectories = reader.trajectories()
    assert len(trajectories) == 8
    first = trajectories[0]
    assert first.id[:12] in user.run("traj", "ls")
    shown = user.run("traj", "show", first.id[:12], "--tokens")
    assert "outcome completed" in shown
    assert "<|end_of_msg|>" in shown
    fsck = user.run("traj", "fsck", "--ledger", str(user.run_folder / "ledger"))
    assert " 0 lost" in fsck
    assert " 0 duplicated" in fsck
    replayed = user.run("replay", *(t.id for t in trajectories))
    for trajectory in trajectories:
        verdict = next(line for line in replayed.splitlines() if line.startswith(trajectory.id))
        assert verdict.endswith("calls: identical")
    metrics = [json.loads(line) for line in (user.run_folder / "metrics.jsonl").open()]
    assert metrics[0]["rollout/num_finished"] == 8
    assert list((user.run_folder / "tensorboard").iterdir())
    for path in user.run_folder.rglob("*"):
        if path.is_file():
            head = path.read_bytes()[:2]
            assert not (head[:1] == b"\x80" and head[1:] in b"\2\3\4\5"), f"{path}: a pickle"


def test_dry_run_prints_the_resolved_config_and_starts_nothing(user):
    printed = yaml.safe_load(user.train("rollout.num_groups=9", "--dry-run"))
    assert printed["rollout"]["num_groups"] == 9
    assert printed["store"]["redis"] == "embedded"
    assert not user.run_folder.exists()


def tokens_of(folder):
    """Everything of a run that must not depend on pauses or processes."""
    reader = StoreReader(folder / "store")
    found = {}
    for trajectory in reader.trajectories():
        if trajectory.state is not TrajectoryState.FINISHED:
            continue
        read = reader.read(Ref(trajectory.id))
        steps = [
            (s.token_start, s.token_end, s.snapshot_after, s.tree_digest, s.env_state)
            for s in trajectory.steps
        ]
        calls = [(c.call, c.status, c.output_digest) for s in trajectory.steps for c in s.calls]
        arrays = [read.token_ids, read.loss_mask, read.rollout_logprobs]
        found[trajectory.id] = ([a.tobytes() for a in arrays], steps, calls, trajectory.outcome)
    return found


def test_paused_in_one_process_and_resumed_in_another_equals_uninterrupted(user, tmp_path):
    # A pace of 150 tokens/s makes a turn last a good part of a second, so the pause at a quarter
    # of the trajectories lands in the middle of turns.
    pace = ["engine.tokens_per_s=150", "engine.delta_tokens=3", "rollout.ack_tokens=7"]
    user.train(*pace, "rollout.finished_fraction=0.25")
    reader = StoreReader(user.run_folder / "store")
    paused = [t for t in reader.trajectories() if t.state is TrajectoryState.PAUSED]
    assert paused
    assert any(reader.num_acknowledged_tokens(t.id) > t.num_tokens for t in paused)
    user.train(*pace, "rollout.finished_fraction=1.0", "run.iterations=2")
    interrupted = tokens_of(user.run_folder)

    (tmp_path / "whole").mkdir()
    whole = type(user)(tmp_path / "whole")
    whole.train("engine.tokens_per_s=150", "engine.delta_tokens=3", "run.iterations=2")
    uninterrupted = tokens_of(whole.run_folder)
    for trajectory in paused:
        assert interrupted[trajectory.id] == uninterrupted[trajectory.id]
    both = set(interrupted) & set(uninterrupted)
    assert len(both) >= 8
    assert all(interrupted[id] == uninterrupted[id] for id in both)
    fsck = user.run("traj", "fsck", "--ledger", str(user.run_folder / "ledger"))
    assert " 0 lost" in fsck


def test_flushall_in_the_middle_of_a_run_is_survived(user, tools):
    import redis

    process = user.start("train", "e2e.yaml", "engine.tokens_per_s=100", "rollout.num_groups=8")
    socket = tools.wait_for(lambda: find_socket(tools, process))
    client = redis.Redis(unix_socket_path=socket)
    tools.wait_for(lambda: (user.run_folder / "ledger").exists())
    flushes = 0
    while process.poll() is None and flushes < 3:
        client.flushall()
        flushes += 1
        tools.time.sleep(0.5)
    out = user.finish(process)
    assert flushes == 3
    assert " 0 index rebuilds" not in out
    assert " 0 trajectories unfinished" in out
    assert " 0 lost" in user.run("traj", "fsck", "--ledger", str(user.run_folder / "ledger"))


def find_socket(tools, process):
    """The unix socket the run's own Valkey listens on."""
    for server in tools.children_titled(process, "valkey-server"):
        for connection in server.net_connections(kind="unix"):
            if connection.laddr and connection.status in ("LISTEN", "NONE"):
                return connection.laddr
    return None


def test_list_and_doctor(user):
    listed = user.run("envs", "list")
    assert "k3rl/Reason-v0" in listed
    assert "k3rl/FileHunt-v0" in listed
    checked = user.run("doctor")
    assert "MISSING" not in checked
