"""What every SandboxBackend does with commands and files; what attacks do is the suite's."""

import asyncio
import gc
import os
import time
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from k3rl.errors import (
    CapabilityMissing,
    SandboxError,
    SandboxLost,
    UserInputError,
)
from k3rl.sandboxes.base import ExecExit, ExecRequest, OutputChunk, SandboxBackend, Stream, run
from k3rl.sandboxes.spec import MIB, OFFERED_BY_SOME, Capability, SandboxSpec
from k3rl.types import ProcessState
from tests.sandboxes.sandbox_helpers import ANY, eventually, play, scratch_of, sh, survivors

pytestmark = [pytest.mark.sandbox]


def test_a_backend_is_a_sandbox_backend(kind, tmp_path):
    async def body(backend):
        assert isinstance(backend, SandboxBackend)
        assert backend.name == kind

    play(kind, tmp_path, body)


NOT_BY_LANDLOCK = {
    Capability.HIDDEN_PATHS,
    Capability.PRIVATE_TMP,
    Capability.ISOLATED_PROCESSES,
}


def test_a_confining_backend_enforces_what_specs_require(confining, tmp_path):
    async def body(backend):
        found = await backend.capabilities()
        missing = NOT_BY_LANDLOCK if confining == "landlock" else set()
        offered = {Capability.IMAGES} if confining == "docker" else set()
        assert found & OFFERED_BY_SOME == offered
        confines = frozenset(Capability) - OFFERED_BY_SOME
        assert (found - offered) | {Capability.TOTAL_MEMORY_LIMIT} == confines - missing
        assert await backend.create(SandboxSpec())

    play(confining, tmp_path, body)


def test_the_unconfined_backend_promises_no_confinement(tmp_path):
    async def body(backend):
        confining = {
            Capability.ISOLATED_FILES,
            Capability.HIDDEN_PATHS,
            Capability.NO_NETWORK,
            Capability.PROCESS_LIMIT,
            Capability.KILLS_DESCENDANTS,
            Capability.SYSCALL_FILTER,
            Capability.TOTAL_MEMORY_LIMIT,
            Capability.DISK_LIMIT,
            Capability.PRIVATE_TMP,
            Capability.ISOLATED_PROCESSES,
            Capability.NO_PRIVILEGES,
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


def test_a_file_that_cannot_be_got_is_named(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY, {"real/file": b"one"})
        with pytest.raises(UserInputError, match="'absent': no such file"):
            await backend.get(box, "absent")
        with pytest.raises(UserInputError, match="3 bytes are more than 2"):
            await backend.get(box, "real/file", max_bytes=2)
        with pytest.raises(UserInputError, match="'real': not a regular file but a dir"):
            await backend.get(box, "real")

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
        if kind == "landlock":
            assert found.pop(b"GIT_CONFIG_NOSYSTEM") == b"1"
        assert set(found) == names
        assert found[b"BOTH"] == b"exec"

    if kind == "process":
        request = replace(request, argv=("sh", "-c", "env -0"))
    play(kind, tmp_path, body)


def test_a_paused_sandbox_refuses_commands_until_resumed(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY, {"a": b"one"})
        await backend.pause(box)
        with pytest.raises(SandboxError, match="paused"):
            await sh(backend, box, "true")
        assert (await backend.stats(box)).is_paused
        # A daemon of a command that has ended would run on here, and be in no snapshot.
        ends_all = Capability.KILLS_DESCENDANTS in await backend.capabilities()
        wanted = ProcessState.NONE if ends_all else ProcessState.LOST
        assert (await backend.snapshot(box, {})).process_state is wanted
        assert await backend.get(box, "a") == b"one"
        await backend.resume(box)
        assert (await sh(backend, box, "cat a")).stdout == b"one"

    play(kind, tmp_path, body)


def test_a_paused_sandbox_holds_no_process_until_its_next_command(kind, tmp_path):
    script = "sleep 1; echo done >> log; sleep 300 & sleep 300 >/dev/null 2>&1 &"

    async def body(backend):
        box = await backend.create(ANY, {"a": b"one"})
        place = scratch_of(tmp_path)
        await eventually(lambda: not survivors(place))  # of a probe, where a daemon survives it
        running = asyncio.create_task(sh(backend, box, script))
        await eventually(lambda: bool(survivors(place)))  # else this look would prove nothing
        await backend.pause(box)
        assert running.done(), "it waits for the command"
        assert (await running).exit_code == 0
        assert survivors(place) == []
        await backend.put(box, "b", b"two")
        assert (await backend.stats(box)).is_paused
        twin = (await backend.fork(box, 1))[0]
        assert survivors(place) == []
        await backend.resume(box)
        assert survivors(place) == [], "resuming is cheap"
        assert (await sh(backend, box, "cat log a b")).stdout == b"done\nonetwo"
        assert (await sh(backend, twin, "cat log a b")).stdout == b"done\nonetwo"

    play(kind, tmp_path, body)


CHANNEL = """
echo out; echo told >&3; echo err >&2
python3 -c '
import os
os.write(3, bytes(range(256)) * 400)
print(os.path.exists("/proc/self/fd/4"))'
"""


def test_a_channel_is_apart_from_output_and_bounded(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY)
        sent = b"told\n" + bytes(range(256)) * 400
        for room in (len(sent) + 1, len(sent), 70_000, 3):
            request = ExecRequest(("sh", "-c", CHANNEL), channel_bytes=room)
            chunks, last = [], None
            async for event in backend.exec(box, request):
                if isinstance(event, ExecExit):
                    last = event
                elif event.stream is Stream.CHANNEL:
                    chunks.append(event)
            assert last.exit_code == 0
            assert b"".join(chunk.data for chunk in chunks) == sent[:room]
            starts = [chunk.offset for chunk in chunks]
            assert starts == [sum(len(c.data) for c in chunks[:n]) for n in range(len(chunks))]
        request = ExecRequest(("sh", "-c", CHANNEL), channel_bytes=6)
        result = await run(backend, box, request)
        assert (result.stdout, result.stderr, result.channel) == (
            b"out\nFalse\n",
            b"err\n",
            b"told\n\0",
        )
        without = await sh(backend, box, "echo x >&3; ls /proc/self/fd | wc -l")
        assert without.channel == b""
        assert b"3" in without.stderr

    play(kind, tmp_path, body)


def test_a_channel_that_is_flooded_or_held_open_delays_nothing(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY)
        start = time.monotonic()
        for script in ("setsid sleep 2 & echo x >&3", "yes >&3"):
            request = ExecRequest(("sh", "-c", script), deadline_s=0.4, channel_bytes=2)
            result = await run(backend, box, request)
            assert result.channel[:1] in (b"x", b"y")
        assert result.timed_out
        assert time.monotonic() - start < 2

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
            await asyncio.sleep(0)
            running.cancel()  # somebody in a hurry
            with pytest.raises(asyncio.CancelledError):
                await running
        async for _ in backend.exec(box, ExecRequest(("yes",), deadline_s=60)):
            break
        await asyncio.sleep(0.05)
        assert (await sh(backend, box, "echo fine")).stdout == b"fine\n"
        assert open_descriptors() <= descriptors
        assert len(child_processes()) <= len(children)

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
            ExecRequest(("true",), channel_bytes=-1),
        ):
            with pytest.raises(UserInputError):
                await run(backend, box, request)
        with pytest.raises(UserInputError):
            await backend.create(ANY, {"a": b"", "a/b": b""})
        with pytest.raises(UserInputError):
            await backend.create(ANY, {"../a": b""})

    play(kind, tmp_path, body)
