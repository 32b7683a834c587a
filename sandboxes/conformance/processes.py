"""Bombs of processes, and what outlives a command or holds its result up."""

from __future__ import annotations

import asyncio
import signal
import time
from functools import partial

from k3rl.sandboxes.conformance.check import Check
from k3rl.sandboxes.conformance.ground import Ground, Muddled, end, loosely, with_token
from k3rl.sandboxes.spec import Capability

FORKS = """
import os, sys, time
count = 0
try:
    while count < int(sys.argv[1]):
        if os.fork() == 0:
            time.sleep(float(sys.argv[2]))
            os._exit(0)
        count += 1
except OSError:
    pass
print(count, flush=True)
time.sleep(float(sys.argv[2]))
"""
"""Tells how many children it could have at the same time, and lets them live for a while."""
LOW, BOMB, HIGH = 20, 60, 120


async def fork_bomb(ground: Ground, most: int = LOW) -> str:
    """Processes beyond a limit, and a sandbox that cannot be used afterwards."""
    async with ground.place(max_processes=most) as place:
        count = int((await place.python(FORKS, str(BOMB), "0.3")).stdout)
        after = await place.sh("true & wait; echo fine")
    if after.stdout != b"fine\n":
        return "no command runs after the bomb"
    return f"{count} processes" if count > LOW else ""


