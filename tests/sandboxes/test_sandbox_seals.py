"""Snapshots: exact whatever the tree, wherever they are restored; sealed now and durable later."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.blobs import BlobStore
from k3rl.errors import SandboxError, SandboxLost, StoreError, UncapturableTree
from k3rl.sandboxes.base import Durability, ExecRequest, SandboxBackend, Seal, run
from k3rl.sandboxes.factory import open_backend
from k3rl.sandboxes.files.merged import tree_digest
from k3rl.sandboxes.snapshots import MAX_LAYERS
from k3rl.sandboxes.spec import MIB
from tests.sandboxes.sandbox_helpers import ANY, play, sh

KINDS = ("bwrap", "docker", "process")
REPOSITORY = Path(__file__).parents[2]
WIDE = replace(ANY, limits=replace(ANY.limits, max_file_bytes=256 * MIB))
pytestmark = [pytest.mark.sandbox]


@pytest.fixture(params=KINDS)
def kind(request):
    if request.param == "docker":
        request.getfixturevalue("docker_engine")
    return request.param


@pytest.fixture(
    params=[("bwrap", "process"), ("docker", "bwrap"), ("docker", "process")], ids="-".join
)
def pair(request):
    if "docker" in request.param:
        request.getfixturevalue("docker_engine")
    return request.param


EDIT = r"""
import json, os, shutil, sys
def parents(path):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
def clear(path):
    if os.path.lexists(path):
        shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.remove(path)
for kind, path, other, text in json.load(sys.stdin):
    path, other = (os.fsdecode(name.encode("latin-1")) for name in (path, other))
    try:
        if kind == "write" and (os.path.isfile(path) or not os.path.exists(path)):
            parents(path)
            with open(path, "a") as file: file.write(text * 9000)
        elif kind == "remove":
            clear(path)
        elif kind == "again":
            clear(path)
            os.makedirs(path)
        elif kind == "move":
            clear(other)
            parents(other)
            shutil.move(path, other)
        elif kind == "hardlink":
            clear(other)
            parents(other)
            os.link(path, other, follow_symlinks=False)
        elif kind == "symlink":
            clear(path)
            parents(path)
            os.symlink(text, path)
        elif kind == "fifo":
            clear(path)
            parents(path)
            os.mkfifo(path)
        elif kind == "xattr":
            os.setxattr(path, "user." + text, b"\0\xff" + text.encode())
        elif kind == "plain":
            os.removexattr(path, "user." + text)
        elif kind == "mode":
            os.chmod(path, 0o640 if os.path.isfile(path) else 0o2750)
        elif kind == "touch":
            os.utime(path, ns=(1, 10**18 + 12345))
    except (OSError, shutil.Error):
        pass
"""
LISTING = r"""
import hashlib, json, os, stat
def look(path):
    found = os.lstat(path)
    entry = [stat.S_IFMT(found.st_mode), stat.S_IMODE(found.st_mode), found.st_uid == os.getuid()]
    entry += [found.st_gid == os.getgid(), found.st_mtime_ns if path != "." else 0]
    if stat.S_ISLNK(found.st_mode):
        return entry + [os.readlink(path)]
    if stat.S_ISREG(found.st_mode):
        entry += [found.st_size, hashlib.sha256(open(path, "rb").read()).hexdigest()]
    if not stat.S_ISFIFO(found.st_mode):
        entry += [[name, os.getxattr(path, name).hex()] for name in sorted(os.listxattr(path))]
    return entry
rows = {}
for folder, folders, files in os.walk("."):
    for path in [folder, *(folder + "/" + name for name in folders + files)]:
        rows[path] = look(path)
print(json.dumps(sorted(rows.items())))
"""
GROUPS = r"""
import json, os, stat
names = {}
for folder, folders, files in os.walk("."):
    for path in (folder + "/" + name for name in folders + files):
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) and found.st_nlink > 1:
            names.setdefault(found.st_ino, set()).add(path)
