"""Sandboxes and the machine they run on: users, missing namespaces, caches, what is left behind."""

import asyncio
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.blobs import BlobStore
from k3rl.errors import CapabilityMissing, SandboxError, UserInputError
from k3rl.sandboxes import probe
from k3rl.sandboxes.backends.bwrap import BwrapBackend, bwrap_version, find_bwrap, find_inside
from k3rl.sandboxes.base import ExecRequest, run
from k3rl.sandboxes.blocking import in_thread
from k3rl.sandboxes.factory import diagnose, open_backend
from k3rl.sandboxes.files.cache import LayerCache
from k3rl.sandboxes.files.layers import layer_of_files
from k3rl.sandboxes.processes.landlock import MIN_ABI, landlock_abi
from k3rl.sandboxes.scratch import open_scratch, sandbox_identity
from k3rl.sandboxes.spec import OFFERED_BY_SOME, Capability
from tests.sandboxes.landlock_helpers import needs_landlock
from tests.sandboxes.sandbox_helpers import ANY, play, reachable_bwrap, sh

REPOSITORY = Path(__file__).parents[2]
pytestmark = [pytest.mark.sandbox]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has to drop its uid")

PRELUDE = """
import asyncio, concurrent.futures.thread, ctypes, json, os, sys
from pathlib import Path
from k3rl.blobs import BlobStore
from k3rl.errors import CapabilityMissing
from k3rl.sandboxes import base, factory, probe, spec
from k3rl.sandboxes.backends import bwrap
folder = Path(sys.argv[1])
program = Path(sys.argv[2])
def backend():
    return bwrap.BwrapBackend(BlobStore(folder / "blobs"), folder / "scratch", program)
"""


def run_script(script: str, folder: Path, setting: str = "") -> str:
    """Run setting + PRELUDE + script in a new interpreter, with a bwrap that any user can reach.

    `setting` runs while the interpreter still has one thread.
    """
    program = reachable_bwrap(folder)
    argv = [sys.executable, "-c", setting + PRELUDE + script, str(folder), str(program)]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_root_runs_code_as_an_unprivileged_host_user(tmp_path):
    async def body(backend):
        box = await backend.create(ANY)
        await sh(backend, box, "touch made; id -u")
        status = (backend._box(box).workspace.upper / "made").stat()
        assert status.st_uid != 0
        assert (await sh(backend, box, "id -u; stat -c %u made")).stdout == b"1000\n1000\n"

    play("bwrap", tmp_path, body)


AS_ORDINARY_USER = """
if os.geteuid() == 0:
    os.setgroups([]); os.setresgid(54321, 54321, 54321); os.setresuid(54321, 54321, 54321)
HIDE = "mkdir -p shut/in; echo x > shut/in/f; chmod 0 shut/in/f; chmod 0 shut; chmod 500 ."
async def main():
    one = backend()
    found = sorted(await one.capabilities())
    box = await one.create(spec.SandboxSpec(), {"a": b"1"})
    await base.run(one, box, base.ExecRequest(("sh", "-c", HIDE)))
    snapshot = await one.snapshot(box, {})
    twin = await one.restore(spec.SandboxSpec(), snapshot)
    same = await one.tree_digest(twin) == await one.tree_digest(box) == snapshot.tree_digest
    shut = await base.run(one, twin, base.ExecRequest(("stat", "-c", "%a", "shut", ".")))
    await one.aclose()
    left = [str(p) for p in (folder / "scratch").glob("owner-*")]
    print(json.dumps([found, same, shut.stdout.decode(), left]))
asyncio.run(main())
"""


def test_an_ordinary_user_gets_the_same_sandboxes(open_folder):
    found, is_same, shut, left = json.loads(run_script(AS_ORDINARY_USER, open_folder))
    everything = {str(capability) for capability in set(Capability) - OFFERED_BY_SOME}
    assert set(found) | {"total_memory_limit"} == everything
    assert is_same
    assert shut == "0\n500\n"
    assert left == []


