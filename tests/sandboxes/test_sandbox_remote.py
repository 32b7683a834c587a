"""A backend served to clients elsewhere: errors, back pressure, leases, and the death of either."""

import asyncio
import os
import signal
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from k3rl import errors, proxy
from k3rl.actors import pid_of, sandbox_proxy, start_sandbox_host
from k3rl.errors import (
    CapabilityMissing,
    CorruptData,
    SandboxError,
    SandboxLost,
    UncapturableTree,
    UserInputError,
)
from k3rl.sandboxes.base import ExecRequest, OutputChunk, SandboxBackend, run
from k3rl.sandboxes.remote import RemoteBackend, SandboxHost
from k3rl.types import decode, encode
from tests.sandboxes.sandbox_helpers import ANY, eventually, opened, scratch_of, sh, survivors

pytestmark = pytest.mark.sandbox


@asynccontextmanager
async def served(folder: Path, lease_s: float = 60.0):
    async with opened("bwrap", folder) as backend:
        host = SandboxHost(backend, lease_s)
        try:
            yield host
        finally:
            await host.aclose()


class Line:
    """A client's connection to a host in this process, which can be cut."""

    def __init__(self, host: SandboxHost, name: str) -> None:
        self.host, self.name, self.is_cut = host, name, False

    async def send(self, method: str, arguments: list[bytes]) -> bytes:
        assert all(type(each) is bytes for each in arguments)
        if self.is_cut:
            raise SandboxLost("the line is cut")
        # In a task: who cancels a call here does not reach what the host does about it.
        return await asyncio.shield(
            asyncio.ensure_future(self.host.call(self.name, method, arguments))
        )


def num_workspaces(folder: Path) -> int:
    return len(list(scratch_of(folder).glob("owner-*/*/upper")))


def test_errors_arrive_as_what_they_were(tmp_path):
    async def main():
        async with served(tmp_path) as host:
            remote = RemoteBackend(Line(host, "a").send)
            box = await remote.create(ANY, {"a": b"x" * 100})
            snapshot = await remote.snapshot(box, {})
            blob = host.backend.blobs.path(snapshot.layers[0])
            blob.write_bytes(b"damage")
            deep = await remote.create(ANY)
            await sh(remote, deep, "for i in $(seq 250); do mkdir d && cd d || exit 1; done")
            cases = [
                (UserInputError, remote.get(box, "absent"), "no such file"),
                (CapabilityMissing, remote.create(replace(ANY, executables=("nope",))), "nope"),
                (CorruptData, remote.restore(ANY, snapshot), str(blob)),
                (UncapturableTree, remote.tree_digest(deep), "deeper than 200"),
                (SandboxLost, remote.get("nobody", "a"), "nobody is gone"),
                (UserInputError, run(remote, box, ExecRequest(("",))), "needs a program"),
                (SandboxLost, run(remote, "nobody", ExecRequest(("true",))), "nobody is gone"),
                (UserInputError, anext(remote.get_tree(box, "absent")), "no such folder"),
            ]
            for kind, call, text in cases:
                with pytest.raises(kind, match=text) as caught:
                    await call
                assert type(caught.value) is kind
            await remote.aclose()
            await remote.aclose()
            with pytest.raises(SandboxError, match="closed"):
                await remote.create(ANY)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("no_such_method", []),
        ("_check", []),
        ("__init__", []),
        ("create", []),
        ("close", [b""]),
        ("close", [b"\xff" * 8]),
        ("put", [encode("x"), encode("y"), encode(3), encode(4)]),
        ("begin", [encode("s"), encode("no_such_method"), encode([], list[bytes])]),
        ("begin", [encode("s"), encode("exec"), encode([b"?"], list[bytes])]),
        ("begin", [encode("s"), encode("aclose"), encode([], list[bytes])]),
        ("exec", [encode("x"), encode(ExecRequest(("true",)))]),
    ],
)
def test_a_call_that_makes_no_sense_is_refused(method, arguments, tmp_path):
    async def main():
        async with served(tmp_path) as host:
            reply = await host.call("a", method, arguments)
            with pytest.raises(UserInputError):
                proxy.result(reply)
            fine = await host.call("a", "renew", [])
            assert decode(float, proxy.result(fine)) == 60.0

    asyncio.run(main())


