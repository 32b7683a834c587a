"""The config of a run: one YAML file plus `a.b=value` overrides, strict, resolved, frozen.

Class defaults are the vetted settings; a YAML names only what it changes. A wrong key or type is
one `ConfigError` line naming the source, the key path and the nearest valid key. Units are in the
names.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from k3rl.errors import ConfigError
from k3rl.sections import (
    ClusterConfig,
    CurriculumConfig,
    EngineConfig,
    EnvConfig,
    EvaluationConfig,
    HarnessConfig,
    IntensityConfig,
    LearnerConfig,
    MetricsConfig,
    ObjectiveConfig,
    OptimiserConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
    SandboxConfig,
    Section,
    SftConfig,
    StoreConfig,
    ViewConfig,
    WeightsConfig,
    each_once,
)
from k3rl.types import JSON, JsonObject, digest_json


class Config(Section):
    """The root."""

    run: RunConfig = RunConfig()
    seed: int = 0
    policy: PolicyConfig = PolicyConfig()
    engine: EngineConfig = EngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    envs: Annotated[list[EnvConfig], Field(min_length=1), AfterValidator(each_once)]
    harness: HarnessConfig = HarnessConfig()
    sandbox: SandboxConfig = SandboxConfig()
    store: StoreConfig = StoreConfig()
    algorithm: Literal["none", "k2_5"] = "none"
    """none: trajectories are played, scored and stored; nothing is trained."""
    objective: ObjectiveConfig = ObjectiveConfig()
    intensity: IntensityConfig = IntensityConfig()
    learner: LearnerConfig = LearnerConfig()
    optimiser: OptimiserConfig = OptimiserConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    sft: SftConfig = SftConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    weights: WeightsConfig = WeightsConfig()
    cluster: ClusterConfig = ClusterConfig()
    view: ViewConfig = ViewConfig()
    metrics: MetricsConfig = MetricsConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.algorithm != "none" and self.engine.kind == "scripted":
            raise ValueError(
                f"algorithm: {self.algorithm} trains a policy; use engine.kind: native"
            )
        if self.engine.kind == "native" and not (self.policy.checkpoint or self.policy.model):
            raise ValueError("engine.kind: native needs policy.checkpoint or policy.model")
        return self

    @property
    def run_folder(self) -> Path:
        """Where the run lies."""
        return Path(self.run.folder) / self.run.name

    def absolute(self) -> Config:
        """The same with absolute folders: actors do not run in the caller's folder."""
        run = self.run.model_copy(update={"folder": str(Path(self.run.folder).absolute())})
        sandbox = self.sandbox.model_copy(update={"scratch": _absolute(self.sandbox.scratch)})
        files = {"model": self.policy.model, "checkpoint": self.policy.checkpoint}
        found = {name: _absolute(file) for name, file in files.items()}
        policy = self.policy.model_copy(update=found)
        return self.model_copy(update={"run": run, "sandbox": sandbox, "policy": policy})

    @property
    def identity(self) -> str:
        """Digest of what must not change when a run is carried on."""
        plain = self.model_dump(mode="json")
        sections = ("seed", "policy", "envs", "harness", "intensity", "curriculum", "algorithm")
        kept = {key: plain[key] for key in sections}
        kept["sandbox"] = plain["sandbox"]["backend"]
        kept["engine"] = [plain["engine"][key] for key in ("kind", "policies")]
        kept["groups"] = [plain["rollout"][key] for key in ("num_groups", "group_size", "split")]
        return digest_json(kept)

    def to_yaml(self) -> str:
        """The resolved config as YAML."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def _absolute(path: str | None) -> str | None:
    return path and str(Path(path).absolute())


_UNION_LABELS = ("float", "Schedule")


def load(path: Path | str, overrides: Iterable[str] = ()) -> Config:
    """Read a YAML file and apply `a.b=value` overrides, values in YAML syntax, in order.

    Raises ConfigError, one line.
    """
    path = Path(path)
    try:
        tree = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not text: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, got {type(tree).__name__}")
    return resolve(tree, str(path), overrides)


def resolve(tree: JsonObject, source: str, overrides: Iterable[str] = ()) -> Config:
    """A config from nested sections, which are changed by `overrides`; errors name `source`."""
    sources: dict[tuple[str, ...], str] = {}
    for override in overrides:
        sources[_apply(tree, override)] = f"override {override!r}"
    return _validate(tree, source, sources)


def _apply(tree: JsonObject, override: str) -> tuple[str, ...]:
    """Set one `a.b=value` in `tree`; list items are named by index (`envs.0.id`)."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r}: expected key.path=value")
    *parents, last = path = key.split(".")
    node: Any = tree
    for part in parents:
        node = _child(node, part, override)
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: {' '.join(str(error).split())}") from None
    node[_index(node, last, override) if isinstance(node, list) else last] = value
    return tuple(path)


def _child(node: Any, part: str, override: str) -> Any:
    if isinstance(node, list):
        child = node[_index(node, part, override)]
    else:
        child = node.setdefault(part, {})
    if not isinstance(child, dict | list):
        raise ConfigError(f"override {override!r}: {part} is a value, not a section")
    return child


def _index(node: list[Any], part: str, override: str) -> int:
    if not part.isdigit() or int(part) >= len(node):
        raise ConfigError(f"override {override!r}: {part!r} is not an index below {len(node)}")
    return int(part)


def _validate(tree: JsonObject, file: str, sources: dict[tuple[str, ...], str]) -> Config:
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        # A union reports one error per member; the deepest path is the user's own mistake.
        first = max(
            error.errors(), key=lambda item: (item["type"] == "extra_forbidden", len(item["loc"]))
        )
    where = tuple(str(part) for part in first["loc"] if part not in _UNION_LABELS)
    known = {key for key in sources if where[: len(key)] == key or key[: len(where)] == where}
    source = sources[max(known, key=len)] if known else file
    if first["type"] == "extra_forbidden":
        problem = f"unknown key; nearest valid key: {nearest_key('.'.join(where))}"
    elif first["type"] == "missing":
        problem = "missing"
    elif not where:
        raise ConfigError(f"{source}: {first['msg'].removeprefix('Value error, ')}") from None
    else:
        problem = f"{first['msg']}, got {first['input']!r}"
    raise ConfigError(f"{source}: {'.'.join(where)}: {problem}") from None


def nearest_key(wrong: str) -> str:
    """The valid key path most like `wrong`."""
    keys = list(_keys(Config, ""))
    plain = ".".join(part for part in wrong.split(".") if not part.isdigit())
    close = difflib.get_close_matches(plain, keys, n=1, cutoff=0.0)
    same_section = [key for key in keys if key.rpartition(".")[0] == plain.rpartition(".")[0]]
    leaf = difflib.get_close_matches(plain, same_section, n=1, cutoff=0.6)
    return (leaf or close)[0]


def _keys(model: type[BaseModel], prefix: str) -> Iterable[str]:
    for name, info in model.model_fields.items():
        yield prefix + name
        for inner in (info.annotation, *get_args(info.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from _keys(inner, f"{prefix}{name}.")


def from_json(value: JSON) -> Config:
    """A resolved config that crossed a process boundary."""
    return Config.model_validate(value)
