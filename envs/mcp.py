"""Tools of MCP servers: processes of the host that speak over stdio, one set per session.

The tools of a server are discovered once per process, by a short run of it, because a session
declares its tools before it is opened; a session whose own server lists others is an EnvError.
A server runs on the host and never in the sandbox: a command there has no interactive input. So
only servers that may be trusted with the host belong here, and their state is no part of a
snapshot: a resumed session has fresh ones. They never outlive this process (see `mcp_guard`).

Needs the extra `mcp`.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

from k3rl.envs.base import Observation
from k3rl.envs.session import ToolSession
from k3rl.envs.tools import SHOWN_BYTES, Tool, ToolOutput
from k3rl.envs.typed import BadArguments
from k3rl.envs.words import echo
from k3rl.errors import EnvError, K3rlError, SandboxError
from k3rl.sandboxes.base import Sandbox
from k3rl.sandboxes.blocking import unbroken
from k3rl.types import JsonObject, Task, ToolSpec, ToolStatus, canonical_json

GUARD = Path(__file__).with_name("mcp_guard.py")
LAST_WORDS = 200
"""Characters of a server's stderr that an error repeats."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """How to run one server."""

    name: str
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    """On top of HOME, LOGNAME, PATH, SHELL, TERM and USER."""
    start_s: float = 30.0
    """For its start, handshake and listing."""
    call_s: float = 60.0
    """For a call; after it the policy reads a timeout."""


