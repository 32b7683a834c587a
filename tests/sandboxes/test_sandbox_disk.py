"""What a workspace weighs, and commands that make it too heavy; floods are the suite's."""

import asyncio
import errno
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from k3rl.errors import SandboxError, UserInputError
from k3rl.sandboxes import disk, probe
from k3rl.sandboxes.base import ExecRequest, run
from k3rl.sandboxes.files import trees
from k3rl.sandboxes.files.weights import HELD_FOLDERS, Moved, Stopped, Weight, weigh
from k3rl.sandboxes.spec import MIB, Capability, SandboxLimits, SandboxSpec
from tests.sandboxes.sandbox_helpers import ANY, play, reachable_bwrap, sh

REPOSITORY = Path(__file__).parents[2]
pytestmark = [pytest.mark.sandbox]
LITTLE = SandboxSpec(limits=SandboxLimits(workspace_bytes=16 * MIB), required=())
GROW = "head -c 24M /dev/zero > {name}; sleep 5; echo slept"


def disk_usage(folder):
    rows = subprocess.run(["du", "-s", "-B1", folder], capture_output=True, check=True).stdout
    own = folder.lstat().st_blocks * 512
    return int(rows.split()[0]) - own


def test_a_folder_weighs_what_it_takes(tmp_path):
    root = tmp_path / "root"
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "file").write_bytes(os.urandom(100_000))
    os.link(root / "a" / "file", root / "linked")
    with open(root / "sparse", "wb") as file:
        file.truncate(1 << 40)
    os.symlink("/usr", root / "a" / "b" / "usr")
    os.mkfifo(root / "pipe")
    found = weigh(root)
    assert found == Weight(disk_usage(root), 7)
    assert 100_000 <= found.num_bytes < 200_000


def test_weighing_ends_early_when_it_knows_enough_or_is_called_off(tmp_path):
    for number in range(3000):
        (tmp_path / f"{number}").touch()
    assert weigh(tmp_path, most=Weight(0, 10_000)).num_entries == 3000
    assert 1500 < weigh(tmp_path, most=Weight(1 << 40, 1500)).num_entries < 3000
    with pytest.raises(Stopped):
        weigh(tmp_path, is_off=lambda: True)


DEPTH = 3000


@pytest.fixture
def deep(tmp_path):
    """A chain of folders that no path reaches the end of, with a file there."""
    handle = os.open(tmp_path, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("d", dir_fd=handle)
        deeper = os.open("d", os.O_RDONLY, dir_fd=handle)
        os.close(handle)
        handle = deeper
    with open(os.open("f", os.O_WRONLY | os.O_CREAT, dir_fd=handle), "wb") as file:
        file.write(bytes(1 << 20))
    os.close(handle)
    yield tmp_path
    trees.remove_tree(tmp_path)
    tmp_path.mkdir()


def test_depth_hides_nothing_and_takes_few_descriptors(deep):
    most = []

    def look():
        most.append(len(os.listdir("/proc/self/fd")))
        return False

    before = len(os.listdir("/proc/self/fd"))
    found = weigh(deep, is_off=look)
    assert found == Weight(DEPTH * 4096 + (1 << 20), DEPTH + 1)
    assert max(most) < before + HELD_FOLDERS + 8
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_deep_folder_that_moves_is_noticed(deep):
    count = 0

    def move():
        nonlocal count
        count += 1
        if count == DEPTH:  # the walk is on its way back from the end
            handle = os.open(deep, os.O_RDONLY)
            for _ in range(DEPTH - 10):
                deeper = os.open("d", os.O_RDONLY, dir_fd=handle)
                os.close(handle)
                handle = deeper
            os.rename("d", deep / "moved", src_dir_fd=handle)
            os.close(handle)
        return False

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Moved):
        weigh(deep, is_off=move)
    assert len(os.listdir("/proc/self/fd")) == before


EDITS = """
set -e
rm -r gone; rm -r replaced; mkdir replaced; head -c 5000 /dev/zero > replaced/new
echo more >> touched/file; rm single; ln -s touched single; mkdir -p fresh/deep
echo x > fresh/deep/x
rm -r turned; echo file > turned; rm flat; mkdir flat; echo y > flat/y
"""
GIVEN = {
    "gone/a": b"1" * 9000, "gone/deep/b": b"2", "replaced/old": b"3" * 9000, "flat": b"4" * 9000,
    "touched/file": b"5" * 9000, "touched/other": b"6" * 9000, "single": b"7" * 9000,
    "turned/x": b"8", "turned/y/z": b"9" * 9000, "kept": b"0" * 9000,
}  # fmt: skip


