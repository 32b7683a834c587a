"""The Learner contract, over every implementation there is."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from k3rl.errors import ConfigError, UserInputError
from k3rl.learner.k3_learner import K3Learner
from k3rl.learner.protocol import Denominators, Learner
from k3rl.sections import ObjectiveConfig, OptimiserConfig
from k3rl.types import PackedBatch, decode, encode
from tests.learner.learner_helpers import tiny

LEARNERS = {"k3": lambda: K3Learner(tiny(), ObjectiveConfig(), OptimiserConfig())}


@pytest.fixture(params=LEARNERS)
def learner(request):
    return LEARNERS[request.param]()


def batch(lengths=(3, 5)):
    """Every second token of a sequence is the policy's."""
    count = sum(lengths)
    mask = np.concatenate([np.arange(length) % 2 == 1 for length in lengths])
    return PackedBatch(
        token_ids=np.arange(count, dtype=np.int32),
        cu_seqlens=np.cumsum([0, *lengths]).astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -1.0, np.nan).astype(np.float32),
        advantages=np.ones(count, np.float32),
        token_weight=np.ones(count, np.float32),
        policy_version=np.zeros(count, np.int32),
        trajectory_index=np.repeat(np.arange(len(lengths)), lengths).astype(np.int32),
    )


DENOMINATORS = Denominators(num_policy_tokens=3, num_trajectories=2)


def test_is_a_learner(learner):
    assert isinstance(learner, Learner)


def test_counts_what_it_is_handed(learner):
    stats = asyncio.run(learner.forward_backward(batch(), DENOMINATORS))
    assert (stats.num_tokens, stats.num_policy_tokens, len(stats.losses)) == (8, 3, 2)


def test_the_batch_it_eats_travels_without_loss(learner):
    sent = decode(PackedBatch, encode(batch()))
    stats = asyncio.run(learner.forward_backward(sent, DENOMINATORS))
    assert stats == asyncio.run(learner.forward_backward(batch(), DENOMINATORS))


def test_a_step_uses_up_what_was_accumulated(learner):
    asyncio.run(learner.forward_backward(batch(), DENOMINATORS))
    assert asyncio.run(learner.optim_step(0))["gradient_norm"] > 0
    assert asyncio.run(learner.optim_step(1))["gradient_norm"] == 0


@pytest.mark.parametrize(
    "name", ["loss_mask", "rollout_logprobs", "advantages", "token_weight", "policy_version"]
)
def test_arrays_that_disagree_are_named(learner, name):
    broken = replace(batch(), **{name: getattr(batch(), name)[:-1]})
    with pytest.raises(UserInputError, match=name):
        asyncio.run(learner.forward_backward(broken, DENOMINATORS))


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("rollout_logprobs", np.nan, "not finite at a policy token"),
        ("rollout_logprobs", -np.inf, "not finite at a policy token"),
        ("advantages", np.nan, "not finite at a policy token"),
        ("token_weight", -1.0, "not finite or negative"),
    ],
)
def test_a_number_that_would_poison_the_gradient_is_refused(learner, name, value, problem):
    broken = replace(batch(), **{name: np.full(8, value, np.float32)})
    with pytest.raises(UserInputError, match=f"{name}: {problem}"):
        asyncio.run(learner.forward_backward(broken, DENOMINATORS))


def test_a_policy_token_that_nothing_predicts_is_refused(learner):
    broken = replace(batch(), loss_mask=np.arange(8) == 3)
    with pytest.raises(UserInputError, match="first token of a sequence"):
        asyncio.run(learner.forward_backward(broken, DENOMINATORS))


@pytest.mark.parametrize("starts", [[0], [0, 8, 8], [1, 8], [0, 5, 3, 8], [0, 7]])
def test_bad_sequence_starts_are_refused(learner, starts):
    broken = replace(batch(), cu_seqlens=np.array(starts, np.int32))
    with pytest.raises(UserInputError, match="cu_seqlens"):
        asyncio.run(learner.forward_backward(broken, DENOMINATORS))


def test_a_denominator_of_less_than_the_batch_is_refused(learner):
    with pytest.raises(UserInputError, match="denominators"):
        asyncio.run(learner.forward_backward(batch(), Denominators(2, 2)))


def test_what_it_saves_it_loads(learner, tmp_path):
    asyncio.run(learner.save(tmp_path))
    asyncio.run(learner.load(tmp_path))
    with pytest.raises(ConfigError, match="nowhere"):
        asyncio.run(learner.load(tmp_path / "nowhere"))
