"""`k3rl model`: describe a model before it exists, make one, and convert between layouts."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import psutil
import typer
from rich.console import Console

from k3rl.cli.tables import plain_table
from k3rl.errors import UserInputError

if TYPE_CHECKING:
    from k3rl.model.config import ModelConfig
    from k3rl.model.describe import Description
    from k3rl.model.model import K3Model

app = typer.Typer(help="Describe, make and convert models.", no_args_is_help=True)


class Dtype(enum.StrEnum):
    """Of the tensors that the release keeps in bfloat16."""

    bfloat16 = enum.auto()
    float32 = enum.auto()


class Experts(enum.StrEnum):
    """How routed experts are stored."""

    plain = enum.auto()
    mxfp4 = enum.auto()


ConfigPath = Annotated[
    Path, typer.Argument(help="A model YAML, a released config.json, or a checkpoint folder.")
]
OutPath = Annotated[
    Path, typer.Argument(help="NAME.safetensors: one file of ours. Else a folder as released.")
]
DtypeOption = Annotated[Dtype, typer.Option(help="Of what the release keeps in bfloat16.")]


@app.command("describe")
def describe_command(config: ConfigPath) -> None:
    """Print layers, parameters, bytes and FLOPs of a model, from its shapes alone."""
    from k3rl.model.describe import describe
    from k3rl.model.released_config import read_config

    show(describe(read_config(config)), Console(soft_wrap=True))


@app.command("init")
def init(
    config: ConfigPath,
    out: OutPath,
    seed: Annotated[int, typer.Option(help="Of the initial weights.")] = 0,
    dtype: DtypeOption = Dtype.bfloat16,
) -> None:
    """Write a model with initial weights."""
    from k3rl.model.model import K3Model
    from k3rl.model.released_config import read_config

    settings = read_config(config)
    _require_new(out)
    _require_memory(settings)
    _write(K3Model(settings, seed=seed), out, dtype)


@app.command("convert")
def convert(
    source: Annotated[Path, typer.Argument(help="A folder as released, or one file of ours.")],
    out: OutPath,
    dtype: DtypeOption = Dtype.bfloat16,
    experts: Annotated[
        Experts | None, typer.Option(help="Store routed experts so in a folder; as they were.")
    ] = None,
) -> None:
    """Read a checkpoint in either layout and write it in either."""
    import dataclasses

    from k3rl.model.checkpoint import open_model
    from k3rl.model.released_config import read_config

    _require_new(out)
    if experts is not None and out.suffix == ".safetensors":
        raise UserInputError("--experts is for folders: one file of ours keeps plain experts")
    if source.is_dir():
        _require_memory(read_config(source))
    model = open_model(source)
    if experts is not None:
        stored: Literal["plain", "mxfp4"] = "mxfp4" if experts is Experts.mxfp4 else "plain"
        try:
            moe = dataclasses.replace(model.config.moe, expert_format=stored)
            model.config = dataclasses.replace(model.config, moe=moe)
        except ValueError as error:
            raise UserInputError(f"{source}: {error}") from None
    _write(model, out, dtype)


def _write(model: K3Model, out: Path, dtype: Dtype) -> None:
    import torch

    from k3rl.model import checkpoint
    from k3rl.model.released import save_released

    narrow: torch.dtype = getattr(torch, dtype.value)
    try:
        if out.suffix == ".safetensors":
            checkpoint.save(out, model, narrow)
            size = out.stat().st_size
        else:
            size = save_released(out, model, narrow)
    except OSError as error:
        raise UserInputError(f"{out}: {error.strerror}") from None
    typer.echo(f"{out}: {size:,} bytes")


def _require_new(out: Path) -> None:
    if out.exists():
        raise UserInputError(f"{out} exists")


def _require_memory(config: ModelConfig) -> None:
    """Refuse what would not fit: the allocator would be killed rather than fail."""
    from k3rl.model.describe import describe

    needed, free = 4 * describe(config).total_parameters, psutil.virtual_memory().available
    if needed > free:
        raise UserInputError(
            f"the model needs {needed / 1e9:,.1f} GB in float32, {free / 1e9:,.1f} GB are free"
        )


def show(found: Description, console: Console) -> None:
    """Print a description."""
    config = found.config
    kinds = f"{config.num_kda_layers} KDA, {config.num_mla_layers} MLA"
    console.print(f"{config.num_layers} layers ({kinds}), hidden size {config.hidden_size:,}")
    table = plain_table(None, ["part"], ["parameters", "share"])
    for part, count in found.parameters.items():
        if count:
            table.add_row(part, f"{count:,}", f"{count / found.total_parameters:.2%}")
    console.print(table)
    expanded, absorbed = found.attention_flops
    rows = [
        ("text parameters", f"{found.text_parameters:,}"),
        ("all parameters", f"{found.total_parameters:,}"),
        ("active per token", f"{found.active_parameters:,}"),
        ("checkpoint", f"{found.num_tensors:,} tensors, {found.checkpoint_bytes:,} bytes"),
        ("MLA cache", f"{found.cache_bytes_per_token:,} bytes per token (bfloat16)"),
        ("KDA state", f"{found.state_bytes:,} bytes per sequence (float32)"),
        ("convolution history", f"{found.history_bytes:,} bytes per sequence (bfloat16)"),
        ("FLOPs by weights", f"{found.weight_flops:,} per token"),
        ("FLOPs by recurrence", f"{found.recurrence_flops:,} per token"),
        ("FLOPs by attention", f"{expanded:,} per token and token of context"),
        ("  absorbed", f"{absorbed:,}"),
    ]
    table = plain_table(None, ["name", "value"])
    table.show_header = False
    for row in rows:
        table.add_row(*row)
    console.print(table)
