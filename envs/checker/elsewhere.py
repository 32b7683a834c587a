"""`python -m k3rl.envs.checker.elsewhere`: tasks and plays of an environment in this process.

A Request as JSON comes on standard input; what `digests` gives goes to standard output.
"""

from __future__ import annotations

import asyncio
import copy
import json
import sys
import tempfile
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from k3rl.blobs import BlobStore
from k3rl.envs.base import EnvSpec, ScriptedPolicy, ToolEnv
from k3rl.envs.checker.case import SPLITS, untimed
from k3rl.envs.play import play
from k3rl.sandboxes.base import Sandbox, SandboxBackend
from k3rl.sandboxes.factory import open_backend
from k3rl.types import JSON, JsonObject, Task, digest_bytes, from_plain, to_plain


@dataclass(frozen=True, slots=True)
class Request:
    """What another process is asked for."""

    spec: JsonObject
    oracle: str
    """`module:name`; "": nothing is played."""
    backend_kind: str
    num_tasks: int
    seed: int
    paths: tuple[str, ...]
    """Of modules."""


def name_of(policy: ScriptedPolicy) -> str:
    """`module:name` of a function that another process can import by it; else ""."""
    module, name = getattr(policy, "__module__", ""), getattr(policy, "__qualname__", "")
    try:
        return f"{module}:{name}" if _named(f"{module}:{name}") is policy else ""
    except (ImportError, AttributeError, ValueError):
        return ""


def _named(where: str) -> Any:
    module, _, name = where.partition(":")
    found: Any = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _make(spec: EnvSpec) -> ToolEnv:
    return cast(ToolEnv, _named(spec.entry_point)(spec, **spec.kwargs))


async def digests(request: Request, backend: SandboxBackend) -> dict[str, Any]:
    """The tools, and of each task of both splits its key, files, opening and the oracle's play."""
    spec = from_plain(EnvSpec, request.spec)
    env = _make(spec)
    found: dict[str, Any] = {"tools": [to_plain(tool) for tool in env.tools]}
    for split in SPLITS:
        tasks = [env.task(split, index) for index in range(request.num_tasks)]
        found[split] = [await _digest(request, spec, task, backend) for task in tasks]
    return found


async def _digest(
    request: Request, spec: EnvSpec, task: Task, backend: SandboxBackend
) -> dict[str, JSON]:
    env = _make(spec)
    files = env.files(task)
    found: dict[str, JSON] = {
        "task": to_plain(task),
        "files": {path: digest_bytes(data) for path, data in sorted(files.items())},
    }
    if not request.oracle:
        id = await backend.create(env.sandbox_spec, files)
        opening = await env.open(task, Sandbox(backend, id))
        await env.close()
        await backend.close(id)
        return {**found, "opening": [to_plain(message) for message in opening.messages]}
    played = await play(env, copy.deepcopy(task), _named(request.oracle), backend, request.seed)
    said = [to_plain(message) for message in played.transcript]
    records = [to_plain(record) for record in untimed(played.records)]
    return {**found, "transcript": said, "records": records, "outcome": to_plain(played.outcome)}


async def _main() -> None:
    request = from_plain(Request, json.load(sys.stdin))
    with tempfile.TemporaryDirectory(prefix="k3rl-envs-") as folder:
        blobs = BlobStore(Path(folder, "blobs"))
        backend = open_backend(request.backend_kind, blobs, Path(folder, "scratch"), True)
        try:
            found = await digests(request, backend)
        finally:
            await backend.aclose()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    asyncio.run(_main())
