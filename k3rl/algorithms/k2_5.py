"""The per-token objective of Kimi K2.5 (arXiv 2602.02276), which K3 keeps.

Per policy token, with rho = pi(token) / pi_rollout(token) and A the advantage of its trajectory:

    loss = -( [low <= log rho <= high] * rho * A  -  coef * (log rho)^2 )

The window masks the first term whatever the sign of A, so a token that drifted out contributes no
policy gradient; the squared term is never masked and pulls it back to the behaviour policy. The
loss of an optimiser step is the sum over its valid policy tokens, weighted, divided by their
number; that division is the learner's.

Axes: S scored tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def token_loss(
    policy_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    valid: Tensor,
    *,
    log_ratio_window: Sequence[float],
    log_ratio_sq_coef: float,
) -> Tensor:
    """Loss of each token [S]; exactly 0 with zero gradient where `valid` [S] is False.

    The other arguments are [S]; what they hold at invalid tokens (NaN too) does not matter.
    """
    log_ratio = _log_ratio(policy_logprobs, rollout_logprobs, valid)
    inside = _inside(log_ratio, log_ratio_window) & valid
    # Masked before exp: a ratio that overflows would turn the zero gradient into a NaN.
    ratio = torch.where(inside, log_ratio, 0.0).exp()
    gain = torch.where(inside, ratio * torch.where(valid, advantages, 0.0), 0.0)
    return log_ratio_sq_coef * log_ratio.square() - gain


@torch.no_grad()
def token_sums(
    policy_logprobs: Tensor,
    rollout_logprobs: Tensor,
    valid: Tensor,
    *,
    log_ratio_window: Sequence[float],
) -> dict[str, float]:
    """Sums over the valid tokens: log ratio, its magnitude, masked tokens and the k3 estimator.

    k3 = rho - 1 - log rho estimates KL(rollout || policy) from the rollout's own samples, and is
    never negative (Schulman, "Approximating KL Divergence", 2020).
    """
    ratio = _log_ratio(policy_logprobs, rollout_logprobs, valid).double()
    outside = ~_inside(ratio, log_ratio_window) & valid
    return {
        "log_ratio": float(ratio.sum()),
        "log_ratio_abs": float(ratio.abs().sum()),
        "masked": float(outside.sum()),
        "k3": float((torch.expm1(ratio) - ratio).sum()),
    }


def _log_ratio(policy_logprobs: Tensor, rollout_logprobs: Tensor, valid: Tensor) -> Tensor:
    """The log of rho, 0 where not valid."""
    policy = torch.where(valid, policy_logprobs, 0.0)
    return policy - torch.where(valid, rollout_logprobs.to(policy.dtype), 0.0)


def _inside(log_ratio: Tensor, window: Sequence[float]) -> Tensor:
    low, high = window
    return (log_ratio >= low) & (log_ratio <= high)
