"""The sections of a run's config. Class defaults are the vetted settings; units are in the names.

Every number that is a `Number` may be a `Schedule` over iterations (over steps in `sft`).
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

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


def each_once(items: list[Any]) -> list[Any]:
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
    iterations: Annotated[int, Field(ge=0)] = 1
    """0: nothing is played but evaluations."""
    ledger: bool = False
    """True: workers note every acknowledgement under `<run>/ledger`, for audits of the store."""


class PolicyConfig(Section):
    """The policy; with a scripted engine only its tokenizer matters."""

    tokenizer: Literal["nano"] = "nano"
    model: str | None = None
    """A model YAML (configs/model): random weights by `seed`; no effect beside a checkpoint."""
    checkpoint: str | None = None
    """A safetensors checkpoint to start from; it carries its own model config."""


class EngineConfig(Section):
    """The rollout engine."""

    kind: Literal["scripted", "native"] = "scripted"
    policies: Annotated[list[ScriptName], Field(min_length=1)] = ["oracle"]
    """Scripted: sample i of a group plays policies[i mod len]: oracle, random, null."""
    delta_tokens: Annotated[int, Field(ge=1)] = 32
    """Tokens per delta."""
    tokens_per_s: Annotated[float, Field(gt=0)] | None = None
    """Scripted: pace of one trajectory; null: as fast as it goes."""
    num_slots: Annotated[int, Field(ge=1)] = 96
    """Native: sequences whose model state is kept; must cover the trajectories of a worker."""
    num_threads: Annotated[int, Field(ge=1)] = 1
    """Native: threads of one worker's matrix products."""


class DeadlinesConfig(Section):
    """How long the phases of one trajectory's session may take, in seconds."""

    boot_s: Annotated[float, Field(gt=0)] = 600.0
    """Room, a sandbox and the opening; beyond it the infrastructure has failed."""
    step_s: Annotated[float, Field(gt=0)] = 600.0
    """One turn's tools; beyond it, as beyond the task's own limit of time, it is truncated."""
    grade_s: Annotated[float, Field(gt=0)] = 300.0
    """The verdict; beyond it the infrastructure has failed."""
    close_s: Annotated[float, Field(gt=0)] = 30.0
    """Each try to close what the session holds."""


class RolloutConfig(Section):
    """How many trajectories are played, where, and when an iteration ends."""

    num_groups: Annotated[int, Field(ge=1)] = 4
    """N: groups active per level and iteration."""
    group_size: Annotated[int, Field(ge=1)] = 4
    """K: trajectories per group."""
    finished_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """lambda: the iteration pauses once this fraction of the N x K x levels has finished."""
    max_staleness: Annotated[int, Field(ge=0)] = 4
    """Policy versions a trained span may lag behind the learner."""
    num_workers: Annotated[int, Field(ge=1)] = 1
    """Worker actors; with `cluster.backend: local` there is always one."""
    trajectories_per_worker: Annotated[int, Field(ge=1)] = 16
    split: Literal["train", "heldout"] = "train"
    ack_tokens: Annotated[int, Field(ge=1)] = 64
    """The journal acknowledges sampled tokens every so many, and at the end of a turn."""
    max_worker_restarts: Annotated[int, Field(ge=0)] = 8
    deadlines: DeadlinesConfig = DeadlinesConfig()


class EnvConfig(Section):
    """One environment of the mix."""

    id: str
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of groups, relative to the other environments."""
    budget_multiplier: dict[Level, Number] = {}
    """In place of `intensity.budget_multiplier`, for levels named here: K3 sets it per domain."""
    reward: dict[str, float] = {}
    """Weights of the reward's parts (correct, complete, num_steps, format and the environment's
    own); none: the part `correct` alone."""
    kwargs: dict[str, Any] = {}


Preset = Literal["none", "shell_agent", "editor_agent", "patch_agent"]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0)]
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$")]


class ToolStyleConfig(Section):
    """How tools are shown; null keeps what the preset says, here and in the parts below."""

    case: Literal["keep", "camel", "snake"] | None = None
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_]*$")] | None = None
    names: dict[str, ToolName] | None = None
    """Own name of a tool to the name shown."""
    parameters: dict[str, ToolName] | None = None
    descriptions: Literal["plain", "usage", "none"] | None = None
    shell: ToolName | None = None
    """One tool of this name that takes command lines, in place of all."""


class ContextConfig(Section):
    """What becomes of a context that fills up."""

    kind: Literal["full", "compaction"] | None = None
    fraction: Fraction | None = None
    """Of the task's max_context_tokens: a context that holds so many is summed up."""
    instruction: Annotated[str, Field(min_length=1)] | None = None


class MemoryConfig(Section):
    """Notes that the policy writes; every new context shows them."""

    file: str | None = None
    max_chars: Count | None = None


class SubAgentsConfig(Section):
    """Tasks that the policy may give away; who does them is out of the loss."""

    max_count: Count | None = None
    max_turns: Count | None = None
    max_tokens: Count | None = None
    tools: list[str] | None = None
    """Own names of the environment's tools that they get."""
    prompt: str | None = None


class HarnessParts(Section):
    """Parts of a harness; null keeps what the preset says, false takes a part away."""

    system_prompt: str | None = None
    tools: ToolStyleConfig | None = None
    context: ContextConfig | None = None
    skills: dict[str, str] | None = None
    """Name to Markdown."""
    memory: MemoryConfig | Literal[False] | None = None
    sub_agents: SubAgentsConfig | Literal[False] | None = None
    max_turns: Count | None = None
    """Overrides the tasks' own limit; null keeps it."""


class HarnessVariant(HarnessParts):
    """Parts that some task groups get."""

    weight: Share = 1.0


class RandomizeConfig(Section):
    """Each task group draws a preset and a variant, by their weights."""

    presets: dict[Preset, Share] = {}
    """None: `harness.preset` for all."""
    variants: list[HarnessVariant] = []


class HarnessConfig(HarnessParts):
    """What surrounds the policy beside the environment's tools."""

    preset: Preset = "none"
    randomize: RandomizeConfig | None = None


class PoolConfig(Section):
    """How each rollout worker's pool treats its sandboxes; times in seconds."""

    max_sandboxes: Annotated[int, Field(ge=1)] = 1024
    """Alive at the same time, beside one fork of each for grading; further ones wait for room."""
    num_warm: Annotated[int, Field(ge=0)] = 0
    """Most started ones that wait for another trajectory of the same task."""
    reserve_bytes: Annotated[int, Field(ge=0)] = 1 << 30
    """Memory of the machine that sandboxes leave to others."""
    admission_wait_s: Annotated[float, Field(gt=0)] = 300.0
    """Waiting longer for room is an infrastructure failure."""
    idle_pause_s: Annotated[float, Field(gt=0)] = 60.0
    """One that is not used for so long ends its processes until it is used again."""
    lease_s: Annotated[float, Field(gt=0)] = 3600.0
    """One that is not used for so long is closed."""


class SandboxConfig(Section):
    """Where tools run."""

    backend: Literal["bwrap", "docker", "landlock", "process"] = "bwrap"
    """`docker` uses the daemon that DOCKER_HOST names, on this machine; `landlock` (Linux 6.12) is
    for places without user namespaces, such as the inside of a container."""
    allow_unconfined: bool = False
    """`process` isolates nothing and is refused without this."""
    scratch: str | None = None
    """Folder of live workspaces; null: `<run>/scratch`."""
    pool: PoolConfig = PoolConfig()


class RetentionConfig(Section):
    """Which trajectories a store may let go: spent ones only, see `k3rl.store.retention`."""

    keep_updates: Annotated[int, Field(ge=1)] | None = None
    """Keep those of so many updates up to the oldest checkpoint; null: all."""
    max_age_s: Annotated[float, Field(gt=0)] | None = None
    """Keep those that were sealed within so many seconds; null: all."""
    max_bytes: Annotated[int, Field(ge=0)] | None = None
    """Keep the newest, so that sealed files weigh at most this; null: all."""
    untrained: bool = False
    """Whether rewarded trajectories that no update named may go too."""
    grace_s: Annotated[float, Field(ge=0)] = 3600.0
    """How long files and blobs that nothing needs stay before they are deleted."""