BULKY_AND_SHUT = """
os.setgroups([]); os.setresgid(54321, 54321, 54321); os.setresuid(54321, 54321, 54321)
FILL = "mkdir -p shut/in; head -c 6000000 /dev/zero > shut/in/f; chmod 0 shut/in/f; chmod 0 shut"
FILL += "; for n in $(seq 200); do echo $n > n$n; done"
async def main():
    one = backend()
    box = await one.create(spec.SandboxSpec(), {"a": b"1"})
    await base.run(one, box, base.ExecRequest(("sh", "-c", FILL)))
    seal = await one.seal(box, {})
    looks = [await base.run(one, box, base.ExecRequest(("stat", "-c", "%a", "shut")))]
    snapshot = await one.settle(box, seal)
    twin = await one.restore(spec.SandboxSpec(), snapshot)
    look = base.ExecRequest(("sh", "-c", "stat -c %a shut; chmod 700 shut; stat -c %a shut/in/f"))
    looks += [await base.run(one, each, look) for each in (box, twin)]
    later = await one.snapshot(twin, {}) 
    await one.aclose()
    print(json.dumps([[each.stdout.decode() for each in looks], len(later.layers)]))
asyncio.run(main())
"""


@needs_root
def test_an_ordinary_users_shut_files_are_sealed_in_bulk_too(open_folder):
    looks, num_layers = json.loads(run_script(BULKY_AND_SHUT, open_folder))
    assert looks == ["0\n", "0\n0\n", "0\n0\n"]
    assert num_layers == 3


REFUSED = """
async def main():
    one = backend()
    try:
        await one.create(spec.SandboxSpec())
    except CapabilityMissing as error:
        print(error)
    await one.aclose()
asyncio.run(main())
"""
NO_NAMESPACES = """
import ctypes, os
from pathlib import Path
libc = ctypes.CDLL(None)
uid, gid = os.geteuid(), os.getegid()
assert libc.unshare(0x10000000) == 0  # CLONE_NEWUSER
Path("/proc/self/setgroups").write_text("deny")
Path("/proc/self/uid_map").write_text(f"1000 {uid} 1")
Path("/proc/self/gid_map").write_text(f"1000 {gid} 1")
Path("/proc/sys/user/max_user_namespaces").write_text("0")
"""
SECCOMP = """
import ctypes, struct
libc = ctypes.CDLL(None)
def op(code, jt, jf, k): return struct.pack("HBBI", code, jt, jf, k)
ALLOW, EPERM = 0x7FFF0000, 0x00050001
program_bytes = b"".join([
    op(0x20, 0, 0, 0),            # the system call's number
    op(0x15, 3, 0, 272),          # unshare: refuse
    op(0x15, 0, 3, 56),           # not clone: allow
    op(0x20, 0, 0, 16),           # clone's flags
    op(0x45, 0, 1, 0x10000000),   # without CLONE_NEWUSER: allow
    op(0x06, 0, 0, EPERM),
    op(0x06, 0, 0, ALLOW),
])
class Program(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("filter", ctypes.c_char_p)]
rules = Program(len(program_bytes) // 8, program_bytes)
assert libc.prctl(38, 1, 0, 0, 0) == 0                     # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, ctypes.byref(rules), 0, 0) == 0   # PR_SET_SECCOMP, filter
"""


@pytest.mark.parametrize(
    ("setting", "cause"),
    [(NO_NAMESPACES, "user.max_user_namespaces is 0"), (SECCOMP, "a seccomp filter")],
)
def test_without_user_namespaces_one_line_names_cause_and_alternatives(setting, cause, open_folder):
    if setting is SECCOMP and platform.machine() != "x86_64":
        pytest.skip("the filter is written for x86-64 system call numbers")
    lines = run_script(REFUSED, open_folder, setting).splitlines()
    assert len(lines) == 1
    for part in (cause, "sandbox.backend=landlock", "sandbox.allow_unconfined=true", "process"):
        assert part in lines[0]


