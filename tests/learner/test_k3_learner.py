"""K3Learner: the gradient of the objective, whatever the packing; steps and state."""

import asyncio
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from k3rl.algorithms.k2_5 import token_loss
from k3rl.errors import ConfigError
from k3rl.learner import k3_learner
from k3rl.learner.k3_learner import K3Learner
from k3rl.learner.packing import MicroBatch, join
from k3rl.learner.protocol import Denominators
from k3rl.sections import ObjectiveConfig, OptimiserConfig, Schedule
from tests.learner.learner_helpers import TINY, decode, denominators, packed, tiny

OBJECTIVE = ObjectiveConfig(log_ratio_sq_coef=0.02)


def learner_of(model, **optimiser):
    return K3Learner(model, OBJECTIVE, OptimiserConfig(**optimiser))


def stale_play(seed=0, turns=(1, 3, 2, 2, 1)):
    """Trajectories of other weights than those trained, so that ratios are not 1."""
    played = decode(tiny(seed=1), turns, seed)
    return [p.stored(i, (-1.0) ** i * (0.5 + 0.1 * i)) for i, p in enumerate(played)]


def gradients(batches, step, dtype=torch.float64):
    model = tiny().to(dtype)
    learner = learner_of(model)
    stats = [
        asyncio.run(learner.forward_backward(micro.batch, denominators(step))) for micro in batches
    ]
    return grads_of(model), stats, learner


def grads_of(model):
    """By name; the mixer before the first layer has one source only and so no gradient."""
    return {
        n: p.grad for n, p in model.named_parameters() if "layers.0.self_attention_res" not in n
    }


def largest_difference(one, two):
    return max(float((one[n] - two[n]).abs().max()) for n in one)


def singles(step):
    """Every sequence as a batch of its own."""
    found = []
    for micro in step.micro_batches:
        batch, ends = micro.batch, micro.batch.cu_seqlens
        for start, end in pairwise(ends):
            part = {
                name: getattr(batch, name)[start:end]
                for name in (
                    *("token_ids", "loss_mask", "rollout_logprobs", "advantages"),
                    *("token_weight", "policy_version", "trajectory_index"),
                )
            }
            starts = np.array([0, end - start], np.int32)
            one = type(batch)(cu_seqlens=starts, **part)
            found.append(MicroBatch(one, micro.is_fresh[start:end]))
    return found


def test_gradient_does_not_depend_on_packing_order_or_split(monkeypatch):
    step = packed(stale_play())
    alone = singles(step)
    assert len(step.micro_batches) > 1
    want, _, _ = gradients([join(alone)], step)
    assert all(grad is not None and grad.abs().max() > 0 for grad in want.values())
    splits = {
        "as packed": step.micro_batches,
        "one by one": alone,
        "backwards": [join(alone[::-1])],
        "two": [join(alone[1::2]), join(alone[::2])],
    }
    for name, batches in splits.items():
        got, _, _ = gradients(batches, step)
        assert largest_difference(want, got) < 1e-11, name
    monkeypatch.setattr(k3_learner, "HEAD_TOKENS", 7)
    got, _, _ = gradients([join(alone)], step)
    assert largest_difference(want, got) < 1e-11


def test_gradient_is_that_of_the_plain_objective():
    """One sequence, all logits at once, autograd straight through the loss."""
    step = packed(stale_play(turns=(2,)))
    got, stats, _ = gradients(step.micro_batches, step)
    (micro,) = step.micro_batches
    batch, model = micro.batch, tiny().double()
    ids = torch.from_numpy(batch.token_ids.astype(np.int64))
    hidden, _ = model(ids, torch.tensor([0, len(ids)]))
    logprobs = model.head(hidden[:-1]).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    loss = token_loss(
        logprobs,
        torch.from_numpy(batch.rollout_logprobs[1:]),
        torch.from_numpy(batch.advantages[1:]).double(),
        torch.from_numpy(batch.loss_mask[1:]),
        log_ratio_window=OBJECTIVE.log_ratio_window,
        log_ratio_sq_coef=0.02,
    ).sum() / int(batch.loss_mask.sum())
    loss.backward()
    want = grads_of(model)
    assert largest_difference(want, got) < 1e-12
    assert stats[0].losses == pytest.approx([loss.item()], abs=1e-12)


