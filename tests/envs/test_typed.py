"""Parameters of any type: schemas, conversion, one-line errors, samples, and the turn format."""

import asyncio
import json
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Literal

import jsonschema
import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from k3rl.envs.spaces import MessageSpace
from k3rl.envs.tools import Tool, check_call, run_call
from k3rl.errors import EnvError
from k3rl.rollout.renderer import Renderer
from k3rl.rollout.tokenizer import NanoTokenizer
from k3rl.types import Message, ToolCall, ToolStatus


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Point:
    x: int
    y: int = 0


class Size(TypedDict):
    width: float


class Style(BaseModel):
    colour: Colour
    title: str = ""


async def draw(
    points: list[Point],
    style: Style,
    mode: Annotated[Literal["fill", "line"], "How to draw."],
    size: Size | None = None,
    tags: dict[str, int] | None = None,
    width: Annotated[int, Field(ge=1, description="In pixels.")] = 1,
    name: int | str = 0,
) -> str:
    """Draw."""
    assert all(isinstance(point, Point) for point in points)
    assert isinstance(style, Style)
    return f"{sum(p.x + p.y for p in points)} {style.colour.name} {mode} {size} {tags} {width}"


TOOLS = {"draw": Tool.of(draw)}
GOOD = {"points": [{"x": 1}, {"x": 2, "y": 3}], "style": {"colour": "red"}, "mode": "fill"}


def test_schema_is_json_schema_and_has_the_descriptions():
    schema = TOOLS["draw"].spec.parameters
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["required"] == ["points", "style", "mode"]
    assert schema["properties"]["mode"]["description"] == "How to draw."
    assert schema["properties"]["mode"]["enum"] == ["fill", "line"]
    assert schema["properties"]["width"]["description"] == "In pixels."
    assert "title" in schema["$defs"]["Style"]["properties"], "a field of that name stays"
    assert "title" not in schema["$defs"]["Style"]
    assert json.loads(json.dumps(schema)) == schema


def test_good_arguments_arrive_as_their_types():
    call = ToolCall("draw", {**GOOD, "size": {"width": 2}, "tags": {"a": 1}}, 1)
    assert check_call(TOOLS, call) is None
    result, record = asyncio.run(run_call(TOOLS["draw"], call))
    assert result.status is ToolStatus.OK
    assert result.content == "6 RED fill {'width': 2.0} {'a': 1} 1"
    assert record.call.arguments["points"] == GOOD["points"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"points": "x"}, "points must be a list"),
        ({"points": [{"x": "1"}]}, "points[0].x must be an integer"),
        ({"points": [{"x": 1}, {}]}, "missing argument points[1].x"),
        ({"points": [{"x": 1, "z": 1}]}, "unknown argument points[0].z"),
        ({"style": {"colour": "green"}}, "style.colour must be one of 'red' or 'blue'"),
        ({"style": []}, "style must be an object"),
        ({"mode": "dots"}, "mode must be one of 'fill' or 'line'"),
        ({"mode": 3}, "mode must be a string"),
        ({"size": {"width": True}}, "size.width must be a number"),
        ({"size": 3}, "size must be an object"),
        ({"tags": {"a": "b"}}, "tags.a must be an integer"),
        ({"width": 0}, "width must be greater than or equal to 1"),
        ({"width": 1.0}, "width must be an integer"),
        ({"name": []}, "name must be an integer or a string"),
        ({"size": {"width": float("inf")}}, "every number must be a finite number"),
        ({"style": {"colour": "red", "title": "\ud800"}}, "every text must be valid Unicode"),
        ({"colour": "red"}, "unknown argument colour, nearest is "),
    ],
)
def test_bad_arguments_are_named_in_one_line(change, problem):
    found = check_call(TOOLS, ToolCall("draw", {**GOOD, **change}, 1))
    assert found is not None
    assert found.startswith(f"error: draw: {problem}")
    assert "\n" not in found


def test_a_list_of_strings_may_stand_alone():
    async def tag(names: list[str]) -> str:
        """Tag."""
        return ",".join(names)

    tool = Tool.of(tag)
    assert tool.spec.parameters["properties"]["names"] == {
        "type": "array",
        "items": {"type": "string"},
    }
    call = ToolCall("tag", {"names": ["a", "b"]}, 1)
    assert asyncio.run(run_call(tool, call))[0].content == "a,b"


def test_a_described_scalar_keeps_the_words_of_plain_ones():
    async def go(to: Annotated[str, "Where to."]) -> str:
        """Go."""
        return to

    tool = Tool.of(go)
    assert tool.spec.parameters["properties"]["to"]["description"] == "Where to."
    assert (
        check_call({"go": tool}, ToolCall("go", {"to": 1}, 1)) == "error: go: to must be a string"
    )


def test_a_type_that_json_cannot_carry_is_refused():
    async def call(back: EnvError) -> str:
        """Call."""

    with pytest.raises(EnvError, match="call"):
        Tool.of(call)


def test_samples_fit_and_survive_the_turn_format():
    space = MessageSpace(tools=(TOOLS["draw"].spec,), seed=3)
    renderer = Renderer(NanoTokenizer.shipped())
    validator = jsonschema.Draft202012Validator(TOOLS["draw"].spec.parameters)
    num_calls = 0
    for message in (space.sample() for _ in range(80)):
        assert message in space
        for call in message.tool_calls:
            num_calls += 1
            validator.validate(call.arguments)
            assert check_call(TOOLS, call) is None
            turn = Message("assistant", tool_calls=(call,))
            (read,) = renderer.parse_turn(renderer.assistant_ids(turn)).tool_calls
            assert read.arguments == call.arguments
            assert check_call(TOOLS, read) is None
    assert num_calls > 40


async def wait(seconds: Annotated[float, "How long."], note: Annotated[str, Field(pattern="^a")]):
    """Wait."""
    return ""


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"seconds": 10**400, "note": "a"}, "wait: seconds must be a finite number"),
        ({"seconds": 1.0, "note": "b"}, "wait: note: String should match"),
        ({"seconds": 1.0, "note": "a", "x\ny": 1}, "wait: unknown argument x\\ny, nearest"),
    ],
)
def test_hostile_arguments_are_answered_in_one_line(arguments, problem):
    tool = Tool.of(wait)
    said = check_call({"wait": tool}, ToolCall("wait", arguments, 1))
    assert problem in said
    assert "\n" not in said


def test_arguments_too_deep_to_read_are_answered():
    deep = []
    for _ in range(300):
        deep = [deep]

    async def take(items: list[list]):
        """Take."""
        return ""

    said = check_call({"take": Tool.of(take)}, ToolCall("take", {"items": deep}, 1))
    assert said.startswith("error: take: ")


def test_samples_are_within_open_bounds_and_multiples():
    async def act(
        small: Annotated[float, Field(gt=0, lt=1e-3)],
        step: Annotated[int, Field(multiple_of=7, ge=1, lt=50)],
        part: Annotated[float, Field(multiple_of=0.25, gt=-1, le=2)],
    ):
        """Act."""
        return ""

    tool = Tool.of(act)
    space = MessageSpace(("assistant",), (tool.spec,), seed=0)
    made = [message for message in (space.sample() for _ in range(200)) if message.tool_calls]
    assert len(made) > 100
    for message in made:
        assert check_call({"act": tool}, message.tool_calls[0]) is None
