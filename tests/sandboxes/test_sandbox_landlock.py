"""What landlock sandboxes close off, each time beside something that shows it open; what works."""

import asyncio
import json
import os
import platform
import shutil
import socket
import struct
import subprocess
from pathlib import Path

import blake3
import pytest

from k3rl.errors import CapabilityMissing
from k3rl.sandboxes.backends.bwrap import ETC_FILES, find_inside
from k3rl.sandboxes.backends.docker_image import image_tar
from k3rl.sandboxes.base import ExecRequest, run
from k3rl.sandboxes.probe import Prober
from k3rl.sandboxes.processes import agent
from k3rl.sandboxes.processes.landlock import MIN_ABI, check_abi
from k3rl.sandboxes.processes.seccomp import filter_program
from k3rl.sandboxes.spec import ENFORCED_BY_DEFAULT, Capability, SandboxLimits, SandboxSpec
from tests.sandboxes.landlock_helpers import WHO, apart, as_who, mark, needs_landlock
from tests.sandboxes.sandbox_helpers import ANY, BUILDS, sh

REPOSITORY = Path(__file__).parents[2]
pytestmark = [pytest.mark.sandbox, needs_landlock]
by_who = pytest.mark.parametrize("who", WHO)


async def python(backend, script, *words, files=None, limits=None):
    """Run a script in a fresh sandbox, and take what it prints as JSON."""
    box = await backend.create(SandboxSpec(limits=limits or SandboxLimits(), required=()), files)
    words = ("/usr/bin/python3", "-ISc", script, *map(str, words))
    result = await run(backend, box, ExecRequest(words, deadline_s=60))
    assert result.exit_code == 0, result
    return json.loads(result.stdout)


@by_who
def test_what_specs_require_is_enforced_and_what_is_not_is_refused_by_name(who, open_folder):
    async def body(backend):
        assert set(ENFORCED_BY_DEFAULT) <= await backend.capabilities()
        assert await backend.create(SandboxSpec())
        with pytest.raises(CapabilityMissing, match="landlock cannot enforce hidden_paths here"):
            await backend.create(SandboxSpec(required=(Capability.HIDDEN_PATHS,)))

    as_who(who, open_folder, body)


@by_who
def test_the_probes_themselves_find_nothing_confined_where_nothing_is(who, open_folder):
    async def body(backend):
        found = await Prober(backend).run()
        confining = {*ENFORCED_BY_DEFAULT, Capability.HIDDEN_PATHS, Capability.TOTAL_MEMORY_LIMIT}
        # The disk watch sees a command that runs; what outlives one is why it is not promised.
        of_commands = {Capability.FILE_SIZE_LIMIT, Capability.DISK_LIMIT}
        assert found & confining == {*of_commands, Capability.SNAPSHOT}

    as_who(who, open_folder, body, kind="process")


