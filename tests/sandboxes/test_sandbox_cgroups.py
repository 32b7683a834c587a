"""One limit for the memory, and one for the processes, of a whole sandbox; and no group left."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from k3rl.blobs import BlobStore
from k3rl.errors import CapabilityMissing
from k3rl.sandboxes.backends import bwrap
from k3rl.sandboxes.backends.bwrap import BwrapBackend
from k3rl.sandboxes.base import ExecRequest, run
from k3rl.sandboxes.processes import cgroups
from k3rl.sandboxes.processes.cgroups import Cgroups, find_cgroups, remove_groups
from k3rl.sandboxes.processes.limits import limited
from k3rl.sandboxes.scratch import open_scratch, sandbox_identity
from k3rl.sandboxes.spec import MIB, Capability, SandboxLimits, SandboxSpec
from tests.sandboxes.sandbox_helpers import ANY, sh

REPOSITORY = Path(__file__).parents[2]


def has_groups() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        return find_cgroups(Path(folder)) is not None


pytestmark = [pytest.mark.sandbox]
needs_groups = pytest.mark.skipif(
    not has_groups(), reason="no control group with a memory limit may be made here"
)


@pytest.fixture
def folder():
    """A folder under /tmp that every user can use, unlike pytest's."""
    path = Path(tempfile.mkdtemp(prefix="k3rl-test-", dir="/tmp"))
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


def groups_of(pid: int) -> list[str]:
    """Control groups that are named after an owner in the process `pid`."""
    mark = re.compile(rf"^k3rl-owner-\w+-\w+-{pid}-")
    return [place for place, _, _ in os.walk("/sys/fs/cgroup") if mark.match(Path(place).name)]


def with_backend(folder, body, change=lambda backend: None):
    async def main():
        backend = BwrapBackend(BlobStore(folder / "blobs"), folder / "scratch")
        change(backend)
        try:
            return await body(backend)
        finally:
            await backend.aclose()

    return asyncio.run(main())


def without_groups(backend):
    backend._cgroups = None


def spec(**limits):
    return SandboxSpec(limits=SandboxLimits(**limits), required=())


BOMB = """
import os
go, hold = os.pipe()
pids = []
for _ in range(12):
    told, tell = os.pipe()
    pids.append(os.fork())
    if not pids[-1]:
        os.close(hold)
        data = b"x" * (40 << 20)
        os.write(tell, b"x")
        os.read(go, 1)
        os._exit(0)
    os.close(tell)
    os.read(told, 1)
os.close(hold)
print(sum(os.waitpid(pid, 0)[1] == 0 for pid in pids))
"""
"""Twelve processes of 40 MiB each, far below the limit of one process."""


@needs_groups
def test_a_memory_bomb_of_many_processes_is_a_result(folder):
    async def body(backend):
        box = await backend.create(spec(total_memory_bytes=200 * MIB))
        await sh(backend, box, "true")
        live = backend._box(box).live
        result = await run(backend, box, ExecRequest(("python3", "-c", BOMB), deadline_s=60))
        survivors = int(result.stdout) if result.exit_code == 0 else 0
        assert survivors < 12, result
        assert not result.timed_out
        # The agent outlived it.
        assert (await sh(backend, box, "echo fine")).stdout == b"fine\n"
        assert backend._box(box).live is live

    async def control(backend):
        box = await backend.create(spec(total_memory_bytes=1024 * MIB))
        result = await run(backend, box, ExecRequest(("python3", "-c", BOMB), deadline_s=60))
        assert result.stdout == b"12\n", result

    with_backend(folder, body)
    with_backend(folder, control)


@needs_groups
def test_a_command_that_takes_too_much_is_killed(folder):
    script = "data = b'x' * (120 << 20); print('has it')"

    async def body(backend):
        box = await backend.create(spec(total_memory_bytes=64 * MIB))
        result = await run(backend, box, ExecRequest(("python3", "-c", script)))
        assert (result.exit_code, result.timed_out, result.stdout) == (137, False, b"")
        assert (await sh(backend, box, "echo fine")).stdout == b"fine\n"

    async def control(backend):
        box = await backend.create(spec(total_memory_bytes=64 * MIB))
        result = await run(backend, box, ExecRequest(("python3", "-c", script)))
        assert result.stdout == b"has it\n"

    with_backend(folder, body)
    with_backend(folder, control, without_groups)


