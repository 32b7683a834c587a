"""Lanes: who owns one, who loses it, and what it has read."""

import time

import numpy as np

from k3rl.rollout.lanes import UNREAD, Lanes


def context(*ids):
    return np.array(ids, np.int32)


def read(lanes, lane, *ids):
    """As after an iteration that fed all of `ids`."""
    lanes.hold(lane, context(*ids))
    lanes.num_fed[lane] = len(ids)
    lanes.version[lane] = 3


def test_a_trajectory_keeps_its_lane_until_another_needs_it_most():
    lanes = Lanes(2, 8, 4)
    a, b = lanes.seat("a"), lanes.seat("b")
    assert {a, b} == {0, 1}
    read(lanes, a, 1, 2)
    read(lanes, b, 3)
    assert lanes.seat("c") is None
    lanes.leave("b")
    lanes.leave("a")
    assert lanes.lane_of("a") == a
    assert lanes.seat("b") == b
    assert lanes.num_fed[b] == 1
    lanes.leave("b")
    assert lanes.seat("c") == a, "a has been idle longest"
    assert (lanes.num_fed[a], lanes.version[a]) == (0, UNREAD)
    assert lanes.lane_of("a") is None
    assert lanes.num_fed[b] == 1


def test_a_state_is_good_for_a_longer_context_that_begins_with_what_it_read():
    lanes = Lanes(1, 8, 4)
    lane = lanes.seat("a")
    assert not lanes.has_read(lane, context(1, 2))
    read(lanes, lane, 1, 2)
    assert lanes.has_read(lane, context(1, 2, 3))
    assert not lanes.has_read(lane, context(1, 2))
    assert not lanes.has_read(lane, context(1, 3, 2))
    lanes.forget(lane)
    assert not lanes.has_read(lane, context(1, 2, 3))


def test_only_turns_that_have_just_ended_count_as_in_their_tools():
    lanes = Lanes(3, 8, 4)
    for name in "abc":
        lanes.seat(name)
    before = time.monotonic() - 1e-3
    lanes.leave("a", has_stopped=True)
    lanes.leave("b", has_stopped=True)
    lanes.leave("c")
    assert lanes.num_left_since(before) == 2
    assert lanes.num_left_since(time.monotonic() + 1) == 0
    lanes.seat("a")
    assert lanes.num_left_since(before) == 1
