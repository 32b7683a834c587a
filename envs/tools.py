"""Tools are typed async Python functions; a bad call is answered to the policy, never raised.

`Tool.of` reads the declaration off the function: its name, the first line of its docstring, and
its parameters (see `typed`; one with a default may be left out). `check_call` says what
is wrong with a call; `run_call` carries out a good one. Only a failure of the infrastructure
(`SandboxError`) or a bug in the tool itself leaves `run_call` as an exception.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from k3rl.envs.typed import SCALARS, BadArguments, Parse, parameters_of
from k3rl.envs.words import echo, nearest
from k3rl.errors import EnvError
from k3rl.sandboxes.base import ExecRequest, ExecResult, Sandbox, run
from k3rl.types import (
    JSON,
    JsonObject,
    ToolCall,
    ToolRecord,
    ToolResult,
    ToolSpec,
    ToolStatus,
    digest_bytes,
)

RECORD_BYTES = 4096
"""Most bytes of an output that a ToolRecord keeps; its digest covers all of them."""
SHOWN_BYTES = 2048
"""Most bytes per stream of a sandboxed command that the policy reads."""
SCALAR_KINDS = frozenset(SCALARS.values())


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """What a tool function returns when a plain str (status ok) is not enough."""

    content: str
    status: ToolStatus = ToolStatus.OK


ToolFunction = Callable[..., Awaitable[str | ToolOutput]]


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool ready to be called."""

    spec: ToolSpec
    function: ToolFunction
    deadline_s: float | None = None
    """After it the function is cancelled and the policy reads a timeout. None: the function
    bounds itself, as those do that give a sandboxed command its own deadline."""
    parse: Parse | None = None
    """Turns arguments into what the function takes, or raises BadArguments. None: as they are."""

    @classmethod
    def of(cls, function: ToolFunction, deadline_s: float | None = None) -> Tool:
        """Declare `function` as a tool. Raises EnvError when its signature cannot be declared."""
        method = getattr(function, "__func__", None)
        spec, parse = _declare(function) if method is None else _declare_method(method)
        return cls(spec, function, deadline_s, parse)


@cache
def _declare_method(function: ToolFunction) -> tuple[ToolSpec, Parse | None]:
    """Once per class: every session of an environment declares the same methods."""
    return _declare(function, num_bound=1)


def _declare(function: ToolFunction, num_bound: int = 0) -> tuple[ToolSpec, Parse | None]:
    """The declaration of a function whose first `num_bound` parameters are given already."""
    name = getattr(function, "__name__", repr(function))
    schema, parse = parameters_of(function, num_bound)
    description = (inspect.getdoc(function) or "").partition("\n")[0].removesuffix(".")
    if not description:
        raise EnvError(f"tool {name}: its docstring is its description and must not be empty")
    return ToolSpec(name, description, schema), parse


def check_call(tools: Mapping[str, Tool], call: ToolCall) -> str | None:
    """What is wrong with a call, in one line for the policy; None when it may run."""
    tool = tools.get(call.tool)
    if tool is None:
        return f"error: no tool {echo(call.tool)}, nearest is {nearest(call.tool, tools)}"
    if call.raw is not None:
        return f"error: {call.tool}: arguments are not JSON"
    try:
        return _check_arguments(tool, call)
    except (ArithmeticError, RecursionError, ValueError):
        return f"error: {call.tool}: arguments that cannot be read"


def _check_arguments(tool: Tool, call: ToolCall) -> str | None:
    schema = tool.spec.parameters
    known = schema.get("properties", {})
    is_open = schema.get("additionalProperties", False) is not False
    for name in schema.get("required", ()):
        if name not in call.arguments:
            return f"error: {call.tool}: missing argument {name}"
    for name, value in call.arguments.items():
        if name not in known and not is_open:
            close = f", nearest is {nearest(name, known)}" if known else ""
            return f"error: {call.tool}: unknown argument {echo(name)}{close}"
        problem = _check_value(value, known.get(name, {}))
        if problem is not None:
            return f"error: {call.tool}: {echo(name)} must be {problem}"
    try:
        _parsed(tool, call)
    except BadArguments as error:
        return f"error: {call.tool}: {error}"
    return None


def _parsed(tool: Tool, call: ToolCall) -> JsonObject:
    return call.arguments if tool.parse is None else tool.parse(call.arguments)


def _check_value(value: JSON, schema: JSON) -> str | None:
    """What a plain value must be; of anything else `Tool.parse` knows more."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if not isinstance(kind, str) or kind not in SCALAR_KINDS:
        return None
    if kind == "string":
        if not isinstance(value, str):
            return "a string"
        return None if value.isascii() or _is_unicode(value) else "valid Unicode"
    if kind == "boolean":
        return None if isinstance(value, bool) else "a boolean"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "an integer" if kind == "integer" else "a number"
    if kind == "integer":
        return None if isinstance(value, int) else "an integer"
    return None if _is_finite(value) else "a finite number"


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _is_unicode(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


async def run_call(
    tool: Tool, call: ToolCall, normalise: Callable[[str], str] = str
) -> tuple[ToolResult, ToolRecord]:
    """Carry out a call that `check_call` passed; `normalise` changes its output before it is read.

    Raises SandboxError on infrastructure failure.
    """
    start = time.perf_counter()
    limit = asyncio.timeout(tool.deadline_s)
    try:
        async with limit:
            output = await tool.function(**_parsed(tool, call))
    except TimeoutError:
        if not limit.expired():
            raise
        output = _timeout(tool.deadline_s or 0.0)
    if isinstance(output, str):
        output = ToolOutput(output)
    output = replace(output, content=normalise(output.content))
    return answer(call, output, time.perf_counter() - start)


def answer(
    call: ToolCall, output: ToolOutput, wall_s: float = 0.0
) -> tuple[ToolResult, ToolRecord]:
    """The result that the policy reads and the record that replay compares."""
    data = output.content.encode(errors="replace")
    kept = data[:RECORD_BYTES].decode(errors="ignore")
    result = ToolResult(call.tool, call.index, data.decode(), output.status)
    return result, ToolRecord(call, output.status, kept, digest_bytes(data), wall_s)


def _timeout(deadline_s: float) -> ToolOutput:
    return ToolOutput(f"timeout after {deadline_s:g} s", ToolStatus.TIMEOUT)


async def run_command(
    sandbox: Sandbox, *argv: str, stdin: bytes = b"", deadline_s: float = 5.0
) -> ExecResult:
    """Run a command for a tool, its output bounded to what a policy may read."""
    request = ExecRequest(argv, stdin, deadline_s, max_output_bytes=SHOWN_BYTES)
    return await run(sandbox.backend, sandbox.id, request)


def command_output(result: ExecResult, deadline_s: float = 5.0) -> ToolOutput:
    """A finished command as a tool's output: stdout, then stderr if it failed.

    What a command printed before its deadline depends on the machine's speed, so a timeout shows
    nothing of it: replay stays exact.
    """
    if result.timed_out:
        return _timeout(deadline_s)
    failed = result.exit_code != 0
    text = (result.stdout + (result.stderr if failed else b"")).decode(errors="replace")
    text = text.rstrip("\n") or (f"exit status {result.exit_code}" if failed else "(no output)")
    return ToolOutput(text, ToolStatus.ERROR if failed else ToolStatus.OK)