print(json.dumps(sorted(map(sorted, names.values()))))
"""
"""Not for overlayfs, where the names of one file may show different numbers."""


async def python(backend: SandboxBackend, box: str, script: str, stdin: bytes = b"") -> bytes:
    request = ExecRequest(("python3", "-c", script), stdin, 30, max_output_bytes=MIB)
    result = await run(backend, box, request)
    assert result.exit_code == 0, result.stderr
    return result.stdout


EDIT_KINDS = ["write"] * 3 + ["hardlink"] * 2 + ["xattr", "plain", "mode", "touch", "move"]
EDIT_KINDS += ["remove", "again", "symlink", "fifo"]
NAMES = st.sampled_from(["a", "b", "a/c", "b/c", "a/c/d", "e\n", "a/\xff \xc3", "b/c-"])
EDITS = st.tuples(
    st.sampled_from(EDIT_KINDS),
    NAMES,
    NAMES,
    st.sampled_from(["x", "y", "z"]),
)
ROUNDS = st.lists(st.lists(EDITS, min_size=1, max_size=8), min_size=1, max_size=4)


def test_any_tree_comes_back_exactly_on_every_backend(pair, tmp_path):
    """What code sees after a restore, here and elsewhere, is what it saw at the snapshot."""

    async def check(backends, rounds):
        files = {"a/c/x": b"1", "a/y": b"2", "b/c/z": b"3", "b/k": b"4"}
        for source in backends:
            box = await source.create(ANY, files)
            taken = []
            for edits in rounds:
                await python(source, box, EDIT, json.dumps(edits).encode())
                seen, groups = [await python(source, box, script) for script in (LISTING, GROUPS)]
                taken.append((await source.snapshot(box, {"n": len(taken)}), seen, groups))
                assert await python(source, box, LISTING) == seen
                # It goes on from a restored one, so that every layer is put on by both.
                await source.close(box)
                box = await source.restore(ANY, taken[-1][0])
            await source.close(box)
            for (snapshot, seen, groups), target in product((taken[0], taken[-1]), backends):
                twin = await target.restore(ANY, snapshot)
                assert await python(target, twin, LISTING) == seen
                if "bwrap" not in (source.name, target.name):
                    assert await python(target, twin, GROUPS) == groups
                assert await target.snapshot(twin, snapshot.session) == snapshot
                await target.close(twin)

    with asyncio.Runner() as runner:
        blobs = BlobStore(tmp_path / "blobs")
        backends = [open_backend(kind, blobs, tmp_path / "s", True) for kind in pair]

        @settings(max_examples=4 if "docker" in pair else 15, deadline=None, database=None)
        @given(ROUNDS)
        def examples(rounds):
            runner.run(check(backends, rounds))

        try:
            examples()
        finally:
            for backend in backends:
                runner.run(backend.aclose())


CANONICAL = r"""
umask 022
mkdir -p d/deep; echo 1 > d/x; ln d/x y; ln d/x d/deep/z; ln -s ../d/x d/l; ln -P d/l l2; mkfifo p
python3 -c "import os; os.setxattr('d/x', 'user.note', b'\0\xff'); os.setxattr('d', 'user.n', b'')"
rm -r old; mkdir old; echo n > old/new; rm gone/one; chmod 700 kept
head -c 50000 /dev/zero > large; : > "$(printf 'bad\377name')"
find . -exec touch -h -d 2001-02-03T04:05:06.123456789Z {} +
"""
LATER = """
rm y; mv large d/big; echo 2 >> d/deep/z; rm -r gone
find . -exec touch -h -d 2001-02-03T04:05:06.123456789Z {} +
"""
LAST = """
mv d/big e; rm d/x; mkdir d/new
touch -h -d 2001-02-03T04:05:06.123456789Z e d d/new .
"""
CANONICAL_FILES = {"old/a": b"1", "old/b": b"2", "gone/one": b"1", "gone/two": b"2", "kept": b"k"}


async def canonical_layers(backend: SandboxBackend) -> list[str]:
    box = await backend.create(ANY, CANONICAL_FILES)
    for script in (CANONICAL, LATER):
        assert (await sh(backend, box, script)).exit_code == 0
        snapshot = await backend.snapshot(box, {})
    box = await backend.restore(ANY, snapshot)
    assert (await sh(backend, box, LAST)).exit_code == 0
    return list((await backend.snapshot(box, {})).layers)


def test_equal_trees_give_equal_layers_on_every_backend(kind, tmp_path):
    async def main():
        found = []
        for name in {"process", kind}:
            blobs = BlobStore(tmp_path / name)
            backend = open_backend(name, blobs, tmp_path / "s", True)
            found.append(await canonical_layers(backend))
            await backend.aclose()
        assert len(found[0]) == 4
        assert found[0] == found[-1]

    asyncio.run(main())


ORDINARY = """
import asyncio, json, os, sys
from pathlib import Path
from k3rl.blobs import BlobStore
from k3rl.sandboxes.factory import open_backend
from tests.sandboxes.test_sandbox_seals import canonical_layers
folder = Path(sys.argv[1])
os.setgroups([]); os.setresgid(54321, 54321, 54321); os.setresuid(54321, 54321, 54321)
async def main():
    backend = open_backend("process", BlobStore(folder / "blobs"), folder / "scratch", True)
    print(json.dumps(await canonical_layers(backend)))
    await backend.aclose()
asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_equal_trees_give_equal_layers_whoever_runs_them(open_folder):
    argv = [sys.executable, "-c", ORDINARY, str(open_folder)]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    async def main():
        backend = open_backend("process", BlobStore(open_folder / "r"), open_folder / "rs", True)
        assert await canonical_layers(backend) == json.loads(done.stdout)
        await backend.aclose()

    asyncio.run(main())


SMALL, LARGE, BULKY, MANY = (
    "printf {0} > f",
    "head -c 300000 /dev/zero | tr '\\0' {0} > f",
    "head -c 6000000 /dev/zero | tr '\\0' {0} > f",
    "printf {0} > f; for n in $(seq 200); do echo {0} > n$n; done",
)
CHANGES = pytest.mark.parametrize("change", [SMALL, LARGE, BULKY, MANY], ids=range(4))


@CHANGES
def test_later_commands_change_nothing_that_is_sealed(kind, change, tmp_path):
    async def body(backend):
        box = await backend.create(WIDE, {"g": b"base"})
        seals, digests = [], []
        with stopped(backend):
            for letter in "abc":
                await sh(backend, box, change.format(letter))
                seals.append(await backend.seal(box, {"l": letter}))
            # In place, so that only a frozen copy can still hold what was there.
            script = "printf ZZZ | dd of=f conv=notrunc; printf x >> g; rm -f n*"
            assert (await sh(backend, box, script)).exit_code == 0
        for letter, seal in list(zip("abc", seals, strict=True))[::-1]:
            snapshot = await backend.settle(box, seal)
            twin = await backend.restore(WIDE, snapshot)
            data = await backend.get(twin, "f")
            assert set(data) == {ord(letter)}
            assert await backend.get(twin, "g") == b"base"
            assert await backend.tree_digest(twin) == snapshot.tree_digest
            digests.append(snapshot.tree_digest)
        assert len(set(digests)) == 3
        assert (await backend.get(box, "f")).startswith(b"ZZZ")
        last = await backend.snapshot(box, {})
        assert last.parent == (await backend.settle(box, seals[-1])).snapshot_id
        assert last.tree_digest == await backend.tree_digest(box)

    play(kind, tmp_path, body)


@contextmanager
def stopped(backend: SandboxBackend):
    """Let no job of the backend's seals run: all of its threads are taken."""
    go = threading.Event()
    pool = backend._seals._pool
    waiting = [pool.submit(go.wait, 30) for _ in range(pool._max_workers)]
    try:
        yield
    finally:
        go.set()
        assert all(each.result() for each in waiting)


