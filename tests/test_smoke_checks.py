"""The smoke's assertions: each of them can fail, and fails alone."""

import json
from dataclasses import replace

import pytest

from k3rl import metrics
from k3rl.cli import smoke_checks as checks
from k3rl.config import resolve
from k3rl.controller import Summary
from k3rl.evaluation import Score
from k3rl.store.protocol import StoreStats

LEVELS, LAWS = ("low", "max"), (1.0, 0.0)
BEFORE = {("low", 1.0): (0.5, 100), ("max", 1.0): (0.5, 100), ("low", 0.0): (0.8, 100)}
AFTER = {("low", 1.0): (0.9, 50), ("max", 1.0): (0.9, 100), ("low", 0.0): (0.95, 50)}


def evaluation(cells, **changes):
    made = []
    for level in LEVELS:
        for law in LAWS:
            success, tokens = cells.get((level, law), cells["low", 0.0])
            score = Score("e", level, law, 200, 200, success, 0.0, 1.0, success, 1, tokens)
            made.append(replace(score, **changes))
    return made


def summary(before=BEFORE, after=AFTER, **changes):
    found = {0: evaluation(before), 20: evaluation(after, **changes)}
    return Summary([], 1.0, 20, 0, StoreStats(), 20, found)


def failed(found):
    return [check.name for check in found if not check.is_met]


def test_what_meets_every_bar_fails_nothing():
    assert failed(checks.learning(summary())) == []
    assert failed(checks.control(summary(after=BEFORE))) == []


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        ({("low", 1.0): (0.2, 100), ("max", 1.0): (0.3, 100)}, {}, "success before, T = 1"),
        ({}, {("low", 1.0): (0.8, 50), ("max", 1.0): (0.8, 100)}, "success after, T = 1"),
        ({("low", 1.0): (0.64, 100), ("max", 1.0): (0.64, 100)},
         {("low", 1.0): (0.86, 50), ("max", 1.0): (0.86, 100)}, "rise, T = 1"),
        ({}, {("low", 0.0): (0.85, 50)}, "greedy success"),
        ({("low", 0.0): (0.97, 100)}, {}, "greedy success"),
        ({}, {("low", 1.0): (0.9, 61)}, "tokens, low / max"),
        ({}, {("low", 1.0): (0.86, 50), ("max", 1.0): (0.97, 100)}, "success, max - low"),
        ({}, {("low", 1.0): (0.9, 76), ("max", 1.0): (0.9, 200)}, "tokens of low, after / before"),
    ],
)  # fmt: skip
def test_each_bar_of_learning_can_be_missed_alone(before, after, name):
    assert failed(checks.learning(summary(BEFORE | before, AFTER | after))) == [name]


def test_too_few_held_out_tasks_and_a_control_that_learns_are_seen():
    few = checks.learning(summary(num_valid=199))
    assert failed(few) == ["held-out tasks per cell, T = 1"]
    assert failed(checks.control(summary())) == ["rise with permuted rewards, T = 1"]


@pytest.mark.parametrize(
    ("first", "last", "is_met"), [(4.0, 3.9, True), (4.0, 4.0, False), (4.0, 4.1, False)]
)
def test_fine_tuning_is_judged_by_the_same_demonstrations(tmp_path, first, last, is_met):
    (tmp_path / "sft").mkdir()
    fixed = [{metrics.SFT_FIXED_LOSS: first}, {metrics.SFT_FIXED_LOSS: last}]
    steps = [{metrics.SFT_LOSS: loss} for loss in (1.0, 2.0)]
    rows = [json.dumps(row) for row in (fixed[0], *steps, fixed[1])]
    (tmp_path / "sft" / "metrics.jsonl").write_text("\n".join(rows))
    assert checks.sft_loss_falls(tmp_path).is_met == is_met


def test_updates_without_step_tokens_or_comparison_are_seen(tmp_path):
    settings = resolve(
        {"run": {"name": "s", "folder": str(tmp_path), "iterations": 4}, "envs": [{"id": "e"}]}, "t"
    )
    good = {
        metrics.LOSS: 0.1,
        metrics.NUM_SKIPPED_STEPS: 0.0,
        metrics.LEARNER_POLICY_TOKENS: 9.0,
        metrics.AGREEMENT_TOKENS: 9.0,
    }

    def found(*rows):
        settings.run_folder.mkdir(exist_ok=True)
        text = "\n".join(json.dumps(row) for row in rows)
        (settings.run_folder / "metrics.jsonl").write_text(text)
        return failed(checks.training(settings))

    assert found(good, good) == []
    assert found(good, {"step": 1}) == ["updates"]
    for key, value in ((metrics.NUM_SKIPPED_STEPS, 1.0), (metrics.AGREEMENT_TOKENS, 0.0)):
        assert found(good, good | {key: value}) == ["updates without step, tokens or comparison"]


def test_time_and_memory_have_limits_and_nothing_measured_is_a_failure():
    assert failed(checks.resources(299.0, 1, 300.0, 2)) == []
    assert failed(checks.resources(301.0, 3, 300.0, 2)) == ["wall time", "peak memory"]
    assert failed(checks.resources(1.0, 0, 300.0, 2)) == ["peak memory"]
