"""The system-call filter: what it refuses, that it alone does, and what still works under it."""

import asyncio
import errno
import json
import os
import re
import struct
from pathlib import Path

import pytest

from k3rl.blobs import BlobStore
from k3rl.errors import CapabilityMissing
from k3rl.sandboxes.backends.bwrap import BwrapBackend, find_inside
from k3rl.sandboxes.backends.process import ProcessBackend
from k3rl.sandboxes.base import ExecRequest, run
from k3rl.sandboxes.processes.seccomp import (
    ARCHITECTURES,
    CHANGE_NUMBERS,
    NUMBERS,
    OF_A_PROCESS,
    SHARED_NUMBERS,
    filter_program,
)
from k3rl.sandboxes.processes.supervisor import BIRTHS, CHANGES
from k3rl.sandboxes.spec import Capability, SandboxLimits, SandboxSpec
from tests.sandboxes.sandbox_helpers import ANY, BUILDS, play, sh

pytestmark = [pytest.mark.sandbox]
MACHINE = os.uname().machine
X86, ARM = 0xC000003E, 0xC00000B7
I386 = 0x40000003
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
needs_filter = pytest.mark.skipif(MACHINE not in ARCHITECTURES, reason=f"no filter for {MACHINE}")
by_machine = pytest.mark.parametrize("machine", ARCHITECTURES)


def with_backend(tmp_path, body, program=b""):
    """Run `body` with a backend whose filter is its own, or `program`, or (None) missing."""

    async def main():
        backend = BwrapBackend(BlobStore(tmp_path / "blobs"), tmp_path / "scratch")
        if program != b"":
            backend._program = program
        try:
            return await body(backend)
        finally:
            await backend.aclose()

    return asyncio.run(main())


async def python(backend, script, *words):
    box = await backend.create(ANY)
    program = "/usr/bin/python3"
    return await run(backend, box, ExecRequest((program, "-ISc", script, *words), deadline_s=60))


# The program itself, on a machine of our own.


