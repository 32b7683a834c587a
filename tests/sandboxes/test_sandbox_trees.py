"""Folders as archives into a workspace and out of it: what travels, and what is refused."""

import asyncio
import contextlib
import gc
import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.errors import SandboxError, UncapturableTree, UserInputError
from k3rl.sandboxes.base import ExecRequest, run
from k3rl.sandboxes.files import archive
from k3rl.sandboxes.files.archive import pack_tree, unpack_tree
from k3rl.sandboxes.files.merged import tree_digest
from k3rl.sandboxes.files.plain import PlainWorkspace
from k3rl.sandboxes.files.workspace import Stack
from k3rl.sandboxes.spec import MIB
from tests.sandboxes.sandbox_helpers import ANY, play, sh

pytestmark = pytest.mark.sandbox
KINDS = ("bwrap", "docker", "process", "bytes")


@pytest.fixture(params=KINDS)
def kind(request):
    if request.param == "docker":
        request.getfixturevalue("docker_engine")
    return request.param


def member(name, data=b"", kind=tarfile.REGTYPE, **fields):
    """A header and its data, as tarfile writes them: it checks nothing."""
    info = tarfile.TarInfo(name)
    info.type, info.size, info.mode = kind, len(data), 0o644
    for field, value in fields.items():
        setattr(info, field, value)
    head = info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    return head + data + bytes(-len(data) % 512)


def folder(name, **fields):
    return member(name, kind=tarfile.DIRTYPE, **{"mode": 0o755, **fields})


def link(name, target, **fields):
    return member(name, kind=tarfile.SYMTYPE, linkname=target, **fields)


def hard_link(name, target):
    return member(name, kind=tarfile.LNKTYPE, linkname=target)


def tar(*members):
    return b"".join(members) + bytes(1024)


async def pieces(data: bytes, size: int = 1000) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def got(backend, box, path=".", **options) -> bytes:
    return b"".join([chunk async for chunk in backend.get_tree(box, path, **options)])


def names(data: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(data)) as opened:
        return opened.getnames()


MAKE = """
mkdir -p d/e empty; echo one > d/e/one; printf 'a\\0b' > d/zero; ln -s ../nowhere d/link
ln -s /etc/passwd absolute; chmod 700 d/e; chmod 751 d/zero; : > 'odd
name'; printf x > "$(printf 'bad\\377name')"; head -c 300000 /dev/urandom > d/large; chmod 750 .
mkdir -p "$(printf 'l%0150d' 1)/$(printf 'm%0150d' 2)"; cd l*/m*; echo deep > f
"""


def test_a_tree_goes_out_and_comes_back_the_same(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY, {"given": b"x"})
        assert (await sh(backend, box, MAKE)).exit_code == 0
        data = await got(backend, box)
        twin = await backend.create(ANY)
        await backend.put_tree(twin, ".", pieces(data, 4097))
        assert await backend.tree_digest(twin) == await backend.tree_digest(box)
        assert await got(backend, twin, "/workspace") == data
        show = "readlink d/link absolute; stat -c '%a %n' d/e d/zero; cat d/e/one"
        shown = await sh(backend, twin, show)
        assert shown.stdout == b"../nowhere\n/etc/passwd\n700 d/e\n751 d/zero\none\n"
        part = await got(backend, box, "d")
        assert names(part) == [".", "e", "e/one", "large", "link", "zero"]
        await backend.put_tree(twin, "copies/of/d", pieces(part))
        assert (await sh(backend, twin, "diff -r --no-dereference d copies/of/d")).exit_code == 0

    play(kind, tmp_path, body)


def test_equal_trees_give_equal_archives_whatever_their_past(kind, tmp_path):
    async def body(backend):
        one = await backend.create(ANY, {"a": b"1", "d/b": b"2", "d/c": b"3"})
        await sh(backend, one, "rm -r d; mkdir d; echo -n 2 > d/b; touch -d 2001-02-03 a")
        two = await backend.create(ANY, {"d/b": b"2"})
        await backend.put(two, "a", b"1")
        assert await got(backend, one) == await got(backend, two)
        await backend.put(two, "a", b"3")
        assert await got(backend, one) != await got(backend, two)

    play(kind, tmp_path, body)


