"""Opening a backend by its config name, and telling a doctor what this machine can do."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

from k3rl.blobs import BlobStore
from k3rl.errors import CapabilityMissing, K3rlError, UserInputError
from k3rl.sandboxes.backends.bwrap import BwrapBackend, bwrap_version, find_bwrap, find_inside
from k3rl.sandboxes.backends.docker import DockerBackend
from k3rl.sandboxes.backends.landlock import LandlockBackend
from k3rl.sandboxes.backends.process import ProcessBackend
from k3rl.sandboxes.base import SandboxBackend
from k3rl.sandboxes.scratch import SETPRIV, Scratch, switch_user
from k3rl.sandboxes.spec import ENFORCED_BY_DEFAULT, OFFERED_BY_SOME, Capability

KINDS = ("bwrap", "docker", "landlock", "process")
"""What `open_backend` opens."""
Finding = tuple[str, bool, str]
"""(what was checked, whether it is well, one line of detail)"""


def open_backend(
    kind: str, blobs: BlobStore, scratch: Path, allow_unconfined: bool = False
) -> SandboxBackend:
    """A backend of kind "bwrap", "docker", "landlock" or "process"; close it with `aclose`.

    Raises CapabilityMissing for "process" without `allow_unconfined`, for "bwrap" without the
    program and for "landlock" without a kernel that has it; UserInputError for another kind.
    """
    if kind == "bwrap":
        return BwrapBackend(blobs, scratch)
    if kind == "docker":
        return DockerBackend(blobs, scratch)
    if kind == "landlock":
        return LandlockBackend(blobs, scratch)
    if kind != "process":
        raise UserInputError(f"sandbox backend {kind!r}: choose {', '.join(KINDS[:-1])} or process")
    if not allow_unconfined:
        raise CapabilityMissing(
            "backend process confines nothing: it runs the policy's code with your own rights; "
            "set sandbox.allow_unconfined=true to use it all the same"
        )
    return ProcessBackend(blobs, scratch)


def diagnose() -> list[Finding]:
    """Checks for a doctor command, in the order in which things are needed. Takes about 0.5 s."""
    program = _finding("bubblewrap", _describe_bwrap)
    python = find_inside("python3")
    detail = str(python) if python else "no python3 under /usr: tools that run Python cannot work"
    rest = [("python3 on the sandbox path", python is not None, detail)]
    found = asyncio.run(_diagnose_bwrap() if program[1] else _diagnose_landlock())
    return [program, *found, *rest]


def _describe_bwrap() -> str:
    binary = find_bwrap()
    return f"{'.'.join(map(str, bwrap_version(binary)))} at {binary}"


def _finding(name: str, check: Callable[[], str]) -> Finding:
    try:
        return name, True, check()
    except K3rlError as error:
        return name, False, str(error)


async def _diagnose_bwrap() -> list[Finding]:
    with tempfile.TemporaryDirectory(prefix="k3rl-doctor-") as folder:
        backend = BwrapBackend(BlobStore(Path(folder, "blobs")), Path(folder, "scratch"))
        try:
            found = await backend.capabilities()
        except K3rlError as error:
            return [("user namespaces", False, str(error)), *await _diagnose_landlock()]
        finally:
            await backend.aclose()
    has_overlay = Capability.SNAPSHOT in found
    overlay = "snapshots and forks work" if has_overlay else "overlayfs does not work here"
    missing = sorted(set(Capability) - OFFERED_BY_SOME - found)
    enforced = f"cannot enforce {', '.join(missing)}" if missing else "all capabilities enforced"
    return [
        ("user namespaces", True, f"a sandbox runs{_pace(backend.scratch)}"),
        ("overlay", has_overlay, overlay),
        ("enforcement", found.issuperset(ENFORCED_BY_DEFAULT), enforced),
    ]


async def _diagnose_landlock() -> list[Finding]:
    """What can be had where bubblewrap cannot."""
    name = "sandboxes without it"
    with tempfile.TemporaryDirectory(prefix="k3rl-doctor-") as folder:
        try:
            backend = LandlockBackend(BlobStore(Path(folder, "blobs")), Path(folder, "scratch"))
        except K3rlError as error:
            return [(name, False, str(error))]
        try:
            missing = sorted(set(ENFORCED_BY_DEFAULT) - await backend.capabilities())
        except K3rlError as error:
            return [(name, False, str(error))]
        finally:
            await backend.aclose()
    detail = f"cannot enforce {', '.join(missing)}" if missing else "enforces what specs require"
    return [(name, not missing, f"sandbox.backend=landlock {detail}")]


def _pace(scratch: Scratch) -> str:
    if scratch.identity is None or switch_user(scratch.identity):
        return ""
    return f", but starts slowly: {SETPRIV} (util-linux) is missing"
