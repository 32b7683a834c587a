"""Extracted layers on disk, shared by every backend of a scratch folder and read-only.

An item appears whole by rename, or not at all; two processes that extract the same layer race
harmlessly. A backend marks the items it uses in its own folder, and eviction, which has the cache
to itself (flock), spares what a living owner has marked. Items are the lower folders of overlay
mounts; what a stack has beyond `max_lowers` is merged into one item, because the mount options of
all lowers must fit one page. Items share no files by hard links: code sees the number of links. A
frozen upper folder becomes an item too, before anybody knows what it holds: that one has a name of
its own and goes with its last user.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from k3rl.errors import SandboxError
from k3rl.sandboxes.files.layers import Entry, Layer
from k3rl.sandboxes.files.trees import (
    Placer,
    extract,
    file_writer,
    remove_tree,
)
from k3rl.sandboxes.scratch import Scratch
from k3rl.types import digest_json

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
        self._private: set[str] = set()
        """Names of frozen upper folders."""
        self._lock = threading.Lock()
        self._num_released = 0

    def layer(self, layer: Layer, content: Callable[[Entry], Iterable[bytes]]) -> str:
        """Take the item of a layer, extracting it if it is not there; returns its name."""
        place = file_writer(content, self.identity)
        return self._take_entries(layer.id[:NAME_CHARS], layer.entries, place)

    def freeze(self, upper: Path) -> str:
        """Take a new item: `upper`, which is moved, as it is but for its root's mode."""
        name = secrets.token_hex(NAME_CHARS // 2)
        with self._lock:
            self._private.add(name)
        return self._take(name, lambda target: os.rename(upper, target))

    def merged(self, key: Sequence[str], entries: Iterable[Entry], place: Placer) -> str:
        """Take the one item that has these entries, of all the items and layers in `key`."""
        return self._take_entries(digest_json(["merged", *key])[:NAME_CHARS], entries, place)

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
            useless = [name for name in names if self._drop(name)]
            is_due = self._num_released >= EVICT_EVERY
        for name in useless:
            with self._shared():
                remove_tree(self.path(name))
        if is_due:
            self.evict()

    def _drop(self, name: str) -> bool:
        """Whether nobody will ever want the item again."""
        self._counts[name] -= 1
        self._num_released += 1
        if self._counts[name]:
            return False
        del self._counts[name]
        (self._uses / name).unlink(missing_ok=True)
        if name not in self._private:
            return False
        self._private.discard(name)
        return True

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

    def _take_entries(self, name: str, entries: Iterable[Entry], place: Placer) -> str:
        def build(target: Path) -> None:
            extract(entries, target, place, self.identity)

        return self._take(name, build)

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
