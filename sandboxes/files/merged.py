"""The trees that layers stack to: immutable, shared where they are equal, digested in parts.

A tree is folders in folders. What a layer does not touch is the same object before and after it,
so merging, comparing and digesting cost what changed (and the width of the folders it lies in), not
the size of the tree.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, ValuesView
from dataclasses import replace

from k3rl.sandboxes.files.layers import ROOT, Entry, EntryType, Layer, parent_of, sort_key
from k3rl.types import Digest, digest_bytes

Groups = Mapping[str, tuple[str, ...]]
"""Paths of one file under several names, sorted, by the first of them."""


class Node:
    """An entry and, of a folder, what it holds. Not changed once it is part of a tree."""

    __slots__ = ("children", "entry", "row")

    def __init__(self, entry: Entry, children: dict[str, Node] | None = None) -> None:
        """`children` by name; None for all but folders."""
        self.entry, self.children = entry, children
        self.row: bytes | None = None
        """What a folder's digest takes of it, once that was asked for."""


class Tree(Mapping[str, Entry]):
    """Entries by path, the parent of each among them; no whiteouts, nothing opaque."""

    __slots__ = ("groups", "root")

    def __init__(self, root: Node, groups: Groups) -> None:
        """Owns both. `merge` makes trees."""
        self.root, self.groups = root, groups

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Tree:
        """The tree of these entries, in any order."""
        return merge(EMPTY_TREE, Layer("", tuple(sorted(entries, key=sort_key)), {}))

    def __getitem__(self, path: str) -> Entry:
        """The entry at a path. Raises KeyError."""
        node = self.root
        for name in path.split("/") if path else ():
            if node.children is None:
                raise KeyError(path)
            node = node.children[name]
        return node.entry

    def __iter__(self) -> Iterator[str]:
        """Paths, parents before what they hold."""
        return (entry.path for entry in self.values())

    def __len__(self) -> int:
        """Counted each time."""
        return sum(1 for _ in self.values())

    def values(self) -> ValuesView[Entry]:
        """Entries, parents before what they hold."""
        return _Entries(self)


class _Entries(ValuesView[Entry]):
    _mapping: Tree

    def __iter__(self) -> Iterator[Entry]:
        waiting = [self._mapping.root]
        while waiting:
            node = waiting.pop()
            yield node.entry
            if node.children:
                waiting += reversed(node.children.values())


EMPTY_TREE = Tree(Node(ROOT, {}), {})


def merge(tree: Tree, layer: Layer) -> Tree:
    """`tree` after `layer`, as overlayfs would show it."""
    if not layer.entries:
        return tree
    root = _laid(tree.root, layer.entries[0])
    above = [root]
    for entry in layer.entries[1:]:
        parent, name = parent_of(entry.path), entry.path.rpartition("/")[2]
        while above[-1].entry.path != parent:
            above.pop()
        siblings = above[-1].children
        assert siblings is not None
        if entry.type is EntryType.WHITEOUT:
            siblings.pop(name, None)
        elif entry.type is EntryType.DIR:
            siblings[name] = _laid(siblings.get(name), entry)
            above.append(siblings[name])
        else:
            siblings[name] = Node(entry)
    return _regrouped(tree, root, layer)


def _laid(below: Node | None, entry: Entry) -> Node:
    """A folder on top of what was at its path; its children may still be changed."""
    if entry.is_opaque:
        return Node(replace(entry, is_opaque=False), {})
    is_merged = below is not None and below.children is not None
    return Node(entry, dict(below.children) if is_merged else {})  # type: ignore


