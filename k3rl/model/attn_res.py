"""Attention residuals: a softmax over block sums replaces the residual stream (2603.15031).

A site's pseudo-query w scores each source v by RMSNorm(v) . w; the sources are mixed raw.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from k3rl.model.ops import applied, inverse_rms, wide

# Sources of up to this many values are stacked: fewer launches, one more copy.
_STACK_BELOW = 1 << 15


class _Mix(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, eps: float, *sources: Tensor) -> Tensor:
        scale = torch.stack([inverse_rms(wide(source), eps).squeeze(-1) for source in sources])
        score = torch.stack([torch.mv(wide(source), query) for source in sources])
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


def mix(sources: list[Tensor], norm: Tensor, proj: Tensor, eps: float) -> Tensor:
    """Sum_i p_i v_i over sources v_i [T, d], with p the softmax of the site's scores.

    s_i = sum_d (v_i / sqrt(mean v_i^2 + eps))_d norm_d proj_d, in float32 and without 1/sqrt(d).
    `norm` [d], `proj` [1, d]. A zero `proj` averages.
    """
    query = wide(norm) * wide(proj[0])
    if not torch.is_grad_enabled() and sources[0].numel() <= _STACK_BELOW:
        stacked = wide(torch.stack(sources))
        score = (stacked @ query).mul_(inverse_rms(stacked, eps).squeeze(-1))
        out = (torch.softmax(score, 0).unsqueeze(-1) * stacked).sum(0)
        return out.to(sources[0].dtype)
    return applied(_Mix, query, eps, *sources)
