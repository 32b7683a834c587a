"""Work that an event loop must wait for to its end, and what its failures mean."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from k3rl.errors import SandboxError, UserInputError

P = ParamSpec("P")
R = TypeVar("R")
PATH_ERRORS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP)


async def in_thread(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run blocking work in a thread; a caller, however often cancelled, waits for it to end.

    Raises SandboxError for what the operating system refuses.
    """
    try:
        return await unbroken(asyncio.to_thread(work, *args, **kwargs))
    except OSError as error:
        raise SandboxError(f"sandbox files: {error}") from error


async def unbroken(work: Coroutine[Any, Any, R]) -> R:
    """Await `work`; a caller, however often cancelled, waits for it to end."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):  # once more
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()
        raise


async def together(works: Iterable[Coroutine[Any, Any, R]]) -> list[R]:
    """As `asyncio.gather`, but when one fails or the caller is cancelled, none still runs."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await unbroken(_ended(tasks))
        raise


async def _ended(tasks: list[asyncio.Task[R]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


def in_workspace(path: str, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Tell failures that the path's owner caused from those of the machine."""
    try:
        return work(*args, **kwargs)
    except OSError as error:
        if error.errno in PATH_ERRORS:
            raise UserInputError(f"{path!r}: {error.strerror}") from None
        raise SandboxError(f"{path!r}: {error}") from error