class McpServer:
    """One running server. `start`, then calls from any task of the same loop, then `close`."""

    def __init__(self, spec: ServerSpec) -> None:
        """Starts nothing yet."""
        self.spec = spec
        self.tools: tuple[ToolSpec, ...] = ()
        self._session: Any = None
        self._scope: Any = None
        self._life: asyncio.Task[None] | None = None
        self._noise = ""

    async def start(self) -> None:
        """Start the server and learn its tools.

        Raises EnvError for a server that is not one, SandboxError for one that is too slow.
        """
        _check_installed()
        if shutil.which(self.spec.command[0]) is None:
            raise EnvError(f"{self._name}: no program {self.spec.command[0]!r} on this machine")
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # What opens a server's scopes must close them: one task lives as long as the server.
        self._life = asyncio.create_task(self._live(ready))
        try:
            await asyncio.shield(ready)
        except BaseException:
            await self.close()
            raise

    async def call(self, tool: str, arguments: JsonObject) -> ToolOutput:
        """Carry out a call. What the server refuses is an answer; its death a SandboxError."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        session = self._session
        if session is None:
            raise SandboxError(f"{self._name} is not running")
        try:
            result = await session.call_tool(tool, arguments)
        except MCPError as error:
            if error.error.code == CONNECTION_CLOSED:
                raise SandboxError(f"{self._name} died in a call of {tool}") from None
            return ToolOutput(f"error: {tool}: {error.error.message}", ToolStatus.ERROR)
        except Exception as error:
            raise SandboxError(f"{self._name}: a call of {tool} failed: {error!r}") from error
        status = ToolStatus.ERROR if result.is_error else ToolStatus.OK
        return ToolOutput(_shown(_text(result)), status)

    async def close(self) -> None:
        """End the server and what it started. Closing twice is fine."""
        if self._life is not None:
            if self._scope is not None:
                self._scope.cancel()
            await unbroken(_ended(self._life))

    @property
    def _name(self) -> str:
        return f"MCP server {self.spec.name}"

    async def _live(self, ready: asyncio.Future[None]) -> None:
        import anyio
        from mcp import ClientSession, StdioServerParameters
        from mcp.client.stdio import stdio_client

        args = ["-I", "-S", str(GUARD), str(os.getpid()), *self.spec.command]
        environment = dict(self.spec.environment)
        how = StdioServerParameters(command=sys.executable, args=args, env=environment)
        error: K3rlError = SandboxError(f"{self._name}: no file for what it says")
        with _settled(ready, lambda: error), tempfile.TemporaryFile("w+", errors="replace") as said:
            try:
                with anyio.CancelScope() as self._scope:
                    async with (
                        stdio_client(how, said) as (reading, writing),
                        ClientSession(reading, writing, message_handler=self._hear) as session,
                    ):
                        with anyio.fail_after(self.spec.start_s):
                            await self._learn(session)
                        self._session = session
                        if not ready.done():
                            ready.set_result(None)
                        await anyio.sleep_forever()
                error = SandboxError(f"{self._name} was closed")
            except Exception as failure:
                error = self._typed(failure, said)
            finally:
                self._session = None

    async def _learn(self, session: Any) -> None:
        from mcp_types import PaginatedRequestParams

        await session.initialize()
        found = await session.list_tools()
        tools = list(found.tools)
        while found.next_cursor is not None:
            found = await session.list_tools(
                params=PaginatedRequestParams(cursor=found.next_cursor)
            )
            tools += found.tools
        self.tools = tuple(map(self._declared, tools))
        names = [tool.name for tool in self.tools]
        if twice := [name for name in names if names.count(name) > 1]:
            raise EnvError(f"{self._name} lists two tools {twice[0]!r}")
        if not names:
            raise EnvError(f"{self._name} lists no tools")

    def _declared(self, tool: Any) -> ToolSpec:
        from jsonschema import Draft202012Validator, SchemaError

        try:
            Draft202012Validator.check_schema(tool.input_schema)
        except SchemaError as error:
            problem = error.message
            raise EnvError(f"{self._name}: tool {tool.name}: bad schema: {problem}") from None
        if problem := _unusable(tool.input_schema, tool.input_schema):
            raise EnvError(f"{self._name}: tool {tool.name}: bad schema: {problem}")
        description = (tool.description or tool.name).strip().partition("\n")[0]
        return ToolSpec(tool.name, description.removesuffix("."), tool.input_schema)

    async def _hear(self, message: Any) -> None:
        """Keep what is no message: a server that prints something else says why it is silent."""
        if isinstance(message, Exception) and not self._noise:
            self._noise = str(message).replace("\n", " ")[:LAST_WORDS]

    def _typed(self, failure: Exception, said: IO[str]) -> K3rlError:
        while isinstance(failure, ExceptionGroup):
            failure = failure.exceptions[0]
        if isinstance(failure, K3rlError):
            return failure
        said.seek(0)
        words = " ".join(said.read()[-LAST_WORDS:].split())
        if self._noise:
            return EnvError(f"{self._name} prints what is no message: {self._noise}")
        if isinstance(failure, TimeoutError):
            late = f"did not start within {self.spec.start_s:g} s"
            return SandboxError(f"{self._name} {late}: {words or 'it said nothing'}")
        return EnvError(f"{self._name} cannot be used: {failure!r}: {words or 'it said nothing'}")


@contextmanager
def _settled(ready: asyncio.Future[None], error: Callable[[], K3rlError]) -> Iterator[None]:
    """However a server's life ends, nobody goes on waiting for its start."""
    try:
        yield
    finally:
        if not ready.done():
            ready.set_exception(error())


async def _ended(task: asyncio.Task[None]) -> None:
    await asyncio.wait({task})