def test_a_live_sandbox_sees_what_is_placed_and_places_go_on_to_snapshots(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY, {"d/old": b"old", "d/gone": b"x", "k": b"k"})
        # It is live now, with a whiteout at d, and has looked at what will change.
        await sh(backend, box, "rm -r d; ls -l; cat k absent")
        new = member("d/new", b"new", mtime=5)
        changed = member("k", b"k2"), member("absent", b"there"), hard_link("h", "d/new")
        data = tar(folder("d", mode=0o711, mtime=10**9), new, *changed)
        await backend.put_tree(box, ".", pieces(data))
        show = "ls d; cat d/new h k absent; ls | wc -l; stat -c '%a %Y' d"
        show += "; stat -c %Y d/new; stat -c %h h"
        shown = (await sh(backend, box, show)).stdout
        assert shown == b"new\nnewnewk2there4\n711 1000000000\n5\n2\n"
        await backend.put_tree(box, "d", pieces(tar(member("new", b"newer"))))
        assert await backend.get(box, "d/new") == b"newer"
        assert await backend.get(box, "h") == b"new"
        snapshot = await backend.snapshot(box, {})
        twin = await backend.restore(ANY, snapshot)
        assert await got(backend, twin) == await got(backend, box)

    play(kind, tmp_path, body)


def test_what_is_there_is_replaced_by_its_own_kind_alone(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY, {"file": b"f", "d/x": b"x"})
        await sh(backend, box, "ln -s file link; mkfifo pipe")
        data = tar(
            member("file", b"2"), link("link", "elsewhere"), folder("d"), member("d/y", b"y")
        )
        for _ in range(2):
            await backend.put_tree(box, ".", pieces(data))
        shown = await sh(backend, box, "cat file d/x d/y; readlink link")
        assert shown.stdout == b"2xyelsewhere\n"
        for wrong in (
            folder("file"), member("link", b""), member("d", b""), link("file", "x"),
            link("d", "x"), member("pipe", b""), member("file/x", b""), member("pipe/x", b""),
        ):  # fmt: skip
            with pytest.raises(UserInputError, match=r"file|link|d|pipe"):
                await asyncio.wait_for(backend.put_tree(box, ".", pieces(tar(wrong))), 10)
        for path in ("link", "file", "pipe/x", "../x", "/etc"):
            with pytest.raises(UserInputError):
                await backend.put_tree(box, path, pieces(data))
        assert (await sh(backend, box, "cat file d/x d/y; readlink link")).stdout == shown.stdout

    play(kind, tmp_path, body)


