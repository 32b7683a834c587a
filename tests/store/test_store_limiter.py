"""The limiter keeps draws and inserts in balance, never stops both, and counts what it refuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3rl.errors import UserInputError
from k3rl.store.limiter import Limiter, LimiterCounts


@given(
    rate=st.sampled_from([0.25, 0.5, 1.0, 3.0, 8.0]),
    min_inserted=st.integers(1, 20),
    more=st.floats(0, 20),
    choices=st.lists(st.booleans(), max_size=300),
)
def test_neither_side_gets_further_ahead_than_the_buffer(rate, min_inserted, more, choices):
    buffer = 2 * max(1.0, rate) + more
    limiter = Limiter(rate, min_inserted, buffer, 0)
    inserted = sampled = refused = 0
    for wants_to_insert in choices:
        may_insert, may_sample = limiter.may_insert(), limiter.may_sample()
        assert may_insert or may_sample
        refused += (not may_insert) + (not may_sample)
        if wants_to_insert and may_insert:
            limiter.inserted()
            inserted += 1
        elif not wants_to_insert and may_sample:
            limiter.sampled()
            sampled += 1
        assert sampled == 0 or inserted >= min_inserted
        balance = rate * (inserted - min_inserted) - sampled
        assert limiter.balance == balance
        assert -buffer <= balance or inserted < min_inserted
        assert balance <= buffer
    counts = limiter.counts
    assert (counts.num_inserted, counts.num_sampled) == (inserted, sampled)
    assert counts.num_refused_inserts + counts.num_refused_samples == refused


def test_many_at_a_time_and_carrying_on():
    limiter = Limiter(2.0, 10, 8.0, 0)
    assert not limiter.may_sample()
    assert limiter.may_insert(14)
    assert not limiter.may_insert(15)
    limiter.inserted(14)
    assert limiter.may_sample(16)
    assert not limiter.may_sample(17)
    limiter.sampled(16)
    again = Limiter(
        2.0,
        10,
        8.0,
        0,
        LimiterCounts(**{name: getattr(limiter.counts, name) for name in limiter.counts.__slots__}),
    )
    assert not again.may_sample()
    assert again.may_insert(8)


def test_staleness_is_in_versions():
    limiter = Limiter(1.0, 1, 2.0, max_staleness=2)
    assert [limiter.min_version(v) for v in (0, 1, 2, 3, 9)] == [0, 0, 0, 1, 7]
    assert [limiter.is_fresh(v, 9) for v in (9, 8, 7, 6)] == [True, True, True, False]
    assert limiter.counts.num_refused_stale == 1
    assert Limiter(1.0, 1, 2.0, 0).min_version(5) == 5


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ((0.0, 1, 9.0, 0), "positive"),
        ((1.0, 0, 9.0, 0), "positive"),
        ((1.0, 1, 9.0, -1), "negative"),
        ((1.0, 1, 1.9, 0), "error_buffer"),
        ((4.0, 1, 7.9, 0), "error_buffer"),
    ],
)
def test_settings_that_would_stop_everything_are_refused(bad, match):
    with pytest.raises(UserInputError, match=match):
        Limiter(*bad)