class McpSession(ToolSession):
    """A ToolSession with the tools of `servers` behind its own (`own_tools`)."""

    servers: tuple[ServerSpec, ...] = ()
    _running: dict[str, McpServer]

    def own_tools(self) -> Sequence[Tool]:
        """Tools of the environment itself, declared first."""
        return ()

    def make_tools(self) -> Sequence[Tool]:
        """All of them. The first session of a process runs each server once to learn its tools."""
        self._running = {}
        tools = list(self.own_tools())
        for server in self.servers:
            for spec in discover(server):
                function = partial(self._call_server, server.name, spec.name)
                tools.append(Tool(spec, function, server.call_s, _reader(spec)))
        names = [tool.spec.name for tool in tools]
        if twice := [name for name in names if names.count(name) > 1]:
            raise EnvError(f"{self.spec.id}: two tools are named {twice[0]!r}")
        return tools

    async def open(
        self, task: Task, sandbox: Sandbox, state: JsonObject | None = None
    ) -> Observation:
        """As any session, with fresh servers."""
        observation = await super().open(task, sandbox, state)
        for spec in self.servers:
            server = self._running[spec.name] = McpServer(spec)
            await server.start()
            if server.tools != discover(spec):
                raise EnvError(f"MCP server {spec.name} lists other tools than it did before")
        return observation

    async def close(self) -> None:
        """End the servers too. Closing twice is fine."""
        await asyncio.gather(*(server.close() for server in self._running.values()))
        await super().close()

    async def _call_server(self, server: str, tool: str, /, **arguments: Any) -> ToolOutput:
        return await self._running[server].call(tool, arguments)


@cache
def discover(spec: ServerSpec) -> tuple[ToolSpec, ...]:
    """The tools that a server lists, by a short run of it. Blocks; remembered for the process."""
    found: list[tuple[ToolSpec, ...] | BaseException] = []

    async def look() -> None:
        server = McpServer(spec)
        try:
            await server.start()
            found.append(server.tools)
        finally:
            await server.close()

    def run() -> None:
        try:
            asyncio.run(look())
        except BaseException as error:
            found[:] = [error]

    # A thread, for the caller may be inside a loop of its own.
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def _unusable(part: Any, whole: JsonObject) -> str:
    """A pattern that is none, or a reference that leads outside or nowhere; "" without any."""
    if isinstance(part, list):
        return next(filter(None, (_unusable(each, whole) for each in part)), "")
    if not isinstance(part, dict):
        return ""
    patterns = [part["pattern"]] if isinstance(part.get("pattern"), str) else []
    if isinstance(part.get("patternProperties"), dict):
        patterns += part["patternProperties"]
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            return f"pattern {pattern!r}: {error}"
    reference = part.get("$ref")
    if isinstance(reference, str) and not _leads_somewhere(reference, whole):
        return f"$ref {reference!r} leads to nothing inside it"
    return next(filter(None, (_unusable(each, whole) for each in part.values())), "")


def _leads_somewhere(reference: str, whole: JsonObject) -> bool:
    here: Any = whole
    start, *steps = reference.split("/")
    for step in steps:
        key = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(here, dict) or key not in here:
            return False
        here = here[key]
    return start == "#"


def _reader(spec: ToolSpec) -> Any:
    """Checks arguments by the server's schema; references lead nowhere outside of it."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match
    from referencing import Registry

    validator = Draft202012Validator(spec.parameters, registry=Registry())

    def parse(arguments: JsonObject) -> JsonObject:
        try:
            canonical_json(arguments)
        except ValueError:
            raise BadArguments("every text must be valid Unicode, every number finite") from None
        try:
            error = best_match(validator.iter_errors(arguments))
        except (ArithmeticError, RecursionError):
            raise BadArguments("arguments that cannot be read") from None
        if error is not None:
            place = error.json_path.removeprefix("$").removeprefix(".")
            said = " ".join(error.message.split())
            raise BadArguments(f"{echo(place) or 'arguments'}: {echo(said)}")
        return arguments

    return parse


def _text(result: Any) -> str:
    parts = [block.text if block.type == "text" else f"[{block.type}]" for block in result.content]
    if not parts and result.structured_content is not None:
        return canonical_json(result.structured_content).decode()
    return "\n".join(parts) or "(no output)"


def _shown(text: str) -> str:
    """Head and tail of what is longer than a command may show."""
    half = SHOWN_BYTES // 2
    dropped = len(text) - 2 * half
    return text if dropped <= 0 else f"{text[:half]}\n[... {dropped} dropped ...]\n{text[-half:]}"


def _check_installed() -> None:
    try:
        import mcp  # noqa: F401
    except ImportError:
        raise EnvError("MCP servers need the package mcp: pip install 'k3rl[mcp]'") from None
