"""Failures of the machine, and of those who ask for what cannot be: told apart from results."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from k3rl.blobs import BlobStore
from k3rl.errors import CapabilityMissing, K3rlError, SandboxError, SandboxLost, UserInputError
from k3rl.sandboxes.base import ExecRequest, SandboxBackend, run
from k3rl.sandboxes.conformance.check import Check
from k3rl.sandboxes.conformance.ground import (
    Ground,
    Muddled,
    Untried,
    end,
    loosely,
    until,
    with_token,
)
from k3rl.sandboxes.factory import KINDS, open_backend
from k3rl.sandboxes.spec import Capability, SandboxLimits, SandboxSpec

SLEEP = "import time; time.sleep(20)"
ANY = SandboxSpec(required=())
WAIT_S = 10.0


async def dead_keeper(ground: Ground, is_command: bool = False) -> str:
    """The death of what runs a command, told as the command's exit code.

    The control: the death of the command itself, which is its exit code.
    """
    token = ground.new_token()
    async with ground.place() as place:
        running = asyncio.create_task(place.python(SLEEP, token))
        if not await until(lambda: with_token(token), WAIT_S):
            raise Muddled("the command did not start")
        (victim,) = with_token(token)
        if not is_command:
            victim = parent_of(victim)
            if victim == os.getpid():
                raise Untried("commands are children of this process")
        os.kill(victim, signal.SIGKILL)
        try:
            result = await running
        except SandboxLost as error:
            return f"the sandbox is gone: {error}"
        except SandboxError:
            after = await place.sh("echo fine")
            return "" if after.stdout == b"fine\n" and not with_token(token) else f"then {after}"
    return f"exit code {result.exit_code}, timed out: {result.timed_out}"


def parent_of(pid: int) -> int:
    """The parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


OWNER = """
import asyncio, sys
from pathlib import Path
from k3rl.blobs import BlobStore
from k3rl.sandboxes.base import ExecRequest
from k3rl.sandboxes.spec import SandboxSpec
from k3rl.sandboxes.factory import KINDS, open_backend
async def main():
    kind, folder, token = sys.argv[1:]
    place = Path(folder)
    backend = open_backend(kind, BlobStore(place / "blobs"), place / "scratch", True)
    box = await backend.create(SandboxSpec(required=()))
    sleep = f"python3 -ISc 'import time; time.sleep(20)' {token}"
    request = ExecRequest(("sh", "-c", f"setsid {sleep} & echo up; {sleep}"), deadline_s=60.0)
    async for _ in backend.exec(box, request):
        print("up", flush=True)
asyncio.run(main())
"""


async def dead_owner(ground: Ground) -> str:
    """What runs on, and what lies about, when the program that owns a sandbox is killed."""
    if not os.access(sys.executable, os.X_OK):
        raise Untried("this user may not run this program's own Python")
    token, kind = ground.new_token(), kind_of(ground.backend)
    home = ground.folder / token
    home.mkdir(mode=0o755)
    argv = [sys.executable, "-c", OWNER, kind, str(home), token]
    with ground.process(argv, env=os.environ | {"PYTHONPATH": ":".join(sys.path)}) as owner:
        assert owner.stdout is not None
        if await asyncio.to_thread(owner.stdout.readline) != b"up\n":
            raise Muddled("the owner did not start a command")
        owner.kill()
        owner.wait()
        is_still = await until(lambda: not with_token(token), 3.0)
        end(token)
        if not is_still:
            return "its processes run on"
    before = owners(home)
    again = open_backend(kind, BlobStore(home / "blobs"), home / "scratch", True)
    try:
        await again.capabilities()
        return "its folder is left" if before & owners(home) else ""
    finally:
        await again.aclose()


def kind_of(backend: SandboxBackend) -> str:
    """The kind by which another backend like it is opened."""
    if backend.name not in KINDS:
        raise Untried(f"another backend like {backend.name} cannot be opened here")
    return backend.name