ATTEMPTS = """
import ctypes, json, os, stat, sys
place = sys.argv[1]
file, folder, program = (os.path.join(place, name) for name in ("file", "folder", "program"))
libc = ctypes.CDLL(None, use_errno=True)
def checked(code):
    if code < 0:
        raise OSError(ctypes.get_errno(), "call")
    return code
def link_by_descriptor():
    handle = os.open(file, os.O_PATH)
    checked(libc.linkat(handle, b"", -100, b"linked", 0x1000))
def open_by_descriptor():
    handle = os.open(folder, os.O_PATH)
    os.close(os.open("../file", os.O_RDONLY, dir_fd=handle))
def from_there():
    here = os.open(".", os.O_PATH)
    os.chdir(place)
    try:
        os.close(os.open("file", os.O_RDONLY))
    finally:
        os.fchdir(here)
def by_symlink():
    os.symlink(file, "symlink")
    with open("symlink") as opened:
        opened.read()
def run_it():
    os.waitpid(os.posix_spawn(program, [program], {}), 0)
def watch():
    checked(libc.inotify_add_watch(libc.inotify_init(), folder.encode(), 0x100))
attempts = {
    "read": lambda: open(file).read(),
    "write": lambda: open(file, "a").write("x"),
    "list": lambda: os.listdir(folder),
    "truncate": lambda: os.truncate(file, 0),
    "make": lambda: os.mkdir(folder + "/new"),
    "create": lambda: open(folder + "/created", "w"),
    "fifo": lambda: os.mkfifo(folder + "/fifo"),
    "socket": lambda: os.mknod(folder + "/socket", stat.S_IFSOCK),
    "symlink": lambda: os.symlink("x", folder + "/symlink"),
    "remove": lambda: os.unlink(folder + "/old"),
    "exchange": lambda: checked(libc.renameat2(-100, (folder + "/a").encode(), -100, b"b", 2)),
    "take": lambda: os.rename(folder + "/taken", "taken"),
    "bring": lambda: os.rename("brought", folder + "/brought"),
    "link": lambda: os.link(file, "hard"),
    "link_by_descriptor": link_by_descriptor,
    "open_by_descriptor": open_by_descriptor,
    "from_there": from_there,
    "by_symlink": by_symlink,
    "run": run_it,
    "watch": watch,
    "mode": lambda: os.chmod(file, 0o666),
    "mode_of_folder": lambda: os.chmod(folder, 0o777),
    "mode_by_folder": lambda: os.chmod("file", 0o666, dir_fd=os.open(place, os.O_PATH)),
    "mode_by_descriptor": lambda: os.chmod(f"/proc/self/fd/{os.open(file, os.O_PATH)}", 0o666),
    "mode_of_nothing": lambda: checked(
        libc.syscall(452, os.open(file, os.O_PATH), b"", 0o666, 0x1000)),
    "owner": lambda: os.chown(file, -1, -1),
    "times": lambda: os.utime(file, (1, 1)),
    "time": lambda: os.utime(file),
    "attribute": lambda: os.setxattr(file, "user.x", b"y"),
}
done = []
for name, attempt in attempts.items():
    try:
        attempt()
        done.append(name)
    except OSError:
        pass
print(json.dumps(done))
"""
OWN = {
    "here/file": b"x",
    "here/folder/old": b"x",
    "here/folder/a": b"x",
    "here/folder/taken": b"x",
    "b": b"x",
    "brought": b"x",
}
REFUSED_EVERYWHERE = {"watch"}
"""By the filter, whatever the path."""
NOT_EVERYWHERE = {"link_by_descriptor"}
"""Older kernels want a privilege for it."""


def lay_out(place):
    """Like `OWN` below "here", and open to everyone."""
    (place / "folder").mkdir(parents=True)
    for name in ("file", "folder/old", "folder/a", "folder/taken"):
        (place / name).write_text("x")
    shutil.copy("/usr/bin/true", place / "program")
    for path in (place, *place.rglob("*")):
        path.chmod(0o777 if path.is_dir() or path.name == "program" else 0o666)


@by_who
def test_a_folder_of_the_host_is_closed_however_open_it_is(who, open_folder):
    async def everything(backend, place):
        return set(await python(backend, ATTEMPTS, place, files=OWN))

    async def body(backend):
        lay_out(open_folder / f"{who}-target")
        assert await everything(backend, open_folder / f"{who}-target") == set()
        box = await backend.create(ANY, OWN)
        await sh(backend, box, "cp /usr/bin/true here/program")
        request = ExecRequest(("/usr/bin/python3", "-ISc", ATTEMPTS, "here"))
        own = set(json.loads((await run(backend, box, request)).stdout))
        assert everything_there_is - own - NOT_EVERYWHERE == REFUSED_EVERYWHERE

    async def control(backend):
        lay_out(open_folder / f"{who}-control")
        done = await everything(backend, open_folder / f"{who}-control")
        assert everything_there_is - done <= NOT_EVERYWHERE

    lines = ATTEMPTS.splitlines()
    everything_there_is = {line.split('"')[1] for line in lines if line[:5] == '    "'}
    assert len(everything_there_is) == 29
    as_who(who, open_folder, control, kind="process")
    as_who(who, open_folder, body)


SHOWN = """
import json, os, sys
read = []
for path in sys.argv[1:]:
    try:
        os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1)
        read.append(path)
    except OSError:
        pass
print(json.dumps(read))
"""


@by_who
def test_of_the_system_only_what_is_nobodys_can_be_read(who, open_folder):
    shut = ["/", "/etc", "/etc/passwd", "/etc/hostname", "/proc", "/proc/self/environ", "/tmp"]
    shut += ["/proc/1/cmdline", "/proc/self/mountinfo", "/sys", "/dev", "/dev/shm", "/var", "/run"]
    open_ones = ["/usr", "/bin/sh", "/dev/null", "/etc/ld.so.cache", "/proc/meminfo", "."]

    async def body(backend):
        assert await python(backend, SHOWN, *shut, *open_ones) == open_ones

    async def control(backend):
        assert await python(backend, SHOWN, *shut, *open_ones) == [*shut, *open_ones]

    as_who(who, open_folder, body)
    as_who(who, open_folder, control, kind="process")


