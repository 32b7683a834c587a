import json
import subprocess
import sys

import pytest

from k3rl.algorithms.intensity import Budgets, estimate
from k3rl.errors import UserInputError
from k3rl.types import (
    Outcome,
    OutcomeKind,
    Task,
    Trajectory,
    TrajectoryHeader,
    TrajectoryKey,
    TrajectoryState,
    from_plain,
    to_plain,
)

A, B, C = "test/A-v0", "test/B-v0", "test/C-v0"


def task(env_id=A, seed=0, **metadata):
    return Task(env_id, seed, metadata=metadata)


def played(of, num_tokens, reward=1.0, number=0):
    kind = OutcomeKind.INFRA_FAULT if reward is None else OutcomeKind.COMPLETED
    header = TrajectoryHeader(TrajectoryKey("r", of.key, "max", 0, number), of)
    return Trajectory(
        header, TrajectoryState.FINISHED, 3 * num_tokens, num_tokens, outcome=Outcome(kind, reward)
    )


def test_a_kind_takes_the_median_of_its_correct_samples():
    budgets = estimate(
        [played(task(seed=n, size=1), 10 * (n + 1)) for n in range(5)]
        + [played(task(seed=n, size=1), 1000, reward=0.0) for n in range(9)]
    )
    assert budgets.b0(task(seed=99, size=1)) == 30


def test_a_kind_with_few_correct_samples_takes_the_largest_median_of_its_environment():
    budgets = estimate(
        [played(task(size=1), 10)] * 4
        + [played(task(size=2), 20)] * 4
        + [played(task(size=3), 90)] * 3
        + [played(task(B, size=1), 500)] * 4
    )
    assert budgets.b0(task(size=1)) == 10
    assert budgets.b0(task(size=3)) == budgets.b0(task(size=4)) == 20


def test_an_environment_without_a_median_takes_all_its_samples():
    samples = [played(task(B), 40), played(task(B), 60, 0.0), played(task(B), 90, -1.0)]
    assert estimate(samples).b0(task(B)) == 60


def test_what_has_no_reward_is_no_sample():
    samples = [played(task(), 10)] * 4 + [played(task(), 999, None)] * 50
    assert estimate(samples).b0(task()) == 10


def test_an_unknown_environment_is_named():
    with pytest.raises(UserInputError, match=f"{C}: no budget was estimated; there are: {A}"):
        estimate([played(task(), 10)]).b0(task(C))


@pytest.mark.parametrize(
    ("multiplier", "expected"), [(1.0, 7), (0.55, 4), (1.5, 11), (1e-9, 1), (0.0, 1)]
)
def test_budgets_round_up_and_leave_a_token(multiplier, expected):
    assert estimate([played(task(), 7)] * 4).budget(task(), multiplier) == expected


def test_budgets_travel_as_json():
    budgets = estimate([played(task(size=1, name="x"), 11)] * 4 + [played(task(B), 5)])
    assert from_plain(Budgets, json.loads(json.dumps(to_plain(budgets)))) == budgets


def test_budgets_and_advantages_load_no_torch():
    code = "import sys, k3rl.algorithms.intensity, k3rl.algorithms.advantage; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch" not in done.stdout.split()