def verdict(program, number, arch, *arguments):
    """What the kernel would do: linux/filter.h for the instructions that the filter uses."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, arch, 0, *(v & (2**64 - 1) for v in padded))
    lines = list(struct.iter_unpack("<HBBI", program))
    place = value = 0
    while True:
        code, if_true, if_false, k = lines[place]
        place += 1
        if code == 0x06:
            return k
        if code == 0x20:
            (value,) = struct.unpack_from("<I", data, k)
            continue
        test = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[code]
        place += if_true if test else if_false


ALLOWED, KILLED = 0x7FFF0000, 0x80000000
REFUSED, UNKNOWN = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
UNSUPPORTED = 0x50000 | errno.EOPNOTSUPP


def header_numbers(machine):
    header = HEADERS[machine]
    if not header.exists():
        pytest.skip(f"{header} (linux-libc-dev) is missing")
    pattern = re.compile(r"^#define __NR(?:3264)?_(\w+) +(\d+)$", re.MULTILINE)
    return {name: int(number) for name, number in pattern.findall(header.read_text())}


@by_machine
def test_the_numbers_are_those_of_the_kernels_headers(machine):
    known = header_numbers(machine)
    column = list(ARCHITECTURES).index(machine)
    listed = NUMBERS | SHARED_NUMBERS | CHANGE_NUMBERS | OF_A_PROCESS | CHANGES | BIRTHS
    ours = {name: numbers[column] for name, numbers in listed.items()}
    assert {n: ours[n] for n in ours if n in known} == {n: known[n] for n in ours if n in known}
    of_x86 = {name for name, numbers in listed.items() if numbers[1] is None}
    newer = {"open_tree_attr", "statmount", "listmount", "fchmodat2", "file_setattr"}
    assert set(ours) - set(known) <= of_x86 | newer | {"setxattrat", "removexattrat"}


@by_machine
def test_the_program_refuses_the_listed_calls_and_no_other(machine):
    known = header_numbers(machine)
    program, arch = filter_program(machine), ARCHITECTURES[machine]
    column = list(ARCHITECTURES).index(machine)
    listed = {numbers[column] for numbers in NUMBERS.values()}
    looked_at = {known["clone3"], known["socket"], known["socketpair"], known["personality"]}
    looked_at |= {known["fallocate"]}
    for number in range(600):
        if number not in looked_at:
            expected = REFUSED if number in listed else ALLOWED
            assert verdict(program, number, arch) == expected, number
    assert verdict(program, known["clone3"], arch) == UNKNOWN
    assert verdict(program, known["fallocate"], arch) == UNSUPPORTED


@by_machine
def test_the_program_looks_at_arguments(machine):
    known = header_numbers(machine)
    program, arch = filter_program(machine), ARCHITECTURES[machine]

    def ask(name, *arguments):
        return verdict(program, known[name], arch, *arguments)

    thread = 0x3D0F00
    assert ask("clone", thread) == ask("clone", 0x4000 | 0x100 | 17) == ALLOWED
    for bit in (17, 25, 26, 27, 28, 29, 30):
        assert ask("clone", 1 << bit | 17) == REFUSED
    families = {family for family in range(64) if ask("socket", family, 1, 0) == ALLOWED}
    assert families == {1, 2, 10, 16}
    assert ask("socket", 16, 3, 15) == REFUSED  # uevents
    assert ask("socketpair", 1) == ALLOWED
    assert ask("socketpair", 30) == REFUSED  # TIPC
    assert ask("personality", 0) == ask("personality", 0xFFFFFFFF) == ALLOWED
    assert ask("personality", 0x40000) == ask("personality", 8) == REFUSED
    for request in (0x5412, 0x541C, 0x5412 | 1 << 32):
        assert ask("ioctl", 0, request) == REFUSED
    for number in (40, 42, 57):  # _IOW('X', number, struct space_resv)
        assert ask("ioctl", 0, 1 << 30 | 48 << 16 | ord("X") << 8 | number) == UNSUPPORTED
    assert ask("ioctl", 0, 0x5413) == ALLOWED
    assert verdict(program, 0, I386) == KILLED
    assert verdict(program, 0, ARM if arch == X86 else X86) == KILLED
    x32 = verdict(program, 0x40000000 | 1, arch)
    assert x32 == (REFUSED if arch == X86 else ALLOWED)


@by_machine
def test_without_namespaces_the_program_refuses_more(machine):
    known = header_numbers(machine)
    program, arch = filter_program(machine, has_namespaces=False), ARCHITECTURES[machine]
    column = list(ARCHITECTURES).index(machine)
    listed = {numbers[column] for numbers in (NUMBERS | SHARED_NUMBERS).values()}
    looked_at = {known[name] for name in ("clone3", "socketpair", "personality", "setpriority")}
    looked_at |= {numbers[column] for numbers in OF_A_PROCESS.values()}
    looked_at |= {known["socket"], known["fallocate"]}
    assert verdict(program, known["fallocate"], arch) == UNSUPPORTED
    for number in range(600):
        if number not in looked_at:
            expected = REFUSED if number in listed else ALLOWED
            assert verdict(program, number, arch) == expected, number

    def ask(name, *arguments):
        return verdict(program, known[name], arch, *arguments)

    assert {ask("socket", family, kind) for family in range(64) for kind in (1, 2, 3, 5)} == {
        REFUSED
    }
    kinds = {kind for kind in range(16) if ask("socketpair", 1, kind | 0x80800) == ALLOWED}
    assert kinds & {1, 2, 3, 5} == {1, 5}
    assert ask("socketpair", 2, 1) == ask("socketpair", 16, 1) == REFUSED
    for name in OF_A_PROCESS:
        assert [ask(name, 0), ask(name, 7), ask(name, -1)] == [ALLOWED, REFUSED, REFUSED]
    for which, who, expected in (
        (0, 0, ALLOWED),
        (1, 0, ALLOWED),
        (0, 7, REFUSED),
        (2, 0, REFUSED),
    ):
        assert ask("setpriority", which, who, 5) == expected
    assert ask("clone", 0x3D0F00) == ALLOWED
    assert ask("clone", 1 << 28 | 17) == REFUSED


ASKED = 0x7FC00000


@by_machine
@pytest.mark.parametrize("asked", [CHANGES, CHANGES | BIRTHS])
def test_a_supervisor_is_asked_about_what_it_is_asked_about(machine, asked):
    column, arch = list(ARCHITECTURES).index(machine), ARCHITECTURES[machine]
    plain = filter_program(machine, has_namespaces=False)
    program = filter_program(machine, has_namespaces=False, asked=asked)
    by_supervisor = {numbers[column] for numbers in asked.values()}
    refused = {numbers[column] for numbers in CHANGE_NUMBERS.values()}
    for number in range(600):
        expected = verdict(plain, number, arch)
        expected = ASKED if number in by_supervisor else expected
        expected = REFUSED if number in refused else expected
        assert verdict(program, number, arch) == expected, number
    clone = BIRTHS["clone"][column]
    thread = verdict(program, clone, arch, 0x3D0F00)
    assert thread == (ASKED if "clone" in asked else ALLOWED)
    assert verdict(program, clone, arch, 1 << 28 | 17) == REFUSED


def test_a_machine_without_a_filter_has_none():
    assert filter_program("riscv64") is None


# In sandboxes.

SWEEP = """
import ctypes, errno, json, sys
libc = ctypes.CDLL(None, use_errno=True)
answers = {}
for name, number in json.loads(sys.argv[1]).items():
    code = libc.syscall(*(ctypes.c_long(word) for word in (number, -1, -1, -1, -1, -1, -1)))
    answers[name] = ctypes.get_errno() if code == -1 else 0
