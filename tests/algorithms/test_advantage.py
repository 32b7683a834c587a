import pytest

from k3rl.algorithms.advantage import group_advantages, is_informative


def test_reward_minus_mean_without_a_deviation():
    assert group_advantages([1.0, 0.0, 0.0, 1.0]) == [0.5, -0.5, -0.5, 0.5]
    assert group_advantages([10.0, 0.0]) == [5.0, -5.0]
    assert group_advantages([1.0, -1.0, 0.0]) == [1.0, -1.0, 0.0]


@pytest.mark.parametrize("rewards", [[], [1.0], [0.1] * 3, [-1.0] * 7])
def test_equal_rewards_leave_exact_zeros(rewards):
    assert not is_informative(rewards)
    assert group_advantages(rewards) == [0.0] * len(rewards)


def test_advantages_sum_to_zero():
    advantages = group_advantages([0.1, 0.7, 0.3, -1.0, 0.9])
    assert sum(advantages) == pytest.approx(0.0, abs=1e-15)
