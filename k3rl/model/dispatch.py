"""One place that says who computes an operation: plain torch, or a kernel of the same signature.

The torch form of an operation is the function itself, marked with `operation`. A kernel is added
with `add_kernel` and takes over the calls that it says it fits. `using("torch")` keeps to the
plain forms, which are what kernels are judged by.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

from k3rl.errors import UserInputError

P = ParamSpec("P")
R = TypeVar("R")
Choice = Literal["auto", "torch"]


class _Kernel(NamedTuple):
    run: Callable[..., Any]
    fits: Callable[..., bool]


_torch_forms: dict[str, Callable[..., Any]] = {}
_kernels: dict[str, _Kernel] = {}
_choice: list[Choice] = ["auto"]


def operation(torch_form: Callable[P, R]) -> Callable[P, R]:
    """Let a kernel stand in for a function, under the function's own name."""
    name = torch_form.__name__
    _torch_forms[name] = torch_form

    @functools.wraps(torch_form)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        kernel = _kernels.get(name)
        if kernel is not None and _choice[-1] == "auto" and kernel.fits(*args, **kwargs):
            found: R = kernel.run(*args, **kwargs)
            return found
        return torch_form(*args, **kwargs)

    return run


def operations() -> list[str]:
    """Names that a kernel may be added for."""
    return sorted(_torch_forms)


def add_kernel(name: str, run: Callable[..., Any], fits: Callable[..., bool]) -> None:
    """Let `run` compute operation `name` for the arguments that `fits` accepts.

    Raises:
        UserInputError: there is no such operation, or the parameters differ from its own.

    """
    if name not in _torch_forms:
        raise UserInputError(f"no operation {name!r}; there are {', '.join(operations())}")
    wanted = list(inspect.signature(_torch_forms[name]).parameters)
    found = list(inspect.signature(run).parameters)
    if found != wanted:
        raise UserInputError(f"kernel for {name} takes {found}, the operation takes {wanted}")
    _kernels[name] = _Kernel(run, fits)


def remove_kernel(name: str) -> None:
    """Go back to the torch form of operation `name`."""
    _kernels.pop(name, None)


@contextmanager
def using(choice: Choice) -> Iterator[None]:
    """Within the block, let kernels take over where they fit (`auto`), or never (`torch`)."""
    _choice.append(choice)
    try:
        yield
    finally:
        _choice.pop()
