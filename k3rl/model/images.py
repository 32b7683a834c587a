"""From images to the patches that the vision tower reads (K3 report, arXiv 2607.24653).

An image shrinks until its patches fit the limits, transparent parts are laid on a chessboard, black
is added right and below up to whole features, and the values are normalised. Arithmetic is that of
the released processor, to the pixel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from k3rl.errors import UserInputError
from k3rl.model.vision import Patches

_SQUARE = 8
_WHITE, _GRAY = 255, 180


@dataclass(frozen=True)
class ImageLimits:
    """How images become patches; the defaults are the released ones."""

    patch_size: int = 14
    """Pixels per side of a patch."""
    merge_size: int = 2
    """Patches per side that become one feature."""
    in_patch_limit: int = 65536
    """About the most patches of one image: padding may add a few."""
    patch_limit_on_one_side: int = 512
    """The most patches in a row or column, padding included."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Of red, green and blue in [0, 1]: values become (x - mean) / std."""

    def __post_init__(self) -> None:
        """Hold that sizes, limits and std are positive. Raises UserInputError."""
        for field in fields(self):
            value = getattr(self, field.name)
            numbers = value if isinstance(value, tuple) else (value,)
            if field.name != "mean" and min(numbers) <= 0:
                raise UserInputError(f"image limits: {field.name} must be positive, not {value}")

    @property
    def feature_side(self) -> int:
        """Pixels per side of one feature."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True)
class ImageSize:
    """The size of a prepared image, in pixels."""

    width: int
    height: int
    """After the resize."""
    pad_width: int
    pad_height: int
    """Black pixels added right and below."""
    num_features: int
    """Tokens that the image takes in the sequence."""


def fit_size(width: int, height: int, limits: ImageLimits) -> ImageSize:
    """The size at which an image of `width` x `height` pixels is read; it never grows.

    Raises:
        UserInputError: a side is 0, or padding takes a side beyond the limit.

    """
    if width < 1 or height < 1:
        raise UserInputError(f"size {width} x {height}: both sides must be at least 1 pixel")
    patch, most = limits.patch_size, limits.patch_limit_on_one_side * limits.patch_size
    whole_patches = max(1, width // patch) * max(1, height // patch)
    area = math.sqrt(limits.in_patch_limit / whole_patches)
    scale = min(1.0, area, most / width, most / height)
    new_width, new_height = max(1, int(width * scale)), max(1, int(height * scale))
    side = limits.feature_side
    columns, rows = -(-new_width // side), -(-new_height // side)
    longest = max(columns, rows) * limits.merge_size
    if longest > limits.patch_limit_on_one_side:
        raise UserInputError(
            f"size {width} x {height}: {longest} patches on one side, more than "
            f"patch_limit_on_one_side = {limits.patch_limit_on_one_side}; make the limit a "
            f"multiple of {limits.merge_size}"
        )
    pad_width, pad_height = columns * side - new_width, rows * side - new_height
    return ImageSize(new_width, new_height, pad_width, pad_height, columns * rows)


def image_prompt(width: int, height: int) -> str:
    """The prompt text of an image; `width` and `height` are those of the file, in pixels.

    Its one `<|media_pad|>` stands for all features of the image (see `k3rl.model.vision.splice`).
    """
    return f"<|media_begin|>image {width}x{height}<|media_content|><|media_pad|><|media_end|>"


def pixels(image: Image.Image, limits: ImageLimits) -> NDArray[np.uint8]:
    """An image as [H, W, 3] uint8: resized, made opaque and padded, not yet normalised.

    H and W are multiples of patch_size * merge_size. The orientation tag of a photo is not applied.

    Raises:
        UserInputError: its size does not fit, it has more than 8 bits per channel, or its data are
            broken.

    """
    size = fit_size(*image.size, limits)
    # Conversion of these modes to RGB clips at 255 in silence.
    if image.mode.startswith(("I", "F")):
        raise UserInputError(f"mode {image.mode}: convert it to 8 bits per channel first")
    try:
        plain = image.convert("RGBA" if image.has_transparency_data else "RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise UserInputError(f"cannot be decoded: {error}") from None
    plain = plain.resize((size.width, size.height), Image.Resampling.BICUBIC)
    found = np.asarray(plain)
    if found.shape[-1] == 4:
        found = _on_chessboard(found)
    return np.pad(found, ((0, size.pad_height), (0, size.pad_width), (0, 0)))


def _on_chessboard(rgba: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[H, W, 4] laid on squares of 8 pixels, white in the corner left above: [H, W, 3]."""
    row, column = np.ogrid[: rgba.shape[0], : rgba.shape[1]]
    odd = (row // _SQUARE + column // _SQUARE) % 2 == 1
    board = np.where(odd, _GRAY, _WHITE).astype(np.float32)[..., None]
    # Float32 and truncation are the release's: float64 or rounding is off by one in places.
    alpha = rgba[..., 3:].astype(np.float32) / np.float32(255)
    mixed = rgba[..., :3].astype(np.float32) * alpha + board * (np.float32(1) - alpha)
    return mixed.astype(np.uint8)


def _to_patches(image: NDArray[np.uint8], limits: ImageLimits) -> Tensor:
    """Normalised patches [rows * columns, 3, patch, patch] float32 of [H, W, 3]."""
    patch = limits.patch_size
    mean, std = np.array(limits.mean, np.float32), np.array(limits.std, np.float32)
    values = (image.astype(np.float32) / np.float32(255) - mean) / std
    rows, columns = image.shape[0] // patch, image.shape[1] // patch
    tiles = values.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
    return torch.from_numpy(np.ascontiguousarray(tiles.reshape(-1, 3, patch, patch)))


def preprocess(images: Sequence[Image.Image], limits: ImageLimits | None = None) -> Patches:
    """The patches of `images`, in their order; `limits` None: the released ones.

    Raises:
        UserInputError: there is no image, or one cannot be read; names its number, from 0, and the
            cause.

    """
    limits = limits or ImageLimits()
    if not images:
        raise UserInputError("preprocess needs at least one image")
    patches, grids = [], []
    for number, image in enumerate(images):
        try:
            prepared = pixels(image, limits)
        except UserInputError as error:
            raise UserInputError(f"image {number}: {error}") from None
        patches.append(_to_patches(prepared, limits))
        grids.append([1, *(side // limits.patch_size for side in prepared.shape[:2])])
    return Patches(torch.cat(patches), torch.tensor(grids, dtype=torch.int64))