CHANGES = """
import ctypes, errno, json, os, stat
libc = ctypes.CDLL(None, use_errno=True)
answers = []
def tell(work, *words, **names):
    try:
        work(*words, **names)
        answers.append("done")
    except OSError as error:
        answers.append(errno.errorcode[error.errno])
def call(number, *words):
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in words]
    if libc.syscall(ctypes.c_long(number), *words) < 0:
        raise OSError(ctypes.get_errno(), "call")
def look(path):
    found = os.lstat(path)
    answers.append([path, oct(found.st_mode), found.st_mtime_ns // 1000 % 10**12])
open("f", "w").close(); os.mkdir("d"); open("d/g", "w").close(); os.symlink("f", "l")
os.symlink("nowhere", "broken"); os.mkfifo("p"); os.mkdir("d/shut"); open("d/shut/h", "w").close()
names = [n for n in ("f", "d", "d/g", "l", "broken", "p", "d/shut")]
folder, handle, place = os.open("d", os.O_RDONLY), os.open("f", os.O_RDWR), os.open("f", os.O_PATH)
for mode in (0o640, 0o7777, 0o604):
    for name in names:
        tell(os.chmod, name, mode | 0o700)
    tell(os.chmod, "g", mode, dir_fd=folder)
    tell(os.chmod, handle, mode)
for name in names:
    tell(os.utime, name, (5, 6)); tell(os.utime, name, (7, 8), follow_symlinks=False)
    tell(os.utime, name, ns=(5, 1234567)); tell(os.chown, name, -1, os.getgid())
    tell(os.chown, name, os.getuid(), -1, follow_symlinks=False)
    tell(os.chmod, os.path.abspath(name), 0o711)
tell(os.utime, handle, (9, 9)); tell(os.utime, "g", (3, 4), dir_fd=folder)
tell(os.chmod, f"/proc/self/fd/{handle}", 0o641); tell(os.chmod, f"/proc/self/fd/{place}", 0o642)
for name in names[:4]:
    tell(os.setxattr, name, "user.a", b"x" * 100); tell(os.setxattr, name, "user.a", b"", 1)
    tell(os.setxattr, name, "user.b", b"", follow_symlinks=False)
    tell(os.setxattr, name, "user.c", b"x" * 70000); tell(os.setxattr, name, "nosuch.a", b"")
    tell(os.removexattr, name, "user.b"); tell(os.removexattr, name, "user.b")
    answers.append(sorted(os.listxattr(name)))
above = "d/../../" + os.path.basename(os.getcwd())
for name in ("nosuch", "f/x", "", "x" * 300, "y/" * 2100, above):
    tell(os.chmod, name, 0o755); tell(os.utime, name, (1, 1)); tell(os.chown, name, -1, -1)
tell(os.chmod, "g", 0o600, dir_fd=handle); tell(os.chmod, "g", 0o600, dir_fd=999)
for pointer in (0, 1, 2**47, 2**63 - 1, -1):
    tell(call, {fchmodat}, -100, pointer, 0o600); tell(call, {utimensat}, -100, b"f", pointer, 0)
tell(call, {utimensat}, handle, 0, 0, 0); tell(call, 452, place, b"", 0o612, 0x1000)
tell(call, 452, -100, b"l", 0o600, 0x100); tell(call, {fchownat}, place, b"", -1, -1, 0x1000)
tell(call, 452, -100, b"f", 0o600, 0x4); tell(call, {utimensat}, -100, b"f", 0, 0x4)
os.utime("f", (1, 1))
os.chmod("d/shut", 0)
tell(os.chmod, "d/shut/h", 0o600)
os.chmod("d/shut", 0o700)
for name in names:
    look(name) if name not in ("d", "d/shut") else answers.append(oct(os.stat(name).st_mode))
print(json.dumps(answers))
"""
NUMBERS = {
    "x86_64": {"fchmodat": 268, "utimensat": 280, "fchownat": 260},
    "aarch64": {"fchmodat": 53, "utimensat": 88, "fchownat": 54},
}