@pytest.mark.parametrize("is_sealed", [False, True])
def test_an_overlay_weighs_what_its_merged_tree_would_as_a_folder(is_sealed, tmp_path):
    async def body(backend):
        box = await backend.create(ANY, GIVEN)
        if is_sealed:  # a layer in the upper folder, and then one below it
            await sh(backend, box, "echo 1 > gone/c; echo 2 > touched/more")
            await backend.snapshot(box, {})
            await backend.fork(box, 1)
        made = await sh(backend, box, EDITS)
        assert made.exit_code == 0, made.stderr
        weights.append(backend._box(box).workspace.weigh())

    weights = []
    for kind in ("bwrap", "process"):
        play(kind, tmp_path / kind, body)
    assert weights[0].num_entries == weights[1].num_entries
    assert abs(weights[0].num_bytes - weights[1].num_bytes) <= 4096 * weights[0].num_entries / 4


def test_growth_beyond_a_limit_is_a_result_and_what_deletes_may_run(kind, tmp_path):
    async def body(backend):
        box = await backend.create(LITTLE)
        begun = time.monotonic()
        first = await sh(backend, box, "printf odd >&2; " + GROW.format(name="a"))
        assert time.monotonic() - begun < 4
        assert (first.exit_code, first.timed_out, first.stdout) == (137, False, b"")
        told = rb"odd\nk3rl: killed, its workspace is too large: \d+ bytes .* than 16777216\n"
        assert re.fullmatch(told, first.stderr)
        # Neither more nor less.
        idle = await sh(backend, box, "sleep 1.3; test $(wc -c < a) -gt 16777216 && echo large")
        assert (idle.exit_code, idle.stdout) == (0, b"large\n")
        again = await sh(backend, box, GROW.format(name="b"))
        assert again.exit_code == 137
        cleared = await sh(backend, box, "rm a b; sleep 0.2; echo fine > c; cat c")
        assert (cleared.exit_code, cleared.stdout) == (0, b"fine\n")
        assert (await sh(backend, box, "head -c 8M /dev/zero > d; sleep 0.2")).exit_code == 0

    play(kind, tmp_path, body)


def test_short_commands_cannot_pile_up(kind, tmp_path):
    async def body(backend):
        box = await backend.create(LITTLE)
        codes = [
            (await sh(backend, box, f"head -c 3M /dev/zero > f{n}")).exit_code for n in range(9)
        ]
        assert codes[:5] == [0] * 5
        assert set(codes[6:]) == {137}

    play(kind, tmp_path, body)


def test_a_restored_tree_weighs_at_once(kind, tmp_path):
    async def body(backend):
        roomy = await backend.create(ANY)
        await sh(backend, roomy, "head -c 14M /dev/urandom > large")
        twin = await backend.restore(LITTLE, await backend.snapshot(roomy, {}))
        (fork,) = await backend.fork(twin, 1)
        for each in (twin, fork):
            result = await sh(backend, each, "head -c 4M /dev/zero > more; sleep 5")
            assert result.exit_code == 137, result
            assert (await sh(backend, each, "rm large more; sleep 0.2")).exit_code == 0

    play(kind, tmp_path, body)


def test_what_others_write_is_not_counted(tmp_path):
    async def body(backend):
        large = await backend.create(ANY)
        small = await backend.create(LITTLE, {"own": b"x" * (8 << 20)})
        script = "for n in 1 2 3 4 5 6; do head -c 10M /dev/zero > f$n; sleep 0.1; done; echo all"
        runs = [sh(backend, box, script) for box in (large,)]
        runs.append(sh(backend, small, "for n in 1 2 3 4 5 6; do echo x > f$n; sleep 0.1; done"))
        assert [result.exit_code for result in await asyncio.gather(*runs)] == [0, 0]

    play("bwrap", tmp_path, body)


def test_growth_that_others_hide_by_deleting_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(disk.DiskWatch, "_is_suspect", lambda self, run: False)

    async def body(backend):
        box = await backend.create(LITTLE)
        result = await sh(backend, box, GROW.format(name="a"))
        assert (result.exit_code, result.stdout) == (137, b"")
        assert 1.0 <= result.wall_s < 4

    play("bwrap", tmp_path, body)


