"""The agreement check passes what rounding explains and nothing else."""

import re

import numpy as np
import pytest
import torch

from k3rl import metrics
from k3rl.errors import EngineError
from k3rl.learner.agreement import Agreement, TurnedRouting
from tests.learner.learner_helpers import decode, packed, tiny

IDS = [f"{n:032x}" for n in range(8)]
TURNS = (3, 2, 1, 2)


@torch.no_grad()
def logprobs_of(model, batch, routing=None):
    """Log-probs [T] of a batch under `model`, NaN where the environment wrote."""
    ids = torch.from_numpy(batch.token_ids.astype(np.int64))
    starts = torch.from_numpy(batch.cu_seqlens.astype(np.int64))
    hidden, _ = model(ids, starts, routing=routing)
    scored = model.head(hidden[:-1]).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    found = np.full(len(ids), np.nan, np.float32)
    found[1:] = scored.numpy()
    found[~batch.loss_mask] = np.nan
    return found


def step_of(model, version=0, state=None, seed=0):
    played = decode(model, TURNS, seed)
    stored = [p.stored(i, 1.0, version, state) for i, p in enumerate(played)]
    return packed(stored, version, micro_batch_tokens=1000)


def check(model, step, change=lambda micro, found: found, **limits):
    agreement = Agreement(model, IDS, **{"most": 2e-4, "mean_k3": 1e-7, **limits})
    for micro in step.micro_batches:
        found = logprobs_of(model, micro.batch)
        agreement.add(micro, change(micro, found))
    return agreement.check()


@pytest.mark.parametrize("seed", range(3))
def test_log_probs_of_token_by_token_decoding_agree(seed):
    model = tiny(seed)
    found = check(model, step_of(model, seed=seed))
    assert 0 < found[metrics.AGREEMENT_MAX] <= 2e-4
    assert 0 <= found[metrics.AGREEMENT_K3] <= 1e-9
    assert found[metrics.AGREEMENT_TOKENS] == 6 * sum(TURNS)
    assert found[metrics.AGREEMENT_PINNED] == 0


def test_slightly_other_weights_do_not():
    model = tiny()
    step = step_of(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.001)
    pattern = (
        r"trajectory 0{31}\d: token \d+: the engine sampled with log-prob -\d.* \(limit 0.0002"
    )
    with pytest.raises(EngineError, match=pattern):
        check(model, step)


def test_one_wrong_token_does_not():
    """The engine says one id and hands over another."""
    model = tiny()
    step = step_of(model)
    batch = step.micro_batches[0].batch
    at = int(np.flatnonzero(batch.loss_mask)[9])
    batch.token_ids[at] = (batch.token_ids[at] + 1) % model.config.vocab_size
    with pytest.raises(EngineError, match=f"token {at}:"):
        check(model, step)


def test_a_difference_just_beyond_the_limit_names_its_token():
    model = tiny()
    step = step_of(model)
    batch = step.micro_batches[0].batch
    at = int(np.flatnonzero(batch.loss_mask)[4])
    batch.rollout_logprobs[at] += 5e-4
    with pytest.raises(EngineError, match=re.escape(f"{batch.rollout_logprobs[at]:.6f}")):
        check(model, step)


def test_a_log_prob_that_is_no_number_does_not():
    model = tiny()
    step = step_of(model)

    def spoil(micro, found):
        found[micro.batch.loss_mask] = np.nan
        return found

    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(EngineError, match="the learner has nan"):
        check(model, step, spoil)


def test_many_small_differences_exceed_the_mean():
    model = tiny()
    step = step_of(model)
    for micro in step.micro_batches:
        micro.batch.rollout_logprobs[:] += 0.01
    with pytest.raises(EngineError, match=r"mean k3 .* exceeds 1e-07"):
        check(model, step, most=1.0)


@pytest.mark.parametrize(("version", "state"), [(3, 2), (2, 2)])
def test_spans_that_are_not_fresh_are_not_compared(version, state):
    model = tiny()
    played = decode(model, TURNS)
    step = packed([p.stored(i, 1.0, version, state) for i, p in enumerate(played)], version=3)
    for micro in step.micro_batches:
        micro.batch.rollout_logprobs[:] -= 1.0
    assert check(model, step)[metrics.AGREEMENT_TOKENS] == 0


LAYER = 1
"""A routed layer of the model; the first layer of all is dense."""


def routed(model, batch):
    """A sampled token's row of the packed batch, and how all tokens are routed."""
    routing = TurnedRouting()
    logprobs_of(model, batch, routing)
    return int(np.flatnonzero(batch.loss_mask)[3]), routing


def test_a_near_tie_that_was_decided_the_other_way_is_found_and_counted():
    """The bias is moved until two experts tie at one token; the engine then took the other one."""
    model = tiny()
    step = step_of(model)
    batch = step.micro_batches[0].batch
    row, routing = routed(model, batch)
    router = model.model.layers[LAYER + 1].block_sparse_moe.gate
    chosen = int(routing.ids[row, LAYER, -1])
    router.e_score_correction_bias[chosen] -= float(routing.margins[row, LAYER]) - 2e-7
    turned = TurnedRouting(turned={LAYER: [row]})
    batch.rollout_logprobs[:] = logprobs_of(model, batch, turned)
    natural = logprobs_of(model, batch)
    assert np.nanmax(np.abs(natural - batch.rollout_logprobs)) > 2e-4
    found = check(model, step)
    assert found[metrics.AGREEMENT_PINNED] == 1
    assert found[metrics.AGREEMENT_MAX] <= 2e-4


def test_another_choice_that_was_no_tie_is_an_error():
    model = tiny()
    step = step_of(model)
    batch = step.micro_batches[0].batch
    row, routing = routed(model, batch)
    assert routing.margins[row, LAYER] > 1e-4
    batch.rollout_logprobs[:] = logprobs_of(model, batch, TurnedRouting(turned={LAYER: [row]}))
    with pytest.raises(EngineError, match="no routing tie explains it"):
        check(model, step)
