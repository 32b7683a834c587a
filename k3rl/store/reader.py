"""A store root seen from outside: no service, no Redis, nothing is written.

It may be used while a service runs on the root: it then shows a recent state, and looks again when
files move under its hands. The newest frames it shows may be about to be acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from k3rl.errors import CorruptData, StoreError
from k3rl.store.events import VersionRow
from k3rl.store.manifest import record_path
from k3rl.store.protocol import Ref, TokenRead, UpdateRow
from k3rl.store.recovery import recover
from k3rl.store.state import StoreState
from k3rl.store.tokens import TokenFiles, Tokens, check_fields
from k3rl.types import JsonObject, Snapshot, Trajectory, TrajectoryId, TrajectoryState

ATTEMPTS = 5
T = TypeVar("T")


class StoreReader:
    """Committed trajectories, tokens and tables of a root; `refresh` looks for newer ones."""

    def __init__(self, root: Path) -> None:
        """Raises StoreError when there is no store, CorruptData, SchemaTooNew."""
        self.root = Path(root)
        self.refresh()

    def refresh(self) -> None:
        """Read the state as it is now."""
        self._state = _until_still(lambda: recover(self.root, False), self.root)
        self._files = TokenFiles(self.root, self._state.live.sealed.files)

    @property
    def state(self) -> StoreState:
        """All of it, for checks; not to be changed."""
        return self._state

    @property
    def recovery(self) -> JsonObject:
        """What reading found: frames, bytes of a torn tail."""
        return dict(self._state.recovery)

    def trajectories(self, state: TrajectoryState | None = None) -> list[Trajectory]:
        """In the order they were begun."""
        return self._still(lambda: self._state.live.listing(state)())

    def get(self, prefix: str) -> Trajectory:
        """By id or unambiguous prefix. Raises StoreError when unknown."""
        return self._still(lambda: self._state.live.trajectory(self._state.live.find(prefix)))

    def snapshot(self, snapshot_id: str) -> Snapshot:
        """A committed snapshot's record. Raises StoreError when unknown."""
        found = self._still(lambda: self._state.live.snapshot(snapshot_id))
        if found is None:
            raise StoreError(f"{self.root}: snapshot {snapshot_id} is unknown")
        return found

    def read(self, ref: Ref, fields: tuple[str, ...] = ()) -> TokenRead:
        """Committed tokens; the ref that comes back has its end filled in."""
        return self.read_many([ref], fields)[0]

    def read_many(self, refs: Sequence[Ref], fields: tuple[str, ...] = ()) -> list[TokenRead]:
        """What `read` gives for each; each row group of a file is decoded once."""
        names = check_fields(fields)

        def load() -> list[TokenRead]:
            whole = [self._state.live.whole(ref) for ref in refs]
            tokens = self._files.load_many(list(map(self._state.live.ref_pieces, whole)), names)
            return [TokenRead(ref, *found) for ref, found in zip(whole, tokens, strict=True)]

        return self._still(load)

    def num_acknowledged_tokens(self, id: TrajectoryId) -> int:
        """Tokens that are durable: the committed ones and those of an unfinished step."""
        live = self._state.live
        unfinished = sum(own.acked - own.committed for own in live.ranges(id).values())
        return live.numbers(id).num_tokens + unfinished

    def read_acknowledged(self, id: TrajectoryId, context: int) -> tuple[int, Tokens]:
        """(first offset, all durable tokens) that a trajectory itself stores of a context."""

        def load() -> tuple[int, Tokens]:
            live = self._state.live
            base, _, acked = live.ranges(id)[context]
            return base, self._files.load(live.pieces(id, context, base, acked, acked=True))

        return self._still(load)

    def updates(self) -> list[UpdateRow]:
        """The `updates` table, in the order in which it was written."""
        return list(self._state.updates)

    def versions(self) -> list[VersionRow]:
        """The `versions` table, in the order in which it was written."""
        return list(self._state.versions)

    def _still(self, load: Callable[[], T]) -> T:
        """Look again as long as files go away and the store has changed."""
        for _ in range(ATTEMPTS):
            try:
                return load()
            except FileNotFoundError as error:
                missing = str(error.filename)
                self.refresh()
            except CorruptData as error:
                if _head(self.root) == record_path(self.root, self._state.manifest.head.seq).name:
                    raise
                missing = error.file
                self.refresh()
        raise CorruptData(missing, 0, "file", "holds tokens but is missing")


def _until_still(load: Callable[[], T], root: Path) -> T:
    """Load again when a running service sealed, and so deleted journal files, meanwhile."""
    for attempt in range(ATTEMPTS):
        head = _head(root)
        try:
            return load()
        except (FileNotFoundError, CorruptData):
            if _head(root) == head or attempt == ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


def _head(root: Path) -> str:
    return max((path.name for path in (root / "_log").glob("[0-9]*.json")), default="")
