"""Cases of environments on a real backend, and open sessions, for tests of single environments."""

import asyncio

from k3rl.blobs import BlobStore
from k3rl.envs.checker.suite import case_of
from k3rl.envs.entries import BUILTINS
from k3rl.sandboxes.base import Sandbox
from k3rl.sandboxes.factory import open_backend

IDS = tuple(entry.id for entry in BUILTINS)


def with_case(tmp_path, env_id, use, **options):
    """Run `use(case)` against a real backend that is closed afterwards."""

    async def main():
        backend = open_backend("bwrap", BlobStore(tmp_path / "blobs"), tmp_path / "scratch")
        try:
            return await use(case_of(env_id, backend, tmp_path, **options))
        finally:
            await backend.aclose()

    return asyncio.run(main())


async def opened(case, index=0, task=None):
    """A fresh session in a fresh sandbox: (env, sandbox, task, opening transcript)."""
    env = case.make()
    task = task or env.task("train", index)
    sandbox = Sandbox(case.backend, await case.backend.create(env.sandbox_spec, env.files(task)))
    return env, sandbox, task, list((await env.open(task, sandbox)).messages)
