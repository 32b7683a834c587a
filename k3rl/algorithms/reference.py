"""A pull towards a reference policy, per token.

    loss = coef / 2 * (log pi(token) - log pi_ref(token))^2

On tokens sampled from pi its gradient is that of coef * KL(pi || pi_ref) in expectation (the k2
estimator; Schulman, "Approximating KL Divergence", 2020). It keeps the habits of a level that no
budget presses on, where a policy shared between levels would drift with the pressed ones.

Axes: S scored tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reference_loss(
    policy_logprobs: Tensor, reference_logprobs: Tensor, *, coef: float
) -> tuple[Tensor, Tensor]:
    """Loss of each token [S] and the log-ratio [S]; both 0 where the reference is NaN."""
    known = torch.isfinite(reference_logprobs)
    reference = torch.where(known, reference_logprobs, 0.0).to(policy_logprobs.dtype)
    log_ratio = torch.where(known, policy_logprobs - reference, 0.0)
    return 0.5 * coef * log_ratio.square(), log_ratio.detach()
