"""`k3rl train` with harnesses drawn per task group and contexts that are summed up."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from k3rl import config as configs
from k3rl.cli.sft import rewarded
from k3rl.envs.harness.drawing import harness_of, harnesses
from k3rl.envs.harness.session import was_summary
from k3rl.store.protocol import Ref
from k3rl.store.reader import StoreReader

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.sandbox
HARNESS = """{
  context: {kind: compaction, fraction: 0.3},
  randomize: {
    presets: {none: 1.0, shell_agent: 1.0, editor_agent: 1.0, patch_agent: 1.0},
    variants: [{weight: 1.0}, {weight: 1.0, memory: {file: LOG.md}}]
  }
}""".replace("\n", " ")
RUN = (
    f"harness={HARNESS}",
    "engine.policies=[oracle]",
    "rollout.num_groups=8",
    "envs=[{id: k3rl/FileHunt-v0}]",
)


def test_a_run_in_drawn_harnesses_is_solved_stored_and_replayed(user):
    out = user.train(*RUN)
    assert "1.00" in next(line for line in out.splitlines() if "oracle" in line)
    config = configs.load(user.run_folder / "config.yaml")
    settings = config.harness.model_dump(mode="json")
    reader = StoreReader(user.run_folder / "store")
    trajectories = reader.trajectories()
    groups, summaries = defaultdict(set), 0
    for trajectory in trajectories:
        header = trajectory.header
        drawn = harness_of(settings, config.seed, header.task)
        assert header.digests["harness"] == drawn.digest
        groups[header.key.group_index].add(drawn.digest)
        assert trajectory.outcome.reward == 1.0
        for step in trajectory.steps:
            if was_summary(step.env_state):
                summaries += 1
                read = reader.read(Ref(trajectory.id, context=step.context))
                assert read.loss_mask[step.token_start : step.token_end].all()
    assert len(trajectories) == 16
    assert all(len(digests) == 1 for digests in groups.values())
    every = {harness.digest for harness in harnesses(settings)}
    assert 1 < len(set.union(*groups.values())) <= len(every)
    assert summaries == sum(trajectory.num_contexts - 1 for trajectory in trajectories) > 0
    replayed = user.run("replay", *(t.id for t in trajectories))
    assert replayed.count("calls: identical") >= len(trajectories)
    assert "differs" not in replayed
    assert "0 lost" in user.run("traj", "fsck", "--ledger", str(user.run_folder / "ledger"))
    run = config.run.model_copy(update={"folder": str(user.folder / "runs")})
    demonstrations = rewarded(config.model_copy(update={"run": run}), trajectories)
    assert len(demonstrations) == sum(trajectory.num_contexts for trajectory in trajectories)
    num_tokens = sum(int(each.loss_mask.sum()) for each in demonstrations)
    assert num_tokens == sum(trajectory.num_policy_tokens for trajectory in trajectories)
    longest = max(trajectories, key=lambda trajectory: trajectory.num_contexts)
    assert "Summary so far" in user.run("traj", "show", longest.id, "--tokens")


def test_an_update_trains_on_every_context(user):
    """The nano policy writes its own summaries; engine and learner agree on their tokens."""
    user.run(
        "train",
        str(ROOT / "configs/smoke.yaml"),
        "run.name=l",
        "run.iterations=2",
        f"policy.checkpoint={ROOT / 'tests/data/k3_nano_sft.safetensors'}",
        "rollout.num_groups=2",
        "rollout.group_size=4",
        "intensity={levels: [max]}",
        "evaluation={num_tasks: 0}",
        "learner.num_threads=1",
        "envs=[{id: k3rl/FileHunt-v0}]",
        "harness={max_turns: 4, context: {kind: compaction, fraction: 0.2}}",
        "cluster.backend=local",
    )
    folder = user.folder / "runs" / "l"
    reader = StoreReader(folder / "store")
    updates = reader.updates()
    members = [reader.get(id) for row in updates for id in row.members]
    summed = [member for member in members if member.num_contexts > 1]
    assert summed
    for member in summed:
        refs = [Ref(member.id, context=context) for context in range(member.num_contexts)]
        masks = [reader.read(ref).loss_mask for ref in refs]
        assert sum(int(mask.sum()) for mask in masks) == member.num_policy_tokens
        assert masks[0].any()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert 0 < rows[0]["learner/agreement_max"] < 2e-4
    first = zip(updates[0].members, updates[0].advantages, strict=True)
    trained = [reader.get(id) for id, advantage in first if advantage != 0.0]
    num_tokens = sum(member.num_policy_tokens for member in trained)
    assert rows[0]["learner/num_policy_tokens"] == num_tokens > 0


def test_a_run_that_is_carried_on_draws_the_same(user):
    user.train(*RUN, "run.iterations=1")
    reader = StoreReader(user.run_folder / "store")
    before = {t.id: t.header.digests["harness"] for t in reader.trajectories()}
    user.train(*RUN, "run.iterations=2")
    reader = StoreReader(user.run_folder / "store")
    after = {t.id: t.header.digests["harness"] for t in reader.trajectories()}
    assert len(after) == 2 * len(before)
    assert before.items() <= after.items()


def test_a_harness_that_does_not_fit_is_refused_before_the_start(user):
    wrong = "harness={sub_agents: {tools: [fly]}}"
    assert "harness.sub_agents.tools: no tool fly" in user.train(wrong, code=2)
    assert not user.run_folder.exists()
