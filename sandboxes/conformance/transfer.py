"""Files put into and got out of a workspace whose owner is hostile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from k3rl.errors import K3rlError, SandboxError, UncapturableTree, UserInputError
from k3rl.sandboxes.conformance.check import Check
from k3rl.sandboxes.conformance.ground import Ground, Muddled, Place
from k3rl.sandboxes.spec import Capability, SandboxSpec

NEW, MINE = b"new", b"mine"
LAYOUT = """
import os, socket, sys
outside = sys.argv[1]
os.makedirs("real")
with open("real/file", "w") as file:
    file.write("mine")
for name, target in (
    ("link", outside + "/secret"), ("linked", outside), ("nowhere", outside + "/made"),
    ("inner", "real"), ("near", "real/file"), ("loop", "loop"),
    ("passwd", "/etc/passwd"), ("environ", "/proc/self/environ"),
):
    os.symlink(target, name)
os.mkfifo("pipe")
try:
    socket.socket(socket.AF_UNIX).bind("socket")
except OSError:
    os.mkfifo("socket")  # where there are none at all
"""
LINKS = ("link", "near", "passwd", "environ", "loop", "nowhere")
BELOW_LINKS = ("linked/secret", "linked/made", "inner/file", "loop/file")
SPECIAL = ("pipe", "socket", "real", "inner", "linked", "/dev/zero", "/dev/stdin")
OUTSIDE = ("../x", "real/../../x", "/etc/passwd", "/workspace/../x", "", ".", "/workspace", "a\0b")
WAIT_S = 10.0
Transfer = Callable[[Place, str], Awaitable[bytes]]


async def get(place: Place, path: str) -> bytes:
    """A download."""
    return await place.backend.get(place.id, path)


async def put(place: Place, path: str) -> bytes:
    """An upload."""
    await place.backend.put(place.id, path, NEW)
    return NEW


async def told(transfer: Transfer, place: Place, path: str) -> str:
    """What became of a transfer that must be refused; "" when it was."""
    try:
        data = await asyncio.wait_for(transfer(place, path), WAIT_S)
    except UserInputError:
        return ""
    except TimeoutError:
        return f"{path!r} blocks"
    return f"{path!r}: {data[:40]!r}"


async def refused(ground: Ground, transfer: Transfer, paths: Sequence[str]) -> str:
    """Transfers by paths that must be refused, and their traces on the host."""
    async with ground.place() as place:
        made = await place.python(LAYOUT, str(ground.folder))
        if made.exit_code != 0:
            raise Muddled(made.stderr.decode())
        found = [await told(transfer, place, path) for path in paths]
    return "; ".join(filter(None, found)) or traces(ground)


def traces(ground: Ground) -> str:
    """What transfers may have changed on the host."""
    if ground.secret_file.read_text() != ground.secret:
        return "a file of the host has changed"
    return "a file was made on the host" if (ground.folder / "made").exists() else ""


NAIVE = """
import signal
root = sys.argv.pop(1)
os.mkdir(root)
os.chdir(root)
os.mkdir("outside")
with open("outside/secret", "w") as file:
    file.write("theirs")
sys.argv.insert(1, os.path.abspath("outside"))
exec(sys.argv.pop(2))
def alarm(*_):
    through.append("blocks")
    raise OSError
signal.signal(signal.SIGALRM, alarm)
def transfer(path):
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with open(path, "rb" if sys.argv[2] == "get" else "wb") as file:
        file.read(10) if sys.argv[2] == "get" else file.write(b"new")
for path in sys.argv[3:]:
    attempt(path, transfer, path)
signal.setitimer(signal.ITIMER_REAL, 0)
"""


async def naive(ground: Ground, transfer: Transfer, paths: Sequence[str]) -> str:
    """The control: plain calls by the user of sandboxes, in such a workspace on the host."""
    name = "get" if transfer is get else "put"
    return await ground.on_host(NAIVE, ground.new_token(), LAYOUT, name, *paths)


SWAPPER = """
import os, sys, time
def swap(outside, seconds):
    os.makedirs("real", exist_ok=True)
    with open("real/secret", "w") as file:
        file.write("mine")
    if not os.path.lexists("link"):
        os.symlink(outside, "link")
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        for name in ("link", "real"):
            os.rename(name, "d")
            os.rename("d", name)
