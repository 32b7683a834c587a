"""Random values of a JSON Schema, as tools declare them."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

import numpy as np

from k3rl.types import JSON, JsonObject

MAX_CHARS = 12
MAX_ITEMS = 3
MAX_DEPTH = 6
"""Of references; deeper, an optional key is left out and a list is as short as it may be."""
CHARSET = list(string.ascii_letters + string.digits + string.punctuation + " ")


class SchemaSampler:
    """Draws values that fit a schema: types, enums, bounds, lists, objects, unions, references.

    What it does not read are patterns, formats and conditions between keys: values may break them.
    """

    def __init__(self, schema: JsonObject, rng: np.random.Generator) -> None:
        """`schema` holds the `$defs` that it refers to."""
        self.schema, self.rng = schema, rng

    def arguments(self) -> JsonObject:
        """The arguments of one call; each that may be left out is so half of the time."""
        return self._object(self.schema, 0)

    def text(self, low: int = 0, high: int | None = None) -> str:
        """Characters of ASCII."""
        high = max(low, MAX_CHARS) if high is None else min(high, max(low, MAX_CHARS))
        return "".join(self.rng.choice(CHARSET, int(self.rng.integers(low, high + 1))))

    def _value(self, schema: Any, depth: int) -> JSON:
        if not isinstance(schema, Mapping):
            return None
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._pick(schema["enum"])
        if "$ref" in schema:
            return self._value(self._referred(schema["$ref"]), depth + 1)
        for union in ("anyOf", "oneOf", "allOf"):
            if union in schema:
                options = schema[union]
                return self._value(options[-1] if depth > MAX_DEPTH else self._pick(options), depth)
        kind = schema.get("type", "object" if "properties" in schema else "null")
        kind = self._pick(kind) if isinstance(kind, list) else kind
        return self._of_kind(kind, schema, depth)

    def _of_kind(self, kind: str, schema: Mapping[str, Any], depth: int) -> JSON:
        if kind == "string":
            return self.text(schema.get("minLength", 0), schema.get("maxLength"))
        if kind == "boolean":
            return bool(self.rng.random() < 0.5)
        if kind in ("integer", "number"):
            return self._number(kind, schema)
        if kind == "array":
            return self._array(schema, depth)
        return self._object(schema, depth) if kind == "object" else None

    def _number(self, kind: str, schema: Mapping[str, Any]) -> int | float:
        """Within all of its bounds; a multiple where it must be one."""
        low = max(schema.get("minimum", -np.inf), schema.get("exclusiveMinimum", -np.inf))
        high = min(schema.get("maximum", np.inf), schema.get("exclusiveMaximum", np.inf))
        low = min(-100, high - 200) if low == -np.inf else low
        high = max(100, low + 200) if high == np.inf else high
        step = schema.get("multipleOf", 1 if kind == "integer" else None)
        if step is None:
            return low if low == high else float(low + (high - low) * self.rng.uniform(0.1, 0.9))
        first, last = int(np.ceil(low / step)), int(np.floor(high / step))
        first += first * step == schema.get("exclusiveMinimum")
        last -= last * step == schema.get("exclusiveMaximum")
        drawn = int(self.rng.integers(first, max(first, last) + 1)) * step
        return int(drawn) if kind == "integer" else drawn

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[JSON]:
        firsts = [self._value(each, depth + 1) for each in schema.get("prefixItems", ())]
        low = schema.get("minItems", 0)
        high = min(schema.get("maxItems", max(low, MAX_ITEMS)), max(low, MAX_ITEMS))
        wanted = low if depth > MAX_DEPTH else int(self.rng.integers(low, high + 1))
        items = schema.get("items", {})
        num_more = max(wanted - len(firsts), 0) if isinstance(items, Mapping) else 0
        return firsts + [self._value(items, depth + 1) for _ in range(num_more)]

    def _object(self, schema: Mapping[str, Any], depth: int) -> JsonObject:
        required = schema.get("required", ())
        found: JsonObject = {}
        for name, inner in schema.get("properties", {}).items():
            if name in required or (depth <= MAX_DEPTH and self.rng.random() < 0.5):
                found[name] = self._value(inner, depth + 1)
        more = schema.get("additionalProperties")
        if isinstance(more, Mapping) and depth <= MAX_DEPTH:
            for _ in range(int(self.rng.integers(MAX_ITEMS))):
                found.setdefault(self.text(1), self._value(more, depth + 1))
        return found

    def _referred(self, reference: str) -> Any:
        found: Any = self.schema
        for part in reference.removeprefix("#/").split("/"):
            found = found.get(part, {})
        return found

    def _pick(self, options: list[Any]) -> Any:
        return options[int(self.rng.integers(len(options)))]
