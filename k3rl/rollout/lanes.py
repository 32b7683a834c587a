"""Lanes of the native engine: which trajectory's model state lies where, and what it has read.

A lane is one slot of the model's StatePool beside rows of arrays: the tokens of the context, how
many of them the state has read (`num_fed`), and the request that is being served. A trajectory
keeps its lane between turns, so that a tool result costs only its own tokens; the lane that has
been idle longest goes to whoever needs one.

Axes: S lanes, T tokens of a context, V vocabulary ids.
"""

from __future__ import annotations

import time
from collections import OrderedDict

import numpy as np

from k3rl.types import Int32Array, TrajectoryId

UNREAD = -1
"""Version of a lane whose state has read nothing."""


class Lanes:
    """Rows of arrays, one per lane, and who owns them."""

    def __init__(self, num_lanes: int, max_tokens: int, vocab_size: int) -> None:
        """Every lane is free."""
        shape = (num_lanes, max_tokens)
        self.token_ids = np.zeros(shape, np.int32)
        """[S, T] the context, sampled tokens included."""
        self.logprobs = np.zeros(shape, np.float32)
        """[S, T] of the sampled tokens."""
        self.uniforms = np.zeros(shape, np.float64)
        """[S, T] the number that decides the token at each offset of the running request."""
        self.num_tokens = np.zeros(num_lanes, np.int64)
        """[S] tokens of the context."""
        self.num_fed = np.zeros(num_lanes, np.int64)
        """[S] tokens the model state has read; below `num_tokens` while a request runs."""
        self.num_sent = np.zeros(num_lanes, np.int64)
        """[S] tokens that were given out, or came with the request."""
        self.limit = np.zeros(num_lanes, np.int64)
        """[S] tokens of the context at which the request must end."""
        self.version = np.full(num_lanes, UNREAD, np.int64)
        """[S] the policy version that computed all of the state."""
        self.is_stop = np.zeros((num_lanes, vocab_size), bool)
        """[S, V] ids that end the running request."""
        self.is_greedy = np.zeros(num_lanes, bool)
        """[S] whether the running request takes the most likely ids."""
        self.left_s = np.full(num_lanes, -np.inf)
        """[S] when the last request ended at a stop id (monotonic clock), of idle lanes."""
        self._free = list(reversed(range(num_lanes)))
        self._idle: OrderedDict[TrajectoryId, int] = OrderedDict()
        self._busy: dict[TrajectoryId, int] = {}

    def num_left_since(self, time_s: float) -> int:
        """Idle lanes whose turn has ended since then: their trajectories are in their tools."""
        return int(np.count_nonzero(self.left_s > time_s))

    def lane_of(self, trajectory_id: TrajectoryId) -> int | None:
        """The lane a trajectory owns."""
        return self._busy.get(trajectory_id, self._idle.get(trajectory_id))

    def seat(self, trajectory_id: TrajectoryId) -> int | None:
        """Make the trajectory's own lane, or another, its busy lane; None when all are busy.

        A lane that was not its own has read nothing (`version` is UNREAD); the caller clears the
        model state before it feeds it.
        """
        lane = self._idle.pop(trajectory_id, None)
        if lane is None:
            if self._free:
                lane = self._free.pop()
            elif self._idle:
                _, lane = self._idle.popitem(last=False)
            else:
                return None
            self.forget(lane)
        self.left_s[lane] = -np.inf
        self._busy[trajectory_id] = lane
        return lane

    def leave(self, trajectory_id: TrajectoryId, has_stopped: bool = False) -> None:
        """The trajectory's request has ended; its lane is kept while nobody needs it more."""
        lane = self._busy.pop(trajectory_id, None)
        if lane is not None:
            self._idle[trajectory_id] = lane
            if has_stopped:
                self.left_s[lane] = time.monotonic()

    def forget(self, lane: int) -> None:
        """The lane's state counts for nothing any more."""
        self.num_fed[lane] = 0
        self.version[lane] = UNREAD

    def has_read(self, lane: int, context: Int32Array) -> bool:
        """Whether the lane's state is that of a proper beginning of `context`."""
        count = int(self.num_fed[lane])
        return 0 < count < len(context) and np.array_equal(
            self.token_ids[lane, :count], context[:count]
        )

    def hold(self, lane: int, context: Int32Array) -> None:
        """Write a context into the lane; what it has read of it stays read."""
        self.token_ids[lane, : len(context)] = context
        self.num_tokens[lane] = self.num_sent[lane] = len(context)