def test_a_seal_in_flight_holds_nobody_up(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY, {"a": b"1"})
        with stopped(backend):
            await sh(backend, box, "echo 2 >> a")
            seal = await backend.seal(box, {})
            assert seal.durability is Durability.SEALED
            assert (await backend.stats(box)).seals == {seal.id: Durability.SEALED}
            settling = asyncio.create_task(backend.settle(box, seal))
            assert (await sh(backend, box, "echo 3 >> a; cat a")).stdout == b"12\n3\n"
            await backend.put(box, "b", b"put")
            assert await backend.get(box, "b") == b"put"
            (twin,) = await backend.fork(box, 1)
            assert (await sh(backend, twin, "cat a b")).stdout == b"12\n3\nput"
            later = await backend.seal(box, {"later": True})
            await asyncio.sleep(0.05)
            assert not settling.done()
        snapshot = await settling
        assert await backend.settle(box, seal) == snapshot
        last = await backend.settle(box, later)
        assert last.parent == snapshot.snapshot_id
        assert (await backend.stats(box)).seals == {}
        assert (await backend.seal(box, {"later": True})).durability is Durability.DURABLE
        of_twin = await backend.snapshot(twin, {"later": True})
        assert (of_twin.layers, of_twin.tree_digest) == (last.layers, last.tree_digest)

    play(kind, tmp_path, body)


@CHANGES
def test_a_sandbox_may_be_closed_while_its_seals_are_in_flight(kind, change, tmp_path):
    async def body(backend):
        box = await backend.create(WIDE)
        with stopped(backend):
            await sh(backend, box, change.format("a"))
            first = await backend.seal(box, {})
            await sh(backend, box, change.format("b"))
            second = await backend.seal(box, {})
            await backend.close(box)
        snapshots = [await backend.settle(box, seal) for seal in (second, first)]
        for snapshot, letter in zip(snapshots, "ba", strict=True):
            twin = await backend.restore(WIDE, snapshot)
            assert set(await backend.get(twin, "f")) == {ord(letter)}
        with pytest.raises(SandboxLost):
            await backend.seal(box, {})

    play(kind, tmp_path, body)


def test_closing_a_backend_finishes_its_seals(tmp_path):
    async def main():
        backend = open_backend("bwrap", BlobStore(tmp_path / "blobs"), tmp_path / "s")
        box = await backend.create(WIDE)
        await sh(backend, box, BULKY.format("a"))
        seal = await backend.seal(box, {})
        await backend.aclose()
        snapshot = await backend.settle(box, seal)
        assert all(BlobStore(tmp_path / "blobs").has(layer) for layer in snapshot.layers)

    asyncio.run(main())


def test_only_the_holder_of_a_seal_can_settle_it(tmp_path):
    async def body(backend):
        box, other = await backend.create(ANY), await backend.create(ANY)
        seal = await backend.seal(box, {})
        for sandbox_id, each in ((other, seal), (box, Seal("seal-0", Durability.SEALED))):
            with pytest.raises(SandboxLost, match=sandbox_id):
                await backend.settle(sandbox_id, each)
        assert await backend.settle(box, seal)

    play("process", tmp_path, body)


@CHANGES
def test_what_the_blob_store_refused_is_work_of_the_next_snapshot(kind, change, tmp_path):
    async def body(backend):
        box = await backend.create(WIDE, {"base": b"1"})
        blobs = tmp_path / "blobs"
        blobs.write_text("in the way")
        await sh(backend, box, change.format("a"))
        seal = await backend.seal(box, {})
        for _ in range(2):
            with pytest.raises(StoreError, match="cannot store a blob: Not a directory"):
                await backend.settle(box, seal)
        assert (await sh(backend, box, "echo more > more")).exit_code == 0
        (twin,) = await backend.fork(box, 1)
        with pytest.raises(StoreError):
            await backend.snapshot(box, {})
        blobs.unlink()
        for each in (box, twin):
            snapshot = await backend.snapshot(each, {})
            assert len(snapshot.layers) == 3
            again = await backend.restore(WIDE, snapshot)
            assert (await sh(backend, again, "cat base more")).stdout == b"1more\n"
            assert set(await backend.get(again, "f")) == {ord("a")}

    play(kind, tmp_path, body)


