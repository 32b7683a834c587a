"""Finding out what a backend enforces on this machine: small real attempts, with controls.

Each probe tries what must fail beside something like it that must work, so that a broken probe
shows as a missing capability, never as a present one.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from k3rl.errors import SandboxError
from k3rl.sandboxes.base import ExecRequest, ExecResult, run
from k3rl.sandboxes.blocking import in_thread, together
from k3rl.sandboxes.box import Box, rest
from k3rl.sandboxes.listeners import Listeners
from k3rl.sandboxes.local import LocalBackend
from k3rl.sandboxes.processes.seccomp import refused_number
from k3rl.sandboxes.spec import MIB, Capability, SandboxLimits, SandboxSpec

NO_FILES: Mapping[str, bytes] = {}
BASE_EXIT, KILLED = 7, 128 + 9
NUM_FORKS = 24
OWN_FILES: Mapping[str, bytes] = {"own/file": b"seen"}
TOUCH = """
try() {{ "$@" >/dev/null 2>&1 && echo $1 "$place"; }}
for place in {canary} own; do
    try cat "$place/file"
    try ls "$place"
    try cp "$place/file" "$place/new"
    try truncate -s 0 "$place/file"
    try chmod 600 "$place/file"
    try touch -d 2001-02-03 "$place/file"
    try touch "$place/file"
    try mv "$place/file" "$place/moved"
done
"""
"""Prints what can be done to a folder of the host, where everyone may, and to one of our own."""
TOUCHES = ("cat", "ls", "cp", "truncate", "chmod", "touch", "touch", "mv")
FIND = "test -e {canary} && echo found; test -e own/file && echo own"
SPAWN = f"""
i=0
while [ $i -lt {NUM_FORKS} ]; do sleep 3 & i=$((i+1)); done
echo all
"""
RLIMITS = """
head -c 1000 /dev/zero > small; head -c 131072 /dev/zero > big
echo file $(wc -c < small) $(wc -c < big)
dd if=/dev/zero of=/dev/null bs=1M count=1; echo fits $?
dd if=/dev/zero of=/dev/null bs=256M count=1; echo exceeds $?
echo cpu $(ulimit -Ht)
"""
DAEMON = """
setsid sh -c 'i=0; while [ $i -lt 50 ]; do echo x >> beat; sleep 0.02; i=$((i+1)); done' \
    </dev/null >/dev/null 2>&1 &
while ! test -s beat; do sleep 0.01; done
"""
BEAT_S = 0.1
REFUSED_CALLS = {
    "unshare": (0,),
    "process_vm_readv": ("os.getpid()", 0, 0, 0, 0, 0),
    "keyctl": (0, -3, 0),
    "ptrace": (-1, 0, 0, 0),
}
"""By their arguments harmless, and allowed to everyone where nothing is filtered."""
CALLS = """
import ctypes, errno, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def is_refused(code):
    return code == errno.EPERM
def call(function, *words):
    return ctypes.get_errno() if function(*map(ctypes.c_long, words)) == -1 else 0
def opened(*kind):
    try:
        socket.socket(*kind).close()
    except OSError as error:
        return error.errno
    return 0
refused = [call(libc.syscall, *words) for words in {refused}]
refused += [opened(40, socket.SOCK_STREAM), call(libc.ioctl, 0, 0x5412, 0)]
allowed = [call(libc.ioctl, 0, 0x5413, 0)]
refused += [call(libc.personality, 0x40000)]
allowed += [call(libc.personality, 0xFFFFFFFF), call(libc.getpid)]
print(all(map(is_refused, refused)), any(map(is_refused, allowed)))
"""
"""Sockets to a hypervisor and to oneself, typing into and measuring a terminal, and so on."""
NUM_HOLDERS = 4
HELD_BYTES = 16 * MIB
HOLD = f"""
import os
go, hold = os.pipe()
pids = []
for _ in range({NUM_HOLDERS}):
    told, tell = os.pipe()
    pids.append(os.fork())
    if not pids[-1]:
        os.close(hold)
        data = b"x" * {HELD_BYTES}
        os.write(tell, b"x")
        os.read(go, 1)
        os._exit(0)
    os.close(tell)
    os.read(told, 1)
