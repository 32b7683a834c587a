"""Processes of landlock sandboxes: none is reached from inside, none outlives command or owner."""

import asyncio
import ctypes
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from k3rl.blobs import BlobStore
from k3rl.errors import SandboxError
from k3rl.sandboxes.backends.landlock import LandlockBackend
from k3rl.sandboxes.base import ExecRequest, run
from k3rl.sandboxes.processes import guarded
from k3rl.sandboxes.processes.orphans import children
from k3rl.sandboxes.processes.uids import BLOCK, RECORD, Uids, end_claimed
from k3rl.sandboxes.scratch import open_scratch, sandbox_identity
from k3rl.sandboxes.spec import Capability, SandboxLimits, SandboxSpec
from tests.sandboxes.landlock_helpers import (
    WHO,
    apart,
    as_who,
    end,
    is_gone,
    mark,
    marked,
    needs_landlock,
    needs_root,
)
from tests.sandboxes.sandbox_helpers import ANY, sh

pytestmark = [pytest.mark.sandbox, needs_landlock]
by_who = pytest.mark.parametrize("who", WHO)


async def python(backend, box, script, *words, deadline_s=20.0):
    request = ExecRequest(("python3", "-c", script, *map(str, words)), deadline_s=deadline_s)
    return await run(backend, box, request)


SIGNALS = """
import json, os, sys
reached = []
for name, pid in json.loads(sys.argv[1]).items():
    try:
        os.kill(pid, 0)
        reached.append(name)
    except PermissionError:
        pass
child = os.fork()
if not child:
    os.execvp("sleep", ["sleep", "60"])
os.kill(child, 9)
if os.waitpid(child, 0)[1] == 9:
    reached.append("child")
os.kill(-1, 9) if sys.argv[2] == "all" else None
print(json.dumps(reached))
"""


@by_who
def test_commands_signal_their_own_and_nobody_else(who, open_folder):
    async def body(backend):
        boxes = [await backend.create(ANY) for _ in range(2)]
        for box in boxes:
            await sh(backend, box, "true")
        (guard, other) = [backend._box(box).live.pid for box in boxes]
        (agent,) = children(guard)
        pids = {"guard": guard, "agent": agent, "other": other, "owner": os.getpid()}
        told = json.dumps(pids)
        result = await python(backend, boxes[0], SIGNALS, told, "all")
        assert json.loads(result.stdout) == ["child"], result
        assert (await sh(backend, boxes[1], "echo fine")).stdout == b"fine\n"
        assert backend._box(boxes[0]).live.pid == guard

    async def control(backend):
        box = await backend.create(ANY)
        result = await python(backend, box, SIGNALS, json.dumps({"owner": os.getpid()}), "")
        assert json.loads(result.stdout) == ["owner", "child"]

    as_who(who, open_folder, body)
    as_who(who, open_folder, control, kind="process")


CLINGING = """
import ctypes, os, signal, sys, time
if os.fork():
    time.sleep(0.2)
    os._exit(0)
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # adopts orphans itself
for number in range(1, 32):
    if number not in (9, 17, 19):
        signal.signal(number, signal.SIG_IGN)
for turn in range(4):
    if not os.fork():
        os.setsid()
        if not os.fork():
            if turn == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
            end = time.monotonic() + 30
            while time.monotonic() < end:
                if not os.fork():
                    os._exit(0) if turn else time.sleep(30)
                time.sleep(0.001)
        os._exit(0)
os.chdir("/")
time.sleep(30)
"""


@by_who
@pytest.mark.parametrize("deadline_s", [20.0, 0.15])
def test_nothing_outlives_its_command(who, deadline_s, open_folder):
    word = mark()

    async def body(backend):
        box = await backend.create(ANY)
        result = await python(backend, box, CLINGING, word, deadline_s=deadline_s)
        assert marked(word) == []
        assert result.timed_out == (deadline_s < 1)
        assert (await sh(backend, box, "echo fine")).stdout == b"fine\n"

    as_who(who, open_folder, body)


def test_the_same_search_finds_what_an_unconfined_command_leaves(open_folder):
    word = mark()

    async def body(backend):
        box = await backend.create(ANY)
        await python(
            backend, box, "import os, time\nif not os.fork():\n os.setsid()\n time.sleep(30)", word
        )
        left = marked(word)
        end(word)
        assert left != []

    as_who("user", open_folder, body, kind="process")
    assert is_gone(word)


