"""Metrics reach both sinks."""

import json

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from k3rl import metrics
from k3rl.metrics import MetricsWriter


def test_scalars_reach_jsonl_and_tensorboard(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(0, {metrics.REWARD: 0.25, metrics.SUCCESS: 0.5})
    writer.write(1, {metrics.REWARD: 0.75})
    writer.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line[metrics.REWARD]) for line in lines] == [(0, 0.25), (1, 0.75)]
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(e.step, e.value) for e in board.Scalars(metrics.REWARD)] == [(0, 0.25), (1, 0.75)]
    assert [e.value for e in board.Scalars(metrics.SUCCESS)] == [0.5]


def test_names_are_area_slash_name():
    names = [value for key, value in vars(metrics).items() if key.isupper() and key != "IO"]
    assert names
    assert all(len(name.split("/")) == 2 for name in names)
    assert len(names) == len(set(names))
