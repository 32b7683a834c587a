"""Running one child process: its output as events, its deadline, and nothing left behind.

`pump` is the one loop that both backends use. It reads only when its consumer asks for more, so a
slow consumer slows the command through full pipes, while the deadline fires on its own. After a
kill it goes on reading until the pipes are empty. Leaving it in any way (error, cancellation)
kills and reaps the child before it returns.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from k3rl.errors import SandboxError
from k3rl.sandboxes.base import ExecEvent, ExecExit, OutputChunk, Stream
from k3rl.sandboxes.files.trees import Identity, write_all
from k3rl.sandboxes.processes.cgroups import Group
from k3rl.sandboxes.processes.orphans import (
    DEATH_WAIT_S,
    FORGET_OWNER,
    bwrap_argv,
    children,
    end_orphans,
    freeze,
    is_gone,
    launching,
)
from k3rl.sandboxes.scratch import switch_user

CHUNK_BYTES = 64 * 1024
START_WAIT_S = 30.0
"""How long bubblewrap may take to set a sandbox up."""
DRAIN_S = 0.2
"""How long output is awaited after the command is gone, when something still holds the pipes."""
ERROR_BYTES = 2048


class Child(Protocol):
    """A started child as `pump` sees it."""

    stdout: int
    stderr: int
    channel: int
    """Of its descriptor 3; -1: it has none."""
    exit_fds: list[int]
    """Descriptors, readable when the command and what must die with it are gone."""
    alarm_fds: list[int]
    """Descriptors, readable when what holds the command together is gone."""

    @property
    def pid(self) -> int:
        """A process that all processes of the command descend from."""
        ...

    def kill(self) -> None:
        """Kill the command and its descendants; any number of times."""
        ...

    def kill_rest(self) -> None:
        """Kill what must not outlive the process of an `exit_fds` or `alarm_fds` that is gone."""
        ...

    def exit_code(self, stderr: bytes) -> int:
        """Reap and tell the exit code. Raises SandboxError when the sandbox itself failed."""
        ...

    def destroy(self) -> None:
        """Kill, reap and close everything; blocks for the milliseconds that dying takes."""
        ...


async def readable(fds: Collection[int], timeout_s: float | None) -> set[int]:
    """Those of `fds` that can be read, at least one of them, or none after `timeout_s`."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    ready: set[int] = set()

    def mark(fd: int) -> None:
        ready.add(fd)
        wake()

    def wake() -> None:
        if not future.done():
            future.set_result(None)

    timer = None if timeout_s is None else loop.call_later(timeout_s, wake)
    for fd in fds:
        loop.add_reader(fd, mark, fd)
    try:
        await future
    finally:
        for fd in fds:
            loop.remove_reader(fd)
        if timer is not None:
            timer.cancel()
    return ready


async def pump(
    child: Child, deadline_s: float, channel_bytes: int = 0
) -> AsyncGenerator[ExecEvent, None]:
    """The events of a started child, ExecExit last. Owns `child` and destroys it."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    is_late = False

    def expire() -> None:
        nonlocal is_late
        is_late = True
        child.kill()

    timer = loop.call_later(max(deadline_s, 0.0), expire)
    streams = {child.stdout: Stream.STDOUT, child.stderr: Stream.STDERR}
    streams |= {child.channel: Stream.CHANNEL} if child.channel >= 0 else {}
    offsets = dict.fromkeys(Stream, 0)
    running, alarms = set(child.exit_fds), set(child.alarm_fds)
    last_error = b""
    try:
        while streams or running:
            left_s = max(start + deadline_s - loop.time(), 0.0)
            patience_s = left_s + DEATH_WAIT_S if running else DRAIN_S
            ready = await readable([*streams, *running, *alarms], patience_s)
            if not ready:
                if running:
                    raise SandboxError(f"processes are still there {DEATH_WAIT_S} s after a kill")
                break
            for fd in ready & (running | alarms):
                running.discard(fd)
                alarms.discard(fd)
                child.kill_rest()
            for fd in ready & streams.keys():
                stream = streams[fd]
                data = os.read(fd, CHUNK_BYTES)
                if not data:
                    del streams[fd]
                if stream is Stream.STDERR:
                    last_error = (last_error + data)[-ERROR_BYTES:]
                if stream is Stream.CHANNEL:
                    data = data[: channel_bytes - offsets[stream]]
                if data:
                    yield OutputChunk(stream, offsets[stream], data)
                    offsets[stream] += len(data)
        timer.cancel()
        code = None if is_late else child.exit_code(last_error)
    finally:
        timer.cancel()
        child.destroy()
    yield ExecExit(code, is_late, loop.time() - start)


async def finish(child: Child, deadline_s: float) -> None:
    """Run a started child to its end; what it says does not matter."""
    async with aclosing(pump(child, deadline_s)) as events:
        async for _ in events:
            pass


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a child process."""

    argv: Sequence[str]
    """The first word is the program: a path, or a name on our own PATH."""
    environment: Mapping[str, str]
    folder: Path | None = None
    identity: Identity | None = None


