"""How far drawing and inserting may get ahead of each other, and how old what is drawn may be.

The balance of Reverb (arXiv 2102.04736): with I trajectories inserted and S drawn,
`samples_per_insert * I - S` stays within `error_buffer` of where it stood when drawing began. Who
inserts or draws asks first, and notes what was done; a caller that is refused waits for the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3rl.errors import UserInputError


@dataclass(slots=True)
class LimiterCounts:
    """What was asked and done, for metrics."""

    num_inserted: int = 0
    num_sampled: int = 0
    num_refused_inserts: int = 0
    """Questions that were answered no, not trajectories."""
    num_refused_samples: int = 0
    num_refused_stale: int = 0
    """Spans that were too old to be trained on."""


class Limiter:
    """Answers for one store; knows no clock and waits for nothing."""

    def __init__(
        self,
        samples_per_insert: float,
        min_inserted: int,
        error_buffer: float,
        max_staleness: int,
        counts: LimiterCounts | None = None,
    ) -> None:
        """`counts` carry on from an earlier process.

        `min_inserted` trajectories come before anything is drawn. An `error_buffer` of less than
        two of the larger of a sample and an insert would stop both sides: UserInputError.
        """
        if samples_per_insert <= 0 or min_inserted < 1 or max_staleness < 0:
            raise UserInputError(
                "limiter: samples_per_insert and min_inserted must be positive, max_staleness not "
                f"negative; got {samples_per_insert}, {min_inserted}, {max_staleness}"
            )
        if error_buffer < 2 * max(1.0, samples_per_insert):
            raise UserInputError(
                f"limiter: error_buffer {error_buffer} is below 2 * max(1, samples_per_insert)"
            )
        self.counts = counts or LimiterCounts()
        self._rate, self._min_inserted, self._buffer = (
            samples_per_insert,
            min_inserted,
            error_buffer,
        )
        self._max_staleness = max_staleness

    @property
    def balance(self) -> float:
        """Samples that the inserts so far still allow, above what drawing began with."""
        counts = self.counts
        inserted = counts.num_inserted - self._min_inserted
        return self._rate * inserted - counts.num_sampled

    def may_insert(self, count: int = 1) -> bool:
        """Whether so many more trajectories may be inserted now."""
        is_filling = self.counts.num_inserted + count <= self._min_inserted
        may = is_filling or self.balance + self._rate * count <= self._buffer
        self.counts.num_refused_inserts += not may
        return may

    def may_sample(self, count: int = 1) -> bool:
        """Whether so many more trajectories may be drawn now."""
        is_filled = self.counts.num_inserted >= self._min_inserted
        may = is_filled and self.balance - count >= -self._buffer
        self.counts.num_refused_samples += not may
        return may

    def inserted(self, count: int = 1) -> None:
        """So many were inserted."""
        self.counts.num_inserted += count

    def sampled(self, count: int = 1) -> None:
        """So many were drawn."""
        self.counts.num_sampled += count

    def min_version(self, policy_version: int) -> int:
        """The oldest version that a learner at `policy_version` takes: `SampleRequest` has it."""
        return max(policy_version - self._max_staleness, 0)

    def is_fresh(self, version: int, policy_version: int) -> bool:
        """Whether a span of `version` may be trained on now."""
        is_fresh = version >= self.min_version(policy_version)
        self.counts.num_refused_stale += not is_fresh
        return is_fresh
