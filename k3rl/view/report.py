"""`report.html` of a run: curves per level, evaluations and checks on one page, no script, no host.

Everything comes from the run folder: `metrics.jsonl` and `evaluation-*.json`. The page is plain
HTML with inline SVG, so that it opens from a file and can be sent by mail.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from k3rl import metrics
from k3rl.evaluation import Score
from k3rl.types import JsonObject, from_plain

WIDTH, HEIGHT, MARGIN = 420, 220, 40
COLOURS = {"low": "#2a7f62", "high": "#b07d12", "max": "#3454b4"}
OTHER_COLOUR = "#555555"
CURVES = (
    ("Reward", metrics.REWARD),
    ("Success", metrics.SUCCESS),
    ("Sampled tokens per trajectory", metrics.POLICY_TOKENS),
    ("Share over budget", metrics.OVER_BUDGET),
)
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color:#1c1c1c}table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .8rem;"
    "text-align:left;border-bottom:1px solid #ddd}td.n,th.n{text-align:right}"
    "figure{display:inline-block;margin:.5rem}figcaption{font-weight:600}"
    ".bad{color:#a11}.good{color:#2a7f62}"
)


@dataclass(frozen=True, slots=True)
class Check:
    """One assertion about a run, as a smoke test reports it."""

    name: str
    value: str
    bar: str
    is_met: bool


def write_report(folder: Path, title: str, checks: Sequence[Check] = ()) -> Path:
    """Write `report.html` into a run folder; returns its path."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    parts = [f"<h1>{escape(title)}</h1>", _checks_table(checks), "<h2>Training</h2>"]
    parts += [_figure(caption, _series(rows, name)) for caption, name in CURVES]
    for path in sorted(folder.glob("evaluation-*.json")):
        iteration = int(path.stem.removeprefix("evaluation-"))
        scores = from_plain(list[Score], json.loads(path.read_text()))
        parts.append(f"<h2>Evaluation before iteration {iteration}</h2>{_scores_table(scores)}")
    page = f"<!doctype html><meta charset=utf-8><title>{escape(title)}</title>"
    path = folder / "report.html"
    path.write_text(f"{page}<style>{STYLE}</style><body>{''.join(parts)}</body>\n")
    return path


def _series(rows: Sequence[JsonObject], name: str) -> dict[str, list[tuple[int, float]]]:
    """Points (iteration, value) of `name` by level."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for key, value in row.items():
            base, _, level = key.rpartition("/")
            if base == name:
                found.setdefault(level, []).append((row["step"], value))
    return found


def _figure(caption: str, series: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    points = [point for line in series.values() for point in line]
    if not points:
        return ""
    last = max(max(step for step, _ in points), 1)
    low, high = min(0.0, *(y for _, y in points)), max(y for _, y in points)
    high = high if high > low else low + 1.0

    def place(step: int, value: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * step / last
        y = HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (value - low) / (high - low)
        return f"{x:.1f},{y:.1f}"

    marks = [_axis(last, low, high)]
    for number, (level, line) in enumerate(sorted(series.items())):
        colour = COLOURS.get(level, OTHER_COLOUR)
        path = " ".join(place(step, value) for step, value in line)
        marks.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>'
            f'<text x="{WIDTH - MARGIN + 4}" y="{MARGIN + 16 * number}" fill="{colour}"'
            f' font-size="12">{escape(level)}</text>'
        )
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    title = f"<figcaption>{escape(caption)}</figcaption>"
    return f"<figure>{title}<svg {box}>{''.join(marks)}</svg></figure>"


def _axis(last: int, low: float, high: float) -> str:
    bottom, right = HEIGHT - MARGIN, WIDTH - MARGIN
    lines = f'<path d="M{MARGIN},{MARGIN}V{bottom}H{right}" fill="none" stroke="#999"/>'
    texts = [
        (MARGIN - 4, MARGIN + 4, f"{high:.3g}", "end"),
        (MARGIN - 4, bottom, f"{low:.3g}", "end"),
        (MARGIN, bottom + 16, "0", "middle"),
        (right, bottom + 16, f"iteration {last}", "middle"),
    ]
    labels = [
        f'<text x="{x}" y="{y}" font-size="11" fill="#555" text-anchor="{anchor}">{text}</text>'
        for x, y, text, anchor in texts
    ]
    return lines + "".join(labels)


def _checks_table(checks: Sequence[Check]) -> str:
    if not checks:
        return ""
    rows = [
        f"<tr><td>{escape(check.name)}<td class=n>{escape(check.value)}<td>{escape(check.bar)}"
        f"<td class={'good' if check.is_met else 'bad'}>{'yes' if check.is_met else 'NO'}"
        for check in checks
    ]
    return f"<table><tr><th>check<th class=n>value<th>bar<th>met{''.join(rows)}</table>"


def _scores_table(scores: Sequence[Score]) -> str:
    rows = [
        f"<tr><td>{escape(s.env_id)}<td>{escape(s.level)}<td class=n>{s.temperature:g}"
        f"<td class=n>{s.num_tasks}<td class=n>{s.success:.3f}<td class=n>{s.low:.3f}-{s.high:.3f}"
        f"<td class=n>{s.num_tokens:.1f}"
        for s in scores
    ]
    names = "<th>environment<th>level" + "".join(
        f"<th class=n>{name}" for name in ("T", "tasks", "success", "95 %", "tokens")
    )
    return f"<table><tr>{names}{''.join(rows)}</table>"
