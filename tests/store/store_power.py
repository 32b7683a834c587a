"""What a power loss may leave of a folder: everything that was not synced may be gone, or torn.

`Recorder` stands between the process and the disk: before every call that changes files or syncs
them it notes a `Crash`. A file's content is durable as of its last fsync or fdatasync, a name as of
the last fsync of its folder. `image` writes what could be found after the crash: each change of a
name that was not synced is there or not, each 512-byte sector that was not synced is the new one or
the old one (zeros where there was none), and the file is as long as before, as now or in between.
"""

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

SECTOR = 512
CHANGES = ("write", "link", "replace", "rename", "unlink", "mkdir", "ftruncate")
SYNCS = ("fsync", "fdatasync")


@dataclass(frozen=True)
class Change:
    """Names that came and went at once: a new file, a removal, or (both) a rename."""

    adds: tuple[tuple[str, str, int], ...] = ()
    removes: tuple[tuple[str, str], ...] = ()

    @property
    def folders(self):
        return {folder for folder, *_ in (*self.adds, *self.removes)}


@dataclass(frozen=True)
class Crash:
    """The moment before a call. `noted` is what the caller of `Recorder` had noted by then."""

    call: str
    noted: int
    names: dict[tuple[str, str], int]
    """Durable names: (folder, name) to inode."""
    pending: tuple[Change, ...]
    contents: dict[int, tuple[bytes, bytes]]
    """Of a file: (durable, as it is)."""


@dataclass
class _File:
    handle: int
    durable: bytes = b""
    now: bytes = b""
    seen: tuple[int, int] = (-1, -1)


@dataclass
class Recorder:
    """Notes crashes of what happens below `root`, a folder that exists and is durable."""

    root: Path
    noted: list = field(default_factory=list)
    """What the caller relies on; only its length is looked at."""
    crashes: list[Crash] = field(default_factory=list)

    def __post_init__(self):
        self._real = {name: getattr(os, name) for name in (*CHANGES, *SYNCS)}
        self._guard = threading.RLock()
        self._files: dict[int, _File] = {}
        self._folders: dict[int, str] = {}
        self._live: dict[tuple[str, str], int] = {}
        self._durable: dict[tuple[str, str], int] = {}
        self._pending: list[Change] = []
        self._look()
        # What is there at the beginning is durable.
        self._durable, self._pending = dict(self._live), []
        for file in self._files.values():
            file.durable = file.now

    def install(self, patch):
        """From here on, until `patch` is undone."""
        for name in CHANGES:
            patch.setattr(os, name, self._hook(name, self._before))
        for name in SYNCS:
            patch.setattr(os, name, self._hook(name, self._before, self._synced))

    def close(self):
        """A last crash: of what is there at the end."""
        self._before("end", -1)
        for file in self._files.values():
            os.close(file.handle)

    def _hook(self, name, before, after=None):
        real = self._real[name]

        def hooked(first, *arguments, **options):
            with self._guard:
                before(name, first)
                answer = real(first, *arguments, **options)
                if after is not None:
                    after(first)
                return answer

        return hooked

    def _before(self, name, first):
        noted = len(self.noted)
        self._look()
        contents = {n: (f.durable, f.now) for n, f in self._files.items()}
        call = f"{name} {_path(first)}"
        crash = Crash(call, noted, dict(self._durable), tuple(self._pending), contents)
        self.crashes.append(crash)

    def _synced(self, handle):
        self._look()
        found = os.fstat(handle).st_ino
        if found in self._files:
            self._files[found].durable = self._files[found].now
        elif found in self._folders:
            folder = self._folders[found]
            done = [change for change in self._pending if folder in change.folders]
            self._pending = [change for change in self._pending if change not in done]
            for change in done:
                _apply(self._durable, change)

    def _look(self):
        """What has changed since the last look."""
        live = dict(self._walk(self.root, ""))
        gone = {at: n for at, n in self._live.items() if live.get(at) != n}
        came = {at: n for at, n in live.items() if self._live.get(at) != n}
        for inode in dict.fromkeys([*gone.values(), *came.values()]):
            adds = tuple((*at, inode) for at, n in came.items() if n == inode)
            removes = tuple(at for at, n in gone.items() if n == inode and at not in came)
            if adds or removes:
                self._pending.append(Change(adds, removes))
        self._live = live
        for file in self._files.values():
            state = os.fstat(file.handle)
            if (state.st_size, state.st_mtime_ns) != file.seen:
                file.now = os.pread(file.handle, state.st_size, 0)
                file.seen = (state.st_size, state.st_mtime_ns)

    def _walk(self, folder, name):
        """((folder, name), inode) of all below; files are held open, so that no inode recurs."""
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            inode, below = entry.inode(), f"{name}/{entry.name}"
            yield (name, entry.name), inode
            if entry.is_dir(follow_symlinks=False):
                self._folders[inode] = below
                yield from self._walk(entry.path, below)
            elif inode not in self._files:
                self._files[inode] = _File(os.open(entry.path, os.O_RDONLY))
        if not name:
            self._folders[os.stat(folder).st_ino] = ""


def _apply(names, change):
    for at in change.removes:
        names.pop(at, None)
    for folder, name, inode in change.adds:
        names[folder, name] = inode


def _path(first):
    try:
        return os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
    except OSError:
        return "-"


def image(crash, target, names="none", data="old", rng=None):
    """Write the folder as a crash may leave it into `target`, which does not exist yet.

    names: of what was not synced `none`, `all`, or what `rng` says; data: `old`, `new`, or `torn`.
    """
    found = dict(crash.names)
    for change in crash.pending:
        if names == "all" or (names == "some" and rng.random() < 0.5):
            _apply(found, change)
    target.mkdir()
    folders = {""}
    # A folder's own name sorts before what lies in it.
    for folder, name in sorted(found):
        path, inode = f"{folder}/{name}", found[folder, name]
        if folder not in folders:
            continue
        if inode in crash.contents:
            old, new = crash.contents[inode]
            content = {"old": old, "new": new}.get(data)
            whole = torn(old, new, rng) if content is None else content
            (target / path[1:]).write_bytes(whole)
        else:
            folders.add(path)
            (target / path[1:]).mkdir()


def torn(old, new, rng):
    """Content of a file of which some sectors were written and some were not."""
    size = rng.choice([len(old), len(new), rng.randint(*sorted((len(old), len(new))))])
    if old == new:
        return new
    parts = []
    for at in range(0, size, SECTOR):
        source = new if rng.random() < 0.5 else old
        end = min(at + SECTOR, size)
        parts.append(source[at:end].ljust(end - at, b"\0"))
    return b"".join(parts)
