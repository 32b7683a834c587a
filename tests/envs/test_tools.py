"""Tools: declarations, validation, timeouts, records."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3rl.envs import registry
from k3rl.envs.tools import Tool, ToolOutput, check_call, command_output, run_call
from k3rl.envs.words import nearest
from k3rl.errors import EnvError, SandboxLost
from k3rl.sandboxes.base import ExecResult
from k3rl.types import ToolCall, ToolStatus, digest_bytes


async def book(city: str, nights: int, rate: float = 1.5, is_smoker: bool = False) -> str:
    """Book a room.

    The policy reads the first line only.
    """
    return f"{city} {nights} {rate} {is_smoker}"


BOOK = {"book": Tool.of(book)}


def test_declaration():
    spec = BOOK["book"].spec
    assert (spec.name, spec.description) == ("book", "Book a room")
    assert spec.parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "nights": {"type": "integer"},
            "rate": {"type": "number"},
            "is_smoker": {"type": "boolean"},
        },
        "required": ["city", "nights"],
    }


async def untyped(path) -> str:
    """Bad."""


async def unread(path: EnvError) -> str:
    """Bad."""


async def variadic(*paths: str) -> str:
    """Bad."""


async def undocumented(path: str) -> str:
    return path


@pytest.mark.parametrize("function", [untyped, unread, variadic, undocumented])
def test_bad_declarations_are_refused(function):
    with pytest.raises(EnvError, match=function.__name__):
        Tool.of(function)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"city": "Oslo", "nights": 2}, None),
        ({"city": "Oslo", "nights": 2, "rate": 3}, None),
        ({"city": "Oslo", "nights": 2, "is_smoker": True}, None),
        ({"city": "Oslo"}, "error: book: missing argument nights"),
        ({"city": "Oslo", "nights": 2, "cty": "x"}, "unknown argument cty, nearest is city"),
        ({"city": 3, "nights": 2}, "city must be a string"),
        ({"city": "\ud800", "nights": 2}, "city must be valid Unicode"),
        ({"city": "Oslo", "nights": "2"}, "nights must be an integer"),
        ({"city": "Oslo", "nights": True}, "nights must be an integer"),
        ({"city": "Oslo", "nights": 2.0}, "nights must be an integer"),
        ({"city": "Oslo", "nights": 2, "rate": "x"}, "rate must be a number"),
        ({"city": "Oslo", "nights": 2, "rate": float("nan")}, "rate must be a finite number"),
        ({"city": "Oslo", "nights": 2, "is_smoker": 1}, "is_smoker must be a boolean"),
        ({"city": None, "nights": 2}, "city must be a string"),
    ],
)
def test_arguments(arguments, problem):
    found = check_call(BOOK, ToolCall("book", arguments, 1))
    assert (found is None) if problem is None else problem in found


def test_unknown_tool_names_the_nearest():
    assert check_call(BOOK, ToolCall("boook", {}, 1)) == "error: no tool boook, nearest is book"
    assert len(check_call(BOOK, ToolCall("x" * 10_000, {}, 1))) < 120


def test_broken_json_is_named():
    assert check_call(BOOK, ToolCall("book", {}, 1, raw="{")).endswith("arguments are not JSON")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.sampled_from(["city", "nights", "rate", "is_smoker"]) | st.text(max_size=8)


@given(tool=st.sampled_from(["book", "bok", ""]), arguments=st.dictionaries(NAMES, JSON_VALUES))
def test_any_call_is_refused_or_runs(tool, arguments):
    call = ToolCall(tool, arguments, 1)
    problem = check_call(BOOK, call)
    if problem is None:
        result, record = asyncio.run(run_call(BOOK["book"], call))
        assert result.status is record.status is ToolStatus.OK
        assert json.dumps(arguments)
    else:
        assert problem.startswith("error:")
        assert "\n" not in problem.replace(tool, "") or any("\n" in name for name in arguments)


def run(function, deadline_s=None, **arguments):
    tool = Tool.of(function, deadline_s)
    return asyncio.run(run_call(tool, ToolCall(tool.spec.name, arguments, 3)))


def test_deadline_is_a_timeout_result():
    async def sleep(seconds: float) -> str:
        """Sleep."""
        await asyncio.sleep(seconds)
        return "done"

    result, record = run(sleep, 0.05, seconds=5.0)
    assert result.status is record.status is ToolStatus.TIMEOUT
    assert result.content == "timeout after 0.05 s"
    assert 0.04 < record.wall_s < 1
    result, _ = run(sleep, 5.0, seconds=0.0)
    assert (result.content, result.status, result.index) == ("done", ToolStatus.OK, 3)


@pytest.mark.parametrize("error", [SandboxLost("gone"), TimeoutError("of another"), KeyError("x")])
def test_failures_that_are_not_the_policys_propagate(error):
    async def fail() -> str:
        """Fail."""
        raise error

    with pytest.raises(type(error)):
        run(fail, 5.0)


def test_record_keeps_4_kib_and_digests_all():
    text = "é" * 5000

    async def long() -> ToolOutput:
        """Talk."""
        return ToolOutput(text, ToolStatus.ERROR)

    result, record = run(long)
    assert result.content == text
    assert record.output == text[:2048]
    assert record.output_digest == digest_bytes(text.encode())
    assert record.status is ToolStatus.ERROR


@pytest.mark.parametrize(
    ("exit_code", "timed_out", "stdout", "stderr", "content", "status"),
    [
        (0, False, b"a\n", b"warning\n", "a", ToolStatus.OK),
        (0, False, b"", b"", "(no output)", ToolStatus.OK),
        (2, False, b"a\n", b"b\n", "a\nb", ToolStatus.ERROR),
        (2, False, b"", b"", "exit status 2", ToolStatus.ERROR),
        (137, False, b"\xff", b"", "\ufffd", ToolStatus.ERROR),
        (None, True, b"half", b"", "timeout after 5 s", ToolStatus.TIMEOUT),
    ],
)
def test_command_output(exit_code, timed_out, stdout, stderr, content, status):
    result = ExecResult(exit_code, timed_out, stdout, stderr, 0, 0.1)
    assert command_output(result) == ToolOutput(content, status)


@pytest.mark.parametrize("env_id", ["k3rl/FileHunt-v0", "k3rl/Reason-v0"])
def test_declarations_are_short(env_id):
    specs = registry.make(env_id).tools
    plain = [{"d": s.description, "n": s.name, "p": s.parameters} for s in specs]
    assert len(json.dumps(plain, separators=(",", ":"))) < 160 * len(specs)
    assert all(len(spec.description) <= 20 for spec in specs)


def test_nearest_of_nothing():
    assert nearest("x", []) is None
