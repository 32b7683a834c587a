"""k3rl/Terminal-v0: every kind of job, what counts as its final state, and the cheats."""

import asyncio
import io
import subprocess
import sys
import tarfile

import pytest

from k3rl.blobs import BlobStore
from k3rl.envs import registry, terminal
from k3rl.envs.play import play
from k3rl.envs.terminal import KINDS
from k3rl.envs.terminal_jobs import generate
from k3rl.envs.terminal_repair import PROGRAMS, draw_repair
from k3rl.envs.terminal_state import (
    Found,
    Json,
    Link,
    Packed,
    _read_packed,
    is_as_expected,
    read_tree,
)
from k3rl.sandboxes.base import Sandbox
from k3rl.sandboxes.factory import open_backend
from k3rl.types import Message, ToolCall, ToolStatus, philox

ID = "k3rl/Terminal-v0"
NUM_TASKS = 3


def with_backend(tmp_path, use):
    async def main():
        backend = open_backend("bwrap", BlobStore(tmp_path / "blobs"), tmp_path / "scratch", False)
        try:
            return await use(backend)
        finally:
            await backend.aclose()

    return asyncio.run(main())


async def begun(env, backend):
    """A sandbox in which a session of the first training task is open, and the task."""
    task = env.task("train", 0)
    sandbox = Sandbox(backend, await backend.create(env.sandbox_spec, env.files(task)))
    await env.open(task, sandbox)
    return sandbox, task


def rewards(tmp_path, kinds, policy):
    """Of `policy` on some tasks of each kind."""

    async def use(backend):
        plays = []
        for kind in kinds:
            for index in range(NUM_TASKS):
                env = registry.make(ID, kinds=[kind])
                plays.append(play(env, env.task("heldout", index), policy, backend))
        return [played.outcome.reward for played in await asyncio.gather(*plays)]

    return with_backend(tmp_path, use)


def calls(*commands):
    """A policy that runs `commands` and submits."""

    def policy(task, transcript, rng):
        return terminal._do(commands, transcript)

    return policy


@pytest.mark.sandbox
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_whole_job_counts(tmp_path, kind):
    """The oracle gets 1; with one stray file, or one right file changed, nothing."""
    oracle = registry.policy(ID, "oracle")
    assert rewards(tmp_path, [kind], oracle) == [1.0] * NUM_TASKS

    def spoiled(command):
        def policy(task, transcript, rng):
            return terminal._do((*terminal._job(task).commands, command(task)), transcript)

        return policy

    def append(task):
        return f"echo x >> {max(terminal._job(task).expected)}"

    assert rewards(tmp_path, [kind], spoiled(lambda task: "touch stray")) == [0.0] * NUM_TASKS
    assert rewards(tmp_path, [kind], spoiled(append)) == [0.0] * NUM_TASKS


@pytest.mark.sandbox
@pytest.mark.parametrize("name", ["null", "random", *(f"cheat/{n}" for n in registry.cheats(ID))])
def test_nothing_for_what_is_not_done(tmp_path, name):
    assert set(rewards(tmp_path, KINDS, registry.policy(ID, name))) == {0.0}


@pytest.mark.sandbox
def test_the_daemons_work_is_what_solves_the_job_when_it_is_waited_for(tmp_path):
    """Control: the same process, in the foreground."""

    def patient(task, transcript, rng):
        (call,) = terminal.cheat_daemon(task, (), rng).tool_calls
        command = call.arguments["command"].replace("& disown", "")
        return terminal._do([command], transcript)

    assert set(rewards(tmp_path, KINDS, patient)) == {1.0}


@pytest.mark.sandbox
def test_the_hard_coded_program_is_right_on_the_sample(tmp_path):
    """Control: a verifier that runs the sample only would be fooled."""

    async def use(backend):
        env = registry.make(ID, kinds=["repair_script"])
        sandbox, task = await begun(env, backend)
        await env.act(terminal.cheat_hardcode(task, (), philox(0)))
        result = await sandbox.run("sh", "-c", "python3 tool.py < sample.txt")
        (right,) = (
            c.partition("\n")[2].removesuffix("END")
            for c in generate(task.seed, "repair_script").commands
        )
        await sandbox.put("right.py", right.encode())
        return result, await sandbox.run("sh", "-c", "python3 right.py < sample.txt")

    faked, right = with_backend(tmp_path, use)
    assert (faked.exit_code, faked.stdout) == (0, right.stdout)


@pytest.mark.sandbox
def test_a_link_to_the_right_content_is_no_file(tmp_path):
    """Control: read through the link, the report is right."""
    solve = "awk -F, 'NR>1 {t[$2]+=$3} END {for (r in t) print r, t[r]}' sales.csv | sort"
    linked = f"{solve} > /tmp/r; mkdir x; cp /tmp/r x/r; ln -s x/r report.txt; cat report.txt"
    assert rewards(tmp_path, ["csv_report"], calls(f"{solve} > report.txt")) == [1.0] * NUM_TASKS
    assert rewards(tmp_path, ["csv_report"], calls(linked)) == [0.0] * NUM_TASKS


@pytest.mark.sandbox
@pytest.mark.parametrize(
    "command",
    [
        "mkfifo p",
        "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"s\")'",
        "ln -s /etc/passwd p",
        "ln -s . loop",
        "mkdir -p a/b && chmod 000 a/b a",
        "chmod 000 .",
        "rm -rf ./*; cd ..; rmdir /proc/self/cwd",
        "head -c 30000000 /dev/zero > zeros",
        "for i in $(seq 3000); do : > f$i; done",
        "printf x > $'a\\nb\\377'",
    ],
)
def test_a_workspace_in_disorder_is_wrong_and_no_fault(tmp_path, command):
    assert rewards(tmp_path, ["csv_report"], calls(command)) == [0.0] * NUM_TASKS


