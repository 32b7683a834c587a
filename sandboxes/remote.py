"""A backend in another process: `SandboxHost` serves it there, `RemoteBackend` is it here.

All that passes between them are calls with bytes in and bytes out (`k3rl.proxy.Send`), whatever
carries these. A stream is calls too: the client begins it under a name of its own, pulls what there
is, or feeds what is wanted, and ends it. The host reads on only `BUFFERED` pieces ahead of the
pulls, so a slow reader slows the command over there, and nobody's memory grows.

A client's sandboxes are its own, and closed when it has not been heard of for the host's `lease_s`:
a living one is heard of, because it renews by itself. Snapshots are plain data and their layers lie
in the host's blob store, so what one client saved another may restore.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Protocol, get_args

from k3rl.errors import K3rlError, SandboxError, SandboxLost, UserInputError
from k3rl.proxy import (
    Proxy,
    Send,
    answer,
    has_method,
    is_stream,
    pack,
    result,
    serve,
    signature,
    unpack,
)
from k3rl.sandboxes.base import TREE_BYTES, ExecEvent, ExecRequest, SandboxBackend, SandboxId
from k3rl.sandboxes.blocking import unbroken
from k3rl.sandboxes.spec import MIB
from k3rl.types import decode, encode

LEASE_S = 60.0
RENEWALS = 3
"""In the time of a lease."""
LOOKS = 4
"""For dead clients, in the time of a lease."""
BUFFERED = 4
PIECE_BYTES = MIB
"""Of what is fed at once."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """Some of what a stream yields."""

    pieces: list[bytes]
    is_over: bool


class HostCalls(Protocol):
    """What a client calls on a host beside the methods of a SandboxBackend."""

    async def renew(self) -> float:
        """Returns the host's `lease_s`; any other call renews the lease as well."""
        ...

    async def begin(self, stream: str, method: str, arguments: list[bytes]) -> None:
        """Start a method of SandboxBackend that yields or takes a stream."""
        ...

    async def pull(self, stream: str) -> Pulled:
        """Wait for more. Raises what the method raised."""
        ...

    async def feed(self, stream: str, data: bytes) -> bool:
        """Hand the next piece over, b"" after the last one; False when no more is wanted."""
        ...

    async def end(self, stream: str) -> None:
        """Returns when nothing of it goes on any more; one that is over is fine."""
        ...


class SandboxHost:
    """Serves one backend to many clients. It belongs to one event loop."""

    def __init__(self, backend: SandboxBackend, lease_s: float = LEASE_S) -> None:
        """Owns `backend` from now on."""
        self.backend, self.lease_s = backend, lease_s
        self._guests: dict[str, _Guest] = {}
        self._watch: asyncio.Task[None] | None = None

    async def call(self, client: str, method: str, arguments: list[bytes]) -> bytes:
        """The reply frame of one call of a client, whose name nobody else has."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._look_for_dead_clients())
        guest = self._guests.setdefault(client, _Guest(self))
        guest.heard = time.monotonic()

        async def work() -> bytes:
            if method == "aclose":
                await self._dismiss(client)
                return encode(None, type(None))
            if has_method(HostCalls, method):
                return await serve(HostCalls, guest, method, arguments)
            return await guest.call(method, arguments)

        return await answer(work)

    async def aclose(self) -> None:
        """Close every client's sandboxes and the backend."""
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.gather(*(self._dismiss(client) for client in list(self._guests)))
        await self.backend.aclose()

    async def _look_for_dead_clients(self) -> None:
        while True:
            await asyncio.sleep(self.lease_s / LOOKS)
            limit = time.monotonic() - self.lease_s
            dead = [client for client, guest in self._guests.items() if guest.heard < limit]
            leaving = [self._dismiss(client) for client in dead]
            # One whose sandbox cannot be closed must not save the others.
            await asyncio.gather(*leaving, return_exceptions=True)

    async def _dismiss(self, client: str) -> None:
        guest = self._guests.pop(client, None)
        if guest is not None:
            await guest.leave()


