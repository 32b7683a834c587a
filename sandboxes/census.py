"""Counting what sandboxes left behind, by means that share nothing with what clears it away.

It knows no process by its shape and no folder by its owner: everything is found by a plain look at
the kernel's own lists, for any trace of a scratch folder.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Census:
    """What there is of a scratch folder, one line each."""

    processes: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    containers: tuple[str, ...] = ()

    def kinds(self) -> list[str]:
        """The names of the fields that are not empty."""
        return [each.name for each in fields(self) if getattr(self, each.name)]

    def __len__(self) -> int:
        """Everything together."""
        return sum(len(getattr(self, each.name)) for each in fields(self))


def take_census(scratch: Path, past_owners: Collection[str] = ()) -> Census:
    """Look for processes, mounts, control groups, workspaces and containers of a scratch folder.

    Control groups carry the names of owners' folders: those of `past_owners`, which are gone, are
    looked for too. Our own process does not count. Takes some milliseconds.
    """
    owners = sorted(path.name for path in scratch.glob("owner-*"))
    return Census(
        processes=tuple(_processes(str(scratch))),
        mounts=tuple(line for line in _lines("/proc/self/mountinfo") if str(scratch) in line),
        groups=tuple(_groups({*owners, *past_owners})),
        folders=tuple(owners),
        containers=tuple(_containers(str(scratch))),
    )


def _processes(scratch: str) -> list[str]:
    """Those that run in, were started from, or can see the folder, or name it."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        process = Path("/proc", name)
        shown = [_link(process / "cwd"), _link(process / "exe"), _link(process / "root")]
        shown += _lines(process / "mountinfo") + _lines(process / "cmdline")
        if any(scratch in each for each in shown):
            found.append(f"{name} {_lines(process / 'cmdline')}")
    return found


def _groups(owners: Collection[str]) -> list[str]:
    found = []
    for folder, names, _ in os.walk("/sys/fs/cgroup"):
        mine = [name for name in names if any(owner in name for owner in owners)]
        found += [os.path.join(folder, name) for name in mine]
    return found


def _containers(scratch: str) -> list[str]:
    if not os.environ.get("DOCKER_HOST"):
        return []
    words = ["docker", "ps", "--all", "--no-trunc", "--format", "{{.ID}} {{.Labels}} {{.Mounts}}"]
    try:
        run = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line for line in run.stdout.splitlines() if "k3rl" in line or scratch in line]


def _lines(file: str | Path) -> list[str]:
    try:
        return Path(file).read_text(errors="replace").splitlines()
    except OSError:
        return []


def _link(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""
