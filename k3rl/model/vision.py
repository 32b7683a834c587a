"""MoonViT-V2, its projector into the text width, and the splice into the token sequence.

Formulas are those of the K3 report (arXiv 2607.24653); where it and the released code differ, the
code counts, so that released weights mean the same: attention runs over all frames of an item at
once. Parameters are named as in the release below `vision_tower.` and `mm_projector.`. Axes: N
patches of all items, C tower width, H heads, D head width, M features, m patches per side of one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3rl.errors import UserInputError
from k3rl.model.config import VisionConfig
from k3rl.model.layout import Layout
from k3rl.model.ops import linear, rms_norm, wide
from k3rl.model.weights import Weight

# The release gives no eps, so that torch takes that of the dtype: in bfloat16 7.8e-3, which changes
# the function. Weights are judged in float32, whose eps this is, at every dtype.
NORM_EPS = 1.1920929e-07
_THETA = 10000.0

Grid = tuple[int, int, int]
"""Frames, rows and columns of patches of one item."""


class Patches(NamedTuple):
    """The patches of n items, one item behind the other; what media tokens stand for."""

    pixel_values: Tensor
    """[N, 3, patch, patch]; row by row within a frame."""
    grid_thws: Tensor
    """[n, 3] int64: frames, rows and columns of patches."""


def read_grids(grid_thws: Tensor, num_patches: int, config: VisionConfig) -> list[Grid]:
    """The grids [n, 3] of items that have `num_patches` patches together.

    Raises:
        UserInputError: no item, a side that merging does not divide, too many frames, or another
            number of patches; names the item, from 0.

    """
    if grid_thws.dim() != 2 or grid_thws.shape[-1] != 3 or not len(grid_thws):
        raise UserInputError(f"grid_thws must be [items, 3], not {list(grid_thws.shape)}")
    grids = [(int(t), int(h), int(w)) for t, h, w in grid_thws.tolist()]
    for number, (t, h, w) in enumerate(grids):
        if not 1 <= t <= config.pos_time:
            raise UserInputError(f"item {number}: {t} frames, not 1 to {config.pos_time}")
        if min(h, w) < 1 or h % config.merge_size or w % config.merge_size:
            raise UserInputError(
                f"item {number}: {h} x {w} patches; sides must be positive multiples of "
                f"{config.merge_size}"
            )
    total = sum(map(math.prod, grids))
    if total != num_patches:
        raise UserInputError(f"grid_thws name {total} patches, pixel_values has {num_patches}")
    return grids


def feature_counts(grid_thws: Tensor, merge_size: int) -> list[int]:
    """Features of each item of grid_thws [n, 3]; frames are averaged and add none."""
    return [int(h) * int(w) // merge_size**2 for _, h, w in grid_thws.tolist()]


def rope_angles(grids: list[Grid], head_dim: int, device: torch.device | None = None) -> Tensor:
    """Angles [N, D/2] float64 of the complex pairs of a head: columns and rows take turns.

    Pair 2i turns by column * 10000^(-4i/D), pair 2i + 1 by row * 10000^(-4i/D); frames alike.
    """
    steps = torch.arange(head_dim // 4, dtype=torch.float64, device=device)
    rates = _THETA ** (-4.0 * steps / head_dim)
    places = []
    for t, h, w in grids:
        row, column = torch.meshgrid(
            torch.arange(h, device=device), torch.arange(w, device=device), indexing="ij"
        )
        places.append(torch.stack([column, row], -1).view(-1, 2).repeat(t, 1))
    return (torch.cat(places).unsqueeze(1) * rates.unsqueeze(-1)).flatten(1)


def time_rows(num_frames: int, size: int, device: torch.device | None = None) -> Tensor:
    """Fixed embedding [t, size] float64 of frames: sines, then cosines, of t * 10000^(-2k/size)."""
    steps = torch.arange(size // 2, dtype=torch.float64, device=device)
    frames = torch.arange(num_frames, dtype=torch.float64, device=device)
    angles = frames.unsqueeze(1) * _THETA ** (-2.0 * steps / size)
    return torch.cat([angles.sin(), angles.cos()], -1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbouring values of x [N, H, D] as complex pairs, turned by angles [N, 1, D/2]."""
    real, imaginary = wide(x).reshape(*x.shape[:-1], -1, 2).unbind(-1)
    turned = torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], -1)
    return turned.flatten(-2).to(x.dtype)


@dataclass(frozen=True, eq=False)
class _Items:
    """What blocks know of the packed items."""

    sizes: list[int]
    """Patches of each item."""
    cos: Tensor
    sin: Tensor
    """[N, 1, D/2], float32 or wider."""


