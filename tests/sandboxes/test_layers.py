"""Layers: canonical, safe, and equal to what they were captured from, whatever the layering."""

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.blobs import BlobStore
from k3rl.errors import CorruptData, SandboxError, UserInputError
from k3rl.sandboxes.files.held import inline_reader
from k3rl.sandboxes.files.layers import (
    INLINE_BYTES,
    ROOT,
    Entry,
    EntryType,
    Layer,
    layer_of_files,
    pack,
    persist,
    sort_key,
    unpack,
)
from k3rl.sandboxes.files.merged import EMPTY_TREE, Tree, difference, merge, tree_digest
from k3rl.sandboxes.files.scan import scan
from k3rl.sandboxes.files.trees import extract, file_writer, remove_tree
from k3rl.types import digest_bytes

PATHS = ["a", "b", "c", *(f"{folder}/{name}" for folder in "abc" for name in "xyz")]
BODIES = [b"", b"1", b"22"]
CONTENT_BY_DIGEST = {digest_bytes(body): body for body in BODIES}
KINDS = st.sampled_from([0o644, 0o4755, "dir", "dir", "link", "fifo"])
FACTS = st.tuples(
    st.sampled_from(BODIES),
    st.sampled_from([(), (("user.a", b"\0\xff"),), (("user.a", b""), ("user.b", b"1"))]),
    st.sampled_from([(0, 0), (33, 0)]),
    st.integers(0, 2),
)


@st.composite
def trees(draw) -> Tree:
    """A tree of few names, so that two of them have much in common; some files have more names."""
    kinds = draw(st.dictionaries(st.sampled_from(["a", "b", "c"]), KINDS, max_size=3))
    for folder in [path for path, kind in kinds.items() if kind == "dir"]:
        inner = draw(st.dictionaries(st.sampled_from("xyz"), KINDS, max_size=3))
        kinds |= {f"{folder}/{name}": kind for name, kind in inner.items()}
    entries = [ROOT]
    for path, kind in sorted(kinds.items()):
        body, xattrs, (uid, gid), mtime_ns = draw(FACTS)
        facts = {"mtime_ns": mtime_ns, "uid": uid, "gid": gid}
        if kind in ("link", "fifo"):
            target = "t" if kind == "link" else ""
            entries.append(Entry(path, EntryType(kind), target=target, **facts))
        elif kind == "dir":
            entries.append(Entry(path, EntryType.DIR, 0o755, xattrs=xattrs, **facts))
        else:
            content = {"size": len(body), "digest": digest_bytes(body), "xattrs": xattrs}
            entries.append(Entry(path, EntryType.FILE, kind, **content, **facts))
    for names in draw(st.lists(st.sets(st.sampled_from(PATHS)), max_size=2)):
        alike = [e for e in entries if e.path in names and not e.group and e.type != "dir"]
        first = min(alike, key=sort_key, default=ROOT)
        for entry in alike if len(alike) > 1 else ():
            other = replace(first, path=entry.path, group=first.path)
            entries[entries.index(entry)] = other
    return Tree.of(entries)


TREES = trees()
CONTENTS = st.one_of(
    st.binary(max_size=40), st.integers(0, 3).map(lambda n: b"%d" % n * (INLINE_BYTES + n))
)


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
        extract(layer.entries, folder, file_writer(lambda entry: [b"x"], None), None)
        inline: dict = {}
        found = scan(folder, inline_reader(inline), is_upper=True)
        assert Layer.of(found, inline).id == layer.id


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
    one = Tree.of(layer_of_files({"a": b"1", "b": b"1"})[0].entries)
    a, b = one["a"], one["b"]
    for same in (
        replace(a, mtime_ns=5),
        replace(a, uid=33, gid=44),
        replace(a, xattrs=(("user.x", b"1"),)),
    ):
        tree = Tree.of([ROOT, same, b])
        assert tree != one
        assert tree_digest(tree) == tree_digest(one)
    linked = [replace(entry, group="a") for entry in (a, b)]
    assert tree_digest(Tree.of([ROOT, *linked])) == tree_digest(one)
    for other in (
        replace(a, mode=0o755),
        replace(a, digest=digest_bytes(b"2")),
        Entry("a", EntryType.LINK, 0, 5, target="1"),
        Entry("a", EntryType.FIFO, 0o644, 5),
        Entry("a", EntryType.DIR, 0o644, 5),
        replace(a, path="c"),
    ):
        assert tree_digest(Tree.of([ROOT, other, b])) != tree_digest(one)