@by_who
@pytest.mark.parametrize("victims", [("guard",), ("agent",), ("guard", "agent")])
def test_the_death_of_what_holds_a_sandbox_is_its_end(who, victims, open_folder):
    word = mark()

    async def body(backend):
        box = await backend.create(ANY)
        await sh(backend, box, "true")
        live = backend._box(box).live
        (agent,) = children(live.pid)
        pids = {"guard": live.pid, "agent": agent}
        script = f"python3 -c '{CLINGING_SHORT}' {word}; sleep 60"
        running = asyncio.create_task(sh(backend, box, script, deadline_s=60))
        await asyncio.sleep(0.5)
        assert len(marked(word)) == 3  # sh and two of Python
        for name in victims:
            os.kill(pids[name], signal.SIGSTOP)  # so that none sees the other die
        for name in victims:
            os.kill(pids[name], signal.SIGKILL)
        with pytest.raises(SandboxError, match="the sandbox died"):
            await running
        if victims == ("guard", "agent") and who == "user":
            # Nobody is left to end it, which shows that the search can find something.
            assert marked(word) != []
            end(word)
        assert is_gone(word)
        assert (await sh(backend, box, "echo fine")).stdout == b"fine\n"

    as_who(who, open_folder, body)


CLINGING_SHORT = "import os, time; os.fork() or os.setsid(); time.sleep(60)"


def die():
    os.kill(os.getpid(), signal.SIGKILL)


async def owner_starting(backend, box, word):
    def release(guard, group):
        die()

    guarded.GuardChild.release = release  # in this process, which ends here
    await sh(backend, box, "true")


async def owner_releasing(backend, box, word):
    release = guarded.GuardChild.release

    def last(guard, group):
        release(guard, group)
        die()

    guarded.GuardChild.release = last
    await sh(backend, box, "true")


async def owner_idle(backend, box, word):
    await sh(backend, box, "true")
    die()


async def owner_running(backend, box, word):
    asyncio.get_running_loop().call_later(0.3, die)
    await sh(backend, box, f"python3 -c '{CLINGING_SHORT}' {word}; sleep 60", deadline_s=60)


async def owner_killing(backend, box, word):
    script = f"python3 -c '{CLINGING_SHORT}' {word} & sleep 60"
    task = asyncio.create_task(sh(backend, box, script, deadline_s=0.3))
    await asyncio.sleep(0.2)
    child = backend._box(box).child
    kill = child.kill

    def last():
        kill()
        die()

    child.kill = last
    await task


PHASES = (owner_starting, owner_releasing, owner_idle, owner_running, owner_killing)


