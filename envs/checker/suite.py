"""All checks, and the case of a registered environment."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from k3rl.blobs import BlobStore
from k3rl.envs import registry
from k3rl.envs.checker import (
    contract,
    determinism,
    face,
    leaks,
    normalising,
    reference,
    sessions,
)
from k3rl.envs.checker.case import Case
from k3rl.envs.checker.check import Check, Finding, Group, Verdict, examine
from k3rl.envs.words import nearest
from k3rl.errors import UserInputError
from k3rl.sandboxes.base import SandboxBackend
from k3rl.sandboxes.factory import open_backend

CHECKS: tuple[Check, ...] = (
    *contract.CHECKS,
    *sessions.CHECKS,
    *face.CHECKS,
    *determinism.CHECKS,
    *reference.CHECKS,
    *normalising.CHECKS,
    *leaks.CHECKS,
)
NEEDED = ("oracle", "random", "null")
CAN_BE_MADE = "can be made"


def checks_named(names: Collection[str]) -> tuple[Check, ...]:
    """The checks of these names, in their order; all when there is none.

    Raises UserInputError for a name that no check has.
    """
    known = [check.name for check in CHECKS]
    for name in names:
        if name not in known:
            raise UserInputError(f"no check {name!r}, nearest is {nearest(name, known)}")
    return tuple(check for check in CHECKS if not names or check.name in names)


def case_of(
    env_id: str,
    backend: SandboxBackend,
    folder: Path,
    kind: str = "bwrap",
    num_tasks: int = 8,
    seed: int = 0,
    among: registry.Registry | None = None,
    **kwargs: Any,
) -> Case:
    """The case of a registered environment, its policies and cheats loaded.

    `kind` is what `backend` is, as `open_backend` takes it; further ones are opened in `folder`.
    Raises EnvError when the environment or one of its policies cannot be loaded.
    """
    if num_tasks < 1:
        raise UserInputError(f"num_tasks {num_tasks}: at least 1")
    known = among or registry.default
    make = functools.partial(known.make, env_id, **kwargs)
    make()
    declared = known.policies(env_id)
    policies = {name: known.policy(env_id, name) for name in NEEDED if name in declared}
    cheats = {name: known.policy(env_id, f"cheat/{name}") for name in known.cheats(env_id)}

    def open_another() -> SandboxBackend:
        return open_backend(kind, BlobStore(folder / "blobs"), folder / "another", True)

    return Case(env_id, make, policies, cheats, backend, open_another, kind, num_tasks, seed)


async def check_env(
    env_id: str,
    backend: SandboxBackend,
    folder: Path,
    kind: str = "bwrap",
    num_tasks: int = 8,
    seed: int = 0,
    checks: Sequence[Check] = CHECKS,
    among: registry.Registry | None = None,
) -> list[Finding]:
    """The findings of all checks; one alone when the environment cannot be made."""
    try:
        case = case_of(env_id, backend, folder, kind, num_tasks, seed, among)
    except UserInputError:
        raise
    except Exception as error:  # of a package that is not ours
        detail = f"{type(error).__name__}: {error}"
        return [Finding(CAN_BE_MADE, Group.CONTRACT, Verdict.FAILED, detail, 0.0)]
    return await examine(case, checks)