def test_a_tree_too_deep_is_refused_and_can_be_mended(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY, {"a": b"1"})
        await sh(backend, box, "echo kept > kept")
        await sh(backend, box, "for i in $(seq 250); do mkdir d && cd d || exit 1; done")
        for _ in range(2):
            with pytest.raises(UncapturableTree, match="deeper than 200"):
                await backend.seal(box, {})
        with pytest.raises(UncapturableTree, match="deeper than 200"):
            await backend.fork(box, 1)
        await sh(backend, box, "rm -r d")
        twin = await backend.restore(ANY, await backend.snapshot(box, {}))
        assert (await sh(backend, twin, "ls; cat kept")).stdout == b"a\nkept\nkept\n"

    play(kind, tmp_path, body)


def test_a_hundred_snapshots_in_a_row(kind, tmp_path):
    async def body(backend):
        blobs = BlobStore(tmp_path / "blobs")
        files = {f"d{n}/f{m}": b"%d" % n for n in range(10) for m in range(10)}
        box = await backend.create(ANY, files)
        taken, times_s = [], []
        for number in range(100):
            script = f"echo {number} > d{number % 10}/new; rm -f d{number // 10}/f{number % 10}"
            if number % 25 == 0:
                script += "; rm -r d9; mkdir d9; head -c 40000 /dev/urandom > d9/large"
            await sh(backend, box, script)
            begun = time.perf_counter()
            taken.append(await backend.snapshot(box, {"n": number}))
            times_s.append(time.perf_counter() - begun)
        counts = [len(snapshot.layers) for snapshot in taken]
        assert max(counts) == MAX_LAYERS
        assert counts.count(2) > 3  # flattened
        assert {snapshot.layers[0] for snapshot in taken} == {taken[0].layers[0]}
        assert taken[40].layers[1] not in taken[10].layers
        for before, after in pairwise(taken):
            assert after.parent == before.snapshot_id
        thirds = [sorted(times_s[start : start + 33])[16] for start in (0, 66)]
        assert thirds[1] < 3 * thirds[0] + 0.01, times_s
        assert taken[-1].tree_digest == await backend.tree_digest(box)
        for number in (0, 30, 31, 32, 33, 64, 99):
            twin = await backend.restore(ANY, taken[number])
            assert await backend.tree_digest(twin) == taken[number].tree_digest
            look = f"cat d{number % 10}/new; ls d{number // 10} | grep -cx f{number % 10}"
            assert (await sh(backend, twin, look)).stdout == b"%d\n0\n" % number
            await backend.close(twin)
        # Whoever resumes an old one stays within the bound as well.
        twin = await backend.restore(ANY, taken[30])
        for number in range(4):
            await sh(backend, twin, f"echo again {number} > again")
            snapshot = await backend.snapshot(twin, {})
            assert len(snapshot.layers) <= MAX_LAYERS
        assert all(blobs.has(layer) for layer in snapshot.layers)

    play(kind, tmp_path, body)


