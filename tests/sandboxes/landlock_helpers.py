"""Running the tests of backend landlock as root and as an ordinary user."""

import concurrent.futures.thread  # noqa: F401  # an ordinary user may not be able to read it
import os
import pwd  # noqa: F401
import py_compile  # noqa: F401
import secrets
import signal
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from k3rl.sandboxes.base import SandboxBackend
from k3rl.sandboxes.processes.landlock import MIN_ABI, landlock_abi
from tests.sandboxes.sandbox_helpers import play

USER = 54321
GONE_WAIT_S = 5.0
needs_landlock = pytest.mark.skipif(
    landlock_abi() < MIN_ABI, reason=f"this kernel's Landlock ABI is below {MIN_ABI}"
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has uids to hand out")
WHO = (pytest.param("root", marks=needs_root), "user")


def become_user() -> None:
    """From now on this process is an ordinary user's; nothing changes for one that is."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)


def apart(work: Callable[[], None], who: str) -> int:
    """Start `work` in a process of its own, as root or as an ordinary user; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if who == "user":
            become_user()
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def as_who(
    who: str,
    folder: Path,
    body: Callable[[SandboxBackend], Awaitable[None]],
    kind: str = "landlock",
) -> None:
    """`play`, as root or as an ordinary user; a failure shows on standard error."""
    if who == "root":
        play(kind, folder, body)
        return
    pid = apart(lambda: play(kind, folder / "user", body), who)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def mark() -> str:
    """A word that no other process has on its command line."""
    return f"mark-{secrets.token_hex(8)}"


def marked(word: str) -> list[int]:
    """Living processes, but ours, with `word` on their command line."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            is_dead = (place / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            if word.encode() in (place / "cmdline").read_bytes() and not is_dead:
                found.append(int(place.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def is_gone(word: str) -> bool:
    """Whether no process with `word` is left, or is left soon."""
    end = time.monotonic() + GONE_WAIT_S
    while marked(word) and time.monotonic() < end:
        time.sleep(0.01)
    return not marked(word)


def end(word: str) -> None:
    """Kill what is left."""
    for pid in marked(word):
        os.kill(pid, signal.SIGKILL)
