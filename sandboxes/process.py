"""The unconfined backend: commands as ordinary processes of this machine.

The working directory is a private copy of the workspace, the environment is empty but for the
spec's, and limits per process hold. Nothing else does: code sees the host's files and network, and
a daemon that leaves its process group survives. `open_backend` makes it only for users who said
so, and a spec that requires more than it enforces is refused.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from k3rl.blobs import BlobStore
from k3rl.sandboxes.base import Capability, ExecRequest
from k3rl.sandboxes.bwrap import BASE_ENVIRONMENT
from k3rl.sandboxes.launch import Child, GroupChild, Launch, limited
from k3rl.sandboxes.local import Box, LocalBackend
from k3rl.sandboxes.probe import Prober
from k3rl.sandboxes.scratch import open_scratch
from k3rl.sandboxes.workspace import Content, PlainWorkspace, Stack

POSSIBLE = frozenset(Capability) - {
    Capability.ISOLATED_FILES,
    Capability.NO_NETWORK,
    Capability.PROCESS_LIMIT,
    Capability.KILLS_DESCENDANTS,
}
"""What this backend can do at all; probes decide the rest."""


class ProcessBackend(LocalBackend):
    """No isolation. The workspace is at a path of the host, not at /workspace."""

    name = "process"

    def __init__(self, blobs: BlobStore, scratch: Path) -> None:
        """Raises SandboxError on an unusable folder."""
        super().__init__(blobs, open_scratch(scratch, None))

    def _workspace(self, folder: Path, stack: Stack, content: Content) -> PlainWorkspace:
        return PlainWorkspace(folder, stack, content)

    async def _start(self, box: Box, request: ExecRequest) -> Child:
        assert isinstance(box.workspace, PlainWorkspace)
        # No process limit: outside a user namespace it would count all processes of the user.
        argv = limited(box.spec.limits, request.argv, has_process_limit=False)
        environment = BASE_ENVIRONMENT | box.spec.environment | request.environment
        launch = Launch(argv, environment, folder=box.workspace.files)
        return GroupChild(launch, request.stdin)

    async def _probe(self) -> frozenset[Capability]:
        prober = Prober(self)
        await prober.check_base()
        return POSSIBLE & await prober.run()

    def _finds(self, executable: str) -> bool:
        return shutil.which(executable, path=BASE_ENVIRONMENT["PATH"]) is not None
