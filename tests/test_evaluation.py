"""What is evaluated, and what it says."""

import math

import pytest

from k3rl import evaluation
from k3rl.config import resolve
from k3rl.evaluation import mean_success, mean_tokens, scores, wilson
from k3rl.rollout.worker import make_env
from k3rl.types import Outcome, OutcomeKind, Trajectory, TrajectoryState

ENVS = ("k3rl/Reason-v0", "k3rl/FileHunt-v0")


def config(**settings):
    tree = {
        "run": {"name": "e"},
        "envs": [{"id": ENVS[0], "kwargs": {"preset": "arithmetic"}}, {"id": ENVS[1]}],
        "intensity": {"levels": ["low", "max"]},
        "evaluation": settings,
    }
    return resolve(tree, "test")


def planned(name="0000", **settings):
    made = config(**settings)
    envs = {env: make_env(made, env) for env in ENVS}
    return evaluation.plan(made, envs, name, {"tokenizer": "t"}, ("no_network",))


def finished(header, reward, num_tokens):
    kind = OutcomeKind.INFRA_FAULT if reward is None else OutcomeKind.COMPLETED
    outcome = Outcome(kind, reward)
    return Trajectory(header, TrajectoryState.FINISHED, num_tokens, num_tokens, (), outcome)


def test_every_cell_gets_its_tasks_and_no_trajectory_has_the_id_of_another():
    headers = planned(num_tasks=3, num_samples=2, num_greedy_tasks=1)
    assert len(headers) == 2 * 2 * (3 * 2 + 1)
    assert {h.task.split for h in headers} == {"heldout"}
    assert {h.budget for h in headers} == {None}
    later = planned("0007", num_tasks=3, num_samples=2, num_greedy_tasks=1)
    assert len({h.id for h in (*headers, *later)}) == 2 * len(headers)
    assert [h.task.key for h in headers] == [h.task.key for h in later]


def test_evaluated_trajectories_are_not_those_of_the_run():
    assert all(h.key.run_id != "e" for h in planned(num_tasks=1))


def test_scores_count_solved_tasks_samples_and_faults():
    headers = [
        h
        for h in planned(num_tasks=4, num_samples=2)
        if h.task.env_id == ENVS[0] and h.key.level == "low"
    ]
    rewards = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, None, 1.0]
    (found,) = scores(
        finished(h, reward, 10 + i)
        for i, (h, reward) in enumerate(zip(headers, rewards, strict=True))
    )
    assert (found.num_tasks, found.num_valid, found.k) == (4, 7, 2)
    assert found.success == pytest.approx(4 / 7)
    assert found.pass_at_k == pytest.approx(3 / 4)
    assert found.num_tokens == pytest.approx(sum(10 + i for i in range(8) if i != 6) / 7)
    assert found.low < found.success < found.high


def test_means_are_over_cells_of_one_law():
    headers = planned(num_tasks=1, num_greedy_tasks=1)
    found = scores(
        finished(h, float(h.temperature == 1.0 and h.key.level == "max"), 7) for h in headers
    )
    assert mean_success(found) == 0.5
    assert mean_success(found, level="max") == 1.0
    assert mean_success(found, 0.0) == 0.0
    assert mean_tokens(found, level="low") == 7


@pytest.mark.parametrize(
    ("num_success", "count", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (5, 10, 0.2366, 0.7634),
        (10, 10, 0.7225, 1.0),
        (81, 263, 0.2553, 0.3662),
    ],
)
def test_wilson_intervals_are_those_of_the_tables(num_success, count, low, high):
    """Newcombe 1998, "Two-sided confidence intervals for the single proportion", and its method."""
    found = wilson(num_success, count)
    assert found[0] == pytest.approx(low, abs=5e-4)
    assert found[1] == pytest.approx(high, abs=5e-4)


def test_nothing_counted_says_nothing():
    assert wilson(0, 0) == (0.0, 1.0)
    assert not math.isnan(wilson(1, 1)[0])