class StoreConfig(Section):
    """The trajectory store under `<run>/store`."""

    redis: str = "embedded"
    """`embedded` starts a private Valkey; else a redis://, rediss:// or unix:// URL.

    A password in it is written to the run's config.yaml like every other value.
    """
    lease_ttl_s: Annotated[float, Field(gt=0)] = 30.0
    """A worker silent for this long loses its trajectories to others."""
    compact_batches: Annotated[int, Field(ge=0)] = 32
    """So many small sealed batches are written again as one; 0: never."""
    compact_level: Annotated[int, Field(ge=1, le=19)] = 9
    """zstd level of what is written again."""
    retention: RetentionConfig = RetentionConfig()
    min_free_bytes: Annotated[int, Field(ge=0)] = 1 << 30
    """With less room on its disk the store begins nothing new; what runs goes on."""


class ObjectiveConfig(Section):
    """The per-token loss (Kimi K2.5, arXiv 2602.02276; values: design decision 14)."""

    log_ratio_sq_coef: Number = 1e-3
    log_ratio_window: Annotated[list[float], Field(min_length=2, max_length=2)] = [
        math.log(0.5),
        math.log(2.0),
    ]
    reference_coef: Annotated[float, Field(ge=0)] = 0.0
    """Pull towards the policy the run started from, on the levels of `reference_levels`.

    Half the squared log-ratio to the reference, per token: its gradient on-policy is that of
    KL(policy || reference).
    """
    reference_levels: Annotated[list[Level], AfterValidator(each_once)] = ["max"]
    permute_rewards: bool = False
    """Control experiment: rewards change places at random inside each group."""


class IntensityConfig(Section):
    """Reasoning-effort levels; N x K is per level (Kimi K3 report, arXiv 2607.24653 section 4)."""

    levels: Annotated[list[Level], Field(min_length=1), AfterValidator(each_once)] = ["max"]
    budget_tokens: dict[Level, Annotated[int, Field(ge=1)]] = {}
    """A fixed budget of sampled tokens per trajectory, for levels without a multiplier."""
    budget_multiplier: dict[Level, Number] = {}
    """Budget of a problem = multiplier x b0, b0 being what the cold-start policy needs for it.

    b0 comes from the evaluation at the start, else from the first iteration, which is then played
    without budgets. A level named neither here nor in `budget_tokens` has no budget.
    """


class LearnerConfig(Section):
    """Gradients, checkpoints and the agreement check; without effect while `algorithm` is none."""

    micro_batch_tokens: Annotated[int, Field(ge=1)] = 8192
    """Most tokens of one forward and backward pass; a longer trajectory makes a pass of its own."""
    num_threads: Annotated[int, Field(ge=1)] = 2
    checkpoint_every: Annotated[int, Field(ge=1)] = 1
    """Updates between checkpoints; what was trained after the last one is trained again."""
    agreement_max: Annotated[float, Field(gt=0)] = 2e-4
    """Largest difference of engine and learner log-probs allowed on fresh-state spans."""
    agreement_k3: Annotated[float, Field(gt=0)] = 1e-7
    """Largest mean k3 estimator of the same."""


class OptimiserConfig(Section):
    """Muon on matrices, AdamW on the rest (Moonlight, arXiv 2502.16982; K3 report section 2.5)."""

    matrix_lr: Number = 1e-3
    vector_lr: Number = 1e-3
    """Embeddings, head, norms and vectors."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    betas: Annotated[list[float], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0


class EvaluationConfig(Section):
    """Held-out tasks played without budgets, before and after the iterations."""

    at_start: bool = False
    at_end: bool = False
    num_tasks: Annotated[int, Field(ge=0)] = 200
    """Per environment and level, sampled from the law that is trained (T = 1)."""
    num_greedy_tasks: Annotated[int, Field(ge=0)] = 0
    """Per environment and level, most likely token each (T = 0)."""
    num_samples: Annotated[int, Field(ge=1)] = 1
    """Trajectories per task at T = 1."""
    split: Literal["train", "heldout"] = "heldout"
    first_task: Annotated[int, Field(ge=0)] = 0


class SftConfig(Section):
    """Supervised fine-tuning on demonstrations (`k3rl sft`); schedules count its steps."""

    num_steps: Annotated[int, Field(ge=1)] = 100
    batch_tokens: Annotated[int, Field(ge=1)] = 4096
    """Tokens of one optimiser step, whole trajectories."""
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    log_every: Annotated[int, Field(ge=1)] = 10


class CurriculumConfig(Section):
    """Which tasks are drawn."""

    first_task: Annotated[int, Field(ge=0)] = 0
    """Index of the first task of the split; groups take tasks in order from here."""


class WeightsConfig(Section):
    """Nothing to set yet: every version is published whole, in float32."""


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
