"""A workspace that is an ordinary folder, looked through as a whole each time.

Reading and writing it from the host happens only while no command runs in it; links are never
followed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from k3rl.errors import SandboxError
from k3rl.sandboxes.files.held import Held, inline_reader
from k3rl.sandboxes.files.layers import Entry, EntryType, Layer, parent_of, sort_key
from k3rl.sandboxes.files.merged import Tree, merge
from k3rl.sandboxes.files.scan import Found, Survey, scan
from k3rl.sandboxes.files.seals import Change, Sealed, change, shown
from k3rl.sandboxes.files.trees import (
    Identity,
    Placer,
    extract,
    file_copier,
    file_writer,
    read_below,
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


class PlainWorkspace:
    """An ordinary folder, `files`, for backends that mount no overlay."""

    shows_writes = True

    def __init__(
        self, folder: Path, stack: Stack, content: Content, owner: Identity | None = None
    ) -> None:
        """Makes `folder` and writes the stack's tree into it; `owner`: whose the tree is."""
        self._fill(folder, shown(stack.tree), partial(file_writer, content), owner)

    def _fill(
        self,
        folder: Path,
        sealed: Sealed,
        placer: Callable[[Identity | None], Placer],
        owner: Identity | None,
    ) -> None:
        self.folder, self.sealed, self.owner = folder, sealed, owner
        self.places: Sequence[str] = (MOUNT_POINT, str(self.files))
        folder.mkdir(mode=0o700)
        extract(sealed.tree.values(), self.files, placer(owner), owner)
        self._survey = Survey(self.files, folder, owner, is_upper=False)
        self._survey.prime(sealed.tree)

    @property
    def files(self) -> Path:
        """The workspace folder itself."""
        return self.folder / "files"

    @property
    def folders(self) -> list[Path]:
        """The one folder."""
        return [self.files]

    def shown(self) -> Mapping[str, Entry]:
        """The files as they are."""
        return {entry.path: entry for entry in scan(self.files, None, self.owner)}

    def tree(self) -> Tree:
        """The present tree."""
        found = self._survey.look(inline_reader({}))
        return merge(self.sealed.tree, _changes(found))

    def is_untouched(self) -> bool:
        """Never known without looking."""
        return False

    def seal(self, end: Callable[[], None], is_shared: bool = False) -> Sealed:
        """By reading what is new; what is too large for memory is copied."""
        held = Held(FROZEN_BYTES, self.folder)
        found = self._survey.look(held.read)
        if not found.changed and not found.gone:
            return self.sealed
        before, changes = self.sealed, _changes(found)

        def find() -> Change:
            now = merge(before.tree, changes)
            return change(before.tree, now, held.inline, held.blocks)

        self._survey.keep(found)
        self.sealed = Sealed(find, before)
        return self.sealed

    def weigh(
        self, most: Weight | None = None, is_off: Callable[[], bool] = lambda: False
    ) -> Weight:
        """Of the folder."""
        return weigh(self.files, most=most, is_off=is_off)

    def read(self, path: str, max_bytes: int) -> bytes:
        """A regular file."""
        inside = inner_path(path)
        entry = file_of(self.shown(), inside, max_bytes)
        data = read_below(self.files, entry.path, entry.size)
        if data is None:
            raise SandboxError(f"{self.folder}: lost the file {entry.path!r}")
        return data

    def target(self, path: str) -> str:
        """Checked against the files."""
        inside = inner_path(path)
        check_target(self.shown(), inside)
        return inside

    def write(self, path: str, data: bytes, mode: int) -> None:
        """Write a regular file."""
        inside, tree = inner_path(path), self.shown()
        check_target(tree, inside)
        write_below(self.files, inside, data, mode, tree, self.owner)

    def copy(self, folder: Path) -> PlainWorkspace:
        """A full copy, as cheap as the file system can make it."""
        twin = PlainWorkspace.__new__(PlainWorkspace)
        twin._fill(folder, self.sealed, partial(file_copier, [self.files]), self.owner)
        return twin

    def remove(self) -> None:
        """Delete it."""
        remove_tree(self.folder)


def _changes(found: Found) -> Layer:
    """What a look found to be unlike the one before, as a layer on top of that."""
    entries = {entry.path: entry for entry in found.changed}
    for path in found.gone:
        above = found.seen.get(parent_of(path))
        if above is not None and above.entry.type is EntryType.DIR:
            entries[path] = Entry(path, EntryType.WHITEOUT)
    for path in list(entries):
        while path:
            path = parent_of(path)
            entries.setdefault(path, found.seen[path].entry)
    return Layer("", tuple(sorted(entries.values(), key=sort_key)), {})