print(json.dumps(answers))
"""
"""Every call with arguments that no kernel accepts."""


@needs_filter
@pytest.mark.skipif(os.geteuid() != 0, reason="without root the kernel itself refuses many calls")
def test_every_listed_call_is_refused_inside_and_by_nothing_else(tmp_path):
    column = list(ARCHITECTURES).index(MACHINE)
    numbers = {n: row[column] for n, row in NUMBERS.items() if row[column] is not None}
    unasked = {"vhangup"}  # it takes no arguments that could be wrong
    switch = Path("/proc/sys/kernel/io_uring_disabled")
    if switch.exists() and int(switch.read_text()):
        unasked |= {name for name in numbers if name.startswith("io_uring")}
    told = json.dumps({name: number for name, number in numbers.items() if name not in unasked})

    async def filtered(backend):
        result = await python(backend, SWEEP, json.dumps(numbers))
        assert set(json.loads(result.stdout).values()) == {errno.EPERM}, result

    async def control(backend):
        result = await python(backend, SWEEP, told)
        answers = json.loads(result.stdout)
        refused = {name for name, answer in answers.items() if answer == errno.EPERM}
        assert refused == set(), result

    with_backend(tmp_path, filtered)
    play("process", tmp_path, control)


FAMILIES = """
import ctypes, errno, json, os, pty, socket, threading
libc = ctypes.CDLL(None, use_errno=True)
answers = {}
def call(name, function, *words):
    code = function(*(ctypes.c_long(w) if isinstance(w, int) else w for w in words))
    answers[name] = ctypes.get_errno() if code == -1 else 0
def sock(name, *kind):
    try:
        socket.socket(*kind).close()
        answers[name] = 0
    except OSError as error:
        answers[name] = error.errno
me = os.getpid()
call("unshare", libc.unshare, 0)
call("setns", libc.setns, os.open("/proc/self/ns/uts", os.O_RDONLY), 1)
call("ptrace", libc.ptrace, 16, 999999, 0, 0)
word = ctypes.create_string_buffer(8)
class Vec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
here = ctypes.byref(Vec(ctypes.addressof(word), 8))
call("process_vm_readv", libc.process_vm_readv, me, here, 1, here, 1, 0)
call("process_vm_writev", libc.process_vm_writev, me, here, 1, here, 1, 0)
call("personality", libc.personality, 0x40000)
libc.personality(ctypes.c_long(0))
call("personality_query", libc.personality, 0xFFFFFFFF)
sock("vsock", 40, socket.SOCK_STREAM)
sock("alg", socket.AF_ALG, socket.SOCK_SEQPACKET)
sock("uevent", socket.AF_NETLINK, socket.SOCK_RAW, 15)
sock("route", socket.AF_NETLINK, socket.SOCK_RAW, 0)
sock("unix", socket.AF_UNIX)
sock("inet", socket.AF_INET)
sock("inet6", socket.AF_INET6, socket.SOCK_DGRAM)
socket.socketpair()
answers["socketpair"] = 0
call("sticks", libc.ioctl, 0, 0x5412, word)
call("measures", libc.ioctl, 0, 0x5413, word)
thread = threading.Thread(target=lambda: answers.update(thread=0))
thread.start()
thread.join()
child = os.fork()
if not child:
    os._exit(0)
answers["fork"] = os.waitpid(child, 0)[1]
print(json.dumps(answers))
"""
SHUT = {"unshare", "ptrace", "process_vm_readv", "process_vm_writev", "personality", "vsock"}
SHUT |= {"alg", "uevent", "setns", "sticks"}
NEVER_OPEN = {"setns"}
"""Refused for want of a capability too."""


@needs_filter
def test_families_of_calls_are_refused_by_the_filter_alone(tmp_path):
    async def answers(backend):
        result = await python(backend, FAMILIES)
        assert result.exit_code == 0, result
        found = json.loads(result.stdout)
        return {name for name, answer in found.items() if answer == errno.EPERM}

    assert with_backend(tmp_path, answers) == SHUT
    assert with_backend(tmp_path, answers, program=None) <= NEVER_OPEN


CLONE = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
for flags in (0, 0x04000000, 0x10000000, 0x20000000 | 0x10000000):
    code = libc.syscall(ctypes.c_long({clone}), ctypes.c_long(flags | 17), *[ctypes.c_long(0)] * 4)
    if code == 0:
        os._exit(0)
    print(errno.errorcode[ctypes.get_errno()] if code == -1 else "cloned")
code = libc.syscall(ctypes.c_long(435), ctypes.c_long(0), ctypes.c_long(0))
print(errno.errorcode[ctypes.get_errno()])
"""


