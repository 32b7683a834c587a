"""Contracts across process boundaries: calls as bytes, typed by the contract's own annotations.

Arguments and results are what `k3rl.types.encode` makes of them, errors their class name and
arguments: nothing exchanged is a pickle. What carries the bytes is somebody else's: see `Send`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import cache
from typing import Any, cast, get_origin, get_type_hints

from k3rl import errors
from k3rl.errors import K3rlError, UserInputError
from k3rl.types import decode, encode

OK, FAILED = b"\0", b"\1"
Send = Callable[[str, list[bytes]], Awaitable[bytes]]
"""Carries a method's name and arguments over, and the reply frame of `answer` back."""


async def answer(work: Callable[[], Awaitable[bytes]]) -> bytes:
    """The reply frame of a call: its encoded result, or the k3rl error it raised."""
    try:
        return OK + await work()
    except K3rlError as error:
        return failure(error)


def failure(error: K3rlError) -> bytes:
    """The reply frame of a call that raised `error`."""
    arguments = cast(tuple[Any, ...], error.__reduce__())[1]
    return FAILED + json.dumps([type(error).__name__, arguments]).encode()


def result(reply: bytes) -> bytes:
    """The inverse of `answer`: the payload, or the error raised here."""
    if reply[:1] == OK:
        return reply[1:]
    name, arguments = json.loads(reply[1:])
    raise getattr(errors, name)(*arguments)


def has_method(contract: type, name: str) -> bool:
    """Whether it is one that may be called from elsewhere."""
    return not name.startswith("_") and inspect.isfunction(vars(contract).get(name))


@cache
def signature(contract: type, method: str) -> tuple[inspect.Signature, dict[str, Any]]:
    """Signature without `self`, and types, of a method. Raises UserInputError when it has none."""
    if not has_method(contract, method):
        raise UserInputError(f"{contract.__name__} has no method {method!r}")
    function = getattr(contract, method)
    found = inspect.signature(function)
    return found.replace(parameters=list(found.parameters.values())[1:]), get_type_hints(function)


def is_stream(hint: Any) -> bool:
    """Whether a parameter or result of this type comes piece by piece, outside of its call."""
    return get_origin(hint) is AsyncIterator


def pack(
    contract: type, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[bytes]:
    """The arguments of a call as bytes, defaults filled in and streams left out."""
    found, hints = signature(contract, method)
    bound = found.bind(*args, **kwargs)
    bound.apply_defaults()
    return [
        encode(value, hints[name])
        for name, value in bound.arguments.items()
        if not is_stream(hints[name])
    ]


def unpack(contract: type, method: str, arguments: list[bytes]) -> dict[str, Any]:
    """The inverse of `pack`. Raises UserInputError on bytes that are no such arguments."""
    found, hints = signature(contract, method)
    names = [name for name in found.parameters if not is_stream(hints[name])]
    if len(names) != len(arguments):
        raise UserInputError(f"{contract.__name__}.{method}: {len(arguments)} arguments")
    return {
        name: decode(hints[name], data) for name, data in zip(names, arguments, strict=True)
    }  # fmt: skip


async def serve(contract: type, target: Any, method: str, arguments: list[bytes]) -> bytes:
    """Carry out one call of `contract` on `target`."""
    value = await getattr(target, method)(**unpack(contract, method, arguments))
    return encode(value, signature(contract, method)[1]["return"])


class Proxy:
    """Stands for an object elsewhere: methods of `contract` become `send(method, arguments)`."""

    def __init__(self, contract: type, send: Send) -> None:
        """`send` returns the reply frame of `answer`."""
        self._contract, self._send = contract, send

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        """An async method with the contract's signature."""
        if method.startswith("_") or not has_method(self._contract, method):
            raise AttributeError(method)
        returned = signature(self._contract, method)[1]["return"]

        async def call(*args: Any, **kwargs: Any) -> Any:
            data = pack(self._contract, method, args, kwargs)
            return decode(returned, result(await self._send(method, data)))

        return call
