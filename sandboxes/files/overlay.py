"""A workspace as overlayfs: extracted layers below, and one private upper folder that collects."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from k3rl.errors import SandboxError
from k3rl.sandboxes.files.cache import LayerCache
from k3rl.sandboxes.files.held import Held, TooMuch, inline_reader
from k3rl.sandboxes.files.layers import ROOT, Entry, Layer
from k3rl.sandboxes.files.merged import EMPTY_TREE, Tree, difference, merge
from k3rl.sandboxes.files.scan import Survey, reach, root_of, scan
from k3rl.sandboxes.files.seals import Change, Sealed, change, shown
from k3rl.sandboxes.files.trees import (
    extract,
    file_below,
    file_copier,
    file_writer,
    read_below,
    read_blocks,
    remove_tree,
)
from k3rl.sandboxes.files.weights import Weight, weigh
from k3rl.sandboxes.files.workspace import (
    FROZEN_BYTES,
    MOUNT_POINT,
    Content,
    Stack,
    check_target,
    file_of,
    inner_path,
    write_below,
)
from k3rl.types import Digest

BULKY_ENTRIES = 128
"""Beyond these an upper folder costs more to look through than a new mount does."""


class OverlayWorkspace:
    """Lower folders, bottom first, in `lowers`; `upper` and `work` for one mount at a time.

    A small change is sealed by reading it, so that a mounted workspace goes on as it is. The folder
    of a bulky one is renamed, looked through later, and is the topmost lower one from now on.
    """

    shows_writes = False
    places: Sequence[str] = (MOUNT_POINT,)

    def __init__(self, cache: LayerCache, folder: Path, stack: Stack, content: Content) -> None:
        """Makes `folder` and takes the stack's items from the cache, extracting what is missing."""
        self._lay_out(cache, folder, shown(stack.tree), stack.tree[""])
        try:
            self._stack_up(stack, content)
            self._renew()
        except BaseException:
            self.remove()
            raise

    def _lay_out(self, cache: LayerCache, folder: Path, floor: Sealed, root: Entry) -> None:
        self.cache, self.folder, self.owner = cache, folder, cache.identity
        self.sealed = self._floor = floor
        """`_floor` is what the lower folders show."""
        self._root = root
        """The attributes of a fresh upper folder."""
        self._names: list[str] = []
        self._bottom = EMPTY_TREE
        """What the first of them shows, if that one is never merged with others."""
        folder.mkdir(mode=0o755)
        self._empty = folder / "empty"
        self._empty.mkdir()
        self._survey = Survey(self.upper, folder, cache.identity, is_upper=True)

    @property
    def upper(self) -> Path:
        """The only folder that code in the sandbox changes."""
        return self.folder / "upper"

    @property
    def work(self) -> Path:
        """What overlayfs needs beside it."""
        return self.folder / "work"

    @property
    def lowers(self) -> list[Path]:
        """Read-only folders of the mount, bottom first, at least one."""
        return [self._empty, *(self.cache.path(name) for name in self._names)]

    @property
    def folders(self) -> list[Path]:
        """The upper folder, then the lower ones."""
        return [self.upper, *reversed(self.lowers)]

    def shown(self) -> Tree:
        """The lower folders' tree under what the upper one holds."""
        return _over(self._floor.tree, self._upper_entries())

    def tree(self) -> Tree:
        """The present merged tree."""
        found = self._survey.look(inline_reader({}))
        is_sealed = not found.changed and not found.gone
        return self.sealed.tree if is_sealed else _over(self._floor.tree, found.entries)

    def is_untouched(self) -> bool:
        """Whether the upper folder is as it was made, right over what is sealed."""
        with suppress(OSError):
            is_fresh = self._floor is self.sealed and not os.listdir(self.upper)
            return is_fresh and root_of(self.upper, self.cache.identity) == self._root
        return False

    def seal(self, end: Callable[[], None], is_shared: bool = False) -> Sealed:
        """By reading, or by renaming the upper folder."""
        if is_shared:
            return self.sealed if self.is_untouched() else self._rename(end)
        held = Held(FROZEN_BYTES)
        try:
            found = self._survey.look(held.read, BULKY_ENTRIES)
        except TooMuch:
            return self._rename(end)
        if not found.changed and not found.gone:
            return self.sealed
        floor, before = self._floor, self.sealed

        def find() -> Change:
            now = _over(floor.tree, found.entries)
            return change(before.tree, now, held.inline, held.blocks)

        self._survey.keep(found)
        self.sealed = Sealed(find, before)
        return self.sealed

    def _rename(self, end: Callable[[], None]) -> Sealed:
        """Make the upper folder the topmost lower one, whatever it holds."""
        is_open = reach(self.upper)
        root = root_of(self.upper, self.cache.identity)
        end()
        name = self.cache.freeze(self.upper)
        self._names.append(name)
        self.cache.share([name])
        let_go = partial(self.cache.release, [name])
        find = partial(_look_into, self.cache, name, root, self._floor, self.sealed)
        self.sealed = self._floor = Sealed(find, self.sealed, let_go)
        self._root = root
        self._renew()
        self._limit_lowers()
        if not is_open:
            # A look lends permissions, which a mount over it must not see.
            self.sealed.tree  # noqa: B018
        return self.sealed

    def weigh(
        self, most: Weight | None = None, is_off: Callable[[], bool] = lambda: False
    ) -> Weight:
        """Of the merged view."""
        return weigh(self.upper, self._floor.tree, most, is_off)

    def read(self, path: str, max_bytes: int) -> bytes:
        """A regular file of the merged view."""
        inside = inner_path(path)
        upper = self._upper_entries()
        entry = file_of(_over(self._floor.tree, upper), inside, max_bytes)
        is_upper = any(e.path == inside for e in upper)
        for folder in [self.upper] if is_upper else reversed(self.lowers):
            data = read_below(folder, inside, entry.size)
            if data is not None:
                return data
        raise SandboxError(f"{self.folder}: lost the file {inside!r}")

    def target(self, path: str) -> str:
        """Checked against the merged view."""
        inside = inner_path(path)
        check_target(self.shown(), inside)
        return inside

    def write(self, path: str, data: bytes, mode: int) -> None:
        """Write into the upper folder."""
        inside = inner_path(path)
        tree = self.shown()
        check_target(tree, inside)
        write_below(self.upper, inside, data, mode, tree, self.owner)

    def copy(self, folder: Path) -> OverlayWorkspace:
        """Shares the lower folders; only small empty folders are made."""
        assert self._floor is self.sealed
        twin = OverlayWorkspace.__new__(OverlayWorkspace)
        twin._lay_out(self.cache, folder, self.sealed, self._root)
        self.cache.share(self._names)
        twin._names, twin._bottom = list(self._names), self._bottom
        twin._renew()
        return twin

    def remove(self) -> None:
        """Delete the private folders and give the items back."""
        remove_tree(self.folder)
        self.cache.release(self._names)
        self._names = []

    def _upper_entries(self) -> list[Entry]:
        return scan(self.upper, None, self.cache.identity, is_upper=True)

    def _stack_up(self, stack: Stack, content: Content) -> None:
        """Take an item for the bottom layer, which others share, and one for all the rest."""
        for layer in stack.layers[:1]:
            self._names.append(self.cache.layer(layer, content))
            self._bottom = merge(EMPTY_TREE, layer)
        if len(stack.layers) > 1:
            key = [layer.id for layer in stack.layers]
            place = file_writer(content, self.cache.identity)
            entries = difference(self._bottom, stack.tree)
            self._names.append(self.cache.merged(key, entries, place))

    def _limit_lowers(self) -> None:
        """Merge the lower folders that are too many, but for the first, which may be large."""
        if len(self._names) > self.cache.max_lowers:
            first = self._names[:1] if self._bottom is not EMPTY_TREE else []
            place = file_copier(self.lowers, self.cache.identity)
            entries = difference(self._bottom, self._floor.tree)
            name = self.cache.merged(self._names, entries, place)
            self.cache.release(self._names[len(first) :])
            self._names = [*first, name]

    def _renew(self) -> None:
        """Fresh upper and work folders; the upper's root carries the merged root's attributes."""
        for path, root in ((self.upper, self._root), (self.work, ROOT)):
            remove_tree(path)
            extract([root], path, file_writer(_no_content, None), self.cache.identity)
        self._survey.known = {}


def _look_into(cache: LayerCache, name: str, root: Entry, floor: Sealed, before: Sealed) -> Change:
    """What a frozen upper folder over `floor`, with the attributes `root`, changed."""
    inline: dict[Digest, bytes] = {}
    folder = cache.path(name)
    entries = scan(folder, inline_reader(inline), cache.identity, is_upper=True)
    now = _over(floor.tree, [root, *entries[1:]])
    return change(before.tree, now, inline, partial(_large, folder))


def _over(tree: Tree, upper: list[Entry]) -> Tree:
    return merge(tree, Layer("", tuple(upper), {}))


def _large(folder: Path, entry: Entry) -> Iterator[bytes]:
    with file_below(folder, entry.path, entry.size) as handle:
        if handle is None:
            raise SandboxError(f"{folder}: lost the large file {entry.path!r}")
        yield from read_blocks(handle, 0)


def _no_content(entry: Entry) -> Iterator[bytes]:
    raise SandboxError(f"{entry.path!r}: there is no content to extract")
