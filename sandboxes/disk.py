"""Keeping workspaces within their size, from the host and for every backend alike.

No file system can be relied on to limit a folder without privileges, so a watch does: while
commands run it looks often at how much the file system of the scratch folder has left, which costs
microseconds. What has gone since a sandbox was last weighed bounds what that sandbox can have
grown; when it could be over its limits, and once in a while all the same, it is weighed. A command
that has grown a workspace beyond its limits is killed, which is its result: exit code 137 and a
line on standard error. One that only deletes may go on.

A command is ahead of the watch by what it can write in `LOOK_S`, a weighing and a kill.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path

from k3rl.errors import SandboxError
from k3rl.sandboxes.base import ExecEvent, ExecExit, OutputChunk, Stream
from k3rl.sandboxes.box import Box
from k3rl.sandboxes.files.weights import Moved, Stopped, Weight, held_bytes
from k3rl.sandboxes.spec import SandboxLimits

LOOK_S = 0.05
REVIEW_S = 1.0
"""A running command is weighed this often, whatever the file system says: others free space too."""
REVIEW_REST, REST = 20.0, 3.0
"""So many times the duration of a weighing pass before the next review, and before the next
weighing of the same sandbox."""
GRAIN = Weight(1 << 20, 100)
"""Changes of the file system below this are nobody's."""
KILLED = 128 + 9


def excess(now: Weight, before: Weight, limits: SandboxLimits) -> str:
    """Which limit a workspace exceeds and did not exceed as far before; "" when none."""
    if now.num_bytes > max(limits.workspace_bytes, before.num_bytes):
        return f"{now.num_bytes} bytes of disk are more than {limits.workspace_bytes}"
    if now.num_entries > max(limits.workspace_entries, before.num_entries):
        return f"{now.num_entries} paths are more than {limits.workspace_entries}"
    return ""


@dataclass(slots=True, eq=False)
class _Run:
    """A command while it runs."""

    box: Box
    before: Weight
    due: float
    """When it is to be weighed, if there is no reason to do it earlier."""
    free: float = 0.0
    """Not to be weighed before."""
    verdict: str = ""
    failure: SandboxError | None = None
    is_over: bool = False
    weighing: asyncio.Future[Weight] | None = None

    @property
    def limits(self) -> SandboxLimits:
        return self.box.spec.limits