HUGE = """
import asyncio, resource, sys
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from k3rl.blobs import BlobStore
from k3rl.sandboxes.base import ExecRequest, run
from k3rl.sandboxes.spec import SandboxSpec
from k3rl.sandboxes.factory import open_backend
kind, folder = sys.argv[1], Path(sys.argv[2])
spec = SandboxSpec(required=())
spec = replace(spec, limits=replace(spec.limits, max_file_bytes=1 << 28))
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
async def sh(backend, box, script):
    return (await run(backend, box, ExecRequest(("sh", "-c", script), deadline_s=60))).stdout
async def main():
    backend = open_backend(kind, BlobStore(folder / "blobs"), folder / "scratch", True)
    box = await backend.create(spec)
    await sh(backend, box, "head -c 50000000 /dev/urandom > f; head -c 50000000 /dev/zero >> f")
    before = peak()
    snapshot = await backend.snapshot(box, {})
    (twin,) = await backend.fork(box, 1)
    await backend.tree_digest(twin)
    again = await backend.restore(spec, snapshot)
    sums = {await sh(backend, each, "md5sum f") for each in (box, twin, again)}
    print(len(sums), peak() - before)
    await backend.aclose()
asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["bwrap", "process"])
def test_a_large_file_is_never_held_in_memory(kind, tmp_path):
    """100 MB through snapshot, fork and restore; what that adds to the peak is far less."""
    argv = [sys.executable, "-c", HUGE, kind, str(tmp_path)]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    num_sums, added_mib = map(int, done.stdout.split())
    assert num_sums == 1
    assert added_mib < 40


def test_a_restore_that_is_not_what_was_taken_is_refused(kind, tmp_path):
    """Each part of a snapshot on disk is checked when it is used."""

    async def body(backend):
        blobs = BlobStore(tmp_path / "blobs")
        box = await backend.create(ANY)
        await sh(backend, box, "head -c 40000 /dev/urandom > large; echo small > small")
        snapshot = await backend.snapshot(box, {})
        (large,) = set(blobs.digests()) - set(snapshot.layers)
        whole = blobs.path(large).read_bytes()
        for bad in (whole[:-10], whole[:100] + b"?" + whole[101:], b""):
            blobs.path(large).write_bytes(bad)
            with pytest.raises(StoreError, match=large[2:]):
                await backend.restore(ANY, snapshot)
        blobs.path(large).write_bytes(whole)
        twin = await backend.restore(ANY, snapshot)
        tree = await asyncio.to_thread(backend._box(twin).workspace.tree)
        assert tree_digest(tree) == snapshot.tree_digest

    play(kind, tmp_path, body)


MAPPED = """
import mmap
with open("f", "r+b") as file, mmap.mmap(file.fileno(), 0) as view:
    assert view[0:1] != b"m"
    view[0:1] = b"m"
"""


def test_a_write_through_memory_is_a_change(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY)
        await sh(backend, box, "echo file > f; sleep 0.05")
        first = await backend.snapshot(box, {})
        assert await backend.snapshot(box, {}) == first
        await python(backend, box, MAPPED)
        second = await backend.snapshot(box, {})
        assert second.tree_digest != first.tree_digest
        twin = await backend.restore(ANY, second)
        assert await backend.get(twin, "f") == b"mile\n"

    play(kind, tmp_path, body)


@pytest.fixture
def xfs(tmp_path):
    """A folder on a file system whose files can share blocks."""
    if shutil.which("mkfs.xfs") is None or os.geteuid() != 0:
        pytest.skip("needs mkfs.xfs, and root to mount what it makes")
    image, folder = tmp_path / "image", tmp_path / "xfs"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(1 << 30)
    subprocess.run(["mkfs.xfs", "-q", image], check=True)
    mounted = subprocess.run(["mount", "-o", "loop", image, folder], check=False)
    if mounted.returncode != 0:
        pytest.skip("no loop device can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_forks_share_blocks_where_the_file_system_can(xfs):
    def taken_bytes():
        os.sync()
        room = os.statvfs(xfs)
        return (room.f_blocks - room.f_bfree) * room.f_frsize

    async def body(backend):
        box = await backend.create(WIDE)
        await sh(backend, box, "head -c 100000000 /dev/urandom > f")
        await backend.snapshot(box, {})
        before = taken_bytes()
        twins = await backend.fork(box, 20)
        assert taken_bytes() - before < 50_000_000  # all together
        await sh(backend, twins[0], "printf x | dd of=f conv=notrunc")
        sums = [(await sh(backend, each, "md5sum f")).stdout for each in (box, *twins)]
        assert len(set(sums)) == 2
        assert sums[1] not in (sums[0], *sums[2:])

    play("process", xfs, body)


def test_a_seal_that_fails_seals_nothing(tmp_path):
    async def body(backend):
        box = await backend.create(ANY, {"a": b"1"})
        first = await backend.snapshot(box, {})
        files = backend._box(box).workspace.files
        files.rename(files.with_name("away"))
        with pytest.raises(SandboxError):
            await backend.seal(box, {})
        files.with_name("away").rename(files)
        assert (await backend.snapshot(box, {})).layers == first.layers

    play("process", tmp_path, body)
