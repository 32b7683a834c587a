"""Whether the learner reproduces the log-probs that the engine sampled with.

Compared are the tokens of fresh spans: sampled by the learner's present version from a state that
only this version computed. Their policy ratio should be 1 up to rounding; more means that engine
and learner are not the same policy, and no objective corrects for that.

Rounding alone can do one thing that is not small: where the k-th and the (k+1)-th expert score are
equal up to it, engine and learner may choose differently, and all that follows differs a little. A
sequence beyond the limit is therefore computed again with the other choice at such near-ties, and
passes when it then agrees; how many choices had to be turned is counted.

Axes: T tokens of a sequence, L routed layers, N copies of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from k3rl import metrics
from k3rl.errors import EngineError
from k3rl.learner.packing import MicroBatch
from k3rl.model.model import K3Model
from k3rl.model.routing import Routing
from k3rl.types import BoolArray, Float32Array, Int32Array, TrajectoryId

TIE_MARGIN = 1e-5
"""Difference of expert scores (in 0 .. 1) that rounding may turn: float32 with room to spare."""
MAX_TURNED = 4
"""Choices turned in one sequence, at most."""
MAX_TRIED = 16
"""Near-ties tried for each of them, closest first."""
Site = tuple[int, int]
"""Token of a sequence and routed layer."""
Floats = NDArray[np.float64]


@dataclass(eq=False)
class TurnedRouting(Routing):
    """Routes by the scores, but takes expert k + 1 for expert k at some sites."""

    turned: dict[int, list[int]] = field(default_factory=dict)
    """Rows of the batch by routed layer."""

    def turn(self, best: Tensor, layer: int) -> Tensor:
        """The experts [T, k] among the k + 1 best [T, k + 1]."""
        chosen = super().turn(best, layer).clone()
        if rows := self.turned.get(layer):
            chosen[rows, -1] = best[rows, -1]
        return chosen


@dataclass(frozen=True, slots=True, eq=False)
class _Suspect:
    """A sequence with a token beyond the limit."""

    id: TrajectoryId
    token_ids: Int32Array
    is_fresh: BoolArray
    rollout: Float32Array
    policy: Float32Array


class Agreement:
    """The check of one update: `add` every micro-batch, then `check` before gradients are used."""

    def __init__(
        self,
        model: K3Model,
        members: Sequence[TrajectoryId],
        *,
        most: float,
        mean_k3: float,
    ) -> None:
        """`most` bounds every |difference|, `mean_k3` the mean k3 estimator.

        `members` names the trajectories that `trajectory_index` counts.
        """
        self._model, self._members = model, members
        self._most, self._mean_k3 = most, mean_k3
        self._suspects: list[_Suspect] = []
        self._count, self._max, self._k3, self._num_turned = 0, 0.0, 0.0, 0

    def add(self, micro: MicroBatch, policy_logprobs: Float32Array) -> None:
        """Compare a batch whose log-probs [T] under the learner are given; NaN is not compared."""
        batch = micro.batch
        is_fresh = micro.is_fresh & (batch.token_weight > 0)
        ends = batch.cu_seqlens
        for start, end in pairwise(ends.tolist()):
            fresh = is_fresh[start:end]
            rollout = batch.rollout_logprobs[start:end]
            policy = policy_logprobs[start:end]
            difference = _difference(policy, rollout, fresh)
            if self._first_bad(difference, fresh) is None:
                self._count_in(difference)
                continue
            id = self._members[batch.trajectory_index[start]]
            self._suspects.append(_Suspect(id, batch.token_ids[start:end], fresh, rollout, policy))

    def check(self) -> dict[str, float]:
        """The figures of the check.

        Raises EngineError naming the trajectory, the token and both log-probs of the first
        difference that near-ties do not explain, or a mean k3 beyond the limit.
        """
        for suspect in self._suspects:
            self._count_in(self._settle(suspect))
        self._suspects = []
        mean = self._k3 / max(self._count, 1)
        if not mean <= self._mean_k3:
            raise EngineError(
                f"agreement: mean k3 {mean:.3g} over {self._count} fresh tokens exceeds"
                f" {self._mean_k3:g}: engine and learner are not the same policy"
            )
        return {
            metrics.AGREEMENT_MAX: self._max,
            metrics.AGREEMENT_K3: mean,
            metrics.AGREEMENT_TOKENS: float(self._count),
            metrics.AGREEMENT_PINNED: float(self._num_turned),
        }

    def _count_in(self, difference: Floats) -> None:
        if len(difference):
            self._count += len(difference)
            self._max = max(self._max, float(np.abs(difference).max()))
            self._k3 += float((np.expm1(difference) - difference).sum())

    def _first_bad(self, difference: Floats, fresh: BoolArray) -> int | None:
        """The first token beyond the limit; NaN is beyond it."""
        bad = np.flatnonzero(~(np.abs(difference) <= self._most))
        return int(np.flatnonzero(fresh)[bad[0]]) if len(bad) else None

    def _settle(self, suspect: _Suspect) -> Floats:
        """Differences with near-ties turned so that all agree; raises EngineError if none do.

        Greedy: of the near-ties before the first bad token, turn the one that moves it furthest.
        """
        sites: list[Site] = []
        (policy,), ties = self._score(suspect, [sites])
        difference = _difference(policy, suspect.rollout, suspect.is_fresh)
        bad = self._first_bad(difference, suspect.is_fresh)
        while bad is not None:
            tries = [[*sites, tie] for tie in ties if tie[0] < bad and tie not in sites]
            if not tries or len(sites) == MAX_TURNED:
                raise self._error(suspect)
            found, _ = self._score(suspect, tries[:MAX_TRIED])
            options = [_difference(each, suspect.rollout, suspect.is_fresh) for each in found]
            firsts = [self._first_bad(option, suspect.is_fresh) for option in options]
            reach = [len(suspect.token_ids) if first is None else first for first in firsts]
            best = int(np.argmax(reach))
            if reach[best] <= bad:
                raise self._error(suspect)
            sites, difference, bad = tries[best], options[best], firsts[best]
            _, ties = self._score(suspect, [sites])
        self._num_turned += len(sites)
        return difference

    @torch.no_grad()
    def _score(
        self, suspect: _Suspect, tries: list[list[Site]]
    ) -> tuple[list[Float32Array], list[Site]]:
        """Log-probs [T] for every list of turned sites, and the near-ties of the first of them."""
        length, copies = len(suspect.token_ids), len(tries)
        turned: dict[int, list[int]] = {}
        for copy, sites in enumerate(tries):
            for token, layer in sites:
                turned.setdefault(layer, []).append(copy * length + token)
        ids = torch.from_numpy(suspect.token_ids.astype(np.int64))
        routing = TurnedRouting(turned=turned)
        starts = torch.arange(copies + 1) * length
        hidden, _ = self._model(ids.repeat(copies), starts, routing=routing)
        rows = torch.from_numpy(np.flatnonzero(suspect.is_fresh))
        read = hidden.view(copies, length, -1)[:, rows - 1]
        logprobs = torch.full((copies, length), torch.nan)
        chosen = ids[rows].expand(copies, -1).unsqueeze(-1)
        scored = self._model.head(read).log_softmax(-1).gather(-1, chosen)
        logprobs[:, rows] = scored.squeeze(-1).float()
        margins = routing.margins[:length]
        close = (margins < TIE_MARGIN).nonzero()
        order = margins[close[:, 0], close[:, 1]].argsort()
        ties = [(int(token), int(layer)) for token, layer in close[order].tolist()]
        return list(logprobs.numpy()), ties

    def _error(self, suspect: _Suspect) -> EngineError:
        difference = _difference(suspect.policy, suspect.rollout, suspect.is_fresh)
        token = self._first_bad(difference, suspect.is_fresh)
        assert token is not None
        return EngineError(
            f"agreement: trajectory {suspect.id}: token {token}: the engine sampled with log-prob"
            f" {suspect.rollout[token]:.6f}, the learner has {suspect.policy[token]:.6f}"
            f" (limit {self._most:g}, no routing tie explains it)"
        )


def _difference(policy: Float32Array, rollout: Float32Array, fresh: BoolArray) -> Floats:
    """Policy minus rollout log-prob of the fresh tokens, in their order."""
    return policy[fresh].astype(np.float64) - rollout[fresh].astype(np.float64)
