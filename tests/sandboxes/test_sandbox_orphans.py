"""No process of a sandbox outlives its exec or, past the next opening, its killed owner."""

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from k3rl.blobs import BlobStore
from k3rl.errors import SandboxError
from k3rl.sandboxes import scratch
from k3rl.sandboxes.backends.bwrap import BwrapBackend
from k3rl.sandboxes.base import ExecRequest, run
from k3rl.sandboxes.processes import launch
from k3rl.sandboxes.processes.launch import BwrapChild
from k3rl.sandboxes.processes.orphans import (
    children,
    children_by_scan,
    descriptor,
    end_orphans,
    freeze,
    is_orphan,
    look,
)
from k3rl.sandboxes.scratch import open_scratch, sandbox_identity
from tests.sandboxes.sandbox_helpers import ANY, reachable_bwrap, sh, survivors

REPOSITORY = Path(__file__).parents[2]
SLEEP = ExecRequest(("sleep", "300"), deadline_s=300)
SETTLE_S = 0.05
pytestmark = [pytest.mark.sandbox]


@pytest.fixture
def folder():
    """A folder of this test's own, reachable for all."""
    path = Path(tempfile.mkdtemp(prefix="k3rl-test-", dir="/tmp"))
    path.chmod(0o777)
    yield path
    for line in survivors(path):
        os.kill(int(line.split()[0]), signal.SIGKILL)
    shutil.rmtree(path)


@pytest.fixture
def here(folder, monkeypatch):
    """The folder, as the working directory: by it the processes started here are known."""
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        yield folder


def with_backend(here, body):
    async def main():
        backend = BwrapBackend(BlobStore(here / "blobs"), here / "scratch")
        try:
            await body(backend, await backend.create(ANY))
        finally:
            await backend.aclose()

    asyncio.run(main())


async def cancel_one(backend, box, delay_s):
    """Cancel an exec `delay_s` after its beginning."""
    running = asyncio.create_task(run(backend, box, SLEEP))
    await asyncio.sleep(0)
    await asyncio.sleep(delay_s)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def lose_one(backend, box, delay_s):
    """Kill bubblewrap behind the backend's back, as the kernel does when memory is short."""
    before = set(children(os.getpid()))
    running = asyncio.create_task(run(backend, box, SLEEP))
    await asyncio.sleep(0)
    (outer,) = set(children(os.getpid())) - before
    await asyncio.sleep(delay_s)
    os.kill(outer, signal.SIGKILL)
    with pytest.raises(SandboxError):
        await running


STORMS = [(cancel_one, 200, 0.01), (lose_one, 60, 0.004)]
by_storm = pytest.mark.parametrize(("one", "count", "longest_s"), STORMS)


@by_storm
def test_an_exec_that_ends_at_any_moment_leaves_no_process(one, count, longest_s, here):
    async def body(backend, box):
        moments = random.Random(count)
        for _ in range(count):
            await one(backend, box, moments.uniform(0, longest_s))
        await asyncio.sleep(SETTLE_S)
        assert survivors(here) == []
        assert (await sh(backend, box, "echo fine")).stdout == b"fine\n"

    with_backend(here, body)


@by_storm
def test_the_same_search_finds_what_a_plain_kill_leaves(one, count, longest_s, here, monkeypatch):
    monkeypatch.setattr(BwrapChild, "_find_init", lambda self: False)
    monkeypatch.setattr(launch, "end_orphans", lambda uids: None)

    async def body(backend, box):
        moments = random.Random(count)
        for number in range(4 * count):
            await one(backend, box, moments.uniform(0, longest_s))
            if number % 20 == 19:
                await asyncio.sleep(SETTLE_S)
                if survivors(here):
                    break
        assert survivors(here) != []
        open_scratch(here / "scratch", sandbox_identity()).remove()
        assert survivors(here) == []

    with_backend(here, body)


def test_opening_leaves_the_sandboxes_of_living_owners_alone(here):
    async def body(backend, box):
        async def often():
            for number in range(20):
                assert (await sh(backend, box, f"echo {number}")).stdout == f"{number}\n".encode()

        async def clean():
            for _ in range(20):
                await asyncio.to_thread(end_orphans, [0, os.geteuid(), backend_uid(backend)])

        other = await backend.create(ANY)
        async for _ in backend.exec(other, ExecRequest(("sh", "-c", "echo up; sleep 300"))):
            await asyncio.gather(often(), clean())
            assert any("sleep" in line for line in survivors(here))
            break

    with_backend(here, body)


def backend_uid(backend):
    who = backend.scratch.identity
    return os.geteuid() if who is None else who.uid


def test_only_what_is_certainly_left_over_is_an_orphan(here):
    async def body(backend, box):
        uids = [backend_uid(backend)]
        async for _ in backend.exec(box, ExecRequest(("sh", "-c", "echo up; sleep 300"))):
            number = backend._box(box).live.pid
            (inner_number,) = children(number)
            outer, inner = look(number), look(inner_number)
            (command,) = map(look, children(inner_number))
            break
        assert not any(is_orphan(process, uids) for process in (outer, inner, command, None))
        lost = replace(outer, parent=1)
        left = replace(inner, parent=1)
        assert is_orphan(lost, uids)
        assert is_orphan(left, uids)
        changes = (
            (b"OWNER", b"USER"),
            (b"--block-fd", b"--sync-fd"),
            (b"/usr/bin/prl", b"/bin/prl"),
        )
        for process, words in ((lost, changes), (left, ((b"-agent", b""), (b"-ISB", b"-B")))):
            assert not is_orphan(process, [uids[0] + 1])
            for old, new in words:
                assert not is_orphan(replace(process, argv=process.argv.replace(old, new)), uids)
            assert not is_orphan(replace(process, is_init=False, is_ours=False), uids)

    with_backend(here, body)


