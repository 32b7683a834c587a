"""Owners that are killed at random leave nothing; and the census that says so can see."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from k3rl.sandboxes.census import take_census

MAIN = "from k3rl.cli.main import main; main()"


@pytest.mark.parametrize("cycles", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_nothing_is_left_of_killed_owners(cycles):
    words = ["bench", "sandbox-soak", "--cycles", str(cycles), "--seed", "3"]
    done = subprocess.run(
        [sys.executable, "-c", MAIN, *words], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 leaked" in done.stdout
    assert "folders" in done.stdout
    assert "processes" in done.stdout


@pytest.fixture
def scratch():
    """Outside pytest's own folder, which other processes may stand in."""
    folder = Path(subprocess.check_output(["mktemp", "-d"], text=True).strip())
    yield folder
    subprocess.run(["rm", "-r", folder], check=True)


def test_the_census_of_an_untouched_folder_is_empty(scratch):
    assert not take_census(scratch).processes
    assert not take_census(scratch).folders
    assert not take_census(scratch).mounts


@pytest.mark.parametrize("way", ["cwd", "argument", "program"])
def test_the_census_sees_a_process(way, scratch):
    program = scratch / "sleep"
    program.write_bytes(Path("/bin/sleep").read_bytes())
    program.chmod(0o755)
    argv = [program] if way == "program" else ["/bin/sh", "-c", "sleep 20; :", "x"]
    argv += ["20"] if way == "program" else [str(scratch / "y")] * (way == "argument")
    child = subprocess.Popen(argv, cwd=scratch if way == "cwd" else "/", start_new_session=True)
    try:
        time.sleep(0.2)
        seen = take_census(scratch).processes
        assert any(line.startswith(f"{child.pid} ") for line in seen)
    finally:
        os.killpg(child.pid, 9)
        child.wait()
    assert not take_census(scratch).processes


def test_the_census_sees_an_owner_and_a_group(scratch):
    (scratch / "owner-x").mkdir()
    assert take_census(scratch).folders == ("owner-x",)
    parent = Path("/sys/fs/cgroup/memory")
    if not os.access(parent, os.W_OK) or os.geteuid() != 0:
        pytest.skip("control groups cannot be made here")
    group = parent / "k3rl-owner-x.box"
    group.mkdir()
    try:
        assert take_census(scratch).groups == (str(group),)
        (scratch / "owner-x").rmdir()
        assert take_census(scratch).groups == ()
        assert take_census(scratch, ["owner-x"]).groups == (str(group),)
    finally:
        group.rmdir()


def test_the_census_sees_a_mount(scratch):
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    script = (
        f"mount -t tmpfs none {scratch} && exec {sys.executable} -c "
        f"'from pathlib import Path; from k3rl.sandboxes.census import take_census;"
        f' print(len(take_census(Path("{scratch}")).mounts))\''
    )
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr
