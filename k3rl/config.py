"""The config of a run: one YAML file plus `a.b=value` overrides, strict, resolved, frozen.

Class defaults are the vetted settings; a YAML names only what it changes. A wrong key or type is
one `ConfigError` line naming the source, the key path and the nearest valid key. Units are in the
names.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from k3rl.errors import ConfigError
from k3rl.types import JSON, JsonObject, digest_json

Level = Literal["low", "high", "max"]


class Section(BaseModel):
    """Base of every section: unknown keys and loose types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Schedule(Section):
    """A number that changes linearly from `start` to `end` over `steps` iterations, then stays."""

    start: float
    end: float
    steps: Annotated[int, Field(ge=1)]

    def at(self, step: int) -> float:
        """The value at iteration `step` (from 0)."""
        return self.start + (self.end - self.start) * min(step / self.steps, 1.0)


Number = float | Schedule
ScriptName = Annotated[str, BeforeValidator(lambda name: "null" if name is None else name)]
"""An unquoted `null` in YAML means the script of that name."""


def value_at(number: Number, step: int) -> float:
    """A number or the present value of its schedule."""
    return number.at(step) if isinstance(number, Schedule) else number


def _each_once(items: list[Any]) -> list[Any]:
    """A list of names, or of entries with an id, that names nothing twice."""
    names = [getattr(item, "id", item) for item in items]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{twice[0]} stands here more than once")
    return items


class RunConfig(Section):
    """What the run is called, where it lies and how long it goes on."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "debug"
    """Also the run_id in every trajectory's identity: same name and seed, same trajectories."""
    folder: str = "runs"
    """The run lies in `folder`/`name`; an existing run with the same config is carried on."""
    iterations: Annotated[int, Field(ge=1)] = 1
    ledger: bool = False
    """True: workers note every acknowledgement under `<run>/ledger`, for audits of the store."""


class PolicyConfig(Section):
    """The policy; with a scripted engine only its tokenizer matters."""

    tokenizer: Literal["nano"] = "nano"


class EngineConfig(Section):
    """The rollout engine."""

    kind: Literal["scripted"] = "scripted"
    policies: Annotated[list[ScriptName], Field(min_length=1)] = ["oracle"]
    """Scripted: sample i of a group plays policies[i mod len]: oracle, random, null."""
    delta_tokens: Annotated[int, Field(ge=1)] = 32
    """Scripted: tokens per delta."""
    tokens_per_s: Annotated[float, Field(gt=0)] | None = None
    """Scripted: pace of one trajectory; null: as fast as it goes."""


class RolloutConfig(Section):
    """How many trajectories are played, where, and when an iteration ends."""

    num_groups: Annotated[int, Field(ge=1)] = 4
    """N: groups active per level and iteration."""
    group_size: Annotated[int, Field(ge=1)] = 4
    """K: trajectories per group."""
    finished_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """lambda: the iteration pauses once this fraction of the N x K x levels has finished."""
    max_staleness: Annotated[int, Field(ge=0)] = 4
    """Policy versions a trained span may lag behind the learner; no effect without one."""
    num_workers: Annotated[int, Field(ge=1)] = 1
    """Worker actors; with `cluster.backend: local` there is always one."""
    trajectories_per_worker: Annotated[int, Field(ge=1)] = 16
    split: Literal["train", "heldout"] = "train"
    ack_tokens: Annotated[int, Field(ge=1)] = 64
    """The journal acknowledges sampled tokens every so many, and at the end of a turn."""
    max_worker_restarts: Annotated[int, Field(ge=0)] = 8


class EnvConfig(Section):
    """One environment of the mix."""

    id: str
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of groups, relative to the other environments."""
    kwargs: dict[str, Any] = {}


class HarnessConfig(Section):
    """What surrounds the policy beside the environment's tools."""

    max_turns: Annotated[int, Field(ge=1)] | None = None
    """Overrides the tasks' own limit; null keeps it."""


class SandboxConfig(Section):
    """Where tools run."""

    backend: Literal["bwrap", "process"] = "bwrap"
    allow_unconfined: bool = False
    """`process` isolates nothing and is refused without this."""
    scratch: str | None = None
    """Folder of live workspaces; null: `<run>/scratch`."""


