"""The trusted program that grades a final state; it runs inside a fork of the sandbox.

    stdin: the job         parent: the hidden check              descriptor 3: the verdict
    ------------------->   (not dumpable, ignores signals)  ------------------------------>
                             | literal arguments   ^ literal result
                             v                     |
                           child: the policy's code, a fresh python3 of its own

The two share no memory and no descriptor but two pipes. What comes back is read as a literal, so
no object of the policy's reaches the check. First the check must hold for the reference, through
the same pipes: only then `ready` is said and the policy's code is started. Whatever happens after
that is the policy's doing. It must not import k3rl: it is sent as text. Nor does it import what
takes long: `ast`, `json` and `signal` are half of its time.
"""

from __future__ import annotations

import _ast
import _signal  # type: ignore[import-not-found]
import ctypes
import os
import resource
import select
import stat
import sys
import time
from collections.abc import Callable
from typing import Any

CHANNEL = 3
PR_SET_DUMPABLE = 4
MAX_MESSAGE_BYTES = 1 << 20
MAX_FILE_BYTES = 1 << 20
ONLY_TREE = 0x400
"""`ast.PyCF_ONLY_AST`."""
KILL, CHILD_ENDED, STOP = 9, 17, 19
IGNORED = tuple({*range(1, 32)} - {KILL, CHILD_ENDED, STOP})
"""All signals that can be: of those that the policy's code sends, KILL and STOP have an effect."""

CHILD = r"""
import os
requests, replies = os.dup(0), os.dup(1)
nowhere = os.open("/dev/null", os.O_RDWR)
for descriptor in (0, 1, 2):
    os.dup2(nowhere, descriptor)
import importlib, sys
sys.path[:] = [folder for folder in sys.path if folder]

def exactly(number):
    data = b""
    while len(data) < number:
        more = os.read(requests, number - len(data))
        if not more:
            os._exit(0)
        data += more
    return data

def receive():
    return eval(exactly(int.from_bytes(exactly(4), "big")).decode(), {})

def plain(value):
    for kind in (dict, list, tuple, set):
        if isinstance(value, kind):
            inside = value.items() if kind is dict else value
            return kind(plain(each) for each in inside)
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value

def send(text):
    data = text.encode()
    data = len(data).to_bytes(4, "big") + data
    while data:
        data = data[os.write(replies, data):]

def serve(find):
    while True:
        name, arguments = receive()
        try:
            answer = "=" + repr(plain(find(name)(*arguments)))
        except BaseException as error:
            answer = "!" + type(error).__name__
        send(answer)
"""
LOAD = r"""
os.chdir({workspace!r})
sys.path.append({workspace!r})
serve(lambda name: getattr(importlib.import_module({module!r}), name))
"""


def literal(text: str) -> Any:
    """What a text says if it is a literal; raises ValueError, SyntaxError and the like if not."""
    tree: Any = compile(text, "<literal>", "eval", ONLY_TREE)
    return _value(tree.body)


def _value(node: Any) -> Any:
    if isinstance(node, _ast.Constant):
        return node.value
    if isinstance(node, _ast.List):
        return [_value(each) for each in node.elts]
    if isinstance(node, _ast.Tuple):
        return tuple(_value(each) for each in node.elts)
    if isinstance(node, _ast.Set):
        return {_value(each) for each in node.elts}
    if isinstance(node, _ast.Dict) and None not in node.keys:
        return dict(zip(map(_value, node.keys), map(_value, node.values), strict=True))
    if isinstance(node, _ast.UnaryOp) and isinstance(node.op, _ast.USub):
        number = _value(node.operand)
        if type(number) in (int, float, complex):
            return -number
    if isinstance(node, _ast.Call) and not node.args and getattr(node.func, "id", "") == "set":
        return set()
    raise ValueError("not a literal")


class Refuted(BaseException):
    """The policy's code is wrong. No check can catch it by `except Exception`."""


