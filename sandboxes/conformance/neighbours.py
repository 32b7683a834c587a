"""What a command can learn of, and do to, processes that are not its own."""

from __future__ import annotations

import asyncio
import socket
from functools import partial

from k3rl.sandboxes.conformance.check import Check
from k3rl.sandboxes.conformance.ground import TRIES, Ground, loosely
from k3rl.sandboxes.spec import Capability

AGENT, OWN = "1", "self"


async def signalled_agent(ground: Ground, target: str = AGENT) -> str:
    """Signals to the process that runs the commands; the control: to the command's own shell."""
    async with ground.place() as place:
        result = await place.sh(f"kill -STOP {target}; kill -KILL {target}; exit 7", 5.0)
        if result.exit_code != 7:
            return f"the command ended with {result.exit_code}"
        return "" if (await place.sh("echo fine", 5.0)).stdout == b"fine\n" else "it is gone"


async def signalled_host(ground: Ground) -> str:
    """A SIGKILL to a process of the host."""
    async with ground.victim() as victim, ground.place() as place:
        await place.attempts("attempt('', os.kill, int(sys.argv[1]), 9)", str(victim.pid))
        await asyncio.sleep(0.1)
        return "it was killed" if victim.poll() is not None else ""


BEGIN_OTHER = """
def begin():
    told, tell = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(tell, b"x")
        import time
        time.sleep(20)
    os.read(told, 1)
    return pid
pids = [int(word) if word.isdigit() else begin() for word in sys.argv[1:]]
"""
TRACE = """
SEIZE = 0x4206
for pid in pids:
    attempt(f"traced {pid}", call, libc.ptrace, SEIZE, pid, 0, 0)
"""
READ_MEMORY = """
class Piece(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("size", ctypes.c_size_t)]
word = ctypes.create_string_buffer(8)
here, there = Piece(ctypes.addressof(word), 8), Piece(4096, 8)
def read(pid):
    try:
        call(libc.process_vm_readv, pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    except OSError as error:
        return error.errno == errno.EFAULT  # it may look, but there is nothing
for pid in pids:
    attempt(f"read {pid}", read, pid)
"""
LOOK_INSIDE = """
for pid in pids:
    for name in ("environ", "mem", "auxv"):
        attempt(f"{pid}/{name}", lambda: open(f"/proc/{pid}/{name}", "rb").read(0))
    for name in ("root", "cwd", "exe"):
        attempt(f"{pid}/{name}", os.readlink, f"/proc/{pid}/{name}")
    for name in ("fd", "root/"):
        attempt(f"{pid}/{name}", os.listdir, f"/proc/{pid}/{name}")
"""


async def foreign_process(ground: Ground, script: str) -> str:
    """Something done to the agent and to a process of the host."""
    async with ground.victim() as victim, ground.place() as place:
        return await place.attempts(BEGIN_OTHER + script, AGENT, str(victim.pid))


async def own_process(ground: Ground, script: str) -> str:
    """The control: the same to a child of one's own, where no filter forbids it."""
    async with ground.loose().place() as place:
        return await place.attempts(BEGIN_OTHER + script, OWN)


FIND = """
word = sys.argv[1][::-1].encode()
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "cmdline"):
        attempt(f"/proc/{pid}/{name}", lambda: word in open(f"/proc/{pid}/{name}", "rb").read())
"""
"""Looks for a word that is given backwards, so as not to find itself."""


async def secrets_of_processes(ground: Ground) -> str:
    """What is in the environment and on the command lines of the host's processes."""
    async with ground.victim(), ground.place() as place:
        return await place.attempts(FIND, ground.secret[::-1])


async def sibling_sandbox(ground: Ground, is_same: bool = False) -> str:
    """A command of another sandbox; the control: one of the same command."""
    token = ground.new_token()
    sleep = f"python3 -ISc 'import time; time.sleep(1)' {token}"
    async with ground.place() as one, ground.place() as two:
        if is_same:
            before = ("sh", "-c", f'{sleep} & exec "$0" "$@"')
            return await two.attempts(FIND, token[::-1], before=before)
        running = asyncio.create_task(one.sh(sleep))
        await asyncio.sleep(0.5)
        found = await two.attempts(FIND, token[::-1])
        await running
        return found