os.close(hold)
print(sum(os.waitpid(pid, 0)[1] == 0 for pid in pids))
"""
"""Prints how many of its processes can hold their memory at the same time."""
FILL = ("head -c 8M /dev/zero > f", "i=0; while [ $i -lt 300 ]; do : > $i; i=$((i+1)); done")
"""Beyond a limit of bytes, beyond one of paths."""
FULL_S, LONG_FULL_S = 3, 15
"""How long a command that has filled its workspace waits to be killed: beside others, alone."""
FILL_TMP = """
for d in /tmp /dev/shm .; do head -c 2M /dev/zero > $d/big; stat -c %s $d/big; done 2>/dev/null
"""
LIST_TMP = "ls -A /tmp /dev/shm; ls"
LOOK_AROUND = """
import os
own = [os.readlink("/proc/self/ns/" + name) for name in ("pid", "ipc", "uts")]
seen = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        seen.append(open("/proc/" + pid + "/cmdline", "rb").read().hex())
    except OSError:
        pass
print(*own, *seen)
"""
PRIVILEGES = """
import ctypes
libc, word = ctypes.CDLL(None), ctypes.c_ulong
version_and_pid, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
def told(option, *words):
    return libc.prctl(option, *map(word, (*words, 0, 0, 0, 0)[:4]))
print(libc.capget(version_and_pid, sets), sum(sets),
      sum(told(47, 1, n) == 1 for n in range(64)), told(39),
      sum(told(23, n) == 1 for n in range(64)), libc.unshare(0x10000000))