class PatchEmbed(nn.Module):
    """Patches to vectors, with the place in the grid and, of several frames, the time."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size, patch = config.hidden_size, config.patch_size
        self.proj = Weight(size, 3, patch, patch)
        self.pos_emb = Weight(config.pos_height, config.pos_width, size)

    def _place(self, grid: Grid) -> Tensor:
        """Position embedding [t * h * w, C], float32 or wider."""
        t, h, w = grid
        table = wide(self.pos_emb.weight)
        if (h, w) != table.shape[:2]:
            planes = table.permute(2, 0, 1).unsqueeze(0)
            planes = F.interpolate(planes, size=(h, w), mode="bilinear", align_corners=False)
            table = planes[0].permute(1, 2, 0)
        place = table.reshape(1, h * w, -1)
        if t > 1:
            place = place + time_rows(t, table.shape[-1], table.device).to(table).unsqueeze(1)
        return place.flatten(0, 1)

    def forward(self, pixel_values: Tensor, grids: list[Grid]) -> Tensor:
        """[N, 3, P, P] in the dtype of the weights to [N, C]."""
        x = linear(pixel_values.flatten(1), self.proj.weight.flatten(1))
        return (x + torch.cat([self._place(grid) for grid in grids])).to(x.dtype)


class Mlp(nn.Module):
    """fc1 gelu(fc0 x), with the tanh form of GELU."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.fc0 = Weight(config.mlp_size, config.hidden_size)
        self.fc1 = Weight(config.hidden_size, config.mlp_size)

    def forward(self, x: Tensor) -> Tensor:
        """[N, C] to [N, C]."""
        return linear(F.gelu(linear(x, self.fc0.weight), approximate="tanh"), self.fc1.weight)


class Block(nn.Module):
    """One pre-norm layer; patches attend, in both directions, to all patches of their item."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.norm0 = Weight(config.hidden_size)
        self.norm1 = Weight(config.hidden_size)
        self.wqkv = Weight(3 * config.qkv_size, config.hidden_size)
        self.wo = Weight(config.hidden_size, config.qkv_size)
        self.mlp = Mlp(config)

    def _attend(self, x: Tensor, items: _Items) -> Tensor:
        qkv = linear(x, self.wqkv.weight).view(-1, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.unbind(1)
        q, k = _rotate(q, items.cos, items.sin), _rotate(k, items.cos, items.sin)
        mixed = []
        for parts in zip(*(torch.split(y, items.sizes) for y in (q, k, v)), strict=True):
            heads_first = (part.transpose(0, 1).unsqueeze(0) for part in parts)
            mixed.append(F.scaled_dot_product_attention(*heads_first)[0].transpose(0, 1))
        return linear(torch.cat(mixed).flatten(1), self.wo.weight)

    def forward(self, x: Tensor, items: _Items) -> Tensor:
        """[N, C] to [N, C]."""
        x = x + self._attend(rms_norm(x, self.norm0.weight, NORM_EPS), items)
        return x + cast(Tensor, self.mlp(rms_norm(x, self.norm1.weight, NORM_EPS)))


class Encoder(nn.Module):
    """All layers and the last norm."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_layernorm = Weight(config.hidden_size)

    def forward(self, x: Tensor, items: _Items) -> Tensor:
        """[N, C] to [N, C]."""
        for block in self.blocks:
            x = block(x, items)
        return rms_norm(x, self.final_layernorm.weight, NORM_EPS)


