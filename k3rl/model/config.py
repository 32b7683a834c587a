"""The shape of a K3 model, as a YAML file names it.

Names follow the released configuration where it has one; every size is free, so that one code
serves the released shape and a model of a few hundred thousand parameters.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from k3rl.errors import ConfigError
from k3rl.types import JSON, JsonObject

LayerKind = Literal["kda", "mla"]
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


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
    gate_lower_bound: float = -5.0
    """Log-decay of one token lies in (gate_lower_bound, 0); 16 tokens must stay below e^88."""
    num_induction_heads: int = 0
    """The first so many heads of every KDA layer start as induction heads: W_k = W_q, the key is
    that of the token before, decay is slow. 0: no head is special."""

    def __post_init__(self) -> None:
        """Hold that the gate fits float32 and that there are heads to make special."""
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
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    """The slice of the key that all heads share; K3 never rotates it."""
    v_head_dim: int

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
    top_k: int
    latent_size: int
    expert_size: int
    shared_size: int
    """Hidden width of the shared experts, stored as one."""
    num_dense_layers: int = 1

    def __post_init__(self) -> None:
        """Hold that a (k+1)-th expert exists: margins and quantile balancing need it."""
        if not 0 < self.top_k < self.num_experts:
            raise ValueError("top_k must lie in [1, num_experts - 1]")


@dataclass(frozen=True)
class ModelConfig:
    """A whole text model."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    vocab_size: int
    hidden_size: int
    layer_kinds: tuple[LayerKind, ...]
    kda: KdaConfig
    mla: MlaConfig
    moe: MoeConfig
    attn_res_block_size: int
    """Layers per attention-residual block; the last block may be shorter."""
    gate_beta: float = 4.0
    up_beta: float = 25.0
    norm_eps: float = 1e-5
    lora_norm_eps: float = 1e-6
    init_std: float | None = 0.02
    """Standard deviation of the initial matrices; null: 1/sqrt(columns), fit for small widths."""

    def __post_init__(self) -> None:
        """Hold that there is at least one layer and every count is positive."""
        if not self.layer_kinds:
            raise ValueError("layer_kinds is empty")
        if min(self.vocab_size, self.hidden_size, self.attn_res_block_size) < 1:
            raise ValueError("vocab_size, hidden_size and attn_res_block_size must be positive")

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layer_kinds)

    @property
    def num_router_layers(self) -> int:
        """Layers with routed experts."""
        return max(0, self.num_layers - self.moe.num_dense_layers)

    @property
    def num_kda_layers(self) -> int:
        """Layers with a recurrent state."""
        return self.layer_kinds.count("kda")

    @property
    def num_mla_layers(self) -> int:
        """Layers with a latent cache."""
        return self.layer_kinds.count("mla")

    def to_json(self) -> JsonObject:
        """As plain JSON values."""
        plain: JsonObject = _adapter().dump_python(self, mode="json")
        return plain

    @classmethod
    def from_json(cls, value: JSON, source: str = "model config") -> Self:
        """The inverse of `to_json`. Raises ConfigError that names `source` and the key."""
        try:
            found: Self = _adapter().validate_json(json.dumps(value))
        except (ValidationError, TypeError) as error:
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
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {str(error).splitlines()[0]}") from None
    return ModelConfig.from_json(value, str(path))