def owners(home: Path) -> set[Path]:
    """The folders of those who own sandboxes."""
    return set((home / "scratch").glob("owner-*"))


UNSTARTABLE = {
    "no program": (("no-such-program",), 127),
    "no program at a path": (("./absent",), 127),
    "a folder": (("/usr",), 126),
    "a file that is no program": (("./text",), 126),
    "a word of 200 kB": (("true", "x" * 200_000), 126),
    "3 MB of words": (("true", *["x" * 100_000] * 30), 126),
}


async def unstartable(ground: Ground) -> str:
    """Commands that cannot be started, told as failures of the machine."""
    told = []
    async with ground.place({"text": b"no program"}) as place:
        for name, (argv, code) in UNSTARTABLE.items():
            try:
                result = await run(place.backend, place.id, ExecRequest(argv))
            except K3rlError as error:
                told.append(f"{name}: {type(error).__name__}")
                continue
            if (result.exit_code, bool(result.stderr)) != (code, True):
                told.append(f"{name}: {result.exit_code}, {result.stderr[:50]!r}")
    return "; ".join(told)


async def unstartable_on_host(ground: Ground) -> str:
    """The control: plain calls."""
    told = []
    for name, (argv, _) in UNSTARTABLE.items():
        try:
            await asyncio.to_thread(ground.execute, argv)
        except OSError as error:
            told.append(f"{name}: {type(error).__name__}")
    return "; ".join(told)


Ask = Callable[[SandboxBackend, bool], Awaitable[None]]
"""Asks for something; with False, for something that can be had."""


async def bad_limit(backend: SandboxBackend, is_bad: bool) -> None:
    """A limit that is none."""
    SandboxLimits(max_processes=0 if is_bad else 1)


async def bad_variable(backend: SandboxBackend, is_bad: bool) -> None:
    """A variable whose name would be read as another's value."""
    await _made(backend, replace(ANY, environment={"A=B" if is_bad else "A": "x"}))


async def bad_value(backend: SandboxBackend, is_bad: bool) -> None:
    """A value that would end a word, and so add a variable."""
    await _made(backend, replace(ANY, environment={"A": "x\0B=y" if is_bad else "x"}))


async def bad_file(backend: SandboxBackend, is_bad: bool) -> None:
    """A file that is a folder too."""
    await _made(backend, ANY, {"a": b"", "a/b" if is_bad else "b": b""})


async def bad_command(backend: SandboxBackend, is_bad: bool) -> None:
    """A command with a word that cannot be passed on."""
    async with _place(backend) as made:
        await run(backend, made, ExecRequest(("echo", "a\0b" if is_bad else "a")))


async def missing_program(backend: SandboxBackend, is_bad: bool) -> None:
    """A program that sandboxes do not have."""
    await _made(backend, replace(ANY, executables=("no-such-tool" if is_bad else "sh",)))


async def gone(backend: SandboxBackend, is_bad: bool) -> None:
    """A sandbox that has been closed."""
    async with _place(backend) as made:
        if is_bad:
            await backend.close(made)
        await backend.stats(made)


async def bad_scratch(ground: Ground, is_bad: bool = True) -> str:
    """A scratch folder that is a file."""
    kind = kind_of(ground.backend)
    with tempfile.TemporaryDirectory(prefix="k3rl-conformance-") as folder:
        os.chmod(folder, 0o755)
        scratch = Path(folder, "scratch")
        if is_bad:
            await asyncio.to_thread(scratch.touch)
        try:
            await open_backend(kind, BlobStore(Path(folder, "blobs")), scratch, True).aclose()
        except SandboxError as error:
            return "" if str(scratch) in str(error) and "\n" not in str(error) else str(error)
    return "nothing is said"


ASKS: dict[str, tuple[Ask, type[K3rlError], str]] = {
    "limit": (bad_limit, UserInputError, "max_processes"),
    "name of a variable": (bad_variable, UserInputError, "environment"),
    "value of a variable": (bad_value, UserInputError, "NUL"),
    "files": (bad_file, UserInputError, "a/b"),
    "command": (bad_command, UserInputError, "NUL"),
    "program": (missing_program, CapabilityMissing, "no-such-tool"),
    "closed sandbox": (gone, SandboxLost, "gone"),
}


