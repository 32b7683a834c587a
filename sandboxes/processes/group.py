"""A child in a process group of its own, for the backend that confines nothing."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import replace

from k3rl.sandboxes.processes.launch import Launch, Pipes

MOVE = 'exec "$@" 3>&{0} {0}>&-'
"""Gives an inherited descriptor the number 3, which Popen cannot. Only bash knows those above 9."""


class GroupChild(Pipes):
    """An unconfined child in a process group of its own; whoever leaves the group survives."""

    def __init__(self, launch: Launch, stdin: bytes, has_channel: bool = False) -> None:
        """Starts it, behind a bash when it has a channel: see `MOVE`."""
        if not has_channel:
            super().__init__(launch, stdin)
            return
        channel, theirs = os.pipe()
        try:
            move = ["bash", "-c", MOVE.format(theirs), "bash"]
            super().__init__(replace(launch, argv=[*move, *launch.argv]), stdin, [theirs])
        except BaseException:
            os.close(channel)
            raise
        finally:
            os.close(theirs)
        self.channel = channel
        self._open.append(channel)

    def kill(self) -> None:
        """Kill the group. The leader is reaped only afterwards, so its number is still ours."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def kill_rest(self) -> None:
        """Kill what outlived the leader in its group."""
        self.kill()

    def exit_code(self, stderr: bytes) -> int:
        """128 + n after signal n."""
        code = self.process.wait()
        return code if code >= 0 else 128 - code

    def destroy(self) -> None:
        """Kill the group, reap the leader, close the pipes."""
        self.kill()
        self.await_death()
        self.close_pipes()
