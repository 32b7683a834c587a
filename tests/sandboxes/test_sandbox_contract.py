"""What every SandboxBackend does, run against each; what only some enforce is keyed on it."""

import asyncio
import gc
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from k3rl.blobs import BlobStore
from k3rl.errors import (
    CapabilityMissing,
    CorruptData,
    SandboxError,
    SandboxLost,
    UncapturableTree,
    UserInputError,
)
from k3rl.sandboxes.base import (
    MIB,
    Capability,
    ExecExit,
    ExecRequest,
    OutputChunk,
    SandboxBackend,
    SandboxLimits,
    SandboxSpec,
    Stream,
    run,
)
from k3rl.sandboxes.factory import open_backend
from k3rl.types import from_plain, to_plain
from tests.sandboxes.sandbox_helpers import ANY, play, sh

KINDS = ("bwrap", "process")
pytestmark = [pytest.mark.sandbox]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


async def has(backend: SandboxBackend, capability: Capability) -> bool:
    return capability in await backend.capabilities()


def test_a_backend_is_a_sandbox_backend(kind, tmp_path):
    async def body(backend):
        assert isinstance(backend, SandboxBackend)
        assert backend.name == kind

    play(kind, tmp_path, body)


def test_the_default_backend_enforces_what_specs_require(tmp_path):
    async def body(backend):
        assert await backend.capabilities() == frozenset(Capability)
        assert await backend.create(SandboxSpec())

    play("bwrap", tmp_path, body)


def test_the_unconfined_backend_promises_no_confinement(tmp_path):
    async def body(backend):
        confining = {
            Capability.ISOLATED_FILES,
            Capability.NO_NETWORK,
            Capability.PROCESS_LIMIT,
            Capability.KILLS_DESCENDANTS,
        }
        assert not confining & await backend.capabilities()
        with pytest.raises(CapabilityMissing, match=r"isolated_files.*no_network"):
            await backend.create(SandboxSpec())

    play("process", tmp_path, body)