def test_leaving_a_command_while_its_workspace_is_weighed_waits_for_that(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "REVIEW_S", 0.0)
    monkeypatch.setattr(disk, "REVIEW_REST", 0.0)
    monkeypatch.setattr(disk, "REST", 0.0)
    monkeypatch.setattr(disk, "LOOK_S", 0.001)
    make = "import os\nfor n in range(5000): os.close(os.open(f'f{n}', os.O_CREAT))"

    async def body(backend):
        box = await backend.create(ANY)
        made = await run(backend, box, ExecRequest(("python3", "-c", make), deadline_s=60))
        assert made.exit_code == 0
        for _ in range(5):
            running = asyncio.create_task(sh(backend, box, "sleep 60", deadline_s=60))
            await asyncio.sleep(0.03)
            watched = set(backend._disk._runs)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert all(each.weighing is None or each.weighing.done() for each in watched)
        assert backend._disk._runs == set()
        assert (await sh(backend, box, "ls | wc -l")).stdout == b"5000\n"

    play("bwrap", tmp_path, body)


def test_a_workspace_that_cannot_be_weighed_is_a_failure_of_the_machine(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    async def body(backend):
        box = await backend.create(ANY)
        monkeypatch.setattr(disk, "held_bytes", fail)
        monkeypatch.setattr(disk, "REVIEW_S", 0.0)
        with pytest.raises(SandboxError, match=r"cannot weigh its workspace: .*Input/output"):
            await sh(backend, box, "sleep 5")

    play("bwrap", tmp_path, body)


def test_a_name_that_has_become_a_link_is_not_lent_permission(tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(secret)
    handle = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(NotADirectoryError):
            trees.open_lent("link", handle, trees.FOLDER_FLAGS, 0o777)
        assert secret.stat().st_mode & 0o777 == 0o700
        (tmp_path / "closed").mkdir(mode=0)
        os.close(trees.open_lent("closed", handle, trees.FOLDER_FLAGS, 0o500))
        assert (tmp_path / "closed").stat().st_mode & 0o777 == 0o500
    finally:
        os.close(handle)


@pytest.mark.parametrize(("alone_s", "is_found"), [(3, True), (0.2, False)])
def test_the_probe_tries_a_late_watch_again(tmp_path, monkeypatch, alone_s, is_found):
    monkeypatch.setattr(disk.DiskWatch, "_is_suspect", lambda self, run: False)
    monkeypatch.setattr(disk, "REVIEW_S", 1.0)
    monkeypatch.setattr(probe, "FULL_S", 0.2)
    monkeypatch.setattr(probe, "LONG_FULL_S", alone_s)

    async def body(backend):
        assert (Capability.DISK_LIMIT in await backend.capabilities()) == is_found

    play("bwrap", tmp_path, body)


def test_limits_that_are_none_are_refused_by_name():
    for name in ("workspace_bytes", "workspace_entries", "max_processes", "tmp_bytes"):
        with pytest.raises(UserInputError, match=rf"{name}: 0 is not between"):
            SandboxLimits(**{name: 0})


HIDING = """
import asyncio, concurrent.futures.thread, json, os, sys
from pathlib import Path
from k3rl.blobs import BlobStore
from k3rl.sandboxes.backends.bwrap import BwrapBackend
from k3rl.sandboxes.base import ExecRequest, run
from k3rl.sandboxes.spec import SandboxLimits, SandboxSpec
folder, program = map(Path, sys.argv[1:])
os.setgroups([]); os.setresgid(54321, 54321, 54321); os.setresuid(54321, 54321, 54321)
SCRIPT = "mkdir d; exec 3> d/f; chmod 0 d; head -c 24M /dev/zero >&3; sleep 5; echo slept"
async def main():
    backend = BwrapBackend(BlobStore(folder / "blobs"), folder / "scratch", program)
    spec = SandboxSpec(limits=SandboxLimits(workspace_bytes=16 << 20), required=())
    box = await backend.create(spec)
    hidden = await run(backend, box, ExecRequest(("sh", "-c", SCRIPT)))
    after = await run(backend, box, ExecRequest(("sh", "-c", "stat -c %a d; chmod 700 d; rm -r d")))
    await backend.aclose()
    print(json.dumps([hidden.exit_code, after.exit_code, after.stdout.decode()]))
asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_closed_folder_hides_nothing_from_an_ordinary_user(open_folder):
    argv = [sys.executable, "-c", HIDING, open_folder, reachable_bwrap(open_folder)]
    done = subprocess.run(list(map(str, argv)), cwd=REPOSITORY, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout) == [137, 0, "0\n"]
