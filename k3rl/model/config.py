"""The shape of a K3 model, as a YAML file names it.

Names follow the released configuration where it has one; every size is free, so that one code
serves the released shape and a model of a few hundred thousand parameters.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from k3rl.errors import ConfigError
from k3rl.types import JSON, JsonObject

LayerKind = Literal["kda", "mla"]
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
# A tensor has at most three free sizes and a factor of 3; its float64 bytes stay below 2^63.
_LARGEST = 1 << 19
_MOST_LAYERS = 1024


def _hold_sizes(config: Any, may_be_zero: tuple[str, ...] = ()) -> None:
    """Raise ValueError unless every whole number of a config lies in [1, 2^19]."""
    for field in fields(config):
        value = getattr(config, field.name)
        least = 0 if field.name in may_be_zero else 1
        if type(value) is int and not least <= value <= _LARGEST:
            raise ValueError(f"{field.name} must lie in [{least}, {_LARGEST}]")


def _hold_range(config: Any, least: float, largest: float, *names: str) -> None:
    """Raise ValueError unless these numbers of a config lie in [least, largest]."""
    for name in names:
        if not least <= getattr(config, name) <= largest:
            raise ValueError(f"{name} must lie in [{least:g}, {largest:g}]")


def _hold_eps(config: Any, *names: str) -> None:
    """As `_hold_range`: below, float32 takes an eps for 0 when it divides rows of padding."""
    _hold_range(config, 1e-12, 1.0, *names)


@dataclass(frozen=True)
class KdaConfig:
    """Kimi Delta Attention (arXiv 2510.26692): gated delta rule with a decay per key channel."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    num_heads: int
    head_dim: int
    """Width of keys and of values."""
    decay_rank: int
    """Inner width of the low-rank decay projection."""
    conv_kernel: int = 4
    decay: Literal["bounded", "softplus"] = "bounded"
    """Log-decay of one token: gate_lower_bound * sigmoid(exp(A) z), as in K3; or
    -exp(A) softplus(z), which has no bound, as in Kimi Linear (2510.26692)."""
    gate_lower_bound: float = -5.0
    """Of `bounded`: log-decay lies in (gate_lower_bound, 0); 16 tokens must stay below e^88."""
    gate_rank: int | None = None
    """Inner width of the output gate's projection; null: full rank."""
    num_induction_heads: int = 0
    """The first so many heads of every KDA layer start as induction heads: W_k = W_q, the key is
    that of the token before, decay is slow. 0: no head is special."""

    def __post_init__(self) -> None:
        """Hold that the gate fits float32 and that there are heads to make special."""
        _hold_sizes(self, may_be_zero=("num_induction_heads",))
        if not -5.0 <= self.gate_lower_bound < 0:
            raise ValueError("gate_lower_bound must lie in [-5, 0)")
        if not 0 <= self.num_induction_heads <= self.num_heads:
            raise ValueError("num_induction_heads must lie in [0, num_heads]")
        if self.conv_kernel < 2:
            raise ValueError("conv_kernel must be at least 2")

    @property
    def size(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class MlaConfig:
    """Gated multi-head latent attention without positions."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    num_heads: int
    q_lora_rank: int | None
    """Width of the query latent; null: queries are projected at once."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    """The slice of the key that all heads share; K3 never rotates it."""
    v_head_dim: int
    output_gate: bool = True
    """Whether sigmoid(W_g x) scales the attention output in front of W_o."""

    def __post_init__(self) -> None:
        """Hold that sizes are positive; the shared slice may be empty."""
        _hold_sizes(self, may_be_zero=("qk_rope_head_dim",))

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Values cached per token: the normed latent and the shared key slice."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class MoeConfig:
    """Feed-forward blocks: dense ones first, then latent mixtures of experts (2601.18089)."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    dense_size: int
    num_experts: int
    """At most 65,536: ids are stored as uint16."""
    top_k: int
    latent_size: int | None
    """Width that routed experts work in; null: the full width, without projections or norm."""
    expert_size: int
    shared_size: int
    """Hidden width of the shared experts, stored as one."""
    num_dense_layers: int = 1
    router_input: Literal["hidden", "latent"] = "hidden"
    """What the router reads: the full-width hidden, as in K3, or the latent of the experts."""
    routed_scaling_factor: float = 1.0
    """Factor of the renormalised router weights."""
    expert_format: Literal["plain", "mxfp4"] = "plain"
    """How checkpoints in the released layout keep routed experts."""
    quantised: bool = False
    """Run routed experts as they will be served: weights as MXFP4, their inputs as MXFP8."""

    def __post_init__(self) -> None:
        """Hold that a (k+1)-th expert exists: margins and quantile balancing need it."""
        _hold_sizes(self, may_be_zero=("num_dense_layers",))
        _hold_range(self, 1e-6, 1e6, "routed_scaling_factor")
        if self.num_experts > 1 << 16:
            raise ValueError("num_experts must not exceed 65536")
        if not 0 < self.top_k < self.num_experts:
            raise ValueError("top_k must lie in [1, num_experts - 1]")
        if self.router_input == "latent" and self.latent_size is None:
            raise ValueError("router_input latent needs a latent_size")


@dataclass(frozen=True)
class VisionConfig:
    """MoonViT-V2 and the projector into the text width (K3 report, arXiv 2607.24653)."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    media_token_id: int
    """The id that stands for all features of one item."""
    hidden_size: int = 1024
    mlp_size: int = 4096
    num_layers: int = 27
    num_heads: int = 12
    qkv_size: int = 1536
    """Width of all heads together."""
    patch_size: int = 14
    merge_size: int = 2
    """Patches per side that become one feature."""
    pos_height: int = 64
    pos_width: int = 64
    pos_time: int = 4
    projector_eps: float = 1e-5

    def __post_init__(self) -> None:
        """Hold that heads are pairs of complex pairs, and the width pairs of sine and cosine."""
        _hold_sizes(self, may_be_zero=("media_token_id",))
        _hold_eps(self, "projector_eps")
        if self.num_layers > _MOST_LAYERS:
            raise ValueError(f"num_layers must not exceed {_MOST_LAYERS}")
        if self.hidden_size % 2:
            raise ValueError("hidden_size must be even")
        if self.merged_size > _LARGEST:
            raise ValueError(f"hidden_size * merge_size^2 must not exceed {_LARGEST}")
        if self.qkv_size % (4 * self.num_heads):
            raise ValueError("qkv_size must be a multiple of 4 num_heads")

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.qkv_size // self.num_heads

    @property
    def merged_size(self) -> int:
        """Width of the patches that become one feature, side by side."""
        return self.hidden_size * self.merge_size**2


@dataclass(frozen=True)
class ModelConfig:
    """A whole model."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    vocab_size: int
    hidden_size: int
    layer_kinds: tuple[LayerKind, ...]
    kda: KdaConfig
    mla: MlaConfig
    moe: MoeConfig
    attn_res_block_size: int
    """Layers per attention-residual block; the last block may be shorter."""
    vision: VisionConfig | None = None
    attn_res: Literal["block", "full", "off"] = "block"
    """What mixers in front of sub-layers read (2603.15031): sums of blocks and the running sum, as
    in K3; every sub-layer output apart; or there are none, and a residual stream."""
    activation: Literal["situ", "silu"] = "situ"
    """Of gated units: SiTU-GLU, as in K3, or SwiGLU, as in Kimi Linear."""
    gate_beta: float = 4.0
    up_beta: float = 25.0
    norm_eps: float = 1e-5
    lora_norm_eps: float = 1e-6
    init_std: float | None = 0.02
    """Standard deviation of the initial matrices; null: 1/sqrt(columns), fit for small widths."""

    def __post_init__(self) -> None:
        """Hold that there are layers, and that numbers are such that a forward pass is finite."""
        _hold_sizes(self)
        if not 0 < self.num_layers <= _MOST_LAYERS:
            raise ValueError(f"layer_kinds must name 1 to {_MOST_LAYERS} layers")
        if self.moe.num_dense_layers > self.num_layers:
            raise ValueError("moe.num_dense_layers must not exceed the number of layers")
        _hold_eps(self, "norm_eps", "lora_norm_eps")
        _hold_range(self, 1e-3, 1e6, "gate_beta", "up_beta")
        if self.init_std is not None:
            _hold_range(self, 1e-6, 1.0, "init_std")
        width = self.moe.latent_size or self.hidden_size
        needs_groups = self.moe.quantised or self.moe.expert_format == "mxfp4"
        if needs_groups and (self.moe.expert_size % 32 or width % 32):
            raise ValueError(
                f"MXFP4 experts need sizes in multiples of 32: expert_size {self.moe.expert_size}, "
                f"width {width}"
            )
        if self.vision is not None and self.vision.media_token_id >= self.vocab_size:
            raise ValueError("vision.media_token_id must be below vocab_size")

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layer_kinds)

    @property
    def num_router_layers(self) -> int:
        """Layers with routed experts."""
        return self.num_layers - self.moe.num_dense_layers

    @property
    def num_kda_layers(self) -> int:
        """Layers with a recurrent state."""
        return self.layer_kinds.count("kda")

    @property
    def num_mla_layers(self) -> int:
        """Layers with a latent cache."""
        return self.layer_kinds.count("mla")

    @property
    def glu_betas(self) -> tuple[float, float] | None:
        """Bounds of the gate and of the linear half of SiTU-GLU; None: SwiGLU, without bounds."""
        return (self.gate_beta, self.up_beta) if self.activation == "situ" else None

    def to_json(self) -> JsonObject:
        """As plain JSON values."""
        plain: JsonObject = _adapter().dump_python(self, mode="json")
        return plain

    @classmethod
    def from_json(cls, value: JSON, source: str = "model config") -> Self:
        """The inverse of `to_json`. Raises ConfigError that names `source` and the key."""
        try:
            found: Self = _adapter().validate_json(json.dumps(value))
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"{source}: {_one_line(error)}") from None
        return found


@cache
def _adapter() -> TypeAdapter[Any]:
    return TypeAdapter(ModelConfig)


def _one_line(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error).splitlines()[0]
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"]


def load_config(path: Path | str) -> ModelConfig:
    """The model that a YAML file describes.

    Raises:
        ConfigError: the file cannot be read, or a key or value in it is wrong; names both.

    """
    try:
        value = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not YAML: {str(error).splitlines()[0]}") from None
    return ModelConfig.from_json(value, str(path))
