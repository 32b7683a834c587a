"""Who a sandbox is: not the host, not its fork, and nobody who can look into its fork."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path

from k3rl.sandboxes.conformance.check import Check
from k3rl.sandboxes.conformance.ground import Ground, Place, Untried, loosely
from k3rl.sandboxes.spec import Capability

VERDICT = "hidden-tests.py"
LOOK_FOR = """
import time
limit = time.monotonic() + float(sys.argv[2])
while time.monotonic() < limit:
    for root in (".", "/workspace", "/tmp", "/dev/shm", "/proc/1/root", "/proc/1/cwd"):
        for _, _, names in os.walk(root):
            attempt(f"in {root}", lambda: sys.argv[1] in names)
    time.sleep(0.02)
through = sorted(set(through))
"""


async def _forked(place: Place) -> Place:
    (twin,) = await place.backend.fork(place.id, 1)
    return replace(place, id=twin)


async def grader(ground: Ground) -> str:
    """A grader's files in a fork, looked for by a command that goes on meanwhile."""
    async with ground.place({"answer": b"4"}) as place:
        fork = await _forked(place)
        searching = asyncio.create_task(place.attempts(LOOK_FOR, VERDICT, "1.0"))
        await asyncio.sleep(0.3)
        await fork.backend.put(fork.id, VERDICT, b"assert answer == 4")
        await fork.sh(f"sleep 0.3; cp {VERDICT} /tmp; sleep 0.3")
        found = await searching
        again = await place.attempts(LOOK_FOR, VERDICT, "0.1")
        await fork.backend.close(fork.id)
        return found or again


async def grader_in_place(ground: Ground) -> str:
    """The control: a grader that works in the sandbox itself."""
    async with ground.place({"answer": b"4"}) as place:
        await place.backend.put(place.id, VERDICT, b"assert answer == 4")
        return await place.attempts(LOOK_FOR, VERDICT, "0.1")


async def fork_writes(ground: Ground, is_same: bool = False) -> str:
    """What a fork writes, in its parent and in another fork."""
    async with ground.place({"answer": b"4"}) as place:
        forks = [place, place] if is_same else [await _forked(place) for _ in range(2)]
        await forks[0].sh("echo 5 > answer; echo new > new; chmod 600 answer")
        seen = [(await each.sh("cat answer; ls")).stdout for each in (place, forks[1])]
        for fork in forks if not is_same else []:
            await fork.backend.close(fork.id)
    return "" if seen == [b"4answer\n"] * 2 else f"{seen}"


DRAW = """
import os, random, secrets, tempfile, uuid
if os.environ.get("SEED"):
    random.seed(int(os.environ["SEED"]))
    print(random.random())
else:
    print(random.random(), os.urandom(8).hex(), secrets.token_hex(8), uuid.uuid4(), uuid.uuid1())
    print(os.path.basename(tempfile.mktemp()), hash("text"))
"""


async def random_numbers(ground: Ground, seed: str = "") -> str:
    """Random numbers that two forks have in common."""
    async with ground.place(environment={"SEED": seed} if seed else {}) as place:
        await place.python(DRAW)
        forks = [await _forked(place) for _ in range(2)]
        drawn = [set((await fork.python(DRAW)).stdout.split()) for fork in (*forks, forks[0])]
        for fork in forks:
            await fork.backend.close(fork.id)
    common = (drawn[0] & drawn[1]) | (drawn[0] & drawn[2])
    return ", ".join(sorted(word.decode() for word in common))


IDS = (
    "/etc/machine-id",
    "/etc/hostid",
    "/var/lib/dbus/machine-id",
    "/sys/class/dmi/id/product_uuid",
    "/sys/class/dmi/id/product_serial",
    "/sys/class/dmi/id/board_serial",
)


async def machine_id(ground: Ground) -> str:
    """What identifies the host for ever."""
    known = {path: text for path in IDS if (text := _text(path))}
    if not known:
        raise Untried("this machine has no id")
    script = f"for f in {' '.join(known)}; do echo $f $(cat $f); done"
    async with ground.place() as place:
        rows = (await place.sh(script)).stdout.decode(errors="replace").splitlines()
    return "; ".join(path for path, text in known.items() if f"{path} {text}" in rows)


def _text(path: str) -> str:
    try:
        return " ".join(Path(path).read_text().split())
    except OSError:
        return ""


async def host_name(ground: Ground) -> str:
    """The host's name."""
    async with ground.place() as place:
        seen = (await place.sh("uname -n; cat /etc/hostname /proc/sys/kernel/hostname")).stdout
    name = socket.gethostname()
    return f"it is {name}" if name in seen.decode().split() else ""


FILES, FORK = Capability.ISOLATED_FILES, Capability.FORK
CHECKS = (
    Check("verifier in a fork", FILES, grader, grader_in_place),
    Check("writes of a fork", FORK, fork_writes, partial(fork_writes, is_same=True)),
    Check("random numbers of forks", FORK, random_numbers, partial(random_numbers, seed="7")),
    Check("machine id", FILES, machine_id, loosely(machine_id)),
    Check("host name", Capability.ISOLATED_PROCESSES, host_name, loosely(host_name)),
)
