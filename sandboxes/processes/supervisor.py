"""What a guard decides about the calls of its sandbox that Landlock does not look at.

Times and attributes, and for a sandbox that runs as its host's own user modes and owners too, could
be changed on files that the sandbox may not even open; and nobody counts the processes of such a
sandbox. So its filter hands these calls here (seccomp user notification). A change is made here, to
the file that was opened and seen to lie in the sandbox, and never left to the kernel, which would
look at the path once more. New processes are counted, and made by the kernel or refused.

Between the permission for a process and its birth others may be counted, so many processes that
fork at the same moment can exceed the limit by as many as they are.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

RECEIVE, SEND, IS_VALID = 0xC0502100, 0xC0182101, 0x40082102
NOTICE, ANSWER = struct.Struct("=QIIiIQ6Q"), struct.Struct("=QqiI")
"""struct seccomp_notif and seccomp_notif_resp of linux/seccomp.h."""
CONTINUE = 1
AT_FDCWD, AT_SYMLINK_NOFOLLOW, AT_EMPTY_PATH = -100, 0x100, 0x1000
PATH_ONLY = os.O_PATH | os.O_CLOEXEC
PAGE, PATH_BYTES, TIMES_BYTES, XATTR_BYTES = 4096, 4096, 32, 65536
MACHINES = ("x86_64", "aarch64")
CHANGES = {
    "chmod": (90, None),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
}
BIRTHS = {"clone": (56, 220), "fork": (57, None), "vfork": (58, None)}
"""Calls that come here: their numbers on `MACHINES`."""


class Supervisor:
    """Answers the calls of one sandbox, one after the other."""

    def __init__(
        self, listener: int, agent: int, folders: tuple[str, ...], max_processes: int
    ) -> None:
        """`listener`: of the filter; `agent`: the pid below which processes are counted.

        `folders`: the sandbox's own, as the kernel names them; `max_processes` matters only if
        the filter asks about births.
        """
        self.listener, self.agent, self.folders = listener, agent, folders
        self.max_processes, self.num_processes = max_processes, 0
        column = MACHINES.index(os.uname().machine)
        self.names = {numbers[column]: name for name, numbers in (CHANGES | BIRTHS).items()}

    def answer(self) -> None:
        """Take the next call and answer it, unless its caller has died."""
        notice = bytearray(NOTICE.size)
        try:
            fcntl.ioctl(self.listener, RECEIVE, notice)
        except OSError:
            return
        number, pid, _, call, _, _, *words = NOTICE.unpack(notice)
        try:
            error, is_kernels = 0, self._decide(number, pid, self.names[call], words)
        except OSError as refusal:
            error, is_kernels = refusal.errno or errno.EACCES, False
        try:
            answer = ANSWER.pack(number, 0, -error, CONTINUE if is_kernels else 0)
            fcntl.ioctl(self.listener, SEND, answer)
        except OSError:
            return

    def _decide(self, number: int, pid: int, name: str, words: list[int]) -> bool:
        """Do a call, or return True where the kernel shall. Raises OSError to refuse it."""
        if name in BIRTHS:
            return self._count(pid)
        folder = _signed(words.pop(0)) if name.endswith(("at", "at2")) else AT_FDCWD
        pointer, *values = words
        if name == "utimensat" and not pointer:
            return True  # on an open file, and no one can make it a path
        places = {"fchmodat2": 1, "fchownat": 2, "utimensat": 1}
        flags = values[places[name]] if name in places else 0
        if flags & ~(AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH):
            raise OSError(errno.EINVAL, "flags")
        if name.startswith("l"):
            flags = AT_SYMLINK_NOFOLLOW
        path = _text(pid, pointer)
        data = _more(pid, name, values)
        handle = self._opened(number, pid, folder, path, flags)
        try:
            _change(f"/proc/self/fd/{handle}", name, values, data)
        finally:
            os.close(handle)
        return False

    def _opened(self, number: int, pid: int, folder: int, path: bytes, flags: int) -> int:
        """The file that a path of the caller's means, which must be the sandbox's own."""
        above = f"/proc/{pid}/cwd" if folder == AT_FDCWD else f"/proc/{pid}/fd/{folder}"
        follow = os.O_NOFOLLOW if flags & AT_SYMLINK_NOFOLLOW else 0
        if path.startswith(b"/"):
            for mine in (b"/proc/self/", b"/proc/thread-self/"):
                if path.startswith(mine):
                    path = b"/proc/%d/" % pid + path[len(mine) :]
            handle = os.open(path, PATH_ONLY | follow)
        else:
            try:
                handle = os.open(above, PATH_ONLY)
            except FileNotFoundError:
                raise OSError(errno.EBADF, "no such descriptor") from None
            if path or not flags & AT_EMPTY_PATH:
                start = handle
                try:
                    handle = os.open(path, PATH_ONLY | follow, dir_fd=start)
                finally:
                    os.close(start)
        try:
            fcntl.ioctl(self.listener, IS_VALID, struct.pack("=Q", number))  # pid was the caller's
            place = os.readlink(f"/proc/self/fd/{handle}")
            if not any(place == own or place.startswith(f"{own}/") for own in self.folders):
                raise PermissionError(errno.EACCES, "not a file of the sandbox")
        except BaseException:
            os.close(handle)
            raise
        return handle

    def _count(self, pid: int) -> bool:
        if pid == self.agent:  # a command begins, and nothing is left of the one before
            self.num_processes = 0
        elif self.num_processes >= self.max_processes:
            self.num_processes = num_tasks_below(self.agent)
            if self.num_processes >= self.max_processes:
                raise BlockingIOError(errno.EAGAIN, "too many processes")
        self.num_processes += 1
        return True


def num_tasks_below(top: int) -> int:
    """Threads of all descendants of a process; those of dead ones that nobody reaped count."""
    tasks: dict[int, int] = {}
    for _ in range(2):  # whoever loses its parent meanwhile turns up at the top
        newest = [top]
        while newest:
            pid = newest.pop()
            try:
                threads = os.listdir(f"/proc/{pid}/task")
                for thread in threads:
                    with open(f"/proc/{pid}/task/{thread}/children") as file:
                        newest += map(int, file.read().split())
            except OSError:
                continue
            tasks[pid] = len(threads)
    return sum(tasks.values()) - tasks.get(top, 0)


def _more(pid: int, name: str, values: list[int]) -> list[bytes]:
    """What else a call is told in the caller's memory: times, or an attribute and its value."""
    if name == "utimensat":
        return [_read(pid, values[0], TIMES_BYTES)] if values[0] else []
    if not name.endswith("xattr"):
        return []
    data = [_text(pid, values[0])]
    if name.endswith("setxattr"):
        if values[2] > XATTR_BYTES:
            raise OSError(errno.E2BIG, "value")
        data.append(_read(pid, values[1], values[2]) if values[2] else b"")
    return data