def test_exit_codes_are_results(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY)
        for script, code in (("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137), ("exit 255", 255)):
            result = await sh(backend, box, script)
            assert (result.exit_code, result.timed_out) == (code, False)

    play(kind, tmp_path, body)


def test_a_missing_program_is_exit_code_127(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY)
        result = await run(backend, box, ExecRequest(("no-such-program", "x")))
        assert result.exit_code == 127
        assert b"no-such-program" in result.stderr

    play(kind, tmp_path, body)


def test_output_streams_with_offsets_while_the_command_runs(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY)
        request = ExecRequest(("sh", "-c", "echo one; echo wrong >&2; sleep 0.5; echo two"))
        start, first_s, events = time.monotonic(), None, []
        async for event in backend.exec(box, request):
            first_s = first_s or time.monotonic() - start
            events.append(event)
        assert first_s < 0.4
        out = [e for e in events if isinstance(e, OutputChunk) and e.stream is Stream.STDOUT]
        err = [e for e in events if isinstance(e, OutputChunk) and e.stream is Stream.STDERR]
        assert [(e.offset, e.data) for e in out] == [(0, b"one\n"), (4, b"two\n")]
        assert [(e.offset, e.data) for e in err] == [(0, b"wrong\n")]
        assert isinstance(events[-1], ExecExit)
        assert sum(isinstance(e, ExecExit) for e in events) == 1

    play(kind, tmp_path, body)


def test_standard_input_arrives_whole(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY)
        data = bytes(range(256)) * 1024
        result = await sh(backend, box, "cat", stdin=data, max_output_bytes=MIB)
        assert result.stdout == data
        assert (await sh(backend, box, "cat; echo end")).stdout == b"end\n"

    play(kind, tmp_path, body)


def test_standard_streams_can_be_opened_by_name(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY)
        script = "cat /dev/stdin > /dev/stdout; echo err > /dev/stderr"
        result = await sh(backend, box, script, stdin=b"in")
        assert (result.exit_code, result.stdout, result.stderr) == (0, b"in", b"err\n")

    play(kind, tmp_path, body)


def test_a_deadline_kills_and_keeps_what_was_said(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY)
        start = time.monotonic()
        result = await sh(backend, box, "trap '' TERM INT; echo begun; sleep 60", deadline_s=0.4)
        assert time.monotonic() - start < 3
        assert (result.exit_code, result.timed_out, result.stdout) == (None, True, b"begun\n")
        assert (await sh(backend, box, "echo again")).stdout == b"again\n"

    play(kind, tmp_path, body)


def test_a_deadline_ends_a_command_that_floods_its_output(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY)
        result = await sh(backend, box, "yes & yes >&2", deadline_s=0.4, max_output_bytes=1000)
        assert result.timed_out
        assert result.dropped_bytes > 0

    play(kind, tmp_path, body)


def test_a_deadline_fires_while_the_consumer_sleeps(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY)
        script = "while :; do echo x; echo x >> beat; sleep 0.02; done"
        request = ExecRequest(("sh", "-c", script), deadline_s=0.3)
        async with aclosing(backend.exec(box, request)) as events:
            await anext(events)
            await asyncio.sleep(0.6)
            rest = [event async for event in events]
        assert rest[-1].timed_out
        assert 0 < len(await backend.get(box, "beat")) < 60

    play(kind, tmp_path, body)


DAEMON = """
setsid sh -c 'i=0; while [ $i -lt 100 ]; do echo x >> beat; sleep 0.02; i=$((i+1)); done' &
sleep 0.15
"""


@pytest.mark.parametrize("ending", ["exit 0", "sleep 60"])
def test_descendants_die_with_the_command(kind, ending, tmp_path):
    async def body(backend):
        box = await backend.create(ANY)
        await sh(backend, box, DAEMON + ending, deadline_s=0.5)
        first = len(await backend.get(box, "beat"))
        await asyncio.sleep(0.2)
        is_still = len(await backend.get(box, "beat")) == first
        assert first > 0
        # The daemon escapes a mere process group, which shows that the check can fail.
        assert is_still == await has(backend, Capability.KILLS_DESCENDANTS)

    play(kind, tmp_path, body)


def test_a_background_child_that_holds_stdout_does_not_delay_the_result(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY)
        start = time.monotonic()
        result = await sh(backend, box, "sleep 30 & setsid sleep 2 & echo done")
        assert time.monotonic() - start < 1.5
        assert (result.exit_code, result.stdout) == (0, b"done\n")

    play(kind, tmp_path, body)


def test_big_output_keeps_head_and_tail_and_counts_the_rest(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY)
        script = "echo HEAD; head -c 3000000 /dev/zero; echo TAIL"
        result = await sh(backend, box, script, max_output_bytes=2000)
        assert result.stdout.startswith(b"HEAD\n")
        assert result.stdout.endswith(b"TAIL\n")
        assert result.dropped_bytes == 3_000_010 - 2000
        assert f"{3_000_010 - 2000} bytes dropped".encode() in result.stdout

    play(kind, tmp_path, body)


def test_output_is_bytes_not_text(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY)
        result = await sh(backend, box, r"printf '\377\000\303'; printf '\033[31m' >&2")
        assert (result.stdout, result.stderr) == (b"\xff\x00\xc3", b"\x1b[31m")

    play(kind, tmp_path, body)


def test_put_and_get_round_trip(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY, {"given/a.txt": b"given"})
        await backend.put(box, "new/deep/b.sh", b"#!/bin/sh\necho ran", mode=0o755)
        await backend.put(box, "given/a.txt", b"replaced")
        await backend.put(box, "/workspace/c \xe9\n", b"odd name")
        result = await sh(backend, box, "./new/deep/b.sh; cat given/a.txt; echo more >> new/d")
        assert result.stdout == b"ran\nreplaced"
        assert await backend.get(box, "new/d") == b"more\n"
        assert await backend.get(box, "c \xe9\n") == b"odd name"
        await backend.put(box, "new/d", b"")
        assert (await sh(backend, box, "wc -c < new/d; stat -c %a new/deep/b.sh")).stdout == (
            b"0\n755\n"
        )

    play(kind, tmp_path, body)


@pytest.mark.parametrize(
    "path", ["../x", "a/../../x", "/etc/passwd", "", ".", "a\0b", "/workspace"]
)
def test_paths_outside_the_workspace_are_refused(kind, path, tmp_path):
    async def body(backend):
        box = await backend.create(ANY)
        with pytest.raises(UserInputError, match="not a path inside"):
            await backend.put(box, path, b"x")
        with pytest.raises(UserInputError, match="not a path inside"):
            await backend.get(box, path)

    play(kind, tmp_path, body)


def test_links_and_special_files_are_not_followed(kind, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("host")
    script = f"""
    mkdir real; echo ok > real/file
    ln -s {secret} link; ln -s {tmp_path} linked; ln -s real inner; mkfifo pipe
    python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("sock")'
    """

    async def body(backend):
        box = await backend.create(ANY)
        assert (await sh(backend, box, script)).exit_code == 0
        for name, what in (("link", "link"), ("pipe", "fifo"), ("sock", "socket"), ("real", "dir")):
            with pytest.raises(UserInputError, match=what):
                await asyncio.wait_for(backend.get(box, name), 5)
            with pytest.raises(UserInputError, match=what):
                await asyncio.wait_for(backend.put(box, name, b"x"), 5)
        for name in ("linked/secret", "inner/file", "linked/made"):
            with pytest.raises(UserInputError):
                await backend.get(box, name)
            with pytest.raises(UserInputError):
                await backend.put(box, name, b"x")
        assert await backend.get(box, "real/file") == b"ok\n"
        with pytest.raises(UserInputError, match="no such file"):
            await backend.get(box, "absent")
        with pytest.raises(UserInputError, match="3 bytes are more than 2"):
            await backend.get(box, "real/file", max_bytes=2)
        assert secret.read_text() == "host"
        assert not (tmp_path / "made").exists()

    play(kind, tmp_path, body)


def test_the_environment_is_the_specs_and_nothing_else(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    spec = replace(ANY, environment={"FROM_SPEC": "1", "BOTH": "spec"})
    request = ExecRequest(("env", "-0"), environment={"FROM_EXEC": "2", "BOTH": "exec"})

    async def body(backend):
        box = await backend.create(spec)
        result = await run(backend, box, request)
        found = dict(row.split(b"=", 1) for row in result.stdout.split(b"\0") if row)
        assert found.pop(b"PWD", b"")  # the shell's word for the working directory, nothing else
        names = {b"PATH", b"HOME", b"TMPDIR", b"LANG", b"FROM_SPEC", b"FROM_EXEC", b"BOTH"}
        assert set(found) == names
        assert found[b"BOTH"] == b"exec"

    if kind == "process":
        request = replace(request, argv=("sh", "-c", "env -0"))
    play(kind, tmp_path, body)


def test_not_even_the_init_process_holds_the_hosts_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")

    async def body(backend):
        box = await backend.create(SandboxSpec())
        script = (
            "cat /proc/*/environ | tr '\\0' '\\n'; echo; cat /proc/*/cmdline; wc -c /proc/1/environ"
        )
        result = await sh(backend, box, script)
        assert b"0 /proc/1/environ" in result.stdout
        assert b"hunter2" not in result.stdout
        assert str(tmp_path).encode() not in result.stdout

    play("bwrap", tmp_path, body)


def test_no_descriptor_of_the_host_is_inherited(kind, tmp_path):
    handle = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(handle, True)

    async def body(backend):
        box = await backend.create(ANY)
        script = "for n in $(seq 2 200); do test -e /proc/$$/fd/$n && echo $n; done"
        # A shell that keeps a descriptor for its own use has it at 10 or 255.
        found = {int(word) for word in (await sh(backend, box, script)).stdout.split()}
        assert found - {10} == {2}

    try:
        play(kind, tmp_path, body)
    finally:
        os.close(handle)


CONNECT = """
import socket, sys
for host, port in ((sys.argv[1], int(sys.argv[2])), ("169.254.169.254", 80)):
    try:
        socket.create_connection((host, port), timeout=2)
        print("open")
    except OSError:
        print("closed")
"""


def test_there_is_no_network_not_even_the_hosts_loopback(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY)
        with socket.create_server(("127.0.0.1", 0)) as server:
            host, port = server.getsockname()
            if not await has(backend, Capability.NO_NETWORK):
                # Only the loopback half: the control must not touch another machine.
                script = CONNECT.replace(', ("169.254.169.254", 80)', ",")
                request = ExecRequest(("python3", "-c", script, host, str(port)))
                assert (await run(backend, box, request)).stdout == b"open\n"
                return
            request = ExecRequest(("python3", "-c", CONNECT, host, str(port)))
            assert (await run(backend, box, request)).stdout == b"closed\nclosed\n"

    play(kind, tmp_path, body)


def test_host_files_are_not_visible(kind, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("host")

    async def body(backend):
        box = await backend.create(ANY)
        result = await sh(backend, box, f"cat {secret}; ls /root /home /var /etc/shadow")
        is_hidden = b"host" not in result.stdout
        assert is_hidden == await has(backend, Capability.ISOLATED_FILES)
        if is_hidden:
            assert result.stdout == b""

    play(kind, tmp_path, body)


def test_system_folders_are_read_only_and_private_ones_are_sized(tmp_path):
    limits = SandboxLimits(tmp_bytes=MIB)
    script = """
    for f in /x /usr/x /etc/x /dev/x /proc/sys/kernel/hostname; do
        echo x > $f && echo wrote $f
    done
    for d in /tmp /dev/shm; do
        head -c 4000000 /dev/zero > $d/big; test $(wc -c < $d/big) -le 1048576 || echo exceeded $d
    done
    unshare -U true && echo nested
    mount -t tmpfs none /tmp && echo mounted
    """

    async def body(backend):
        box = await backend.create(SandboxSpec(limits=limits))
        result = await sh(backend, box, script)
        assert result.stdout == b""
        assert result.stderr.count(b"No space left on device") >= 2

    play("bwrap", tmp_path, body)


def test_a_fork_bomb_is_contained(tmp_path):
    spec = SandboxSpec(limits=SandboxLimits(max_processes=20))
    bomb = "bomb() { bomb | bomb & }; bomb; sleep 0.5; ls -d /proc/[0-9]* | wc -l"

    async def body(backend):
        first, second = await backend.create(spec), await backend.create(spec)
        exploding = asyncio.create_task(sh(backend, first, bomb, deadline_s=2))
        await asyncio.sleep(0.3)
        # Sandboxes share a uid but not a process limit.
        calm = await sh(
            backend, second, "for i in 1 2 3 4 5 6 7 8; do sleep 0.1 & done; wait; echo ok"
        )
        assert calm.stdout == b"ok\n"
        await exploding
        count = await sh(backend, first, COUNT_PROCESSES)
        assert 10 <= int(count.stdout) <= 20

    play("bwrap", tmp_path, body)


COUNT_PROCESSES = """
python3 -c '
import os, time
count = 2  # this process and the init of the namespace
try:
    while count < 200:
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        count += 1
except BlockingIOError:
    pass
print(count)
'
"""


def test_file_memory_cpu_and_descriptor_limits_bite(kind, tmp_path):
    limits = SandboxLimits(
        max_file_bytes=100_000, address_space_bytes=256 * MIB, cpu_s=1, max_open_files=32
    )

    async def body(backend):
        box = await backend.create(SandboxSpec(limits=limits, required=()))
        await sh(backend, box, "head -c 200000 /dev/zero > big; truncate -s 100G sparse")
        assert len(await backend.get(box, "big")) == 100_000
        assert (await sh(backend, box, "stat -c %s sparse")).stdout in (b"", b"0\n")
        hog = await run(backend, box, ExecRequest(("python3", "-c", "bytes(10**9)")))
        assert b"MemoryError" in hog.stderr
        fits = await run(backend, box, ExecRequest(("python3", "-c", "bytes(10**7)")))
        assert fits.exit_code == 0
        spin = await sh(backend, box, "while :; do :; done", deadline_s=8)
        assert (spin.timed_out, spin.exit_code) == (False, 137)
        opens = "[open('/dev/null') for _ in range(40)]"
        crowd = await run(backend, box, ExecRequest(("python3", "-c", opens)))
        assert b"Too many open files" in crowd.stderr

    play(kind, tmp_path, body)


def test_a_snapshot_restores_the_same_tree(kind, tmp_path):
    script = """
    echo two >> a; rm -r old; mkdir old; echo n > old/new; ln -s ../a old/link; mkfifo pipe
    mkdir -m 700 -p deep/er; head -c 50000 /dev/urandom > deep/er/large; chmod 751 a
    touch -d 2001-02-03 deep/er/large; printf x > "$(printf 'bad\\377name')"
    """
    show = (
        "ls -laR --time-style=full-iso --ignore=. --ignore=..; cat a old/new; md5sum deep/er/large"
    )

    async def body(backend):
        box = await backend.create(ANY, {"a": b"one\n", "old/gone": b"x", "keep/k": b"k"})
        assert (await sh(backend, box, script)).exit_code == 0
        snapshot = await backend.snapshot(box, {"cwd": "/"})
        assert snapshot.tree_digest == await backend.tree_digest(box)
        twin = await backend.restore(ANY, snapshot)
        assert await backend.tree_digest(twin) == snapshot.tree_digest
        listings = [(await sh(backend, id, show)).stdout for id in (box, twin)]
        assert listings[0] == listings[1]
        assert b"new" in listings[0]
        assert b"gone" not in listings[0]
        assert await backend.snapshot(twin, {"cwd": "/"}) == snapshot

    play(kind, tmp_path, body)


def test_an_unchanged_tree_adds_no_layer(kind, tmp_path):
    async def body(backend):
        blobs = BlobStore(tmp_path / "blobs")
        box = await backend.create(ANY, {"a": b"one"})
        first = await backend.snapshot(box, {"n": 1})
        count = len(list(blobs.digests()))
        await sh(backend, box, "cat a; echo x > tmpfile; rm tmpfile")
        assert await backend.snapshot(box, {"n": 1}) == first
        second = await backend.snapshot(box, {"n": 2})
        assert second.layers == first.layers
        assert second.parent == first.snapshot_id
        assert second.snapshot_id != first.snapshot_id
        assert second.tree_digest == first.tree_digest
        assert len(list(blobs.digests())) == count
        await sh(backend, box, "echo more >> a")
        third = await backend.snapshot(box, {"n": 2})
        assert third.layers[:-1] == first.layers
        assert third.tree_digest != first.tree_digest
        assert len(list(blobs.digests())) == count + 1

    play(kind, tmp_path, body)


def test_equal_files_give_equal_first_snapshots(tmp_path):
    async def body(backend):
        files = {"x/y": b"1", "z": b"2"}
        boxes = [await backend.create(ANY, files) for _ in range(2)]
        first, second = [await backend.snapshot(box, {}) for box in boxes]
        assert first == second

    play("bwrap", tmp_path, body)
    play("process", tmp_path, body)


def test_forks_start_equal_and_diverge(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY, {"a": b"base"})
        await sh(backend, box, "echo unsaved > b")
        twins = await backend.fork(box, 3)
        assert len({*twins, box}) == 4
        digests = {await backend.tree_digest(id) for id in (*twins, box)}
        assert len(digests) == 1
        for number, twin in enumerate(twins):
            await sh(backend, twin, f"cat b; echo {number} > a; rm b")
        assert [await backend.get(twin, "a") for twin in twins] == [b"0\n", b"1\n", b"2\n"]
        assert await backend.get(box, "a") == b"base"
        assert await backend.get(box, "b") == b"unsaved\n"
        await backend.close(box)
        snapshot = await backend.snapshot(twins[1], {})
        again = await backend.restore(ANY, snapshot)
        assert await backend.get(again, "a") == b"1\n"

    play(kind, tmp_path, body)


RESTORE = """
import asyncio, json, sys
from pathlib import Path
from k3rl.blobs import BlobStore
from k3rl.sandboxes.base import SandboxSpec
from k3rl.sandboxes.factory import open_backend
from k3rl.types import Snapshot, from_plain
kind, blobs, scratch, snapshot = sys.argv[1:]
async def main():
    backend = open_backend(kind, BlobStore(Path(blobs)), Path(scratch), allow_unconfined=True)
    box = await backend.restore(
        SandboxSpec(required=()), from_plain(Snapshot, json.loads(snapshot)))
    print((await backend.get(box, "a")).decode(), await backend.tree_digest(box))
    await backend.aclose()
asyncio.run(main())
"""


@pytest.mark.parametrize("scratch", ["scratch", "elsewhere"])
def test_another_process_restores_a_snapshot(kind, scratch, tmp_path):
    async def body(backend):
        box = await backend.create(ANY, {"a": b"one", "gone/x": b"x"})
        await sh(backend, box, "rm -r gone; echo two > b; head -c 40000 /dev/zero > large")
        snapshot = await backend.snapshot(box, {})
        argv = [kind, tmp_path / "blobs", tmp_path / scratch, json.dumps(to_plain(snapshot))]
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", RESTORE, *argv],
            capture_output=True,
            cwd=Path(__file__).parents[2],
            check=False,
        )
        assert done.stdout.decode().split() == ["one", snapshot.tree_digest], done.stderr
        assert (await sh(backend, box, "cat b")).stdout == b"two\n"

    play(kind, tmp_path, body)


def test_snapshots_travel_between_backends(tmp_path):
    async def main():
        blobs = BlobStore(tmp_path / "blobs")
        backends = [open_backend(k, blobs, tmp_path / "scratch", True) for k in KINDS]
        for source, target in (backends, backends[::-1]):
            box = await source.create(ANY, {"d/old": b"x", "e": b"y"})
            await sh(source, box, "rm -r d; mkdir d; echo n > d/new; chmod 600 e")
            snapshot = await source.snapshot(box, {})
            twin = await target.restore(ANY, snapshot)
            assert await target.tree_digest(twin) == snapshot.tree_digest
            assert (await sh(target, twin, "ls d")).stdout == b"new\n"
        for backend in backends:
            await backend.aclose()

    asyncio.run(main())


def test_many_snapshots_stack_and_restore(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY, {"a": b"", "d/x": b"x"})
        for number in range(40):
            await backend.put(box, f"n/{number}", b"%d" % number)
            if number == 20:
                await sh(backend, box, "rm -r d; mkdir d; head -c 30000 /dev/zero > d/large")
            snapshot = await backend.snapshot(box, {"n": number})
        assert len(snapshot.layers) == 41
        result = await sh(backend, box, "ls n | wc -l; cat n/0 n/39; ls d")
        assert result.stdout == b"40\n039large\n"
        twin = await backend.restore(ANY, snapshot)
        assert await backend.tree_digest(twin) == await backend.tree_digest(box)
        assert (await sh(backend, twin, "ls n | wc -l; cat n/0 n/39; ls d")).stdout == result.stdout

    play(kind, tmp_path, body)


def test_a_corrupt_layer_is_named(kind, tmp_path):
    async def body(backend):
        blobs = BlobStore(tmp_path / "blobs")
        box = await backend.create(ANY, {"a": b"one" * 100})
        snapshot = await backend.snapshot(box, {})
        path = blobs.path(snapshot.layers[0])
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(CorruptData, match=str(path)):
            await backend.restore(ANY, snapshot)
        wrong = replace(await backend.snapshot(await backend.create(ANY), {}), tree_digest="0" * 64)
        with pytest.raises(CorruptData, match="tree_digest"):
            await backend.restore(ANY, wrong)

    play(kind, tmp_path, body)


def test_a_paused_sandbox_refuses_commands_until_resumed(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY, {"a": b"one"})
        await backend.pause(box)
        with pytest.raises(SandboxError, match="paused"):
            await sh(backend, box, "true")
        assert (await backend.stats(box)).is_paused
        assert (await backend.snapshot(box, {})).process_state == "none"
        assert await backend.get(box, "a") == b"one"
        await backend.resume(box)
        assert (await sh(backend, box, "cat a")).stdout == b"one"

    play(kind, tmp_path, body)


def test_a_closed_sandbox_is_lost(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY)
        await backend.close(box)
        await backend.close(box)
        calls = (
            sh(backend, box, "true"),
            backend.put(box, "a", b""),
            backend.get(box, "a"),
            backend.pause(box),
            backend.resume(box),
            backend.snapshot(box, {}),
            backend.fork(box, 1),
            backend.tree_digest(box),
            backend.stats(box),
        )
        for call in calls:
            with pytest.raises(SandboxLost, match=box):
                await call

    play(kind, tmp_path, body)


def test_closing_ends_a_running_command(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY)
        running = asyncio.create_task(sh(backend, box, "sleep 60", deadline_s=60))
        await asyncio.sleep(0.2)
        start = time.monotonic()
        await backend.close(box)
        with pytest.raises(SandboxLost):
            await running
        assert time.monotonic() - start < 2

    play(kind, tmp_path, body)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def child_processes() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_cancelling_an_exec_leaks_nothing(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY)
        await sh(backend, box, "true")
        gc.collect()
        descriptors, children = open_descriptors(), child_processes()
        for delay_s in (0, 0.001, 0.004, 0.01, 0.1):
            running = asyncio.create_task(sh(backend, box, "yes", deadline_s=60))
            await asyncio.sleep(delay_s)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        async for _ in backend.exec(box, ExecRequest(("yes",), deadline_s=60)):
            break
        await asyncio.sleep(0.05)
        assert (await sh(backend, box, "echo fine")).stdout == b"fine\n"
        assert open_descriptors() <= descriptors
        assert child_processes() == children

    play(kind, tmp_path, body)


def test_commands_in_one_sandbox_take_turns_and_sandboxes_do_not_wait(kind, tmp_path):
    async def body(backend):
        boxes = [await backend.create(ANY) for _ in range(4)]
        start = time.monotonic()
        await asyncio.gather(*(sh(backend, box, "sleep 0.4") for box in boxes))
        assert time.monotonic() - start < 1.2
        script = "test ! -e lock; echo $?; touch lock; sleep 0.1; rm lock"
        results = await asyncio.gather(*(sh(backend, boxes[0], script) for _ in range(3)))
        assert [result.stdout for result in results] == [b"0\n"] * 3

    play(kind, tmp_path, body)


def test_a_missing_program_of_a_spec_is_named(kind, tmp_path):
    async def body(backend):
        with pytest.raises(CapabilityMissing, match="no-such-tool"):
            await backend.create(replace(ANY, executables=("sh", "no-such-tool")))
        assert await backend.create(replace(ANY, executables=("sh", "python3")))

    play(kind, tmp_path, body)


def test_stats_count(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY, {"a": b"12345"})
        await sh(backend, box, "printf 678 > b; sleep 0.05")
        stats = await backend.stats(box)
        assert (stats.num_execs, stats.workspace_bytes, stats.is_paused) == (1, 8, False)
        assert 0.05 < stats.exec_s < stats.age_s

    play(kind, tmp_path, body)


def test_malformed_requests_are_user_errors(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY)
        for request in (
            ExecRequest(()),
            ExecRequest(("",)),
            ExecRequest(("a\0b",)),
            ExecRequest(("true",), environment={"A=B": ""}),
        ):
            with pytest.raises(UserInputError):
                await run(backend, box, request)
        with pytest.raises(UserInputError):
            await backend.create(ANY, {"a": b"", "a/b": b""})
        with pytest.raises(UserInputError):
            await backend.create(ANY, {"../a": b""})

    play(kind, tmp_path, body)


def test_a_spec_survives_its_journey_as_plain_data():
    spec = SandboxSpec(environment={"A": "b"}, executables=("sh", "python3"))
    assert from_plain(SandboxSpec, json.loads(json.dumps(to_plain(spec)))) == spec


def test_a_tree_that_no_snapshot_can_hold_is_its_makers_fault(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY)
        made = await sh(backend, box, "for i in $(seq 250); do mkdir d && cd d || exit 1; done")
        assert made.exit_code == 0
        with pytest.raises(UncapturableTree, match="deeper than 200"):
            await backend.snapshot(box, {})

    play(kind, tmp_path, body)
