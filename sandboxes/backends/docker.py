"""Sandboxes in Docker containers: one for each sandbox, and one agent in it for all its commands.

What code inside sees: a tiny image made here, /usr of the host read-only over it, sized /tmp and
/dev/shm, and its workspace at /workspace, a folder of the host. It has no network, no environment
but the spec's, no capability and no way to gain one, Docker's system call filter, and an
unprivileged uid. The number of processes and their memory in all are limited by the container's
cgroup, the rest per process. Nothing of a command outlives it: the agent sees to that.

A spec that names an image has that one's programs and environment in place of the host's; it must
hold `python3` (3.9) and util-linux `prlimit`. The daemon must run on this machine: the agent is
given the descriptors of a command's output, and its mounts are folders of ours.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from k3rl.blobs import BlobStore
from k3rl.errors import SandboxError
from k3rl.sandboxes.backends.bwrap import BASE_ENVIRONMENT, ETC_FILES, find_inside, interpreter
from k3rl.sandboxes.backends.docker_engine import CONTROL, CONTROL_MOUNT, Container, Engine
from k3rl.sandboxes.backends.docker_image import Image, image_tar, system_folders
from k3rl.sandboxes.base import ExecRequest, run
from k3rl.sandboxes.blocking import in_thread
from k3rl.sandboxes.box import Box
from k3rl.sandboxes.files.plain import PlainWorkspace
from k3rl.sandboxes.files.trees import Identity
from k3rl.sandboxes.files.workspace import MOUNT_POINT, Content, Stack
from k3rl.sandboxes.local import LocalBackend
from k3rl.sandboxes.probe import Prober
from k3rl.sandboxes.processes.launch import Child
from k3rl.sandboxes.processes.limits import limited
from k3rl.sandboxes.processes.live import AGENT, Live, LiveChild
from k3rl.sandboxes.processes.orphans import AGENT_MOUNT
from k3rl.sandboxes.processes.seccomp import filter_program
from k3rl.sandboxes.scratch import open_scratch, sandbox_identity
from k3rl.sandboxes.spec import Capability, SandboxSpec

SHARED = ("/etc/alternatives", "/etc/ld.so.cache")
"""Of the host's /etc, read-only where they exist."""
HOSTS, RESOLV_CONF = "/etc/hosts", "/etc/resolv.conf"
FILTER = "filter"
IMAGE_PYTHON = ["python3", "-ISB"]
"""On the image's own PATH."""
ABSENT = 'for program; do command -v "$program" >/dev/null || echo "$program"; done'
LOG_BYTES = "64k"
"""What the agent may say, which is nothing unless it fails."""