def _change(path: str, name: str, values: list[int], data: list[bytes]) -> None:
    if "chmod" in name:
        os.chmod(path, values[0] & 0o7777)
    elif "chown" in name:
        os.chown(path, _signed(values[0]), _signed(values[1]))
    elif name.endswith("setxattr"):
        os.setxattr(path, data[0], data[1], _signed(values[3]))
    elif name.endswith("removexattr"):
        os.removexattr(path, data[0])
    else:
        import ctypes

        library = ctypes.CDLL(None, use_errno=True)
        if library.utimensat(AT_FDCWD, os.fsencode(path), data[0] if data else None, 0):
            raise OSError(ctypes.get_errno(), "utimensat")


def _text(pid: int, pointer: int) -> bytes:
    """A string of the caller's memory that ends with NUL."""
    text = b""
    while len(text) < PATH_BYTES:
        place = pointer + len(text)
        part, end, _ = _read(pid, place, PAGE - place % PAGE).partition(b"\0")
        text += part
        if end:
            return text
    raise OSError(errno.ENAMETOOLONG, "path")


def _read(pid: int, pointer: int, size: int) -> bytes:
    try:
        handle = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(handle, size, pointer)
        finally:
            os.close(handle)
    except (OSError, OverflowError):
        data = b""
    if len(data) < size:
        raise OSError(errno.EFAULT, "memory")
    return data


def _signed(word: int) -> int:
    """The low half of a register as an int of C."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word
