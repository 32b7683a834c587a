"""The two processes of a sandbox as /proc shows them, and ending those that nobody owns.

bubblewrap (the outer process) clones an inner one, the init of the sandbox's pid namespace. It ties
its life to its owner's only after that, and the inner one ties its own to the outer one's only when
the command starts. A SIGKILL in between leaves an inner process that waits for ever, or both.

Invariant: a signal goes only to a process of a sandbox's uid with exactly our command line whose
owner or outer process is gone, through a pid descriptor that was open before the process was
looked at. An inner process without an outer one is of no use to anybody, whoever started it.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PRLIMIT = "/usr/bin/prlimit"
OWNER = "K3RL_SANDBOX_OWNER"
"""A variable that names the owner on bubblewrap's command line; no command gets to see it."""
FORGET_OWNER = ("--unsetenv", OWNER)
SHAPE = re.compile(
    rb"[^\0]+\0--setenv\0" + OWNER.encode() + rb"\0(\d+)\0--args\0\d+\0--args\0\d+\0"
    rb"--json-status-fd\0\d+\0--block-fd\0\d+\0--\0" + re.escape(PRLIMIT.encode()) + rb"\0"
)
"""What `bwrap_argv` makes, as /proc/<pid>/cmdline shows it."""
AGENT_MOUNT = "/.k3rl-agent"
AGENT_SHAPE = re.compile(rb"[^\0]*python[^\0]*\0-ISB\0" + AGENT_MOUNT.encode() + rb"\0\d+\0")
"""What the inner process has become when a sandbox is set up."""
FIELD = re.compile(r"^(State|PPid|Uid|NSpid):\t(.*)$", re.MULTILINE)
DEATH_WAIT_S = 10.0
"""How long killed processes may take to be gone."""
LAUNCH_WAIT_S = 10.0
"""How long a half-started child of a dead owner, or a guard that ends, is waited for."""
POLL_S = 0.0005


def bwrap_argv(bwrap: Path, fds: Sequence[int], command: Sequence[str]) -> list[str]:
    """The command line of bubblewrap; `fds`: launch lock, options, status pipe, block pipe.

    It names the owner, so that a process whose parent is another one is known to be left over. The
    first words of the options must be `FORGET_OWNER`.
    """
    lock, options, status, block = map(str, fds)
    flags = ["--args", lock, "--args", options, "--json-status-fd", status, "--block-fd", block]
    return [str(bwrap), "--setenv", OWNER, str(os.getpid()), *flags, "--", *command]


@dataclass(frozen=True, slots=True)
class Process:
    """A living process."""

    argv: bytes
    parent: int
    uid: int
    is_init: bool
    """The first process of a pid namespace right below ours."""
    is_ours: bool
    """In our own pid namespace."""


def look(pid: int) -> Process | None:
    """What /proc shows of a process; None when it is gone or dead."""
    try:
        argv = (_proc(pid) / "cmdline").read_bytes()
        fields = dict(FIELD.findall((_proc(pid) / "status").read_text()))
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields["State"][0] in "ZX":
        return None
    numbers = fields["NSpid"].split()
    is_init = len(numbers) == 2 and numbers[1] == "1"
    uid = int(fields["Uid"].split()[0])
    return Process(argv, int(fields["PPid"]), uid, is_init, len(numbers) == 1)


def is_orphan(process: Process | None, uids: Collection[int]) -> bool:
    """Whether it is an outer process without its owner or an inner one without its outer one.

    Raises OSError when that cannot be found out.
    """
    if process is None or process.uid not in uids:
        return False
    shape = SHAPE.match(process.argv)
    if process.is_init and (shape or AGENT_SHAPE.fullmatch(process.argv)):
        outer = look(process.parent)
        return outer is None or not SHAPE.match(outer.argv)
    return shape is not None and process.is_ours and process.parent != int(shape[1])


