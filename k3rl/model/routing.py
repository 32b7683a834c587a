"""Which experts each token went to: recorded in rollouts, pinned when a loss is recomputed.

Pinning replays ids only. Weights are computed again from the raw scores, so gradients reach the
router (R3, arXiv 2510.11370).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from k3rl.errors import UserInputError


@dataclass(eq=False)
class Routing:
    """Handed to a forward pass; reads the pinned ids or fills the records of its T tokens."""

    pinned: Tensor | None = None
    """[T, L, k] integer ids to use, L routed layers in order; None: the top k."""
    keep_scores: bool = False
    """Keep raw and threshold scores as well, for quantile balancing."""
    _ids: list[Tensor] = field(default_factory=list, repr=False)
    _margins: list[Tensor] = field(default_factory=list, repr=False)
    _scores: list[Tensor] = field(default_factory=list, repr=False)

    @classmethod
    def record(cls, keep_scores: bool = False) -> Routing:
        """Route by the scores and remember how."""
        return cls(None, keep_scores)

    @classmethod
    def pin(cls, ids: Tensor) -> Routing:
        """Route to `ids` [T, L, k]."""
        return cls(ids.to(torch.int64))

    @property
    def ids(self) -> Tensor:
        """[T, L, k] int64: experts used, best first when recorded."""
        return torch.stack(self._ids, 1)

    @property
    def margins(self) -> Tensor:
        """[T, L]: k-th minus (k+1)-th biased score; how near the choice was to another."""
        return torch.stack(self._margins, 1)

    @property
    def scores(self) -> Tensor:
        """[T, L, E] raw sigmoid scores, if `keep_scores`."""
        return torch.stack(self._scores, 1)

    def choose(self, scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
        """The experts [T, k] of the next layer, whose raw scores are [T, E].

        Raises:
            UserInputError: pinned ids that do not fit the tokens, layers, experts or k.

        """
        if self.pinned is None:
            best = torch.topk(scores.detach() + bias, top_k + 1, dim=-1)
            chosen = best.indices[:, :top_k]
            self._margins.append(best.values[:, -2] - best.values[:, -1])
            if self.keep_scores:
                self._scores.append(scores.detach())
        else:
            chosen = self._pinned_layer(len(self._ids), scores, top_k)
        self._ids.append(chosen)
        return chosen

    def _pinned_layer(self, layer: int, scores: Tensor, top_k: int) -> Tensor:
        assert self.pinned is not None
        shape = tuple(self.pinned.shape)
        if len(shape) != 3 or shape[0] != len(scores) or shape[2] != top_k or layer >= shape[1]:
            raise UserInputError(
                f"pinned expert ids {shape} do not fit {len(scores)} tokens, layer {layer}, "
                f"top {top_k}"
            )
        chosen = self.pinned[:, layer]
        low, high = torch.aminmax(chosen)
        if low < 0 or high >= scores.shape[1]:
            raise UserInputError(f"pinned expert id outside [0, {scores.shape[1]})")
        return chosen
