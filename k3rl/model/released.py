"""Checkpoints in the released layout: a folder of safetensors shards, an index and `config.json`.

Ours differs from it in four ways: text tensors lack the root `language_model.` (which Kimi Linear
lacks too), routed experts of a layer are stacked `[E, out, in]`, `A_log` has one entry per head
where K3 ships `head_dim` of them with zeros behind, and MXFP4 experts are dequantised. Reading and
writing go tensor by tensor: beside the model no more than one shard is in memory.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from k3rl.errors import ConfigError, CorruptData, UserInputError, WeightsError
from k3rl.model.config import ModelConfig
from k3rl.model.model import K3Model
from k3rl.model.mxfp4 import GROUP, dequantise, quantise
from k3rl.model.ops import wide
from k3rl.model.released_config import read_config
from k3rl.model.released_writing import released_json

# Float32 in the release whatever the rest is.
ALWAYS_WIDE = ("conv1d.weight", "dt_bias", "A_log", "e_score_correction_bias", "o_norm.weight")
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
_ROOT = "language_model."
_EXPERTS = re.compile(r"(.*\.experts)\.(w[123])")
_BYTES = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4, "F64": 8}
_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}
_NAMED_AT_MOST = 20


class Stored(NamedTuple):
    """One tensor of a checkpoint in the released layout."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As safetensors spells it."""
    num_parameters: int
    """What it holds of the model: two per byte of packed experts, none in a scale."""
    ours: str
    """The parameter or buffer of `K3Model` it belongs to."""
    expert: int | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the data."""
        return _count(self.shape) * _BYTES[self.dtype]


def _count(shape: Iterable[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _hold_float(dtype: torch.dtype) -> None:
    if dtype not in _DTYPES:
        raise UserInputError(f"{dtype}: weights are bfloat16, float16, float32 or float64")


def meta_model(config: ModelConfig) -> K3Model:
    """The model without storage: names and shapes only."""
    with torch.device("meta"):
        return K3Model(config, seed=None)


def layout(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> Iterator[Stored]:
    """Every tensor of a checkpoint of this config, ordered as the model is.

    `dtype` is that of what the release keeps in bfloat16. Nothing is allocated. Raises
    UserInputError when it is no float.
    """
    _hold_float(dtype)
    for ours, tensor in meta_model(config).state_dict().items():
        yield from _stored(ours, tuple(tensor.shape), config, _DTYPES[dtype])


def _stored(
    ours: str, shape: tuple[int, ...], config: ModelConfig, narrow: str
) -> Iterator[Stored]:
    is_text = ours.startswith(("model.", "lm_head."))
    root = _ROOT if is_text and config.vision is not None else ""
    found = _EXPERTS.fullmatch(ours)
    if found is None:
        if ours.endswith("A_log"):
            shape = a_log_shape(config)
        dtype = "F32" if ours.endswith(ALWAYS_WIDE) else narrow
        yield Stored(root + ours, shape, dtype, _count(shape), ours)
        return
    count, rows, columns = shape
    for expert in range(count):
        name = f"{root}{found.group(1)}.{expert}.{found.group(2)}"
        if config.moe.expert_format == "plain":
            size = rows * columns
            yield Stored(f"{name}.weight", (rows, columns), narrow, size, ours, expert)
            continue
        packed, scales = (rows, columns // 2), (rows, columns // GROUP)
        yield Stored(f"{name}.weight_packed", packed, "U8", rows * columns, ours, expert)
        yield Stored(f"{name}.weight_scale", scales, "U8", 0, ours, expert)


def a_log_shape(config: ModelConfig) -> tuple[int, ...]:
    """[head_dim] in K3, of which the first entries are those of the heads; [1, 1, H, 1] before."""
    kda = config.kda
    if kda.decay == "softplus":
        return (1, 1, kda.num_heads, 1)
    return (max(kda.head_dim, kda.num_heads),)


@dataclass(frozen=True)
class _File:
    path: Path
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    """Name -> dtype and shape, from the header."""


def _read_headers(folder: Path) -> list[_File]:
    """Every shard that the index names, or else every safetensors file there is."""
    try:
        names = _shard_names(json.loads((folder / INDEX).read_text()))
    except FileNotFoundError:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptData(str(folder / INDEX), 0, "weight_map", str(error)) from None
    if not names:
        raise ConfigError(f"{folder}: no safetensors files")
    return [_read_header(folder / name) for name in names]


def _shard_names(index: Any) -> list[str]:
    places = index.get("weight_map") if isinstance(index, dict) else None
    names: list[Any] = list(places.values()) if isinstance(places, dict) else [None]
    if any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise ValueError("not an object of file names of this folder")
    return sorted(set(names))


def _read_header(path: Path) -> _File:
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return _File(
                path, {n: (s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
            )
    except FileNotFoundError:
        raise ConfigError(f"{path}: the index names it, but it is not there") from None
    except (SafetensorError, OSError) as error:
        raise CorruptData(str(path), 0, "safetensors", str(error)) from None


def _wanted(config: ModelConfig, files: list[_File]) -> dict[str, Stored]:
    """By the name in the files, after a check that they hold exactly the model.

    Raises WeightsError that lists what is missing, unexpected, there twice or misshaped.
    """
    found = {name: entry for file in files for name, entry in file.tensors.items()}
    counts = Counter(name for file in files for name in file.tensors)
    has_root = any(name.startswith(_ROOT) for name in found)
    wanted = {}
    for stored in _as_found(config, found):
        bare = stored.name.removeprefix(_ROOT)
        is_text = stored.ours.startswith(("model.", "lm_head."))
        wanted[_ROOT + bare if has_root and is_text else bare] = stored
    faults = {
        "missing": sorted(set(wanted) - set(found)),
        "unexpected": sorted(set(found) - set(wanted)),
        "there twice": sorted(name for name, count in counts.items() if count > 1),
        "misshaped": [
            f"{name} {found[name][0]} {list(found[name][1])} instead of "
            f"{stored.dtype} {list(stored.shape)}"
            for name, stored in wanted.items()
            if name in found and not _fits(config, stored, *found[name])
        ],
    }
    if any(faults.values()):
        raise WeightsError(f"{files[0].path.parent}: {_describe(faults)}")
    return wanted


def _as_found(config: ModelConfig, found: dict[str, Any]) -> Iterator[Stored]:
    """The layout with experts packed or plain by what is there: dequantised mirrors exist."""
    is_packed = any(name.endswith(".weight_packed") for name in found)
    moe = config.to_json()
    cast(dict[str, Any], moe["moe"])["expert_format"] = "mxfp4" if is_packed else "plain"
    return layout(ModelConfig.from_json(moe))


def _fits(config: ModelConfig, stored: Stored, dtype: str, shape: tuple[int, ...]) -> bool:
    known = {"U8"} if stored.dtype == "U8" else set(_DTYPES.values())
    shapes = {stored.shape}
    if stored.ours.endswith("A_log"):
        # Read by head from the front, whichever family or mirror wrote it.
        heads = config.kda.num_heads
        shapes |= {(heads,), (1, 1, heads, 1), (max(config.kda.head_dim, heads),)}
    return shape in shapes and dtype in known


def _describe(faults: dict[str, list[str]]) -> str:
    parts = []
    for kind, names in faults.items():
        if names:
            more = f" and {len(names) - _NAMED_AT_MOST} more" if len(names) > _NAMED_AT_MOST else ""
            parts.append(f"{len(names)} {kind}: {', '.join(names[:_NAMED_AT_MOST])}{more}")
    return "; ".join(parts)


@torch.no_grad()
def load_released(folder: Path | str, dtype: torch.dtype = torch.float32) -> K3Model:
    """A model from a folder in the released layout, every tensor in `dtype`.

    Raises:
        ConfigError: `config.json` is missing or wrong, or a shard is not there.
        CorruptData: a file is not what safetensors wrote, or a scale is not a number in `dtype`.
        WeightsError: tensors are missing, unexpected, there twice or misshaped; lists them by name.
        UserInputError: `dtype` is no float.

    """
    _hold_float(dtype)
    folder = Path(folder)
    config = read_config(folder)
    files = _read_headers(folder)
    wanted = _wanted(config, files)
    scales = {stored.name.removesuffix("_scale"): name for name, stored in wanted.items()
              if stored.name.endswith("weight_scale")}  # fmt: skip
    places = {name: file.path for file in files for name in file.tensors}
    # In `dtype` from the first byte: the float32 form of a narrow model never exists.
    model = meta_model(config)
    targets = {n: torch.empty(t.shape, dtype=dtype) for n, t in model.state_dict().items()}
    for file in files:
        with safe_open(file.path, "pt") as source:
            for name in file.tensors:
                stored = wanted[name]
                if stored.name.endswith("weight_scale"):
                    continue
                value = source.get_tensor(name)
                if stored.dtype == "U8":
                    other = scales[stored.name.removesuffix("_packed")]
                    is_here = other in file.tensors
                    scale = source.get_tensor(other) if is_here else _read(places[other], other)
                    value = _unpack(value, scale, dtype, places[other], other)
                _put(targets[stored.ours], value, stored)
    model.load_state_dict(targets, assign=True)
    return model


def _read(path: Path, name: str) -> Tensor:
    with safe_open(path, "pt") as source:
        tensor: Tensor = source.get_tensor(name)
    return tensor


def _unpack(value: Tensor, scale: Tensor, dtype: torch.dtype, path: Path, name: str) -> Tensor:
    try:
        return dequantise(value, scale, torch.float32 if dtype == torch.float16 else dtype)
    except UserInputError as error:
        raise CorruptData(str(path), 0, name, str(error)) from None


def _put(target: Tensor, value: Tensor, stored: Stored) -> None:
    if stored.ours.endswith("A_log"):
        value = value.flatten()[: len(target)]
    if stored.expert is None:
        target.copy_(value)
    else:
        target[stored.expert].copy_(value)


def save_released(
    folder: Path | str,
    model: K3Model,
    dtype: torch.dtype = torch.bfloat16,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write a model in the released layout, all or nothing; returns the bytes of its tensors.

    `dtype` is that of what the release keeps in bfloat16. Raises UserInputError when `folder`
    exists, `dtype` is no float, or MXFP4 cannot hold an expert.
    """
    folder = Path(folder)
    if folder.exists():
        raise UserInputError(f"{folder} exists")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".tmp-", dir=folder.parent))
    try:
        total = _write(partial, model, dtype, shard_bytes)
        partial.chmod(0o755)
        partial.replace(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return total


def _write(folder: Path, model: K3Model, dtype: torch.dtype, shard_bytes: int) -> int:
    shards: list[list[Stored]] = [[]]
    size = 0
    for stored in layout(model.config, dtype):
        if shards[-1] and size + stored.num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(stored)
        size += stored.num_bytes
    weight_map: dict[str, str] = {}
    value_of = _values(model)
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(_filled(shard, value_of), folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys((stored.name for stored in shard), name)
    total = sum(stored.num_bytes for shard in shards for stored in shard)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    (folder / "config.json").write_text(released_json(model.config))
    return total


def _filled(shard: list[Stored], value_of: Callable[[Stored], Tensor]) -> dict[str, Tensor]:
    dtypes = {"U8": torch.uint8} | {name: dtype for dtype, name in _DTYPES.items()}
    # Room for all first: results that lie among the temporaries of packing would pin their pages.
    tensors = {s.name: torch.empty(s.shape, dtype=dtypes[s.dtype]) for s in shard}
    for stored in shard:
        tensors[stored.name].copy_(value_of(stored))
    return tensors


def _values(model: K3Model) -> Callable[[Stored], Tensor]:
    tensors = model.state_dict()
    # The scales of the expert packed last: they are written right behind it.
    scales: dict[str, Tensor] = {}

    def value_of(stored: Stored) -> Tensor:
        if stored.name in scales:
            return scales.pop(stored.name)
        tensor: Tensor = tensors[stored.ours].detach()
        # One expert leaves the device, not the stack of all.
        tensor = (tensor if stored.expert is None else tensor[stored.expert]).cpu()
        if stored.ours.endswith("A_log"):
            spare = _count(stored.shape) - len(tensor)
            tensor = torch.nn.functional.pad(tensor, (0, spare)).view(stored.shape)
        if stored.dtype == "U8":
            packed, scale = quantise(wide(tensor))
            scales[stored.name.removesuffix("_packed") + "_scale"] = scale
            return packed
        return tensor

    return value_of
