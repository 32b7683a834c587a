"""Snapshots, restores and forks, on every backend."""

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from k3rl.blobs import BlobStore
from k3rl.errors import (
    CorruptData,
    UncapturableTree,
)
from k3rl.sandboxes.snapshots import MAX_LAYERS
from k3rl.types import to_plain
from tests.sandboxes.sandbox_helpers import ANY, opened, play, sh

pytestmark = [pytest.mark.sandbox]


def test_a_snapshot_restores_the_same_tree(kind, tmp_path):
    script = """
    echo two >> a; rm -r old; mkdir old; echo n > old/new; ln -s ../a old/link; mkfifo pipe
    mkdir -m 700 -p deep/er; head -c 50000 /dev/urandom > deep/er/large; chmod 751 a
    touch -d 2001-02-03 deep/er/large; printf x > "$(printf 'bad\\377name')"
    """
    show = (
        "ls -goaR --time-style=full-iso --ignore=. --ignore=..; cat a old/new; md5sum deep/er/large"
    )

    async def body(backend):
        box = await backend.create(ANY, {"a": b"one\n", "old/gone": b"x", "keep/k": b"k"})
        assert (await sh(backend, box, script)).exit_code == 0
        snapshot = await backend.snapshot(box, {"cwd": "/"})
        assert snapshot.tree_digest == await backend.tree_digest(box)
        twin = await backend.restore(ANY, snapshot)
        assert await backend.tree_digest(twin) == snapshot.tree_digest
        listings = [(await sh(backend, id, show)).stdout for id in (box, twin)]
        assert listings[0] == listings[1]
        assert b"new" in listings[0]
        assert b"gone" not in listings[0]
        assert await backend.snapshot(twin, {"cwd": "/"}) == snapshot

    play(kind, tmp_path, body)


def test_an_unchanged_tree_adds_no_layer(kind, tmp_path):
    async def body(backend):
        blobs = BlobStore(tmp_path / "blobs")
        box = await backend.create(ANY, {"a": b"one"})
        first = await backend.snapshot(box, {"n": 1})
        count = len(list(blobs.digests()))
        await sh(backend, box, "cat a; echo x > tmpfile; rm tmpfile")
        assert await backend.snapshot(box, {"n": 1}) == first
        second = await backend.snapshot(box, {"n": 2})
        assert second.layers == first.layers
        assert second.parent == first.snapshot_id
        assert second.snapshot_id != first.snapshot_id
        assert second.tree_digest == first.tree_digest
        assert len(list(blobs.digests())) == count
        await sh(backend, box, "echo more >> a")
        third = await backend.snapshot(box, {"n": 2})
        assert third.layers[:-1] == first.layers
        assert third.tree_digest != first.tree_digest
        assert len(list(blobs.digests())) == count + 1

    play(kind, tmp_path, body)


def test_equal_files_give_equal_first_snapshots(kind, tmp_path):
    async def body(backend):
        files = {"x/y": b"1", "z": b"2"}
        boxes = [await backend.create(ANY, files) for _ in range(2)]
        first, second = [await backend.snapshot(box, {}) for box in boxes]
        assert first == second

    play(kind, tmp_path, body)


def test_forks_start_equal_and_diverge(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY, {"a": b"base"})
        await sh(backend, box, "echo unsaved > b")
        twins = await backend.fork(box, 3)
        assert len({*twins, box}) == 4
        digests = {await backend.tree_digest(id) for id in (*twins, box)}
        assert len(digests) == 1
        for number, twin in enumerate(twins):
            await sh(backend, twin, f"cat b; echo {number} > a; rm b")
        assert [await backend.get(twin, "a") for twin in twins] == [b"0\n", b"1\n", b"2\n"]
        assert await backend.get(box, "a") == b"base"
        assert await backend.get(box, "b") == b"unsaved\n"
        await backend.close(box)
        snapshot = await backend.snapshot(twins[1], {})
        again = await backend.restore(ANY, snapshot)
        assert await backend.get(again, "a") == b"1\n"

    play(kind, tmp_path, body)


RESTORE = """
import asyncio, json, sys
from pathlib import Path
from k3rl.blobs import BlobStore
from k3rl.sandboxes.spec import SandboxSpec
from k3rl.sandboxes.factory import open_backend
from k3rl.types import Snapshot, from_plain
kind, blobs, scratch, snapshot = sys.argv[1:]
async def main():
    backend = open_backend(kind, BlobStore(Path(blobs)), Path(scratch), allow_unconfined=True)
    box = await backend.restore(
        SandboxSpec(required=()), from_plain(Snapshot, json.loads(snapshot)))
    print((await backend.get(box, "a")).decode(), await backend.tree_digest(box))
    await backend.aclose()
asyncio.run(main())
"""