class VisionTower(nn.Module):
    """Patches of packed images and clips to merged groups of patches."""

    def __init__(self, config: VisionConfig) -> None:
        """Parameters stay uninitialised."""
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.encoder = Encoder(config)

    def forward(self, pixel_values: Tensor, grid_thws: Tensor) -> Tensor:
        """The groups of m x m patches that become one feature each.

        Args:
            pixel_values: [N, 3, P, P] normalised, items one behind the other, frames and rows in
                order; any float dtype.
            grid_thws: [n, 3] integers, frames, rows and columns of each item.

        Returns:
            [M, m * m, C] in the dtype of the weights, the mean over frames; M is the sum of
            rows * columns / m^2. An item's rows do not depend on the other items.

        Raises:
            UserInputError: shapes or grids that do not fit the config or each other.

        """
        patch = self.config.patch_size
        if pixel_values.shape[1:] != (3, patch, patch):
            raise UserInputError(
                f"pixel_values must be [N, 3, {patch}, {patch}], not {list(pixel_values.shape)}"
            )
        grids = read_grids(grid_thws, len(pixel_values), self.config)
        x = self.patch_embed(pixel_values.to(self.patch_embed.proj.weight.dtype), grids)
        angles = rope_angles(grids, self.config.head_dim, x.device).unsqueeze(1)
        sizes, dtype = [math.prod(grid) for grid in grids], wide(x).dtype
        x = self.encoder(x, _Items(sizes, angles.cos().to(dtype), angles.sin().to(dtype)))
        pairs = zip(torch.split(x, sizes), grids, strict=True)
        return torch.cat([self._merge(part, grid) for part, grid in pairs])

    def _merge(self, x: Tensor, grid: Grid) -> Tensor:
        """[t * h * w, C] to [h/m * w/m, m * m, C]: rows and columns of groups, then in a group."""
        t, h, w = grid
        m = self.config.merge_size
        mean = x.view(t, h // m, m, w // m, m, -1).mean(0)
        return mean.transpose(1, 2).reshape(-1, m * m, x.shape[-1])


class Projector(nn.Module):
    """Groups of patches to features in the text width d, normed."""

    def __init__(self, config: VisionConfig, hidden_size: int) -> None:
        """`hidden_size` is d. Parameters stay uninitialised."""
        super().__init__()
        self.eps = config.projector_eps
        merged = config.merged_size
        # 1 is the GELU between them, which has no parameters.
        self.proj = nn.ModuleDict({"0": Weight(merged, merged), "2": Weight(hidden_size, merged)})
        self.post_norm = Weight(hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Groups [M, m * m, C] to features [M, d], with the exact GELU."""
        first, second = (cast(Weight, self.proj[name]).weight for name in ("0", "2"))
        x = linear(F.gelu(linear(x.flatten(1), first)), second)
        return rms_norm(x, self.post_norm.weight, self.eps)


@dataclass(frozen=True, eq=False)
class Spliced:
    """Packed sequences in which features stand where their media tokens stood."""

    embeds: Tensor
    """[T', d], T' = T + M - items."""
    cu_seqlens: Tensor
    """[N + 1] int64, from 0 to T'."""
    rows: Tensor
    """[T] int64: the row of each token; of a media token, the row of its last feature."""
    is_media: Tensor
    """[T'] bool: rows that hold a feature."""


def splice(
    token_ids: Tensor,
    embeds: Tensor,
    features: Tensor,
    counts: list[int],
    media_token_id: int,
    cu_seqlens: Tensor,
) -> Spliced:
    """Put the features of every item in the place of its one media token.

    The sequence grows: a token makes room for all features of its item. Gradients flow to
    `features` and to the `embeds` of all other tokens.

    Args:
        token_ids: [T] int64, packed.
        embeds: [T, d]; rows of media tokens are ignored.
        features: [M, d], items in the order of their tokens.
        counts: Features of each item, each at least 1; M together.
        media_token_id: The id that stands for an item.
        cu_seqlens: [N + 1] int64, bounds of the sequences.

    Raises:
        UserInputError: token, item, feature or embedding counts disagree, or bad bounds.

    """
    num_tokens = len(token_ids)
    layout = Layout.of(cu_seqlens, num_tokens)
    is_item = token_ids == media_token_id
    _hold_counts(int(is_item.sum()), features, counts)
    if embeds.shape != (num_tokens, features.shape[-1]):
        raise UserInputError(
            f"embeds must be [{num_tokens}, {features.shape[-1]}], not {list(embeds.shape)}"
        )
    lengths = torch.ones_like(token_ids, dtype=torch.int64)
    lengths[is_item] = torch.tensor(counts, dtype=torch.int64, device=lengths.device)
    ends = lengths.cumsum(0)
    origin = torch.arange(num_tokens, device=lengths.device).repeat_interleave(lengths)
    is_media = is_item[origin]
    # Features lie behind the embeddings in the joined table, in the order of their rows.
    source = torch.where(is_media, num_tokens - 1 + is_media.cumsum(0), origin)
    joined = torch.cat([embeds, features.to(embeds.dtype)]).index_select(0, source)
    bounds = F.pad(ends, (1, 0))[layout.cu_seqlens]
    return Spliced(joined, bounds, ends - 1, is_media)


def _hold_counts(num_media_tokens: int, features: Tensor, counts: list[int]) -> None:
    """Raise UserInputError unless tokens, items and features belong together."""
    if num_media_tokens != len(counts):
        raise UserInputError(f"{num_media_tokens} media tokens for {len(counts)} items")
    if features.dim() != 2 or sum(counts) != len(features):
        raise UserInputError(
            f"features must be [{sum(counts)}, d] for {len(counts)} items, "
            f"not {list(features.shape)}"
        )
    if counts and min(counts) < 1:
        raise UserInputError(f"item {counts.index(min(counts))}: no features")
