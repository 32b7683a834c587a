"""A store service behind a unix socket, and the client through which other processes write.

Each message is a list of parts, each of them its length and bytes: method and arguments one way,
"" and the answer, or an error's name and text, the other way.
"""

import asyncio
import struct

from k3rl import errors
from k3rl.store.protocol import Ack, Claim, StepFrame, StoreStats
from k3rl.types import Outcome, TokenFrame, TrajectoryHeader, decode, encode

METHODS = {
    "begin": ((list[TrajectoryHeader],), None),
    "claim": ((str, int, list[str], float), list[Claim]),
    "append": ((TokenFrame,), Ack),
    "commit_step": ((str, int, StepFrame), list[Ack]),
    "pause": ((str, int), None),
    "finish": ((str, int, Outcome), None),
    "requeue_paused": ((), int),
    "next_version": ((int, str, str | None), int),
    "pin": ((), int),
    "stats": ((), StoreStats),
}


async def send(writer, parts):
    packed = b"".join(struct.pack("<I", len(part)) + part for part in parts)
    writer.write(struct.pack("<I", len(parts)) + packed)
    await writer.drain()


async def receive(reader):
    """Raises IncompleteReadError when the other side is gone."""
    (count,) = struct.unpack("<I", await reader.readexactly(4))
    parts = []
    for _ in range(count):
        (size,) = struct.unpack("<I", await reader.readexactly(4))
        parts.append(await reader.readexactly(size))
    return parts


async def serve(store, path, before_answer):
    """A listening server; `before_answer` is called before each answer is sent."""

    async def answer(name, arguments):
        kinds, kind = METHODS[name]
        values = [decode(cls, data) for cls, data in zip(kinds, arguments, strict=True)]
        try:
            found = await getattr(store, name)(*values)
        except errors.K3rlError as error:
            return [type(error).__name__.encode(), str(error).encode()]
        return [b"", b"" if kind is None else encode(found, kind)]

    async def talk(reader, writer):
        try:
            while True:
                name, *arguments = await receive(reader)
                parts = await answer(name.decode(), arguments)
                before_answer()
                await send(writer, parts)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    return await asyncio.start_unix_server(talk, path)


class RemoteStore:
    """Requests over one connection, one at a time. A lost connection is a ConnectionError."""

    def __init__(self, reader, writer):
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, path):
        return cls(*await asyncio.open_unix_connection(path))

    def close(self):
        self._writer.close()

    def __getattr__(self, name):
        kinds, kind = METHODS[name]

        async def call(*values):
            arguments = [encode(v, cls) for v, cls in zip(values, kinds, strict=True)]
            await send(self._writer, [name.encode(), *arguments])
            try:
                error, data = await receive(self._reader)
            except asyncio.IncompleteReadError:
                raise ConnectionResetError("the service is gone") from None
            if error:
                raise getattr(errors, error.decode())(data.decode())
            return None if kind is None else decode(kind, data)

        return call
