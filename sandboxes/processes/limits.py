"""The limits that hold for each process of a sandbox."""

from __future__ import annotations

from collections.abc import Sequence

from k3rl.sandboxes.processes.orphans import PRLIMIT
from k3rl.sandboxes.spec import SandboxLimits


def named_limits(limits: SandboxLimits, num_processes: int | None) -> list[str]:
    """Hard and soft limits as words, resource=value, by the names that setrlimit and prlimit share.

    `num_processes`: how many the uid that they are set for may have, where that uid, or the user
    namespace it is counted in, is the sandbox's own; None where others count too.
    """
    values = {
        "nofile": limits.max_open_files,
        "fsize": limits.max_file_bytes,
        "as": limits.address_space_bytes,
        "cpu": limits.cpu_s,
        "core": 0,
        "msgqueue": 0,  # a POSIX queue would outlive the command that made it
    }
    if num_processes is not None:
        values["nproc"] = num_processes
    return [f"{name}={value}" for name, value in values.items()]


def limited(limits: SandboxLimits, argv: Sequence[str], has_process_limit: bool) -> list[str]:
    """`argv` behind util-linux prlimit, which exits with 127 when there is no such program.

    The limits are set inside the sandbox's user namespace, where only the sandbox's own processes
    count against the process limit (since Linux 5.14).
    """
    words = named_limits(limits, limits.max_processes if has_process_limit else None)
    return [PRLIMIT, *(f"--{word}" for word in words), "--", *argv]
