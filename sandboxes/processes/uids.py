"""Uids that no one else has, one for each sandbox of an owner that runs as root.

A uid of its own lets the kernel count a sandbox's processes alone, closes its files to other
sandboxes, and lets everything that it runs be killed at once. An owner claims blocks of uids by
binding an abstract socket with the block's name, so that a block is free again when its owner dies;
the owner's folder names them too, for whoever has to end what is left. Owners in containers that
share no network do not see each other's claims, and in one block of 65,536 they may meet.
"""

from __future__ import annotations

import os
import pwd
import secrets
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from k3rl.errors import SandboxError
from k3rl.sandboxes.files.trees import Identity
from k3rl.sandboxes.processes.orphans import DEATH_WAIT_S, look

BLOCK = 512
RANGES = (range(1_900_000_000, 1_900_000_000 + 65_536 * BLOCK), range(40_960, 40_960 + 36 * BLOCK))
"""Reserved by nobody (systemd's UIDS-GIDS.md); then, for containers that map few, of 65,536 ids."""
RECORD = "uids"
"""A file in an owner's folder: the first uid of each block that it claimed, one a line."""
CLAIM_TRIES = 64
KILL_ALL = ("/bin/sh", "-c", "kill -KILL -1")
POLL_S = 0.002


class Uids:
    """The uids of one owner."""

    def __init__(self, owner: Path) -> None:
        """`owner`: its folder. Claims nothing yet."""
        self._record = owner / RECORD
        self._claims: list[socket.socket] = []
        self._free: deque[int] = deque()
        self._lock = threading.Lock()

    def take(self) -> Identity:
        """A uid, and the gid of the same number, that nothing runs as. Raises SandboxError."""
        with self._lock:
            if not self._free:
                self._free.extend(self._claim())
            uid = self._free.popleft()
        return Identity(uid, uid)

    def give_back(self, who: Identity) -> None:
        """Nothing runs as `who` any more."""
        with self._lock:
            self._free.append(who.uid)

    def close(self) -> None:
        """Let others have them."""
        while self._claims:
            self._claims.pop().close()

    def _claim(self) -> range:
        usable = [ids for ids in RANGES if is_mapped(ids[0]) and is_mapped(ids[-1])]
        for _ in range(CLAIM_TRIES if usable else 0):
            block = usable[0][secrets.randbelow(len(usable[0]) // BLOCK) * BLOCK :][:BLOCK]
            claim = _claimed(block)
            if claim is None:
                continue
            if _is_known(block) or any(_running(block)):
                claim.close()
                continue
            self._claims.append(claim)
            with self._record.open("a") as file:  # before anything runs as one of them
                file.write(f"{block[0]}\n")
            return block
        raise SandboxError("no uids can be had that are mapped here and that nobody uses")


def is_mapped(number: int) -> bool:
    """Whether a uid and the gid of the same number exist in our user namespace."""
    return all(_is_in(Path("/proc/self", table), number) for table in ("uid_map", "gid_map"))


def end_users(uids: range) -> bool:
    """Kill all that runs as one of them, and wait until it is gone; False when it does not go.

    Needs root. Each is killed by a process of its own uid, which can signal no other.
    """
    limit = time.monotonic() + DEATH_WAIT_S
    while found := set(_running(uids)):
        if time.monotonic() > limit:
            return False
        for uid in found:
            who = {"user": uid, "group": uid, "extra_groups": ()}
            subprocess.run(KILL_ALL, env={}, check=False, **who)  # type: ignore[call-overload]
        time.sleep(POLL_S)
    return True


def end_claimed(owner: Path) -> bool:
    """Kill all that runs as a uid that a dead owner had claimed; False when it does not go."""
    try:
        lines = (owner / RECORD).read_text().split()
    except FileNotFoundError:
        return True
    return all([_end_block(range(int(line), int(line) + BLOCK)) for line in lines])


def _end_block(block: range) -> bool:
    claim = _claimed(block)
    if claim is None:
        return True  # whoever has it now saw that nothing ran
    with claim:
        return end_users(block)


def _claimed(block: range) -> socket.socket | None:
    """What makes a block ours for as long as it is open; None when it is somebody else's."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(f"\0k3rl-uids-{block[0]}")
    except OSError:
        claim.close()
        return None
    return claim


def _running(uids: range) -> Iterator[int]:
    """The uid of each living process whose uid is one of these."""
    for name in os.listdir("/proc"):
        process = look(int(name)) if name.isdigit() else None
        if process is not None and process.uid in uids:
            yield process.uid


def _is_known(uids: range) -> bool:
    return any(user.pw_uid in uids for user in pwd.getpwall())


def _is_in(table: Path, number: int) -> bool:
    for line in table.read_text().splitlines():
        first, _, count = (int(word) for word in line.split())
        if first <= number < first + count:
            return True
    return False