HOSTILE = """
echo 0 > /proc/self/oom_score_adj
while :; do head -c 60M /dev/zero > /dev/shm/a; head -c 60M /dev/zero > /tmp/b; done
"""


@needs_groups
def test_memory_that_no_kill_sets_free_is_a_result_too(folder):
    async def body(backend):
        box = await backend.create(spec(total_memory_bytes=32 * MIB))
        for _ in range(12):
            result = await sh(backend, box, HOSTILE, deadline_s=3)
            assert result.timed_out or result.exit_code in (126, 137), result

    with_backend(folder, body)


@needs_groups
def test_an_agent_that_is_killed_for_memory_ends_its_command_with_137(folder, monkeypatch):
    async def body(backend):
        box = await backend.create(ANY)
        await sh(backend, box, "true")
        live = backend._box(box).live
        (inner,) = [
            int(word) for word in (live._group.folders[0] / "cgroup.procs").read_text().split()
        ]
        running = asyncio.create_task(sh(backend, box, "sleep 60", deadline_s=60))
        await asyncio.sleep(0.3)
        counts = iter(range(5, 100))
        kind = type(live._group)
        with monkeypatch.context() as patch:
            patch.setattr(kind, "num_memory_kills", property(lambda self: next(counts)))
            os.kill(inner, signal.SIGKILL)
            result = await running
        assert (result.exit_code, result.timed_out) == (137, False)
        assert (await sh(backend, box, "echo again")).stdout == b"again\n"
        return live._group.folders

    folders = with_backend(folder, body)
    assert not any(path.exists() for path in folders)


FORKS = "i=0; while [ $i -lt 40 ]; do sleep 2 & i=$((i+1)); done; echo all"


@needs_groups
def test_the_number_of_processes_is_limited_twice(folder, monkeypatch):
    monkeypatch.setattr(bwrap, "limited", lambda limits, argv, **_: limited(limits, argv, False))

    async def forks(backend):
        box = await backend.create(spec(max_processes=20))
        return (await sh(backend, box, FORKS, deadline_s=3)).stdout

    assert with_backend(folder, forks) == b""
    assert with_backend(folder, forks, without_groups) == b"all\n"


def test_where_no_group_can_be_made_a_total_limit_is_refused_by_name(folder):
    async def body(backend):
        assert Capability.TOTAL_MEMORY_LIMIT not in await backend.capabilities()
        with pytest.raises(CapabilityMissing, match="total_memory_limit"):
            await backend.create(SandboxSpec(required=(Capability.TOTAL_MEMORY_LIMIT,)))
        box = await backend.create(SandboxSpec())
        assert (await sh(backend, box, "echo fine")).stdout == b"fine\n"

    with_backend(folder, body, without_groups)


@needs_groups
def test_where_groups_can_be_made_a_total_limit_is_promised(folder):
    async def body(backend):
        assert Capability.TOTAL_MEMORY_LIMIT in await backend.capabilities()

    with_backend(folder, body)


