"""Sandboxes without namespaces, for places that forbid them, such as the inside of a container.

What code inside sees: /usr of the host, a few files of /etc, five devices, some numbers of /proc,
and its workspace and a folder for temporary files, both at paths of the host and the only ones that
it may write to. Landlock refuses every other file, the system-call filter every socket but a
connected pair. Code runs without privileges and, when k3rl is root, as a uid of its sandbox's own.
A supervisor (supervisor.py) keeps it from changing the modes, owners, times and attributes of other
files and, without root, counts its processes. When a command ends, so does every process that it
started: see guard.py.

Not enforced here, and so not promised: that the host's paths do not show. `stat` and its like are
no business of Landlock, so code that guesses a path learns whether it exists. Temporary files weigh
as the workspace does. It is no boundary against kernel exploits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from k3rl.blobs import BlobStore
from k3rl.errors import SandboxError
from k3rl.sandboxes.backends.bwrap import BASE_ENVIRONMENT, find_inside, interpreter
from k3rl.sandboxes.base import ExecRequest
from k3rl.sandboxes.blocking import in_thread
from k3rl.sandboxes.box import Box
from k3rl.sandboxes.files.plain import PlainWorkspace
from k3rl.sandboxes.files.seals import Sealed
from k3rl.sandboxes.files.trees import Identity, Placer, file_copier, remove_tree
from k3rl.sandboxes.files.weights import Weight, weigh
from k3rl.sandboxes.files.workspace import Content, Stack
from k3rl.sandboxes.local import LocalBackend
from k3rl.sandboxes.probe import Prober
from k3rl.sandboxes.processes.cgroups import find_cgroups
from k3rl.sandboxes.processes.guard import NOT_WATCHED
from k3rl.sandboxes.processes.guarded import install, start_guarded
from k3rl.sandboxes.processes.landlock import (
    DEVICE,
    OWN,
    READ,
    RUN,
    Access,
    check_abi,
    landlock_abi,
    rules,
    scope,
)
from k3rl.sandboxes.processes.launch import Child, Launch, memory_file
from k3rl.sandboxes.processes.limits import named_limits
from k3rl.sandboxes.processes.live import Live, LiveChild
from k3rl.sandboxes.processes.seccomp import filter_program
from k3rl.sandboxes.processes.supervisor import BIRTHS, CHANGES
from k3rl.sandboxes.processes.uids import Uids
from k3rl.sandboxes.scratch import open_scratch, sandbox_identity
from k3rl.sandboxes.spec import Capability

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
OF_ETC = (
    "alternatives host.conf ld.so.cache ld.so.conf ld.so.conf.d localtime magic mime.types perl "
    "nsswitch.conf protocols services ssl/certs ssl/openssl.cnf terminfo timezone"
)
OF_PROC = "cpuinfo filesystems loadavg meminfo stat uptime version"
"""Both of the machine and of its distribution; nothing of users, processes or networks."""
OF_DEV = "null zero full random urandom"
ENVIRONMENT = BASE_ENVIRONMENT | {"GIT_CONFIG_NOSYSTEM": "1"}
"""git ends with an error when there is an /etc/gitconfig that it may not read."""
NUM_HOLDING = 2
"""The guard and the agent: processes of a sandbox that are no command's."""


