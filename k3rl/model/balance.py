"""Quantile balancing: router biases that give every expert its share.

Source: Kimi K3 report, arXiv 2607.24653, quantile balancing and its appendix. The bias moves the
choice of experts only. It follows from the scores of all tokens of an optimiser step and applies
from the next one. With m tokens, E experts and the top k chosen, a share is q = m k / E tokens. Let
a_i be the (k+1)-th largest biased score of token i. Then r_ij = a_i - s_ij is the bias from which
expert j takes the token, and its next bias is the one that takes q tokens.

`QuantileBalancer` counts r in bins, as the report does in practice: its memory does not grow with
the tokens, and ranks exchange one table of integers per step. Its bias lies within about one bin of
the exact one, `quantile_bias`, which needs all scores in one place and is what it is judged by.

Nothing in a model changes a bias by itself, in training or elsewhere: whoever wants balance calls
for it, as fine-tuning does. Reinforcement learning does not, and biases stay frozen: rollout and
training must route alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Self, cast

import torch
from torch import Tensor
from torch import distributed as dist

from k3rl.errors import UserInputError
from k3rl.model.model import DecoderLayer, K3Model
from k3rl.model.moe import Router

NUM_BINS = 1000
MAX_TOKENS = (1 << 31) - 1
"""Of a step over all ranks: up to here no int32 count overflows, wherever the tokens fall."""
_CHUNK = 1 << 20  # scores worked on at a time


def quantile_bias(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """The next bias [E] from raw scores [m, E] of m tokens under `bias` [E]: the exact form.

    -b_j is the (floor(q) + 1)-th largest of s_ij - a_i over the tokens; then b is centred.
    Arithmetic is float64, the result in the dtype of `bias`.
    Raises UserInputError when there are too few tokens or experts for that.
    """
    num_tokens, num_experts = scores.shape
    if num_tokens < 2 or not 0 < top_k < num_experts:
        raise UserInputError(f"{num_tokens} tokens, top {top_k} of {num_experts}: no quantile")
    threshold = torch.cat([
        _threshold(scores[part].double(), bias.double(), top_k)
        for part in _parts(num_tokens, num_experts)
    ])  # fmt: skip
    # The (floor(q) + 1)-th largest, counted from the smallest.
    rank = num_tokens - num_tokens * top_k // num_experts
    margin = torch.empty(num_experts, dtype=torch.float64, device=scores.device)
    for part in _parts(num_experts, num_tokens):
        margins = scores[:, part].t().double() - threshold
        margin[part] = torch.kthvalue(margins, rank, dim=1).values
    return _centred(-margin).to(bias.dtype)


def bin_range(bias: Tensor, num_bins: int = NUM_BINS) -> tuple[Tensor, Tensor]:
    """Lower end and width of the bins under `bias` [..., E]: float64 [..., 1] each.

    Scores lie in [0, 1], so every r lies in [b_min - 1, b_max + 1].
    """
    low, high = torch.aminmax(bias.double(), dim=-1, keepdim=True)
    return low - 1.0, (high - low + 2.0) / num_bins


def histogram_quantile(counts: Tensor, low: Tensor, width: Tensor, top_k: int) -> Tensor:
    """Where the counts [E, bins] of r reach the share of each expert: float64 [E], not centred.

    That is in the first bin whose cumulative count is at least ceil(q), linear between its edges.
    `low` and `width` [1] come from `bin_range`. Every token counts once for every expert, so each
    row sums to m, which must not be 0.
    """
    running = counts.cumsum(1, dtype=torch.int64)
    weighted = running[:, -1] * top_k
    needed = -(-weighted // len(counts))
    found = (running < needed[:, None]).sum(1, keepdim=True)
    inside = counts.gather(1, found)
    before = running.gather(1, found) - inside
    share = weighted.double() / len(counts)
    fraction = ((share[:, None] - before) / inside).clamp_(0, 1)
    return (low + (found + fraction) * width).squeeze(1)


class QuantileBalancer:
    """Counts the scores of an optimiser step and sets the next biases from the counts.

    All ranks of data parallelism hold equal biases and count their own tokens; `step` adds the
    counts up and leaves equal biases, bit for bit, however the tokens were spread over ranks and
    micro-batches. Each token is observed once per step: not again when a pass is recomputed, and by
    one rank only of those that share it.
    """

    def __init__(
        self,
        biases: Sequence[Tensor],
        top_k: int,
        *,
        num_bins: int = NUM_BINS,
        ema: float = 0.0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Balance the routers whose biases, [E] each, are `biases`; `step` writes into them.

        `ema` in [0, 1) is the part of the old bias that the new one keeps. `group` are the ranks
        that share a step; None means the default group if there is one, else this process alone.
        Raises UserInputError on settings that leave nothing to balance.
        """
        if not biases or not 0 < top_k < len(biases[0]) or num_bins < 1 or not 0 <= ema < 1:
            raise UserInputError(
                f"{len(biases)} layers, top {top_k}, {num_bins} bins, ema {ema}: nothing to balance"
            )
        self.biases, self.top_k, self.ema, self.group = list(biases), top_k, ema, group
        shape = (len(biases), len(biases[0]), num_bins)
        self.counts = torch.zeros(shape, dtype=torch.int32, device=biases[0].device)
        """[L, E, bins]; 3.6 MB per layer of K3. After a step those of all ranks, until the next
        observation."""
        self._num_tokens = 0
        self._open = False
        self._start = torch.stack(self.biases).double()

    @classmethod
    def of(
        cls,
        model: K3Model,
        *,
        num_bins: int = NUM_BINS,
        ema: float = 0.0,
        group: dist.ProcessGroup | None = None,
    ) -> Self:
        """The balancer of all routers of a model, as long as it keeps its device and dtype."""
        biases = [gate.e_score_correction_bias for gate in routers(model)]
        return cls(biases, model.config.moe.top_k, num_bins=num_bins, ema=ema, group=group)

    @torch.no_grad()
    def observe(self, scores: Tensor, mask: Tensor | None = None) -> None:
        """Count the raw scores [m, L, E] of a micro-batch, such as `Routing.scores`.

        Tokens where the boolean `mask` [m] is False are padding and do not count; their scores may
        be anything. Margins are taken from the biases in force at the first call of a step.

        Raises:
            UserInputError: a shape or dtype that does not fit, a score outside [0, 1], or more
                than `MAX_TOKENS` tokens. Counts may then be incomplete: `discard` the step.

        """
        num_tokens, (num_layers, num_experts, _) = len(scores), self.counts.shape
        if scores.shape != (num_tokens, num_layers, num_experts):
            raise UserInputError(
                f"scores {tuple(scores.shape)} for {num_layers} routers of {num_experts} experts"
            )
        kept = torch.arange(num_tokens, device=scores.device)
        if mask is not None:
            if mask.dtype != torch.bool or mask.shape != (num_tokens,):
                raise UserInputError(f"mask {mask.dtype} {tuple(mask.shape)}: need bool [m]")
            kept = kept[mask]
        self._begin()
        self._num_tokens += len(kept)
        if self._num_tokens > MAX_TOKENS // self._num_ranks():
            raise UserInputError(f"more than {MAX_TOKENS} tokens in a step: int32 counts overflow")
        for layer in range(num_layers):
            for part in _parts(len(kept), num_experts):
                self._count(layer, scores[:, layer].index_select(0, kept[part]).double())

    @torch.no_grad()
    def step(self) -> int:
        """Set the biases for the next step and return how many tokens, of all ranks, it saw.

        Sends one integer all-reduce of the counts if there is a group of ranks; all of them call.
        Raises UserInputError on every rank, without a change, when no rank saw a token.
        """
        self._begin()
        self._open = False
        if self._grouped():
            dist.all_reduce(self.counts, group=self.group)
        num_tokens = int(self.counts[0, 0].sum())
        if not num_tokens:
            raise UserInputError("a step without tokens: there is nothing to balance by")
        for bias, start, counts in zip(self.biases, self._start, self.counts, strict=True):
            low, width = bin_range(start, counts.shape[1])
            new = _centred(histogram_quantile(counts, low, width, self.top_k))
            if self.ema:
                new = _centred(new.lerp(start, self.ema))
            bias.copy_(new)
        return num_tokens

    def discard(self) -> None:
        """Forget what was observed since the last step, as when the optimiser step failed."""
        self._open = False

    def _begin(self) -> None:
        """In the first call of a step: empty the counts and fix the biases that bins depend on."""
        if not self._open:
            self.counts.zero_()
            self._num_tokens = 0
            self._start = torch.stack(self.biases).double()
            self._open = True

    def _count(self, layer: int, scores: Tensor) -> None:
        """Add float64 scores [m, E] to the counts of a layer."""
        least, most = torch.aminmax(scores)
        if not bool((least >= 0) & (most <= 1)):
            raise UserInputError(f"layer {layer}: a router score is not in [0, 1]")
        _, num_experts, num_bins = self.counts.shape
        bias = self._start[layer]
        low, width = bin_range(bias, num_bins)
        reached = _threshold(scores, bias, self.top_k)[:, None] - scores
        bins = reached.sub_(low).div_(width).floor_().clamp_(0, num_bins - 1).long()
        bins += torch.arange(num_experts, device=bins.device) * num_bins
        one = self.counts.new_ones(1).expand(bins.numel())
        self.counts[layer].view(-1).scatter_add_(0, bins.view(-1), one)

    def _grouped(self) -> bool:
        return dist.is_available() and dist.is_initialized()

    def _num_ranks(self) -> int:
        return dist.get_world_size(self.group) if self._grouped() else 1


def routers(model: K3Model) -> list[Router]:
    """The routers of a model, by layer."""
    layers = [cast(DecoderLayer, layer) for layer in model.model.layers]
    return [layer.block_sparse_moe.gate for layer in layers if not layer.is_dense]


def load_imbalance(ids: Tensor, num_experts: int) -> Tensor:
    """Largest over mean number of tokens per expert, [L], of expert ids [T, L, k]."""
    counts = torch.stack(
        [torch.bincount(layer.flatten(), minlength=num_experts) for layer in ids.unbind(1)]
    ).float()
    return counts.max(1).values / counts.mean(1)


def _parts(rows: int, columns: int) -> Iterator[slice]:
    """Slices of `rows` such that a [rows, columns] array is worked on in pieces."""
    count = max(1, _CHUNK // max(1, columns))
    return (slice(start, start + count) for start in range(0, rows, count))


def _threshold(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """The (k+1)-th largest biased score of each row of scores [m, E]: a [m]."""
    return torch.topk(scores + bias, top_k + 1, dim=1).values[:, -1]


def _centred(bias: Tensor) -> Tensor:
    return bias - bias.mean()