class Server:
    """A process that answers calls, and how to ask it."""

    def __init__(self, start: Callable[[int, int], None], limit_s: float) -> None:
        """`start` becomes the process; it is given the descriptors of its requests and replies."""
        taken, self.requests = os.pipe()
        self.replies, given = os.pipe()
        self.deadline = time.monotonic() + limit_s
        self.pid = os.fork()
        if self.pid == 0:
            try:
                start(taken, given)
            finally:
                os._exit(1)
        os.close(taken)
        os.close(given)

    def ask(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """The result of a call. Raises Refuted when there is none in time, or none readable."""
        data = repr((name, arguments)).encode()
        self._send(len(data).to_bytes(4, "big") + data)
        size = int.from_bytes(self._receive(4), "big")
        if size > MAX_MESSAGE_BYTES:
            raise Refuted("the result is too large")
        text = self._receive(size).decode()
        if not text.startswith("="):
            raise Refuted(f"raised {text[1:80]}")
        return literal(text[1:])

    def stop(self) -> None:
        """End the process."""
        os.kill(self.pid, KILL)
        os.waitpid(self.pid, 0)
        os.close(self.requests)
        os.close(self.replies)

    def _wait(self, reads: list[int], writes: list[int]) -> None:
        left = max(self.deadline - time.monotonic(), 0.0)
        if not any(select.select(reads, writes, [], left)):
            raise Refuted("time")

    def _send(self, data: bytes) -> None:
        os.set_blocking(self.requests, False)
        while data:
            self._wait([], [self.requests])
            data = data[os.write(self.requests, data) :]

    def _receive(self, number: int) -> bytes:
        data = b""
        while len(data) < number:
            self._wait([self.replies], [])
            more = os.read(self.replies, number - len(data))
            if not more:
                raise Refuted("its process ended")
            data += more
        return data


def reference(source: str, module: str) -> Callable[[int, int], None]:
    """A forked copy of this process that runs the right solution."""

    def start(taken: int, given: int) -> None:
        os.dup2(taken, 0)
        os.dup2(given, 1)
        space: dict[str, Any] = {"__name__": module}
        exec(compile(source, "<reference>", "exec"), space)
        served: dict[str, Any] = {}
        exec(compile(CHILD, "<child>", "exec"), served)
        served["serve"](space.__getitem__)

    return start


def candidate(job: dict[str, Any], module: str) -> Callable[[int, int], None]:
    """A fresh interpreter that runs the policy's code; it inherits two pipes and nothing else."""
    program = CHILD + LOAD.format(workspace=job["workspace"], module=module)
    argv = [sys.executable, "-S", "-s", "-c", program]
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }

    def start(taken: int, given: int) -> None:
        os.dup2(taken, 0)
        os.dup2(given, 1)
        os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
        os.close(CHANNEL)
        os.setsid()
        os.chdir("/")
        for number in IGNORED:
            _signal.signal(number, _signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CPU, (job["cpu_s"], job["cpu_s"]))
        os.execve(sys.executable, argv, environment)

    return start


def hold(part: dict[str, Any], server: Server) -> None:
    """Run one function's check against a server. Raises whatever the check raises."""
    space: dict[str, Any] = {"__name__": "check"}
    exec(compile(part["reference"], "<reference>", "exec"), space)
    exec(compile(part["check"], "<check>", "exec"), space)
    if "random" in part["check"]:
        import random

        random.seed(0)
    space["check"](lambda *arguments: server.ask(part["name"], arguments))


def refuse_odd_files(job: dict[str, Any]) -> None:
    """Raise Refuted unless the files that were to be repaired are regular and of sane size."""
    for path in job["paths"]:
        try:
            found = os.lstat(os.path.join(job["workspace"], path))
        except OSError:
            raise Refuted(f"{path} is gone") from None
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_FILE_BYTES:
            raise Refuted(f"{path} is not a plain file")


def judge(job: dict[str, Any]) -> str:
    """`pass`, or `fail` and why. What the policy's code does wrong ends here, whatever it is."""
    try:
        refuse_odd_files(job)
        for part in job["parts"]:
            server = Server(candidate(job, part["module"]), job["limit_s"])
            hold(part, server)
            server.stop()
    except BaseException as error:
        return f"fail {type(error).__name__} {str(error)[:80]}"
    return "pass"


def main() -> None:
    """Read the job, prove the check by the reference, judge, say so, and end without clean-up."""
    os.set_inheritable(CHANNEL, False)
    if ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError("prctl: cannot hide this process")
    for number in IGNORED:
        _signal.signal(number, _signal.SIG_IGN)
    job = {**literal(sys.stdin.read()), "workspace": os.getcwd()}
    os.chdir("/")
    for part in job["parts"]:
        server = Server(reference(part["reference"], part["module"]), job["limit_s"])
        hold(part, server)
        server.stop()
    os.write(CHANNEL, f"{job['nonce']} ready\n".encode())
    verdict = judge(job)
    os.write(CHANNEL, f"{job['nonce']} {' '.join(verdict.split())}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    main()