def _regrouped(old: Tree, root: Node, layer: Layer) -> Tree:
    """The new tree, in which groups that lost members are named by what is left of them."""
    groups: dict[str, tuple[str, ...]] = {}
    for entry in layer.entries:
        if entry.group:
            groups[entry.group] = (*groups.get(entry.group, ()), entry.path)
    new = Tree(root, groups)
    for name, members in old.groups.items():
        left = tuple(path for path in members if new.get(path) is old[path])
        if left == members:
            groups[name] = members
            continue
        if len(left) > 1:
            groups[left[0]] = left
        for path in left:
            entry = replace(new[path], group=left[0] if len(left) > 1 else "")
            new.root = _with(new.root, path.split("/"), entry)
    return new


def _with(node: Node, parts: list[str], entry: Entry) -> Node:
    """A copy of the folder in which another entry, not of a folder, is at the path."""
    assert node.children is not None
    name, *rest = parts
    child = _with(node.children[name], rest, entry) if rest else Node(entry)
    return Node(node.entry, {**node.children, name: child})


def difference(old: Tree, new: Tree) -> list[Entry]:
    """The entries of a layer that turns `old` into `new`; empty when they are equal.

    They depend on the two trees alone. A folder that keeps nothing of what it held is opaque; else
    each path that is gone is a whiteout. A group of which one member changes is named as a whole.
    """
    found: dict[str, Entry] = {}
    _compare(old.root, new.root, found)
    if old.groups or new.groups:
        _complete_groups(old, new, found)
    for path in list(found):
        while path:
            path = parent_of(path)
            if path in found:
                break
            found[path] = new[path]
    return list(found.values())


def _compare(a: Node | None, b: Node, found: dict[str, Entry]) -> None:
    if a is b:
        return
    if a is None or not _is_alike(a.entry, b.entry):
        found[b.entry.path] = b.entry
    if b.children is None:
        return
    below = (a.children if a is not None else None) or {}
    for name, child in b.children.items():
        before = below.get(name)
        if before is not child:
            _compare(before, child, found)
    gone = below.keys() - b.children.keys()
    path = b.entry.path
    if path and gone and len(gone) == len(below):
        found[path] = replace(b.entry, is_opaque=True)
        return
    for name in gone:
        lost = f"{path}/{name}" if path else name
        found[lost] = Entry(lost, EntryType.WHITEOUT)


def _is_alike(a: Entry, b: Entry) -> bool:
    """Whether they differ in nothing but the group."""
    return a == b or (a.group != b.group and replace(a, group=b.group) == b)


def _complete_groups(old: Tree, new: Tree, found: dict[str, Entry]) -> None:
    """Add whole groups where a merge would not make what `new` has."""
    count = -1
    while len(found) != count:
        count = len(found)
        kept: dict[str, frozenset[str]] = {}
        for members in old.groups.values():
            left = frozenset(path for path in members if path in new and path not in found)
            kept |= dict.fromkeys(left, left)
        now = {path: frozenset(paths) for paths in new.groups.values() for path in paths}
        for path in kept.keys() | now.keys():
            alone = frozenset([path])
            wanted, merged = now.get(path, alone), kept.get(path, alone)
            if wanted != merged or (len(wanted) > 1 and not wanted.isdisjoint(found)):
                found.update({each: found.get(each, new[each]) for each in wanted | merged})


def tree_digest(tree: Tree) -> Digest:
    """Digest of path, type, mode, bytes and link target; no times, owners, names of one file
    under several, attributes or layer order.

    blake3 of the root's row. A row is name, type, mode (octal), digest and link target, a NUL
    behind each; a folder's digest is that of the sorted rows of what it holds.
    """
    return digest_bytes(_row(tree.root))


def _row(node: Node) -> bytes:
    if node.row is None:
        entry, digest = node.entry, node.entry.digest
        if node.children is not None:
            digest = digest_bytes(b"".join(sorted(map(_row, node.children.values()))))
        name, target = os.fsencode(entry.path.rpartition("/")[2]), os.fsencode(entry.target)
        facts = f"{entry.type}\0{entry.mode:o}\0{digest}".encode()
        node.row = b"%s\0%s\0%s\0" % (name, facts, target)
    return node.row
