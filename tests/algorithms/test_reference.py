"""The reference term: value, gradient, and that the unknown stays out."""

import math

import pytest
import torch

from k3rl.algorithms.reference import reference_loss

COEF = 0.2


def test_three_tokens_by_hand():
    policy = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -2.0, math.nan], dtype=torch.float64)
    loss, log_ratio = reference_loss(policy, reference, coef=COEF)
    assert loss.tolist() == pytest.approx([0.5 * COEF * 0.25, 0.0, 0.0])
    assert log_ratio.tolist() == pytest.approx([0.5, 0.0, 0.0])
    (slope,) = torch.autograd.grad(loss.sum(), policy)
    assert slope.tolist() == pytest.approx([COEF * 0.5, 0.0, 0.0])


def test_its_mean_gradient_on_policy_is_that_of_the_reverse_kl():
    """Exact expectation over a law of four tokens: sum_x pi(x) d loss(x) == coef d KL."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.randn(4, generator=generator, dtype=torch.float64), -1)
    policy = torch.log_softmax(logits, -1)
    loss, _ = reference_loss(policy, reference, coef=COEF)
    (sampled,) = torch.autograd.grad(
        (policy.detach().exp() * loss).sum(), logits, retain_graph=True
    )
    (exact,) = torch.autograd.grad(COEF * (policy.exp() * (policy - reference)).sum(), logits)
    assert torch.allclose(sampled, exact, atol=1e-14)
