"""Metric names and where they go: one JSON line per step, and TensorBoard event files.

Names are `area/name_unit` constants, so that a chart and the code that feeds it cannot drift apart;
some get `/level` or `/environment/level/law` behind them.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import IO, Any

SUCCESS = "rollout/success_fraction"
REWARD = "rollout/reward_mean"
NUM_FINISHED = "rollout/num_finished"
NUM_UNFINISHED = "rollout/num_unfinished"
NUM_INFRA_FAULTS = "rollout/num_infra_faults"
POLICY_TOKENS = "rollout/policy_tokens_mean"
STEPS = "rollout/steps_mean"
TRAJECTORIES_PER_S = "rollout/trajectories_per_s"
OVER_BUDGET = "rollout/over_budget_fraction"
ROLLOUT_S = "rollout/rollout_s"
ITERATION_S = "rollout/iteration_s"
WORKER_RESTARTS = "rollout/num_worker_restarts"
NUM_GROUPS = "group/num_complete"
NUM_DROPPED_GROUPS = "group/num_dropped"
NUM_INFORMATIVE_GROUPS = "group/num_informative"
SFT_LOSS = "sft/loss"
SFT_FIXED_LOSS = "sft/fixed_loss"
"""On the same demonstrations, before the first step and after the last."""
SFT_PROBE_LOSS = "sft/probe_loss"
SFT_GRADIENT_NORM = "sft/gradient_norm"
SFT_TOKENS_PER_S = "sft/tokens_per_s"
EVAL_SUCCESS = "eval/success_fraction"
EVAL_TOKENS = "eval/policy_tokens_mean"
LEARNER = "learner/"
"""Before what the learner's parts report: `log_ratio_mean`, `entropy_mean`, `gradient_norm`, ..."""
LOSS = "learner/loss"
LEARNER_TOKENS = "learner/num_tokens"
LEARNER_POLICY_TOKENS = "learner/num_policy_tokens"
NUM_STALE_TOKENS = "learner/num_stale_tokens"
NUM_UNINFORMATIVE_GROUPS = "learner/num_uninformative_groups"
NUM_SKIPPED_STEPS = "learner/num_skipped_steps"
LEARNER_TOKENS_PER_S = "learner/tokens_per_s"
UPDATE_S = "learner/update_s"
STEP_S = "learner/optim_step_s"
AGREEMENT_MAX = "learner/agreement_max"
AGREEMENT_K3 = "learner/agreement_k3_mean"
AGREEMENT_TOKENS = "learner/agreement_num_tokens"
AGREEMENT_PINNED = "learner/agreement_num_pinned_sites"
STORE_TOKENS = "store/num_tokens"
STORE_INDEX_REBUILDS = "store/num_index_rebuilds"
STORE_FREE_BYTES = "store/free_bytes"
STORE_REFUSED = "store/num_refused"


class MetricsWriter:
    """Writes scalars under one folder; `step` is the iteration, from 0."""

    def __init__(self, folder: Path, *, jsonl: bool = True, tensorboard: bool = True) -> None:
        """Appends to `metrics.jsonl` and `tensorboard/` in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] | None = (folder / "metrics.jsonl").open("a") if jsonl else None
        self._board: Any = None
        if tensorboard:
            # Imported here: it costs a second and `import k3rl.metrics` must stay light.
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._board = EventFileWriter(str(folder / "tensorboard"))

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Record `scalars` for `step` in every sink."""
        now = time.time()
        if self._file is not None:
            self._file.write(json.dumps({"step": step, "time_s": now, **scalars}) + "\n")
            self._file.flush()
        if self._board is not None:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary

            values = [Summary.Value(tag=tag, simple_value=x) for tag, x in scalars.items()]
            event = Event(wall_time=now, step=step, summary=Summary(value=values))
            self._board.add_event(event)
            self._board.flush()

    def close(self) -> None:
        """Flush and close the sinks."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()