FLOOD = """
import os
for _ in range(5000):
    os.write(1, bytes(65536))
    with open("count", "ab") as file:
        file.write(b"x")
"""


def test_a_slow_reader_slows_the_command(tmp_path):
    async def main():
        async with served(tmp_path) as host:
            remote = RemoteBackend(Line(host, "a").send)
            box = await remote.create(ANY)
            request = ExecRequest(("python3", "-c", FLOOD), deadline_s=60)
            async with aclosing(remote.exec(box, request)) as events:
                await anext(events)
                await asyncio.sleep(1)
            slow = len(await remote.get(box, "count"))
            assert 0 < slow < 24
            async with aclosing(remote.exec(box, request)) as events:
                for _ in range(200):
                    await anext(events)
            assert len(await remote.get(box, "count")) - slow > 50, "this reader is slow too"
            await remote.aclose()

    asyncio.run(main())


BEAT = "while :; do echo x >> beat; echo x; sleep 0.02; done"


def test_a_consumer_that_goes_away_ends_the_command(tmp_path):
    async def main():
        async with served(tmp_path) as host:
            remote = RemoteBackend(Line(host, "a").send)
            box = await remote.create(ANY)
            request = ExecRequest(("sh", "-c", BEAT), deadline_s=60)
            for way in ("cancel", "cancel at once", "break", "close"):
                if way.startswith("cancel"):
                    running = asyncio.create_task(run(remote, box, request))
                    await asyncio.sleep(0.3 if way == "cancel" else 0)
                    running.cancel()
                    await asyncio.sleep(0)
                    running.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await running
                else:
                    events = remote.exec(box, request)
                    async for _ in events:
                        break
                    if way == "close":
                        await events.aclose()
                    del events
                answer = await asyncio.wait_for(sh(remote, box, "wc -c < beat || :; sleep 0.1"), 5)
                assert (await sh(remote, box, "wc -c < beat || :")).stdout == answer.stdout
            await remote.aclose()

    asyncio.run(main())


def test_a_client_that_is_not_heard_of_loses_its_sandboxes_and_no_other_does(tmp_path):
    async def main():
        async with served(tmp_path, lease_s=1.5) as host:
            line = Line(host, "dead")
            dead, living = RemoteBackend(line.send), RemoteBackend(Line(host, "living").send)
            lost, kept = await dead.create(ANY), await living.create(ANY, {"a": b"kept"})
            running = asyncio.create_task(sh(dead, lost, BEAT, deadline_s=60))
            await sh(living, kept, "true")
            await asyncio.sleep(3)
            assert not running.done(), "a client that lives is heard of"
            assert num_workspaces(tmp_path) == 2
            line.is_cut = True
            with pytest.raises(SandboxLost, match="cut"):
                await running
            await eventually(lambda: num_workspaces(tmp_path) == 1)
            assert await living.get(kept, "a") == b"kept"
            line.is_cut = False
            with pytest.raises(SandboxLost, match=lost):
                await dead.get(lost, "a")
            again = await dead.create(ANY)
            await asyncio.sleep(3)
            assert (await sh(dead, again, "echo renewed")).stdout == b"renewed\n"
            await dead.aclose()
            await living.aclose()

    asyncio.run(main())


def test_clients_are_apart_but_for_what_they_saved(tmp_path):
    async def main():
        async with served(tmp_path) as host:
            one, two = (RemoteBackend(Line(host, name).send) for name in ("one", "two"))
            box = await one.create(ANY, {"a": b"x"})
            (twin,) = await one.fork(box, 1)
            for id in (box, twin):
                for call in (two.get(id, "a"), two.pause(id), sh(two, id, "true"), two.fork(id, 1)):
                    with pytest.raises(SandboxLost, match=id):
                        await call
                await two.close(id)
            snapshot = await one.snapshot(twin, {})
            mine = await two.restore(ANY, snapshot)
            assert await two.get(mine, "a") == b"x"
            assert num_workspaces(tmp_path) == 3
            await one.aclose()
            assert num_workspaces(tmp_path) == 1
            assert await two.get(mine, "a") == b"x"
            await two.close(mine)
            assert num_workspaces(tmp_path) == 0
            await two.aclose()

    asyncio.run(main())


