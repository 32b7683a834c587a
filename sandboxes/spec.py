"""What a sandbox must be: limits, environment, programs, and what has to be enforced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated

from pydantic import ConfigDict, PlainSerializer

from k3rl.errors import UserInputError
from k3rl.types import Digest, digest_json, to_plain

MIB = 1 << 20
MAX_LIMIT = 1 << 62


class Capability(StrEnum):
    """What a backend may enforce; probed on the machine it runs on, never assumed."""

    ISOLATED_FILES = "isolated_files"
    """The host's files outside read-only system folders can be neither read, listed nor changed."""
    HIDDEN_PATHS = "hidden_paths"
    """Nor does it show whether a path that is guessed exists there."""
    NO_NETWORK = "no_network"
    PROCESS_LIMIT = "process_limit"
    FILE_SIZE_LIMIT = "file_size_limit"
    MEMORY_LIMIT = "memory_limit"
    CPU_TIME_LIMIT = "cpu_time_limit"
    KILLS_DESCENDANTS = "kills_descendants"
    """After an exec ends or times out, none of its processes is left."""
    SYSCALL_FILTER = "syscall_filter"
    """Calls that no build or test needs are refused by the kernel: see seccomp.py."""
    TOTAL_MEMORY_LIMIT = "total_memory_limit"
    """All processes of a sandbox, /tmp and /dev/shm together."""
    DISK_LIMIT = "disk_limit"
    """A command whose workspace outgrows its limits is killed; see disk.py for how soon."""
    PRIVATE_TMP = "private_tmp"
    """/tmp and /dev/shm are sized, and empty at each command; so are System V objects."""
    ISOLATED_PROCESSES = "isolated_processes"
    """Nothing that runs outside can be seen, signalled or traced, nor is the machine named."""
    NO_PRIVILEGES = "no_privileges"
    """No capability, and no way to one by setuid programs, namespaces or devices."""
    SNAPSHOT = "snapshot"
    FORK = "fork"
    IMAGES = "images"
    """`SandboxSpec.image` says where programs come from."""
    EGRESS_ALLOW_LIST = "egress_allow_list"
    """Named hosts alone can be reached. No backend claims it: all have no network."""
    PROCESS_MEMORY = "process_memory"
    """Snapshots hold running processes. No backend claims it: none outlives its command."""


OFFERED_BY_SOME = frozenset(
    {Capability.IMAGES, Capability.EGRESS_ALLOW_LIST, Capability.PROCESS_MEMORY}
)
"""What a backend may offer beyond confining: nothing is amiss where it is missing."""
ENFORCED_BY_DEFAULT = (
    Capability.ISOLATED_FILES,
    Capability.NO_NETWORK,
    Capability.PROCESS_LIMIT,
    Capability.FILE_SIZE_LIMIT,
    Capability.KILLS_DESCENDANTS,
    Capability.SYSCALL_FILTER,
    Capability.DISK_LIMIT,
    Capability.NO_PRIVILEGES,
    Capability.SNAPSHOT,
)


STRICT = ConfigDict(extra="forbid")
"""A key that a carrier does not know is refused, not dropped."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Resource limits of one exec. Raises UserInputError for one that is not positive."""

    __pydantic_config__ = STRICT

    max_processes: int = 64
    max_open_files: int = 256
    max_file_bytes: int = 64 * MIB
    address_space_bytes: int = 2048 * MIB
    """Per process."""
    cpu_s: int = 60
    """Per process."""
    tmp_bytes: int = 64 * MIB
    """Size of the private /tmp."""
    total_memory_bytes: int = 2048 * MIB
    """Of the whole sandbox, swap, /tmp and /dev/shm included, where `total_memory_limit` holds."""
    workspace_bytes: int = 1024 * MIB
    """Disk that the workspace takes. What exceeds it kills the command: exit code 137."""
    workspace_entries: int = 200_000
    """Paths in the workspace, likewise."""

    def __post_init__(self) -> None:
        """Hold that each is a number that the kernel takes."""
        for each in fields(self):
            value = getattr(self, each.name)
            if not 0 < value < MAX_LIMIT:
                raise UserInputError(f"{each.name}: {value} is not between 1 and {MAX_LIMIT - 1}")


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox must be. `required` that a backend lacks is refused by name.

    It cannot be changed, and travels as `to_plain` makes it; `from_plain` raises UserInputError
    naming the field that it does not know or that holds a bad value.
    """

    __pydantic_config__ = STRICT

    limits: SandboxLimits = field(default_factory=SandboxLimits)
    environment: Annotated[Mapping[str, str], PlainSerializer(dict)] = field(default_factory=dict)
    """The whole environment beside PATH, HOME, TMPDIR and LANG; nothing is inherited."""
    executables: tuple[str, ...] = ("sh",)
    """Programs that must be found on the sandbox's PATH."""
    required: tuple[Capability, ...] = ENFORCED_BY_DEFAULT
    image: str | None = None
    """A container image that the backend's daemon holds, by name, name@digest or id; needs
    `images`. None: this machine's own programs."""

    def __post_init__(self) -> None:
        """Take the environment as it is now, and hold that it and the programs can be used."""
        object.__setattr__(self, "environment", MappingProxyType(dict(self.environment)))
        check_environment(self.environment)
        for program in self.executables:
            if not program or "/" in program or "\0" in program:
                raise UserInputError(f"executables: {program!r} is not the name of a program")

    def __hash__(self) -> int:
        """Of the content, as equality is."""
        return hash(self.digest)

    @property
    def digest(self) -> Digest:
        """Content hash of the spec; the order of its environment does not matter."""
        return digest_json(to_plain(self))


def check_environment(variables: Mapping[str, str]) -> None:
    """Raise UserInputError unless a process can be given these variables."""
    for name, value in variables.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            what = "a name is not empty and holds no '=', no name or value holds a NUL byte"
            raise UserInputError(f"environment: {name!r}: {what}")
