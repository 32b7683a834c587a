"""Privileges, ways to gain some, and calls into rarely used parts of the kernel."""

from __future__ import annotations

import asyncio
import os
import stat
from contextlib import suppress
from functools import partial
from pathlib import Path

from k3rl.sandboxes.conformance.check import Check
from k3rl.sandboxes.conformance.ground import (
    Ground,
    Muddled,
    Untried,
    loosely,
    until,
    with_token,
)
from k3rl.sandboxes.processes.seccomp import refused_number
from k3rl.sandboxes.spec import Capability

CAPABILITIES = """
header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
call(libc.capget, header, sets)
def told(option, *words):
    return libc.prctl(option, *map(ctypes.c_ulong, (*words, 0, 0, 0, 0)[:4]))
found = dict(zip(("effective", "permitted", "inheritable"), zip(sets[:3], sets[3:])))
through += [f"{name}: {low:08x} {high:08x}" for name, (low, high) in found.items() if low or high]
through += [f"ambient {number}" for number in range(64) if told(47, 1, number) == 1]
if told(39) != 1:
    through += [f"in reach: {number}" for number in range(64) if told(23, number) == 1]
"""
"""Those that one has, and those that a program could give."""
NO_NEW_PRIVILEGES = """
if libc.prctl(39, *[ctypes.c_ulong(0)] * 4) != 1:
    through.append("programs may give some")
"""
SETUID = """
import os, sys, time
gate, door = os.pipe()
if os.fork() == 0:
    os.close(door)
    os.dup2(gate, 0)
    for number in (1, 2):
        os.dup2(os.open("/dev/null", os.O_WRONLY), number)
    os.execv(sys.argv[1], [sys.argv[1]])
time.sleep(2.5)
"""
"""Starts a program, and does not wait for it, so that it can be looked at even if it ends."""


def setuid_program() -> str:
    """A setuid program of root that asks for input first."""
    for name in ("su", "passwd", "gpasswd", "newgrp", "chsh", "chfn"):
        path = Path("/usr/bin", name)
        if path.exists():
            found = path.stat()
            if found.st_mode & stat.S_ISUID and found.st_uid == 0:
                return str(path)
    raise Untried("no setuid program that asks for input under /usr/bin")


async def setuid(ground: Ground) -> str:
    """The rights of a program's owner, by a setuid program of the host."""
    token, program = ground.new_token(), setuid_program()
    async with ground.place() as place:
        running = asyncio.create_task(place.python(SETUID, program, token))
        try:
            return await _rights_of(token, program)
        finally:
            await running


async def setuid_on_host(ground: Ground) -> str:
    """The control: an ordinary user starts it."""
    token, program = ground.new_token(), setuid_program()
    with ground.process(ground.command(SETUID, program, token)):
        return await _rights_of(token, program)


async def _rights_of(token: str, program: str) -> str:
    name = Path(program).name
    if not await until(lambda: _identities(token, name), 2.4):
        raise Muddled(f"{program} did not start")
    real, effective = _identities(token, name)
    return f"{name} runs as uid {effective}" if effective != real else ""


def _identities(token: str, name: str) -> list[str]:
    """The real and the effective uid of the program that a process with the token has started."""
    for pid in with_token(token):
        with suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                rows = Path(f"/proc/{child}/status").read_text().splitlines()
                fields = dict(row.split(":", 1) for row in rows)
                if fields["Name"].strip() == name:
                    return fields["Uid"].split()[:2]
    return []


NAMESPACES = """
kinds = {"user": 0x10000000, "mount": 0x20000, "pid": 0x20000000, "net": 0x40000000}
kinds |= {"uts": 0x4000000, "ipc": 0x8000000, "cgroup": 0x2000000}
for name, flag in kinds.items():
    pid = os.fork()
    if not pid:
        os._exit(0 if libc.unshare(flag) == 0 else 1)
    if os.waitpid(pid, 0)[1] == 0:
        through.append(name)
"""
MOUNT = """
os.makedirs("m", exist_ok=True)
def mount(*words):
    call(libc.mount, *words)
    libc.umount2(b"m", 2)
attempt("tmpfs", mount, b"none", b"m", b"tmpfs", 0, None)
attempt("bind", mount, b"/usr", b"m", None, 4096, None)
attempt("proc", mount, b"proc", b"m", b"proc", 0, None)
attempt("fsopen", call, libc.syscall, 430, b"tmpfs", 0)
attempt("open_tree", call, libc.syscall, 428, -100, b"/usr", 1)
attempt("chroot", call, libc.chroot, b".")
"""
OTHER = """
attempt("set the host name", call, libc.sethostname, b"sandbox", 7)
class Limit(ctypes.Structure):
    _fields_ = [("soft", ctypes.c_ulong), ("hard", ctypes.c_ulong)]
limit = Limit()
libc.getrlimit(7, ctypes.byref(limit))
limit.hard += 1
attempt("raise a limit", call, libc.setrlimit, 7, ctypes.byref(limit))
attempt("become root", os.setuid, 0)
attempt("own a file", os.chown, ".", 0, 0)
"""