class LandlockBackend(LocalBackend):
    """Sandboxes by Landlock, on Linux 6.12 and later. The workspace is not at /workspace."""

    name = "landlock"

    def __init__(self, blobs: BlobStore, scratch: Path) -> None:
        """Raises CapabilityMissing without Landlock, SandboxError on an unusable folder."""
        self._abi = check_abi(landlock_abi())
        super().__init__(blobs, open_scratch(scratch, sandbox_identity()))
        self._uids = None
        if self.scratch.identity is not None:
            self._uids = Uids(self.scratch.owner)
            self.scratch.owner.chmod(0o711)  # every sandbox is another user's
        self._script = install(self.scratch.owner)
        self._program, self._is_watched = self._filters()[0]
        self._cgroups = find_cgroups(self.scratch.owner)

    def _workspace(self, folder: Path, stack: Stack, content: Content) -> OwnWorkspace:
        return OwnWorkspace(folder, stack, content, self._uids)

    async def _start(self, box: Box, request: ExecRequest) -> Child:
        workspace = box.workspace
        assert isinstance(workspace, OwnWorkspace)
        temporary = str(workspace.temporary)
        place = {"PWD": str(workspace.files), "HOME": temporary, "TMPDIR": temporary}
        environment = {**ENVIRONMENT, **place, **box.spec.environment, **request.environment}
        if box.live is None or box.live.is_over:
            if box.live is not None:
                await in_thread(box.live.destroy)
            box.live = await self._begin(box, workspace)
        return LiveChild(box.live, request, environment)

    async def _begin(self, box: Box, workspace: OwnWorkspace) -> Live:
        """Start a guard over the workspace."""
        argv, limits = [*interpreter(), "-c", self._script], box.spec.limits
        await in_thread(workspace.renew)
        # Without a uid of its own, a process limit would count all processes of the user.
        count = None if workspace.owner is None else limits.max_processes + NUM_HOLDING
        words = [
            str(workspace.temporary),
            str(limits.max_processes) if self._is_watched else NOT_WATCHED,
            *named_limits(limits, count),
        ]
        launch = Launch(argv, {}, workspace.files, workspace.owner)
        group = None if self._cgroups is None else self._cgroups.make(box.id, limits)
        try:
            with ExitStack() as held:
                fds = [scope()]
                held.callback(os.close, fds[-1])
                fds.append(rules(self._abi, _granted(workspace)))
                held.callback(os.close, fds[-1])
                fds.append(memory_file(self._program))
                held.callback(os.close, fds[-1])
                return start_guarded(launch, self.scratch.launch_lock, fds, words, group)
        except BaseException as error:
            if group is not None:
                group.remove()
            if isinstance(error, OSError):
                raise SandboxError(f"cannot start a sandbox: {error}") from error
            raise

    async def _probe(self) -> frozenset[Capability]:
        """Sandboxes as tight as the kernel allows; what it refuses is a missing capability."""
        prober = Prober(self)
        failures = []
        for choice in self._filters():
            self._program, self._is_watched = choice
            try:
                await prober.check_base()
                return await prober.run()
            except SandboxError as error:
                failures.append(error)
        raise failures[0]

    def _filters(self) -> list[tuple[bytes, bool]]:
        """Programs, the best first, and whether a supervisor answers what they ask."""
        # A uid of its own lets the kernel count births.
        asked = CHANGES if self._uids is not None else CHANGES | BIRTHS
        watched = filter_program(has_namespaces=False, asked=asked)
        plain = filter_program(has_namespaces=False)
        found = [(watched, True), (plain, False), (b"", False)]
        return [(program, is_watched) for program, is_watched in found if program is not None]

    def _finds(self, executable: str) -> bool:
        return find_inside(executable) is not None

    async def aclose(self) -> None:
        """Also lets others have the uids."""
        await super().aclose()
        if self._uids is not None:
            self._uids.close()


class OwnWorkspace(PlainWorkspace):
    """An ordinary folder and one for temporary files, of a uid of their own where there are any."""

    def __init__(self, folder: Path, stack: Stack, content: Content, uids: Uids | None) -> None:
        """Takes a uid until it is removed."""
        self._uids = uids
        super().__init__(folder, stack, content)

    def _fill(
        self,
        folder: Path,
        sealed: Sealed,
        placer: Callable[[Identity | None], Placer],
        owner: Identity | None,
    ) -> None:
        who = owner if self._uids is None else self._uids.take()
        try:
            super()._fill(folder, sealed, placer, who)
            self.places = (*self.places, str(self.temporary))
            if who is not None:
                os.chown(folder, -1, who.gid)
                folder.chmod(0o710)
        except BaseException:
            if self._uids is not None and who is not None:
                self._uids.give_back(who)
            raise

    @property
    def temporary(self) -> Path:
        """Emptied after every command."""
        return self.folder / "tmp"

    def weigh(
        self, most: Weight | None = None, is_off: Callable[[], bool] = lambda: False
    ) -> Weight:
        """Of both folders."""
        weight = super().weigh(most, is_off)
        with suppress(FileNotFoundError):  # before the first command
            weight += weigh(self.temporary, most=most, is_off=is_off)
        return weight

    def renew(self) -> None:
        """Make the temporary folder a new one. Nothing may be running."""
        with suppress(FileNotFoundError):
            self.temporary.chmod(0o700)
        remove_tree(self.temporary)
        self.temporary.mkdir(mode=0o700)
        if self.owner is not None:
            os.chown(self.temporary, self.owner.uid, self.owner.gid)

    def copy(self, folder: Path) -> OwnWorkspace:
        """A full copy, of another uid."""
        twin = OwnWorkspace.__new__(OwnWorkspace)
        twin._uids = self._uids
        twin._fill(folder, self.sealed, partial(file_copier, [self.files]), None)
        return twin

    def remove(self) -> None:
        """Delete it; somebody else may have its uid."""
        super().remove()
        if self._uids is not None and self.owner is not None:
            self._uids.give_back(self.owner)
            self._uids = None


def _granted(workspace: OwnWorkspace) -> Iterator[tuple[Path, Access]]:
    """The rights of a sandbox on the host's files."""
    yield from ((Path(name), RUN) for name in SYSTEM)
    for folder, names, access in (
        ("/etc", OF_ETC, READ),
        ("/proc", OF_PROC, READ),
        ("/dev", OF_DEV, DEVICE),
    ):
        yield from ((Path(folder, name), access) for name in names.split())
    yield from ((path, OWN) for path in (workspace.files, workspace.temporary))
