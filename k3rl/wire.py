"""How carriers become text: the JSON head that `k3rl.types.encode` puts before their arrays.

The fields of a carrier are written one by one, each as its declared type; only what may hold
anything (JSON objects, unions, sets) goes through pydantic. That takes a third of the time of
dumping the whole carrier and writing the dump, and a store commits 20,000 of them in a second.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from json.encoder import encode_basestring_ascii
from types import NoneType, UnionType
from typing import Annotated, Any, TypeAlias, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray
from pydantic import PlainSerializer, TypeAdapter

MARK = "$array"
"""The only key of the JSON object that stands for an array: [dtype, count]."""
BYTES = "bytes"
"""In place of a dtype: a byte string."""
AS_IS = PlainSerializer(lambda array: array)
"""Marks the type of a field that holds an array."""
Arrays: TypeAlias = list[NDArray[Any] | bytes]
Writer: TypeAlias = Callable[[Any, Arrays], str]
SIMPLE: dict[Any, str] = {str: "text", int: "whole", float: "real", bool: "flag"}


@cache
def adapter(cls: Any) -> TypeAdapter[Any]:
    """Pydantic's idea of a type."""
    return TypeAdapter(cls)


@cache
def writer(hint: Any) -> Writer:
    """What writes values of a type as JSON; arrays and byte strings are taken out in their order.

    A set becomes a sorted list. Keys of JSON objects that could be taken for the mark of an array
    get one more `$`. Values that are not of the declared types are written as pydantic dumps them.
    """
    strict, lenient = _strict(hint), _other(hint)

    def write(value: Any, arrays: Arrays) -> str:
        first = len(arrays)
        try:
            return strict(value, arrays)
        except (TypeError, LookupError, AttributeError):
            del arrays[first:]
            return lenient(value, arrays)

    return write


@cache
def _strict(hint: Any) -> Writer:
    origin, args = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        return _record(hint)
    if origin is Annotated and AS_IS in args:
        return _array
    if origin is list or (origin is tuple and args[1:] == (Ellipsis,)):
        return _each(_strict(args[0]))
    return _other(hint)


def _record(cls: Any) -> Writer:
    """Compiled, as the methods of dataclasses are: a call for every field takes twice the time."""
    scope: dict[str, Any] = {"text": encode_basestring_ascii, "whole": int.__repr__}
    scope |= {"real": _real, "flag": {True: "true", False: "false"}.__getitem__}
    hints, known = get_type_hints(cls, include_extras=True), fields(cls)
    scope["form"] = "{" + ", ".join(f'"{field.name}": %s' for field in known) + "}"
    each = [_expression(f"value.{field.name}", hints[field.name], scope) for field in known]
    values = "".join(f"{one}, " for one in each)
    write: Writer = eval(f"lambda value, arrays: form % ({values})", scope)
    return write


def _expression(what: str, hint: Any, scope: dict[str, Any]) -> str:
    """Python that writes `what`; whatever it calls is put in `scope`."""
    args = get_args(hint)
    if get_origin(hint) in (Union, UnionType) and len(args) == 2 and NoneType in args:
        present = _expression(what, args[args[0] is NoneType], scope)
        return f"('null' if {what} is None else {present})"
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return f"text({what})"
    if hint in SIMPLE:
        return f"{SIMPLE[hint]}({what})"
    name = f"write_{len(scope)}"
    scope[name] = _strict(hint)
    return f"{name}({what}, arrays)"


def _each(write: Writer) -> Writer:
    return lambda values, arrays: f"[{', '.join([write(value, arrays) for value in values])}]"


def _other(hint: Any) -> Writer:
    dump = adapter(hint).dump_python

    def write(value: Any, arrays: Arrays) -> str:
        is_empty = type(value) is dict and not value
        return "{}" if is_empty else _dumped(dump(value), arrays)

    return write


def _real(value: float) -> str:
    return float.__repr__(value) if value - value == 0 else json.dumps(value)


def _array(value: Any, arrays: Arrays) -> str:
    if not isinstance(value, np.ndarray):
        return _dumped(value, arrays)
    arrays.append(value)
    return f'{{"{MARK}": ["{value.dtype.str}", {len(value)}]}}'


def _dumped(plain: Any, arrays: Arrays) -> str:
    def lift(node: Any) -> Any:
        if isinstance(node, np.ndarray):
            arrays.append(node)
            return {MARK: [node.dtype.str, len(node)]}
        if isinstance(node, bytes):
            arrays.append(node)
            return {MARK: [BYTES, len(node)]}
        return sorted(node) if isinstance(node, set | frozenset) else os.fspath(node)

    first = len(arrays)
    text = json.dumps(plain, default=lift)
    # Besides the marks of arrays, only a text or a key of the carrier can have put a `"$` there.
    if text.count('"$') != len(arrays) - first:
        del arrays[first:]
        text = json.dumps(_escaped(plain), default=lift)
    return text


def _escaped(node: Any) -> Any:
    """Keys come from policies too: one that starts with the array mark must not become a mark."""
    if isinstance(node, dict):
        return {f"${k}" if k.startswith("$") else k: _escaped(item) for k, item in node.items()}
    return [_escaped(item) for item in node] if isinstance(node, list | tuple) else node
