"""Where attacks are tried: a backend, the host around it, and secrets to look for.

Every attack is harmless to the host even where nothing contains it: bombs are bounded, what is
changed is put back, signals go to victims started for them.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from k3rl.blobs import BlobStore
from k3rl.sandboxes.backends.bwrap import find_inside
from k3rl.sandboxes.backends.process import ProcessBackend
from k3rl.sandboxes.base import ExecRequest, ExecResult, Sandbox, SandboxBackend, run
from k3rl.sandboxes.scratch import sandbox_identity, switch_user
from k3rl.sandboxes.spec import SandboxLimits, SandboxSpec

SECRET_NAME = "K3RL_CONFORMANCE_SECRET"
DEADLINE_S, POLL_S = 30.0, 0.02
TRIES = """
import ctypes, errno, json, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
through = []
def attempt(what, action, *words):
    try:
        if action(*words) is not False:
            through.append(what)
    except OSError:
        pass
def call(function, *words):
    passed = [ctypes.c_long(word) if isinstance(word, int) else word for word in words]
    code = function(*passed)
    if code == -1:
        raise OSError(ctypes.get_errno(), "refused")
    return code
"""
"""Before a script of attempts, each of which gets through unless the system refuses it."""
TELL = "\nprint(json.dumps(through))\n"


class Untried(Exception):
    """Here are no means to try something."""


class Muddled(Exception):
    """An attack did not run as it should, so that nothing follows from it."""


@dataclass(frozen=True, slots=True)
class Place(Sandbox):
    """One sandbox that attacks are run in."""

    async def sh(
        self, script: str, deadline_s: float = DEADLINE_S, max_output_bytes: int = 64 * 1024
    ) -> ExecResult:
        """Run a shell script."""
        request = ExecRequest(("sh", "-c", script), b"", deadline_s, max_output_bytes)
        return await run(self.backend, self.id, request)

    async def python(self, script: str, *words: str, deadline_s: float = DEADLINE_S) -> ExecResult:
        """Run a Python script."""
        request = ExecRequest(("python3", "-ISc", script, *words), deadline_s=deadline_s)
        return await run(self.backend, self.id, request)

    async def attempts(
        self, script: str, *words: str, before: Sequence[str] = (), deadline_s: float = DEADLINE_S
    ) -> str:
        """Run a script of attempts, behind other words of a command line; what got through."""
        argv = (*before, "python3", "-ISc", TRIES + script + TELL, *words)
        request = ExecRequest(argv, deadline_s=deadline_s)
        return _told(await run(self.backend, self.id, request))


@dataclass(frozen=True, slots=True)
class Ground:
    """What an attack is given."""

    backend: SandboxBackend
    unconfined: SandboxBackend
    """Contains nothing."""
    folder: Path
    """Of the host, readable for every user of it, and not to be seen from sandboxes."""
    secret: str
    """In the environment of the host's processes, and in `folder / "secret"`."""

    @property
    def secret_file(self) -> Path:
        """Readable for every user of the host."""
        return self.folder / "secret"

    @property
    def open_folder(self) -> Path:
        """Writable for every user of the host, and where its processes are started."""
        return self.folder / "open"

    def loose(self) -> Ground:
        """The same with the unconfined backend."""
        return replace(self, backend=self.unconfined)

    @asynccontextmanager
    async def place(
        self,
        files: Mapping[str, bytes] | None = None,
        environment: Mapping[str, str] | None = None,
        **limits: int,
    ) -> AsyncIterator[Place]:
        """A fresh sandbox with these limits."""
        spec = SandboxSpec(SandboxLimits(**limits), dict(environment or {}), required=())
        made = await self.backend.create(spec, files)
        try:
            yield Place(self.backend, made)
        finally:
            await self.backend.close(made)

    def command(self, script: str, *words: str, before: Sequence[str] = ()) -> list[str]:
        """A command line that runs a Python script on the host, as the user of sandboxes."""
        return [*switch_user(sandbox_identity()), *before, system_python(), "-ISc", script, *words]

    async def on_host(self, script: str, *words: str, **options: Any) -> str:
        """Run a script of attempts as an ordinary process of the host."""
        return await self._attempts(self.command(TRIES + script + TELL, *words), **options)

    async def privileged(self, script: str, *words: str) -> str:
        """Run a script of attempts by one who has every privilege, in namespaces of its own."""
        user = ["--user", "--map-root-user"] if os.geteuid() != 0 else []
        options = ["--mount", "--net", "--ipc", "--uts", "--pid", "--fork"]
        before = ["unshare", *user, *options]
        if (await asyncio.to_thread(self.execute, [*before, "true"])).returncode != 0:
            raise Untried("this user may not make namespaces, which the control needs")
        return await self._attempts(
            [*before, system_python(), "-ISc", TRIES + script + TELL, *words]
        )

    async def _attempts(self, argv: Sequence[str], **options: Any) -> str:
        return _told(await asyncio.to_thread(self.execute, argv, **options))

    def execute(self, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        """Run a command line on the host. Blocks; raises OSError when it cannot be started."""
        place = self.open_folder
        return subprocess.run(argv, cwd=place, capture_output=True, timeout=DEADLINE_S, **options)

    @contextmanager
    def process(self, argv: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
        """A process of the host, in a group of its own, which is killed at the end."""
        started = subprocess.Popen(
            argv, cwd=self.open_folder, stdout=subprocess.PIPE, start_new_session=True, **options
        )
        try:
            yield started
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()
            if started.stdout is not None:
                started.stdout.close()

    @asynccontextmanager
    async def victim(self) -> AsyncIterator[subprocess.Popen[bytes]]:
        """A process of the host that knows the secret, run by the user of sandboxes."""
        argv = self.command("import time; print(flush=True); time.sleep(60)", self.secret)
        with self.process(argv) as process:
            assert process.stdout is not None
            await asyncio.to_thread(process.stdout.readline)
            yield process

    @contextmanager
    def inheritable(self) -> Iterator[None]:
        """While it lasts, a descriptor of the secret file could be inherited."""
        handle = os.open(self.secret_file, os.O_RDONLY)
        os.set_inheritable(handle, True)
        try:
            yield
        finally:
            os.close(handle)

    def new_token(self) -> str:
        """A word by which processes can be known."""
        return f"k3rl-token-{secrets.token_hex(8)}"


def with_token(token: str) -> list[int]:
    """The living processes of this machine whose command line holds a token."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if token.encode() in Path("/proc", name, "cmdline").read_bytes():
                found.append(int(name))
    return [pid for pid in found if pid != os.getpid()]


def end(token: str) -> None:
    """Kill the processes whose command line holds a token."""
    for pid in with_token(token):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def until(condition: Callable[[], object], limit_s: float) -> bool:
    """Wait until something is true; False when it is not in time."""
    for _ in range(int(limit_s / POLL_S)):
        if condition():
            return True
        await asyncio.sleep(POLL_S)
    return bool(condition())


def loosely(attack: Callable[[Ground], Awaitable[str]]) -> Callable[[Ground], Awaitable[str]]:
    """The control that is the same attack on the unconfined backend."""
    return lambda ground: attack(ground.loose())


def system_python() -> str:
    """An interpreter that every user may run."""
    python = find_inside("python3")
    if python is None:
        raise Untried("no python3 under /usr")
    return str(python)


def _told(done: ExecResult | subprocess.CompletedProcess[bytes]) -> str:
    try:
        return "; ".join(json.loads(done.stdout))
    except ValueError:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()[-300:]
        raise Muddled(f"the attempts did not end: {said!r}") from None


@asynccontextmanager
async def prepared(backend: SandboxBackend) -> AsyncIterator[Ground]:
    """Secrets on the host, and an unconfined backend; all gone at the end."""
    ground = _laid_out(backend, Path(tempfile.mkdtemp(prefix="k3rl-conformance-", dir="/tmp")))
    os.environ[SECRET_NAME] = ground.secret
    try:
        yield ground
    finally:
        os.environ.pop(SECRET_NAME, None)
        await ground.unconfined.aclose()
        shutil.rmtree(ground.folder)


def _laid_out(backend: SandboxBackend, folder: Path) -> Ground:
    folder.chmod(0o755)
    unconfined = ProcessBackend(BlobStore(folder / "blobs"), folder / "scratch")
    ground = Ground(backend, unconfined, folder, secrets.token_hex(16))
    ground.open_folder.mkdir()
    ground.open_folder.chmod(0o1777)
    ground.secret_file.write_text(ground.secret)
    ground.secret_file.chmod(0o644)
    return ground
