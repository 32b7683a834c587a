"""`k3rl sandbox` and `k3rl bench sandbox` from the command line."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from k3rl.sandboxes.listing import live_sandboxes
from k3rl.types import digest_json
from tests.sandboxes.landlock_helpers import needs_landlock

pytestmark = pytest.mark.sandbox
MAIN = "from k3rl.cli.main import main; main()"
OWNER = """
import asyncio, sys
from pathlib import Path
from k3rl.blobs import BlobStore
from k3rl.sandboxes.base import ExecRequest
from k3rl.sandboxes.spec import SandboxSpec
from k3rl.sandboxes.backends.bwrap import BwrapBackend

async def main():
    here = Path(sys.argv[1])
    backend = BwrapBackend(BlobStore(here / "blobs"), here / "scratch")
    box = await backend.create(SandboxSpec(required=()))
    async for _ in backend.exec(box, ExecRequest(("sh", "-c", "echo up; sleep 60"), b"", 60)):
        print("up", flush=True)

asyncio.run(main())
"""


def k3rl(*words, text="", status=0):
    done = subprocess.run(
        [sys.executable, "-c", MAIN, *map(str, words)],
        input=text, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    return done


def settled(owner):
    """The sandbox of a process, when the agent, sh and sleep run in it."""
    end = time.monotonic() + 20
    while True:
        (mine,) = [each for each in live_sandboxes() if each.owner == owner]
        if mine.num_processes >= 3:
            return mine
        assert time.monotonic() < end


def enforced(table):
    return dict(line.split()[:2] for line in table.splitlines()[1:])


def test_check_tells_what_is_enforced():
    rows = enforced(k3rl("sandbox", "check").stdout)
    assert rows["no_network"] == rows["snapshot"] == "enforced"
    rows = enforced(k3rl("sandbox", "check", "--backend", "process", status=1).stdout)
    assert rows["no_network"] == "MISSING"
    assert rows["snapshot"] == "enforced"


@needs_landlock
def test_check_and_ps_know_landlock():
    rows = enforced(k3rl("sandbox", "check", "--backend", "landlock").stdout)
    assert (rows["isolated_files"], rows["hidden_paths"]) == ("enforced", "MISSING")
    shell = subprocess.Popen(
        [sys.executable, "-c", MAIN, "sandbox", "shell", "--backend", "landlock"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with shell:
        shell.stdin.write("echo up\nsleep 60\n")
        shell.stdin.flush()
        assert shell.stdout.readline() == "up\n"
        assert not settled(shell.pid).is_orphan
        shell.send_signal(signal.SIGINT)


def test_a_shell_goes_on_from_line_to_line_and_loses_its_files_at_the_end(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "given").write_text("hello\n")
    lines = "cat given\nmkdir d; cd d; z=zed\npwd; echo x > y\nnosuch\ncat y; cat ../d/y $z\nexit\n"
    done = k3rl("sandbox", "shell", "--folder", tmp_path / "in", text=lines)
    assert done.stdout.splitlines() == ["hello", "/workspace/d", "x", "x"]
    assert done.stderr.splitlines() == [
        "bash: line 1: nosuch: command not found", "cat: zed: No such file or directory"
    ]  # fmt: skip
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["given"]
    assert "no such folder" in k3rl("sandbox", "shell", "--folder", "nowhere", status=2).stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's scratch needs an open folder")
def test_ps_lists_a_live_sandbox_and_reap_clears_up_after_its_owner(tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout.readline() == "up\n"
        mine = settled(owner.pid)
        assert not mine.is_orphan
        row = next(r for r in k3rl("sandbox", "ps").stdout.splitlines() if str(owner.pid) in r)
        assert row.split()[0] == str(mine.pid)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    limit = time.monotonic() + 10
    while any(each.owner == owner.pid for each in live_sandboxes()):
        assert time.monotonic() < limit
        time.sleep(0.05)
    scratch = real_scratch(tmp_path)
    assert [path.name.split("-")[3] for path in scratch.glob("owner-*")] == [str(owner.pid)]
    assert "1 removed" in k3rl("sandbox", "reap", scratch).stdout
    assert not list(scratch.glob("owner-*"))
    assert "no such folder" in k3rl("sandbox", "reap", tmp_path / "nowhere", status=2).stderr


def real_scratch(folder: Path) -> Path:
    """The scratch folder, or the stand-in that root takes when it lies behind a closed one."""
    scratch = folder / "scratch"
    stand_in = Path("/tmp", f"k3rl-{os.geteuid()}-{digest_json(str(scratch))[:16]}")
    return stand_in if stand_in.exists() else scratch


def test_bench_prints_each_quantity_with_its_bar():
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "bench", "sandbox", "--runs", "2"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr  # bars are for a quiet machine
    for name in ("create to first command", "command", "snapshot of 2 MB", "64 forks of 100 MB"):
        assert name in done.stdout
