"""The system-call filter of a sandbox: a classic-BPF program for the kernel's seccomp.

It refuses calls that reach rarely used parts of the kernel or other processes, and that no build or
test needs. A deny list, not an allow list: what builds and tests call has no end, a call missing
from an allow list would make a right answer fail, and calls that need a privilege fail anyway.

A refused call fails with EPERM. `clone3` fails with ENOSYS, since its flags cannot be looked at; C
libraries then use `clone`. Taking disk without writing to it fails with EOPNOTSUPP, as on many file
systems: it is quicker than any watch over the disk, and C libraries then write. A call of another
architecture (32-bit code) kills its process, and the x32 ABI is refused. Layout of the program and
of what it looks at: linux/filter.h, linux/seccomp.h.

A sandbox without namespaces shares more with its host: its program also refuses what would reach
other processes, objects that are named and not files, and everything that is not a pair of sockets.
About some that change files, and about new processes, it can ask a supervisor.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

ALLOW, ASK, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x7FC00000, 0x80000000, 0x00050000
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_AT, ARCH_AT, ARGUMENTS_AT = 0, 4, 16
X32_BIT = 0x40000000
NEW_NAMESPACE = 0x7E020000
"""CLONE_NEWNS, -CGROUP, -UTS, -IPC, -USER, -PID and -NET; clone(2) takes no CLONE_NEWTIME."""
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
SAME_PERSONALITY = (0, 0xFFFFFFFF)
"""Linux as it is, and the question for the present one."""
RESERVATIONS = (0x40305828, 0x4030582A, 0x40305839)
"""FS_IOC_RESVSP, FS_IOC_RESVSP64 and FS_IOC_ZERO_RANGE of linux/falloc.h: fallocate by ioctl."""
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
NETLINK_ROUTE = 0
"""getaddrinfo asks it for the interfaces."""

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_* of the machines that a filter can be made for, by the name `uname` gives them."""
Numbers = tuple[int | None, int | None]
NOTHING: Mapping[str, Numbers] = {}
NUMBERS: dict[str, Numbers] = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    # mounts and namespaces
    "mount": (165, 40),
    "umount2": (166, 39),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    # large, rarely needed parts of the kernel
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "modify_ldt": (154, None),
    # the machine itself
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "vhangup": (153, 58),
    "syslog": (103, 116),
    "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42),
}
"""Refused whatever their arguments: the numbers on the machines of `ARCHITECTURES`, in order."""
SHARED_NUMBERS: dict[str, Numbers] = {
    # System V objects and POSIX queues
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    # what happens in folders that may not be read
    "inotify_add_watch": (254, 27),
    "statmount": (457, 457),
    "listmount": (458, 458),
    # other processes
    "ioprio_set": (251, 30),
}
"""Refused as well where there are no namespaces."""
CHANGE_NUMBERS: dict[str, Numbers] = {
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
}
"""Refused as well where a supervisor is asked about changes; C libraries use those calls."""
OF_A_PROCESS = {
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
}
"""Refused there unless their first argument, a process or thread, is 0: the caller."""
CLONE, CLONE3, IOCTL, PERSONALITY = (56, 220), (435, 435), (16, 29), (135, 92)
SOCKET, SOCKETPAIR, SETPRIORITY = (41, 198), (53, 199), (141, 140)
DATAGRAM_BIT = 2
"""Of the types of sockets: those that can send to an address without being connected to it."""
PRIO_USER = 2
FALLOCATE = (285, 47)


def refused_number(name: str) -> int | None:
    """The number on this machine of a call that is always refused; None where it has none."""
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        return None
    return NUMBERS[name][list(ARCHITECTURES).index(machine)]


def filter_program(
    machine: str | None = None,
    has_namespaces: bool = True,
    asked: Mapping[str, Numbers] = NOTHING,
) -> bytes | None:
    """The program for a machine (None: this one), as `bwrap --seccomp` reads it.

    None on a machine that is not in `ARCHITECTURES`: nothing can be filtered there.
    `has_namespaces`: of its own, of processes, networks and objects; without, more is refused.
    `asked`: calls about which a supervisor is asked, of those that supervisor.py names.
    """
    name = os.uname().machine if machine is None else machine
    if name not in ARCHITECTURES:
        return None
    column = list(ARCHITECTURES).index(name)
    program = _Program()
    program.load(ARCH_AT)
    program.jump(JUMP_EQUAL, ARCHITECTURES[name], otherwise="kill")
    program.load(NUMBER_AT)
    if name == "x86_64":
        program.jump(JUMP_AT_LEAST, X32_BIT, "deny")
    refused = NUMBERS if has_namespaces else NUMBERS | SHARED_NUMBERS
    for numbers in (refused | CHANGE_NUMBERS if asked else refused).values():
        program.jump_at(numbers[column], "deny")
    program.jump(JUMP_EQUAL, CLONE3[column], "nosys")
    program.jump(JUMP_EQUAL, FALLOCATE[column], "unsupported")
    _look_at_arguments(program, column, "ask" if "clone" in asked else "allow")
    for numbers in asked.values():
        program.jump_at(numbers[column], "ask")
    if has_namespaces:
        _look_at_sockets(program, column)
    else:
        _look_at_others(program, column)
    program.end("allow", ALLOW)
    program.end("ask", ASK)
    program.end("deny", ERRNO | errno.EPERM)
    program.end("nosys", ERRNO | errno.ENOSYS)
    program.end("unsupported", ERRNO | errno.EOPNOTSUPP)
    program.end("kill", KILL_PROCESS)
    return program.packed()