"""
"""Prints whether the capabilities can be told, how many there are, those among them that programs
keep, whether new ones are out of reach, how many there may be, which does not matter where new ones
are out of reach, and whether a user namespace, which comes with all of them, is refused (-1)."""
PROBE_DEADLINE_S = 20.0
BOMB_DEADLINE_S = 2.0
"""Some shells go on retrying a refused fork for a long time."""


class Prober:
    """Runs the probes of one backend in throw-away sandboxes."""

    def __init__(self, backend: LocalBackend) -> None:
        """Opens sandboxes of `backend` without its checks."""
        self.backend = backend

    async def check_base(self) -> None:
        """Raises SandboxError when no command runs at all."""
        result = await self._run(f"exit {BASE_EXIT}")
        if result.exit_code != BASE_EXIT:
            text = result.stderr.decode(errors="replace").strip()
            raise SandboxError(f"a probe command went wrong: {text or result.exit_code}")

    async def run(self) -> frozenset[Capability]:
        """Every capability whose probe came out right."""
        probes = (
            self._isolated_files(),
            self._no_network(),
            self._process_limit(),
            self._rlimits(),
            self._kills_descendants(),
            self._syscall_filter(),
            self._total_memory_limit(),
            self._disk_limit(FULL_S),
            self._private_tmp(),
            self._isolated_processes(),
            self._no_privileges(),
            self._snapshot(),
        )
        found = frozenset[Capability]().union(*await together(probes))
        if Capability.DISK_LIMIT not in found:
            # Another probe's sandbox that closes hides from the watch what this one has filled.
            found |= await self._disk_limit(LONG_FULL_S)
        return found

    async def _run(
        self,
        script: str,
        limits: SandboxLimits | None = None,
        deadline_s: float = PROBE_DEADLINE_S,
        files: Mapping[str, bytes] = NO_FILES,
    ) -> ExecResult:
        box = await self._box(limits, files)
        try:
            return await self._sh(box, script, deadline_s)
        finally:
            await self.backend.close(box.id)

    async def _box(
        self, limits: SandboxLimits | None, files: Mapping[str, bytes] = NO_FILES
    ) -> Box:
        spec = SandboxSpec(limits=limits or SandboxLimits(), executables=(), required=())
        return await self.backend.open_box(spec, files)

    async def _sh(self, box: Box, script: str, deadline_s: float = PROBE_DEADLINE_S) -> ExecResult:
        request = ExecRequest(("sh", "-c", script), deadline_s=deadline_s)
        return await run(self.backend, box.id, request)

    async def _isolated_files(self) -> set[Capability]:
        canary = self.backend.scratch.owner / "canary"
        await in_thread(_lay_out, canary)
        word = shlex.quote(str(canary))
        lines = (await self._run(TOUCH.format(canary=word), files=OWN_FILES)).stdout.splitlines()
        is_closed = lines == [f"{word} own".encode() for word in TOUCHES]
        found = await self._run(FIND.format(canary=word), files=OWN_FILES)
        is_hidden = found.stdout == b"own\n"
        answers = {Capability.ISOLATED_FILES: is_closed, Capability.HIDDEN_PATHS: is_hidden}
        return {capability for capability, is_enforced in answers.items() if is_enforced}

    async def _no_network(self) -> set[Capability]:
        try:
            listeners = Listeners(self.backend.scratch.owner)
        except OSError:
            return set()
        with listeners as host:
            result = await self._python(host.connect)
            is_reached = host.reached() != set()
            here = await in_thread(_python_here, host.connect)
            is_reachable = host.reached() == host.kinds
        interfaces = result.stdout.split()
        is_alone = result.exit_code == 0 and interfaces in ([], [b"lo"]) and b"lo" in here.split()
        return {Capability.NO_NETWORK} if is_alone and is_reachable and not is_reached else set()

    async def _process_limit(self) -> set[Capability]:
        low = SandboxLimits(max_processes=NUM_FORKS // 3)
        # A limit that counted both sandboxes' processes would stop one of the two.
        high = SandboxLimits(max_processes=NUM_FORKS * 4 // 3)
        runs = [self._run(SPAWN, low, BOMB_DEADLINE_S)]
        runs += [self._run(SPAWN, high) for _ in range(2)]
        bomb, *controls = await together(runs)
        is_free = all(control.stdout == b"all\n" for control in controls)
        bites = is_free and bomb.stdout == b"" and b"fork" in bomb.stderr
        return {Capability.PROCESS_LIMIT} if bites else set()

    async def _rlimits(self) -> set[Capability]:
        limits = replace(
            SandboxLimits(), max_file_bytes=65536, address_space_bytes=64 * MIB, cpu_s=7
        )
        result = await self._run(RLIMITS, limits)
        answers = [line.split() for line in result.stdout.decode(errors="replace").splitlines()]
        found = set()
        if ["file", "1000", "65536"] in answers:
            found.add(Capability.FILE_SIZE_LIMIT)
        if ["fits", "0"] in answers and ["exceeds", "1"] in answers:
            found.add(Capability.MEMORY_LIMIT)
        if ["cpu", "7"] in answers:
            found.add(Capability.CPU_TIME_LIMIT)
        return found

    async def _syscall_filter(self) -> set[Capability]:
        calls = []
        for name, arguments in REFUSED_CALLS.items():
            number = refused_number(name)
            if number is None:
                return set()
            calls.append(f"({', '.join(map(str, (number, *arguments)))})")
        result = await self._python(CALLS.replace("{refused}", f"[{', '.join(calls)}]"))
        return {Capability.SYSCALL_FILTER} if result.stdout == b"True False\n" else set()

    async def _total_memory_limit(self) -> set[Capability]:
        whole = NUM_HOLDERS * HELD_BYTES
        low = SandboxLimits(total_memory_bytes=whole * 3 // 4)
        high = SandboxLimits(total_memory_bytes=whole * 4)
        bomb, control = await together([self._python(HOLD, low), self._python(HOLD, high)])
        is_whole = [run.stdout == f"{NUM_HOLDERS}\n".encode() for run in (bomb, control)]
        return {Capability.TOTAL_MEMORY_LIMIT} if is_whole == [False, True] else set()

    async def _disk_limit(self, full_s: float) -> set[Capability]:
        box = await self._box(SandboxLimits(workspace_bytes=4 * MIB, workspace_entries=150))
        try:
            codes = []
            for fill in FILL:
                codes.append((await self._sh(box, f"{fill}; exec sleep {full_s}")).exit_code)
                cleared = await self._sh(box, "rm -f *; echo cleared")
        finally:
            await self.backend.close(box.id)
        control = await self._run(f"{'; '.join(FILL)}; sleep 0.1; echo all")
        is_right = (codes, cleared.stdout, control.stdout) == ([KILLED] * 2, b"cleared\n", b"all\n")
        return {Capability.DISK_LIMIT} if is_right else set()

    async def _private_tmp(self) -> set[Capability]:
        box = await self._box(SandboxLimits(tmp_bytes=MIB))
        try:
            sizes = (await self._sh(box, FILL_TMP)).stdout.split()
            left = (await self._sh(box, LIST_TMP)).stdout.split()
        finally:
            await self.backend.close(box.id)
        is_right = sizes == [b"1048576"] * 2 + [b"2097152"] and left == [
            b"/dev/shm:",
            b"/tmp:",
            b"big",
        ]
        return {Capability.PRIVATE_TMP} if is_right else set()

    async def _isolated_processes(self) -> set[Capability]:
        result = await self._python(LOOK_AROUND)
        words = result.stdout.decode(errors="replace").split()
        spaces, seen = words[:3], words[3:]
        ours = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "ipc", "uts")]
        is_own = len(spaces) == 3 and not set(spaces) & set(ours)
        host = await in_thread(Path("/proc/self/cmdline").read_bytes)
        sees_itself = any(LOOK_AROUND.encode().hex() in each for each in seen)
        is_alone = host.hex() not in seen and sees_itself
        return {Capability.ISOLATED_PROCESSES} if is_own and is_alone else set()

    async def _no_privileges(self) -> set[Capability]:
        inside = (await self._python(PRIVILEGES)).stdout.split()
        outside = (await in_thread(_python_here, PRIVILEGES)).split()
        # Where there is nothing to be had outside either, as in some containers, that is right.
        is_seen = outside[3:5] == await in_thread(_privileges_here)
        is_bare = inside[:4] == [b"0", b"0", b"0", b"1"] and inside[5:] == [b"-1"]
        return {Capability.NO_PRIVILEGES} if is_bare and is_seen else set()

    async def _python(self, script: str, limits: SandboxLimits | None = None) -> ExecResult:
        return await self._run(f"exec python3 -ISB -c {shlex.quote(script)}", limits)

    async def _kills_descendants(self) -> set[Capability]:
        box = await self._box(None)
        try:
            await self._sh(box, DAEMON)
            return {Capability.KILLS_DESCENDANTS} if await self._is_still(box) else set()
        finally:
            await self.backend.close(box.id)

    async def _is_still(self, box: Box) -> bool:
        """Whether the daemon, which has written once, writes no more."""
        try:
            first = await self.backend.get(box.id, "beat")
            await asyncio.sleep(BEAT_S)
            return bool(first) and await self.backend.get(box.id, "beat") == first
        except SandboxError:
            return False  # It grew between the look at its size and the reading.

    async def _snapshot(self) -> set[Capability]:
        box = await self._box(None, {"d/old": b"old"})
        try:
            await self._sh(box, "rm -r d && mkdir d && echo new > d/new")
            before = box.workspace.sealed
            sealed = await in_thread(box.workspace.seal, partial(rest, box), True)
            tree = set(await in_thread(lambda: sealed.tree))
            if sealed is before:
                return set()
            listing = (await self._sh(box, "ls d")).stdout
            is_right = tree == {"", "d", "d/new"} and listing == b"new\n"
            return {Capability.SNAPSHOT, Capability.FORK} if is_right else set()
        finally:
            await self.backend.close(box.id)


def _lay_out(canary: Path) -> None:
    """A folder with a file, both open to everyone."""
    canary.mkdir(exist_ok=True)
    (canary / "file").write_text("seen")
    (canary / "file").chmod(0o666)
    canary.chmod(0o777)


def _privileges_here() -> list[bytes]:
    """What `PRIVILEGES` prints fourth and fifth, as the kernel tells it in another way."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return [fields["NoNewPrivs"].encode(), b"%d" % int(fields["CapBnd"], 16).bit_count()]


def _python_here(script: str) -> bytes:
    argv, environment = ["python3", "-ISB", "-c", script], {"PATH": os.defpath}
    run = subprocess.run(argv, env=environment, capture_output=True, timeout=PROBE_DEADLINE_S)
    return run.stdout