@by_who
def test_changes_of_ones_own_files_are_what_the_kernel_would_make_of_them(who, open_folder):
    script = CHANGES
    for name, number in NUMBERS[platform.machine()].items():
        script = script.replace(f"{{{name}}}", str(number))
    answers = open_folder / "answers"

    async def unconfined(backend):
        answers.write_text(json.dumps(await python(backend, script)))

    async def body(backend):
        found, expected = await python(backend, script), json.loads(answers.read_text())
        assert len(found) == len(expected) > 100
        pairs = enumerate(zip(found, expected, strict=True))
        different = [pair for pair in pairs if pair[1][0] != pair[1][1]]
        assert not different, str(different)

    as_who("user", open_folder, unconfined, kind="process")
    as_who(who, open_folder, body)


@by_who
def test_without_a_supervisor_less_is_promised(who, open_folder):
    """A process has one supervisor of its calls at most, and this one is given another."""
    allow_all = struct.pack("<HBBI", 0x06, 0, 0, 0x7FFF0000)

    async def body(backend):
        assert agent.call("prctl", 38, 1, 0, 0, 0) == 0  # no new privileges, as filters want it
        agent.load_filter(allow_all, is_watched=True)
        found = await backend.capabilities()
        assert Capability.ISOLATED_FILES not in found
        assert (Capability.PROCESS_LIMIT in found) == (who == "root")
        assert {Capability.NO_NETWORK, Capability.SYSCALL_FILTER} <= found
        with pytest.raises(CapabilityMissing, match="isolated_files"):
            await backend.create(SandboxSpec())
        lay_out(open_folder / who)
        answers = await python(backend, ATTEMPTS, open_folder / who, files=OWN)
        everyones = {"time", "attribute", "owner"}  # a change of owner that changes nothing
        owners = {name for name in answers if name.startswith("mode")} | {"times"}
        assert set(answers) == (everyones if who == "root" else everyones | owners)

    def alone():
        as_who("root" if os.geteuid() == 0 else "user", open_folder / "in", body)

    _, status = os.waitpid(apart(alone, who), 0)
    assert status == 0


SOCKETS = """
import errno, json, socket
refused = []
for family in range(1, 46):
    for kind in (1, 2, 3, 5):
        try:
            socket.socket(family, kind).close()
        except OSError as error:
            if error.errno == errno.EPERM:
                refused.append([family, kind])
pairs = []
for kind in (1, 2, 3, 5):
    try:
        one, two = socket.socketpair(socket.AF_UNIX, kind)
        one.send(b"x")
        pairs.append([kind, two.recv(1) == b"x"])
    except OSError:
        pass
print(json.dumps([refused, pairs]))
"""


@by_who
def test_there_are_no_sockets_but_connected_pairs(who, open_folder):
    async def body(backend):
        refused, pairs = await python(backend, SOCKETS)
        assert refused == [[family, kind] for family in range(1, 46) for kind in (1, 2, 3, 5)]
        assert pairs == [[1, True], [5, True]]

    async def control(backend):
        # With the filter of other backends, Landlock alone is in the way, of TCP and no more.
        assert Capability.NO_NETWORK in await backend.capabilities()
        backend._program, backend._is_watched = filter_program(), False
        refused, pairs = await python(backend, SOCKETS)
        families = {family for family, kind in refused if kind == socket.SOCK_STREAM}
        assert not {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6} & families
        assert len(pairs) == 4
        assert await Prober(backend)._no_network() == set()

    as_who(who, open_folder, body)
    as_who(who, open_folder, control)