class _Guest:
    """One client, on the host: its sandboxes and streams. Implements HostCalls."""

    def __init__(self, host: SandboxHost) -> None:
        self.heard = 0.0
        self._host = host
        self._sandboxes: set[SandboxId] = set()
        self._streams: dict[str, _Stream] = {}
        self._is_gone = False

    async def call(self, method: str, arguments: list[bytes]) -> bytes:
        """One call of SandboxBackend that streams nothing."""
        _check_streamed(method, False)
        values = unpack(SandboxBackend, method, arguments)
        if not self._owns(values) and method == "close":
            return encode(None, type(None))
        self._check(values)
        value = await getattr(self._host.backend, method)(**values)
        if method == "close":
            self._sandboxes.discard(values["sandbox_id"])
        if method in ("create", "restore", "fork"):
            await self._take(value if isinstance(value, list) else [value])
        return encode(value, signature(SandboxBackend, method)[1]["return"])

    async def leave(self) -> None:
        """End its streams and close its sandboxes."""
        self._is_gone = True
        await asyncio.gather(*(self.end(stream) for stream in list(self._streams)))
        await self._close(self._sandboxes)

    async def renew(self) -> float:
        return self._host.lease_s

    async def begin(self, stream: str, method: str, arguments: list[bytes]) -> None:
        _check_streamed(method, True)
        values = unpack(SandboxBackend, method, arguments)
        self._check(values)
        if stream in self._streams:
            raise UserInputError(f"stream {stream} has begun already")
        self._streams[stream] = _Stream(self._host.backend, method, values)

    async def pull(self, stream: str) -> Pulled:
        try:
            pulled = await self._stream(stream).pull()
        except Exception:
            self._streams.pop(stream, None)
            raise
        if pulled.is_over:
            self._streams.pop(stream, None)
        return pulled

    async def feed(self, stream: str, data: bytes) -> bool:
        return await self._stream(stream).feed(data)

    async def end(self, stream: str) -> None:
        found = self._streams.pop(stream, None)
        if found is not None:
            await found.end()

    def _stream(self, name: str) -> _Stream:
        if name not in self._streams:
            raise SandboxLost(f"stream {name} is gone")
        return self._streams[name]

    def _owns(self, values: dict[str, Any]) -> bool:
        return "sandbox_id" not in values or values["sandbox_id"] in self._sandboxes

    def _check(self, values: dict[str, Any]) -> None:
        if not self._owns(values):
            raise SandboxLost(f"sandbox {values['sandbox_id']} is gone")

    async def _take(self, sandboxes: list[SandboxId]) -> None:
        if self._is_gone:
            await self._close(sandboxes)
            raise SandboxLost("the client's lease ran out while its sandbox was made")
        self._sandboxes.update(sandboxes)

    async def _close(self, sandboxes: Iterable[SandboxId]) -> None:
        await asyncio.gather(*(self._host.backend.close(each) for each in list(sandboxes)))


def _check_streamed(method: str, is_begun: bool) -> None:
    hints = signature(SandboxBackend, method)[1]
    if any(is_stream(hint) for hint in hints.values()) != is_begun:
        raise UserInputError(f"{method} is {'not begun but called' if is_begun else 'begun'}")


class _Stream:
    """A call whose result, or one argument, comes piece by piece."""

    def __init__(self, backend: SandboxBackend, method: str, values: dict[str, Any]) -> None:
        hints = signature(SandboxBackend, method)[1]
        self._pieces: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue(BUFFERED)
        self._input: asyncio.Queue[bytes] = asyncio.Queue(1)
        inputs = {
            name: self._fed() for name in hints if is_stream(hints[name]) and name != "return"
        }
        work = getattr(backend, method)(**values, **inputs)
        self._task = asyncio.create_task(self._go(work, hints["return"]))

    async def _go(self, work: Any, hint: Any) -> None:
        try:
            if not is_stream(hint):
                await work
            else:
                async with aclosing(work):
                    async for each in work:
                        await self._pieces.put(encode(each, get_args(hint)[0]))
            await self._pieces.put(None)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            await self._pieces.put(error)

    async def pull(self) -> Pulled:
        pieces = []
        piece = await self._pieces.get()
        while isinstance(piece, bytes):
            pieces.append(piece)
            if self._pieces.empty():
                return Pulled(pieces, is_over=False)
            piece = self._pieces.get_nowait()
        if isinstance(piece, BaseException):
            if not pieces:
                raise piece
            self._pieces.put_nowait(piece)  # there is room: it was taken just now
        return Pulled(pieces, is_over=piece is None)

    async def feed(self, data: bytes) -> bool:
        putting = asyncio.ensure_future(self._input.put(data))
        await asyncio.wait([putting, self._task], return_when=asyncio.FIRST_COMPLETED)
        putting.cancel()
        return not self._task.done()

    async def _fed(self) -> AsyncIterator[bytes]:
        while data := await self._input.get():
            yield data

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        while not self._pieces.empty():
            self._pieces.get_nowait()
        self._pieces.put_nowait(SandboxLost("the stream was ended"))  # for whoever still pulls