DIAGNOSED = "print(json.dumps(factory.diagnose()))"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter is written for x86-64")
def test_the_doctor_names_what_works_without_namespaces(open_folder):
    findings = json.loads(run_script(DIAGNOSED, open_folder, SECCOMP))
    told = {name: (is_well, detail) for name, is_well, detail in findings}
    assert not told["user namespaces"][0]
    is_well, detail = told["sandboxes without it"]
    if landlock_abi() < MIN_ABI:
        assert not is_well
        assert f"Landlock ABI {MIN_ABI}" in detail
    else:
        assert (is_well, detail) == (True, "sandbox.backend=landlock enforces what specs require")


def test_a_failure_of_bubblewrap_is_never_an_exit_code(tmp_path):
    async def body(backend):
        box = await backend.create(ANY)
        workspace = backend._box(box).workspace
        workspace.work.rename(workspace.work.with_name("gone"))
        with pytest.raises(SandboxError, match=r"(the sandbox died|bwrap failed): .*work"):
            await sh(backend, box, "exit 0")
        workspace.work.with_name("gone").rename(workspace.work)
        result = await sh(backend, box, "echo 'bwrap: execvp failed' >&2; exit 1")
        assert result.exit_code == 1

    play("bwrap", tmp_path, body)


@needs_root
def test_a_scratch_folder_behind_closed_doors_has_a_stand_in(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)

    async def body(backend):
        assert not backend.scratch.root.is_relative_to(closed)
        again = open_scratch(closed / "scratch", sandbox_identity())
        assert again.root == backend.scratch.root
        again.remove()
        box = await backend.create(ANY, {"a": b"1"})
        assert (await sh(backend, box, "cat a")).stdout == b"1"
        await backend.close(box)

    roots = []

    async def recorded(backend):
        roots.append(backend.scratch.root)
        await body(backend)

    play("bwrap", closed, recorded)
    assert not roots[0].exists()


def test_a_backend_leaves_nothing_of_its_own_behind(tmp_path):
    roots = []

    async def body(backend):
        roots.append(backend.scratch.root)
        box = await backend.create(ANY, {"a": b"1"})
        await sh(backend, box, "mkdir -p d/e; chmod 0 d; touch f")
        await backend.fork(box, 3)

    for kind in ("bwrap", "process"):
        play(kind, tmp_path, body)
    assert [path for root in roots for path in root.glob("owner-*")] == []


KILLED = """
import signal
async def main():
    one = backend()
    box = await one.create(spec.SandboxSpec(), {"a": b"1"})
    print(one.scratch.owner, flush=True)
    request = base.ExecRequest(("sh", "-c", "echo up; sleep 300"), deadline_s=300)
    async for event in one.exec(box, request):
        print(one._box(box).child.process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


def mentions(path: Path, folder: Path) -> bool:
    try:
        return str(folder) in path.read_text()
    except OSError:
        return False


def test_a_killed_owner_takes_its_commands_along_and_is_cleaned_up_after(open_folder):
    scratch = open_folder / "scratch"
    with pytest.raises(AssertionError):
        run_script(KILLED, open_folder)
    (dead,) = scratch.glob("owner-*")
    asyncio.run(asyncio.sleep(0.2))
    assert [path for path in Path("/proc").glob("[0-9]*/mountinfo") if mentions(path, dead)] == []
    living = open_scratch(scratch, sandbox_identity())
    assert not dead.exists()
    assert living.owner.exists()
    other = open_scratch(scratch, sandbox_identity())
    assert living.owner.exists()
    other.remove()
    living.remove()


def test_the_layer_cache_extracts_once_and_evicts_only_what_nobody_uses(tmp_path):
    owners = [open_scratch(tmp_path, sandbox_identity()) for _ in range(2)]
    one, two = (LayerCache(owner, kept_items=1) for owner in owners)
    layers = [layer_of_files({f"f{n}": b"x"}) for n in range(4)]

    def take(cache, number):
        layer, contents = layers[number]
        return cache.layer(layer, lambda entry: [contents[entry.digest]])

    names = [take(one, 0), take(one, 1), take(two, 1), take(two, 2), take(two, 3)]
    inode = two.path(names[2]).stat().st_ino
    assert one.path(names[1]).stat().st_ino == inode
    one.release(names[:2])
    two.release(names[3:])
    assert one.evict() == 2  # three are unused, one of them is kept; layer 1 is in use by `two`
    assert one.path(names[1]).exists()
    two.release([names[2]])
    assert two.evict() == 1
    assert len([path for path in one.folder.iterdir() if path.name != ".lock"]) == 1
    for owner in owners:
        owner.remove()


RACE = """
from k3rl.sandboxes.files.cache import LayerCache
from k3rl.sandboxes.files.layers import layer_of_files
from k3rl.sandboxes.scratch import open_scratch
cache = LayerCache(open_scratch(folder / "scratch", None), 0)
files = {f"d{n}/f": b"x" * n for n in range(50)}
layer, contents = layer_of_files(files)
for _ in range(40):
    name = cache.layer(layer, lambda entry: [contents[entry.digest]])
    assert len(list(cache.path(name).iterdir())) == 50
    cache.release([name])
    cache.evict()
