"""The outer process of a sandbox without namespaces: it makes a place for the agent, and ends it.

Run by the interpreter under /usr in the sandbox's workspace, with these arguments: the descriptors
of the control socket, of the two Landlock rulesets `scope` and `rules` and of a file with the
system-call filter; the sandbox's folder for temporary files; how many processes it may have, or "-"
if the filter does not ask about calls (see supervisor.py); and limits as resource=value. Any
further descriptor that it inherits stays open for as long as it or the agent lives.

    host -> guard   b"g"   go on: the sandbox's control group, if any, has been entered

Three Landlock domains lie within each other: of this process, of the agent and, for each command,
one of its own. The kernel lets a process signal only what is in its own domain or below. So
kill(-1) reaches exactly what it must end, at once; no command can end the agent or this process;
and as both adopt orphans, they have no child left only when nothing is left below them. Each of the
two ends everything when the other is gone, or the host.
"""

from __future__ import annotations

import _socket
import os
import resource
import select
import signal
import sys

from k3rl.sandboxes.processes import agent
from k3rl.sandboxes.processes.supervisor import Supervisor

RESTRICT_SELF = 446
PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 38, 36
FIRST_INHERITABLE = 3
NOT_WATCHED = "-"


def main() -> None:
    """Start an agent over what the arguments name; end with it, or with the host."""
    control_number, scope, rules, program = map(int, sys.argv[1:5])
    is_watched = sys.argv[6] != NOT_WATCHED
    _keep_descriptors()
    control = _socket.socket(fileno=control_number)
    if os.geteuid() == 0:
        sys.exit("a sandbox does not run as root")
    if control.recv(1) != b"g":
        sys.exit(0)
    owner = os.getppid()
    agent.call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _adopt_orphans()
    _enter(scope)
    _check_scope(owner)
    here, there = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    pid = os.fork()
    try:
        if pid == 0:
            here.close()
            _run_agent(control, scope, rules, program, there if is_watched else None)
        else:
            there.close()
            _watch(control, pid, _supervisor(here, pid) if is_watched else None)
    finally:
        agent.end_all()


def _supervisor(here: _socket.socket, pid: int) -> Supervisor:
    _, (listener,) = agent.receive(here)
    folders = (os.getcwd(), os.path.realpath(sys.argv[5]))
    return Supervisor(listener, pid, folders, int(sys.argv[6]))


def _keep_descriptors() -> None:
    """Let no command inherit what we did."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) >= FIRST_INHERITABLE:
            try:
                os.set_inheritable(int(name), False)
            except OSError:
                continue  # that of the listing


def _adopt_orphans() -> None:
    """Become the parent of every process below that loses its own."""
    if agent.call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        sys.exit("this kernel does not let a process adopt orphans")


def _enter(ruleset: int) -> None:
    if agent.call("syscall", RESTRICT_SELF, ruleset, 0):
        sys.exit("this kernel refuses a Landlock ruleset")


def _check_scope(owner: int) -> None:
    """Before anything is signalled: that the domain does hold signals back."""
    try:
        os.kill(owner, 0)
    except PermissionError:
        return
    except ProcessLookupError:
        sys.exit(0)
    sys.exit("this kernel does not confine signals")


def _watch(control: _socket.socket, pid: int, supervisor: Supervisor | None) -> None:
    """Return when the agent or the host is gone; until then answer what the filter asks."""
    agent.hide()
    poll = select.poll()
    poll.register(os.pidfd_open(pid), select.POLLIN)
    poll.register(control, 0)  # its end alone: what arrives is for the agent
    if supervisor is not None:
        poll.register(supervisor.listener, select.POLLIN)
    while poll.poll() == [(supervisor.listener if supervisor else -1, select.POLLIN)]:
        assert supervisor is not None
        supervisor.answer()


def _run_agent(
    control: _socket.socket, scope: int, rules: int, program: int, there: _socket.socket | None
) -> None:
    score = agent.open_score()  # not allowed once we are hidden
    agent.hide()
    with open(program, "rb") as file:
        steps = file.read()
    _adopt_orphans()
    _enter(rules)
    if there is not None:
        listener = agent.load_filter(steps, is_watched=True)
        rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, listener.to_bytes(4, sys.byteorder))]
        there.sendmsg([b"l"], rights)
        there.close()
        os.close(listener)
    elif steps:
        agent.load_filter(steps)
    Confined(control, score, scope).serve()


def _limit(name: str, value: str) -> tuple[int, int]:
    """A resource and its limit, or the lower one that holds already."""
    kind: int = getattr(resource, f"RLIMIT_{name.upper()}")
    _, present = resource.getrlimit(kind)
    is_lower = present != resource.RLIM_INFINITY and present < int(value)
    return kind, present if is_lower else int(value)


class Confined(agent.Agent):
    """An agent whose commands are confined by themselves, and limited."""

    def __init__(self, control: _socket.socket, score: int, scope: int) -> None:
        """`scope`: the ruleset that keeps commands from signalling us."""
        super().__init__(control, score)
        self.scope, self.shared = scope, (sys.argv[5],)
        self.limits = [_limit(*word.split("=")) for word in sys.argv[7:]]

    def spawn(
        self, program: bytes, argv: list[bytes], variables: dict[bytes, bytes], streams: list[int]
    ) -> int:
        """Start a command; that it cannot be run shows as its exit code."""
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            _enter(self.scope)  # before a stream takes the place of its descriptor
            for number, handle in enumerate(streams):
                os.dup2(handle, number)
            for number in agent.RESET_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            for kind, value in self.limits:
                resource.setrlimit(kind, (value, value))
            os.execve(program, argv, variables)
        except OSError as error:
            os._exit(agent.complain(argv[0], error, 2))
        finally:
            os._exit(agent.NOT_RUNNABLE)

    def is_clean(self) -> bool:
        """Empty the private folder. The filter lets nobody make System V objects."""
        return agent.are_emptied(self.shared)
