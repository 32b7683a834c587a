"""What a command prints: bounded, byte for byte, and only its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from k3rl.sandboxes.base import ExecRequest, ExecResult, OutputChunk, Stream, run
from k3rl.sandboxes.conformance.check import Check
from k3rl.sandboxes.conformance.ground import Ground, Muddled, Place
from k3rl.sandboxes.spec import MIB

STREAMS = (Stream.STDOUT, Stream.STDERR)
Collector = Callable[[Place, ExecRequest], Awaitable[ExecResult]]
FLOOD_BYTES, SMALL_FLOOD_BYTES = 200 * MIB, 80 * MIB
"""Output of a second, which stands for that of hours; what a control is asked to keep."""
ROOM_BYTES = 32 * MIB
SAMPLE_S = 0.002


async def collect(place: Place, request: ExecRequest) -> ExecResult:
    """As everybody does."""
    return await run(place.backend, place.id, request)


async def keep_all(place: Place, request: ExecRequest) -> ExecResult:
    """Keeps whatever comes, to the end."""
    kept = [each async for each in place.backend.exec(place.id, request)]
    chunks = [event for event in kept if isinstance(event, OutputChunk)]
    out, err = (b"".join(e.data for e in chunks if e.stream is stream) for stream in STREAMS)
    return ExecResult(0, False, out, err, 0, 0.0)


async def keep_tail(place: Place, request: ExecRequest) -> ExecResult:
    """Keeps the last bytes without a word on the others."""
    whole = await keep_all(place, request)
    out, err = (text[-request.max_output_bytes :] for text in (whole.stdout, whole.stderr))
    return ExecResult(0, False, out, err, 0, 0.0)


async def decode(place: Place, request: ExecRequest) -> ExecResult:
    """Takes each chunk for text."""
    texts = {stream: b"" for stream in STREAMS}
    async for event in place.backend.exec(place.id, request):
        if isinstance(event, OutputChunk):
            texts[event.stream] += event.data.decode(errors="replace").encode()
    return ExecResult(0, False, texts[Stream.STDOUT], texts[Stream.STDERR], 0, 0.0)


class Memory:
    """The memory of this process, sampled until it is asked."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._first = self._most = self._now()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def growth_bytes(self) -> int:
        """By how much it was larger than at first, at most. Ends the sampling."""
        self._is_over.set()
        self._thread.join()
        return self._most - self._first

    def _sample(self) -> None:
        while not self._is_over.wait(SAMPLE_S):
            self._most = max(self._most, self._now())

    @staticmethod
    def _now() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise Muddled("the memory of this process is not known")


async def flood(ground: Ground, script: str) -> str:
    """Memory of the host that output takes."""
    async with ground.place() as place:
        memory = Memory()
        request = ExecRequest(("sh", "-c", script.format(FLOOD_BYTES)), deadline_s=60.0)
        result = await collect(place, request)
        growth_bytes = memory.growth_bytes()
    if result.dropped_bytes != FLOOD_BYTES - request.max_output_bytes:
        raise Muddled(f"{result.dropped_bytes} bytes dropped: {result.stderr[-200:]!r}")
    return f"{growth_bytes >> 20} MiB" if growth_bytes > ROOM_BYTES else ""


async def kept_flood(ground: Ground, script: str) -> str:
    """The control: a collector that keeps it."""
    async with ground.place() as place:
        memory = Memory()
        await keep_all(place, ExecRequest(("sh", "-c", script.format(SMALL_FLOOD_BYTES))))
        growth_bytes = memory.growth_bytes()
    return f"{growth_bytes >> 20} MiB" if growth_bytes > ROOM_BYTES else ""


HEAD, TAIL, MIDDLE = b"HEAD\n", b"TAIL\n", 3_000_000
BOTH = f"for n in 1 2; do (echo HEAD; head -c {MIDDLE} /dev/zero; echo TAIL) >&$n; done"
KEPT_BYTES = 2000


