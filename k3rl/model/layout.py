"""Where the tokens of packed sequences lie in tiles of 16 and in a padded rectangle.

Dense work runs on [T]. The KDA recurrence wants tiles of 16 tokens, all first tiles before all
second ones, longest sequence first: then the tiles of one round are neighbours, and the sequences
still running are a prefix. Attention wants a rectangle [N, width].

On a CPU the last bit of a result can depend on how many rows were computed with it: vector code
ends in a scalar tail, and libraries choose their blocks by the size. An aligned layout rounds both
sizes up such that a prefix comes out the same whatever follows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from k3rl.errors import UserInputError

TILE = 16
# 64 rows leave whole vectors on up to two threads, whatever the width of a row is.
_ROWS = 64
# Measured on torch 2.13: its attention gives equal rows at lengths that are multiples of these.
_WIDTH, _WIDE, _WIDE_FROM = 32, 256, 256


@dataclass(frozen=True, eq=False)
class Layout:
    """Index arithmetic of N packed sequences with T tokens; build it with `of`."""

    cu_seqlens: Tensor
    """[N + 1] int64, from 0 to T."""
    lengths: tuple[int, ...]
    num_rows: int
    """T': rows of dense work; those from T on are padding and get no gradient."""
    width: int
    """Rows of the attention rectangle per sequence."""

    @staticmethod
    def of(cu_seqlens: Tensor, num_tokens: int, is_aligned: bool = False) -> Layout:
        """The layout of sequences that start at `cu_seqlens`. Raises UserInputError."""
        cu_seqlens = cu_seqlens.to(torch.int64)
        lengths = tuple(cu_seqlens.diff().tolist())
        if not lengths:
            raise UserInputError("there is no sequence")
        bounds = (int(cu_seqlens[0]), int(cu_seqlens[-1]))
        if bounds != (0, num_tokens) or any(length < 1 for length in lengths):
            raise UserInputError(
                f"cu_seqlens must rise from 0 to {num_tokens} without empty sequences"
            )
        longest = max(lengths)
        if not is_aligned:
            return Layout(cu_seqlens, lengths, num_tokens, longest)
        step = _WIDTH if longest <= _WIDE_FROM else _WIDE
        return Layout(cu_seqlens, lengths, _round_up(num_tokens, _ROWS), _round_up(longest, step))

    @property
    def num_sequences(self) -> int:
        """N."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)

    @cached_property
    def length_array(self) -> Tensor:
        """[N] int64."""
        return self.cu_seqlens.diff()

    @cached_property
    def sequence(self) -> Tensor:
        """[T] int64: the sequence of each token."""
        numbers = torch.arange(self.num_sequences, device=self.cu_seqlens.device)
        return numbers.repeat_interleave(self.length_array)

    @cached_property
    def position(self) -> Tensor:
        """[T] int64: tokens of the same sequence before it, in this batch."""
        steps = torch.arange(self.num_tokens, device=self.cu_seqlens.device)
        return steps - self.cu_seqlens[self.sequence]

    @cached_property
    def padded_rows(self) -> Tensor:
        """[T'] int64: row of each token in the flat rectangle [N * width]; 0 of padding."""
        return self._extend(self.sequence * self.width + self.position)

    @cached_property
    def padded_tokens(self) -> Tensor:
        """[N * width] int64: token of each row of the rectangle; behind a sequence, its last."""
        columns = torch.arange(self.width, device=self.cu_seqlens.device)
        inside = columns.clamp(max=self.length_array[:, None] - 1)
        return (self.cu_seqlens[:-1, None] + inside).flatten()

    @cached_property
    def padded_mask(self) -> Tensor | None:
        """[N * width, 1] float32: 1 where a token lies; None when the rectangle is full."""
        if self.num_tokens == self.num_sequences * self.width:
            return None
        mask = torch.zeros(self.num_sequences * self.width, 1, device=self.cu_seqlens.device)
        mask[self.padded_rows[: self.num_tokens]] = 1.0
        return mask

    @cached_property
    def rank(self) -> Tensor:
        """[N] int64: sequences by falling length; carried states travel in this order."""
        return torch.argsort(self.length_array, descending=True, stable=True)

    @cached_property
    def round_sizes(self) -> tuple[int, ...]:
        """Tiles of each round: sequences with more than 16 r tokens, for r = 0, 1, ..."""
        counts = [0] * ((self.longest + TILE - 1) // TILE)
        for length in self.lengths:
            for index in range((length + TILE - 1) // TILE):
                counts[index] += 1
        return tuple(counts)

    @property
    def num_tiles(self) -> int:
        """C: tiles of all rounds."""
        return sum(self.round_sizes)

    @cached_property
    def _tile_starts(self) -> tuple[Tensor, Tensor]:
        """[R] int64 tiles of each round, and the number of its first tile."""
        sizes = torch.tensor(self.round_sizes, device=self.cu_seqlens.device)
        return sizes, sizes.cumsum(0) - sizes

    @cached_property
    def tile_rows(self) -> Tensor:
        """[T'] int64: row of each token in the flat tiles [C * 16]; 0 of padding."""
        _, starts = self._tile_starts
        ranks = torch.empty_like(self.rank)
        ranks[self.rank] = torch.arange(self.num_sequences, device=self.rank.device)
        tiles = starts[self.position // TILE] + ranks[self.sequence]
        return self._extend(tiles * TILE + self.position % TILE)

    @cached_property
    def tile_tokens(self) -> Tensor:
        """[C * 16] int64: token of each tile row; behind a sequence, its last token.

        That a sequence fills its own gaps keeps a NaN within it.
        """
        sizes, starts = self._tile_starts
        rounds = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)
        sequences = self.rank[torch.arange(self.num_tiles, device=sizes.device) - starts[rounds]]
        rows = torch.arange(TILE, device=sizes.device)
        position = torch.minimum(
            TILE * rounds[:, None] + rows, self.length_array[sequences, None] - 1
        )
        return (self.cu_seqlens[sequences, None] + position).flatten()

    @cached_property
    def _heads(self) -> dict[tuple[int, int], tuple[Tensor, Tensor, Tensor | None]]:
        return {}

    def head_rows(self, num_parts: int, num_heads: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gather [T', parts, heads] rows into [parts, C, heads, 16] and back, both flat int64.

        The first index has parts * C * heads * 16 entries, the second T' * parts * heads: where
        each row went. A row without a token repeats its sequence's last one. Then the mask
        [C * heads * 16, 1] float32: 1 where a token lies; None when every tile is full.
        """
        key = (num_parts, num_heads)
        if key not in self._heads:
            device = self.cu_seqlens.device
            part = torch.arange(num_parts, device=device)
            head = torch.arange(num_heads, device=device)
            tokens = self.tile_tokens.view(1, -1, 1, TILE)
            there = (tokens * num_parts + part.view(-1, 1, 1, 1)) * num_heads
            there = there + head.view(1, 1, -1, 1)
            tile, row = (self.tile_rows // TILE).view(-1, 1, 1), self.tile_rows % TILE
            back = (part.view(1, -1, 1) * self.num_tiles + tile) * num_heads + head
            back = back * TILE + row.view(-1, 1, 1)
            mask = self._mask(num_heads)
            self._heads[key] = (there.reshape(-1), back.reshape(-1), mask)
        return self._heads[key]

    def _mask(self, num_heads: int) -> Tensor | None:
        rows = self.num_tiles * TILE
        if rows == self.num_tokens:
            return None
        mask = torch.zeros(rows, device=self.cu_seqlens.device)
        mask[self.tile_rows[: self.num_tokens]] = 1.0
        return mask.view(-1, 1, TILE).expand(-1, num_heads, -1).reshape(-1, 1)

    def _extend(self, rows: Tensor) -> Tensor:
        return torch.nn.functional.pad(rows, (0, self.num_rows - self.num_tokens))


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step
