"""Groups: budgets per problem and level, what an update is given, what was trained on."""

from collections import Counter

from k3rl.algorithms.intensity import Budgets, estimate
from k3rl.config import resolve
from k3rl.groups import Groups
from k3rl.rollout.worker import make_env
from k3rl.types import Outcome, OutcomeKind, Trajectory, TrajectoryState

MATH, HUNT = "k3rl/Reason-v0", "k3rl/FileHunt-v0"
TERSE = {"id": MATH, "kwargs": {"preset": "arithmetic"}}


def groups_of(envs=(TERSE, {"id": HUNT}), **sections):
    tree = {
        "run": {"name": "g"},
        "rollout": {"num_groups": 2, "group_size": 4},
        "envs": [dict(env) for env in envs],
        "intensity": {"levels": ["low", "max"]},
        **sections,
    }
    config = resolve(tree, "test")
    made = {env.id: make_env(config, env.id) for env in config.envs}
    return Groups(config, made, {}, ())


def begin(groups, iteration=0):
    headers = groups.to_begin(iteration, Counter())
    for header in headers:
        groups.note(Trajectory(header, TrajectoryState.QUEUED, 0, 0))
    return headers


def finish(groups, header, reward, num_tokens=10):
    kind = OutcomeKind.INFRA_FAULT if reward is None else OutcomeKind.COMPLETED
    ended = Trajectory(
        header, TrajectoryState.FINISHED, num_tokens, num_tokens, (), Outcome(kind, reward)
    )
    groups.note(ended)
    return ended


def test_a_budget_is_the_multiplier_of_the_environment_and_level_times_b0():
    envs = (TERSE, {"id": HUNT, "budget_multiplier": {"low": 0.9}})
    multipliers = {"low": {"start": 2.0, "end": 0.5, "steps": 3}, "max": 4.0}
    groups = groups_of(envs, intensity={"levels": ["low", "max"], "budget_multiplier": multipliers})
    assert {h.budget for h in begin(groups)} == {None}, "nothing is known of b0 yet"

    groups = groups_of(envs, intensity={"levels": ["low", "max"], "budget_multiplier": multipliers})
    groups.budgets = Budgets({}, {MATH: 100.0, HUNT: 200.0})
    found = {(h.task.env_id, h.key.level): h.budget for h in begin(groups, iteration=1)}
    assert found == {
        (MATH, "low"): 150, (MATH, "max"): 400, (HUNT, "low"): 180, (HUNT, "max"): 800,
    }  # fmt: skip


def test_a_member_that_is_begun_later_has_the_budget_of_its_group():
    multipliers = {"low": {"start": 2.0, "end": 1.0, "steps": 1}}
    groups = groups_of(intensity={"levels": ["low"], "budget_multiplier": multipliers})
    groups.budgets = Budgets({}, {MATH: 100.0, HUNT: 100.0})
    first = begin(groups)
    broken = [finish(groups, h, None if h.key.sample_index else 1.0) for h in first]
    again = groups.score(iteration=1)
    assert len(again) == len([t for t in broken if t.outcome.reward is None])
    assert {h.budget for h in again} == {200}


def test_budgets_come_from_correct_samples_at_the_law_that_is_trained():
    groups = groups_of()
    played = [finish(groups, h, 1.0, 20 + h.key.sample_index) for h in begin(groups)]
    found = estimate(played)
    assert set(found.environments) == {MATH, HUNT}
    assert all(20 <= b0 <= 23 for b0 in found.environments.values())


def test_an_update_gets_valid_members_and_nobody_twice():
    groups = groups_of()
    for number, header in enumerate(begin(groups)):
        finish(groups, header, [1.0, 0.0, None, 1.0][number % 4])
    assert groups.score(0) == []
    ready = groups.ready()
    assert len(ready) == 4
    members = [member for group in ready for member in groups.members(group)]
    assert [member.reward for member in members] == 4 * [1.0, 0.0, 1.0]
    groups.consume([members[0].id])
    assert len(groups.ready()) == 3
    groups.consume(["0" * 32])
    assert len(groups.ready()) == 3


def test_permuted_rewards_keep_each_groups_rewards_and_change_their_places():
    def members(**objective):
        groups = groups_of(objective=objective, rollout={"num_groups": 4, "group_size": 8})
        for number, header in enumerate(begin(groups)):
            finish(groups, header, float(number % 3 == 0))
        groups.score(0)
        return [groups.members(group) for group in groups.ready()]

    plain, permuted = members(), members(permute_rewards=True)
    assert permuted == members(permute_rewards=True)
    assert [[m.id for m in g] for g in plain] == [[m.id for m in g] for g in permuted]
    changed = 0
    for one, other in zip(plain, permuted, strict=True):
        assert sorted(m.reward for m in one) == sorted(m.reward for m in other)
        changed += [m.reward for m in one] != [m.reward for m in other]
    assert changed >= len(plain) - 2


def test_groups_that_the_store_let_go_are_not_begun_again():
    """As after a restart: the trainer says what it was trained on, the store has only the rest."""
    first = groups_of()
    ended = [finish(first, header, None if header.key.sample_index == 3 else 1.0)
             for header in begin(first)]  # fmt: skip
    before = first.num_finished()
    second = [finish(first, header, 0.5) for header in begin_after(first, before)]
    assert {t.header.key.group_index for t in second} == {2, 3}
    trained = [t.id for t in (*ended, *second) if t.outcome.reward is not None]

    def again(known):
        groups = groups_of()
        for trajectory in known:
            groups.note(trajectory)
        groups.consume(trained)
        return groups

    assert first.to_begin(1, before) == []
    wanted = [header.key for header in first.to_begin(2, first.num_finished())]
    # All of groups 0 and 1, one level of them, or all but one member that a pin kept.
    low = [t for t in ended if t.header.key.level == "low"]
    for known in (second, [*second, *low], [*second, ended[0]], []):
        groups = again(known)
        assert groups.num_finished() == first.num_finished()
        assert groups.ready() == []
        assert groups.to_begin(1, before) == []
        following = groups.to_begin(2, groups.num_finished())
        assert [header.key for header in following] == wanted
        assert {key.group_index for key in wanted} == {4, 5}


def begin_after(groups, finished_before):
    headers = groups.to_begin(1, finished_before)
    for header in headers:
        groups.note(Trajectory(header, TrajectoryState.QUEUED, 0, 0))
    return headers
