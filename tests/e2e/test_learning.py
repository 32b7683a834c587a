"""Fine-tuning, reinforcement learning and evaluation through the command line, small."""

import json
import math
from pathlib import Path

import pytest

from k3rl.learner.checkpoint import Checkpoints
from k3rl.store.protocol import Ref
from k3rl.store.reader import StoreReader
from k3rl.types import Author

ROOT = Path(__file__).parents[2]
COLD_START = ROOT / "tests/data/k3_nano_sft.safetensors"
FEW = (
    "run.name=l",
    "run.iterations=3",
    f"policy.checkpoint={COLD_START}",
    "rollout.num_groups=4",
    "rollout.group_size=4",
    "evaluation.num_tasks=4",
    "evaluation.num_greedy_tasks=2",
    "learner.num_threads=1",
)
LOCAL = "cluster.backend=local"
pytestmark = pytest.mark.sandbox


def learn(user, *overrides, **options):
    return user.run("train", str(ROOT / "configs/smoke.yaml"), *FEW, *overrides, **options)


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


def check_updates(folder):
    """Versions rise by one, nobody is trained on twice, every span's version was published."""
    reader = StoreReader(folder / "store")
    updates = reader.updates()
    assert [row.update for row in updates] == list(range(len(updates)))
    assert [row.policy_version_out for row in updates] == list(range(1, len(updates) + 1))
    members = [id for row in updates for id in row.members]
    assert len(members) == len(set(members))
    for row in updates:
        assert math.isfinite(row.gradient_norm)
        assert len(row.members) == len(row.advantages) == len(row.loss)
        assert {reader.get(id).header.key.run_id for id in row.members} == {"l"}
    versions = set()
    for trajectory in reader.trajectories():
        spans = reader.read(Ref(trajectory.id), ("spans",)).spans
        policy = [span for span in spans if span.author is Author.POLICY]
        assert all(span.state_version == span.policy_version for span in policy)
        versions |= {span.policy_version for span in policy}
    assert versions == set(range(len(updates) + 1))
    return updates


def test_a_run_learns_evaluates_and_is_over_when_it_is_over(user):
    out = learn(user, LOCAL)
    assert "evaluation before iteration 3" in out
    folder = user.folder / "runs" / "l"
    updates = check_updates(folder)
    assert updates
    for row in rows(folder):
        if "learner/agreement_max" in row:
            assert row["learner/agreement_max"] <= 2e-4
            assert row["learner/agreement_num_tokens"] > 0
    budgets = {t.header.budget for t in StoreReader(folder / "store").trajectories()}
    assert len(budgets - {None}) >= 2
    assert json.loads((folder / "budgets.json").read_text())["environments"]
    before = StoreReader(folder / "store").trajectories()
    learn(user, LOCAL)
    assert StoreReader(folder / "store").trajectories() == before

    scores = user.run(
        "eval", str(folder), "k3rl/Reason-v0", LOCAL,
        "evaluation.num_tasks=3", "evaluation.num_samples=2", "evaluation.num_greedy_tasks=0",
    )  # fmt: skip
    assert "pass@2" in scores
    assert scores.count("k3rl/Reason-v0") == 2


@pytest.mark.ray
def test_a_driver_killed_after_an_update_carries_on_and_trains_on_nothing_twice(user, tools):
    folder = user.folder / "runs" / "l"
    command = ["train", str(ROOT / "configs/smoke.yaml"), *FEW, "cluster.backend=ray"]
    process = user.start(*command)

    def has_trained():
        return Checkpoints(folder / "checkpoints").newest()

    tools.wait_for(has_trained, timeout_s=120)
    process.kill()
    process.wait()
    actors = tools.children_titled(process, "ray::")
    assert not actors
    out = user.run(*command)
    assert "evaluation before iteration 3" in out
    check_updates(folder)
    fsck = user.run("traj", "fsck", "--run", str(folder), "--ledger", str(folder / "ledger"))
    assert " 0 lost" in fsck


def test_fine_tuning_plays_demonstrations_and_its_loss_falls(user):
    out = user.run(
        "sft", str(ROOT / "configs/nano_sft.yaml"), LOCAL, "run.name=s", "learner.num_threads=1",
        f"policy.model={ROOT / 'configs/model/k3_nano.yaml'}",
        "rollout.num_groups=4", "sft.num_steps=4", "sft.batch_tokens=1024",
    )  # fmt: skip
    folder = user.folder / "runs" / "s"
    losses = [row["sft/loss"] for row in rows(folder / "sft") if "sft/loss" in row]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.05
    fixed = [row["sft/fixed_loss"] for row in rows(folder / "sft") if "sft/fixed_loss" in row]
    assert len(fixed) == 2
    assert fixed[1] < fixed[0] - 0.05
    assert "8 demonstrations" in out
    assert (folder / "sft.safetensors").stat().st_size < 2**20
