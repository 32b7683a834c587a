"""MCP servers as tools: real ones, and each way in which one can be broken."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from k3rl.blobs import BlobStore
from k3rl.envs.base import EnvSpec, Observation
from k3rl.envs.mcp import McpServer, McpSession, ServerSpec, _unusable, discover
from k3rl.envs.play import play
from k3rl.envs.sessions import Job, SessionPool
from k3rl.envs.tools import Tool
from k3rl.errors import EnvError, SandboxError
from k3rl.sandboxes.factory import open_backend
from k3rl.types import Message, OutcomeKind, Task, ToolCall

SCRIPT = str(Path(__file__).with_name("mcp_server.py"))


def spec_of(kind, start_s=30.0, call_s=20.0):
    return ServerSpec(kind, (sys.executable, SCRIPT, kind), start_s=start_s, call_s=call_s)


GOOD = spec_of("good")


class Office(McpSession):
    servers = (GOOD,)

    def own_tools(self):
        return (Tool.of(self.submit),)

    def task(self, split, index):
        return Task("test/Office-v0", index, split)

    def files(self, task):
        return {}

    def observe(self, task):
        return Observation((Message("user", "work"),))

    def is_correct(self, task, answer):
        return answer == "3"

    async def submit(self, value: str):
        """Submit."""
        self.finish(value)
        return ""


SPEC = EnvSpec("test/Office-v0", "tests.envs.test_mcp:Office")


def calls(*said):
    """A policy that makes these calls in order, then submits the last result."""

    def policy(task, transcript, rng):
        turn = sum(message.role == "assistant" for message in transcript)
        tool, arguments = said[turn] if turn < len(said) else ("submit", {"value": "3"})
        return Message("assistant", tool_calls=(ToolCall(tool, arguments, 1),))

    return policy


def played(tmp_path, *said, env=Office):
    async def main():
        backend = open_backend("bwrap", BlobStore(tmp_path / "blobs"), tmp_path / "scratch", False)
        try:
            pool = SessionPool(backend, max_retries=0)
            task = env(SPEC).task("train", 0)
            return await pool.play(Job(task, calls(*said), lambda: env(SPEC)))
        finally:
            await backend.aclose()

    return asyncio.run(main())


def is_alive(pid):
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_gone(pids, within_s=10.0):
    end = time.monotonic() + within_s
    while time.monotonic() < end and any(map(is_alive, pids)):
        time.sleep(0.02)
    return not any(map(is_alive, pids))


@pytest.mark.sandbox
def test_a_session_mixes_its_own_tools_with_those_of_a_server(tmp_path):
    env = Office(SPEC)
    assert [tool.name for tool in env.tools][:3] == ["submit", "add", "fail"]
    assert env.tools[1].description == "Add numbers"
    result = played(
        tmp_path,
        ("add", {"a": 1, "b": 2}),
        ("add", {"a": "x"}),
        ("add", {"b": 1}),
        ("add", {"a": 1, "aa": 1}),
        ("tags", {"names": ["a", 1]}),
        ("tags", {"names": ["a", "b"], "limits": {"a": 1}}),
        ("fail", {"reason": "too late"}),
        ("long", {}),
        ("pid", {}),
    )
    assert result.outcome.reward == 1.0
    said = [m.content for m in result.played.transcript if m.role == "tool"]
    assert said[:4] == [
        "3",
        "error: add: a must be an integer",
        "error: add: missing argument a",
        "error: add: unknown argument aa, nearest is a",
    ]
    assert said[4].startswith("error: tags: names[1]: 1 is not of type 'string'")
    assert said[5] == "a,b"
    assert "too late" in said[6]
    assert result.played.records[6].status == "error"
    assert 2000 < len(said[7]) < 2200
    assert all_gone([int(pid) for pid in said[8].split()])


@pytest.mark.sandbox
def test_a_server_that_dies_is_never_a_reward(tmp_path):
    result = played(tmp_path, ("die", {}))
    assert result.outcome.kind is OutcomeKind.INFRA_FAULT
    assert result.outcome.reward is None
    assert "good died in a call of die" in result.outcome.detail


@pytest.mark.sandbox
def test_a_slow_call_is_a_timeout_for_the_policy(tmp_path):
    class Hasty(Office):
        servers = (spec_of("good", call_s=0.5),)

    result = played(tmp_path, ("sleep", {"seconds": 2.0}), env=Hasty)
    (said, *_) = [m.content for m in result.played.transcript if m.role == "tool"]
    assert said == "timeout after 0.5 s"
    assert result.outcome.reward == 1.0


@pytest.mark.parametrize(
    ("spec", "error", "problem"),
    [
        (spec_of("none"), EnvError, "lists no tools"),
        (spec_of("twins"), EnvError, "lists two tools 'same'"),
        (spec_of("garbage", start_s=4.0), EnvError, "prints what is no message"),
        (spec_of("silent", start_s=2.0), SandboxError, "did not start within 2 s"),
        (spec_of("dead"), EnvError, "no licence"),
        (ServerSpec("lost", ("no-such-program",)), EnvError, "no program 'no-such-program'"),
    ],
)
def test_a_broken_server_is_named(spec, error, problem):
    with pytest.raises(error, match=problem):
        discover(spec)


def test_two_tools_of_one_name_are_refused():
    class Doubled(Office):
        def own_tools(self):
            return (Tool.of(self.add),)

        async def add(self, a: int):
            """Add."""

    with pytest.raises(EnvError, match="two tools are named 'add'"):
        Doubled(SPEC)


def test_started_by_one_task_and_closed_by_another():
    async def main():
        server = McpServer(GOOD)
        await asyncio.create_task(server.start())
        pids = (await asyncio.create_task(server.call("pid", {}))).content
        await asyncio.create_task(server.close())
        await server.close()
        with pytest.raises(SandboxError, match="is not running"):
            await server.call("pid", {})
        return pids

    assert all_gone([int(pid) for pid in asyncio.run(main()).split()])


def test_cancelled_while_it_starts_it_leaves_nothing():
    async def main():
        for delay_s in (0.0, 0.05, 0.3):
            server = McpServer(spec_of("silent"))
            starting = asyncio.create_task(server.start())
            await asyncio.sleep(delay_s)
            starting.cancel()
            await asyncio.sleep(0)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            assert server._life is None or server._life.done()

    asyncio.run(main())


KILLED = """
import asyncio, sys
from k3rl.envs.mcp import McpServer, ServerSpec
async def main():
    server = McpServer(ServerSpec("good", (sys.executable, sys.argv[1], "good")))
    await server.start()
    print((await server.call("pid", {})).content, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_killed_we_leave_no_server_and_nothing_of_it():
    ours = subprocess.Popen(
        [sys.executable, "-c", KILLED, SCRIPT], stdout=subprocess.PIPE, text=True
    )
    try:
        assert ours.stdout is not None
        pids = [int(pid) for pid in ours.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_alive, pids))
    finally:
        os.kill(ours.pid, signal.SIGKILL)
        ours.wait()
    assert all_gone(pids)


