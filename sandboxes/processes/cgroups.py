"""Control groups: what bounds the memory and the processes of a whole sandbox.

Each sandbox has a group of its own, named after its owner's folder, below a group that k3rl may add
to: of version 2, the nearest one above our own whose children have a memory controller; of version
1, our own in the memory and in the pids hierarchy. Whether a place can be used is found out by
trying. An ordinary user has one only where a part of the tree was delegated to them.

A tmpfs is charged to the group of whoever fills it, so /tmp and /dev/shm count.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from k3rl.errors import SandboxError
from k3rl.sandboxes.spec import SandboxLimits

PREFIX = "k3rl-"
RECORD = "cgroups"
"""A file in an owner's folder: the folders, one a line, in which it may have made groups."""
TRIAL = "trial"
TRIAL_PROGRAM = "/bin/cat"
MEMBERS = "cgroup.procs"
MEMORY_LIMITS = ("memory.max", "memory.limit_in_bytes")
"""Of version 2 and of version 1."""
KILL_COUNTS = ("memory.events", "memory.oom_control")
KILL_COUNT = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)
COUNTER_BYTES = 4096
EXTRA_PROCESSES = 2
"""The agent, and one to spare: this limit is the second line behind the sandbox's own."""
REMOVAL_WAIT_S = 2.0
"""How long a group of dead processes may take to be empty."""
POLL_S = 0.001


class Group:
    """The control group of one sandbox, in every hierarchy that bounds it."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Over folders that exist; `remove` frees it."""
        self.folders = tuple(folders)
        # Held open, because it is read before every command.
        self._counter = _open_counter(self.folders)

    def add(self, pid: int) -> None:
        """Put a process in, unless it is dead; what it starts is in too. Raises OSError."""
        with suppress(ProcessLookupError):
            for folder in self.folders:
                (folder / MEMBERS).write_text(str(pid))

    @property
    def num_memory_kills(self) -> int:
        """Processes that were killed because the group's memory was used up."""
        if self._counter < 0:
            return 0
        found = KILL_COUNT.search(os.pread(self._counter, COUNTER_BYTES, 0))
        return int(found[1]) if found else 0

    def remove(self) -> bool:
        """Delete it when its processes are dead; False when one is not dying. Can be repeated."""
        if self._counter >= 0:
            os.close(self._counter)
            self._counter = -1
        return all([_remove(folder) for folder in self.folders])


def _open_counter(folders: Sequence[Path]) -> int:
    for folder in folders:
        for name in KILL_COUNTS:
            with suppress(OSError):
                return os.open(folder / name, os.O_RDONLY)
    return -1


@dataclass(frozen=True, slots=True)
class Cgroups:
    """Where an owner makes its groups."""

    parents: tuple[Path, ...]
    owner: str

    def make(self, name: str, limits: SandboxLimits) -> Group:
        """A group for one sandbox. Raises SandboxError when the kernel refuses it."""
        folders = tuple(parent / f"{PREFIX}{self.owner}.{name}" for parent in self.parents)
        try:
            for folder in folders:
                folder.mkdir()
                _limit(folder, limits)
        except OSError as error:
            Group(folders).remove()
            raise SandboxError(f"{folder}: cannot make a control group: {error}") from error
        return Group(folders)

    def is_usable(self) -> bool:
        """Whether a group with a memory limit can be made and a process be put in."""
        try:
            group = self.make(TRIAL, SandboxLimits())
        except SandboxError:
            return False
        is_limited = any(
            (folder / name).exists() for folder in group.folders for name in MEMORY_LIMITS
        )
        try:
            return is_limited and _takes_a_process(group)
        finally:
            group.remove()


def find_cgroups(owner: Path) -> Cgroups | None:
    """Where groups can be made on this machine; None: nowhere. Takes note in the owner's folder."""
    places = list(_places())
    # Before the first group is made, so that none is left when we are killed.
    lines = {f"{parent}\n" for parents in places for parent in parents}
    (owner / RECORD).write_text("".join(sorted(lines)))
    for parents in places:
        cgroups = Cgroups(parents, owner.name)
        if cgroups.is_usable():
            return cgroups
    return None


def remove_groups(owner: Path) -> bool:
    """Delete every group of an owner whose processes are dead; False when one remains."""
    try:
        parents = (owner / RECORD).read_text().splitlines()
    except OSError:
        return True  # nothing can have been made
    start = f"{PREFIX}{owner.name}."
    found = []
    for parent in parents:
        with suppress(OSError):
            found += [Path(parent, name) for name in os.listdir(parent) if name.startswith(start)]
    return all([_remove(folder) for folder in found])


def _limit(folder: Path, limits: SandboxLimits) -> None:
    """Set the limits that the hierarchy of a group knows, of either version."""
    total = limits.total_memory_bytes
    values = {
        "memory.max": total,
        "memory.swap.max": 0,
        "memory.limit_in_bytes": total,
        "memory.memsw.limit_in_bytes": total,  # memory and swap together; not below the last one
        "pids.max": limits.max_processes + EXTRA_PROCESSES,
    }
    for name, value in values.items():
        if (folder / name).exists():
            (folder / name).write_text(str(value))


def _takes_a_process(group: Group) -> bool:
    try:
        process = subprocess.Popen([TRIAL_PROGRAM], stdin=subprocess.PIPE, env={})
    except OSError:
        return False
    try:
        group.add(process.pid)
        groups = Path(f"/proc/{process.pid}/cgroup").read_text()
        return groups.count(f"/{group.folders[0].name}\n") == len(group.folders)
    except OSError:
        return False
    finally:
        process.communicate()


def _remove(folder: Path) -> bool:
    limit = time.monotonic() + REMOVAL_WAIT_S
    while True:
        try:
            folder.rmdir()
            return True
        except FileNotFoundError:
            return True
        except OSError:
            if time.monotonic() > limit:
                return False
            time.sleep(POLL_S)


def _places() -> Iterator[tuple[Path, ...]]:
    """Folders that groups may be made in, one for each hierarchy, the best first."""
    own = own_groups()
    unified = own.get("")
    if unified is not None:
        folder, mount = unified
        for place in (folder, *folder.parents):
            if not place.is_relative_to(mount):
                break
            if "memory" in _words(place / "cgroup.subtree_control"):
                yield (place,)
    if "memory" in own:
        yield tuple(own[name][0] for name in ("memory", "pids") if name in own)


def own_groups() -> dict[str, tuple[Path, Path]]:
    """By controller ("": version 2), our own group's folder and where its hierarchy is mounted."""
    paths: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    found: dict[str, tuple[Path, Path]] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        root, mount = left.split(" ")[3:5]
        names = {"cgroup2": [""], "cgroup": options.split(",")}.get(kind, [])
        for name in paths.keys() & set(names):
            # A container may show a part of the tree alone, with itself as the root.
            is_below = Path(paths[name]).is_relative_to(root)
            inner = os.path.relpath(paths[name], root) if is_below else "."
            found.setdefault(name, (Path(mount, inner), Path(mount)))
    return found


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
