"""A trajectory that was exported and imported elsewhere restores and replays like a native one."""

import asyncio
import os
import shutil

import pytest

from k3rl.blobs import BlobStore
from k3rl.envs import registry
from k3rl.replay.verify import replay
from k3rl.sandboxes.factory import open_backend
from k3rl.sandboxes.files.layers import large_files
from k3rl.store.exchange import export_trajectory, import_trajectory
from k3rl.store.protocol import StepFrame
from k3rl.store.reader import StoreReader
from k3rl.types import Outcome, OutcomeKind, Step
from tests.builders import HUNT, NOTES, Notes, open_bench

pytestmark = pytest.mark.sandbox
DONE = Outcome(OutcomeKind.COMPLETED, 1.0)


async def moved(tmp_path, play):
    """Play in one folder, carry the file to another, and remove the first.

    Returns what `play` did, the imported trajectory, its reader, a renderer and a backend there.
    """
    async with open_bench(tmp_path / "old") as bench:
        stored = await play(bench)
        export_trajectory(bench.host.root, stored.id, tmp_path / "file", large_files)
        renderer = bench.renderer
    shutil.rmtree(tmp_path / "old")
    import_trajectory(tmp_path / "new", tmp_path / "file", large_files)
    reader = StoreReader(tmp_path / "new")
    blobs = BlobStore(tmp_path / "new" / "blobs")
    return stored, reader, renderer, open_backend("bwrap", blobs, tmp_path / "scratch")


@pytest.mark.parametrize(("env_id", "policy"), [(HUNT, "oracle"), (NOTES, "double")])
def test_it_replays_identically(tmp_path, env_id, policy):
    async def go():
        stored, reader, renderer, backend = await moved(
            tmp_path, lambda bench: bench.play(registry.make(env_id), policy)
        )
        env = registry.make(env_id)
        try:
            report = await replay(reader, stored.id, env, backend, env.sandbox_spec, renderer)
        finally:
            await backend.aclose()
        assert report.is_identical, report.first_divergence
        assert report.trajectory == stored
        assert len(report.verdicts) == len(stored.steps) > 1

    asyncio.run(go())


def test_every_snapshot_restores_to_the_same_tree(tmp_path):
    """Files above and below the size that travels inside a layer, changed and deleted again."""
    big = os.urandom(100_000)

    async def play(bench):
        env = registry.make(NOTES)
        header = await bench.begin(env)
        claim = await bench.claim()
        box = await bench.backend.create(env.sandbox_spec, {"big": big, "small": b"1"})
        changes = [{}, {"big": big[::-1], "new/file": b"x"}, {"small": big[:50_000]}]
        for index, files in enumerate(changes):
            for name, data in files.items():
                await bench.backend.put(box, name, data)
            taken = await bench.backend.snapshot(box, {})
            made = Step(
                index, 0, 0, snapshot_after=taken.snapshot_id, tree_digest=taken.tree_digest
            )
            await bench.store.commit_step(header.id, claim.epoch, StepFrame(made, None, taken))
        await bench.store.finish(header.id, claim.epoch, DONE)
        return await bench.store.get(header.id)

    async def go():
        stored, reader, _, backend = await moved(tmp_path, play)
        found = reader.get(stored.id)
        assert found == stored
        contents = []
        try:
            for step in found.steps:
                snapshot = reader.snapshot(step.snapshot_after)
                box = await backend.restore(Notes.sandbox_spec, snapshot)
                assert await backend.tree_digest(box) == step.tree_digest
                contents.append([await backend.get(box, name) for name in ("big", "small")])
        finally:
            await backend.aclose()
        assert contents == [[big, b"1"], [big[::-1], b"1"], [big[::-1], big[:50_000]]]
        assert len({step.tree_digest for step in found.steps}) == 3

    asyncio.run(go())
