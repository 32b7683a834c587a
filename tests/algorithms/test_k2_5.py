"""The K2.5 objective against numbers worked out by hand."""

import math

import pytest
import torch

from k3rl.algorithms.k2_5 import token_loss, token_sums

WINDOW = [math.log(0.5), math.log(2.0)]


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def loss_of(policy, rollout, advantages, valid=None, coef=0.1):
    valid = torch.ones(len(policy), dtype=torch.bool) if valid is None else torch.tensor(valid)
    return token_loss(
        policy, rollout, advantages, valid, log_ratio_window=WINDOW, log_ratio_sq_coef=coef
    )


def test_three_tokens_by_hand():
    # Ratios 1.5 (inside), 3 (outside, positive advantage), 0.25 (outside, negative advantage).
    policy = f64(math.log(0.3), math.log(0.6), math.log(0.1)).requires_grad_()
    rollout = f64(math.log(0.2), math.log(0.2), math.log(0.4))
    loss = loss_of(policy, rollout, f64(2.0, 1.0, -1.0))
    squares = [math.log(1.5) ** 2, math.log(3) ** 2, math.log(0.25) ** 2]
    expected = f64(-(1.5 * 2.0) + 0.1 * squares[0], 0.1 * squares[1], 0.1 * squares[2])
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-15)
    loss.sum().backward()
    # d/d logpi: -rho A inside the window, 2 coef log rho everywhere.
    pull = [0.2 * math.log(1.5), 0.2 * math.log(3), 0.2 * math.log(0.25)]
    slope = f64(-3.0 + pull[0], pull[1], pull[2])
    torch.testing.assert_close(policy.grad, slope, rtol=0, atol=1e-15)


@pytest.mark.parametrize("log_ratio", [-3.0, -0.7, -0.69, 0.0, 0.69, 0.7, 3.0])
def test_the_mask_does_not_look_at_the_sign_of_the_advantage(log_ratio):
    inside = WINDOW[0] <= log_ratio <= WINDOW[1]
    for advantage in (1.5, -1.5):
        policy = f64(-1.0 + log_ratio).requires_grad_()
        loss_of(policy, f64(-1.0), f64(advantage), coef=0.0).sum().backward()
        expected = -advantage * math.exp(log_ratio) if inside else 0.0
        assert float(policy.grad) == pytest.approx(expected, abs=1e-12)


def test_both_ends_of_the_window_are_inside():
    for end in WINDOW:
        policy = f64(end).requires_grad_()
        loss_of(policy, f64(0.0), f64(1.0), coef=0.0).sum().backward()
        assert float(policy.grad) == pytest.approx(-math.exp(end))


def test_a_drifted_token_is_only_pulled_back():
    for drift in (4.0, -4.0):
        policy = f64(-2.0 + drift).requires_grad_()
        loss_of(policy, f64(-2.0), f64(5.0), coef=1e-3).sum().backward()
        assert float(policy.grad) == pytest.approx(2e-3 * drift)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_nothing_of_an_invalid_token_reaches_the_gradient(bad):
    policy = f64(-1.0, -2.0, -0.5).requires_grad_()
    rollout, advantages = f64(-1.1, bad, -0.5), f64(1.0, bad, -1.0)
    loss = loss_of(policy, rollout, advantages, [True, False, True])
    loss.sum().backward()
    assert loss[1].item() == policy.grad[1].item() == 0.0
    clean = f64(-1.0, -0.5).requires_grad_()
    loss_of(clean, f64(-1.1, -0.5), f64(1.0, -1.0)).sum().backward()
    assert torch.equal(policy.grad[[0, 2]], clean.grad)


def test_a_ratio_that_overflows_gives_no_nan():
    policy = torch.tensor([0.0], requires_grad=True)
    rollout, ones = torch.tensor([-200.0]), torch.ones(1)
    loss_of(policy, rollout, ones, coef=1e-3).sum().backward()
    assert float(policy.grad) == pytest.approx(0.4)


def test_sums_by_hand():
    ratios = [1.5, 3.0, 0.25]
    policy = f64(*(math.log(0.2 * ratio) for ratio in ratios), 0.0)
    rollout = f64(*[math.log(0.2)] * 3, math.nan)
    valid = torch.tensor([True, True, True, False])
    sums = token_sums(policy, rollout, valid, log_ratio_window=WINDOW)
    logs = [math.log(ratio) for ratio in ratios]
    assert sums["log_ratio"] == pytest.approx(sum(logs))
    assert sums["log_ratio_abs"] == pytest.approx(sum(map(abs, logs)))
    assert sums["masked"] == 2
    k3 = sum(ratio - 1 - log for ratio, log in zip(ratios, logs, strict=True))
    assert sums["k3"] == pytest.approx(k3)
