"""What a policy may try in place of the hunt of k3rl/FileHunt-v0 gets nothing."""

import asyncio

import pytest

from k3rl.blobs import BlobStore
from k3rl.envs import file_hunt, registry
from k3rl.envs.play import play
from k3rl.sandboxes.factory import open_backend

ID = "k3rl/FileHunt-v0"


@pytest.mark.sandbox
@pytest.mark.parametrize("name", registry.cheats(ID))
def test_cheats_get_nothing(tmp_path, name):
    cheat = registry.policy(ID, f"cheat/{name}")

    async def main():
        backend = open_backend("bwrap", BlobStore(tmp_path / "blobs"), tmp_path / "scratch", False)
        try:
            envs = [registry.make(ID) for _ in range(16)]
            plays = [play(e, e.task("heldout", n), cheat, backend) for n, e in enumerate(envs)]
            return await asyncio.gather(*plays)
        finally:
            await backend.aclose()

    played = asyncio.run(main())
    assert {each.outcome.reward for each in played} == {0.0}
    said = [str(each.transcript[-1]) for each in played]
    values = [file_hunt._hunt(each.task).value for each in played]
    num_known = sum(value in text for value, text in zip(values, said, strict=True))
    assert num_known == (16 if name in ("every", "text", "twice") else 0)
