"""Run a command that does not outlive who asked for it: `python mcp_guard.py PARENT COMMAND...`.

The guard leads a process group that the command joins. When the parent dies, however, the kernel
tells the guard, and the guard kills the group; when the command ends, what it started ends too.
Standard streams are the command's own. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from types import FrameType

PR_SET_PDEATHSIG = 1


def _kill_group(number: int = 0, frame: FrameType | None = None) -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main(parent: int, command: list[str]) -> None:
    """Never returns: the group, and the guard with it, is killed in the end."""
    signal.signal(signal.SIGUSR1, _kill_group)
    signal.signal(signal.SIGTERM, _kill_group)
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)
    if os.getppid() != parent:
        _kill_group()
    child = os.fork()
    if child == 0:
        os.execvp(command[0], command)
    # Only the command may hold the pipes: its end must be seen at their other ends.
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.waitpid(child, 0)
    _kill_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
