"""A live sandbox: one whose first process, the agent, runs command after command.

`Live` is the sandbox, `LiveChild` one command of it, `Keeper` what holds its processes together.
The command's output pipes go straight from us to it, through the agent's socket, so that the agent
never handles output. What becomes of a live sandbox that cannot be trusted any more (its agent
silent, a caller gone) is its end: the next command starts another one over the same workspace.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from k3rl.errors import SandboxError
from k3rl.sandboxes.base import ExecRequest
from k3rl.sandboxes.files.trees import Identity
from k3rl.sandboxes.processes.cgroups import Group
from k3rl.sandboxes.processes.launch import BwrapChild, Launch, memory_file
from k3rl.sandboxes.processes.orphans import is_gone

AGENT = Path(__file__).with_name("agent.py")
ANSWER_BYTES = 5
KILLED = 128 + 9


class Keeper(Protocol):
    """The processes of a live sandbox, the agent among them."""

    exit_fds: list[int]
    """A pid descriptor of the process whose death must end the others, then what is readable when
    those are dead."""

    @property
    def pid(self) -> int:
        """Of the first process of `exit_fds`."""
        ...

    def kill(self) -> None:
        """Kill them all; any number of times."""
        ...

    def destroy(self) -> None:
        """Kill them all, wait until they are gone and free what they hold; any number of times."""
        ...

    def complaint(self) -> str:
        """Why they died, in one line, without blocking."""
        ...


class Live:
    """A started agent. Its commands run one at a time."""

    def __init__(
        self,
        keeper: Keeper,
        control: socket.socket,
        identity: Identity | None,
        group: Group | None = None,
    ) -> None:
        """Owns `keeper`, `control` and `group`; `identity`: whom commands run as."""
        self._keeper, self.control, self.identity = keeper, control, identity
        self._group = group
        self._is_destroyed = False

    @property
    def is_over(self) -> bool:
        """Whether it is dead, or dying: no command can run in it."""
        return self._is_destroyed or any(is_gone(handle, 0) for handle in self._keeper.exit_fds)

    @property
    def pid(self) -> int:
        """Of its outer process."""
        return self._keeper.pid

    @property
    def watch_fds(self) -> list[int]:
        """Pid descriptors of its outer process, whose death must end the inner one."""
        return self._keeper.exit_fds[:1]

    def kill(self) -> None:
        """Kill every process of it; `destroy` waits for that."""
        if not self._is_destroyed:
            self._keeper.kill()

    @classmethod
    async def start(
        cls,
        bwrap: Path,
        launch: Launch,
        options: Sequence[str],
        lock: Path,
        program: bytes | None = None,
        group: Group | None = None,
    ) -> Live:
        """Start the agent that `launch` names under bubblewrap.

        The socket's number is added to its arguments. `program` filters its system calls, `group`
        bounds it and is removed at its end. Raises SandboxError when it cannot be started. Returns
        before the agent has begun to listen.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            child = _outer(bwrap, launch, options, lock, theirs, program)
            await child.start(group)
        except BaseException:
            ours.close()
            if group is not None:
                group.remove()
            raise
        return cls(child, ours, launch.identity, group)

    @property
    def num_memory_kills(self) -> int:
        """Processes killed so far because the whole sandbox had used its memory up."""
        return 0 if self._group is None else self._group.num_memory_kills

    def complaint(self) -> str:
        """Why it died, in one line."""
        return self._keeper.complaint()

    def destroy(self) -> None:
        """Kill every process of it, and wait until they are gone; any number of times."""
        self._is_destroyed = True
        try:
            self._keeper.destroy()
        finally:
            self.control.close()
            if self._group is not None:
                self._group.remove()


def _outer(
    bwrap: Path,
    launch: Launch,
    options: Sequence[str],
    lock: Path,
    control: socket.socket,
    program: bytes | None,
) -> BwrapChild:
    """Start bubblewrap with the agent's end of the socket, which is closed here."""
    with control:
        fds = [control.fileno()]
        told = replace(launch, argv=[*launch.argv, str(fds[0])])
        if program is not None:
            fds.append(memory_file(program))
            options = [*options, "--seccomp", str(fds[-1])]
        try:
            return BwrapChild(bwrap, told, options, b"", lock, fds)
        finally:
            for handle in fds[1:]:
                os.close(handle)


class LiveChild:
    """One command of a live sandbox, as `pump` sees it."""

    def __init__(self, live: Live, request: ExecRequest, environment: Mapping[str, str]) -> None:
        """Starts it, with the whole `environment`.

        Raises SandboxError, with the sandbox ended, when the agent is gone.
        """
        self._live, self._code = live, -1
        self._is_done = self._is_last = False
        self._past_kills = live.num_memory_kills
        self.stdout, out = os.pipe()
        self.stderr, err = os.pipe()
        self.channel, *third = os.pipe() if request.channel_bytes else (-1,)
        streams = [memory_file(request.stdin), out, err, *third]
        order = memory_file(_order(request.argv, environment))
        self.exit_fds, self.alarm_fds = [live.control.fileno()], live.watch_fds
        try:
            if (who := live.identity) is not None:
                for handle in streams:
                    os.fchown(handle, who.uid, who.gid)  # so that /dev/stdout can be opened
            socket.send_fds(live.control, [b"x"], [order, *streams])
        except OSError as error:
            reason = live.complaint()
            self.destroy()
            raise SandboxError(f"the sandbox died: {reason}") from error
        finally:
            for handle in (order, *streams):
                os.close(handle)

    @property
    def pid(self) -> int:
        """Of the sandbox's outer process."""
        return self._live.pid

    def kill(self) -> None:
        """Tell the agent to kill the command and all its descendants; any number of times."""
        if not self._is_done and not self._live.is_over:
            try:
                self._live.control.send(b"k", socket.MSG_DONTWAIT)
            except OSError:
                self._live.kill()

    def kill_rest(self) -> None:
        """Nothing is left when the agent answers; without its outer process it must die."""
        if not self._live.is_over:
            return
        self._take_answer()
        if not self._is_done:
            self._live.kill()

    def exit_code(self, stderr: bytes) -> int:
        """As the agent told it. Raises SandboxError when the sandbox died.

        That the command used up the sandbox's memory is a result, even if the agent died of it.
        """
        self._take_answer()
        if not self._is_done:
            if self._live.num_memory_kills > self._past_kills:
                return KILLED
            raise SandboxError(f"the sandbox died: {self._live.complaint()}")
        return self._code

    def _take_answer(self) -> None:
        if self._is_done or self._live.control.fileno() < 0:
            return
        try:
            data = self._live.control.recv(16, socket.MSG_DONTWAIT)
        except OSError:
            return
        if len(data) == ANSWER_BYTES:
            self._is_done, self._is_last = True, bool(data[4])
            self._code = int.from_bytes(data[:4], "little", signed=True)

    def destroy(self) -> None:
        """Close the pipes, and end the sandbox unless the command has ended in it cleanly."""
        self._take_answer()
        if not self._is_done or self._is_last:
            self._live.destroy()
        for name in ("stdout", "stderr", "channel"):
            handle = getattr(self, name)
            if handle >= 0:
                os.close(handle)
                setattr(self, name, -1)


def _order(argv: Sequence[str], environment: Mapping[str, str]) -> bytes:
    variables = [f"{name}={value}" for name, value in environment.items()]
    words = [str(len(argv)), *argv, *variables]
    return b"".join(os.fsencode(word) + b"\0" for word in words)
