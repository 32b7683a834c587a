"""Attention residuals: a softmax over block sums replaces the residual stream (2603.15031).

A site's pseudo-query w scores each source v by RMSNorm(v) . w; the sources are mixed raw. Sites
lie in front of every sub-layer and behind the last. What the sources are is a matter of form:

    block   the embedding, the sum of each finished block, the running sum of this block (K3)
    full    the embedding and the output of every sub-layer so far
    off     no mixing: the sum of all of them, an ordinary residual stream
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from k3rl.model.config import ModelConfig
from k3rl.model.dispatch import operation
from k3rl.model.ops import applied, inverse_rms, linear, wide
from k3rl.model.weights import Weight


def _dots(value: Tensor, query: Tensor) -> Tensor:
    """Product value . query, [T], as one column of a product wide enough to be invariant in T."""
    return linear(value, F.pad(query.unsqueeze(0), (0, 0, 0, 7)))[:, 0]


class _Mix(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, eps: float, *sources: Tensor) -> Tensor:
        scale = torch.stack([inverse_rms(wide(source), eps).squeeze(-1) for source in sources])
        score = torch.stack([_dots(wide(source), query) for source in sources])
        law = torch.softmax(score * scale, 0)
        out = wide(sources[0]) * law[0].unsqueeze(-1)
        for source, part in zip(sources[1:], law[1:], strict=True):
            out.addcmul_(source, part.unsqueeze(-1))
        ctx.save_for_backward(query, scale, score, law, *sources)
        return out.to(sources[0].dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        query, scale, score, law, *sources = ctx.saved_tensors
        grad = wide(grads[0])
        d_law = torch.stack([(grad * source).sum(-1) for source in sources])
        d_logit = law * (d_law - (law * d_law).sum(0))
        d_score = d_logit * scale
        # d of 1/sqrt(mean v^2 + eps) is -scale^3 v / d.
        pull = -(d_score * score) * scale.square() / len(query)
        d_query = torch.zeros_like(query)
        d_sources = []
        for index, source in enumerate(sources):
            value = wide(source)
            d_query += torch.mv(value.t(), d_score[index])
            d_value = grad * law[index].unsqueeze(-1)
            d_value.addcmul_(d_score[index].unsqueeze(-1), query)
            d_value.addcmul_(value, pull[index].unsqueeze(-1))
            d_sources.append(d_value.to(source.dtype))
        return d_query, None, *d_sources


@operation
def mix(sources: list[Tensor], norm: Tensor, proj: Tensor, eps: float) -> Tensor:
    """Sum_i p_i v_i over sources v_i [T, d], with p the softmax of the site's scores.

    s_i = sum_d (v_i / sqrt(mean v_i^2 + eps))_d norm_d proj_d, in float32 and without 1/sqrt(d).
    `norm` [d], `proj` [1, d]. A zero `proj` averages.
    """
    return applied(_Mix, wide(norm) * wide(proj[0]), eps, *sources)


class Partial(NamedTuple):
    """A softmax over some of its terms, for Q sites: what an online softmax carries."""

    total: Tensor
    """[Q, T, d]: sum_i e^(s_i - peak) v_i."""
    peak: Tensor
    """[Q, T]: largest score."""
    weight: Tensor
    """[Q, T]: sum_i e^(s_i - peak)."""


def mix_bank(bank: list[Tensor], queries: Tensor, eps: float) -> Partial:
    """First phase: Q queries [Q, d] (norm times proj) over sources [T, d], read once for all."""
    stacked = wide(torch.stack(bank))
    scale = inverse_rms(stacked, eps).squeeze(-1)
    scores = torch.stack([linear(source, queries) for source in stacked]) * scale.unsqueeze(-1)
    peak = scores.amax(0)
    terms = (scores - peak).exp().permute(2, 1, 0)
    total = torch.einsum("qts,std->qtd", terms, stacked)
    return Partial(total, peak.t(), terms.sum(-1))


def merge(partial: Partial, site: int, query: Tensor, source: Tensor, eps: float) -> Tensor:
    """Second phase: site `site` of a bank pass takes in the one source it lacked, [T, d]."""
    value = wide(source)
    score = _dots(value, query) * inverse_rms(value, eps).squeeze(-1)
    old_peak, peak = partial.peak[site], torch.maximum(partial.peak[site], score)
    old, new = (old_peak - peak).exp(), (score - peak).exp()
    total = partial.total[site] * old.unsqueeze(-1) + value * new.unsqueeze(-1)
    return (total / (partial.weight[site] * old + new).unsqueeze(-1)).to(source.dtype)


class Residuals:
    """The sources of one pass through the layers; site 2 i is in front of the attention of layer
    i, site 2 i + 1 in front of its feed-forward, the last behind all layers.
    """

    def __init__(
        self,
        embedded: Tensor,
        sites: Sequence[tuple[Weight, Weight]],
        config: ModelConfig,
        is_two_phase: bool = False,
    ) -> None:
        """`embedded` [T, d]; `sites` the norm and pseudo-query of every mixer, none when off."""
        self.sites, self.config = sites, config
        self.is_two_phase = is_two_phase and config.attn_res == "block"
        self.bank: list[Tensor] = []
        """Finished sources."""
        self.running: Tensor | None = embedded
        """The running sum; None where a block begins."""
        self._partial: Partial | None = None
        self._first = 0

    def mix(self, site: int) -> Tensor:
        """What the sub-layer behind a site reads: [T, d]."""
        sources = self.bank if self.running is None else [*self.bank, self.running]
        if len(sources) == 1:
            return sources[0]
        norm, proj = self.sites[site]
        if self._partial is None or self.running is None:
            return mix(sources, norm.weight, proj.weight, self.config.norm_eps)
        query = self._query(self.sites[site])
        return merge(self._partial, site - self._first, query, self.running, self.config.norm_eps)

    def begin(self, layer: int) -> None:
        """Tell that the attention of `layer` comes next: its block may begin here."""
        size = self.config.attn_res_block_size
        if self.config.attn_res != "block" or layer % size or self.running is None:
            return
        self.bank.append(self.running)
        self.running = None
        if self.is_two_phase:
            # The next block's first site still reads this bank: its own source ends behind it.
            self._first = 2 * layer + 1
            queries = [self._query(site) for site in self.sites[self._first :][: 2 * size]]
            self._partial = mix_bank(self.bank, torch.stack(queries), self.config.norm_eps)

    def add(self, out: Tensor) -> None:
        """Take in the output [T, d] of a sub-layer."""
        if self.config.attn_res == "full":
            if self.running is not None:
                self.bank.append(self.running)
            self.running = out
        else:
            self.running = out if self.running is None else self.running + out

    @staticmethod
    def _query(site: tuple[Weight, Weight]) -> Tensor:
        norm, proj = site
        return wide(norm.weight) * wide(proj.weight[0])