async def privileged(ground: Ground, script: str) -> str:
    """Something that takes a privilege."""
    async with ground.place() as place:
        return await place.attempts(script)


async def by_the_privileged(ground: Ground, script: str) -> str:
    """The control: by one who has it."""
    return await ground.privileged(script)


KEYRINGS = """
numbers = {"x86_64": (248, 249, 250), "aarch64": (217, 218, 219)}[os.uname().machine]
add, request, control = numbers
SESSION, JOIN = -3, 1
attempt("a session keyring", call, libc.syscall, control, JOIN, None)
attempt("a key", call, libc.syscall, add, b"user", b"k3rl", b"x", 1, SESSION)
attempt("the session keyring", call, libc.syscall, control, 0, SESSION, 0)
"""
TERMINAL = """
import fcntl
request = int(sys.argv[1], 0)
def is_let_in():
    try:
        fcntl.ioctl(0, request, b"x" * 8)
    except OSError as error:
        return error.errno != errno.EPERM
attempt("the kernel is asked", is_let_in)
attempt("there is a controlling terminal", os.open, "/dev/tty", os.O_RDWR)
"""
TYPE, MEASURE = "0x5412", "0x5413"


async def terminal(ground: Ground, request: str = TYPE) -> str:
    """Typing into a terminal; the control: asking for its size."""
    async with ground.place() as place:
        return await place.attempts(TERMINAL, request)


CALLS = """
for name, number in zip(sys.argv[1::2], map(int, sys.argv[2::2])):
    def is_let_in():
        try:
            call(libc.syscall, number, -1, -1, -1, -1, -1, -1)
        except OSError as error:
            return error.errno != errno.EPERM
    attempt(name, is_let_in)
"""
"""With arguments that no kernel accepts."""
RARE = ("ptrace", "process_vm_writev", "pidfd_getfd", "kcmp", "add_key", "io_uring_enter", "setns")
HARMLESS = ("read", 0, "close", 3) if os.uname().machine == "x86_64" else ("read", 63, "close", 57)


async def rare_calls(ground: Ground, *words: str) -> str:
    """Calls that the filter must not let into the kernel."""
    async with ground.place() as place:
        return await place.attempts(CALLS, *words)


def numbered(names: tuple[str, ...]) -> list[str]:
    """Names of refused calls, each followed by its number here."""
    numbers = {name: refused_number(name) for name in names}
    return [str(word) for pair in numbers.items() if pair[1] is not None for word in pair]


BARE = Capability.NO_PRIVILEGES
FILTER = Capability.SYSCALL_FILTER
CHECKS = (
    Check(
        "capabilities",
        BARE,
        partial(privileged, script=CAPABILITIES),
        loosely(partial(privileged, script=CAPABILITIES)),
    ),
    Check(
        "no_new_privs",
        BARE,
        partial(privileged, script=NO_NEW_PRIVILEGES),
        loosely(partial(privileged, script=NO_NEW_PRIVILEGES)),
    ),
    Check("setuid programs", BARE, setuid, setuid_on_host),
    *(
        Check(
            name,
            BARE,
            partial(privileged, script=script),
            partial(by_the_privileged, script=script),
        )
        for name, script in (
            ("nested namespaces", NAMESPACES),
            ("mounts and chroot", MOUNT),
            ("other privileges", OTHER),
        )
    ),
    Check(
        "keyrings",
        FILTER,
        partial(privileged, script=KEYRINGS),
        loosely(partial(privileged, script=KEYRINGS)),
    ),
    Check("typing into a terminal", FILTER, terminal, partial(terminal, request=MEASURE)),
    Check(
        "rarely used system calls",
        FILTER,
        lambda ground: rare_calls(ground, *numbered(RARE)),
        lambda ground: rare_calls(ground, *map(str, HARMLESS)),
    ),
)