UNPRIVILEGED = """
import os, sys
from pathlib import Path
from k3rl.sandboxes.processes.cgroups import find_cgroups
os.setgroups([]); os.setresgid(54321, 54321, 54321); os.setresuid(54321, 54321, 54321)
print(find_cgroups(Path(sys.argv[1])))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_user_without_a_delegated_part_of_the_tree_has_no_groups(folder):
    argv = [sys.executable, "-c", UNPRIVILEGED, str(folder)]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.stdout == "None\n", done


def test_a_folder_that_is_no_control_group_is_not_taken_for_one(folder):
    owner = folder / "owner-x"
    owner.mkdir()
    assert not Cgroups((folder,), owner.name).is_usable()
    assert sorted(path.name for path in folder.iterdir()) == ["owner-x"]


def test_version_2_is_used_at_the_nearest_folder_that_gives_a_memory_limit(folder, monkeypatch):
    own = folder / "user" / "app" / "run"
    own.mkdir(parents=True)
    for path, controllers in ((own, ""), (own.parent, "memory pids"), (folder / "user", "memory")):
        (path / "cgroup.subtree_control").write_text(controllers)
    found = {"": (own, folder), "memory": (folder / "m", folder), "pids": (folder / "p", folder)}
    monkeypatch.setattr(cgroups, "own_groups", lambda: found)
    places = list(cgroups._places())
    assert places == [(own.parent,), (folder / "user",), (folder / "m", folder / "p")]


@pytest.mark.parametrize(
    ("files", "values", "events"),
    [
        (
            ("memory.max", "memory.swap.max", "pids.max"),
            ("1048576", "0", "9"),
            ("memory.events", "low 0\nhigh 0\nmax 8\noom 3\noom_kill 2\noom_group_kill 0\n"),
        ),
        (
            ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
            ("1048576", "1048576"),
            ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_the_files_of_both_versions_are_written_and_read(files, values, events, folder):
    for name in files:
        (folder / name).touch()
    cgroups._limit(folder, SandboxLimits(total_memory_bytes=MIB, max_processes=7))
    assert tuple((folder / name).read_text() for name in files) == values
    assert sorted(path.name for path in folder.iterdir()) == sorted(files)
    name, text = events
    (folder / name).write_text(text)
    group = cgroups.Group((folder,))
    assert group.num_memory_kills == 2
    shutil.rmtree(folder)
    assert group.remove()
    assert group.num_memory_kills == 0
    folder.mkdir()


@needs_groups
def test_a_sandbox_has_a_group_as_long_as_it_lives(folder):
    async def body(backend):
        boxes = [await backend.create(ANY) for _ in range(3)]
        await asyncio.gather(*(sh(backend, box, "true") for box in boxes))
        num_hierarchies = len(backend._cgroups.parents)
        assert len(groups_of(os.getpid())) == 3 * num_hierarchies
        await backend.close(boxes[0])
        assert len(groups_of(os.getpid())) == 2 * num_hierarchies
        # An exec that is cancelled ends its sandbox, and the next one starts another.
        running = asyncio.create_task(sh(backend, boxes[1], "sleep 60"))
        await asyncio.sleep(0.2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert len(groups_of(os.getpid())) == num_hierarchies
        await sh(backend, boxes[1], "true")
        assert len(groups_of(os.getpid())) == 2 * num_hierarchies

    with_backend(folder, body)
    assert groups_of(os.getpid()) == []


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from k3rl.blobs import BlobStore
from k3rl.sandboxes import base, spec
from k3rl.sandboxes.backends import bwrap
async def main():
    folder = Path(sys.argv[1])
    one = bwrap.BwrapBackend(BlobStore(folder / "blobs"), folder / "scratch")
    boxes = [await one.create(spec.SandboxSpec(required=())) for _ in range(3)]
    for box in boxes:
        await base.run(one, box, base.ExecRequest(("true",)))
    running = asyncio.create_task(base.run(one, boxes[0], base.ExecRequest(("sleep", "60"))))
    await asyncio.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


@needs_groups
def test_groups_of_a_killed_owner_go_with_the_next_opening(folder):
    scratch = folder / "scratch"
    argv = [sys.executable, "-c", KILLED, str(folder)]
    owner = subprocess.Popen(argv, cwd=REPOSITORY)
    assert owner.wait(60) == -signal.SIGKILL
    assert len(groups_of(owner.pid)) >= 3
    living = open_scratch(scratch, sandbox_identity())
    assert groups_of(owner.pid) == []
    living.remove()


@needs_groups
def test_a_group_that_is_still_in_use_is_kept_in_mind(folder, monkeypatch):
    monkeypatch.setattr(cgroups, "REMOVAL_WAIT_S", 0.01)
    owner = folder / "owner-busy"
    owner.mkdir()
    found = find_cgroups(owner)
    group = found.make("one", SandboxLimits())
    process = subprocess.Popen(["sleep", "60"])
    try:
        group.add(process.pid)
        assert not remove_groups(owner)
    finally:
        process.kill()
        process.wait()
    assert remove_groups(owner)
    assert not any(path.exists() for path in group.folders)