@by_who
@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_owner_leaves_nothing(who, phase, open_folder):
    word = mark()

    def own():
        async def main():
            backend = LandlockBackend(BlobStore(open_folder / "blobs"), open_folder / "scratch")
            box = (await backend.open_box(ANY, {"a": b"1"})).id
            await phase(backend, box, word)

        asyncio.run(main())

    _, status = os.waitpid(apart(own, who), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    (dead,) = (open_folder / "scratch").glob("owner-*")
    assert is_gone(dead.name)  # the guard and the agent have it on their command lines
    assert is_gone(word)

    def clear():
        open_scratch(open_folder / "scratch", sandbox_identity()).remove()

    _, status = os.waitpid(apart(clear, who), 0)
    assert status == 0
    assert list((open_folder / "scratch").glob("owner-*")) == []


@by_who
def test_owners_killed_at_any_moment_leave_nothing(who, open_folder):
    word, moments = mark(), random.Random(11)

    def own():
        async def work(backend, box):
            while True:
                await sh(backend, box, f"python3 -c '{CLINGING_SHORT}' {word} & sleep 0.1")
                backend._box(box).live.destroy()

        async def main():
            backend = LandlockBackend(BlobStore(open_folder / "blobs"), open_folder / "scratch")
            boxes = [(await backend.open_box(ANY, {})).id for _ in range(3)]
            await asyncio.gather(*(work(backend, box) for box in boxes))

        asyncio.run(main())

    def clear():
        open_scratch(open_folder / "scratch", sandbox_identity()).remove()

    for number in range(16):
        owner = apart(own, who)
        is_busy, end_of_wait = number % 2 == 0, time.monotonic() + 20
        while not is_busy and time.monotonic() < end_of_wait:
            is_busy = bool(marked(word))
        time.sleep(moments.uniform(0, 0.15))
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
        assert is_busy  # or it never was
        # At once: whoever opens the folder next waits until the guards are gone.
        _, status = os.waitpid(apart(clear, who), 0)
        assert status == 0
        assert marked(word) == []
        assert marked(str(open_folder)) == []
        assert list((open_folder / "scratch").glob("owner-*")) == []


COUNT = """
import os, sys, threading, time
count = 1 + (sys.argv[1] == "shell")
try:
    while count < 60:
        if sys.argv[2] == "thread":
            threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
        elif os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        count += 1
except (BlockingIOError, RuntimeError):
    pass
print(count, flush=True)
os._exit(0)
"""


@by_who
@pytest.mark.parametrize("kind", ["process", "thread"])
def test_a_process_limit_counts_one_sandbox_alone(who, kind, open_folder):
    async def body(backend):
        assert Capability.PROCESS_LIMIT in await backend.capabilities()
        spec = SandboxSpec(limits=SandboxLimits(max_processes=20))
        boxes = [await backend.create(spec) for _ in range(3)]
        runs = [python(backend, box, COUNT, "", kind) for box in boxes]
        assert [result.stdout for result in await asyncio.gather(*runs)] == [b"20\n"] * 3
        assert (await python(backend, boxes[0], COUNT, "", kind)).stdout == b"20\n"

    async def control(backend):
        box = await backend.create(SandboxSpec(limits=SandboxLimits(max_processes=20), required=()))
        assert (await python(backend, box, COUNT, "", kind)).stdout == b"60\n"

    as_who(who, open_folder, body)
    as_who(who, open_folder, control, kind="process")


BOMB = """
import os
while True:
    try:
        os.fork()
    except BlockingIOError:
        pass
"""


@by_who
def test_a_bomb_stays_near_its_limit(who, open_folder):
    async def body(backend):
        box = await backend.create(SandboxSpec(limits=SandboxLimits(max_processes=20)))
        word = mark()
        bomb = asyncio.create_task(python(backend, box, BOMB, word, deadline_s=1.5))
        most = 0
        while not bomb.done():
            most = max(most, len(marked(word)))
            await asyncio.sleep(0.02)
        assert (await bomb).timed_out
        # Births that were permitted and have not happened yet count for nothing.
        assert 10 < most <= (20 if who == "root" else 40)
        assert marked(word) == []

    as_who(who, open_folder, body)


def reads(path, uid):
    """Whether an unconfined program of this uid can read a file."""
    who = {"user": uid, "group": uid, "extra_groups": ()}
    return subprocess.run(["cat", path], check=False, **who).returncode == 0


@needs_root
def test_each_sandbox_has_a_uid_that_closes_its_files_to_others(open_folder):
    async def body(backend):
        boxes = [await backend.create(ANY) for _ in range(2)]
        twins = [*boxes, *await backend.fork(boxes[0], 2)]
        uids = [int((await sh(backend, box, "id -u")).stdout) for box in twins]
        assert len(set(uids)) == 4
        assert 0 not in uids
        secret = backend._box(boxes[0]).workspace.files / "secret"
        await sh(backend, boxes[0], "echo mine > secret; chmod 666 secret")
        assert [reads(secret, uid) for uid in uids[:2]] == [True, False]
        await backend.close(boxes[1])
        again = [await backend.create(ANY) for _ in range(BLOCK - 3)]
        assert len({backend._box(box).workspace.owner.uid for box in again} | set(uids)) == BLOCK
        assert backend._box(await backend.create(ANY)).workspace.owner.uid not in uids

    as_who("root", open_folder, body)


@needs_root
def test_owners_never_share_uids_and_a_dead_ones_are_cleared(open_folder):
    owners = []
    for name in ("one", "two"):
        (open_folder / name).mkdir()
        owners.append(Uids(open_folder / name))
    firsts = [owner.take().uid for owner in owners]
    blocks = [int((open_folder / name / RECORD).read_text()) for name in ("one", "two")]
    assert len(set(blocks)) == 2
    assert all(0 <= uid - block < BLOCK for uid, block in zip(firsts, blocks, strict=True))
    sleepers = [
        subprocess.Popen(["sleep", "60"], user=uid, group=uid, extra_groups=[]) for uid in firsts
    ]
    try:
        # While the first is alive its uids are its own business; then what is left is ended.
        assert end_claimed(open_folder / "one")
        assert [sleeper.poll() for sleeper in sleepers] == [None, None]
        owners[0].close()
        assert end_claimed(open_folder / "one")
        assert sleepers[0].wait(5) == -signal.SIGKILL
        assert sleepers[1].poll() is None
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()
        owners[1].close()


@needs_root
def test_a_container_that_maps_few_uids_has_enough(open_folder):
    here, there = os.pipe(), os.pipe()

    def inside():
        assert ctypes.CDLL(None).unshare(CLONE_NEWUSER) == 0
        os.write(here[1], b"x")
        os.read(there[0], 1)
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        as_who("root", open_folder, body)

    async def body(backend):
        box = await backend.create(SandboxSpec())
        assert int((await sh(backend, box, "id -u")).stdout) < 65_536

    pid = apart(inside, "root")
    os.read(here[0], 1)
    for table in ("uid_map", "gid_map"):
        Path(f"/proc/{pid}/{table}").write_text("0 0 65536")
    os.write(there[1], b"x")
    for end_of_pipe in (*here, *there):
        os.close(end_of_pipe)
    assert os.waitpid(pid, 0)[1] == 0


CLONE_NEWUSER = 0x10000000


def test_total_memory_is_limited_where_groups_can_be_made(open_folder):
    hold = "data = b'x' * (100 << 20); print(len(data))"

    async def body(backend):
        if Capability.TOTAL_MEMORY_LIMIT not in await backend.capabilities():
            pytest.skip("no control groups can be made here")
        small = SandboxSpec(limits=SandboxLimits(total_memory_bytes=64 << 20))
        for spec, code in ((small, 137), (SandboxSpec(), 0)):
            box = await backend.create(spec)
            assert (await python(backend, box, hold)).exit_code == code
            assert (await sh(backend, box, "echo fine")).stdout == b"fine\n"

    as_who("root" if os.geteuid() == 0 else "user", open_folder, body)