HUGE = 1 << 62
REFUSED = {
    "absolute": (member("/evil", b"x"), "/evil"),
    "up": (member("../evil", b"x"), "../evil"),
    "up inside": (member("a/../../evil", b"x"), "evil"),
    "up at the end": (folder("a/.."), r"a/\.\."),
    "NUL": (member("a", b"x", pax_headers={"path": "evil\0x"}), "evil"),
    "no name": (member("", b"x"), "not a path"),
    "its own link": (link("out", "/tmp") + member("out/evil", b"x"), "out/evil"),
    "its own link to a folder of its own": (
        folder("real") + link("out", "real") + member("out/evil", b"x"), "out/evil",
    ),
    "a link in place of a folder": (member("d/x", b"x") + link("d", "/tmp"), "'d'"),
    "a file as a folder": (member("f", b"x") + member("f/evil", b"x"), "f/evil"),
    "a folder as a file": (member("f/evil", b"x") + member("f", b"x"), "'f'"),
    "hard link to nothing": (hard_link("evil", "/etc/passwd"), "/etc/passwd"),
    "hard link out": (hard_link("evil", "../../etc/passwd"), "etc/passwd"),
    "hard link to what was there": (hard_link("evil", "given"), "evil"),
    "hard link to a link": (link("s", "/etc/passwd") + hard_link("evil", "s"), "evil"),
    "hard link through a link": (
        member("t/f", b"x") + link("s", "t") + hard_link("evil", "s/f"), "evil",
    ),
    "hard link to a folder": (folder("s") + hard_link("evil", "s"), "evil"),
    "hard link to a later file": (hard_link("evil", "f") + member("f", b"x"), "evil"),
    "hard link to itself": (hard_link("evil", "evil"), "evil"),
    "character device": (member("evil", kind=tarfile.CHRTYPE, devmajor=1, devminor=3), "evil"),
    "whiteout": (member("given", kind=tarfile.CHRTYPE), "given"),
    "block device": (member("evil", kind=tarfile.BLKTYPE, devmajor=8), "evil"),
    "FIFO": (member("evil", kind=tarfile.FIFOTYPE), "evil"),
    "unknown type": (member("evil", b"x", kind=b"Q"), "evil"),
    "old sparse file": (member("evil", b"x", kind=tarfile.GNUTYPE_SPARSE), "evil"),
    "sparse file": (
        member("evil", b"x", pax_headers={"GNU.sparse.map": "0,1", "GNU.sparse.size": str(HUGE)}),
        "evil",
    ),
    "more bytes than there are": (member("evil", b"x" * 9, size=10**6), "evil"),
    "huge size": (member("evil", size=HUGE), "evil"),
    "negative size": (member("evil", size=-512), "evil"),
    "size of a pax header": (member("evil", b"x", pax_headers={"size": str(HUGE)}), "evil"),
    "size of a link": (link("evil", "x", size=512) + bytes(512), "evil"),
    "size of a folder": (folder("evil", size=512) + bytes(512), "evil"),
    "time": (member("evil", b"x", mtime=1 << 60), "evil"),
    "no time": (member("evil", b"x", pax_headers={"mtime": "nan"}), "evil"),
    "twice": (member("evil", b"x") + member("./evil", b"y"), "evil"),
    "long name": (member("e" * 256, b"x"), "eeee"),
    "deep": (member("d/" * 250 + "evil", b"x"), "evil"),
    "link to nowhere": (link("evil", ""), "evil"),
    "long link": (link("evil", "x" * 5000), "evil"),
    "the folder as a link": (link(".", "/tmp"), "'.'"),
    "the folder as a file": (member("./", b"x"), "./"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_must_not_be_placed_is_named_and_nothing_is(case, tmp_path):
    bad, name = REFUSED[case]
    target = tmp_path / "w"
    workspace = PlainWorkspace(target, Stack(), lambda entry: b"")
    workspace.write("given", b"given", 0o600)
    before = list(workspace.shown())
    good = member("good", b"good")
    for data in (tar(good, bad), tar(bad, good)):
        with pytest.raises(UserInputError, match=name):
            unpack_tree(io_file(tmp_path, data), ".", workspace)
        assert list(workspace.shown()) == before
    unpack_tree(io_file(tmp_path, tar(good)), ".", workspace)
    assert workspace.read("good", 9) == b"good"
    assert not any(path.name.endswith("evil") for path in tmp_path.rglob("*"))


def io_file(folder: Path, data: bytes = b""):
    file = (folder / "archive").open("wb+")
    os.unlink(file.name)
    file.write(data)
    file.flush()
    return file


def test_every_refusal_holds_through_a_backend_which_goes_on(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY, {"given": b"given"})
        await sh(backend, box, "true")
        before = await backend.tree_digest(box)
        for bad, name in REFUSED.values():
            with pytest.raises(UserInputError, match=name):
                await asyncio.wait_for(backend.put_tree(box, ".", pieces(tar(bad), 300)), 20)
        assert await backend.tree_digest(box) == before
        assert (await sh(backend, box, "cat given")).stdout == b"given"
        await backend.put_tree(box, ".", pieces(tar(member("good", b"good"))))
        assert (await sh(backend, box, "cat good")).stdout == b"good"

    play(kind, tmp_path, body)


def test_a_link_of_one_archive_is_no_way_out_for_the_next(kind, tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir(mode=0o777)

    async def body(backend):
        box = await backend.create(ANY)
        first = tar(link("out", str(secret)), link("up", "../../.."), link("f", str(secret / "x")))
        await backend.put_tree(box, ".", pieces(first))
        for bad in (
            member("out/evil", b"x"), folder("out"), folder("out/evil"), link("out/evil", "x"),
            member("up/evil", b"x"), member("f", b"x"),
            member("a", b"x") + hard_link("out/evil", "a"),
        ):  # fmt: skip
            with pytest.raises(UserInputError, match=r"out|up|'f'"):
                await backend.put_tree(box, ".", pieces(tar(bad)))
            with pytest.raises(UserInputError, match="out"):
                await backend.put_tree(box, "out", pieces(tar(member("evil", b"x"))))
        for path in ("out", "out/x", "f"):
            with pytest.raises(UserInputError):
                await got(backend, box, path)
        assert list(secret.iterdir()) == []

    play(kind, tmp_path, body)


@pytest.mark.parametrize(
    "data",
    [b"", b"x", b"not a tar" * 200, bytes(100), tar(member("a", b"x"))[:700], member("a", b"x"),
     member("a", b"x") + b"damage" + bytes(2000), member("a", b"x") + bytes(100)],
)  # fmt: skip
def test_an_archive_that_does_not_go_to_its_end_is_refused(data, tmp_path):
    workspace = PlainWorkspace(tmp_path / "w", Stack(), lambda entry: b"")
    with pytest.raises(UserInputError, match=r"not a tar archive|does not hold"):
        unpack_tree(io_file(tmp_path, data), ".", workspace)
    assert list(workspace.shown()) == [""]
    unpack_tree(io_file(tmp_path, bytes(1024)), "made", workspace)
    assert list(workspace.shown()) == ["", "made"]


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_no_damage_to_an_archive_writes_outside_or_fails_otherwise(tmp_path_factory, data):
    whole = bytearray(tar(folder("d"), member("d/f", b"f" * 600), link("d/l", "../x"),
                          hard_link("h", "d/f"), member("n" * 120, b"x", mtime=1.5)))  # fmt: skip
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        for start in range(0, len(whole) - 511, 512):  # make the headers' sums right again
            block = whole[start : start + 512]
            if block[257:262] == b"ustar":
                block[148:156] = b" " * 8
                whole[start + 148 : start + 156] = b"%06o\0 " % sum(block)
    place = tmp_path_factory.mktemp("damage")
    workspace = PlainWorkspace(place / "w", Stack(), lambda entry: b"")
    try:
        unpack_tree(io_file(place, bytes(whole)), ".", workspace)
    except UserInputError:
        assert list(workspace.shown()) == [""]
    assert [path.name for path in place.iterdir()] == ["w"]
    assert {path.name for path in (place / "w").iterdir()} <= {"clock", "files"}


NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1)
NAMES = NAMES.filter(lambda name: name not in (".", "..") and len(name.encode()) < 256)
MODES = st.integers(0, 0o777)
LEAVES = st.tuples(st.just("file"), MODES, st.binary()) | st.tuples(st.just("link"), NAMES)
TREES = st.deferred(lambda: LEAVES | st.dictionaries(NAMES, TREES, max_size=3))


def make(place: Path, tree) -> None:
    if isinstance(tree, dict):
        place.mkdir()
        for name, each in tree.items():
            make(place / name, each)
    elif tree[0] == "link":
        place.symlink_to(tree[1])
    else:
        place.write_bytes(tree[2])
        place.chmod(tree[1])


@given(st.dictionaries(NAMES, TREES, max_size=4))
@settings(max_examples=100, deadline=None)
def test_any_tree_comes_back_the_same(tmp_path_factory, tree):
    place = tmp_path_factory.mktemp("tree")
    one, two = (PlainWorkspace(place / name, Stack(), lambda entry: b"") for name in "ab")
    shutil.rmtree(one.files)
    make(one.files, tree)
    one.files.chmod(0o755)
    packed = [io_file(place) for _ in range(2)]
    pack_tree(one, ".", packed[0], MIB)
    unpack_tree(packed[0], ".", two)
    assert tree_digest(two.tree()) == tree_digest(one.tree())
    pack_tree(two, ".", packed[1], MIB)
    first, second = (os.pread(file.fileno(), MIB, 0) for file in packed)
    assert first == second


FLIP = """
setsid python3 -c '
import contextlib, os, sys, time
end, number = time.monotonic() + 20, 0
while time.monotonic() < end and not os.path.exists("stop"):
    number += 1
    for step in (lambda: os.rename("real", "aside" + str(number)),
                 lambda: os.symlink(sys.argv[1], "real"), lambda: os.unlink("real")):
        with contextlib.suppress(OSError):
            step()
' "$0" </dev/null >/dev/null 2>&1 &
sleep 0.3
"""


async def until_put(backend, box, path):
    """Looking at a folder that changes meanwhile may fail."""
    while True:
        with contextlib.suppress(SandboxError):
            return await backend.put(box, path, b"")


def test_a_folder_that_becomes_a_link_meanwhile_leads_nowhere(tmp_path):
    """Only what survives its command can do that, under the backend that lets it."""
    secret = tmp_path / "secret"
    secret.mkdir()

    async def body(backend):
        box = await backend.create(ANY)
        await run(backend, box, ExecRequest(("sh", "-c", FLIP, str(secret))))
        data = tar(*(member(f"real/{n}", b"x") for n in range(9)))
        num_refused = 0
        for _ in range(200):
            try:
                await backend.put_tree(box, ".", pieces(data, 10**6))
            except (UserInputError, SandboxError):
                num_refused += 1
        await until_put(backend, box, "stop")
        assert list(secret.iterdir()) == []
        assert num_refused, "the folder was never a link when it was looked at"

    play("process", tmp_path, body)


def test_names_that_differ_in_case_alone_stay_apart(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY)
        data = tar(
            member("name", b"1"), member("Name", b"2"), link("D", "/tmp"), member("d/x", b"3")
        )
        await backend.put_tree(box, ".", pieces(data))
        assert (await sh(backend, box, "cat name Name d/x; readlink D")).stdout == b"123/tmp\n"
        twin = await backend.create(ANY)
        await backend.put_tree(twin, ".", pieces(await got(backend, box)))
        assert await backend.tree_digest(twin) == await backend.tree_digest(box)

    play(kind, tmp_path, body)


def test_totals_are_capped(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MAX_MEMBERS", 20)

    async def body(backend):
        box = await backend.create(ANY, {"given": b"x" * 50_000})
        many = tar(*(member(f"m{n}") for n in range(21)))
        with pytest.raises(UserInputError, match=r"'m20'.*more than 20 members"):
            await backend.put_tree(box, ".", pieces(many))
        with pytest.raises(UserInputError, match="larger than 5000 bytes"):
            await backend.put_tree(box, ".", pieces(many), max_bytes=5000)
        sent = 0

        async def endless() -> AsyncIterator[bytes]:
            nonlocal sent
            while True:
                sent += 100_000
                yield bytes(100_000)

        with pytest.raises(UserInputError, match="larger than 1000000 bytes"):
            await asyncio.wait_for(backend.put_tree(box, ".", endless(), max_bytes=10**6), 20)
        assert sent < 3 * MIB
        for limit in (10_000, 50_100):
            with pytest.raises(UserInputError, match=f"more than {limit}|larger than {limit}"):
                await got(backend, box, max_bytes=limit)
        assert (await sh(backend, box, "ls")).stdout == b"given\n"

    play(kind, tmp_path, body)


def test_a_header_that_would_fill_the_memory_is_refused(tmp_path):
    long_name = member("././@LongLink", b"n" * (2 * MIB), kind=tarfile.GNUTYPE_LONGNAME)
    pax = member("p", b"12 a=" + b"x" * MIB, kind=tarfile.XHDTYPE)
    nested = b"".join(member("p", b"11 path=ab\n", kind=tarfile.XHDTYPE) for _ in range(5000))
    workspace = PlainWorkspace(tmp_path / "w", Stack(), lambda entry: b"")
    for bad in (long_name, pax, nested):
        with pytest.raises(UserInputError, match="header of more than"):
            unpack_tree(io_file(tmp_path, tar(bad + member("a", b"x"))), ".", workspace)


def test_what_cannot_travel_is_named(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY, {"d/f": b"f"})
        await sh(backend, box, "mkfifo d/pipe")
        with pytest.raises(UserInputError, match=r"d/pipe.*fifo"):
            await asyncio.wait_for(got(backend, box), 10)
        for path, what in (("absent", "no such folder"), ("d/f", "not a folder but a file")):
            with pytest.raises(UserInputError, match=what):
                await got(backend, box, path)
        assert names(await got(backend, await backend.create(ANY))) == ["."]
        deep = await backend.create(ANY)
        await sh(backend, deep, "for i in $(seq 250); do mkdir d && cd d || exit 1; done")
        with pytest.raises(UncapturableTree):
            await got(backend, deep)

    play(kind, tmp_path, body)


BULK = """
import asyncio, resource, sys
from pathlib import Path
from tests.sandboxes.sandbox_helpers import ANY, play
from tests.sandboxes.test_sandbox_trees import member

NUM, PART = 24, 8 << 20

async def big():
    for n in range(NUM):
        yield member(f"f{n}", bytes(1), size=PART)[:512]
        for _ in range(8):
            yield bytes(PART // 8)
    yield bytes(1024)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

async def body(backend):
    box = await backend.create(ANY)
    before = peak()
    await backend.put_tree(box, ".", big())
    total = 0
    async for chunk in backend.get_tree(box, "."):
        total += len(chunk)
    assert total > NUM * PART, total
    print(peak() - before)

play(sys.argv[1], Path(sys.argv[2]), body)
"""


@pytest.mark.parametrize("kind", ["process", "bytes"])
def test_no_archive_is_held_in_memory(kind, tmp_path):
    """192 MiB go in and out within 64 MiB."""
    done = run_python(BULK, kind, tmp_path)
    assert int(done) < 64 * MIB


def run_python(script: str, *words) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, words)], cwd=Path(__file__).parents[2],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_sandbox_is_free_while_its_archive_is_sent_or_read(kind, tmp_path):
    async def body(backend):
        box = await backend.create(ANY, {"a": b"a" * 3 * MIB})
        go = asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            data = tar(member("b", b"b"))
            yield data[:100]
            await go.wait()
            yield data[100:]

        placing = asyncio.create_task(backend.put_tree(box, ".", slow()))
        reading = backend.get_tree(box, ".")
        first = await anext(reading)
        assert (await asyncio.wait_for(sh(backend, box, "rm a; ls"), 10)).stdout == b""
        go.set()
        await placing
        rest = [chunk async for chunk in reading]
        assert names(first + b"".join(rest)) == [".", "a"]
        assert (await sh(backend, box, "ls")).stdout == b"b\n"

    play(kind, tmp_path, body)


def test_an_archive_that_breaks_off_leaves_nothing(kind, tmp_path):
    class Lost(Exception):
        pass

    async def body(backend):
        box = await backend.create(ANY, {"a": b"a" * 5 * MIB})

        async def broken() -> AsyncIterator[bytes]:
            yield tar(member("b", b"b"))[:600]
            raise Lost

        async def stuck() -> AsyncIterator[bytes]:
            yield tar(member("b", b"b"))[:600]
            await asyncio.sleep(60)

        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(Lost):
            await backend.put_tree(box, ".", broken())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(backend.put_tree(box, ".", stuck()), 0.3)
        reading = backend.get_tree(box, ".")
        await anext(reading)
        await reading.aclose()
        assert len(os.listdir("/proc/self/fd")) <= before
        assert (await sh(backend, box, "ls")).stdout == b"a\n"

    play(kind, tmp_path, body)
