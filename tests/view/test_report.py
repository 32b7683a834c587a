"""The page of a run, from files like those a run writes."""

import json
import re
from html.parser import HTMLParser

from k3rl import metrics
from k3rl.evaluation import Score
from k3rl.types import to_plain
from k3rl.view.report import Check, write_report


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.names = []

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)


def make_run(folder, num_rows=5):
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(num_rows):
            levels = {"low": step / 10, "max": 1.0}
            row = {f"{metrics.REWARD}/{level}": value for level, value in levels.items()}
            file.write(json.dumps({"step": step, metrics.REWARD: 0.3, **row}) + "\n")
    score = Score("k3rl/X-v0", "low", 1.0, 200, 200, 0.5, 0.43, 0.57, 0.5, 1, 61.5)
    (folder / "evaluation-0003.json").write_text(json.dumps(to_plain([score], list[Score])))


def test_a_report_has_a_curve_per_level_the_scores_and_the_checks(tmp_path):
    make_run(tmp_path)
    checks = [Check("a <b>", "1", ">= 2", False), Check("c", "3", ">= 2", True)]
    path = write_report(tmp_path, "run <1>", checks)
    page = path.read_text()
    tags = Tags()
    tags.feed(page)
    assert tags.names.count("polyline") == 2
    assert tags.names.count("svg") == 1
    assert "run &lt;1&gt;" in page
    assert "a &lt;b&gt;" in page
    assert re.search(r"class=bad>NO", page)
    assert "61.5" in page
    assert "Evaluation before iteration 3" in page


def test_it_asks_nothing_of_the_network_and_runs_nothing(tmp_path):
    make_run(tmp_path)
    page = write_report(tmp_path, "r").read_text()
    assert "<script" not in page
    assert "http" not in page


def test_one_iteration_and_a_flat_curve_have_a_place(tmp_path):
    make_run(tmp_path, num_rows=1)
    assert "nan" not in write_report(tmp_path, "r").read_text()