def test_children_are_those_of_a_stopped_process():
    script = "sleep 300 & sleep 300 & echo up; wait"
    parent = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE)
    with parent:
        parent.stdout.readline()
        with descriptor(parent.pid) as handle:
            assert freeze(parent.pid, handle)
            found = children(parent.pid)
            assert sorted(found) == sorted(children_by_scan(parent.pid))
            assert len(found) == 2
            for pid in found:
                os.kill(pid, signal.SIGKILL)
            parent.kill()
            parent.wait()
            assert not freeze(parent.pid, handle)


OWNER = """
import asyncio, json, os, random, signal, sys, time
from pathlib import Path
from k3rl.blobs import BlobStore
from k3rl.sandboxes.processes import launch
from k3rl.sandboxes.base import ExecRequest, run
from k3rl.sandboxes.backends.bwrap import BwrapBackend
from k3rl.sandboxes.scratch import open_scratch, sandbox_identity
from tests.sandboxes.sandbox_helpers import ANY, survivors
here = Path(sys.argv[1])
os.chdir(here)
def backend():
    return BwrapBackend(BlobStore(here / "blobs"), here / "scratch")
async def open_box(backend):  # without the probes
    return (await backend.open_box(ANY, {})).id
"""


def run_owner(script, folder, *arguments):
    argv = [sys.executable, "-c", OWNER + script, str(folder), *map(str, arguments)]
    return subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)


DIES_BEFORE_RELEASE = """
class Dying(launch.BwrapChild):
    def _report(self):
        time.sleep(float(sys.argv[2]))
        os.kill(os.getpid(), signal.SIGKILL)
async def main():
    one = backend()
    box = await open_box(one)
    print(one._box(box).workspace.upper, flush=True)
    sys.modules["k3rl.sandboxes.processes.live"].BwrapChild = Dying
    await run(one, box, ExecRequest(("touch", "ran")))
asyncio.run(main())
"""


@pytest.mark.parametrize("delay_s", [0, 0.1])
def test_a_command_that_its_dead_owner_held_back_never_runs(delay_s, folder):
    """The owner dies when the inner process exists and, with the delay, is ready to go."""
    upper = Path(run_owner(DIES_BEFORE_RELEASE, folder, delay_s).stdout.strip())
    time.sleep(SETTLE_S)
    assert len(survivors(folder)) == 1
    assert list(upper.iterdir()) == []
    open_scratch(folder / "scratch", sandbox_identity()).remove()
    assert survivors(folder) == []
    assert not upper.exists()


STORM = """
async def storm(ready):
    one = backend()
    boxes = [await open_box(one) for _ in range(4)]
    async def work(box):
        while True:
            await run(one, box, ExecRequest(("sh", "-c", "sleep 0.002; sleep 0.002")))
            one._box(box).live.destroy()  # the next command starts another one
            os.write(ready, b"x")
    await asyncio.gather(*map(work, boxes))

def kill_one(delay_s):
    told, ready = os.pipe()
    owner = os.fork()
    if owner == 0:
        os.close(told)
        asyncio.run(storm(ready))
    os.close(ready)
    os.read(told, 1)
    time.sleep(delay_s)
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    os.close(told)

moments, count = random.Random(7), int(sys.argv[2])
number = num_orphaned = 0
left = []
while number < count or not num_orphaned and number < 10 * count:
    number += 1
    kill_one(moments.uniform(0, 0.03))
    if number % 2:  # the others open at once, when some processes are still to be orphaned
        time.sleep(0.03)
        num_orphaned += bool(survivors(here))
    open_scratch(here / "scratch", sandbox_identity()).remove()
    time.sleep(0.01)
    left += survivors(here)
print(json.dumps([num_orphaned, left]))
"""


@pytest.mark.parametrize("count", [30, pytest.param(500, marks=pytest.mark.slow)])
def test_opening_ends_what_a_killed_owner_left(count, folder):
    run_storm = run_owner(STORM, folder, count)
    assert run_storm.returncode == 0, run_storm.stderr
    num_orphaned, left = json.loads(run_storm.stdout)
    assert left == []
    assert num_orphaned > 0
    assert list((folder / "scratch").glob("owner-*")) == []


SLOW_START = """#!/bin/bash
sleep 1.2
exec {bwrap} "$@"
"""
DIES_DURING_THE_START = """
program = here / "slow-bwrap"
async def main():
    one = BwrapBackend(BlobStore(here / "blobs"), here / "scratch", program)
    box = await open_box(one)
    asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGKILL)
    await run(one, box, ExecRequest(("true",)))
asyncio.run(main())
"""


@pytest.mark.parametrize("is_awaited", [True, False])
def test_opening_waits_for_children_that_are_not_yet_bubblewrap(is_awaited, folder, monkeypatch):
    """A process between fork and exec, here a long one, cannot be told from any other."""
    if not is_awaited:
        monkeypatch.setattr(scratch, "await_launches", lambda lock: None)
    program = folder / "slow-bwrap"
    program.write_text(SLOW_START.format(bwrap=reachable_bwrap(folder)))
    program.chmod(0o755)
    assert run_owner(DIES_DURING_THE_START, folder).returncode == -signal.SIGKILL
    open_scratch(folder / "scratch", sandbox_identity()).remove()
    if is_awaited:
        assert survivors(folder) == []
    else:
        end = time.monotonic() + 10
        while not survivors(folder) and time.monotonic() < end:
            time.sleep(0.05)
        assert survivors(folder) != []
