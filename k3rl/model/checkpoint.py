"""Weights as one safetensors file: on disk, and in memory for published versions. Never a pickle.

Names are those of the release below its text prefix; the routed experts of a layer are stacked as
`...experts.w1` [E, expert, latent], `w2` [E, latent, expert], `w3`. The config travels in the
metadata, under one key: safetensors does not keep an order among several, and equal weights shall
give equal bytes.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, deserialize
from safetensors.torch import save as write_tensors
from torch import Tensor

from k3rl.errors import ConfigError, CorruptData, SchemaTooNew
from k3rl.model.config import ModelConfig
from k3rl.model.model import K3Model
from k3rl.model.released import ALWAYS_WIDE, load_released, meta_model
from k3rl.model.released_config import read_config
from k3rl.types import Digest, canonical_json, digest_bytes

_KEY = "k3rl"
_SCHEMA = 1
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def to_bytes(
    tensors: Mapping[str, Tensor], config: ModelConfig, dtype: torch.dtype | None = None
) -> bytes:
    """A state dict and its config as one safetensors file; equal input gives equal bytes.

    `dtype` converts what the release does not keep in float32; None stores as it is.
    """
    stored = {}
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu()
        if dtype is not None:
            tensor = tensor.to(torch.float32 if name.endswith(ALWAYS_WIDE) else dtype)
        stored[name] = tensor.contiguous()
    head = canonical_json({"schema": _SCHEMA, "config": config.to_json()}).decode()
    return write_tensors(stored, {_KEY: head})


def from_bytes(data: bytes, source: str = "weights") -> tuple[ModelConfig, dict[str, Tensor]]:
    """The inverse of `to_bytes`, in float32. `source` names the bytes in errors.

    Raises:
        CorruptData: not such a file, or its tensors are not those of its config.
        ConfigError: the config in it is not one of this version.
        SchemaTooNew: written by a newer version.

    """
    try:
        raw: dict[str, Any] = dict(cast(Any, deserialize)(data))
        size = int.from_bytes(data[:8], "little")
        head = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][_KEY])
        schema, plain = int(head["schema"]), head["config"]
    except SafetensorError as error:
        raise CorruptData(source, 0, "safetensors", str(error)) from None
    except (KeyError, TypeError, ValueError):
        raise CorruptData(source, 8, f"metadata {_KEY}", "not a k3rl model") from None
    if schema > _SCHEMA:
        raise SchemaTooNew(f"{source}: model schema {schema}, this version reads {_SCHEMA}")
    config = ModelConfig.from_json(plain, source)
    expected = _shapes(config)
    _same_names(source, set(raw), set(expected))
    tensors = {}
    for name, shape in expected.items():
        entry = raw[name]
        if entry["dtype"] not in _DTYPES or tuple(entry["shape"]) != shape:
            detail = f"{entry['dtype']} {entry['shape']}, the config wants {list(shape)}"
            raise CorruptData(source, 0, name, detail)
        flat = torch.frombuffer(bytearray(entry["data"]), dtype=_DTYPES[entry["dtype"]])
        tensors[name] = flat.reshape(shape).float()
    return config, tensors


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in meta_model(config).state_dict().items()}


def _same_names(source: str, found: set[str], expected: set[str]) -> None:
    if missing := sorted(expected - found):
        raise CorruptData(source, 8, missing[0], "missing")
    if extra := sorted(found - expected):
        raise CorruptData(source, 8, extra[0], "the config has no such tensor")


def save(path: Path, model: K3Model, dtype: torch.dtype | None = None) -> Digest:
    """Write a model, all or nothing, and return the blake3 of the file."""
    data = to_bytes(model.state_dict(), model.config, dtype)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".tmp-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return digest_bytes(data)


def load(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Config and float32 tensors of a file. Raises as `from_bytes`; ConfigError if unreadable."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    return from_bytes(data, str(path))


def load_model(path: Path) -> K3Model:
    """A float32 model from a file. Raises as `load`."""
    config, tensors = load(path)
    model = K3Model(config, seed=None)
    model.load_state_dict(tensors)
    return model


def open_model(path: Path | str) -> K3Model:
    """A float32 model from one file of ours or a folder in the released layout.

    Raises as `load` and `load_released`.
    """
    path = Path(path)
    return load_released(path) if path.is_dir() else load_model(path)


def first_model(checkpoint: str | None, model: str | None, seed: int) -> K3Model | None:
    """What a policy starts from: a checkpoint, else random weights of a model config by `seed`.

    None when neither is named. Raises as `open_model` and `read_config`.
    """
    if checkpoint is not None:
        return open_model(checkpoint)
    return None if model is None else K3Model(read_config(model), seed=seed)