async def head_and_tail(ground: Ground, collector: Collector = collect) -> str:
    """Output that goes missing without a word, or from its ends."""
    async with ground.place() as place:
        request = ExecRequest(("sh", "-c", BOTH), max_output_bytes=KEPT_BYTES)
        result = await collector(place, request)
    dropped = MIDDLE + len(HEAD + TAIL) - KEPT_BYTES
    note = f"{dropped} bytes dropped".encode()
    for text in (result.stdout, result.stderr):
        if not (text.startswith(HEAD) and text.endswith(TAIL) and note in text):
            return f"{text[:5]!r} to {text[-5:]!r}, {len(text)} bytes"
    return "" if result.dropped_bytes == 2 * dropped else f"{result.dropped_bytes} dropped"


ODD_BYTES = bytes(range(256)) + b"\xff\xfe\xc3(\xed\xa0\x80\0\0\x1b[2J\x1b]0;title\x07\r\n\x85"
SPLIT = ("x" + "\u00e9\u20ac\U0001f600" * 30_000).encode()
"""Characters of 2, 3 and 4 bytes, out of step with chunks of any even size."""


async def byte_for_byte(ground: Ground, data: bytes, collector: Collector = collect) -> str:
    """Bytes that are changed on their way."""
    script = "cat data; cat data >&2"
    async with ground.place({"data": data}) as place:
        result = await collector(place, ExecRequest(("sh", "-c", script), b"", 20.0, 4 * MIB))
    if result.stdout == result.stderr == data:
        return ""
    return f"{len(result.stdout)} and {len(result.stderr)} bytes, not {len(data)} as they were"


async def whole_offsets(ground: Ground, step: int = 0) -> str:
    """Chunks that overlap, leave a gap or come after the end; the control: a wrong expectation."""
    at, is_over = dict.fromkeys(Stream, 0), False
    async with ground.place() as place:
        script = "head -c 300000 /dev/zero; head -c 300000 /dev/zero >&2; echo end"
        async for event in place.backend.exec(place.id, ExecRequest(("sh", "-c", script))):
            if is_over:
                return "an event after the end"
            if isinstance(event, OutputChunk):
                if event.offset != at[event.stream]:
                    return f"{event.stream} at {event.offset} instead of {at[event.stream]}"
                at[event.stream] += len(event.data) + step
            else:
                is_over = True
    return "" if is_over else "no end"


LATE = "(sleep 0.2; while sleep 0.05; do echo late; done) & echo early"


async def late_output(ground: Ground) -> str:
    """What a background process prints when its command has ended."""
    async with ground.place() as place:
        first = await place.sh(f"({LATE}); sleep 0.05")
        await asyncio.sleep(0.4)
        second = await place.sh("sleep 0.2; echo second")
    is_clean = (first.stdout, second.stdout) == (b"early\n", b"second\n")
    return "" if is_clean else f"{first.stdout!r}, then {second.stdout!r}"


async def late_output_on_host(ground: Ground) -> str:
    """The control: a pipe is still written to when the first process is gone."""
    with ground.process(["sh", "-c", LATE]) as process:
        assert process.stdout is not None
        process.wait(5)
        limit, said = time.monotonic() + 5, b""
        while b"late" not in said and time.monotonic() < limit:
            said += await asyncio.to_thread(process.stdout.read1, 100)  # type: ignore[attr-defined]
        return said.decode().strip().replace("\n", "; ") if b"late" in said else ""


LINES, LINE = "yes | head -c {}", "head -c {} /dev/zero | tr '\\0' x"
CHECKS = (
    *(
        Check(
            name,
            None,
            partial(flood, script=script),
            partial(kept_flood, script=script),
            is_alone=True,
        )
        for name, script in (
            ("output without end", LINES),
            ("line without end", LINE),
            ("errors without end", f"({LINES}) >&2"),
        )
    ),
    Check(
        "head, tail and dropped count",
        None,
        head_and_tail,
        partial(head_and_tail, collector=keep_tail),
    ),
    *(
        Check(
            name,
            None,
            partial(byte_for_byte, data=data),
            partial(byte_for_byte, data=data, collector=decode),
        )
        for name, data in (
            ("invalid UTF-8, NUL and escape sequences", ODD_BYTES),
            ("characters split between chunks", SPLIT),
        )
    ),
    Check("offsets of chunks", None, whole_offsets, partial(whole_offsets, step=1)),
    Check("output after the end", None, late_output, late_output_on_host),
)