def test_tokens_of_no_weight_leave_loss_and_denominator():
    """As if the stale trajectory were not there."""
    played = decode(tiny(seed=1), (2, 2))
    kept, old = played[0].stored(0, 1.0, version=5), played[1].stored(1, 1.0, version=2)
    both = packed([kept, old], version=6, max_staleness=3)
    assert (both.num_policy_tokens, both.num_stale_tokens, both.num_trajectories) == (12, 12, 1)
    one, _, _ = gradients(both.micro_batches, both)
    alone = packed([kept], version=6, max_staleness=3)
    two, _, _ = gradients(alone.micro_batches, alone)
    assert largest_difference(one, two) == 0


def test_log_probs_and_sums_of_a_batch():
    model = tiny()
    step = packed([p.stored(i, 1.0) for i, p in enumerate(decode(model, (2, 1)))])
    _, stats, learner = gradients(step.micro_batches, step, torch.float32)
    batch = step.micro_batches[0].batch
    assert np.array_equal(np.isfinite(learner.policy_logprobs), batch.loss_mask)
    got = learner.policy_logprobs[batch.loss_mask]
    np.testing.assert_allclose(got, batch.rollout_logprobs[batch.loss_mask], atol=2e-5)
    sums = stats[0].metrics
    assert sums["masked"] == 0
    assert sums["log_ratio_abs"] < 18 * 2e-5
    assert 0 < sums["entropy"] / 18 <= math.log(TINY.vocab_size)
    assert stats[0].num_policy_tokens == 18
    assert sum(stats[0].losses) == pytest.approx(-1.0, abs=1e-4)


def test_an_update_raises_what_was_rewarded():
    model = tiny()
    played = decode(model, (2, 2, 2, 2))
    step = packed([p.stored(i, 1.0 if i < 2 else -1.0) for i, p in enumerate(played)])
    learner = learner_of(model, matrix_lr=0.01, vector_lr=0.01)

    async def go():
        for _ in range(3):
            found = [np.empty(0, np.float32), np.empty(0, np.int32)]
            for micro in step.micro_batches:
                await learner.forward_backward(micro.batch, denominators(step))
                ratio = learner.policy_logprobs - micro.batch.rollout_logprobs
                found[0] = np.append(found[0], ratio)
                found[1] = np.append(found[1], micro.batch.trajectory_index)
            yield [np.nanmean(found[0][np.isin(found[1], who)]) for who in ([0, 1], [2, 3])]
            await learner.optim_step(0)

    async def all_of():
        return [ratios async for ratios in go()]

    first, *_, last = asyncio.run(all_of())
    assert max(map(abs, first)) < 1e-4
    assert last[0] > 0.01 > -0.01 > last[1]


def test_a_gradient_that_is_not_finite_is_dropped():
    model = tiny()
    learner = learner_of(model)
    step = packed(stale_play())
    before = {n: p.detach().clone() for n, p in model.named_parameters()}

    async def go():
        await learner.forward_backward(step.micro_batches[0].batch, denominators(step))
        model.lm_head.weight.grad[3, 3] = math.nan
        return await learner.optim_step(0)

    found = asyncio.run(go())
    assert found["num_skipped_steps"] == 1
    assert math.isnan(found["gradient_norm"])
    assert all(torch.equal(before[n], p) and p.grad is None for n, p in model.named_parameters())
    assert learner.optimiser.num_steps == 0


def test_no_gradient_is_no_step():
    found = asyncio.run(learner_of(tiny()).optim_step(0))
    assert (found["num_skipped_steps"], found["gradient_norm"]) == (1, 0)


