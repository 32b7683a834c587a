"""The store against the ledgers: every acknowledgement stored exactly once, and nothing else."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from k3rl.store.ledger import read_ledgers
from k3rl.store.protocol import Ack
from k3rl.store.reader import StoreReader
from k3rl.store.tokens import Tokens, content_hash
from k3rl.types import TrajectoryId


@dataclass(frozen=True, slots=True)
class Range:
    """Tokens [start, end) of a context."""

    id: TrajectoryId
    context: int
    start: int
    end: int


@dataclass(slots=True)
class LedgerReport:
    """Where store and ledgers disagree."""

    num_entries: int = 0
    num_trajectories: int = 0
    num_tokens: int = 0
    """Acknowledged tokens in the store."""
    lost: list[Range] = field(default_factory=list)
    """In a ledger, not in the store."""
    unknown: list[Range] = field(default_factory=list)
    """In the store, in no ledger."""
    duplicated: list[Range] = field(default_factory=list)
    """Acknowledged twice with different bounds or content."""
    mismatched: list[Range] = field(default_factory=list)
    """In both, with different content."""

    @property
    def is_exact(self) -> bool:
        """Whether the ledger tiles the store."""
        return not (self.lost or self.unknown or self.duplicated or self.mismatched)

    def summary(self) -> str:
        """One line."""
        names = ("lost", "duplicated", "mismatched", "unknown")
        counts = ", ".join(f"{len(getattr(self, name))} {name}" for name in names)
        return (
            f"ledger: {counts}; {self.num_entries} acknowledgements, {self.num_tokens} tokens, "
            f"{self.num_trajectories} trajectories"
        )


def compare_ledger(root: Path, ledger_dir: Path, reader: StoreReader | None = None) -> LedgerReport:
    """Compare a store root with the ledgers of all its writers.

    `reader` is one that has the root open already. The entries of a trajectory must tile what it
    stores itself, from the branch point on, tokens of an unfinished step included, and each hash
    must be that of the stored tokens. Imported trajectories are left out: no writer noted them; and
    so are those that the retention policy let go.
    """
    reader = reader or StoreReader(root)
    acks = read_ledgers(ledger_dir)
    report = LedgerReport(num_entries=len(acks))
    entries: dict[tuple[TrajectoryId, int], list[Ack]] = defaultdict(list)
    for ack in acks:
        entries[ack.id, ack.context].append(ack)
    live, let_go = reader.state.live, reader.state.manifest.let_go
    for id in live.ids():
        if live.is_imported(id):
            continue
        report.num_trajectories += 1
        for context in live.ranges(id):
            base, tokens = reader.read_acknowledged(id, context)
            report.num_tokens += len(tokens.token_ids)
            found = entries.pop((id, context), [])
            _compare(report, id, context, base, tokens, found)
    for (id, _), rest in entries.items():
        if id not in let_go:
            report.lost.extend(map(_range, rest))
    return report


def _compare(
    report: LedgerReport,
    id: TrajectoryId,
    context: int,
    base: int,
    tokens: Tokens,
    entries: list[Ack],
) -> None:
    end, at = base + len(tokens.token_ids), base
    # Of two that claim the same tokens, the one that is stored counts first.
    equal = {ack: _is_equal(tokens, base, ack) for ack in entries}
    for ack in sorted(entries, key=lambda ack: (ack.offset, ack.count, not equal[ack])):
        if ack.offset + ack.count > end or ack.offset < base:
            report.lost.append(_range(ack))
            continue
        if ack.offset < at:
            report.duplicated.append(_range(ack))
            continue
        if ack.offset > at:
            report.unknown.append(Range(id, context, at, ack.offset))
        at = ack.offset + ack.count
        if not equal[ack]:
            report.mismatched.append(_range(ack))
    if at < end:
        report.unknown.append(Range(id, context, at, end))


def _is_equal(tokens: Tokens, base: int, ack: Ack) -> bool:
    low = ack.offset - base
    return low >= 0 and content_hash(tokens, low, low + ack.count) == ack.content_hash


def _range(ack: Ack) -> Range:
    return Range(ack.id, ack.context, ack.offset, ack.offset + ack.count)
