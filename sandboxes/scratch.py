"""Where sandboxes live on disk: one folder per owner, removed when the owner is dead.

    <scratch>/owner-<host>-<boot>-<pid>-<start>-<random>/   workspaces and probes of one backend
    <scratch>/layers-<host>-<boot>/                         extracted layers, shared by owners

An owner is a backend object, named by its process id and start time, so that a reused process id
is not mistaken for it. Extracted layers are not fsynced; folders of an earlier boot are dropped.
When the program runs as root, code in sandboxes runs as `SANDBOX_UID`, which must be able to
reach its workspace: below a closed folder, a folder of the same meaning under /tmp is used.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from k3rl.errors import SandboxError
from k3rl.sandboxes.files.trees import Identity, remove_tree
from k3rl.sandboxes.processes.cgroups import remove_groups
from k3rl.sandboxes.processes.orphans import await_launches, end_orphans
from k3rl.sandboxes.processes.uids import end_claimed, is_mapped
from k3rl.types import digest_json

SANDBOX_UID = 60_600
"""Who code runs as when k3rl is root: in a range no distribution hands out to users."""
OVERFLOW_UID = 65_534
"""nobody: in containers that map only 65,536 or fewer ids."""
OPEN_TRIES = 20
LAUNCH_LOCK = "launching"
SETPRIV = Path("/usr/bin/setpriv")
"""Of util-linux: becomes another user and executes the rest of its command line."""
SHARED_TMP = Path("/tmp")  # sticky and open to all; not TMPDIR, which may be closed


@dataclass(frozen=True, slots=True)
class Scratch:
    """The folders of one owner."""

    root: Path
    owner: Path
    layers: Path
    identity: Identity | None
    """Whom to run as; None: as ourselves."""
    is_stand_in: bool = False
    """`root` is the stand-in under /tmp; it goes when its last owner does."""

    @property
    def launch_lock(self) -> Path:
        """An empty file that is locked while a child of the owner is being started."""
        return self.owner / LAUNCH_LOCK

    def remove(self) -> None:
        """Delete the owner's folder and control groups."""
        remove_groups(self.owner)
        remove_tree(self.owner)
        if self.is_stand_in and self.root.exists():
            with _locked(self.root):
                if not any(self.root.glob("owner-*")):
                    remove_tree(self.root)


def sandbox_identity() -> Identity | None:
    """Whom sandboxes run as: an unprivileged id for root, None for everyone else."""
    if os.geteuid() != 0:
        return None
    for uid in (SANDBOX_UID, OVERFLOW_UID):
        if is_mapped(uid):
            return Identity(uid, uid)
    raise SandboxError("running as root, but no unprivileged uid is mapped here to drop to")


def switch_user(who: Identity | None) -> list[str]:
    """The words before a command line that make it run as `who`; none for ourselves.

    A child that has to change its user between fork and exec is forked, which copies the page
    tables of the whole program: about 10 ms with torch loaded. One that need not is vforked. So the
    change is the work of a program of its own, and of Popen only where there is none.
    """
    if who is None or not SETPRIV.exists():
        return []
    return [str(SETPRIV), f"--reuid={who.uid}", f"--regid={who.gid}", "--clear-groups", "--"]


def open_scratch(root: Path, identity: Identity | None) -> Scratch:
    """Make an owner's folders and remove those of dead owners. Raises SandboxError."""
    wanted = Path(root).absolute()
    for _ in range(OPEN_TRIES):
        try:
            root = _reachable(wanted, identity)
            with _locked(root) as is_there:
                if is_there:
                    return _new_owner(root, identity, root != wanted)
        except FileNotFoundError:
            continue  # the last owner of a stand-in just deleted it
        except OSError as error:
            raise SandboxError(f"{root}: cannot use this scratch folder: {error}") from error
    raise SandboxError(f"{root}: this scratch folder keeps vanishing")


def reap(root: Path, identity: Identity | None) -> list[str]:
    """Remove what dead owners left in a scratch folder; returns the names of their folders.

    Processes that nobody owns are ended first. Raises SandboxError on an unusable folder.
    """
    before = {path.name for path in root.glob("owner-*")}
    open_scratch(root, identity).remove()
    return sorted(before - {path.name for path in root.glob("owner-*")})


def _new_owner(root: Path, identity: Identity | None, is_stand_in: bool) -> Scratch:
    place = _here()
    dead = [folder for folder in root.iterdir() if _is_dead(folder.name, place)]
    for folder in dead:
        await_launches(folder / LAUNCH_LOCK)
    end_orphans(_code_uids())
    for folder in dead:
        if end_claimed(folder) and remove_groups(folder):
            remove_tree(folder)
    layers = root / f"layers-{place}"
    layers.mkdir(mode=0o700, exist_ok=True)
    _close_to_others(layers, identity)
    start = _start_time(os.getpid())
    owner = Path(tempfile.mkdtemp(prefix=f"owner-{place}-{os.getpid()}-{start}-", dir=root))
    _close_to_others(owner, identity)
    scratch = Scratch(root, owner, layers, identity, is_stand_in)
    scratch.launch_lock.touch(0o600)
    return scratch


def _code_uids() -> tuple[int, ...]:
    """Whom our code may run as, now or in an earlier process of ours."""
    return (SANDBOX_UID, OVERFLOW_UID) if os.geteuid() == 0 else (os.geteuid(),)


@contextmanager
def _locked(root: Path) -> Iterator[bool]:
    """Alone with `root`; False when it was deleted while waiting."""
    handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield os.fstat(handle).st_nlink > 0
    finally:
        os.close(handle)


def _here() -> str:
    """Names this machine, pid namespace and boot: "<host>-<boot>"."""
    host = digest_json([socket.gethostname(), os.readlink("/proc/self/ns/pid")])[:8]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return f"{host}-{boot}"


def _start_time(pid: int) -> str | None:
    """Start of a process in clock ticks since boot; None when there is none or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def is_dead_owner(name: str) -> bool:
    """Whether a folder name of `Scratch.owner` names a dead owner of this machine."""
    return _is_dead(name, _here())


def _is_dead(name: str, place: str) -> bool:
    host, boot = place.split("-")
    parts = name.split("-")
    if len(parts) < 3 or parts[0] not in ("owner", "layers") or parts[1] != host:
        return False
    if parts[2] != boot:
        return True
    return parts[0] == "owner" and len(parts) > 4 and _start_time(int(parts[3])) != parts[4]


def _reachable(root: Path, identity: Identity | None) -> Path:
    """`root`, made where it does not exist, or its stand-in under /tmp."""
    if identity is not None and not all(is_open(folder) for folder in root.parents):
        root = SHARED_TMP / f"k3rl-{os.geteuid()}-{digest_json(str(root))[:16]}"
    for folder in [root, *root.parents][::-1]:
        if not folder.exists():
            folder.mkdir(exist_ok=True)
            if identity is not None:
                folder.chmod(0o755)
    status = root.lstat()
    if status.st_uid != os.geteuid():
        raise SandboxError(f"{root}: the scratch folder belongs to uid {status.st_uid}")
    if identity is not None and not is_open(root):
        root.chmod(status.st_mode | 0o011)
    return root


def is_open(folder: Path) -> bool:
    """Whether everyone may pass through the folder; one that does not exist yet will be made so."""
    try:
        return bool(folder.stat().st_mode & 0o001)
    except FileNotFoundError:
        return True


def _close_to_others(folder: Path, identity: Identity | None) -> None:
    if identity is not None:
        os.chown(folder, os.geteuid(), identity.gid)
        folder.chmod(0o710)