def test_gradient_is_clipped_and_schedules_are_read_at_the_update():
    model = tiny()
    learner = learner_of(model, max_grad_norm=1e-9, vector_lr=Schedule(start=1, end=0, steps=4))
    step = packed(stale_play())

    async def go():
        await learner.forward_backward(step.micro_batches[0].batch, denominators(step))
        return await learner.optim_step(3)

    found = asyncio.run(go())
    assert found["gradient_norm"] > 1e-9
    assert found["vector_lr"] == 0.25
    first = learner.optimiser.state_dict()["first.lm_head.weight"]
    assert 0 < float(first.norm()) <= 0.11 * 1e-9


def test_what_does_not_train_stays():
    model = tiny()
    learner = learner_of(model)
    assert not any("e_score_correction_bias" in name for name in learner.optimiser.parameters)
    assert set(learner.optimiser.parameters) == {name for name, _ in model.named_parameters()}


def test_saved_and_loaded_carries_on_bitwise(tmp_path):
    step = packed(stale_play())
    models = [tiny(), tiny(seed=9)]
    one, two = map(learner_of, models)

    async def train(learner, update):
        for micro in step.micro_batches:
            await learner.forward_backward(micro.batch, denominators(step))
        await learner.optim_step(update)

    async def go():
        await train(one, 0)
        await train(one, 1)
        await one.save(tmp_path)
        await two.load(tmp_path)
        await train(one, 2)
        await train(two, 2)

    asyncio.run(go())
    states = [model.state_dict() for model in models]
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


def test_what_does_not_fit_is_named(tmp_path):
    learner = learner_of(tiny())
    asyncio.run(learner.save(tmp_path))
    other = learner_of(tiny(hidden_size=24))
    with pytest.raises(ConfigError, match=r"model\.safetensors: weights of another model config"):
        asyncio.run(other.load(tmp_path))
    (tmp_path / "optimiser.safetensors").write_bytes(b"no such thing")
    with pytest.raises(ConfigError, match=r"optimiser\.safetensors"):
        asyncio.run(learner.load(tmp_path))


def test_denominators_are_those_of_the_whole_step():
    step = packed(stale_play())
    double = Denominators(2 * step.num_policy_tokens, 5)
    one, _, _ = gradients(step.micro_batches, step)
    model = tiny().double()
    learner = learner_of(model)
    for micro in step.micro_batches:
        asyncio.run(learner.forward_backward(micro.batch, double))
    half = {n: grad * 2 for n, grad in grads_of(model).items()}
    assert largest_difference(one, half) < 1e-12


def test_the_reference_pulls_where_it_is_known_and_nowhere_else():
    """With no advantage the gradient is that of the reference term alone."""
    step = packed([p.stored(i, 0.0) for i, p in enumerate(decode(tiny(), (2, 1)))])
    (micro,) = step.micro_batches
    objective = ObjectiveConfig(log_ratio_sq_coef=0.0, reference_coef=0.3)
    other = K3Learner(tiny(seed=1), objective, OptimiserConfig())
    reference = asyncio.run(other.logprobs(micro.batch))
    assert np.array_equal(np.isfinite(reference), micro.batch.loss_mask)
    unknown = np.where(micro.batch.trajectory_index == 0, reference, np.nan).astype(np.float32)

    def slopes(ref_logprobs):
        model = tiny()
        learner = K3Learner(model, objective, OptimiserConfig())
        batch = replace(micro.batch, ref_logprobs=ref_logprobs)
        stats = asyncio.run(learner.forward_backward(batch, denominators(step)))
        return grads_of(model), stats, learner.policy_logprobs

    none, _, _ = slopes(np.full_like(reference, np.nan))
    assert max(float(grad.abs().max()) for grad in none.values()) == 0.0
    some, stats, logprobs = slopes(unknown)
    assert any(float(grad.abs().max()) > 0 for grad in some.values())
    known = np.isfinite(unknown)
    gap = (logprobs - reference)[known].astype(np.float64)
    count = step.num_policy_tokens
    assert stats.losses[0] == pytest.approx(0.15 * float((gap**2).sum()) / count, rel=1e-5)
    assert stats.losses[1] == 0.0
    assert stats.metrics["reference_drift"] == pytest.approx(float(gap.sum()), rel=1e-4)