OTHERS = """
import ctypes, json, os, resource, sys
libc = ctypes.CDLL(None, use_errno=True)
other, name = int(sys.argv[1]), sys.argv[2].encode()
core = resource.RLIMIT_CORE
def made(number, remove):
    if number < 0:
        raise OSError("refused")
    remove(number)
calls = {
    "shmget": lambda: made(libc.shmget(0, 4096, 0o600), lambda n: libc.shmctl(n, 0, None)),
    "semget": lambda: made(libc.semget(0, 1, 0o600), lambda n: libc.semctl(n, 0, 0)),
    "msgget": lambda: made(libc.msgget(0, 0o600), lambda n: libc.msgctl(n, 0, None)),
    "mq_open": lambda: made(
        libc.syscall({mq_open}, name, 0o102, 0o600, None),
        lambda n: libc.syscall({mq_open} + 1, name)),
    "prlimit": lambda: resource.prlimit(other, core, resource.prlimit(other, core)),
    "affinity": lambda: os.sched_setaffinity(other, os.sched_getaffinity(other)),
    "scheduler": lambda: os.sched_setscheduler(other, os.SCHED_OTHER, os.sched_param(0)),
    "priority": lambda: os.setpriority(os.PRIO_PROCESS, other, 0),
    "priorities": lambda: os.setpriority(os.PRIO_USER, 0, 0),
    "own_limit": lambda: resource.setrlimit(core, (0, 0)),
    "own_affinity": lambda: os.sched_setaffinity(0, os.sched_getaffinity(0)),
    "own_priority": lambda: os.nice(1),
}
done = []
for name_of_call, call in calls.items():
    try:
        call()
        done.append(name_of_call)
    except OSError:
        pass
print(json.dumps(done))
"""
"""To a process of the same user; in the end to ourselves."""


@by_who
def test_other_processes_and_objects_without_a_path_are_out_of_reach(who, open_folder):
    script = OTHERS.replace("{mq_open}", {"x86_64": "240", "aarch64": "180"}[platform.machine()])
    own = ["own_limit", "own_affinity", "own_priority"]

    others = ["prlimit", "affinity", "scheduler", "priority", "priorities"]

    async def body(backend):
        sleeper = await asyncio.create_subprocess_exec("sleep", "60")
        try:
            assert await python(backend, script, sleeper.pid, mark()) == own
        finally:
            sleeper.kill()
            await sleeper.wait()

    def control():
        with subprocess.Popen(["sleep", "60"]) as sleeper:
            argv = ["/usr/bin/python3", "-ISc", script, str(sleeper.pid), mark()]
            done = subprocess.run(argv, capture_output=True, check=True).stdout
            sleeper.kill()
        assert json.loads(done) == ["shmget", "semget", "msgget", "mq_open", *others, *own]

    as_who(who, open_folder, body)
    # Not even unconfined commands may make queues: no limit of theirs holds here.
    assert os.waitpid(apart(control, "user"), 0)[1] == 0


LITTER = """
import os, socket, tempfile
place = os.environ["TMPDIR"]
assert os.listdir(place) == [] and tempfile.gettempdir() == os.environ["HOME"] == place
os.makedirs(place + "/shut/in"); os.chmod(place + "/shut", 0)
os.mkfifo(place + "/fifo"); os.symlink("/usr", place + "/link"); open(place + "/file", "w").close()
os.mknod(place + "/sock", 0o140600)
deep = place
for _ in range(1500):
    os.mkdir("d") if deep is None else os.chdir(deep)
    deep = None
    os.makedirs("d", exist_ok=True); os.chdir("d")
os.chmod(place, 0o500)
print(1)
"""


@by_who
def test_every_command_finds_its_temporary_folder_empty(who, open_folder):
    async def body(backend):
        box = await backend.create(ANY, {"kept": b"1"})
        for _ in range(3):
            request = ExecRequest(("/usr/bin/python3", "-ISc", LITTER))
            result = await run(backend, box, request)
            assert (result.exit_code, result.stdout) == (0, b"1\n"), result
            listing = await sh(backend, box, 'ls -A "$TMPDIR"; cat kept; touch "$TMPDIR/x"')
            assert listing.stdout == b"1"
        assert await sh(backend, box, "ls") != b"kept\n"

    as_who(who, open_folder, body)


