"""The unconfined backend: commands as ordinary processes of this machine.

The working directory is a private copy of the workspace, the environment is empty but for the
spec's, and limits per process hold. Nothing else does: code sees the host's files and network, and
a daemon that leaves its process group survives. `open_backend` makes it only for users who said
so, and a spec that requires more than it enforces is refused.
"""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from pathlib import Path

from k3rl.blobs import BlobStore
from k3rl.errors import CapabilityMissing, SandboxError
from k3rl.sandboxes.backends.bwrap import BASE_ENVIRONMENT
from k3rl.sandboxes.base import ExecRequest
from k3rl.sandboxes.box import Box
from k3rl.sandboxes.files.plain import PlainWorkspace
from k3rl.sandboxes.files.workspace import Content, Stack
from k3rl.sandboxes.local import LocalBackend
from k3rl.sandboxes.probe import Prober
from k3rl.sandboxes.processes.group import GroupChild
from k3rl.sandboxes.processes.launch import Child, Launch
from k3rl.sandboxes.processes.limits import limited
from k3rl.sandboxes.scratch import open_scratch
from k3rl.sandboxes.spec import OFFERED_BY_SOME, Capability

POSSIBLE = (
    frozenset(Capability)
    - OFFERED_BY_SOME
    - {
        Capability.ISOLATED_FILES,
        Capability.HIDDEN_PATHS,
        Capability.NO_NETWORK,
        Capability.PROCESS_LIMIT,
        Capability.KILLS_DESCENDANTS,
        Capability.SYSCALL_FILTER,
        Capability.TOTAL_MEMORY_LIMIT,
        Capability.DISK_LIMIT,
        Capability.PRIVATE_TMP,
        Capability.ISOLATED_PROCESSES,
        Capability.NO_PRIVILEGES,
    }
)
"""What this backend can do at all; probes decide the rest."""
RESET = ("/usr/bin/env", "--default-signal")
"""What we ignore, or who started us (nohup), a command does not."""
TOO_LONG = ("sh", "-c", "echo Argument list too long >&2; exit 126")
"""In place of a command that cannot be passed on, which is its caller's doing."""


class ProcessBackend(LocalBackend):
    """No isolation. The workspace is at a path of the host, not at /workspace."""

    name = "process"
    is_live = False

    def __init__(self, blobs: BlobStore, scratch: Path) -> None:
        """Raises SandboxError on an unusable folder."""
        super().__init__(blobs, open_scratch(scratch, None))

    def _workspace(self, folder: Path, stack: Stack, content: Content) -> PlainWorkspace:
        return PlainWorkspace(folder, stack, content)

    async def _start(self, box: Box, request: ExecRequest) -> Child:
        assert isinstance(box.workspace, PlainWorkspace)
        if request.channel_bytes and not self._finds("bash"):
            raise CapabilityMissing(
                "backend process opens a command's descriptor 3 by bash: none here"
            )
        # No process limit: outside a user namespace it would count all processes of the user.
        argv = [*RESET, *limited(box.spec.limits, request.argv, has_process_limit=False)]
        environment = {**BASE_ENVIRONMENT, **box.spec.environment, **request.environment}
        launch = Launch(argv, environment, folder=box.workspace.files)
        has_channel = request.channel_bytes > 0
        try:
            return GroupChild(launch, request.stdin, has_channel)
        except SandboxError as error:
            if not (isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.E2BIG):
                raise
        return GroupChild(replace(launch, argv=TOO_LONG), b"", has_channel)

    async def _probe(self) -> frozenset[Capability]:
        prober = Prober(self)
        await prober.check_base()
        return POSSIBLE & await prober.run()

    def _finds(self, executable: str) -> bool:
        return shutil.which(executable, path=BASE_ENVIRONMENT["PATH"]) is not None
