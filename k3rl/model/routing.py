"""Which experts each token went to: recorded in rollouts, pinned when a loss is recomputed.

Pinning replays ids only. Weights are computed again from the raw scores, so gradients reach the
router (R3, arXiv 2510.11370).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from k3rl.errors import UserInputError
from k3rl.model.config import ModelConfig


@dataclass(eq=False)
class Routing:
    """Handed to one pass; reads the pinned ids or fills the records of its T tokens."""

    pinned: Tensor | None = None
    """[T, L, k] integer ids to use, L routed layers in order; None: the top k."""
    keep_scores: bool = False
    """Keep raw and threshold scores as well, for quantile balancing."""
    num_tokens: int | None = None
    """T of the pass that it was handed to; later rows are padding. None: not handed to one yet."""
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
        """[T, L, k] int64: experts used, best first when recorded. Of a pass with L > 0."""
        return torch.stack(self._ids, 1)

    @property
    def margins(self) -> Tensor:
        """[T, L]: k-th minus (k+1)-th biased score; how near the choice was to another."""
        if not self._margins:
            return torch.zeros(self.num_tokens or 0, 0)
        return torch.stack(self._margins, 1)

    @property
    def scores(self) -> Tensor:
        """[T, L, E] raw sigmoid scores, if `keep_scores`."""
        return torch.stack(self._scores, 1)

    def begin(self, num_tokens: int, config: ModelConfig) -> None:
        """Tell the size of the pass that comes now.

        Raises:
            UserInputError: it was handed to a pass before, or pinned ids do not fit the tokens,
                layers, experts or k.

        """
        if self.num_tokens is not None:
            raise UserInputError("a routing records or pins one pass; make another for this one")
        self.num_tokens = num_tokens
        if self.pinned is None:
            return
        shape = (num_tokens, config.num_router_layers, config.moe.top_k)
        if tuple(self.pinned.shape) != shape:
            raise UserInputError(
                f"pinned expert ids {tuple(self.pinned.shape)} do not fit [tokens, layers, top k] "
                f"{shape}"
            )
        if self.pinned.numel():
            low, high = torch.aminmax(self.pinned)
            if low < 0 or high >= config.moe.num_experts:
                raise UserInputError(f"pinned expert id outside [0, {config.moe.num_experts})")

    def choose(self, scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
        """The experts [T', k] of the next layer, whose raw scores are [T', E]; padding gets 0."""
        num_rows = len(scores)
        scores = scores[: self.num_tokens]
        if self.pinned is None:
            best = torch.topk(scores.detach() + bias, top_k + 1, dim=-1)
            chosen = self.turn(best.indices, len(self._ids))
            self._margins.append(best.values[:, -2] - best.values[:, -1])
            if self.keep_scores:
                self._scores.append(scores.detach())
        else:
            chosen = self.pinned[:, len(self._ids)]
        self._ids.append(chosen)
        return torch.nn.functional.pad(chosen, (0, 0, 0, num_rows - len(chosen)))

    def turn(self, best: Tensor, layer: int) -> Tensor:
        """The experts [T, k] of routed layer `layer` among the k + 1 best, [T, k + 1]."""
        del layer
        return best[:, :-1]