print("fine")
"""


def test_processes_share_the_layer_cache_safely(tmp_path):
    argv = [sys.executable, "-c", PRELUDE + RACE, str(tmp_path), "bwrap"]
    racers = [
        subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    for racer in racers:
        out, error = racer.communicate(timeout=60)
        assert out == b"fine\n", error


EDIT = """
import json, os, shutil, sys
for kind, path, text in json.load(sys.stdin):
    try:
        if kind == "remove":
            is_folder = os.path.isdir(path) and not os.path.islink(path)
            shutil.rmtree(path) if is_folder else os.remove(path)
        elif kind == "rename":
            # What mv does: overlayfs refuses to rename a folder of a lower layer (EXDEV).
            if not os.path.lexists(text): shutil.move(path, text)
        elif kind == "mode":
            os.chmod(path, 0o700 if text else 0o755)
        elif kind == "link":
            os.symlink(text, path)
        elif kind == "append":
            with open(path, "a") as file: file.write(text)
        else:
            if os.path.lexists(path) and not os.path.isdir(path): os.remove(path)
            os.makedirs(path, exist_ok=True)
    except (OSError, shutil.Error):
        pass
"""
PATHS = st.sampled_from(["a", "b", "a/c", "b/c", "a/c/d", "e"])
EDITS = st.tuples(
    st.sampled_from(["remove", "rename", "mode", "link", "append", "dir", "append", "dir"]),
    PATHS,
    PATHS,
)
ROUNDS = st.tuples(st.lists(EDITS, min_size=1, max_size=8), st.booleans())


def test_overlay_workspaces_equal_plain_ones_edit_by_edit(tmp_path):
    """Whatever code does to a tree, a layered workspace and a plain one show the same."""

    async def check(pair, rounds):
        files = {"a/c/x": b"1", "a/y": b"2", "b": b"3"}
        boxes = [(backend, await backend.create(ANY, files)) for backend in pair]
        made = []
        for edits, is_forked in rounds:
            request = ExecRequest(("python3", "-c", EDIT), json.dumps(edits).encode())
            snapshots = []
            for backend, box in boxes:
                result = await run(backend, box, request)
                assert result.exit_code == 0, result.stderr
                snapshots.append(await backend.snapshot(box, {}))
                if is_forked:  # moves what is sealed below the upper folder
                    (twin,) = await backend.fork(box, 1)
                    assert await backend.tree_digest(twin) == snapshots[-1].tree_digest
                    await backend.close(twin)
            assert snapshots[0].tree_digest == snapshots[1].tree_digest, edits
            made.append(snapshots[0])
        for backend, box in boxes:
            await backend.close(box)
            for snapshot in made:
                twin = await backend.restore(ANY, snapshot)
                assert await backend.tree_digest(twin) == snapshot.tree_digest
                await backend.close(twin)

    with asyncio.Runner() as runner:
        blobs = BlobStore(tmp_path / "blobs")
        pair = [open_backend(k, blobs, tmp_path / "s", True) for k in ("bwrap", "process")]

        @settings(max_examples=20, deadline=None, database=None)
        @given(st.lists(ROUNDS, min_size=1, max_size=5))
        def examples(rounds):
            runner.run(check(pair, rounds))

        try:
            examples()
        finally:
            for backend in pair:
                runner.run(backend.aclose())


def test_unconfined_execution_must_be_asked_for(tmp_path):
    blobs = BlobStore(tmp_path / "blobs")
    with pytest.raises(CapabilityMissing, match=r"sandbox\.allow_unconfined=true"):
        open_backend("process", blobs, tmp_path / "scratch")
    with pytest.raises(UserInputError, match="choose bwrap, docker, landlock or process"):
        open_backend("vm", blobs, tmp_path / "scratch")


RESTLESS_DAEMON = """
cat > restless.py <<'END'
import itertools, os
handle = os.open("beat", os.O_RDWR | os.O_CREAT)
for turn in itertools.count():
    os.ftruncate(handle, 1 + turn % 1000)
