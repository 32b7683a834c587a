"""The Learner contract, over every implementation there is."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from k3rl.errors import ConfigError, UserInputError
from k3rl.learner.idle import IdleLearner
from k3rl.learner.protocol import Denominators, Learner
from k3rl.types import PackedBatch, decode, encode

LEARNERS = {"idle": IdleLearner}


@pytest.fixture(params=LEARNERS)
def learner(request):
    return LEARNERS[request.param]()


def batch(lengths=(3, 5)):
    count = sum(lengths)
    mask = np.arange(count) % 2 == 1
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


DENOMINATORS = Denominators(num_policy_tokens=4, num_trajectories=2)


def test_is_a_learner(learner):
    assert isinstance(learner, Learner)


def test_counts_what_it_is_handed(learner):
    stats = asyncio.run(learner.forward_backward(batch(), DENOMINATORS))
    assert (stats.num_tokens, stats.num_policy_tokens) == (8, 4)


def test_the_batch_it_eats_travels_without_loss(learner):
    sent = decode(PackedBatch, encode(batch()))
    stats = asyncio.run(learner.forward_backward(sent, DENOMINATORS))
    assert stats.num_policy_tokens == 4


def test_version_never_goes_back(learner):
    before = learner.policy_version
    asyncio.run(learner.forward_backward(batch(), DENOMINATORS))
    after = asyncio.run(learner.optim_step())
    assert after == learner.policy_version
    assert after > before if learner.trains else after == before


@pytest.mark.parametrize(
    "name", ["loss_mask", "rollout_logprobs", "advantages", "token_weight", "policy_version"]
)
def test_arrays_that_disagree_are_named(learner, name):
    broken = replace(batch(), **{name: getattr(batch(), name)[:-1]})
    with pytest.raises(UserInputError, match=name):
        asyncio.run(learner.forward_backward(broken, DENOMINATORS))


def test_a_policy_token_without_a_logprob_is_refused(learner):
    broken = replace(batch(), rollout_logprobs=np.full(8, np.nan, np.float32))
    with pytest.raises(UserInputError, match="not finite at a policy token"):
        asyncio.run(learner.forward_backward(broken, DENOMINATORS))


@pytest.mark.parametrize("starts", [[0], [0, 8, 8], [1, 8], [0, 5, 3, 8], [0, 7]])
def test_bad_sequence_starts_are_refused(learner, starts):
    broken = replace(batch(), cu_seqlens=np.array(starts, np.int32))
    with pytest.raises(UserInputError, match="cu_seqlens"):
        asyncio.run(learner.forward_backward(broken, DENOMINATORS))


def test_a_denominator_of_less_than_the_batch_is_refused(learner):
    with pytest.raises(UserInputError, match="denominators"):
        asyncio.run(learner.forward_backward(batch(), Denominators(3, 2)))


def test_a_learner_that_does_not_train_says_so_instead_of_saving(learner, tmp_path):
    if learner.trains:
        asyncio.run(learner.save(tmp_path))
        asyncio.run(learner.load(tmp_path))
    else:
        with pytest.raises(ConfigError, match="algorithm: none"):
            asyncio.run(learner.save(tmp_path))