class DockerBackend(LocalBackend):
    """Sandboxes by a Docker daemon on this machine, the one that DOCKER_HOST names.

    The daemon is looked for by the first call that needs it, which raises CapabilityMissing.
    """

    name = "docker"

    def __init__(self, blobs: BlobStore, scratch: Path) -> None:
        """Raises SandboxError on an unusable folder."""
        super().__init__(blobs, open_scratch(scratch, sandbox_identity()))
        self._engine: Engine | None = None
        self._connecting = asyncio.Lock()
        self._program = filter_program()
        self._identity = self.scratch.identity or Identity(os.geteuid(), os.getegid())
        self._images: dict[str, Image] = {}
        """By the names in specs, each looked up once: a tag that moves on changes nothing."""
        # Read-only in every container: from a path of the host to one inside.
        self._programs_of_host = {folder: folder for folder in system_folders()}
        self._programs_of_host |= {path: path for path in SHARED if Path(path).exists()}
        self._mounts: dict[str, str] = {}
        # The daemon puts files of its own, or of the host, at the last two.
        given = {AGENT_MOUNT: AGENT.read_text(), HOSTS: ETC_FILES["hosts"], RESOLV_CONF: ""}
        for target, text in given.items():
            source = self.scratch.owner / Path(target).name
            source.write_text(text)
            source.chmod(0o644)
            self._mounts[str(source)] = target

    def _workspace(self, folder: Path, stack: Stack, content: Content) -> PlainWorkspace:
        return PlainWorkspace(folder, stack, content, self.scratch.identity)

    async def _start(self, box: Box, request: ExecRequest) -> Child:
        place = {"PWD": MOUNT_POINT}
        image = await self._image_of(box.spec)
        base = {**BASE_ENVIRONMENT, **image.environment}
        environment = {**place, **base, **box.spec.environment, **request.environment}
        if box.live is None or box.live.is_over:
            if box.live is not None:
                await in_thread(box.live.destroy)
            box.live = await self._begin(box)
        return LiveChild(box.live, request, environment)

    async def _begin(self, box: Box) -> Live:
        """Start a container over the workspace."""
        assert self._engine is not None
        assert isinstance(box.workspace, PlainWorkspace)
        image = await self._image_of(box.spec)
        python = interpreter() if box.spec.image is None else IMAGE_PYTHON
        folder = box.workspace.folder / CONTROL
        folder.mkdir(mode=0o755, exist_ok=True)
        agent = [*python, AGENT_MOUNT, f"{CONTROL_MOUNT}/{CONTROL}"]
        if self._program is not None:
            # Docker's own filter lets some of what ours refuses through.
            await in_thread((folder / FILTER).write_bytes, self._program)
            agent.append(f"{CONTROL_MOUNT}/{FILTER}")
        # The container's cgroup limits the processes: rlimits would count those of all sandboxes.
        command = limited(box.spec.limits, agent, has_process_limit=False)
        options = self._options(box.spec, box.workspace.files, folder)
        container = Container(self._engine)
        try:
            control = await in_thread(
                container.start, folder, self.scratch.identity, image.id, command, **options
            )
        except BaseException:
            container.destroy()
            raise
        return Live(container, control, self.scratch.identity)

    def _options(self, spec: SandboxSpec, files: Path, control: Path) -> dict[str, Any]:
        """The SDK's words for what confines a container."""
        from docker.types import HostConfig, LogConfig, Mount

        assert self._engine is not None
        limits = spec.limits
        shown = self._mounts | {str(control): CONTROL_MOUNT}
        if spec.image is None:
            shown |= self._programs_of_host
        mounts = [Mount(shown[path], path, type="bind", read_only=True) for path in shown]
        mounts.append(Mount(MOUNT_POINT, str(files), type="bind"))
        host = HostConfig(
            self._engine.api.api_version,
            network_mode="none",
            ipc_mode="private",
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            read_only=True,
            mounts=mounts,
            tmpfs={"/tmp": f"exec,nosuid,nodev,size={limits.tmp_bytes}"},
            shm_size=limits.tmp_bytes,
            pids_limit=limits.max_processes + 1,  # the agent is one too
            mem_limit=limits.total_memory_bytes,
            memswap_limit=limits.total_memory_bytes,
            log_config=LogConfig(type="json-file", config={"max-size": LOG_BYTES}),
        )
        return {
            "host_config": host,
            "user": f"{self._identity.uid}:{self._identity.gid}",
            "hostname": "sandbox",
            "working_dir": MOUNT_POINT,
            "entrypoint": [],  # an image's own would be given our command as its arguments
            "healthcheck": {"test": ["NONE"]},
            # With mode `none` alone a hook would set up nothing, in 100 ms.
            "network_disabled": True,
            "use_config_proxy": False,
            "stop_signal": "SIGKILL",  # the agent heeds no other, and a daemon that ends waits
        }

    async def connect(self) -> None:
        """Find the daemon and have the image there."""
        async with self._connecting:
            if self._engine is None:
                self._engine = await in_thread(Engine, self.scratch.owner.name, self._image())

    async def _probe(self) -> frozenset[Capability]:
        prober = Prober(self)
        await prober.check_base()
        return await prober.run() | {Capability.IMAGES}

    async def _image_of(self, spec: SandboxSpec) -> Image:
        """Raises CapabilityMissing when the daemon lacks it."""
        await self.connect()
        assert self._engine is not None
        if spec.image is None:
            return Image(self._engine.image, {})
        if spec.image not in self._images:
            self._images[spec.image] = await in_thread(self._engine.look_up, spec.image)
        return self._images[spec.image]

    async def _absent(self, spec: SandboxSpec) -> list[str]:
        """Of an image, as a sandbox of it finds them."""
        if spec.image is None:
            return await super()._absent(spec)
        await self._image_of(spec)
        plain = replace(spec, executables=(), required=())
        box = await self.open_box(plain, {})
        try:
            request = ExecRequest(("sh", "-c", ABSENT, "-", *spec.executables))
            result = await run(self, box.id, request)
        finally:
            await self.close(box.id)
        return result.stdout.decode(errors="replace").split()

    def _image(self) -> bytes:
        uid, gid = self._identity.uid, self._identity.gid
        people = f"agent:x:{uid}:{gid}:agent:/tmp:/bin/sh\n"
        etc = ETC_FILES | {"passwd": people, "group": f"agent:x:{gid}:\n"}
        return image_tar(etc, ("/etc/ld.so.cache", RESOLV_CONF, AGENT_MOUNT))

    def _finds(self, executable: str) -> bool:
        return find_inside(executable) is not None

    async def reap(self) -> list[str]:
        """Also their containers."""
        if self._engine is not None:
            await in_thread(self._engine.reap)
        return await super().reap()

    async def aclose(self) -> None:
        """Also waits until the daemon has removed the containers."""
        await super().aclose()
        if self._engine is not None:
            # Without a daemon the next one to open it removes what this one could not.
            with suppress(SandboxError):
                await in_thread(self._engine.close)