END
setsid timeout 3 python3 restless.py </dev/null >/dev/null 2>&1 &
while ! test -s beat; do sleep 0.01; done
"""


def test_a_survivor_that_writes_while_it_is_looked_at_is_only_a_missing_capability(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(probe, "DAEMON", RESTLESS_DAEMON)
    backend = open_backend("process", BlobStore(tmp_path / "b"), tmp_path / "s", True)

    async def look():
        try:
            return await backend.capabilities()
        finally:
            await backend.aclose()

    assert Capability.KILLS_DESCENDANTS not in asyncio.run(look())


def test_the_doctor_finds_what_this_machine_has():
    findings = diagnose()
    names = [name for name, _, _ in findings]
    assert names == [
        "bubblewrap",
        "user namespaces",
        "overlay",
        "enforcement",
        "python3 on the sandbox path",
    ]
    assert all(is_well for _, is_well, _ in findings), findings


def test_an_old_or_broken_bubblewrap_is_refused(tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho bubblewrap 0.8.0\n")
    fake.chmod(0o755)
    assert bwrap_version(fake) == (0, 8, 0)
    assert bwrap_version(tmp_path / "absent") == ()
    assert bwrap_version(find_bwrap()) >= (0, 11)
    assert find_inside("python3").is_relative_to("/usr")
    assert find_inside("no-such-tool") is None


def test_a_cancelled_caller_waits_for_its_file_work():
    async def main():
        done = []

        def work():
            import time

            time.sleep(0.2)
            done.append(True)

        task = asyncio.create_task(in_thread(work))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert done == [True]

    asyncio.run(main())


def test_a_closed_backend_makes_no_more_sandboxes(tmp_path):
    async def main():
        backend = BwrapBackend(BlobStore(tmp_path / "blobs"), tmp_path / "scratch")
        await backend.create(ANY)
        await backend.aclose()
        with pytest.raises(SandboxError, match="closed"):
            await backend.create(ANY)

    asyncio.run(main())


IGNORING = """
import asyncio, signal, sys
from pathlib import Path
for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
from k3rl.blobs import BlobStore
from k3rl.sandboxes.base import ExecRequest, run
from k3rl.sandboxes.factory import open_backend
from k3rl.sandboxes.spec import SandboxSpec
async def main():
    folder = Path(sys.argv[2])
    backend = open_backend(sys.argv[1], BlobStore(folder / "blobs"), folder / "scratch", True)
    box = await backend.create(SandboxSpec(required=()))
    done = await run(backend, box, ExecRequest(("bash", "-c", "trap -p")))
    print(done.exit_code, done.stdout, done.stderr)
    await backend.aclose()
asyncio.run(main())
"""


@pytest.mark.parametrize(
    "kind", ["bwrap", pytest.param("landlock", marks=needs_landlock), "process"]
)
def test_a_command_ignores_no_signal_whatever_its_host_does(kind, tmp_path):
    """Started by nohup, say."""
    argv = [sys.executable, "-c", IGNORING, kind, str(tmp_path)]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "0 b'' b''\n"