OVER = {"remote": "bwrap"}
"""What lies behind a kind that is not one of `open_backend`'s."""


@pytest.mark.parametrize("scratch", ["scratch", "elsewhere"])
def test_another_process_restores_a_snapshot(kind, scratch, tmp_path):
    async def body(backend):
        box = await backend.create(ANY, {"a": b"one", "gone/x": b"x"})
        await sh(backend, box, "rm -r gone; echo two > b; head -c 40000 /dev/zero > large")
        snapshot = await backend.snapshot(box, {})
        over, plain = OVER.get(kind, kind), json.dumps(to_plain(snapshot))
        argv = [over, tmp_path / "blobs", tmp_path / scratch, plain]
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", RESTORE, *argv],
            capture_output=True,
            cwd=Path(__file__).parents[2],
            check=False,
        )
        assert done.stdout.decode().split() == ["one", snapshot.tree_digest], done.stderr
        assert (await sh(backend, box, "cat b")).stdout == b"two\n"

    play(kind, tmp_path, body)


def test_snapshots_travel_between_backends(other, tmp_path):
    async def body(first, second):
        for source, target in ((first, second), (second, first)):
            box = await source.create(ANY, {"d/old": b"x", "e": b"y"})
            await sh(source, box, "rm -r d; mkdir d; echo n > d/new; chmod 600 e")
            snapshot = await source.snapshot(box, {})
            twin = await target.restore(ANY, snapshot)
            assert await target.tree_digest(twin) == snapshot.tree_digest
            assert (await sh(target, twin, "ls d")).stdout == b"new\n"

    async def main():
        async with opened("bwrap", tmp_path) as first, opened(other, tmp_path) as second:
            await body(first, second)

    asyncio.run(main())


def test_many_snapshots_stack_and_restore(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY, {"a": b"", "d/x": b"x"})
        for number in range(40):
            await backend.put(box, f"n/{number}", b"%d" % number)
            if number == 20:
                await sh(backend, box, "rm -r d; mkdir d; head -c 30000 /dev/zero > d/large")
            snapshot = await backend.snapshot(box, {"n": number})
        assert 0 < len(snapshot.layers) <= MAX_LAYERS
        result = await sh(backend, box, "ls n | wc -l; cat n/0 n/39; ls d")
        assert result.stdout == b"40\n039large\n"
        twin = await backend.restore(ANY, snapshot)
        assert await backend.tree_digest(twin) == await backend.tree_digest(box)
        assert (await sh(backend, twin, "ls n | wc -l; cat n/0 n/39; ls d")).stdout == result.stdout

    play(kind, tmp_path, body)


def test_a_corrupt_layer_is_named(kind, tmp_path):
    async def body(backend):
        blobs = BlobStore(tmp_path / "blobs")
        box = await backend.create(ANY, {"a": b"one" * 100})
        snapshot = await backend.snapshot(box, {})
        path = blobs.path(snapshot.layers[0])
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(CorruptData, match=str(path)):
            await backend.restore(ANY, snapshot)
        wrong = replace(await backend.snapshot(await backend.create(ANY), {}), tree_digest="0" * 64)
        with pytest.raises(CorruptData, match="tree_digest"):
            await backend.restore(ANY, wrong)

    play(kind, tmp_path, body)


def test_a_tree_that_no_snapshot_can_hold_is_its_makers_fault(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY)
        made = await sh(backend, box, "for i in $(seq 250); do mkdir d && cd d || exit 1; done")
        assert made.exit_code in (0, 137)  # the watch over the disk may have seen it
        with pytest.raises(UncapturableTree, match="deeper than 200"):
            await backend.snapshot(box, {})

    play(kind, tmp_path, body)


@pytest.mark.parametrize("mode", ["0", "600"])
def test_a_workspace_that_its_owner_has_closed_is_no_fault_of_the_machine(kind, tmp_path, mode):
    """Else a policy could choose not to be judged. What a restore finds is as it was left."""

    async def body(backend):
        left = await backend.create(ANY, {"a": b"1"})
        await sh(backend, left, f"chmod {mode} .")
        found = [await sh(backend, left, "echo in; cat a")]
        taken = await backend.snapshot(left, {})
        twins = [await backend.restore(ANY, taken), *await backend.fork(left, 1)]
        await backend.pause(left)
        await backend.resume(left)
        for each in (*twins, left):
            found.append(await sh(backend, each, "echo in; cat a"))
            assert await backend.tree_digest(each) == taken.tree_digest
        assert {(each.exit_code, each.stdout) for each in found} == {
            (found[0].exit_code, found[0].stdout)
        }
        assert found[0].stdout.startswith(b"in\n")

    play(kind, tmp_path, body)