def test_a_sandbox_that_is_made_for_a_client_who_leaves_is_closed(tmp_path):
    async def main():
        async with served(tmp_path) as host:
            remote = RemoteBackend(Line(host, "a").send)
            kept = await remote.create(ANY)
            making = [asyncio.create_task(remote.create(ANY)) for _ in range(4)]
            await asyncio.sleep(0.005)
            await remote.aclose()
            for made in await asyncio.gather(*making, return_exceptions=True):
                assert isinstance(made, str | SandboxError)
            assert num_workspaces(tmp_path) == 0
            with pytest.raises(SandboxLost):
                await host.backend.get(kept, "a")

    asyncio.run(main())


def test_every_error_of_ours_can_travel():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    for kind in kinds:
        arguments = ("f", 1, "x", "y") if kind is CorruptData else ("what went wrong",)
        with pytest.raises(kind, match=r"x|wrong") as caught:
            proxy.result(proxy.failure(kind(*arguments)))
        assert type(caught.value) is kind


class Client:
    """A process of its own with a sandbox at a host and a command in it."""

    def __init__(self, host: ray.actor.ActorHandle) -> None:
        self._host = host

    async def work(self) -> str:
        backend = sandbox_proxy(self._host)
        box = await backend.create(ANY)
        self._running = asyncio.create_task(sh(backend, box, BEAT, deadline_s=100))
        await asyncio.sleep(0.5)
        assert not self._running.done()
        return box

    async def pid(self) -> int:
        return os.getpid()


@pytest.mark.ray
@pytest.mark.usefixtures("sandbox_hosts")
def test_a_killed_client_leaves_nothing_at_the_host(tmp_path):
    async def main():
        host = start_sandbox_host("bwrap", tmp_path / "blobs", tmp_path / "scratch", lease_s=1.0)
        backend = sandbox_proxy(host)
        box = await backend.create(ANY, {"a": b"kept"})
        client = ray.remote(Client).options(num_cpus=0).remote(host)
        await client.work.remote()
        assert survivors(scratch_of(tmp_path))
        assert num_workspaces(tmp_path) == 2
        os.kill(await pid_of(client), signal.SIGKILL)
        await eventually(lambda: num_workspaces(tmp_path) == 1)
        assert survivors(scratch_of(tmp_path)) == []
        assert await backend.get(box, "a") == b"kept"
        await backend.aclose()
        await host.aclose.remote()
        assert list(scratch_of(tmp_path).glob("owner-*")) == []
        ray.kill(host)

    asyncio.run(main())


@pytest.mark.ray
@pytest.mark.usefixtures("sandbox_hosts")
def test_a_killed_host_loses_its_sandboxes_for_its_clients(tmp_path):
    async def main():
        host = start_sandbox_host("bwrap", tmp_path / "blobs", tmp_path / "scratch")
        backend = sandbox_proxy(host)
        assert isinstance(backend, SandboxBackend)
        box = await backend.create(ANY)
        request = ExecRequest(("sh", "-c", "echo up; sleep 100"), deadline_s=100)
        events = backend.exec(box, request)
        assert isinstance(await anext(events), OutputChunk)
        os.kill(await pid_of(host), signal.SIGKILL)
        with pytest.raises(SandboxLost, match="sandbox host"):
            await anext(events)
        for call in (backend.get(box, "a"), backend.create(ANY), sh(backend, box, "true")):
            with pytest.raises(SandboxLost):
                await call
        await backend.aclose()
        await eventually(lambda: survivors(scratch_of(tmp_path)) == [])

    asyncio.run(main())


@pytest.mark.ray
@pytest.mark.usefixtures("sandbox_hosts")
def test_a_host_that_cannot_open_its_backend_says_why(tmp_path):
    async def main():
        for kind, error in (("nope", UserInputError), ("process", CapabilityMissing)):
            host = start_sandbox_host(kind, tmp_path / "blobs", tmp_path / "scratch")
            with pytest.raises(error, match=kind):
                await sandbox_proxy(host).capabilities()
            ray.kill(host)

    asyncio.run(main())