def end_orphans(uids: Collection[int]) -> None:
    """Kill the sandbox processes of these uids that nobody owns, and wait until they are gone.

    An outer process that dies by itself during a pass may leave an inner one too young for that
    pass. So there are two passes at least, and the last one finds nothing. An unkillable process
    is given up after `DEATH_WAIT_S`. Raises OSError when /proc cannot be read.
    """
    if os.readlink("/proc/self") != str(os.getpid()):
        return  # /proc is another pid namespace's: its numbers are not ours
    limit = time.monotonic() + DEATH_WAIT_S
    is_first = True
    while True:
        found = [pid for pid in _pids() if _is_shaped(pid) and is_orphan(look(pid), uids)]
        is_progress = any([_end(pid, uids, limit) for pid in found])
        if not (is_progress or is_first) or time.monotonic() > limit:
            break
        is_first = False


def _is_shaped(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        argv = (_proc(pid) / "cmdline").read_bytes()
        return bool(SHAPE.match(argv) or AGENT_SHAPE.fullmatch(argv))
    return False


def _end(pid: int, uids: Collection[int], limit: float) -> bool:
    """Kill an orphan; False when that is not allowed."""
    with suppress(ProcessLookupError), ExitStack() as held:
        handles = [held.enter_context(descriptor(pid))]
        process = look(pid)
        if process is None or not is_orphan(process, uids):
            return True
        try:
            if process.is_ours and freeze(pid, handles[0]):
                handles += [held.enter_context(descriptor(child)) for child in children(pid)]
                if is_gone(handles[0], 0):
                    return True  # then a number may have been another process's already
            for handle in handles:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
        except PermissionError:
            return False
        for handle in handles:
            is_gone(handle, max(limit - time.monotonic(), 0.0))
    return True


@contextmanager
def descriptor(pid: int) -> Iterator[int]:
    """A pid descriptor. Raises ProcessLookupError when there is no such process."""
    handle = os.pidfd_open(pid)
    try:
        yield handle
    finally:
        os.close(handle)


def is_gone(handle: int, timeout_s: float) -> bool:
    """Whether the process of a pid descriptor is dead, or dies within `timeout_s`."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def freeze(pid: int, handle: int) -> bool:
    """Stop a process, so that it neither makes nor reaps children; False when it is dead."""
    limit = time.monotonic() + DEATH_WAIT_S
    try:
        signal.pidfd_send_signal(handle, signal.SIGSTOP)
        while not is_gone(handle, 0) and time.monotonic() < limit:
            text = (_proc(pid) / "stat").read_text()
            if text.rpartition(")")[2].split()[0] in "Tt":
                return True
            time.sleep(POLL_S)
    except (FileNotFoundError, ProcessLookupError):
        pass
    return False


def children(pid: int) -> list[int]:
    """The children of a stopped process with one thread."""
    try:
        return [int(word) for word in (_proc(pid) / f"task/{pid}/children").read_text().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return children_by_scan(pid)


def children_by_scan(pid: int) -> list[int]:
    """The living children of a process, found by looking at every process."""
    found = []
    for number in _pids():
        with suppress(PermissionError):
            process = look(number)
            if process is not None and process.parent == pid:
                found.append(number)
    return found


@contextmanager
def launching(lock: Path) -> Iterator[int]:
    """Hold a dead owner's cleaner back until a child is bubblewrap: an open file to pass to it.

    bubblewrap takes the empty file for options and closes it before it clones anything.
    """
    handle = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH)
        yield handle
    finally:
        os.close(handle)


def await_launches(lock: Path) -> None:
    """Wait until every child that a dead owner had begun to start is bubblewrap or gone."""
    limit = time.monotonic() + LAUNCH_WAIT_S
    with suppress(FileNotFoundError):
        handle = os.open(lock, os.O_RDONLY)
        try:
            while time.monotonic() < limit:
                with suppress(BlockingIOError):
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                time.sleep(POLL_S)
        finally:
            os.close(handle)


def _proc(pid: int) -> Path:
    return Path("/proc", str(pid))


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]
