"""The same run through Ray actors: 200 tasks, and processes killed in the middle."""

import os
from collections import Counter

import pytest
import ray

from k3rl.groups import is_success
from k3rl.store.fsck import compare_ledger
from k3rl.store.reader import StoreReader

pytestmark = [pytest.mark.ray, pytest.mark.sandbox]
RAY = ["cluster.backend=ray", "rollout.num_workers=2"]


def successes(user, policies):
    counts, wins = Counter(), Counter()
    for trajectory in StoreReader(user.run_folder / "store").trajectories():
        env, key = trajectory.header.task.env_id, trajectory.header.key
        name = (env, policies[key.sample_index % len(policies)])
        counts[name] += 1
        wins[name] += is_success(trajectory.outcome)
    return counts, wins


def check_ledger(user):
    comparison = compare_ledger(user.run_folder / "store", user.run_folder / "ledger")
    assert comparison.is_exact, comparison.summary()
    assert comparison.num_entries > 0


def test_oracle_wins_and_null_loses_all_of_200_tasks_and_50_replay_identically(user):
    policies = ["oracle", "null"]
    user.train(*RAY, "engine.policies=[oracle, null]", "rollout.num_groups=440", timeout_s=600)
    counts, wins = successes(user, policies)
    assert len(counts) == 4
    for (_, policy), count in counts.items():
        assert count >= 200
        assert policy in policies
    assert all(wins[name] == (counts[name] if name[1] == "oracle" else 0) for name in counts)
    check_ledger(user)
    reader = StoreReader(user.run_folder / "store")
    with_calls = [t.id for t in reader.trajectories() if any(s.calls for s in t.steps)]
    chosen = with_calls[:: len(with_calls) // 50][:50]
    assert len(chosen) == 50
    out = user.run("replay", *chosen)
    assert sum(line.endswith(": identical") and "calls:" in line and "step " not in line
               for line in out.splitlines()) == 50  # fmt: skip


def played_with_kills(user, tools, *titles):
    """Play 48 trajectories and SIGKILL one process of each title in turn while they play."""
    process = user.start(
        "train", "e2e.yaml", *RAY, "rollout.num_groups=24", "engine.tokens_per_s=200",
        "engine.delta_tokens=5", "rollout.ack_tokens=10",
    )  # fmt: skip
    ledger = user.run_folder / "ledger"
    killed = []
    for title in titles:
        lines = tools.wait_for(lambda: count_lines(ledger))
        tools.wait_for(lambda seen=lines: count_lines(ledger) >= seen + 20)
        victims = [p for p in tools.children_titled(process, title) if p.pid not in killed]
        assert victims, f"nothing titled {title} after {len(killed)} kills"
        tools.kill(victims[0])
        killed.append(victims[0].pid)
        tools.wait_for(lambda pid=victims[0].pid: not is_alive(pid))
    out = user.finish(process)
    counts, wins = successes(user, ["oracle", "random"])
    assert sum(counts.values()) == 48
    assert all(wins[name] == counts[name] for name in counts if name[1] == "oracle")
    check_ledger(user)
    assert " 0 lost" in user.run("traj", "fsck", "--ledger", str(ledger))
    return out


def count_lines(folder):
    return sum(len(path.read_bytes().splitlines()) for path in folder.glob("*.jsonl"))


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_killed_rollout_worker_loses_and_duplicates_nothing(user, tools):
    out = played_with_kills(user, tools, "ray::WorkerActor")
    assert " 1 worker restarts" in out


def test_a_killed_store_service_loses_and_duplicates_nothing(user, tools):
    out = played_with_kills(user, tools, "ray::StoreActor")
    assert " 0 worker restarts" in out


def test_a_run_on_an_existing_cluster_leaves_it_standing(user, tools):
    ray.init(
        "local",
        num_cpus=2,
        resources={"rollout": 2, "store": 1, "learner": 1},
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
    )
    try:
        address = ray.get_runtime_context().gcs_address
        out = user.train(*RAY, f"cluster.address={address}")
        assert "1.00" in out
        check_ledger(user)
        assert ray.is_initialized()
        tools.wait_for(lambda: ray.available_resources().get("rollout") == 2)
    finally:
        ray.shutdown()


def test_a_cluster_without_the_resource_tags_is_one_line(user):
    ray.init(
        "local",
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
    )
    try:
        address = ray.get_runtime_context().gcs_address
        err = user.train(*RAY, f"cluster.address={address}", code=2)
        assert "ray_cluster.yaml" in err
        assert "CPU 2, rollout 2, store 1" in err
    finally:
        ray.shutdown()


@pytest.mark.slow
def test_many_kills_of_both_in_one_run(user, tools):
    out = played_with_kills(user, tools, *["ray::StoreActor", "ray::WorkerActor"] * 3)
    assert " 3 worker restarts" in out


def test_a_killed_driver_carries_on_and_plays_what_an_undisturbed_run_plays(user, tools):
    command = ["train", "e2e.yaml", *RAY, "rollout.num_groups=8", "engine.tokens_per_s=200"]
    process = user.start(*command)
    tools.wait_for(lambda: count_lines(user.run_folder / "ledger") >= 30)
    titles = ["ray::StoreActor", "ray::WorkerActor"]
    actors = [actor for title in titles for actor in tools.children_titled(process, title)]
    assert len(actors) >= 3
    process.kill()
    process.wait()
    _, alive = tools.psutil.wait_procs(actors, timeout=60)
    assert not alive
    out = user.run(*command)
    assert " 0 trajectories unfinished" in out
    counts, _ = successes(user, ["oracle", "random"])
    assert sum(counts.values()) == 16
    check_ledger(user)
