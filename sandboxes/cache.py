"""Extracted layers on disk, shared by every backend of a scratch folder and read-only.

An item appears whole by rename, or not at all; two processes that extract the same layer race
harmlessly. A backend marks the items it uses in its own folder, and eviction, which has the cache
to itself (flock), spares what a living owner has marked. Items are the lower folders of overlay
mounts; when a stack grows beyond `max_lowers`, it is linked together into one flat item, because
the mount options of all lowers must fit one page.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from k3rl.errors import SandboxError
from k3rl.sandboxes.layers import Entry, Layer, Tree
from k3rl.sandboxes.scratch import Scratch
from k3rl.sandboxes.trees import extract, file_linker, file_writer, remove_tree
from k3rl.types import Digest, digest_json

NAME_CHARS = 32
MOUNT_OPTION_BYTES = 3200
"""Room for lower folders in the 4,096 bytes of mount(2) options."""
MAX_LOWERS = 16
KEPT_ITEMS = 512
"""Unused items that eviction leaves, newest first."""
EVICT_EVERY = 256


class LayerCache:
    """The items of one scratch folder, as one owner sees them. Safe for threads."""

    def __init__(self, scratch: Scratch, kept_items: int = KEPT_ITEMS) -> None:
        """Uses `scratch.layers`; marks go to `<owner>/uses`."""
        self.folder = scratch.layers
        self.identity = scratch.identity
        self.kept_items = kept_items
        longest = len(os.fsencode(self.folder)) + NAME_CHARS + len("/oldroot/:")
        self.max_lowers = max(2, min(MAX_LOWERS, MOUNT_OPTION_BYTES // longest))
        self._uses = scratch.owner / "uses"
        self._uses.mkdir(exist_ok=True)
        self._root = scratch.root
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._num_released = 0

    def layer(self, layer: Layer, content: Callable[[Entry], bytes]) -> str:
        """Take the item of a layer, extracting it if it is not there; returns its name."""

        def build(target: Path) -> None:
            place = file_writer(content, self.identity)
            extract(layer.entries, target, place, self.identity)

        return self._take(layer.id[:NAME_CHARS], build)

    def adopt(self, layer: Layer, upper: Path) -> str:
        """Take the item of a layer whose files lie in `upper`, which is moved or deleted."""

        def build(target: Path) -> None:
            os.chmod(upper, 0o755)
            os.rename(upper, target)

        name = self._take(layer.id[:NAME_CHARS], build)
        remove_tree(upper)
        return name

    def flat(self, ids: Iterable[Digest], tree: Tree, lowers: list[Path]) -> str:
        """Take the one item that shows the same as `lowers` together: `tree`, by hard links."""

        def build(target: Path) -> None:
            extract(tree.values(), target, file_linker(lowers), self.identity)

        return self._take(digest_json(["flat", *ids])[:NAME_CHARS], build)

    def path(self, name: str) -> Path:
        """Where an item lies."""
        return self.folder / name

    def share(self, names: Iterable[str]) -> None:
        """Take items once more that are already taken."""
        with self._lock:
            self._counts.update(names)

    def release(self, names: Iterable[str]) -> None:
        """Give items back; now and then evicts what nobody uses."""
        with self._lock:
            for name in names:
                self._counts[name] -= 1
                self._num_released += 1
                if not self._counts[name]:
                    del self._counts[name]
                    (self._uses / name).unlink(missing_ok=True)
            is_due = self._num_released >= EVICT_EVERY
        if is_due:
            self.evict()

    def evict(self) -> int:
        """Remove unused items beyond `kept_items`; returns how many. A busy cache is left alone."""
        with self._exclusive() as is_mine:
            if not is_mine:
                return 0
            self._num_released = 0
            used = {mark.name for mark in self._root.glob("owner-*/uses/*")}
            items = list(self.folder.iterdir())
            for item in items:
                if item.name.startswith(".new-"):
                    # Whoever builds holds the lock, so this was left by a killed process.
                    remove_tree(item)
            unused = [i for i in items if len(i.name) == NAME_CHARS and i.name not in used]
            unused.sort(key=lambda item: item.stat().st_ctime_ns, reverse=True)
            for item in unused[self.kept_items :]:
                trash = Path(tempfile.mkdtemp(prefix=".new-", dir=self.folder))
                os.rename(item, trash / "item")
                remove_tree(trash)
            return len(unused[self.kept_items :])

    def _take(self, name: str, build: Callable[[Path], None]) -> str:
        with self._lock:
            self._counts[name] += 1
            is_first = self._counts[name] == 1
            if is_first:
                (self._uses / name).touch()
        try:
            with self._shared():
                if not self.path(name).exists():
                    self._build(name, build)
        except OSError as error:
            self.release([name])
            raise SandboxError(f"{self.path(name)}: cannot extract a layer: {error}") from error
        except BaseException:
            self.release([name])
            raise
        return name

    def _build(self, name: str, build: Callable[[Path], None]) -> None:
        temp = Path(tempfile.mkdtemp(prefix=".new-", dir=self.folder))
        try:
            build(temp / "item")
            # The upper folder of a mount decides what its root looks like; ours must let us in.
            os.chmod(temp / "item", 0o755)
            try:
                os.rename(temp / "item", self.path(name))
            except OSError:
                if not self.path(name).exists():
                    raise
        finally:
            remove_tree(temp)

    @contextmanager
    def _shared(self) -> Iterator[None]:
        with self._held(fcntl.LOCK_SH):
            yield

    @contextmanager
    def _exclusive(self) -> Iterator[bool]:
        try:
            with self._held(fcntl.LOCK_EX | fcntl.LOCK_NB):
                yield True
        except BlockingIOError:
            yield False

    @contextmanager
    def _held(self, operation: int) -> Iterator[None]:
        handle = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, operation)
            yield
        finally:
            os.close(handle)