"""
"""Lets a folder and a link out of the workspace take turns under one name."""
DAEMON = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in range(3):
            os.close(number)
        swap(sys.argv[1], 2.0)
    os._exit(0)
time.sleep(0.1)
"""
FOREGROUND = "swap(sys.argv[1], 1.0)"
RACE = """
def race():
    pid = os.fork()
    if not pid:
        swap(os.path.abspath("outside"), 5.0)
        os._exit(0)
    limit, is_through = time.monotonic() + 4.0, False
    while time.monotonic() < limit and not is_through:
        try:
            if not os.path.islink("d"):
                if sys.argv[1] == "get":
                    is_through = open("d/secret").read() == "theirs"
                else:
                    open("d/secret", "w").write("new")
                    is_through = open("outside/secret").read() == "new"
        except OSError:
            pass
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return is_through
os.makedirs(sys.argv[2])
os.chdir(sys.argv[2])
os.mkdir("outside")
with open("outside/secret", "w") as file:
    file.write("theirs")
attempt("a check before the use", race)
"""


async def swapped(ground: Ground, transfer: Transfer) -> str:
    """A transfer while a folder of its path is a link, and none, and a link again."""
    async with ground.place() as place:
        await place.python(SWAPPER + DAEMON, str(ground.folder))
        found = await _race(ground, transfer, place)
        running = asyncio.create_task(place.python(SWAPPER + FOREGROUND, str(ground.folder)))
        await asyncio.sleep(0.2)
        found = found or await _race(ground, transfer, place)
        await running
    return found


async def _race(ground: Ground, transfer: Transfer, place: Place) -> str:
    for _ in range(60):
        try:
            data = await asyncio.wait_for(transfer(place, "d/secret"), WAIT_S)
        except SandboxError:
            continue  # it changed while it was looked at
        except UserInputError:
            continue
        if data not in (MINE, NEW):
            return f"it gave {data[:40]!r}"
        if found := traces(ground):
            return found
    return ""


async def swapped_naively(ground: Ground, transfer: Transfer) -> str:
    """The control: a look at the path, and then its use."""
    name = "get" if transfer is get else "put"
    return await ground.on_host(SWAPPER + RACE, name, ground.new_token())


ODD = (
    "line\nbreak",
    "not-utf8-\udcff\udcc3",
    " spaces ",
    "-rf",
    "quo'te\"s",
    "\x1b[31m",
    "*",
    "n" * 255,
)
ALIKE = ("case", "CASE", "caf\u00e9", "cafe\u0301", "\u212b", "\u00c5")
"""Pairs that differ in case or in normal form alone."""
LIST = """
import json, os
print(json.dumps({name: open(name).read() for name in os.listdir()}))
"""


async def names(ground: Ground, wanted: Sequence[str], expected: Sequence[str]) -> str:
    """Files that come back under other names or with other contents."""
    files = {name: str(number) for number, name in enumerate(wanted)}
    hoped = {name: str(number) for number, name in enumerate(expected)}
    async with ground.place() as place:
        for name, text in files.items():
            await place.backend.put(place.id, name, text.encode())
        seen = json.loads((await place.python(LIST)).stdout)
        got = {name: (await get(place, name)).decode() for name in wanted}
        snapshot = await place.backend.snapshot(place.id, {})
        twin = await place.backend.restore(SandboxSpec(required=()), snapshot)
        copied = json.loads((await replace(place, id=twin).python(LIST)).stdout)
        await place.backend.close(twin)
    wrong = [
        way for way, found in (("seen", seen), ("got", got), ("restored", copied)) if found != hoped
    ]
    return f"not as they were put: {', '.join(wrong)}" if wrong else ""


MODE = "import os; print(oct(os.stat('file').st_mode & 0o7777))"


