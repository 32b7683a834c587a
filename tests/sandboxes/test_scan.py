"""Looks at folders: every change is found, and what cannot have changed is not read again."""

import mmap
import os
import stat
import time
from pathlib import Path

import pytest

from k3rl.errors import UncapturableTree
from k3rl.sandboxes.files import scan as scanning
from k3rl.sandboxes.files.held import Held, TooMuch, inline_reader
from k3rl.sandboxes.files.layers import INLINE_BYTES, ROOT, Entry, EntryType
from k3rl.sandboxes.files.merged import Tree
from k3rl.sandboxes.files.plain import PlainWorkspace
from k3rl.sandboxes.files.scan import (
    Survey,
    notes_mapped_writes,
    root_of,
    scan,
)
from k3rl.sandboxes.files.trees import copy_content, extract, file_copier, file_writer
from k3rl.sandboxes.files.workspace import Stack
from k3rl.types import digest_bytes

MEMORY = Path("/dev/shm")
PAST_NS = 10**18


class Reads:
    """A reader that remembers the names of the files that it read."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._read = inline_reader({})

    def __call__(self, handle: int, size: int) -> tuple[str, int]:
        self.names.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        return self._read(handle, size)

    def take(self) -> list[str]:
        names, self.names = sorted(self.names), []
        return names


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "files"
    made.mkdir()
    for name in ("a", "b", "d/c"):
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text(name * 3)
    return made


def survey_of(folder: Path) -> Survey:
    return Survey(folder, folder.parent, None, is_upper=False)


def look(survey: Survey, read: Reads) -> tuple[list[str], list[str]]:
    """Look and remember; what was read, and what was found to be new."""
    found = survey.look(read)
    survey.keep(found)
    return read.take(), sorted(entry.path for entry in found.changed) + found.gone


def a_tick_later() -> None:
    time.sleep(0.05)


def test_what_cannot_have_changed_is_not_read_again(folder):
    assert notes_mapped_writes(folder.parent), (
        "these tests want a file system that notes mapped writes"
    )
    survey, read = survey_of(folder), Reads()
    a_tick_later()
    assert look(survey, read) == (["a", "b", "c"], ["", "a", "b", "d", "d/c"])
    assert look(survey, read) == ([], [])
    (folder / "a").write_text("new")
    a_tick_later()
    assert look(survey, read) == (["a"], ["a"])
    assert look(survey, read) == ([], [])


def test_what_is_as_new_as_the_look_is_read_once_more(folder, monkeypatch):
    survey, read = survey_of(folder), Reads()
    a_tick_later()
    (folder / "a").write_text("new")
    with monkeypatch.context() as patch:
        # The clock has not moved on since: what is written behind the look may get the same time.
        patch.setattr(scanning, "_clock_ns", lambda home: (folder / "a").stat().st_ctime_ns)
        look(survey, read)
        assert look(survey, read) == (["a"], [])
    a_tick_later()
    assert look(survey, read) == (["a"], [])
    assert look(survey, read) == ([], [])


def test_changes_in_the_tick_of_a_look_are_never_missed(folder):
    survey, read, target = survey_of(folder), Reads(), folder / "a"
    for number in range(300):
        target.write_text(f"{number:03}")
        os.utime(target, ns=(PAST_NS, PAST_NS))
        survey.keep(survey.look(read))
        target.write_text(f"{number:03}"[::-1])
        os.utime(target, ns=(PAST_NS, PAST_NS))
        found = survey.look(read)
        digest = {entry.path: entry.digest for entry in found.entries}["a"]
        assert digest == digest_bytes(f"{number:03}"[::-1].encode())
        survey.keep(found)


def overwrite(folder: Path) -> None:
    times = (folder / "a").stat()
    with (folder / "a").open("r+") as file:
        file.write("xyz")
    os.utime(folder / "a", ns=(times.st_atime_ns, times.st_mtime_ns))


def swap(folder: Path) -> None:
    for name in "ab":
        os.utime(folder / name, ns=(PAST_NS, PAST_NS))
    (folder / "a").rename(folder / "t")
    (folder / "b").rename(folder / "a")
    (folder / "t").rename(folder / "b")


def replaced(folder: Path) -> None:
    times = (folder / "a").stat()
    (folder / "new").write_text("xyz")
    os.utime(folder / "new", ns=(times.st_atime_ns, times.st_mtime_ns))
    (folder / "new").rename(folder / "a")


def mapped(folder: Path) -> None:
    with (folder / "a").open("r+") as file, mmap.mmap(file.fileno(), 3) as view:
        assert view[0:1] == b"a"
        view[0:1] = b"x"


@pytest.mark.parametrize(
    ("change", "paths"),
    [
        (overwrite, {"a"}),
        (swap, {"a", "b"}),
        (replaced, {"a"}),
        (mapped, {"a"}),
        (lambda folder: (folder / "a").chmod(0o600), {"a"}),
        (lambda folder: os.setxattr(folder / "a", "user.x", b"1"), {"a"}),
        (lambda folder: os.setxattr(folder / "d", "user.x", b"1"), {"d"}),
        (lambda folder: os.link(folder / "a", folder / "d" / "l"), {"a", "d/l"}),
        (lambda folder: (folder / "d").rename(folder / "e"), {"d", "d/c", "e", "e/c"}),
        (lambda folder: (folder / "a").unlink(), {"a"}),
        (lambda folder: os.truncate(folder / "a", 1), {"a"}),
    ],
)
def test_every_change_is_found(folder, change, paths):
    survey, read = survey_of(folder), Reads()
    a_tick_later()
    look(survey, read)
    assert look(survey, read) == ([], [])
    change(folder)
    _, new = look(survey, read)
    assert set(new) - {"", "d"} == paths - {"d"}
    assert "d" not in paths or "d" in new
    fresh = scan(folder, inline_reader({}))
    assert [known.entry for known in survey.known.values()] == fresh


@pytest.mark.skipif(not MEMORY.is_dir(), reason="no tmpfs at /dev/shm")
def test_a_file_system_that_keeps_mapped_writes_to_itself_is_read_each_time(monkeypatch):
    home = MEMORY / f"k3rl-test-{os.getpid()}"
    (home / "files").mkdir(parents=True)
    try:
        target = home / "files" / "a"
        target.write_text("aaa")
        a_tick_later()
        assert not notes_mapped_writes(home)
        survey, read = survey_of(home / "files"), Reads()
        look(survey, read)
        mapped(home / "files")
        assert look(survey, read) == (["a"], ["a"])
        # The control: trusted like another file system, it hides the change.
        target.write_text("aaa")
        a_tick_later()
        monkeypatch.setitem(scanning._notes, home.stat().st_dev, True)
        survey = survey_of(home / "files")
        look(survey, read)
        mapped(home / "files")
        assert look(survey, read) == ([], [])
    finally:
        for path in (*(home / "files").iterdir(), home / "clock"):
            path.unlink()
        (home / "files").rmdir()
        home.rmdir()


def test_a_workspace_does_not_read_what_it_has_just_written(tmp_path):
    contents = {digest_bytes(b"%d" % n): b"%d" % n for n in range(50)}
    files = [
        Entry(f"f{n}", EntryType.FILE, 0o644, PAST_NS, len(data), digest=digest)
        for n, (digest, data) in enumerate(contents.items())
    ]
    tree = Tree.of([ROOT, *files])
    made = PlainWorkspace(tmp_path / "w", Stack((), tree), lambda e: [contents[e.digest]])
    a_tick_later()
    survey, read = made._survey, Reads()
    look(survey, read)  # the last ones are as new as the look that was had of them
    assert look(survey, read) == ([], [])
    assert made.tree() == tree
    twin = made.copy(tmp_path / "x")
    assert twin.tree() == tree
    assert made.seal(lambda: None) is made.sealed


def test_names_that_only_overlayfs_may_give_mean_nothing_in_a_plain_folder(folder):
    os.setxattr(folder / "d", "user.overlay.opaque", b"y")
    os.setxattr(folder / "d", "user.own", b"1")
    found = {entry.path: entry for entry in scan(folder, inline_reader({}))}
    assert (found["d"].is_opaque, found["d"].xattrs) == (False, (("user.own", b"1"),))
    upper = {entry.path: entry for entry in scan(folder, inline_reader({}), is_upper=True)}
    assert upper["d"].is_opaque
    os.mknod(folder / "w", stat.S_IFCHR, device=0)
    kinds = {entry.path: entry.type for entry in scan(folder, inline_reader({}), is_upper=True)}
    assert kinds["w"] is EntryType.WHITEOUT
    with pytest.raises(UncapturableTree, match="device: 'w'"):
        scan(folder, inline_reader({}))


def test_held_contents_stay_as_they_were(tmp_path):
    bodies = {name: os.urandom(INLINE_BYTES + number) for number, name in enumerate("abcd")}
    bodies |= {"e": bodies["d"], "small": b"s" * INLINE_BYTES}
    source = tmp_path / "files"
    source.mkdir()
    for name, data in bodies.items():
        (source / name).write_bytes(data)
    held = Held(2 * INLINE_BYTES + 10, tmp_path)
    entries = {entry.path: entry for entry in scan(source, held.read)}
    for path in source.iterdir():
        path.write_bytes(b"?" * path.stat().st_size)
    for name, data in bodies.items():
        assert b"".join(held.blocks(entries[name])) == data
    assert [name for name in bodies if entries[name].digest not in held.inline]
    assert entries["small"].digest in held.inline
    with pytest.raises(KeyError):
        list(held.blocks(Entry("x", EntryType.FILE, digest="0" * 64)))
    with pytest.raises(TooMuch):
        scan(source, Held(2 * INLINE_BYTES).read)


@pytest.mark.parametrize("place", [MEMORY, None], ids=["another file system", "the same"])
def test_contents_are_copied_by_the_kernel_or_by_hand(place, tmp_path):
    data = os.urandom(3_000_001)
    (tmp_path / "source").write_bytes(data)
    target = (place or tmp_path) / f"k3rl-test-target-{os.getpid()}"
    try:
        with (tmp_path / "source").open("rb") as source, target.open("w+b") as copy:
            copy_content(source.fileno(), copy.fileno(), 0)
            copy_content(source.fileno(), copy.fileno(), 1 << 22)
            assert copy.read() == data + bytes((1 << 22) - len(data)) + data
    finally:
        target.unlink()


def test_attributes_that_a_file_system_cannot_hold_are_left_out(tmp_path):
    large = (("user.large", b"x" * 9000), ("user.small", b"1"))
    tree = [ROOT, Entry("a", EntryType.FILE, 0o400, PAST_NS, xattrs=large)]
    extract(tree, tmp_path / "out", file_writer(lambda entry: [b""], None), None)
    (found,) = [e for e in scan(tmp_path / "out", inline_reader({})) if e.path]
    assert set(found.xattrs) <= set(large)
    assert ("user.small", b"1") in found.xattrs


def test_one_file_under_several_names_stays_one_file(folder, tmp_path):
    os.link(folder / "a", folder / "d" / "z")
    os.link(folder / "a", folder / "y")
    entries = scan(folder, inline_reader({}))
    groups = {entry.path: entry.group for entry in entries if entry.group}
    assert groups == {"a": "a", "d/z": "a", "y": "a"}
    extract(entries, tmp_path / "out", file_copier([folder], None), None)
    assert scan(tmp_path / "out", inline_reader({})) == entries
    (tmp_path / "out" / "y").write_text("through")
    assert (tmp_path / "out" / "d" / "z").read_text() == "through"
    assert (folder / "a").read_text() == "aaa"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another group")
def test_a_group_that_a_folder_above_passes_on_is_not_the_workspaces(tmp_path):
    os.chown(tmp_path, -1, 4321)
    tmp_path.chmod(0o2755)
    made = PlainWorkspace(tmp_path / "w", Stack(), lambda entry: [])
    (made.files / "f").write_text("x")
    (made.files / "d").mkdir()
    assert root_of(made.files, None).gid == ROOT.gid
    assert {entry.gid for entry in made.tree().values()} == {ROOT.gid}
    assert {entry.mode for entry in made.tree().values()} == {0o755, 0o644}