class Pipes:
    """A child process with a memory file as its input and two pipes as its output."""

    channel = -1

    def __init__(self, launch: Launch, stdin: bytes, pass_fds: Sequence[int] = ()) -> None:
        """Starts it. Raises SandboxError when it cannot be started."""
        self.stdout, out = os.pipe()
        self.stderr, err = os.pipe()
        source = memory_file(stdin)
        self._open = [self.stdout, self.stderr]
        who = launch.identity
        as_user = switch_user(who)
        forked_as = None if as_user else who
        try:
            for handle in (out, err, source):
                if who is not None:
                    os.fchown(handle, who.uid, who.gid)  # so that /dev/stdout can be opened
            self.process = subprocess.Popen(
                [*as_user, *launch.argv],
                cwd=launch.folder,
                env=launch.environment,
                stdin=source,
                stdout=out,
                stderr=err,
                pass_fds=pass_fds,
                umask=0o022,
                start_new_session=True,
                user=None if forked_as is None else forked_as.uid,
                group=None if forked_as is None else forked_as.gid,
                extra_groups=None if forked_as is None else [],
            )
        except (OSError, subprocess.SubprocessError) as error:
            self.close_pipes()
            raise SandboxError(f"{launch.argv[0]}: {error}") from error
        finally:
            for handle in (out, err, source):
                os.close(handle)
        self.exit_fds = [self.watch(self.process.pid)]
        self.alarm_fds: list[int] = []

    @property
    def pid(self) -> int:
        """Of the child itself."""
        return self.process.pid

    def watch(self, pid: int) -> int:
        """A pid descriptor, closed with the pipes."""
        handle = os.pidfd_open(pid)
        self._open.append(handle)
        return handle

    def complaint(self) -> str:
        """The last line that it or its command said; it is dead or dying."""
        os.set_blocking(self.stderr, False)
        try:
            text = os.read(self.stderr, ERROR_BYTES).decode(errors="replace").strip()
        except BlockingIOError:
            text = ""
        return text.splitlines()[-1] if text else "it was killed"

    def close_pipes(self) -> None:
        """Close everything; any number of times."""
        while self._open:
            os.close(self._open.pop())

    def await_death(self) -> None:
        """Block until every watched process is gone, and reap the child."""
        if not self._open:
            return
        for handle in self.exit_fds:
            is_gone(handle, DEATH_WAIT_S)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(DEATH_WAIT_S)


