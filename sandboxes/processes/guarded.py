"""The host's side of guard.py: a guard and its agent, which hold a sandbox's processes together.

They end at the end of their control socket, whoever closes it, and end everything below them first.
Both hold the owner's launch lock, so that whoever clears up after a dead owner waits until nothing
of it is left.
"""

from __future__ import annotations

import py_compile
import re
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from k3rl.errors import SandboxError
from k3rl.sandboxes.processes.cgroups import Group
from k3rl.sandboxes.processes.launch import Launch, Pipes
from k3rl.sandboxes.processes.live import Live
from k3rl.sandboxes.processes.orphans import DEATH_WAIT_S, is_gone, launching
from k3rl.sandboxes.processes.uids import end_users

HERE = Path(__file__).parent
ROOM = Path("k3rl", "sandboxes", "processes")
SCRIPTS = ("agent.py", "guard.py", "supervisor.py")
SCRIPT = """import sys
sys.path.append({folder!r})
from k3rl.sandboxes.processes import guard
guard.main()
"""
INSIDE = "inside"
GUARD_SHAPE = re.compile(
    rb"[^\0]*python[^\0]*\0-ISB\0-c\0import sys\nsys\.path\.append\([^\n]*"
    rb"/owner-\w+-\w+-(\d+)-\d+-[^/\n]*/" + INSIDE.encode() + rb".\)\n"
)
"""How /proc/<pid>/cmdline shows a guard, or its agent; the number is the owner's."""


class GuardChild(Pipes):
    """A guard, and by it an agent and its commands."""

    def __init__(
        self, launch: Launch, control: socket.socket, lock: Path, pass_fds: Sequence[int]
    ) -> None:
        """Starts a guard, which waits for `release`; `control` is our end of its socket.

        Raises SandboxError.
        """
        self._control, self._identity = control, launch.identity
        try:
            with launching(lock) as held:
                super().__init__(launch, b"", (held, *pass_fds))
        except OSError as error:
            raise SandboxError(f"{lock}: cannot start a sandbox: {error}") from error
        # Of this pipe only the guard and the agent hold the other end: it ends when both are gone.
        self.exit_fds.append(self.stdout)

    def release(self, group: Group | None) -> None:
        """Let it start its agent, in `group`. Raises SandboxError, with all closed."""
        try:
            if group is not None:
                group.add(self.pid)
            with suppress(BrokenPipeError, ConnectionResetError):  # the first command tells
                self._control.send(b"g")
        except OSError as error:
            self.destroy()
            raise SandboxError(f"a sandbox's control group: {error}") from error

    def kill(self) -> None:
        """Let the guard end everything, and itself; any number of times."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    def destroy(self) -> None:
        """Wait until everything is ended, by force if need be, and close the pipes."""
        if not self._open:
            return
        try:
            self.kill()
            self.await_death()
            if self.process.returncode != 0:
                self._force()
        finally:
            self.close_pipes()

    def _force(self) -> None:
        """End what a guard may have left that did not end as it should have."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.exit_fds[0], signal.SIGKILL)
        is_gone(self.stdout, DEATH_WAIT_S)
        if self._identity is not None:
            end_users(range(self._identity.uid, self._identity.uid + 1))


def start_guarded(
    launch: Launch, lock: Path, fds: Sequence[int], words: Sequence[str], group: Group | None
) -> Live:
    """Start a guard by `launch`, whose arguments are completed here: see guard.py.

    `fds`: of the rulesets and of the filter; `words`: what follows them; `lock`: the owner's launch
    lock. Raises SandboxError.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with theirs:
            passed = [theirs.fileno(), *fds]
            argv = [*launch.argv, *map(str, passed), *words]
            guard = GuardChild(replace(launch, argv=argv), ours, lock, passed)
        guard.release(group)
    except BaseException:
        ours.close()
        raise
    return Live(guard, ours, launch.identity, group)


def install(owner: Path) -> str:
    """Put what runs inside into a folder of an owner's, where every user can read it.

    Returns a Python script that starts it.
    """
    folder = owner / INSIDE
    room = folder / ROOM
    room.mkdir(parents=True)
    for name in SCRIPTS:
        (room / name).write_bytes((HERE / name).read_bytes())
        py_compile.compile(str(room / name), doraise=True)  # used by a Python like ours
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return SCRIPT.format(folder=str(folder))
