"""What goes wrong for a user is one clear line on stderr and exit status 2."""

import subprocess

import pytest

pytestmark = pytest.mark.sandbox


def the_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line]
    assert len(lines) == 1, text
    assert lines[0].startswith("error: ")
    return lines[0]


def test_config_typo(user):
    line = the_line(user.train("rollout.num_grops=3", code=2))
    assert "rollout.num_grops" in line
    assert "rollout.num_groups" in line


def test_unknown_environment(user):
    line = the_line(user.train("envs.0.id=k3rl/Reasons-v0", code=2))
    assert "k3rl/Reasons-v0" in line
    assert "k3rl/Reason-v0" in line
    assert not user.run_folder.exists()


def test_unreachable_redis(user):
    line = the_line(user.train("store.redis=redis://:secret@127.0.0.1:1/0", code=2))
    assert "127.0.0.1:1" in line
    assert "secret" not in line


def test_corrupt_journal_tail(user):
    user.train("rollout.finished_fraction=0.25", "engine.tokens_per_s=150")
    journals = [p for p in (user.run_folder / "store" / "journal").iterdir() if p.stat().st_size]
    last = max(journals, key=lambda path: path.stat().st_mtime)
    data = bytearray(last.read_bytes())
    data[-3] ^= 0xFF
    last.write_bytes(data)
    line = the_line(user.train("run.iterations=2", code=2))
    assert str(last) in line or last.name in line
    assert "byte" in line
    assert "k3rl traj fsck" in line
    broken = user.run("traj", "fsck", code=1)
    assert last.name in broken
    user.run("traj", "fsck", "--repair", code=1)
    user.run("traj", "fsck")
    user.train("run.iterations=2")


def test_full_disk(user):
    runs = user.folder / "runs"
    runs.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(runs)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small tmpfs as the disk needs root with CAP_SYS_ADMIN")
    try:
        scratch = user.folder / "scratch"
        overrides = ["rollout.num_groups=64", f"sandbox.scratch={scratch}"]
        overrides += ["store.min_free_bytes=0", "metrics.tensorboard=false"]
        line = the_line(user.train(*overrides, code=2))
        assert "No space left on device" in line
    finally:
        subprocess.run(["umount", "-l", str(runs)], check=True)


def test_another_run_of_the_same_name_is_refused(user):
    user.train("rollout.num_groups=1")
    line = the_line(user.train("rollout.num_groups=1", "seed=5", code=2))
    assert "run.name" in line


def test_unconfined_sandbox_needs_consent(user):
    line = the_line(user.train("sandbox.backend=process", code=2))
    assert "allow_unconfined" in line
    out = user.train("sandbox.backend=process", "sandbox.allow_unconfined=true")
    assert "1.00" in out


def test_replay_of_an_unknown_trajectory(user):
    user.train("rollout.num_groups=1")
    line = the_line(user.run("replay", "ffffffffffff", code=2))
    assert "ffffffffffff" in line


def test_no_run_here(user):
    assert "--run" in the_line(user.run("traj", "ls", code=2))
