"""What `k3rl smoke` asserts, each check with its value and its bar."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from k3rl import metrics
from k3rl.config import Config
from k3rl.controller import Summary
from k3rl.evaluation import Score, mean_success, mean_tokens
from k3rl.groups import is_success
from k3rl.store.audit import compare_ledger
from k3rl.store.protocol import Ref
from k3rl.store.reader import StoreReader
from k3rl.types import Author, Trajectory
from k3rl.view.report import Check

LIMIT_S, SCRATCH_LIMIT_S = 300.0, 1800.0
MEMORY_LIMIT_BYTES = 6 << 30
MIN_TASKS = 200
"""Held-out tasks per environment and level."""


def sft_loss_falls(folder: Path) -> Check:
    """Loss on the same demonstrations, before fine-tuning and after it."""
    rows = [row for row in _rows(folder / "sft") if metrics.SFT_FIXED_LOSS in row]
    first, last = (rows[index][metrics.SFT_FIXED_LOSS] for index in (0, -1))
    return Check("fine-tuning loss", f"{first:.4f} -> {last:.4f}", "falls", last < first)


def training(settings: Config) -> list[Check]:
    """Updates were made, each with a step, on tokens, and with tokens compared before it."""
    rows = [row for row in _rows(settings.run_folder) if metrics.LOSS in row]
    least = settings.run.iterations // 2
    skipped = sum(row[metrics.NUM_SKIPPED_STEPS] for row in rows)
    empty = sum(row[metrics.LEARNER_POLICY_TOKENS] == 0 for row in rows)
    unseen = sum(row[metrics.AGREEMENT_TOKENS] == 0 for row in rows)
    return [
        Check("updates", str(len(rows)), f">= {least}", len(rows) >= least),
        Check(
            "updates without step, tokens or comparison",
            f"{skipped:.0f}, {empty}, {unseen}",
            "0, 0, 0",
            skipped == empty == unseen == 0,
        ),
    ]


def learning(summary: Summary) -> list[Check]:
    """What reinforcement learning did to held-out success and tokens."""
    before, after = _ends(summary)
    cold, warm = mean_success(before), mean_success(after)
    cold_greedy, warm_greedy = mean_success(before, 0.0), mean_success(after, 0.0)
    low, high = mean_tokens(after, level="low"), mean_tokens(after, level="max")
    low_before = mean_tokens(before, level="low")
    gap = mean_success(after, level="max") - mean_success(after, level="low")
    tasks = min(score.num_valid for score in (*before, *after) if score.temperature == 1.0)
    return [
        Check("held-out tasks per cell, T = 1", str(tasks), f">= {MIN_TASKS}", tasks >= MIN_TASKS),
        Check("success before, T = 1", f"{cold:.3f}", "0.35-0.65", 0.35 <= cold <= 0.65),
        Check("success after, T = 1", f"{warm:.3f}", ">= 0.85 (aim 0.95)", warm >= 0.85),
        Check("rise, T = 1", f"{warm - cold:+.3f}", ">= 0.25", warm - cold >= 0.25),
        Check(
            "greedy success",
            f"{cold_greedy:.3f} -> {warm_greedy:.3f}",
            ">= 0.90, not below before",
            warm_greedy >= max(0.90, cold_greedy),
        ),
        Check("tokens, low / max", f"{low / high:.3f}", "<= 0.60", low <= 0.60 * high),
        Check("success, max - low", f"{gap:+.3f}", "<= 0.10", gap <= 0.10),
        Check(
            "tokens of low, after / before",
            f"{low / low_before:.3f}",
            "<= 0.75",
            low <= 0.75 * low_before,
        ),
    ]


def control(summary: Summary) -> list[Check]:
    """With permuted rewards there is nothing to learn."""
    before, after = _ends(summary)
    cold, rise = mean_success(before), mean_success(after) - mean_success(before)
    return [
        Check("success before, T = 1", f"{cold:.3f}", "0.35-0.65", 0.35 <= cold <= 0.65),
        Check("rise with permuted rewards, T = 1", f"{rise:+.3f}", "<= 0.05", rise <= 0.05),
    ]


def machinery(settings: Config, summary: Summary, killed: int | None) -> list[Check]:
    """Agreement, the kill, the ledger, partial rollouts and replay."""
    folder = settings.run_folder
    rows = _rows(folder)
    worst = max((row.get(metrics.AGREEMENT_MAX, 0.0) for row in rows), default=0.0)
    mean_k3 = max((row.get(metrics.AGREEMENT_K3, 0.0) for row in rows), default=0.0)
    compared = sum(row.get(metrics.AGREEMENT_TOKENS, 0.0) for row in rows)
    settled = settings.learner
    reader = StoreReader(folder / "store")
    ledger = compare_ledger(reader.root, folder / "ledger", reader)
    crossed = next((t.id for t in summary.trajectories if _crosses_versions(reader, t)), "none")
    return [
        Check(
            f"log-prob agreement over {compared:.0f} tokens, max",
            f"{worst:.1e}",
            f"<= {settled.agreement_max:g}",
            compared > 0 and worst <= settled.agreement_max,
        ),
        Check(
            "log-prob agreement, mean k3",
            f"{mean_k3:.1e}",
            f"<= {settled.agreement_k3:g}",
            mean_k3 <= settled.agreement_k3,
        ),
        Check(
            "a worker was SIGKILLed and replaced",
            f"{summary.num_restarts} restarts",
            ">= 1",
            killed is not None and summary.num_restarts >= 1,
        ),
        Check("ledger equals store", ledger.summary(), "exact", ledger.is_exact),
        Check("a trajectory paused across versions", crossed[:12], ">= 1", crossed != "none"),
        _replay(settings, reader, summary.trajectories),
    ]


def resources(wall_s: float, peak_bytes: int, limit_s: float, limit_bytes: int) -> list[Check]:
    """Wall time and peak memory of the whole process tree."""
    gib = 1 << 30
    return [
        Check("wall time", f"{wall_s:.0f} s", f"<= {limit_s:.0f} s", wall_s <= limit_s),
        Check(
            "peak memory",
            f"{peak_bytes / gib:.2f} GiB",
            f"<= {limit_bytes / gib:.0f} GiB",
            0 < peak_bytes <= limit_bytes,
        ),
    ]


def _ends(summary: Summary) -> tuple[Sequence[Score], Sequence[Score]]:
    """The first and the last evaluation."""
    iterations = sorted(summary.evaluations)
    return summary.evaluations[iterations[0]], summary.evaluations[iterations[-1]]


def _crosses_versions(reader: StoreReader, trajectory: Trajectory) -> bool:
    if not trajectory.steps:
        return False
    refs = [Ref(trajectory.id, context=context) for context in range(trajectory.num_contexts)]
    spans = [span for ref in refs for span in reader.read(ref, ("spans",)).spans]
    versions = {span.policy_version for span in spans if span.author is Author.POLICY}
    return len(versions) > 1


def _replay(settings: Config, reader: StoreReader, played: Iterable[Trajectory]) -> Check:
    """Replay the solved trajectory with the most steps."""
    from k3rl.replay.verify import replay
    from k3rl.rollout.worker import make_backend, make_renderer, make_session, sandbox_spec

    solved = [t for t in played if is_success(t.outcome)]
    if not solved:
        return Check("replay in a fresh sandbox", "nothing was solved", "identical", False)
    chosen = max(solved, key=lambda t: len(t.steps))
    env = make_session(settings, chosen.header.task)

    async def go() -> bool:
        backend = make_backend(settings)
        try:
            spec, renderer = sandbox_spec(settings, env), make_renderer(settings)
            report = await replay(reader, chosen.id, env, backend, spec, renderer)
        finally:
            await backend.aclose()
        return report.is_identical

    word = "identical" if asyncio.run(go()) else "divergent"
    value = f"{len(chosen.steps)} steps {word}"
    return Check("replay in a fresh sandbox", value, "identical", word == "identical")


def _rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
