"""Landlock rulesets: what a process may do with files, and whom it may signal, once it enters one.

A ruleset is a descriptor. It is made and filled here, outside; `landlock_restrict_self` with it is
what a process inside does. Numbers and layouts: linux/landlock.h; the calls have the same numbers
on every machine. What Landlock does not look at (`stat`, `chmod` and the like on a path, path-name
unix sockets before ABI 9) is dealt with elsewhere.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable
from enum import IntFlag
from pathlib import Path

from k3rl.errors import CapabilityMissing

CREATE_RULESET, ADD_RULE = 444, 445
ASK_VERSION, PATH_BENEATH = 1, 1
MIN_ABI = 6
"""The first with scopes: a sandbox's processes cannot signal others, nor end what holds them."""


class Access(IntFlag):
    """Rights on files, LANDLOCK_ACCESS_FS_*."""

    EXECUTE = 1 << 0
    WRITE_FILE = 1 << 1
    READ_FILE = 1 << 2
    READ_DIR = 1 << 3
    REMOVE_DIR = 1 << 4
    REMOVE_FILE = 1 << 5
    MAKE_CHAR = 1 << 6
    MAKE_DIR = 1 << 7
    MAKE_REG = 1 << 8
    MAKE_SOCK = 1 << 9
    MAKE_FIFO = 1 << 10
    MAKE_BLOCK = 1 << 11
    MAKE_SYM = 1 << 12
    REFER = 1 << 13
    TRUNCATE = 1 << 14
    IOCTL_DEV = 1 << 15
    RESOLVE_UNIX = 1 << 16


READ = Access.READ_FILE | Access.READ_DIR
RUN = READ | Access.EXECUTE
DEVICE = Access.READ_FILE | Access.WRITE_FILE | Access.TRUNCATE | Access.IOCTL_DEV
OWN = ~(Access.MAKE_CHAR | Access.MAKE_BLOCK)
"""Everything but device nodes."""
OF_FILES = (
    Access.EXECUTE | Access.WRITE_FILE | Access.READ_FILE | Access.TRUNCATE | Access.IOCTL_DEV
)
"""What can be granted on a path that is no folder."""
SINCE = {Access.RESOLVE_UNIX: 9}
"""The ABI that brought a right, where it is above `MIN_ABI`."""
BIND_TCP, CONNECT_TCP = 1, 2
SCOPE_ABSTRACT_SOCKETS, SCOPE_SIGNALS = 1, 2


def landlock_abi() -> int:
    """The kernel's version of Landlock; 0 where it has none or it is switched off."""
    return max(_syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ASK_VERSION), 0)


def check_abi(abi: int) -> int:
    """The same number. Raises CapabilityMissing when it is too low for sandboxes."""
    if abi < MIN_ABI:
        found = f"this kernel has ABI {abi}" if abi else "this kernel has none, or forbids it"
        raise CapabilityMissing(f"Landlock ABI {MIN_ABI} (Linux 6.12) is needed: {found}")
    return abi


def rules(abi: int, granted: Iterable[tuple[Path, Access]]) -> int:
    """A ruleset that refuses every right of the ABI but those granted below paths, and all TCP.

    Paths that are not there, or not for us, are passed over. Raises OSError.
    """
    handled = Access(0)
    for right in Access:
        if abi >= SINCE.get(right, MIN_ABI):
            handled |= right
    return _filled(handled, BIND_TCP | CONNECT_TCP, granted)


def scope() -> int:
    """A ruleset that confines signals and abstract sockets alone.

    Renaming between folders is refused by every ruleset that does not grant it.
    """
    return _filled(Access.REFER, 0, [(Path("/"), Access.REFER)])


def _filled(handled: Access, tcp: int, granted: Iterable[tuple[Path, Access]]) -> int:
    words = struct.pack("=QQQ", handled, tcp, SCOPE_ABSTRACT_SOCKETS | SCOPE_SIGNALS)
    ruleset = _checked(CREATE_RULESET, words, ctypes.c_size_t(len(words)), 0)
    try:
        for path, access in granted:
            _grant(ruleset, path, access & handled)
    except BaseException:
        os.close(ruleset)
        raise
    return ruleset


def _grant(ruleset: int, path: Path, access: Access) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            access &= OF_FILES
        words = struct.pack("=Qi", access, place)
        _checked(ADD_RULE, ruleset, PATH_BENEATH, words, 0)
    finally:
        os.close(place)


def _checked(number: int, *words: object) -> int:
    code = _syscall(number, *words)
    if code < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"Landlock: {os.strerror(error)}")
    return code


def _syscall(number: int, *words: object) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    code: int = library.syscall(number, *words)
    return code