def test_a_tree_digest_is_the_same_by_hand():
    layer, _ = layer_of_files({"d/x": b"1", "e": b"22"})
    tree = Tree.of(
        [
            *layer.entries,
            Entry("l", EntryType.LINK, target="d/x"),
        ]
    )
    row = b"%s\0%s\0%o\0%s\0%s\0"
    x = row % (b"x", b"file", 0o644, digest_bytes(b"1").encode(), b"")
    d = row % (b"d", b"dir", 0o755, digest_bytes(x).encode(), b"")
    e = row % (b"e", b"file", 0o644, digest_bytes(b"22").encode(), b"")
    link = row % (b"l", b"link", 0, b"", b"d/x")
    root = row % (b"", b"dir", 0o755, digest_bytes(d + e + link).encode(), b"")
    assert tree_digest(tree) == digest_bytes(root)


@settings(max_examples=150, deadline=None)
@given(TREES, TREES, TREES)
def test_a_difference_turns_one_tree_into_the_other(old, middle, new):
    for before, after in ((old, middle), (middle, new), (old, new)):
        layer = Layer.of(difference(before, after), CONTENT_BY_DIGEST)
        # What is stored is read back, and stands alone: with what it names it makes `after`.
        layer = unpack(pack(layer.entries, layer.inline), "x") if layer.entries else layer
        merged = merge(before, layer)
        assert merged == after
        assert merged.groups == after.groups
        assert tree_digest(merged) == tree_digest(after)
        assert (layer.entries == ()) == (before == after)
        assert difference(merged, after) == []
    direct = Layer.of(difference(old, new), CONTENT_BY_DIGEST)
    by_way = merge(merge(old, Layer.of(difference(old, middle), CONTENT_BY_DIGEST)),
                   Layer.of(difference(middle, new), CONTENT_BY_DIGEST))  # fmt: skip
    assert merge(old, direct) == by_way


def test_what_a_layer_does_not_touch_is_shared():
    files = {f"d{n}/f{m}": b"x" for n in range(20) for m in range(20)}
    tree = merge(EMPTY_TREE, layer_of_files(files)[0])
    tree_digest(tree)
    entry = replace(tree["d3/f4"], mode=0o600)
    after = merge(tree, Layer("", (tree[""], tree["d3"], entry), {}))
    fresh = [path for path in after if node_at(after, path) is not node_at(tree, path)]
    assert fresh == ["", "d3", "d3/f4"]
    assert [path for path in after if node_at(after, path).row is None] == fresh
    assert [each.path for each in difference(tree, after)] == ["d3/f4", "d3", ""]


def node_at(tree: Tree, path: str):
    node = tree.root
    for name in path.split("/") if path else ():
        node = node.children[name]
    return node


def test_small_files_travel_in_one_blob(tmp_path):
    blobs = BlobStore(tmp_path)
    layer, contents = layer_of_files({f"f{n}": b"%d" % n * 100 for n in range(20)})
    persist(blobs, layer, lambda entry: [contents[entry.digest]])
    assert list(blobs.digests()) == [layer.id]
    large, contents = layer_of_files({"x": b"x" * (INLINE_BYTES + 1), "y": b"y" * INLINE_BYTES})
    persist(blobs, large, lambda entry: [contents[entry.digest]])
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
        [ROOT, replace(file_entry("a"), uid=-1)],
        [ROOT, replace(file_entry("a"), gid=1 << 32)],
        [ROOT, replace(file_entry("a"), group="a")],
        [ROOT, replace(file_entry("a"), group="b"), replace(file_entry("b"), group="b")],
        [ROOT, *(replace(file_entry(p), group="../a") for p in "ab")],
        [ROOT, *(replace(file_entry(p), group="a", mtime_ns=ord(p)) for p in "ab")],
        [ROOT, *(Entry(p, EntryType.DIR, group="a") for p in "ab")],
        [ROOT, replace(file_entry("a"), xattrs=(("security.capability", b""),))],
        [ROOT, replace(file_entry("a"), xattrs=(("user.overlay.opaque", b"y"),))],
        [ROOT, replace(file_entry("a"), xattrs=(("user.b", b""), ("user.a", b"")))],
        [ROOT, replace(file_entry("a"), xattrs=(("user.a", b""), ("user.a", b"1")))],
        [ROOT, replace(file_entry("a"), xattrs=(("user.a\0", b""),))],
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
    place = file_writer(lambda entry: [b"x"], None)
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