class BwrapChild(Pipes):
    """A program under bubblewrap; its processes die with their pid namespace.

    bubblewrap writes JSON lines: the pid of the namespace's init as soon as it is cloned.
    """

    def __init__(
        self,
        bwrap: Path,
        launch: Launch,
        options: Sequence[str],
        stdin: bytes,
        lock: Path,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Starts bubblewrap with `options` and holds it back.

        `launch` is the command under it, which gets `pass_fds`; `lock` the owner's launch lock.
        """
        self.status, status = os.pipe()
        reader, self.release = os.pipe()
        # Open for writing too: else our death, as the end of file, would let the command run.
        block = os.open(f"/proc/self/fd/{reader}", os.O_RDWR)
        words = (*FORGET_OWNER, *options)
        arguments = memory_file(b"".join(os.fsencode(word) + b"\0" for word in words))
        self._reports = b""
        try:
            with launching(lock) as held:
                fds = (held, arguments, status, block)
                argv = bwrap_argv(bwrap, fds, launch.argv)
                super().__init__(replace(launch, argv=argv), stdin, (*fds, *pass_fds))
        except BaseException as error:
            os.close(self.status)
            os.close(self.release)
            if isinstance(error, OSError):
                raise SandboxError(f"{lock}: cannot start a sandbox: {error}") from error
            raise
        finally:
            for handle in (arguments, status, block, reader):
                os.close(handle)
        self._open += [self.status, self.release]
        self._uid = os.geteuid() if launch.identity is None else launch.identity.uid

    async def start(self, group: Group | None = None) -> None:
        """Let the command run, in `group`. Raises SandboxError, with all closed, when it cannot."""
        try:
            while b"}" not in self._reports:
                ready = await readable([self.status], START_WAIT_S)
                if not ready:
                    raise SandboxError(f"bwrap did not start within {START_WAIT_S} s")
                data = os.read(self.status, CHUNK_BYTES)
                if not data:
                    raise SandboxError(f"bwrap failed: {self._complaint()}")
                self._reports += data
            try:
                pid = self._report()["child-pid"]
                self.exit_fds.append(self.watch(pid))
                # Alone: bubblewrap itself must not be what the kernel kills for memory.
                if group is not None:
                    group.add(pid)
            except ProcessLookupError:
                raise SandboxError(f"bwrap failed: {self._complaint()}") from None
            except OSError as error:
                raise SandboxError(f"a sandbox's control group: {error}") from error
            with suppress(BrokenPipeError):  # then the missing exit code tells
                os.write(self.release, b"x")
        except BaseException:
            self.destroy()
            raise

    def kill(self) -> None:
        """Kill the namespace's init, and with it every process inside, and bubblewrap."""
        for handle in self.exit_fds if self._open else ():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)

    def destroy(self) -> None:
        """Kill everything, reap bubblewrap, close everything."""
        if not self._open:
            return
        try:
            is_known = len(self.exit_fds) > 1 or self._find_init()
            self.kill()
            self.await_death()
            if not is_known:
                end_orphans([self._uid])
        finally:
            self.close_pipes()

    def _find_init(self) -> bool:
        """Watch the namespace's init before its pid was reported, so that `kill` reaches it.

        False when bubblewrap died too early for that; it may have cloned an init all the same.
        """
        if not freeze(self.process.pid, self.exit_fds[0]):
            return False
        try:
            found = [self.watch(pid) for pid in children(self.process.pid)]
        except ProcessLookupError:
            return False
        if is_gone(self.exit_fds[0], 0):
            return False  # then a number may have been another process's already
        self.exit_fds += found
        return True

    def _report(self) -> dict[str, int]:
        merged: dict[str, int] = {}
        for line in self._reports.splitlines():
            merged |= json.loads(line)
        return merged

    def _complaint(self) -> str:
        self.process.wait()
        os.set_blocking(self.stderr, False)
        text = ""
        with suppress(BlockingIOError):
            text = os.read(self.stderr, CHUNK_BYTES).decode(errors="replace").strip()
        return text.replace("\n", "; ") or f"exit code {self.process.returncode}, nothing said"


def memory_file(data: bytes) -> int:
    """An open, unnamed file that holds `data`, positioned at its start."""
    handle = os.memfd_create("k3rl")
    try:
        write_all(handle, data)
        os.lseek(handle, 0, os.SEEK_SET)
    except BaseException:
        os.close(handle)
        raise
    return handle