@needs_filter
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make namespaces without a user's")
def test_clone_makes_processes_but_no_namespaces(tmp_path):
    script = CLONE.replace("{clone}", {"x86_64": "56", "aarch64": "220"}[MACHINE])

    async def filtered(backend):
        result = await python(backend, script)
        assert result.stdout.split() == [b"cloned", b"EPERM", b"EPERM", b"EPERM", b"ENOSYS"], result

    async def control(backend):
        result = await python(backend, script)
        assert result.stdout.split() == [b"cloned"] * 4 + [b"EINVAL"], result

    with_backend(tmp_path, filtered)
    play("process", tmp_path, control)


FOREIGN = """
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid of 32 bits); int 0x80; ret
place = ctypes.addressof(ctypes.c_char.from_buffer(code))
print(ctypes.CFUNCTYPE(ctypes.c_int)(place)() > 0)
"""
SIGSYS = 31


@pytest.mark.skipif(MACHINE != "x86_64", reason="32-bit calls as x86 makes them")
def test_32_bit_calls_kill_their_process(tmp_path):
    async def filtered(backend):
        result = await python(backend, FOREIGN)
        assert (result.exit_code, result.stdout) == (128 + SIGSYS, b"")

    async def control(backend):
        result = await python(backend, FOREIGN)
        if result.exit_code == 128 + 11:
            pytest.skip("this kernel has no 32-bit calls")
        assert result.stdout in (b"True\n", b"False\n"), result
        assert result.exit_code == 0

    with_backend(tmp_path, filtered)
    with_backend(tmp_path, control, program=None)


TOOLS = {
    "git": """
git init -q . && git config user.email a@b && git config user.name n
echo one > f && git add f && git commit -qm one && echo two >> f && git diff --stat && git gc -q
git clone -q . ../tmp/twin && git -C /tmp/twin log --oneline | wc -l
""",
    **BUILDS,
    "python3": """
cat > test_it.py <<'X'
import asyncio, multiprocessing, socket, subprocess, tempfile, unittest
from concurrent.futures import ThreadPoolExecutor
def double(x): return 2 * x
class Test(unittest.TestCase):
    def test_pools(self):
        for kind in ("fork", "spawn"):
            with multiprocessing.get_context(kind).Pool(2) as pool:
                self.assertEqual(pool.map(double, [1, 2]), [2, 4])
        with ThreadPoolExecutor(4) as pool:
            self.assertEqual(list(pool.map(double, [1])), [2])
    def test_sockets(self):
        self.assertTrue(socket.getaddrinfo("localhost", 80))
        async def talk():
            server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            return await reader.read()
        self.assertEqual(asyncio.run(talk()), b"")
    def test_children(self):
        self.assertEqual(subprocess.run(["sh", "-c", "exit 3"]).returncode, 3)
X
python3 -m unittest test_it && python3 -m venv --without-pip v && v/bin/python -c 'print(1)'
""",
    "strings": "strings -n 3 /bin/true | wc -l; script -qc 'echo typed' /dev/null",
}


@pytest.mark.parametrize("tool", TOOLS)
def test_builds_and_tests_work_under_the_filter(tool, tmp_path):
    if find_inside(tool) is None:
        pytest.skip(f"no {tool} under /usr")

    async def body(backend):
        # node reserves more address space than the default limit
        limits = SandboxLimits(address_space_bytes=1 << 40)
        box = await backend.create(SandboxSpec(limits=limits))
        result = await sh(backend, box, "set -e\n" + TOOLS[tool], deadline_s=120)
        assert result.exit_code == 0, result

    with_backend(tmp_path, body)


@needs_filter
def test_without_the_filter_it_is_not_promised(tmp_path):
    async def body(backend):
        assert Capability.SYSCALL_FILTER not in await backend.capabilities()
        with pytest.raises(CapabilityMissing, match="syscall_filter"):
            await backend.create(SandboxSpec())
        await backend.create(SandboxSpec(required=(Capability.NO_NETWORK,)))

    with_backend(tmp_path, body, program=None)
    # A kernel that takes no filter at all refuses this program too.
    with_backend(tmp_path, body, program=bytes(8))


@needs_filter
def test_the_filter_is_promised_where_it_holds_but_not_without_bubblewrap(tmp_path):
    async def filtered(backend):
        assert Capability.SYSCALL_FILTER in await backend.capabilities()

    async def unconfined(backend):
        assert isinstance(backend, ProcessBackend)
        assert Capability.SYSCALL_FILTER not in await backend.capabilities()

    with_backend(tmp_path, filtered)
    play("process", tmp_path, unconfined)
