"""What `k3rl envs show` says of an environment."""

from __future__ import annotations

import inspect
import json
from typing import Any

from k3rl.envs import registry
from k3rl.envs.session import SPLITS
from k3rl.sandboxes.base import Sandbox, SandboxBackend
from k3rl.types import to_plain


async def describe(env_id: str, backend: SandboxBackend) -> dict[str, Any]:
    """All there is to know of an environment without playing it, as plain JSON."""
    env = registry.make(env_id)
    tasks = {split: env.task(split, 0) for split in SPLITS}
    task = tasks[SPLITS[0]]
    sandbox = Sandbox(backend, await backend.create(env.sandbox_spec, env.files(task)))
    try:
        opening = await env.open(task, sandbox)
    finally:
        await env.close()
        await backend.close(sandbox.id)
    return {
        "id": env_id,
        "package": registry.package(env_id) or None,
        "entry_point": env.spec.entry_point,
        "digest": env.spec.digest,
        "spec": to_plain(env.spec),
        "settings": _settings(env, env.spec.kwargs),
        "policies": registry.policies(env_id),
        "cheats": registry.cheats(env_id),
        "normalisers": [to_plain(each) for each in env.normalisers],
        "sandbox": to_plain(env.sandbox_spec),
        "limits": to_plain(task.limits),
        "splits": {split: each.key for split, each in tasks.items()},
        "tools": [to_plain(tool) for tool in env.tools],
        "first_task": to_plain(task),
        "files": {path: len(data) for path, data in sorted(env.files(task).items())},
        "first_messages": [to_plain(message) for message in opening.messages],
    }


def _settings(env: object, given: dict[str, Any]) -> dict[str, Any]:
    """Every kwarg that the class takes, with its value or its default."""
    parameters = list(inspect.signature(type(env)).parameters.values())[1:]
    taken = {each.name: each.default for each in parameters if each.kind is not each.VAR_KEYWORD}
    plain = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in taken.items()
        if value is not inspect.Parameter.empty
    }
    return {**plain, **given}


def print_described(found: dict[str, Any]) -> None:
    """Print it for a person: one line a fact."""
    print(f"{found['id']} of {found['package'] or 'no package'}, {found['entry_point']}")
    print(f"digest {found['digest']}")
    for name in ("settings", "limits"):
        print(f"{name}: {json.dumps(found[name])}")
    print(f"reward: {json.dumps(found['spec']['reward'])}")
    for name in ("policies", "cheats"):
        print(f"{name}: {', '.join(found[name]) or 'none'}")
    for each in found["normalisers"]:
        print(f"normaliser {each['name']}: {each['pattern']} -> {each['replacement']}")
    print(f"sandbox: {json.dumps(found['sandbox'])}")
    for tool in found["tools"]:
        print(f"tool {tool['name']}: {tool['description']}. {json.dumps(tool['parameters'])}")
    for split, key in found["splits"].items():
        print(f"first task of {split}: {key}")
    print(f"its files (bytes): {json.dumps(found['files'])}")
    for message in found["first_messages"]:
        print(f"{message['role']}: {message['content']}")