ENVIRONMENT = """
names = {"PATH", "HOME", "TMPDIR", "LANG", "PWD", "GIVEN", "GIT_CONFIG_NOSYSTEM"}
through += sorted(set(os.environ) - names)
if os.environ.get("GIVEN") != "1":
    through.append("the given one is missing")
"""


async def environment(ground: Ground) -> str:
    """Variables that nobody gave."""
    async with ground.place(environment={"GIVEN": "1"}) as place:
        return await place.attempts(ENVIRONMENT)


async def environment_on_host(ground: Ground) -> str:
    """The control: an ordinary child."""
    return await ground.on_host(ENVIRONMENT)


DESCRIPTORS = """
for number in range(3, 1024):
    attempt(f"{number}", os.readlink, f"/proc/self/fd/{number}")
"""


async def descriptors(ground: Ground) -> str:
    """Open files of the host that a command inherits."""
    with ground.inheritable():
        async with ground.place() as place:
            return await place.attempts(DESCRIPTORS)


async def descriptors_on_host(ground: Ground) -> str:
    """The control: an ordinary child that is given what can be inherited."""
    with ground.inheritable():
        return await ground.on_host(DESCRIPTORS, close_fds=False)


FORGE = """
claims = [bytes(5), bytes(4) + b"\\1", b"exit 0\\n"]
def tell(place):
    for claim in claims:
        os.write(place, claim)
for number in range(3, 256):
    attempt(f"wrote to {number}", tell, number)
"""
FORGE_ELSEWHERE = """
def connect(address):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
        channel.connect(address)
        channel.send(claims[0])
for number in range(256):
    attempt("", lambda: tell(os.open(f"/proc/1/fd/{number}", os.O_WRONLY)))
for folder in filter(lambda name: name.startswith(".k3rl"), os.listdir("/")):
    for name in os.listdir("/" + folder) if os.path.isdir("/" + folder) else []:
        attempt("", connect, f"/{folder}/{name}")
for stream in (1, 2):
    tell(stream)
os._exit(7)
"""
"""Claims, wherever it may be heard, that it ended well, and then ends badly."""


async def forged_end(ground: Ground) -> str:
    """An exit code that is not the command's own, by messages to whoever waits for it."""
    async with ground.place() as place:
        result = await place.python(TRIES + FORGE + FORGE_ELSEWHERE)
        after = await place.sh("exit 9")
    is_real = (result.exit_code, result.timed_out, after.exit_code) == (7, False, 9)
    return "" if is_real else f"it ended with {result.exit_code}, the next one {after.exit_code}"


async def forged_end_on_host(ground: Ground) -> str:
    """The control: who inherits a channel can be heard on it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        await ground.on_host(FORGE, pass_fds=(theirs.fileno(),))
        return "it was heard" if ours.recv(16, socket.MSG_DONTWAIT) else ""


OUTSIDE = Capability.ISOLATED_PROCESSES
CHECKS = (
    Check("signals to the agent", OUTSIDE, signalled_agent, partial(signalled_agent, target="$$")),
    Check("signals to the host", OUTSIDE, signalled_host, loosely(signalled_host)),
    *(
        Check(
            name,
            OUTSIDE,
            partial(foreign_process, script=script),
            partial(own_process, script=script),
        )
        for name, script in (
            ("ptrace of the agent and of the host", TRACE),
            ("memory of the agent and of the host", READ_MEMORY),
            ("/proc/1 and its files", LOOK_INSIDE),
        )
    ),
    Check(
        "secrets of the host's processes",
        OUTSIDE,
        secrets_of_processes,
        loosely(secrets_of_processes),
    ),
    Check(
        "processes of other sandboxes",
        OUTSIDE,
        sibling_sandbox,
        partial(sibling_sandbox, is_same=True),
    ),
    Check("environment", None, environment, environment_on_host),
    Check("inherited descriptors", None, descriptors, descriptors_on_host),
    Check("forged end of a command", OUTSIDE, forged_end, forged_end_on_host),
)
