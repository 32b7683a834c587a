"""The parameters of a tool: their JSON Schema, and arguments turned into what the function takes.

Any type that pydantic knows can be a parameter: scalars, Literal and Enum, lists, dicts, unions,
frozen dataclasses, TypedDicts (of typing_extensions), models. `Annotated[T, "text"]` describes one
to the policy, and so does pydantic's Field. Arguments are JSON and are read strictly: no text
becomes a number, and no object may have more keys than its type.
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError
from pydantic_core import ErrorDetails
from typing_extensions import TypedDict

from k3rl.envs.words import echo
from k3rl.errors import EnvError
from k3rl.types import JSON, JsonObject

SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean"}
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
WANTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "a boolean",
    "list_type": "a list",
    "tuple_type": "a list",
    "set_type": "a list",
    "frozen_set_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "dataclass_type": "an object",
    "none_required": "null",
}
"""What a pydantic error asks for, in the words of the checks of plain values."""
UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
Parse = Callable[[JsonObject], JsonObject]


class BadArguments(Exception):
    """Why arguments do not fit, in one line for the policy."""


def parameters_of(function: Callable[..., Any], num_bound: int) -> tuple[JsonObject, Parse | None]:
    """The JSON Schema of a function's parameters, and what reads its arguments.

    The first `num_bound` parameters are given already. Scalars alone need no reading: None.
    Raises EnvError for a parameter that cannot be declared.
    """
    name = getattr(function, "__name__", repr(function))
    hints = typing.get_type_hints(function, include_extras=True)
    given = list(inspect.signature(function).parameters.values())[num_bound:]
    for parameter in given:
        is_plain = parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        if not is_plain or parameter.name not in hints:
            raise EnvError(f"tool {name}: parameter {parameter}: give it a name and a type")
    fields = {parameter.name: _described(hints[parameter.name]) for parameter in given}
    required = [each.name for each in given if each.default is inspect.Parameter.empty]
    if all(hint in SCALARS for hint in fields.values()):
        properties: JsonObject = {key: {"type": SCALARS[hint]} for key, hint in fields.items()}
        return {"type": "object", "properties": properties, "required": required}, None
    adapter = _adapter(name, fields, required)
    return _schema(adapter, required), _parse_by(adapter)


def _described(hint: Any) -> Any:
    """A hint whose plain text annotations are descriptions; of an empty one nothing stays."""
    if typing.get_origin(hint) is not Annotated:
        return hint
    base, *notes = typing.get_args(hint)
    turned = [Field(description=note) if isinstance(note, str) else note for note in notes]
    return Annotated[(base, *turned)]


def _adapter(name: str, fields: Mapping[str, Any], required: Sequence[str]) -> TypeAdapter[Any]:
    types_of = {key: hint if key in required else NotRequired[hint] for key, hint in fields.items()}
    arguments: Any = TypedDict("Arguments", types_of)  # type: ignore[misc]
    setattr(arguments, "__pydantic_config__", STRICT)  # noqa: B010 (mypy knows none)
    try:
        return TypeAdapter(arguments)
    except (PydanticUserError, PydanticSchemaGenerationError) as error:
        problem = str(error).partition("\n")[0]
        raise EnvError(f"tool {name}: a parameter cannot be declared: {problem}") from None


def _schema(adapter: TypeAdapter[Any], required: Sequence[str]) -> JsonObject:
    made = _untitled(adapter.json_schema())
    schema = {"type": "object", "properties": made["properties"], "required": list(required)}
    return {**schema, "$defs": made["$defs"]} if "$defs" in made else schema


def _untitled(schema: Any, is_names: bool = False) -> Any:
    """Without the titles that pydantic makes up from names: the policy reads every character."""
    if isinstance(schema, list):
        return [_untitled(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in ("default", "const", "enum") else _untitled(value, _names(key))
        for key, value in schema.items()
        if is_names or key != "title"
    }


def _names(key: str) -> bool:
    """Whether the keys below are names of the author's, not words of JSON Schema."""
    return key in ("properties", "$defs")


def _parse_by(adapter: TypeAdapter[Any]) -> Parse:
    def parse(arguments: JsonObject) -> JsonObject:
        try:
            text = json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise BadArguments("every text must be valid Unicode") from None
        except (ValueError, RecursionError):
            raise BadArguments("every number must be a finite number") from None
        try:
            found: JsonObject = adapter.validate_json(text)
        except ValidationError as error:
            raise BadArguments(explain(error.errors(include_url=False), arguments)) from None
        return found

    return parse


def explain(errors: Sequence[ErrorDetails], arguments: JsonObject) -> str:
    """What is wrong, in one line: of a union's members all that speak of the same place."""
    places = [_place(error, arguments) for error in errors]
    deepest = max(places, key=len)
    here = [e for e, place in zip(errors, places, strict=True) if place == deepest]
    path = _path(deepest)
    first = here[0]
    if first["type"] == "missing":
        return f"missing argument {path}"
    if first["type"] in UNKNOWN:
        return f"unknown argument {path}"
    wanted = " or ".join(dict.fromkeys(map(_wanted, here)))
    whole = path or "arguments"
    return f"{whole}: {wanted}" if wanted[:1].isupper() else f"{whole} must be {wanted}"


def _place(error: ErrorDetails, arguments: JsonObject) -> tuple[str | int, ...]:
    """Where in the arguments; the names of a union's members, which pydantic adds, left out."""
    here: JSON = arguments
    place: list[str | int] = []
    if not error["loc"]:
        return ()
    *above, last = error["loc"]
    for step in above:
        is_key = isinstance(here, dict) and step in here
        is_index = isinstance(here, list) and isinstance(step, int) and step < len(here)
        if is_key or is_index:
            here = here[step]
            place.append(step)
    is_there = (isinstance(here, dict) and last in here) or isinstance(last, int)
    if is_there or error["type"] == "missing":
        place.append(last)
    return tuple(place)


def _path(place: Sequence[str | int]) -> str:
    parts = [f"[{step}]" if isinstance(step, int) else f".{echo(step)}" for step in place]
    return "".join(parts).removeprefix(".")


def _wanted(error: ErrorDetails) -> str:
    if error["type"] in WANTED:
        return WANTED[error["type"]]
    if error["type"] in ("literal_error", "enum"):
        return f"one of {error['ctx']['expected']}"
    said = error["msg"].replace("\n", " ")
    return said.removeprefix("Input should be ").removeprefix("Value error, ")
