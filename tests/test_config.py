"""The config is strict, and its errors are one line that says where."""

from pathlib import Path

import pytest
import yaml

from k3rl import config as configs
from k3rl.config import Config
from k3rl.errors import ConfigError
from k3rl.sections import Schedule, value_at

ROOT = Path(__file__).parents[1]
SHIPPED = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "model")
BASE = "envs: [{id: k3rl/Reason-v0, kwargs: {preset: arithmetic}}]\n"


@pytest.fixture
def base(tmp_path):
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_shipped_configs_load_and_round_trip(path, tmp_path):
    config = configs.load(path)
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(config.to_yaml())
    assert configs.load(resolved) == config
    assert configs.from_json(yaml.safe_load(config.to_yaml())) == config
    assert len(path.read_text().splitlines()) <= 60


def test_root_has_the_sections_of_the_design():
    assert set(Config.model_fields) == {
        "run", "seed", "policy", "engine", "rollout", "envs", "harness", "sandbox", "store",
        "algorithm", "objective", "intensity", "learner", "optimiser", "curriculum", "weights",
        "cluster", "view", "metrics", "evaluation", "sft",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rollout: {num_grops: 3}", "unknown key; nearest valid key: rollout.num_groups"),
        ("rolout: {}", "rolout: unknown key; nearest valid key: rollout"),
        ("rollout: {group_size: four}", "rollout.group_size: Input should be a valid integer"),
        ("seed: 1.5", "seed: Input should be a valid integer, got 1.5"),
        ("run: {ledger: 1}", "run.ledger: Input should be a valid boolean, got 1"),
        ("sandbox: {backend: vm}", "should be 'bwrap', 'docker', 'landlock' or 'process'"),
        ("intensity: {levels: [medium]}", "levels.0: Input should be 'low', 'high' or 'max'"),
        ("objective: {log_ratio_sq_coef: {start: 1, end: 2}}", "log_ratio_sq_coef.steps: missing"),
        (
            "objective: {log_ratio_sq_coef: {start: 1, end: 2, stepz: 3}}",
            "nearest valid key: objective.log_ratio_sq_coef.steps",
        ),
        ("algorithm: grpo", "algorithm: Input should be 'none' or 'k2_5', got 'grpo'"),
        ("run: {name: ../up}", "run.name: String should match pattern"),
    ],
)  # fmt: skip
def test_a_wrong_key_or_type_is_one_line_with_file_and_path(tmp_path, text, message):
    path = tmp_path / "wrong.yaml"
    path.write_text(BASE + text)
    with pytest.raises(ConfigError) as caught:
        configs.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "envs: []", "{}"])
def test_broken_files_are_one_line(tmp_path, text):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=str(path)) as caught:
        configs.load(path)
    assert "\n" not in str(caught.value)


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        configs.load(tmp_path / "none.yaml")


def test_overrides_take_yaml_values_and_reach_into_lists(base):
    overrides = ["rollout.num_groups=7", "engine.policies=[oracle, null]", "envs.0.weight=2.5"]
    config = configs.load(base, [*overrides, "cluster.address=null"])
    assert config.rollout.num_groups == 7
    assert config.engine.policies == ["oracle", "null"]
    assert config.envs[0].weight == 2.5


@pytest.mark.parametrize(
    "override",
    [
        "rollout.num_grops=3",
        "rollout",
        "=3",
        "envs.3.id=x",
        "seed.x=1",
        "seed=[",
        "engine.policies.0.x=1",
        "store.lease_ttl_s=.inf",
        "intensity.levels=[max, max]",
        "envs=[{id: a/B-v0}, {id: a/B-v0}]",
    ],
)
def test_a_wrong_override_is_named(base, override):
    with pytest.raises(ConfigError, match="override") as caught:
        configs.load(base, [override])
    assert override in str(caught.value)
    assert "\n" not in str(caught.value)


def test_schedules_are_linear_then_flat(base):
    config = configs.load(base, ["objective.log_ratio_sq_coef={start: 1.0, end: 0.0, steps: 4}"])
    coef = config.objective.log_ratio_sq_coef
    assert isinstance(coef, Schedule)
    assert [value_at(coef, step) for step in (0, 1, 4, 9)] == [1.0, 0.75, 0.0, 0.0]
    assert value_at(0.5, 3) == 0.5


def test_identity_ignores_what_may_change_when_a_run_is_carried_on(base):
    first = configs.load(base)
    longer = configs.load(base, ["run.iterations=9", "rollout.num_workers=3"])
    paced = configs.load(base, ["engine.tokens_per_s=10"])
    assert first.identity == longer.identity == paced.identity
    for change in ("seed=1", "curriculum.first_task=3", "sandbox.backend=process"):
        assert configs.load(base, [change]).identity != first.identity


def test_absolute_makes_folders_independent_of_where_a_process_runs(base):
    config = configs.load(base, ["sandbox.scratch=here"]).absolute()
    assert config.run_folder.is_absolute()
    assert Path(config.sandbox.scratch).is_absolute()
    assert configs.load(base).absolute().sandbox.scratch is None


def test_a_file_that_is_not_text_is_one_line(tmp_path):
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not text"):
        configs.load(path)