async def upload_mode(ground: Ground, mode: int = 0o6755) -> str:
    """Setuid and setgid bits of an upload."""
    async with ground.place() as place:
        await place.backend.put(place.id, "file", NEW, mode)
        found = (await place.python(MODE)).stdout.decode().strip()
    return "" if found == "0o755" else f"the mode is {found}"


async def huge_download(ground: Ground, most: int = 1 << 20) -> str:
    """A file that is larger than what the caller has room for."""
    async with ground.place() as place:
        await place.sh("truncate -s 40M huge")
        try:
            return f"it gave {len(await place.backend.get(place.id, 'huge', most))} bytes"
        except UserInputError:
            return ""


DELETION = """
import os
os.mkdir("d")
for path in ("d/gone", "over"):
    try:
        os.mknod(path, 0o020000)
    except OSError:
        pass
"""
ATTRIBUTES = """
import os
for name in ("opaque", "whiteout", "redirect", "metacopy", "origin"):
    for path in ("given", "given/a"):
        try:
            os.setxattr(path, "user.overlay." + name, b"y")
        except OSError:
            pass
"""


async def forged_marks(ground: Ground, script: str) -> str:
    """What means something to overlayfs and to layers, made by hand in the workspace."""
    async with ground.place({"given/a": b"1", "given/b": b"2"}) as place:
        await place.backend.snapshot(place.id, {})
        await place.python(script)
        return await _restored(place)


async def damaged_snapshot(ground: Ground) -> str:
    """The control: a snapshot that is not what it says."""
    async with ground.place({"a": b"1"}) as place:
        return await _restored(place, changed_digest="0" * 64)


async def _restored(place: Place, changed_digest: str = "") -> str:
    backend = place.backend
    try:
        digest = await backend.tree_digest(place.id)
        snapshot = await backend.snapshot(place.id, {})
        if changed_digest:
            snapshot = replace(snapshot, tree_digest=changed_digest)
    except UncapturableTree:
        return ""
    try:
        twin = await backend.restore(SandboxSpec(required=()), snapshot)
        restored = await backend.tree_digest(twin)
        await backend.close(twin)
    except K3rlError as error:
        return f"{type(error).__name__}: {error}"
    return "" if digest == restored else "what is restored is not what was there"


CHECKS = (
    *(
        Check(
            f"{what} {way}",
            None,
            partial(refused, transfer=transfer, paths=paths),
            partial(naive, transfer=transfer, paths=some),
        )
        for way, transfer, outside in (
            ("of a download", get, "../../secret"),
            ("of an upload", put, "../made"),
        )
        for what, paths, some in (
            ("link as the target", LINKS, ("link", "near")),
            ("link above the target", BELOW_LINKS, ("linked/secret", "inner/file")),
            ("special file as the target", SPECIAL, ("pipe",)),
            ("path outside the workspace", OUTSIDE, (outside,)),
        )
    ),
    *(
        Check(
            f"link swapped during {way}",
            None,
            partial(swapped, transfer=transfer),
            partial(swapped_naively, transfer=transfer),
        )
        for way, transfer in (("a download", get), ("an upload", put))
    ),
    Check(
        "odd names",
        None,
        partial(names, wanted=ODD, expected=ODD),
        partial(names, wanted=ODD, expected=(*ODD[1:], ODD[0])),
    ),
    Check(
        "names that differ in case or normal form",
        None,
        partial(names, wanted=ALIKE, expected=ALIKE),
        partial(names, wanted=ALIKE, expected=ALIKE[:-1]),
    ),
    Check("setuid bit of an upload", None, upload_mode, partial(upload_mode, mode=0o700)),
    Check("huge download", None, huge_download, partial(huge_download, most=1 << 30)),
    *(
        Check(
            f"{name} made by hand",
            Capability.SNAPSHOT,
            partial(forged_marks, script=script),
            damaged_snapshot,
        )
        for name, script in (("deletion mark", DELETION), ("overlay attributes", ATTRIBUTES))
    ),
)