def test_play_closes_the_servers_of_a_session_that_fails(tmp_path):
    running = []

    class Noted(Office):
        async def open(self, task, sandbox, state=None):
            await super().open(task, sandbox, state)
            running.extend((await self._running["good"].call("pid", {})).content.split())
            raise KeyError("after the servers have started")

    async def main():
        backend = open_backend("bwrap", BlobStore(tmp_path / "blobs"), tmp_path / "scratch", False)
        try:
            env = Noted(SPEC)
            with pytest.raises(EnvError, match="after the servers"):
                await play(env, env.task("train", 0), calls(), backend)
        finally:
            await backend.aclose()

    asyncio.run(main())
    assert len(running) == 2
    assert all_gone(list(map(int, running)))


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "[bad"}}}, "pattern"),
        ({"patternProperties": {"(": {}}}, "pattern"),
        ({"properties": {"a": {"$ref": "http://elsewhere/x"}}}, "leads to nothing"),
        ({"items": [{"$ref": "#/$defs/none"}], "$defs": {}}, "leads to nothing"),
        ({"properties": {"pattern": {"type": "string"}, "a": {"$ref": "#/$defs/b"}},
          "$defs": {"b": {"pattern": "^x"}}}, ""),
    ],
)  # fmt: skip
def test_a_schema_that_would_fail_at_a_call_is_found_when_it_is_declared(schema, problem):
    found = _unusable(schema, schema)
    assert (problem in found) if problem else found == ""
