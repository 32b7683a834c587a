"""A store root seen from outside: no service, no Redis, nothing is written.

It may be used while a service runs on the root: it then shows a recent state, and looks again when
files move under its hands. The newest frames it shows may be about to be acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from k3rl.errors import CorruptData, StoreError
from k3rl.store.events import VersionRow
from k3rl.store.protocol import Ref, TokenRead, UpdateRow
from k3rl.store.recovery import recover
from k3rl.store.state import StoreState
from k3rl.store.tokens import FIELDS, TokenFiles, Tokens, check_fields
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
        self._files = TokenFiles(self.root, lambda path: self._state.manifest.files[path])

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
        live = self._state.live
        return [live.trajectory(r.id) for r in live.records.values() if state in (None, r.state)]

    def get(self, prefix: str) -> Trajectory:
        """By id or unambiguous prefix. Raises StoreError when unknown."""
        live = self._state.live
        return live.trajectory(live.find(prefix).id)

    def snapshot(self, snapshot_id: str) -> Snapshot:
        """A committed snapshot's record. Raises StoreError when unknown."""
        snapshots = self._state.live.snapshots
        if snapshot_id not in snapshots:
            raise StoreError(f"{self.root}: snapshot {snapshot_id} is unknown")
        return snapshots[snapshot_id]

    def read(self, ref: Ref, fields: tuple[str, ...] = ()) -> TokenRead:
        """Committed tokens; the ref that comes back has its end filled in."""
        names = check_fields(fields)
        end = self._state.live.end(ref.id, ref.context) if ref.end is None else ref.end
        tokens = self._load(ref.id, ref.context, ref.start, end, names, acked=False)
        return TokenRead(replace(ref, end=end), *tokens)

    def num_acknowledged_tokens(self, id: TrajectoryId) -> int:
        """Tokens that are durable: the committed ones and those of an unfinished step."""
        record = self._state.live.record(id)
        unfinished = sum(c.acked - c.committed for c in record.contexts.values())
        return record.num_tokens + unfinished

    def read_acknowledged(self, id: TrajectoryId, context: int) -> tuple[int, Tokens]:
        """(first offset, all durable tokens) that a trajectory itself stores of a context."""
        own = self._state.live.record(id).contexts[context]
        return own.base, self._load(id, context, own.base, own.acked, FIELDS, acked=True)

    def updates(self) -> list[UpdateRow]:
        """The `updates` table, in the order in which it was written."""
        return list(self._state.updates)

    def versions(self) -> list[VersionRow]:
        """The `versions` table, in the order in which it was written."""
        return list(self._state.versions)

    def _load(
        self,
        id: TrajectoryId,
        context: int,
        start: int,
        end: int,
        fields: tuple[str, ...],
        acked: bool,
    ) -> Tokens:
        for _ in range(ATTEMPTS):
            pieces = self._state.live.pieces(id, context, start, end, acked)
            try:
                return self._files.load(pieces, fields)
            except FileNotFoundError as error:
                missing = str(error.filename)
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