class StoreConfig(Section):
    """The trajectory store under `<run>/store`."""

    redis: str = "embedded"
    """`embedded` starts a private Valkey; else a redis://, rediss:// or unix:// URL.

    A password in it is written to the run's config.yaml like every other value.
    """
    lease_ttl_s: Annotated[float, Field(gt=0)] = 30.0
    """A worker silent for this long loses its trajectories to others."""


class ObjectiveConfig(Section):
    """The per-token loss (Kimi K2.5, arXiv 2602.02276; values: design decision 14).

    Read by a learner: without effect while `algorithm` is none.
    """

    log_ratio_sq_coef: Number = 1e-3
    log_ratio_window: Annotated[list[float], Field(min_length=2, max_length=2)] = [
        math.log(0.5),
        math.log(2.0),
    ]


class IntensityConfig(Section):
    """Reasoning-effort levels; N x K is per level."""

    levels: Annotated[list[Level], Field(min_length=1), AfterValidator(_each_once)] = ["max"]
    budget_tokens: dict[Level, Annotated[int, Field(ge=1)]] = {}
    """Sampled tokens allowed per trajectory of a level; a level not named has no budget."""


class LearnerConfig(Section):
    """Nothing to set while `algorithm` is none."""


class OptimiserConfig(Section):
    """Nothing to set while `algorithm` is none."""


class CurriculumConfig(Section):
    """Which tasks are drawn."""

    first_task: Annotated[int, Field(ge=0)] = 0
    """Index of the first task of the split; groups take tasks in order from here."""


class WeightsConfig(Section):
    """Nothing to set while `algorithm` is none."""


class ClusterConfig(Section):
    """Where the parts run."""

    backend: Literal["ray", "local"] = "ray"
    """`ray`: workers, store and learner slot are actors; `local`: all in this process."""
    address: str | None = None
    """An existing Ray cluster (`auto` or host:port); null starts a private one for the run."""
    object_store_mib: Annotated[int, Field(ge=78)] = 128
    """Of the private cluster; Ray's own minimum is 75 MB."""


class ViewConfig(Section):
    """Nothing to set yet."""


class MetricsConfig(Section):
    """Where metrics go, under the run folder."""

    jsonl: bool = True
    tensorboard: bool = True


class Config(Section):
    """The root."""

    run: RunConfig = RunConfig()
    seed: int = 0
    policy: PolicyConfig = PolicyConfig()
    engine: EngineConfig = EngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    envs: Annotated[list[EnvConfig], Field(min_length=1), AfterValidator(_each_once)]
    harness: HarnessConfig = HarnessConfig()
    sandbox: SandboxConfig = SandboxConfig()
    store: StoreConfig = StoreConfig()
    algorithm: Literal["none"] = "none"
    """none: trajectories are played, scored and stored; nothing is trained."""
    objective: ObjectiveConfig = ObjectiveConfig()
    intensity: IntensityConfig = IntensityConfig()
    learner: LearnerConfig = LearnerConfig()
    optimiser: OptimiserConfig = OptimiserConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    weights: WeightsConfig = WeightsConfig()
    cluster: ClusterConfig = ClusterConfig()
    view: ViewConfig = ViewConfig()
    metrics: MetricsConfig = MetricsConfig()

    @property
    def run_folder(self) -> Path:
        """Where the run lies."""
        return Path(self.run.folder) / self.run.name

    def absolute(self) -> Config:
        """The same with absolute folders: actors do not run in the caller's folder."""
        run = self.run.model_copy(update={"folder": str(Path(self.run.folder).absolute())})
        scratch = self.sandbox.scratch and str(Path(self.sandbox.scratch).absolute())
        sandbox = self.sandbox.model_copy(update={"scratch": scratch})
        return self.model_copy(update={"run": run, "sandbox": sandbox})

    @property
    def identity(self) -> str:
        """Digest of what must not change when a run is carried on."""
        plain = self.model_dump(mode="json")
        sections = ("seed", "policy", "envs", "harness", "intensity", "curriculum")
        kept = {key: plain[key] for key in sections}
        kept["sandbox"] = plain["sandbox"]["backend"]
        kept["engine"] = [plain["engine"][key] for key in ("kind", "policies")]
        kept["groups"] = [plain["rollout"][key] for key in ("num_groups", "group_size", "split")]
        return digest_json(kept)

    def to_yaml(self) -> str:
        """The resolved config as YAML."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


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
    sources: dict[tuple[str, ...], str] = {}
    for override in overrides:
        sources[_apply(tree, override)] = f"override {override!r}"
    return _validate(tree, str(path), sources)


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