class DiskWatch:
    """Watches the workspaces of one backend, which lie on one file system."""

    def __init__(self, folder: Path) -> None:
        """`folder`: where the workspaces are."""
        self.folder = folder
        self._runs: set[_Run] = set()
        self._left: os.statvfs_result | None = None
        self._gone = Weight()
        """All that the file system has lost between any two looks."""
        self._rested = 0.0
        """No weighing without a reason before."""
        self._timer: asyncio.TimerHandle | None = None
        self._round: asyncio.Task[None] | None = None

    async def watched(
        self, box: Box, events: AsyncGenerator[ExecEvent, None]
    ) -> AsyncGenerator[ExecEvent, None]:
        """The events of the box's child, which ends early when its workspace becomes too large."""
        run = self._begin(box)
        length, is_line = 0, True
        try:
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, ExecExit):
                        last = event
                        continue
                    if event.stream is Stream.STDERR:
                        length = event.offset + len(event.data)
                        is_line = event.data.endswith(b"\n")
                    yield event
        finally:
            await self._end(run)
        await self._settle(run)
        if run.verdict:
            start = "" if is_line else "\n"
            line = f"{start}k3rl: killed, its workspace is too large: {run.verdict}\n"
            yield OutputChunk(Stream.STDERR, length, line.encode())
            last = ExecExit(KILLED, False, last.wall_s)
        yield last

    def _begin(self, box: Box) -> _Run:
        self._look()
        if box.gone is None:
            box.gone = self._gone
        run = _Run(box, box.weight, time.monotonic() + REVIEW_S)
        self._runs.add(run)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._tick)
        return run

    async def _end(self, run: _Run) -> None:
        """Nobody looks into the workspace any more when this returns."""
        run.is_over = True
        self._runs.discard(run)
        if not self._runs and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        cancelled: asyncio.CancelledError | None = None
        while run.weighing is not None and not run.weighing.done():
            try:
                await asyncio.wait([run.weighing])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    async def _settle(self, run: _Run) -> None:
        """Judge what a command leaves behind, if that can be too large."""
        if run.failure is not None:
            raise run.failure
        self._look()
        box, is_large = run.box, bool(excess(run.box.weight, Weight(), run.limits))
        if run.verdict or is_large or self._is_suspect(run):
            box.gone = self._gone
            try:
                box.weight = await asyncio.to_thread(box.workspace.weigh)
            except Moved:  # by what outlived its command
                run.verdict = run.verdict or "its folders move while it is weighed"
            except OSError as error:
                raise SandboxError(f"sandbox {box.id}: cannot weigh it: {error}") from error
            run.verdict = run.verdict or excess(box.weight, run.before, run.limits)

    def _look(self) -> None:
        with suppress(OSError):
            left, last = os.statvfs(self.folder), self._left
            self._left = left
            if last is not None:
                num_bytes = (last.f_bfree - left.f_bfree) * left.f_frsize
                num_entries = last.f_ffree - left.f_ffree
                self._gone += Weight(max(num_bytes, 0), max(num_entries, 0))

    def _is_suspect(self, run: _Run) -> bool:
        """Whether a limit is exceeded if all that has gone is this sandbox's."""
        weight, gone, limits = run.box.weight, run.box.gone, run.limits
        assert gone is not None
        room = limits.workspace_bytes - weight.num_bytes
        paths = limits.workspace_entries - weight.num_entries
        return self._gone.num_bytes - gone.num_bytes >= max(
            room, GRAIN.num_bytes
        ) or self._gone.num_entries - gone.num_entries >= max(paths, GRAIN.num_entries)

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._tick)
        self._look()
        if self._round is not None and not self._round.done():
            return
        now = time.monotonic()
        idle = [run for run in self._runs if not run.verdict and now >= run.free]
        due = [run for run in idle if self._is_suspect(run)]
        if not due and now >= self._rested:
            due = [run for run in idle if now >= run.due]
            due = sorted(due, key=lambda run: run.due)[:1]
        if due:
            self._round = asyncio.create_task(self._weigh_all(due))

    async def _weigh_all(self, runs: list[_Run]) -> None:
        for run in runs:
            if not run.is_over:
                await self._weigh(run)

    async def _weigh(self, run: _Run) -> None:
        """Weigh a running command's workspace, and kill the command when it is too large."""
        box, limits = run.box, run.limits
        assert box.child is not None
        begun, gone = time.monotonic(), self._gone
        most = Weight(limits.workspace_bytes, limits.workspace_entries).or_more(run.before)
        work = asyncio.to_thread(_weigh_running, run, box.child.pid, most)
        run.weighing = asyncio.ensure_future(work)
        try:
            box.weight, box.gone = await run.weighing, gone
        except Stopped:
            return
        except Moved:
            # A workspace that cannot be weighed weighs what it may.
            run.verdict = "its folders move while it is weighed" if self._is_suspect(run) else ""
        except OSError as error:
            run.failure = SandboxError(f"sandbox {box.id}: cannot weigh its workspace: {error}")
        now = time.monotonic()
        run.due, run.free = now + REVIEW_S, now + REST * (now - begun)
        self._rested = now + REVIEW_REST * (now - begun)
        run.verdict = run.verdict or excess(box.weight, run.before, limits)
        if (run.verdict or run.failure) and not run.is_over:
            box.child.kill()


def _weigh_running(run: _Run, pid: int, most: Weight) -> Weight:
    workspace = run.box.workspace
    weight = workspace.weigh(most, lambda: run.is_over)
    return weight + Weight(held_bytes(pid, workspace.places))
