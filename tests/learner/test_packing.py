"""From stored tokens to micro-batches."""

from dataclasses import replace

import numpy as np
import pytest

from k3rl.errors import UserInputError
from k3rl.learner.packing import Stored
from k3rl.store.protocol import Ref, TokenRead
from k3rl.types import Author, Span
from tests.learner.learner_helpers import packed


def stored(index=0, spans=((0, 0, 0), (3, 1, 1), (7, 0, 0)), count=9, advantage=1.0):
    """A context with (start, policy_version, state_version) spans; version 0: the environment's."""
    made = tuple(
        Span(at, Author.POLICY if version else Author.ENVIRONMENT, version, state)
        for at, version, state in spans
    )
    ends = [*(span.start for span in made), count]
    mask = np.repeat([span.author is Author.POLICY for span in made], np.diff(ends))
    ids = (100 * index + np.arange(count)).astype(np.int32)
    logprobs = np.where(mask, -0.5 - index, np.nan).astype(np.float32)
    read = TokenRead(Ref(f"{index:032x}", end=count), ids, mask, logprobs, made)
    return Stored(read, index, advantage)


def test_what_follows_the_last_policy_token_is_left_out():
    step = packed([stored()], version=1)
    (micro,) = step.micro_batches
    batch = micro.batch
    assert batch.token_ids.tolist() == list(range(7))
    assert batch.loss_mask.tolist() == [False] * 3 + [True] * 4
    assert batch.policy_version.tolist() == [0] * 3 + [1] * 4
    assert batch.token_weight.tolist() == [0] * 3 + [1] * 4
    assert micro.is_fresh.tolist() == [False] * 3 + [True] * 4
    assert (step.num_policy_tokens, step.num_stale_tokens, step.num_trajectories) == (4, 0, 1)


def test_longest_first_and_never_more_than_the_limit():
    counts = [5, 30, 12, 44, 9, 20, 7]
    spans = ((0, 0, 0), (2, 1, 1))
    items = [stored(i, spans, count) for i, count in enumerate(counts)]
    step = packed(items, version=1, micro_batch_tokens=45)
    lengths = [np.diff(m.batch.cu_seqlens).tolist() for m in step.micro_batches]
    assert [length for group in lengths for length in group] == sorted(counts)[::-1]
    assert all(sum(group) <= 45 for group in lengths)
    indices = [
        i for m in step.micro_batches for i in m.batch.trajectory_index[m.batch.cu_seqlens[:-1]]
    ]
    assert sorted(indices) == list(range(7))
    for micro in step.micro_batches:
        assert np.array_equal(micro.batch.token_ids // 100, micro.batch.trajectory_index)


def test_a_sequence_longer_than_the_limit_is_a_batch_of_its_own():
    items = [stored(i, ((0, 0, 0), (2, 1, 1)), count) for i, count in enumerate((100, 10, 10))]
    step = packed(items, version=1, micro_batch_tokens=20)
    assert [len(m.batch.token_ids) for m in step.micro_batches] == [100, 20]


def test_anchored_contexts_share_no_batch_with_others():
    """The reference policy has to read anchored contexts only."""
    items = [replace(stored(i, count=9 + i), is_anchored=i in (1, 4)) for i in range(6)]
    step = packed(items, version=1, micro_batch_tokens=64)
    members = [sorted(set(m.batch.trajectory_index.tolist())) for m in step.micro_batches]
    assert members == [[1, 4], [0, 2, 3, 5]]
    assert step.anchored == {1, 4}


def test_age_is_judged_span_by_span():
    spans = ((0, 0, 0), (2, 3, 3), (4, 4, 3), (6, 5, 5), (8, 9, 9))
    step = packed([stored(spans=spans, count=10)], version=9, max_staleness=5)
    (micro,) = step.micro_batches
    assert micro.batch.token_weight.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]
    assert micro.is_fresh.tolist() == [False] * 8 + [True] * 2
    assert (step.num_policy_tokens, step.num_stale_tokens) == (6, 2)


def test_a_state_of_an_older_version_is_not_fresh():
    step = packed([stored(spans=((0, 0, 0), (3, 2, 1)))], version=2)
    assert not step.micro_batches[0].is_fresh.any()
    assert step.num_policy_tokens == 6


def test_contexts_without_a_token_that_trains_are_left_out():
    old, silent = stored(1), stored(2, ((0, 0, 0),))
    step = packed([stored(0, ((0, 0, 0), (3, 8, 8))), old, silent], version=8, max_staleness=2)
    assert [m.batch.trajectory_index.tolist() for m in step.micro_batches] == [[0] * 9]
    assert (step.num_policy_tokens, step.num_stale_tokens, step.num_trajectories) == (6, 4, 1)


def test_contexts_of_one_trajectory_count_once():
    step = packed([stored(3), stored(3), stored(4)], version=1)
    assert step.num_trajectories == 2
    assert step.num_policy_tokens == 12


def test_nothing_to_train_on_is_no_batch():
    step = packed([], version=1)
    assert (step.micro_batches, step.num_policy_tokens, step.num_trajectories) == ([], 0, 0)


def test_tokens_of_a_version_to_come_and_missing_log_probs_are_refused():
    with pytest.raises(UserInputError, match="version 3 at token 4, but the learner is at 2"):
        packed([stored(spans=((0, 0, 0), (4, 3, 3)))], version=2)
    item = stored()
    bare = replace(item.read, rollout_logprobs=np.full(9, np.nan, np.float32))
    with pytest.raises(UserInputError, match="context 0: a policy token has no finite log-prob"):
        packed([replace(item, read=bare)], version=1)
