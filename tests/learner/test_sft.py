"""Supervised fine-tuning: batches, the loss and its gradient, the effort probe."""

import dataclasses
from itertools import islice

import numpy as np
import pytest
import torch

from k3rl.errors import EngineError, UserInputError
from k3rl.learner.optim import Optimiser, Rates
from k3rl.learner.sft import Demonstration, SftLearner, draw_batches, passes, rates_at
from k3rl.model.balance import routers
from k3rl.model.config import KdaConfig, MlaConfig, ModelConfig, MoeConfig
from k3rl.model.model import K3Model
from k3rl.sections import OptimiserConfig, Schedule
from k3rl.types import philox

CONFIG = ModelConfig(
    vocab_size=20,
    hidden_size=16,
    layer_kinds=("kda", "mla"),
    kda=KdaConfig(num_heads=2, head_dim=8, decay_rank=4),
    mla=MlaConfig(2, 8, 8, 6, 2, 8),
    moe=MoeConfig(
        dense_size=32, num_experts=4, top_k=2, latent_size=8, expert_size=8, shared_size=8
    ),
    attn_res_block_size=2,
    init_std=None,
)
RATES = Rates(0.02, 0.02)


def demonstrations(count, seed=0, efforts=(0, 2)):
    """A prompt of level and digits, then the digits said again; only those are the policy's."""
    rng = philox(seed, "demonstrations")
    found = []
    for index in range(count):
        digits = rng.integers(4, 20, int(rng.integers(1, 5)))
        effort = efforts[index % len(efforts)]
        ids = np.array([effort, *digits, 3, *digits], np.int32)
        found.append(Demonstration(ids, np.arange(len(ids)) > len(digits) + 1, effort))
    return found


def learner(dtype=torch.float32, **settings):
    model = K3Model(CONFIG, 0).to(dtype)
    return SftLearner(model, Optimiser(model, CONFIG), **settings)


def test_every_demonstration_once_before_any_twice():
    lengths = [3, 5, 4, 6, 2]
    batches = list(islice(draw_batches(lengths, 7, seed=1), 40))
    assert batches == list(islice(draw_batches(lengths, 7, seed=1), 40))
    assert batches != list(islice(draw_batches(lengths, 7, seed=2), 40))
    for batch in batches:
        assert sum(lengths[i] for i in batch) >= 7
        assert sum(lengths[i] for i in batch[:-1]) < 7
    drawn = [index for batch in batches for index in batch]
    for start in range(0, len(drawn) - 5, 5):
        assert sorted(drawn[start : start + 5]) == [0, 1, 2, 3, 4]


def test_passes_keep_all_and_fit():
    batch = demonstrations(30)
    cut = passes(batch, 20)
    assert sorted(id(each) for part in cut for each in part) == sorted(map(id, batch))
    assert all(sum(len(each.token_ids) for each in part) <= 20 for part in cut)
    assert len(passes(batch, 3)) == 30, "a longer one makes a pass of its own"


def test_rates_rise_then_follow_their_schedules():
    settings = OptimiserConfig(matrix_lr=Schedule(start=1.0, end=0.0, steps=10), vector_lr=0.5)
    rates = [rates_at(settings, step, warmup_steps=3) for step in range(11)]
    assert [rate.vector for rate in rates[:4]] == [0.125, 0.25, 0.375, 0.5]
    assert rates[2].matrix == pytest.approx(0.75 * 0.8)
    assert rates[10].matrix == 0.0


def test_the_gradient_does_not_depend_on_passes():
    batch = demonstrations(12)
    grads = []
    for limit in (8, 40, 10_000):
        one = learner(torch.float64, micro_batch_tokens=limit)
        seen = {}

        def keep(rates, parameters=one.optimiser.parameters, seen=seen):
            seen |= {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}

        one.optimiser.step = keep
        stats = one.step(batch, RATES)
        grads.append((stats.loss, seen))
    for loss, seen in grads[1:]:
        assert loss == pytest.approx(grads[0][0], abs=1e-11)
        for name, grad in seen.items():
            torch.testing.assert_close(grad, grads[0][1][name], rtol=0, atol=1e-11)


def test_the_loss_is_the_mean_over_policy_tokens_only():
    one, batch = learner(), demonstrations(3)
    total, count = 0.0, 0
    for each in batch:
        ids = torch.as_tensor(each.token_ids, dtype=torch.int64)
        hidden, _ = one.model(ids, torch.tensor([0, len(ids)]))
        laws = torch.log_softmax(one.model.head(hidden), -1)
        for place in np.flatnonzero(each.loss_mask):
            total -= float(laws[place - 1, ids[place]].detach())
            count += 1
    stats = one.step(batch, RATES)
    assert stats.num_policy_tokens == count
    assert stats.loss == pytest.approx(total / count, abs=1e-5)


def test_it_learns_to_copy_and_balances_experts():
    one, batch = learner(), demonstrations(32)
    losses = [one.step(batch, RATES).loss for _ in range(40)]
    assert losses[-1] < 0.6 * losses[0]
    assert all(gate.e_score_correction_bias.abs().max() > 0 for gate in routers(one.model))


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_the_probe_makes_levels_tell(weight):
    """What is said does not depend on the level, so only the probe keeps it in the state."""
    one, batch = learner(effort_probe=weight), demonstrations(32)
    losses = [one.step(batch, RATES).probe_loss for _ in range(40)]
    if weight:
        assert losses[-1] < 0.2
    else:
        assert losses[-1] > 0.5


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_step_that_is_not_finite_changes_nothing(name):
    one, batch = learner(), demonstrations(4)
    with torch.no_grad():
        one.model.get_parameter(name)[:, 0] = float("nan")
    before = {name: value.clone() for name, value in one.model.state_dict().items()}
    with pytest.raises(EngineError, match="loss nan"):
        one.step(batch, RATES)
    for name, value in one.model.state_dict().items():
        torch.testing.assert_close(value, before[name], equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_mask": np.array([False, False, False])},
        {"loss_mask": np.array([True, False, True])},
        {"loss_mask": np.array([False, True])},
        {"effort": 3},
    ],
)
def test_bad_demonstrations_are_refused(changes):
    good = Demonstration(np.array([1, 2, 3], np.int32), np.array([False, True, True]), 0)
    with pytest.raises(UserInputError):
        dataclasses.replace(good, **changes)