TOOLS = {
    "git": """
git init -q . && git config user.email a@b && git config user.name n
echo one > f && git add f && git commit -qm one && echo two >> f && git diff --stat && git gc -q
git clone -q . "$TMPDIR/twin" && git -C "$TMPDIR/twin" log --oneline | wc -l
""",
    **BUILDS,
    "python3": """
cat > test_it.py <<'X'
import asyncio, hashlib, os, shutil, ssl, subprocess, tempfile, unittest, zipfile
from concurrent.futures import ThreadPoolExecutor
class Test(unittest.TestCase):
    def test_pools(self):
        with ThreadPoolExecutor(4) as pool:
            self.assertEqual(list(pool.map(str, [1])), ["1"])
    def test_children(self):
        self.assertEqual(subprocess.run(["sh", "-c", "exit 3"]).returncode, 3)
        async def ask():
            child = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
            return (await child.communicate(b"x"))[0]
        self.assertEqual(asyncio.run(ask()), b"x")
    def test_files(self):
        with tempfile.TemporaryDirectory() as folder:
            os.makedirs(folder + "/a/b")
            shutil.copytree(".", folder + "/twin")
            os.rename(folder + "/twin/test_it.py", folder + "/a/b/moved.py")
            self.assertEqual(os.listdir(folder + "/a/b"), ["moved.py"])
        self.assertTrue(hashlib.sha256(b"x").hexdigest())
X
python3 -m unittest test_it && python3 -m venv --without-pip v && v/bin/python -c 'print(1)'
""",
    "bash": """
bash -ec 'diff <(echo one) <(echo one); cat <<< here; set -o pipefail; (sleep 0.01 & wait); echo $$'
""",
    "tar": "mkdir -p d/e && chmod 750 d && echo x > d/e/f && tar cpzf t.tgz d && rm -r d && "
    "tar xpzf t.tgz && stat -c %a d && cp -a d twin && diff -r d twin && mv d twin/",
}


@by_who
@pytest.mark.parametrize("tool", TOOLS)
def test_builds_and_tests_work(tool, who, open_folder):
    if find_inside(tool) is None:
        pytest.skip(f"no {tool} under /usr")

    async def body(backend):
        # node reserves more address space than the default limit
        limits = SandboxLimits(address_space_bytes=1 << 40)
        box = await backend.create(SandboxSpec(limits=limits))
        result = await sh(backend, box, "set -e\n" + TOOLS[tool], deadline_s=120)
        assert result.exit_code == 0, result

    as_who(who, open_folder, body)


def test_a_kernel_whose_landlock_is_too_old_is_named():
    assert check_abi(MIN_ABI) == MIN_ABI
    with pytest.raises(CapabilityMissing, match=r"ABI 6 \(Linux 6\.12\) is needed: .* has ABI 5"):
        check_abi(5)
    with pytest.raises(CapabilityMissing, match="has none, or forbids it"):
        check_abi(0)


CHECK = """
import asyncio, json, tempfile
from pathlib import Path
from k3rl.blobs import BlobStore
from k3rl.errors import CapabilityMissing
from k3rl.sandboxes import base, factory, spec
async def main(kind):
    with tempfile.TemporaryDirectory() as folder:
        one = factory.open_backend(kind, BlobStore(Path(folder, "b")), Path(folder, "s"))
        try:
            box = await one.create(spec.SandboxSpec(), {"a": b"1"})
            done = await base.run(one, box, base.ExecRequest(("cat", "a")))
            return done.stdout.decode()
        except CapabilityMissing as error:
            return str(error)
        finally:
            await one.aclose()
print(json.dumps([asyncio.run(main(kind)) for kind in ("bwrap", "landlock")]))
"""


RESTRICTED = ("-u", "1000", "--cap-drop", "ALL")


@pytest.mark.parametrize(
    "options", [(), RESTRICTED, (*RESTRICTED, "--security-opt", "no-new-privileges")]
)
def test_it_works_in_an_ordinary_container(options, docker_engine, tmp_path):
    """Where Docker's filter forbids namespaces, for root and for an ordinary user."""
    image = tmp_path / "image.tar"
    image.write_bytes(image_tar(ETC_FILES, ("/etc/ld.so.cache",)))
    subprocess.run(["docker", "import", image, "k3rl-test"], check=True, capture_output=True)
    packages = Path(blake3.__file__).parents[1]
    mounts = {"/usr": "/usr", "/etc/ld.so.cache": "/etc/ld.so.cache"}
    mounts |= {str(REPOSITORY): "/code", str(packages): "/packages"}
    words = [word for one in mounts.items() for word in ("-v", ":".join((*one, "ro")))]
    words += ["--network", "none", "-e", "PYTHONPATH=/code:/packages", *options]
    argv = ["docker", "run", "--rm", *words, "k3rl-test", "/usr/bin/python3", "-c", CHECK]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    if "No module named" in done.stderr:
        pytest.skip("the packages of this Python do not suit the one under /usr")
    assert done.returncode == 0, done.stderr
    by_bwrap, by_landlock = json.loads(done.stdout)
    assert "seccomp filter of the surrounding container forbids namespaces" in by_bwrap
    assert by_landlock == "1"
