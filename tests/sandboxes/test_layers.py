"""Layers: canonical, safe, and equal to what they were captured from, whatever the layering."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.blobs import BlobStore
from k3rl.errors import CorruptData, SandboxError, UserInputError
from k3rl.sandboxes.layers import (
    EMPTY_TREE,
    INLINE_BYTES,
    ROOT,
    Entry,
    EntryType,
    Layer,
    difference,
    layer_of_files,
    load,
    merge,
    pack,
    persist,
    tree_digest,
    unpack,
)
from k3rl.sandboxes.trees import extract, file_writer, remove_tree, scan
from k3rl.sandboxes.workspace import PlainWorkspace, Stack
from k3rl.types import digest_bytes

NAMES = st.sampled_from(["a", "b", "a-b", "c \n", "\u00e9", os.fsdecode(b"\xff\x01")])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
CONTENTS = st.one_of(
    st.binary(max_size=40), st.integers(0, 3).map(lambda n: b"%d" % n * (INLINE_BYTES + n))
)
MODES = st.sampled_from([0o644, 0o600, 0o755, 0o000, 0o4755])
EDITS = st.one_of(
    st.tuples(st.just("file"), PATHS, CONTENTS, MODES),
    st.tuples(st.just("dir"), PATHS, st.sampled_from([0o755, 0o700, 0o500, 0o1777])),
    st.tuples(st.just("link"), PATHS, st.sampled_from(["a", "../x", "/etc/passwd", "\u00e9"])),
    st.tuples(st.just("fifo"), PATHS, MODES),
    st.tuples(st.just("remove"), PATHS),
)


def real_folder(root: Path, parts: list[str]) -> Path | None:
    """The folder at `parts`, made where nothing is; None where something else is in the way."""
    here = root
    for part in parts:
        here = here / part
        if here.is_symlink() or (here.exists() and not here.is_dir()):
            return None
        here.mkdir(exist_ok=True)
    return here


def apply(edit: tuple, root: Path) -> None:
    """Carry out one edit on a real folder; edits that cannot be done are skipped."""
    kind, path, *rest = edit
    *above, name = path.split("/")
    folder = real_folder(root, above)
    if folder is None:
        return
    target = folder / name
    if target.is_dir() and not target.is_symlink():
        if kind == "dir":
            target.chmod(rest[0])
            return
        remove_tree(target)
    elif os.path.lexists(target):
        target.unlink()
    if kind == "file":
        target.write_bytes(rest[0])
        target.chmod(rest[1])
    elif kind == "dir":
        target.mkdir()
        target.chmod(rest[0])
    elif kind == "link":
        target.symlink_to(rest[0])
    elif kind == "fifo":
        os.mkfifo(target)
        target.chmod(rest[0])


def captured(folder: Path) -> tuple[dict, dict]:
    inline: dict = {}
    return {entry.path: entry for entry in scan(folder, inline)}, inline


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(EDITS, max_size=6), min_size=1, max_size=4))
def test_layers_add_up_to_the_tree_they_were_captured_from(rounds):
    if os.geteuid() != 0:
        # A mode that shuts its owner out stops the edits, not the code under test.
        rounds = [[e for e in edits if 0o500 not in e and 0 not in e] for edits in rounds]
    with tempfile.TemporaryDirectory() as temp:
        blobs = BlobStore(Path(temp, "blobs"))
        source = PlainWorkspace(Path(temp, "source"), Stack(), lambda entry: b"")
        ids = []
        for edits in rounds:
            for edit in edits:
                apply(edit, source.files)
            change = source.change()
            if change is not None:
                persist(blobs, change, source.read_large)
                source.seal(change)
                ids.append(change.id)
        truth, inline = captured(source.files)

        stack = Stack()
        for layer_id in ids:
            stack = stack.push(load(blobs, layer_id))
        root_only = {"": truth[""]}
        assert {**stack.tree, **root_only} == truth
        assert tree_digest(stack.tree) == tree_digest(truth)
        single = merge(EMPTY_TREE, Layer.of(truth.values(), inline))
        assert tree_digest(single) == tree_digest(truth)

        small = {d: data for layer in stack.layers for d, data in layer.inline.items()}

        def content(entry: Entry) -> bytes:
            return small[entry.digest] if entry.is_inline else blobs.get(entry.digest)

        extract(stack.tree.values(), Path(temp, "out"), file_writer(content, None), None)
        again, _ = captured(Path(temp, "out"))
        assert again == dict(stack.tree)
        remove_tree(Path(temp, "out"))
        source.remove()


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from("abcdef"), CONTENTS), st.randoms())
def test_a_layer_is_canonical_and_round_trips(files, random):
    layer, _ = layer_of_files(files)
    names = list(files)
    random.shuffle(names)
    assert layer_of_files({name: files[name] for name in names})[0].id == layer.id
    blob = pack(layer.entries, layer.inline)
    assert layer.id == digest_bytes(blob)
    back = unpack(blob, "x")
    assert (back.id, back.entries, back.inline) == (layer.id, layer.entries, layer.inline)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_an_overlay_on_disk_round_trips(data):
    paths = data.draw(st.dictionaries(st.sampled_from("abcd"), st.sampled_from(list(EntryType))))
    opaque = data.draw(st.booleans())
    digest = digest_bytes(b"x")
    entries = [Entry("", EntryType.DIR, 0o755, 10**18, is_opaque=opaque)]
    for path, kind in paths.items():
        facts = {
            EntryType.FILE: {"size": 1, "digest": digest, "mode": 0o640},
            EntryType.DIR: {"mode": 0o711, "is_opaque": opaque},
            EntryType.LINK: {"target": "../x"},
            EntryType.FIFO: {"mode": 0o600},
            EntryType.SOCKET: {"mode": 0o600},
            EntryType.WHITEOUT: {},
        }[kind]
        mtime_ns = 0 if kind is EntryType.WHITEOUT else 10**18 + 7
        entries.append(Entry(path, kind, mtime_ns=mtime_ns, **facts))
    layer = Layer.of(entries, {digest: b"x"})
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp, "layer")
        extract(layer.entries, folder, file_writer(lambda entry: b"x", None), None)
        inline: dict = {}
        assert Layer.of(scan(folder, inline), inline).id == layer.id


def test_a_folder_deleted_and_made_again_does_not_show_its_old_files():
    base, _ = layer_of_files({"d/old": b"1", "d/sub/old": b"2", "e": b"3"})
    folder = Entry("d", EntryType.DIR, 0o755, 1, is_opaque=True)
    digest = digest_bytes(b"n")
    new = Entry("d/new", EntryType.FILE, 0o644, 1, 1, digest=digest)
    above = Layer.of([ROOT, folder, new], {digest: b"n"})
    tree = merge(merge(EMPTY_TREE, base), above)
    assert set(tree) == {"", "d", "d/new", "e"}
    # The same folder without the mark shows them, so the mark is what hides them.
    plain = Layer.of([ROOT, Entry("d", EntryType.DIR, 0o755, 1), new], {digest: b"n"})
    assert "d/old" in merge(merge(EMPTY_TREE, base), plain)


def test_whiteouts_hide_files_and_whole_folders():
    base, _ = layer_of_files({"d/x": b"1", "d/y/z": b"2", "f": b"3"})
    layer = Layer.of([ROOT, Entry("d", EntryType.WHITEOUT), Entry("f", EntryType.WHITEOUT)], {})
    assert set(merge(merge(EMPTY_TREE, base), layer)) == {""}


def test_a_file_in_the_place_of_a_folder_hides_what_was_in_it():
    base, _ = layer_of_files({"d/x": b"1"})
    above, _ = layer_of_files({"d": b"now a file"})
    tree = merge(merge(EMPTY_TREE, base), above)
    assert set(tree) == {"", "d"}
    assert merge(EMPTY_TREE, Layer.of(difference(EMPTY_TREE, tree), above.inline)) == tree


def test_the_tree_digest_names_content_and_nothing_else():
    one = {e.path: e for e in layer_of_files({"a": b"1"})[0].entries}
    entry = one["a"]
    older = {**one, "a": Entry("a", EntryType.FILE, 0o644, 5, 1, digest=entry.digest)}
    assert tree_digest(older) == tree_digest(one)
    for other in (
        Entry("a", EntryType.FILE, 0o755, 5, 1, digest=entry.digest),
        Entry("a", EntryType.FILE, 0o644, 5, 1, digest=digest_bytes(b"2")),
        Entry("a", EntryType.LINK, 0, 5, target="1"),
        Entry("b", EntryType.FILE, 0o644, 5, 1, digest=entry.digest),
    ):
        assert tree_digest({"": ROOT, other.path: other}) != tree_digest(one)


def test_small_files_travel_in_one_blob(tmp_path):
    blobs = BlobStore(tmp_path)
    layer, contents = layer_of_files({f"f{n}": b"%d" % n * 100 for n in range(20)})
    persist(blobs, layer, lambda entry: contents[entry.digest])
    assert list(blobs.digests()) == [layer.id]
    large, contents = layer_of_files({"x": b"x" * (INLINE_BYTES + 1), "y": b"y" * INLINE_BYTES})
    persist(blobs, large, lambda entry: contents[entry.digest])
    assert [e.path for e in large.large_files()] == ["x"]
    assert len(list(blobs.digests())) == 3


def file_entry(path: str) -> Entry:
    return Entry(path, EntryType.FILE, 0o644, 1, 1, digest=digest_bytes(b"x"))


@pytest.mark.parametrize(
    "entries",
    [
        [],
        [file_entry("a")],
        [ROOT, file_entry("../a")],
        [ROOT, file_entry("/a")],
        [ROOT, file_entry("a/b")],
        [ROOT, file_entry("a\0")],
        [ROOT, file_entry("a"), file_entry("a")],
        [ROOT, Entry("l", EntryType.LINK, target="/etc"), file_entry("l/passwd")],
        [ROOT, Entry("a", EntryType.FILE, 0o644, 1, 1, digest="../../etc/passwd")],
        [ROOT, Entry("a", EntryType.FILE, 0o644, 1, -1, digest=digest_bytes(b"x"))],
        [ROOT, Entry("a", EntryType.DIR, 0o200000)],
    ],
)
def test_a_hostile_manifest_is_corrupt_data(entries):
    named = {e.digest: b"x" for e in entries if e.type is EntryType.FILE}
    with pytest.raises(CorruptData, match="manifest"):
        unpack(pack(entries, named), "file.bin")


def test_torn_and_altered_blobs_are_corrupt_data():
    layer, _ = layer_of_files({"a": b"content"})
    blob = pack(layer.entries, layer.inline)
    for bad in (b"", blob[:3], blob[:20], blob[:-1], blob[:-1] + b"?", b"\xff" * 40):
        with pytest.raises(CorruptData):
            unpack(bad, "file.bin")


def test_extraction_never_leaves_its_folder(tmp_path):
    (tmp_path / "outside").mkdir()
    link = Entry("l", EntryType.LINK, target=str(tmp_path / "outside"))
    place = file_writer(lambda entry: b"x", None)
    with pytest.raises(SandboxError, match="no entry"):
        extract([ROOT, link, file_entry("l/x")], tmp_path / "out", place, None)
    assert list((tmp_path / "outside").iterdir()) == []


def test_files_given_at_creation_must_be_inside_the_workspace():
    for files in ({"../a": b""}, {"/a": b""}, {"a": b"", "a/b": b""}, {"a/b": b"", "a": b""}):
        with pytest.raises(UserInputError):
            layer_of_files(files)


def test_remove_tree_copes_with_depth_and_modes(tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    handle = os.open(victim, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=handle)
        deeper = os.open("d", os.O_RDONLY, dir_fd=handle)
        os.close(handle)
        handle = deeper
    os.mkdir("shut", 0o000, dir_fd=handle)
    os.close(handle)
    (victim / ".gone-1").mkdir()
    (tmp_path / "kept").write_text("x")
    (victim / "link").symlink_to(tmp_path / "kept")
    remove_tree(victim)
    remove_tree(victim)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
