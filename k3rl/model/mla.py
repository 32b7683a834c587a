"""Gated multi-head latent attention without positions: one latent per token is all it caches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3rl.model.config import ModelConfig
from k3rl.model.layout import Layout
from k3rl.model.ops import linear, linear_many, rms_norm, sigmoid_gate, take_rows, wide
from k3rl.model.tiled import causal_attention_by_tiles, needs_tiles
from k3rl.model.weights import Weight


class GatedMla(nn.Module):
    """One layer (K3 report, arXiv 2607.24653; Kimi Linear, 2510.26692, has neither the query
    latent nor the output gate).

    From zero it expands keys and values; over cached latents it absorbs W_kvb. Both are the same
    function: q_n . (W_uk c) = (W_uk^T q_n) . c.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        mla, d = config.mla, config.hidden_size
        self.mla, self.lora_eps = mla, config.lora_norm_eps
        self.scale = mla.qk_head_dim**-0.5
        if mla.q_lora_rank is None:
            self.q_proj = Weight(mla.num_heads * mla.qk_head_dim, d)
        else:
            self.q_a_proj = Weight(mla.q_lora_rank, d)
            self.q_a_layernorm = Weight(mla.q_lora_rank)
            self.q_b_proj = Weight(mla.num_heads * mla.qk_head_dim, mla.q_lora_rank)
        self.kv_a_proj_with_mqa = Weight(mla.latent_dim, d)
        self.kv_a_layernorm = Weight(mla.kv_lora_rank)
        self.kv_b_proj = Weight(
            mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank
        )
        if mla.output_gate:
            self.g_proj = Weight(mla.num_heads * mla.v_head_dim, d)
        self.o_proj = Weight(d, mla.num_heads * mla.v_head_dim)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries [T, H, nope + rope], latents [T, rank + rope] as cached, output gate."""
        mla = self.mla
        has_latent = mla.q_lora_rank is not None
        down = [self.q_a_proj if has_latent else self.q_proj, self.kv_a_proj_with_mqa]
        if mla.output_gate:
            down.append(self.g_proj)
        q, latent, *rest = linear_many(x, [[module.weight] for module in down])
        gate = rest[0] if rest else None
        if has_latent:
            q = rms_norm(q, self.q_a_layernorm.weight, self.lora_eps)
            q = linear(q, self.q_b_proj.weight)
        q = q.view(-1, mla.num_heads, mla.qk_head_dim)
        inner, shared = torch.split(latent, [mla.kv_lora_rank, mla.qk_rope_head_dim], -1)
        inner = rms_norm(inner, self.kv_a_layernorm.weight, self.lora_eps)
        return q, torch.cat([inner, shared], -1), gate

    def up(self) -> tuple[Tensor, Tensor]:
        """W_uk [H, nope, rank] and W_uv [H, v, rank]: the rows of kv_b by head."""
        mla = self.mla
        weight = self.kv_b_proj.weight.view(mla.num_heads, -1, mla.kv_lora_rank)
        return weight[:, : mla.qk_nope_head_dim], weight[:, mla.qk_nope_head_dim :]

    def _finish(self, mixed: Tensor, gate: Tensor | None, dtype: torch.dtype) -> Tensor:
        # The attention output stays wide until it is gated: rounding it first biases training.
        flat = mixed.flatten(-2)
        return linear(flat.to(dtype) if gate is None else sigmoid_gate(flat, gate),
                      self.o_proj.weight)  # fmt: skip

    def forward(
        self, x: Tensor, layout: Layout, past: Tensor | None, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Packed sequences, each behind its cached latents.

        Args:
            x: [T', d] packed, T' >= T rows as the layout says.
            layout: Of the N sequences.
            past: [N, P, rank + rope]; None: nothing is cached, before or after.
            lengths: [N] int64, how many of P sequence n has.

        Returns:
            [T', d], and all latents [N, P', rank + rope] with P' the longest sequence in all.

        """
        q, latent, gate = self._project(x)
        if past is None or lengths is None:
            return self._finish(self._expanded(q, latent, layout), gate, x.dtype), None
        total = int((lengths + layout.length_array).max())
        cached = F.pad(past[:, :total], (0, 0, 0, max(0, total - past.shape[1])))
        position = lengths[layout.sequence] + layout.position
        fresh = latent[: layout.num_tokens].to(past.dtype)
        cached = cached.index_put((layout.sequence, position), fresh)
        if past.shape[1] == 0:
            return self._finish(self._expanded(q, latent, layout), gate, x.dtype), cached
        query = self._absorb(q)
        rows = self._to_rectangle(query.flatten(1), layout)
        query = rows.view(layout.num_sequences, layout.width, *query.shape[1:]).transpose(1, 2)
        last = lengths[:, None] + torch.arange(layout.width, device=x.device)
        out = self._attend(query, cached, hide_after(last, total, wide(x).dtype))
        out = self._unpad(out, layout)
        return self._release(out, gate, x.dtype), cached

    def _expanded(self, q: Tensor, latent: Tensor, layout: Layout) -> Tensor:
        """Causal attention of sequences without a past, with keys and values in full: [T, H, v]."""
        mla = self.mla
        inner, shared = torch.split(latent, [mla.kv_lora_rank, mla.qk_rope_head_dim], -1)
        expanded = linear(inner, self.kv_b_proj.weight).view(len(q), mla.num_heads, -1)
        k, v = torch.split(expanded, [mla.qk_nope_head_dim, mla.v_head_dim], -1)
        k = torch.cat([k, shared.unsqueeze(1).expand(-1, mla.num_heads, -1)], -1)
        width = max(mla.qk_head_dim, mla.v_head_dim)
        q, k, v = (F.pad(part, (0, width - part.shape[-1])) for part in (q, k, v))
        shape = (layout.num_sequences, layout.width, 3, mla.num_heads, width)
        padded = self._to_rectangle(torch.stack([q, k, v], 1).flatten(1), layout).view(shape)
        # Padding lies behind every token of its sequence, so the causal mask hides it.
        q, k, v = wide(padded).permute(2, 0, 3, 1, 4)
        if needs_tiles(q):
            out = causal_attention_by_tiles(q, k, v, self.scale)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self._unpad(out, layout)[..., : mla.v_head_dim]

    def _to_rectangle(self, x: Tensor, layout: Layout) -> Tensor:
        """Packed [T', columns] -> [N * width, columns]."""
        back, num_real = layout.padded_rows, layout.num_tokens
        return take_rows(x, layout.padded_tokens, back, None, None, num_real)

    def _unpad(self, out: Tensor, layout: Layout) -> Tensor:
        """[N, H, width, columns] -> packed [T', H, columns]."""
        rows = out.transpose(1, 2).reshape(layout.num_sequences * layout.width, -1)
        rows = take_rows(rows, layout.padded_rows, layout.padded_tokens, None, layout.padded_mask)
        return rows.view(layout.num_rows, self.mla.num_heads, -1)

    def _absorb(self, q: Tensor) -> Tensor:
        """Queries [T, H, nope + rope] against latents: [T, H, rank + rope]."""
        mla = self.mla
        up_k, _ = self.up()
        nope, rope = torch.split(q, [mla.qk_nope_head_dim, mla.qk_rope_head_dim], -1)
        return torch.cat([torch.bmm(nope.transpose(0, 1), up_k).transpose(0, 1), rope], -1)

    def _attend(self, query: Tensor, cached: Tensor, bias: Tensor) -> Tensor:
        """[N, A, B, rank + rope] over [N, P, rank + rope] -> [N, A, B, rank]; bias [N, 1, B, P]."""
        query = wide(query)
        keys = cached.to(query.dtype).unsqueeze(1).expand(-1, query.shape[1], -1, -1)
        out = F.scaled_dot_product_attention(query, keys, keys, bias, scale=self.scale)
        return out[..., : self.mla.kv_lora_rank]

    def _release(self, mixed: Tensor, gate: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Mixed latents [T, H, rank] through W_uv, gated and projected: [T, d]."""
        _, up_v = self.up()
        value = torch.bmm(mixed.transpose(0, 1), wide(up_v).transpose(1, 2)).transpose(0, 1)
        return self._finish(value, gate, dtype)


def hide_after(last: Tensor, total: int, dtype: torch.dtype) -> Tensor:
    """What to add to scores so that query i of sequence n sees keys 0 .. last[n, i] of `total`.

    `last` [N, B] -> [N, 1, B, total]: 0, or minus infinity.
    """
    hidden = torch.arange(total, device=last.device) > last[..., None]
    bias = torch.zeros(hidden.shape, dtype=dtype, device=last.device)
    return bias.masked_fill_(hidden, -torch.inf).unsqueeze(1)