async def crowding(ground: Ground, is_shared: bool = False) -> str:
    """One sandbox's processes counted against another's limit."""
    want = str(LOW * 3 // 4)
    async with ground.place(max_processes=LOW) as one, ground.place(max_processes=LOW) as two:
        if is_shared:
            script = f"python3 -ISc '{FORKS}' {want} 1 & sleep 0.5; python3 -ISc '{FORKS}' {want} 0"
            counts = (await one.sh(script)).stdout.split()
        else:
            runs = [asyncio.create_task(each.python(FORKS, want, "1")) for each in (one, two)]
            counts = [(await run).stdout.strip() for run in runs]
    return "" if counts == [want.encode()] * 2 else f"{counts} processes instead of {want} each"


ORPHANS = """
import os, sys, time
is_waited = sys.argv[1] == "waited"
try:
    for _ in range(60):
        child = os.fork()
        if child == 0:
            if os.fork() == 0:
                time.sleep(0.005)
            os._exit(0)
        if is_waited:
            os.waitpid(child, 0)
            time.sleep(0.02)
    print("all")
except OSError:
    print("refused")
"""


async def zombies(ground: Ground, word: str = "waited") -> str:
    """Dead orphans that nobody reaps while their command runs, or afterwards."""
    async with ground.place(max_processes=LOW) as place:
        result = await place.python(ORPHANS, word)
        left = await place.sh("cat /proc/[0-9]*/stat | grep -c ') Z '")
    if result.stdout == b"all\n":
        return "" if left.stdout == b"0\n" else f"{left.stdout!r} zombies are left"
    return "dead orphans count against the process limit"


SIGNALS = """
import os, signal, sys, time
signal.signal(signal.SIGCHLD, lambda *_: None)
failures = set()
for _ in range(200):
    try:
        if os.fork() == 0:
            time.sleep(float(sys.argv[1]))
            os._exit(0)
    except OSError as error:
        failures.add(error.strerror)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
print("; ".join(failures))
"""


async def forks_among_signals(ground: Ground, most: int = 400, lifetime_s: str = "0") -> str:
    """Processes that are not started because a signal came; the control: because of a limit."""
    async with ground.place(max_processes=most) as place:
        return (await place.python(SIGNALS, lifetime_s)).stdout.decode().strip()


SETSID = "setsid python3 -ISc 'import time; time.sleep(20)' {token} </dev/null >/dev/null 2>&1 &"
DOUBLE_FORK = """
python3 -ISc '
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in range(3):
            os.close(number)
        os.chdir("/")
        time.sleep(20)
' {token}
"""
STUBBORN = """
setsid python3 -ISc '
import os, signal, time
for number in range(1, 32):
    if number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(20)
' {token} &
"""
"""Two processes: one ignores what can be ignored, its child is stopped."""
AWAIT = "sleep 0.3; {ending}"


async def survivors(ground: Ground, script: str, ending: str = "exit 0") -> str:
    """Processes that are left when a command has ended or run into its deadline."""
    token = ground.new_token()
    is_late = ending != "exit 0"
    async with ground.place() as place:
        text = script.replace("{token}", token) + AWAIT.replace("{ending}", ending)
        result = await place.sh(text, deadline_s=1.2 if is_late else 20.0)
        left = with_token(token)
        end(token)
        if (result.timed_out, result.exit_code) != (is_late, None if is_late else 0):
            raise Muddled(f"the command ended with {result}")
        if not left and (await place.sh("echo fine")).stdout != b"fine\n":
            return "no command runs afterwards"
    return f"{len(left)} processes are left" if left else ""


HEEDLESS = """
import os, signal, sys, time
if sys.argv[1] == "stopped":
    print(flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(flush=True)
time.sleep(20)
"""


async def heedless(ground: Ground, how: str) -> str:
    """A command that does not heed SIGTERM, past its deadline."""
    token = ground.new_token()
    async with ground.place() as place:
        result = await place.python(HEEDLESS, how, token, deadline_s=0.8)
        left = with_token(token)
    is_ended = result.timed_out and result.exit_code is None and result.wall_s < 10
    return "" if is_ended and not left else f"it ran for {result.wall_s:.1f} s: {result}"


async def asked_politely(ground: Ground, how: str) -> str:
    """The control: what SIGTERM does to it."""
    with ground.process(ground.command(HEEDLESS, how)) as process:
        assert process.stdout is not None
        await asyncio.to_thread(process.stdout.readline)
        await asyncio.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        return "SIGTERM does not end it" if process.poll() is None else ""


HOLDER = "sleep 3 & setsid sleep 3 & echo done"


async def held_output(ground: Ground) -> str:
    """A background process that holds standard output, and with it the result."""
    async with ground.place() as place:
        result = await place.sh(HOLDER)
    if result.stdout != b"done\n":
        raise Muddled(str(result))
    return f"the result came after {result.wall_s:.1f} s" if result.wall_s > 2.0 else ""


async def held_output_on_host(ground: Ground) -> str:
    """The control: reading a pipe to its end."""
    begun = time.monotonic()
    with ground.process(["sh", "-c", HOLDER]) as process:
        await asyncio.to_thread(process.communicate)
    wall_s = time.monotonic() - begun
    return f"the end of file came after {wall_s:.1f} s" if wall_s > 2.0 else ""


FLOOD = "yes & yes >&2"


async def flooding(ground: Ground) -> str:
    """A command that never stops writing, past its deadline."""
    async with ground.place() as place:
        result = await place.sh(FLOOD, 0.5, 1000)
        after = await place.sh("echo fine")
    is_ended = result.timed_out and result.wall_s < 10 and after.stdout == b"fine\n"
    return "" if is_ended else f"it ran for {result.wall_s:.1f} s: {result}"


async def flooding_unread(ground: Ground) -> str:
    """The control: a process whose full pipe nobody empties does not come to an end."""
    with ground.process(["head", "-c", "1M", "/dev/zero"]) as process:
        await asyncio.sleep(0.3)
        return "a full pipe stops it" if process.poll() is None else ""


CHECKS = (
    Check("fork bomb", Capability.PROCESS_LIMIT, fork_bomb, partial(fork_bomb, most=HIGH)),
    Check(
        "processes of other sandboxes are not counted",
        Capability.PROCESS_LIMIT,
        crowding,
        partial(crowding, is_shared=True),
    ),
    Check(
        "forks while children end",
        Capability.PROCESS_LIMIT,
        forks_among_signals,
        partial(forks_among_signals, most=LOW, lifetime_s="2"),
    ),
    Check("zombies", Capability.PROCESS_LIMIT, zombies, partial(zombies, word="held")),
    *(
        Check(
            f"{name}, after {when}",
            Capability.KILLS_DESCENDANTS,
            partial(survivors, script=script, ending=ending),
            loosely(partial(survivors, script=script, ending=ending)),
        )
        for name, script in (
            ("setsid daemon", SETSID),
            ("double-fork daemon", DOUBLE_FORK),
            ("deaf and stopped daemons", STUBBORN),
        )
        for when, ending in (("the end", "exit 0"), ("the deadline", "sleep 60"))
    ),
    *(
        Check(name, None, partial(heedless, how=how), partial(asked_politely, how=how))
        for name, how in (("ignored SIGTERM", "deaf"), ("stopped command", "stopped"))
    ),
    Check("background process holds the output", None, held_output, held_output_on_host),
    Check("flood of output at the deadline", None, flooding, flooding_unread),
)
