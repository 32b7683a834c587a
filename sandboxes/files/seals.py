"""States of workspaces that later commands cannot change, on their way to the blob store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from k3rl.blobs import BlobStore
from k3rl.sandboxes.files.layers import Entry, Layer, persist
from k3rl.sandboxes.files.merged import Tree, difference, merge
from k3rl.types import Digest


@dataclass(frozen=True, slots=True)
class Change:
    """What a workspace holds, and the layer that it has on top of what it held before."""

    tree: Tree
    layer: Layer | None = None
    """None when nothing changed."""
    content: Callable[[Entry], Iterable[bytes]] | None = None
    """Reads the layer's large files in blocks."""


def change(
    old: Tree,
    new: Tree,
    inline: Mapping[Digest, bytes],
    content: Callable[[Entry], Iterable[bytes]],
) -> Change:
    """What turns `old` into `new`. The workspace folder's own time stamp alone is no change."""
    entries = difference(old, new)
    if only_touched(entries, old):
        return Change(old)
    layer = Layer.of(entries, inline)
    return Change(merge(old, layer), layer, content)


def only_touched(entries: list[Entry], tree: Tree) -> bool:
    """Whether nothing differs but the workspace folder's own time stamp."""
    known = _timeless(tree[""])
    return all(not entry.path and _timeless(entry) == known for entry in entries)


def _timeless(entry: Entry) -> tuple[object, ...]:
    return entry.mode, entry.uid, entry.gid, entry.xattrs


class Sealed:
    """One frozen state of a workspace. Safe for threads.

    Freezing it was the work of a moment; to find out what it holds may take longer, and is done
    when first asked for, by whoever asks. Then what it was frozen in is let go of.
    """

    def __init__(
        self,
        find: Callable[[], Change],
        before: Sealed | None = None,
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        """`find` looks through what is frozen until it succeeds; `let_go` is called when durable.

        `before` is the state that the layer lies on, None for no layers at all. Whoever needs it no
        longer cuts it off.
        """
        self.before = before
        self._find: Callable[[], Change] | None = find
        self._let_go = let_go
        self._change: Change | None = None
        self._layer_id: Digest | None = None
        self._is_durable = False
        self._lock = threading.Lock()

    @property
    def tree(self) -> Tree:
        """What it holds. Raises what `find` raises."""
        return self._found().tree

    @property
    def layer_id(self) -> Digest | None:
        """Of the layer on top of the state before; None when nothing changed."""
        self._found()
        return self._layer_id

    def persist(self, blobs: BlobStore) -> int:
        """Make the layer durable, if it is not; returns the bytes put. Raises StoreError."""
        found = self._found()
        with self._lock:
            if self._is_durable:
                return 0
            num_bytes = 0
            if found.layer is not None:
                assert found.content is not None
                num_bytes = persist(blobs, found.layer, found.content)
            self._change, self._is_durable = Change(found.tree), True
            self._let_go()
            return num_bytes

    def _found(self) -> Change:
        # Without the lock once it is known: who asks need not wait for the blob store.
        if (found := self._change) is not None:
            return found
        with self._lock:
            if self._change is None:
                assert self._find is not None
                found = self._find()
                self._layer_id = found.layer.id if found.layer else None
                self._change, self._find = found, None
            return self._change


def shown(tree: Tree) -> Sealed:
    """The state that shows a tree, with no layer of its own."""
    return Sealed(lambda: Change(tree))