def _look_at_arguments(program: _Program, column: int, of_clone: str) -> None:
    """Rules for calls that depend on arguments; the kernel looks at their low 32 bits alone."""
    with_argument = program.begin(CLONE[column], 0)
    program.jump(JUMP_ANY_BIT, NEW_NAMESPACE, "deny", of_clone)
    program.mark(with_argument)

    with_argument = program.begin(IOCTL[column], 1)
    for request in RESERVATIONS:
        program.jump(JUMP_EQUAL, request, "unsupported")
    program.jump(JUMP_EQUAL, TIOCSTI, "deny")
    program.jump(JUMP_EQUAL, TIOCLINUX, "deny", "allow")
    program.mark(with_argument)

    with_argument = program.begin(PERSONALITY[column], 0)
    program.jump(JUMP_EQUAL, SAME_PERSONALITY[0], "allow")
    program.jump(JUMP_EQUAL, SAME_PERSONALITY[1], "allow", "deny")
    program.mark(with_argument)


def _look_at_sockets(program: _Program, column: int) -> None:
    """Sockets of the families that builds and tests use."""
    with_argument = program.begin(SOCKETPAIR[column], 0)
    program.jump(JUMP_EQUAL, AF_UNIX, "allow", "deny")
    program.mark(with_argument)

    with_argument = program.begin(SOCKET[column], 0)
    for family in (AF_UNIX, AF_INET, AF_INET6):
        program.jump(JUMP_EQUAL, family, "allow")
    program.jump(JUMP_EQUAL, AF_NETLINK, otherwise="deny")
    program.load(_low_half(2))
    program.jump(JUMP_EQUAL, NETLINK_ROUTE, "allow", "deny")
    program.mark(with_argument)


def _look_at_others(program: _Program, column: int) -> None:
    """No socket but a connected pair, and nothing done to another process."""
    program.jump(JUMP_EQUAL, SOCKET[column], "deny")
    with_argument = program.begin(SOCKETPAIR[column], 0)
    program.jump(JUMP_EQUAL, AF_UNIX, otherwise="deny")
    program.load(_low_half(1))
    program.jump(JUMP_ANY_BIT, DATAGRAM_BIT, "deny", "allow")
    program.mark(with_argument)

    for numbers in OF_A_PROCESS.values():
        with_argument = program.begin(numbers[column], 0)
        program.jump(JUMP_EQUAL, 0, "allow", "deny")
        program.mark(with_argument)

    with_argument = program.begin(SETPRIORITY[column], 0)
    program.jump(JUMP_EQUAL, PRIO_USER, "deny")
    program.load(_low_half(1))
    program.jump(JUMP_EQUAL, 0, "allow", "deny")
    program.mark(with_argument)


def _low_half(argument: int) -> int:
    """Where an argument's low 32 bits are; both machines are little-endian."""
    return ARGUMENTS_AT + 8 * argument


@dataclass(slots=True)
class _Program:
    """Instructions whose jumps name labels; a jump without one goes to the next instruction."""

    lines: list[tuple[int, int, str, str]] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def load(self, offset: int) -> None:
        self.lines.append((LOAD, offset, "", ""))

    def jump(self, test: int, value: int, target: str = "", otherwise: str = "") -> None:
        self.lines.append((test, value, target, otherwise))

    def jump_at(self, number: int | None, target: str) -> None:
        """Decide a call whatever its arguments, on a machine that has it."""
        if number is not None:
            self.jump(JUMP_EQUAL, number, target)

    def begin(self, number: int, argument: int) -> str:
        """Rules for one call, on one of its arguments; returns the label that must end them."""
        label = f"not {number}"
        self.jump(JUMP_EQUAL, number, otherwise=label)
        self.load(_low_half(argument))
        return label

    def mark(self, label: str) -> None:
        self.labels[label] = len(self.lines)

    def end(self, label: str, verdict: int) -> None:
        self.mark(label)
        self.lines.append((RETURN, verdict, "", ""))

    def packed(self) -> bytes:
        def distance(place: int, label: str) -> int:
            return self.labels[label] - place - 1 if label else 0

        return b"".join(
            struct.pack("<HBBI", code, distance(place, target), distance(place, otherwise), value)
            for place, (code, value, target, otherwise) in enumerate(self.lines)
        )