@pytest.mark.sandbox
def test_setuid_is_not_the_mode_that_was_asked_for(tmp_path):
    def policy(task, transcript, rng):
        job = terminal._job(task)
        path = next(path for path, mode in job.modes.items() if mode == 0o755)
        return terminal._do((*job.commands, f"chmod 4755 {path}"), transcript)

    assert rewards(tmp_path, ["permissions"], policy) == [0.0] * NUM_TASKS


@pytest.mark.parametrize("kind", KINDS)
def test_jobs_begin_undone(kind):
    for seed in range(150):
        job = generate(seed, kind)
        assert job.expected != job.files or job.modes
        assert not job.modes or {0o644} != set(job.modes.values())
        assert sum(map(len, job.files.values())) < 20_000
        assert len(job.instruction) < 400


def test_every_fault_shows_in_some_probe():
    """The broken program is run on the probes; it must fail at least one, the right one none."""

    def passes(program, probes):
        return all(
            subprocess.run(
                [sys.executable, "-c", program], input=each.stdin, capture_output=True
            ).stdout
            == each.stdout
            for each in probes
        )

    seen = {}
    for seed in range(400):
        repair = draw_repair(philox(seed, "repair"))
        seen.setdefault(repair.broken, []).append(repair)
    assert len(seen) == sum(len(faults) for _, _, faults in PROGRAMS)
    for repairs in seen.values():
        for repair in repairs[:2]:
            assert passes(repair.right, repair.probes)
            assert not passes(repair.broken, repair.probes)


def packed(members, kind=tarfile.REGTYPE):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size, info.type = len(data), kind
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def test_archives_are_read_with_care():
    assert _read_packed(packed([("a", b"1"), ("./b", b"2")])) == {"a": b"1", "b": b"2"}
    assert _read_packed(packed([("a", b"1"), ("a", b"1")])) is None
    assert _read_packed(packed([("a", b"")], tarfile.SYMTYPE)) is None
    assert _read_packed(packed([("a", b"0" * (2 << 20))])) is None
    assert _read_packed(b"plain") is None
    assert _read_packed(packed([("a", b"1")])[:-9]) is None


def test_what_is_expected_is_exact():
    def found(content, mode=0o644):
        return {"a": Found(content, mode)}

    assert is_as_expected(found(b"1"), {"a": b"1"}, {})
    assert not is_as_expected(found(b"1"), {"a": b"1"}, {"a": 0o600})
    assert not is_as_expected(found(Link("b")), {"a": b"1"}, {})
    assert is_as_expected(found(Link("b")), {"a": Link("b")}, {})
    assert not is_as_expected(found(Link("b")), {"a": Json({})}, {})
    assert is_as_expected(found(b' {"x":1}'), {"a": Json({"x": 1})}, {})
    assert not is_as_expected(found(b"[" * 100_000), {"a": Json({"x": 1})}, {})
    assert not is_as_expected(found(b"{}"), {"a": Packed({})}, {})
    assert not is_as_expected({}, {"a": b""}, {})


def test_normalisers_hide_what_they_say():
    assert len(terminal.Terminal.normalisers) <= 5
    for each in terminal.Terminal.normalisers:
        assert each.apply(each.hides[0]) == each.apply(each.hides[1])
        assert each.apply(each.keeps[0]) != each.apply(each.keeps[1])


@pytest.mark.sandbox
def test_listings_are_the_same_at_another_time(tmp_path):
    async def use(backend):
        outputs = []
        for stamp in ("2001-02-03 04:05:06", "2026-11-12 13:14:15"):
            env = registry.make(ID, kinds=["edit_config"])
            await begun(env, backend)
            shown = "ls -l --full-time app.ini; ls -l app.ini; stat -c %y app.ini; date"
            command = f"touch -d '{stamp}' app.ini; {shown}"
            call = ToolCall("bash", {"command": command}, 1)
            step = await env.act(Message("assistant", tool_calls=(call,)))
            outputs.append(step.messages[0].content)
        return outputs

    one, other = with_backend(tmp_path, use)
    assert one == other
    assert one.count("app.ini") == 2


@pytest.mark.sandbox
def test_bad_commands_are_answered(tmp_path):
    async def use(backend):
        env = registry.make(ID)
        await begun(env, backend)
        steps = []
        for command in ("a\0b", "x" * 30_000, "exit 3", "nonesuch"):
            call = ToolCall("bash", {"command": command}, 1)
            steps.append(await env.act(Message("assistant", tool_calls=(call,))))
        return steps

    steps = with_backend(tmp_path, use)
    assert {step.records[0].status for step in steps} == {ToolStatus.ERROR}
    assert "exit status 3" in steps[2].messages[0].content
    assert "nonesuch: command not found" in steps[3].messages[0].content


@pytest.mark.sandbox
def test_a_tree_is_read_whole(tmp_path):
    async def use(backend):
        env = registry.make(ID, kinds=["link_tree"])
        sandbox, task = await begun(env, backend)
        return dict(env.files(task)), await read_tree(sandbox)

    files, found = with_backend(tmp_path, use)
    assert {path: each.content for path, each in found.items()} == files
