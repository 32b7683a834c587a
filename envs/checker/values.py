"""Values that fit a JSON Schema and values that do not, to call tools with."""

from __future__ import annotations

from typing import Any

from k3rl.types import JSON

_EXAMPLES: dict[str, JSON] = {
    "string": "x",
    "integer": 1,
    "number": 1.0,
    "boolean": True,
    "null": None,
}
_STRANGERS: tuple[tuple[str, JSON], ...] = (
    ("null", None),
    ("string", "x"),
    ("integer", 7),
    ("boolean", True),
    ("array", []),
    ("object", {}),
)
_DEPTH = 6
"""Schemas that nest deeper, or for ever, are not followed."""


def right_value(schema: Any, root: Any = None, depth: int = 0) -> Any:
    """The simplest value that fits."""
    root = schema if root is None else root
    schema = _resolve(schema, root)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    if "default" in schema:
        return schema["default"]
    if options := _options(schema):
        return right_value(options[0], root, depth + 1)
    kind = _types(schema)[0] if _types(schema) else "string"
    if kind == "array":
        num = int(schema.get("minItems", 0)) or (depth < _DEPTH and "items" in schema)
        return [right_value(schema.get("items", {}), root, depth + 1)] * int(num)
    if kind == "object":
        wanted = schema.get("required", ()) if depth < _DEPTH else ()
        properties = schema.get("properties", {})
        return {name: right_value(properties.get(name, {}), root, depth + 1) for name in wanted}
    if kind == "string":
        return "x" * max(1, int(schema.get("minLength", 1)))
    if kind in ("integer", "number") and "minimum" in schema:
        return schema["minimum"]
    return _EXAMPLES[kind]


def wrong_values(schema: Any, root: Any = None, depth: int = 0) -> list[JSON]:
    """Values of which none fits: of other types, outside an enum, with a wrong part inside."""
    root = schema if root is None else root
    schema = _resolve(schema, root)
    if not schema or depth > _DEPTH:
        return []
    if "enum" in schema or "const" in schema:
        allowed = [schema["const"]] if "const" in schema else list(schema["enum"])
        return [value for value in ("no such value", 7, None) if value not in allowed]
    if options := _options(schema):
        fits = {kind for each in options for kind in _kinds(_resolve(each, root))}
        return [] if not fits else _strangers(fits)
    kinds = _types(schema)
    if not kinds:
        return []
    wrong = _strangers(set(kinds))
    if kinds == ["string"]:
        wrong.append("\ud800")
    if kinds == ["array"]:
        wrong += [[value] for value in wrong_values(schema.get("items", {}), root, depth + 1)]
    if kinds == ["object"]:
        wrong += _wrong_objects(schema, root, depth)
    return wrong


def _wrong_objects(schema: Any, root: Any, depth: int) -> list[JSON]:
    good = right_value(schema, root, depth)
    assert isinstance(good, dict)
    found: list[JSON] = [
        {key: value for key, value in good.items() if key != name}
        for name in schema.get("required", ())
    ]
    for name, inner in schema.get("properties", {}).items():
        found += [{**good, name: value} for value in wrong_values(inner, root, depth + 1)]
    return found


def _strangers(fits: set[str]) -> list[JSON]:
    """Values of every type but these; an integer is a number, and a boolean is neither."""
    taken = fits | ({"integer"} if "number" in fits else set())
    return [value for kind, value in _STRANGERS if kind not in taken]


def _kinds(schema: Any) -> list[str]:
    """The types of one branch, guessed from its values where none is named."""
    if _types(schema):
        return _types(schema)
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    names = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    return [names.get(type(value), "object") for value in values]


def _types(schema: Any) -> list[str]:
    kind = schema.get("type", [])
    if not kind and "properties" in schema:
        return ["object"]
    return [kind] if isinstance(kind, str) else list(kind)


def _options(schema: Any) -> list[Any]:
    return list(schema.get("anyOf", schema.get("oneOf", [])))


def _resolve(schema: Any, root: Any) -> Any:
    """A schema, or what its `$ref` into the same document names."""
    for _ in range(_DEPTH):
        if not isinstance(schema, dict):
            return {}
        if "$ref" not in schema:
            return schema
        found = root
        for part in str(schema["$ref"]).removeprefix("#/").split("/"):
            found = found.get(part, {}) if isinstance(found, dict) else {}
        schema = found
    return {}
