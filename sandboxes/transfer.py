"""Files and folders into a workspace and out of it. What takes a box needs its lock held."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import BinaryIO

from k3rl.errors import SandboxError, UserInputError
from k3rl.sandboxes.base import ExecExit, ExecRequest
from k3rl.sandboxes.blocking import in_thread, in_workspace
from k3rl.sandboxes.box import Box, rest
from k3rl.sandboxes.files.archive import pack_tree, unpack_tree
from k3rl.sandboxes.files.trees import BLOCK_BYTES, write_all
from k3rl.sandboxes.files.workspace import MOUNT_POINT
from k3rl.sandboxes.processes.launch import Child, pump

PUT = 'umask 022; mkdir -p "${1%/*}" && rm -f "$1" && cat > "$1" && chmod "$2" "$1"'
PUT_DEADLINE_S = 60.0
Start = Callable[[Box, ExecRequest], Awaitable[Child]]


async def put(box: Box, start: Start, path: str, data: bytes, mode: int) -> None:
    """Write a regular file; the mode's permission bits are kept."""
    workspace = box.workspace
    if box.live is not None and not box.live.is_over and not workspace.shows_writes:
        inside = await in_thread(in_workspace, path, workspace.target, path)
        if await _put_inside(box, start, inside, data, mode):
            return
        await in_thread(rest, box)
    await in_thread(in_workspace, path, workspace.write, path, data, mode)


async def _put_inside(box: Box, start: Start, inside: str, data: bytes, mode: int) -> bool:
    """Write through the live sandbox, whose mount must not be written to behind its back.

    False when that did not work: the reason then shows when the file is written from here.
    """
    argv = ("sh", "-c", PUT, "put", f"{MOUNT_POINT}/{inside}", f"{mode & 0o777:o}")
    child = await start(box, ExecRequest(argv, data))
    async with aclosing(pump(child, PUT_DEADLINE_S)) as events:
        async for event in events:
            if isinstance(event, ExecExit):
                return event.exit_code == 0
    return False


async def put_tree(box: Box, path: str, archive: BinaryIO) -> None:
    """Place an archive. A live sandbox that would not see it ends first."""
    if not box.workspace.shows_writes:
        await in_thread(rest, box)
    await in_thread(in_workspace, path, unpack_tree, archive, path, box.workspace)


async def get_tree(box: Box, path: str, archive: BinaryIO, max_bytes: int) -> None:
    """Write a folder as an archive."""
    await in_thread(in_workspace, path, pack_tree, box.workspace, path, archive, max_bytes)


@asynccontextmanager
async def spool(folder: Path) -> AsyncIterator[BinaryIO]:
    """An empty file without a name, on the disk of `folder`."""
    file = _nameless(folder)
    try:
        yield file
    finally:
        await in_thread(file.close)


def _nameless(folder: Path) -> BinaryIO:
    try:
        return tempfile.TemporaryFile(dir=folder)
    except OSError as error:
        raise SandboxError(f"{folder}: cannot hold an archive: {error}") from error


@asynccontextmanager
async def collected(
    chunks: AsyncIterator[bytes], folder: Path, max_bytes: int
) -> AsyncIterator[BinaryIO]:
    """The chunks in one file on the disk of `folder`. Raises UserInputError beyond `max_bytes`."""
    async with spool(folder) as file:
        num_bytes = 0
        async for chunk in chunks:
            num_bytes += len(chunk)
            if num_bytes > max_bytes:
                raise UserInputError(f"the archive is larger than {max_bytes} bytes")
            await in_thread(write_all, file.fileno(), chunk)
        yield file


async def chunks_of(file: BinaryIO) -> AsyncIterator[bytes]:
    """Its content from the start."""
    offset = 0
    while chunk := await in_thread(os.pread, file.fileno(), BLOCK_BYTES, offset):
        yield chunk
        offset += len(chunk)