async def unnamed(ground: Ground, is_bad: bool = True) -> str:
    """What cannot be had and is not refused in one line that names it."""
    told = []
    for name, (ask, kind, word) in ASKS.items():
        try:
            await ask(ground.backend, is_bad)
            told.append(f"{name}: nothing is said")
        except K3rlError as error:
            if not isinstance(error, kind) or word not in str(error) or "\n" in str(error):
                told.append(f"{name}: {type(error).__name__}: {error}")
    return "; ".join(told)


async def _made(
    backend: SandboxBackend, spec: SandboxSpec, files: Mapping[str, bytes] | None = None
) -> None:
    await backend.close(await backend.create(spec, files))


@asynccontextmanager
async def _place(backend: SandboxBackend) -> AsyncIterator[str]:
    made = await backend.create(ANY)
    try:
        yield made
    finally:
        await backend.close(made)


FILL = """
for n in 1 2 3 4; do head -c 16M /dev/zero > f$n; done
test $(stat -c %s f4) = 16777216
"""
FULL, ROOMY = "24m", "512m"


@asynccontextmanager
async def small_disk(ground: Ground, size: str) -> AsyncIterator[SandboxBackend]:
    """A backend of the same kind whose scratch folder is on a file system of this size."""
    kind = kind_of(ground.backend)
    if os.geteuid() != 0:
        raise Untried("only root can mount a small file system")
    folder = ground.folder / ground.new_token()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=755", "k3rl", str(folder)]
    await asyncio.to_thread(ground.execute, ["mkdir", str(folder)], check=True)
    await asyncio.to_thread(ground.execute, mount, check=True)
    try:
        blobs = BlobStore(ground.folder / "more-blobs")
        backend = open_backend(kind, blobs, folder / "scratch", True)
        try:
            yield backend
        finally:
            await backend.aclose()
    finally:
        await asyncio.to_thread(ground.execute, ["umount", "--lazy", str(folder)], check=True)


async def full_scratch(ground: Ground, size: str = FULL) -> str:
    """A disk that is full: a command's result, and everybody else's named failure."""
    told = []
    async with small_disk(ground, size) as backend, _place(backend) as made:
        result = await run(backend, made, ExecRequest(("sh", "-c", FILL)))
        if result.exit_code == 0:
            return "there was room"
        if b"No space left" not in result.stderr:
            told.append(f"the command: {result}")
        asks: dict[str, Callable[[], Awaitable[object]]] = {
            "upload": lambda: backend.put(made, "new", bytes(1 << 20)),
            "create": lambda: backend.create(ANY, {"new": bytes(1 << 20)}),
        }
        for name, ask in asks.items():
            try:
                await ask()
                told.append(f"{name}: nothing is said")
            except SandboxError as error:
                if "No space left" not in str(error) or "\n" in str(error):
                    told.append(f"{name}: {error}")
        after = await run(backend, made, ExecRequest(("sh", "-c", "rm f*; echo fine > a; cat a")))
        if after.stdout != b"fine\n":
            told.append(f"afterwards: {after}")
    return "; ".join(told)


CHECKS = (
    Check(
        "death of what runs the command",
        Capability.KILLS_DESCENDANTS,
        dead_keeper,
        partial(dead_keeper, is_command=True),
    ),
    Check("dead owner", Capability.KILLS_DESCENDANTS, dead_owner, loosely(dead_owner)),
    Check("command that cannot be started", None, unstartable, unstartable_on_host),
    Check("what cannot be had", None, unnamed, partial(unnamed, is_bad=False)),
    Check("unusable scratch folder", None, bad_scratch, partial(bad_scratch, is_bad=False)),
    Check("full disk", None, full_scratch, partial(full_scratch, size=ROOMY)),
)