class RemoteBackend(Proxy):
    """A SandboxBackend whose sandboxes are at a host, by whatever carries calls there."""

    def __init__(self, send: Send, name: str = "remote") -> None:
        """`send`: to `SandboxHost.call` under one client's name; raises SandboxLost when it died.

        It renews its lease from its first call to `aclose`, in the event loop of that call.
        """
        super().__init__(SandboxBackend, self._carry)
        self.name = name
        self._host: Any = Proxy(HostCalls, self._carry)
        self._transport = send
        self._renewing: asyncio.Task[None] | None = None
        self._is_closed = False

    def exec(self, sandbox_id: SandboxId, request: ExecRequest) -> AsyncIterator[ExecEvent]:
        """As the contract says; what it says of consumers holds across the distance."""
        return self._stream("exec", sandbox_id, request)

    def get_tree(
        self, sandbox_id: SandboxId, path: str, max_bytes: int = TREE_BYTES
    ) -> AsyncIterator[bytes]:
        """As the contract says."""
        return self._stream("get_tree", sandbox_id, path, max_bytes)

    async def put_tree(
        self,
        sandbox_id: SandboxId,
        path: str,
        chunks: AsyncIterator[bytes],
        max_bytes: int = TREE_BYTES,
    ) -> None:
        """As the contract says."""
        stream = self._stream("put_tree", sandbox_id, path, chunks, max_bytes, fed=chunks)
        async with aclosing(stream):
            async for _ in stream:
                pass

    async def aclose(self) -> None:
        """Close this client's sandboxes; the host goes on."""
        if self._is_closed:
            return
        if self._renewing is not None:
            self._renewing.cancel()
        with suppress(SandboxLost):
            result(await self._carry("aclose", []))
        self._is_closed = True

    async def _carry(self, method: str, arguments: list[bytes]) -> bytes:
        if self._is_closed:
            raise SandboxError(f"backend {self.name} is closed")
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew())
        return await self._transport(method, arguments)

    async def _renew(self) -> None:
        with suppress(K3rlError):  # whoever needs the host is told by their own calls
            while True:
                lease_s: float = await self._host.renew()
                await asyncio.sleep(lease_s / RENEWALS)

    async def _stream(
        self, method: str, *args: Any, fed: AsyncIterator[bytes] | None = None
    ) -> AsyncGenerator[Any, None]:
        hint = signature(SandboxBackend, method)[1]["return"]
        stream, is_over = secrets.token_hex(8), False
        try:
            arguments = pack(SandboxBackend, method, args, {})
            await unbroken(self._host.begin(stream, method, arguments))
            if fed is not None:
                await self._feed(stream, fed)
            while not is_over:
                pulled: Pulled = await self._host.pull(stream)
                is_over = pulled.is_over
                for piece in pulled.pieces:
                    yield decode(get_args(hint)[0], piece)
        finally:
            if not is_over:
                with suppress(SandboxError):
                    await unbroken(self._host.end(stream))

    async def _feed(self, stream: str, chunks: AsyncIterator[bytes]) -> None:
        async for chunk in chunks:
            for start in range(0, len(chunk), PIECE_BYTES):
                if not await self._host.feed(stream, chunk[start : start + PIECE_BYTES]):
                    return
        await self._host.feed(stream, b"")
