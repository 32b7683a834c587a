"""The gated delta rule of KDA in tiles of 16 tokens, forward and backward (arXiv 2510.26692).

Per head, with S [K, V], decay a_t = exp(g_t) per key channel and write strength b_t:

    S' = Diag(a_t) S;   u_t = b_t (v_t - S'^T k_t);   S = S' + k_t u_t^T;   o_t = S^T q_t

Within a tile, G_i the inclusive running sum of g:

    L_ij = b_i sum_c k_ic k_jc e^(G_ic - G_jc)  (i > j)       T = (I + L)^-1 Diag(b)
    P_ij =     sum_c q_ic k_jc e^(G_ic - G_jc)  (i >= j)      W = T (e^G * K),  U = T V
    Y = U - W S;   O = (e^G * Q) S + P Y;   S <- Diag(e^G_16) S + (e^(G_16 - G) * K)^T Y

The two-sided exponents of L and P are split at row 0 of the tile, which does not depend on later
tokens: a prefix comes out the same whatever follows it. A power of two near e^37.5, half the worst
span, then centres both factors: with |g| <= 5 they stay within e^38 and no product is subnormal.
(Added inside the exponent the same constant would cost 2e-6 of relative precision in float32.)

Axes: C tiles in rounds (see `layout`), H heads, K key and V value width.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function

from k3rl.model.layout import TILE


class _Scales(NamedTuple):
    """Exponentials of the running log-decay, each [C, H, 16, K] unless said."""

    rising: Tensor
    """shift * e^(G - G_0)."""
    falling: Tensor
    """Its reciprocal."""
    decay: Tensor
    """e^G <= 1."""
    last: Tensor
    """[C, H, 1, K]: `rising` of the tile's last row."""


def _scales(g: Tensor, shift: float) -> _Scales:
    running = torch.matmul(g.new_ones(TILE, TILE).tril_(), g)
    anchor = running[:, :, :1]
    rising = (running - anchor).exp_().mul_(shift)
    decay = rising * anchor.exp().div_(shift)
    return _Scales(rising, rising.reciprocal(), decay, rising[:, :, -1:])


def _flat(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


def _rounds(sizes: tuple[int, ...]) -> list[slice]:
    slices, start = [], 0
    for size in sizes:
        slices.append(slice(start, start + size))
        start += size
    return slices


class _DeltaTiles(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor,
        rounds: tuple[int, ...], shift: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        scales = _scales(g, shift)
        q_up, k_up, k_down = q * scales.rising, k * scales.rising, k * scales.falling
        inner = torch.matmul(torch.cat([q_up, k_up], 2), k_down.transpose(2, 3))
        within, raw = inner[:, :, :TILE].tril(), inner[:, :, TILE:].tril(-1)
        eye = torch.eye(TILE, dtype=g.dtype, device=g.device).expand_as(raw)
        inverse = torch.linalg.solve_triangular(
            raw * beta.unsqueeze(-1), eye, upper=False, unitriangular=True
        )
        write = inverse * beta.unsqueeze(-2)
        k_in, q_in, k_out = k * scales.decay, q * scales.decay, k_down * scales.last
        erase = torch.matmul(write, k_in)
        update = torch.matmul(write, v)
        keep = scales.decay[:, :, -1:].transpose(2, 3)
        states = q.new_empty(*keep.shape[:2], *state.shape[2:])
        state = state.clone()
        for part, count in zip(_rounds(rounds), rounds, strict=True):
            now = state[:count]
            states[part] = now
            fresh = _flat(update[part]).baddbmm_(_flat(erase[part]), _flat(now), alpha=-1.0)
            now.mul_(keep[part])
            _flat(now).baddbmm_(_flat(k_out[part]).transpose(1, 2), fresh)
        out = torch.matmul(q_in, states)
        _flat(out).baddbmm_(_flat(within), _flat(update))
        ctx.save_for_backward(
            q_up, k_up, k_down, q_in, k_in, k_out, *scales, v, beta, inverse, raw, within, erase,
            update, states,
        )  # fmt: skip
        ctx.rounds = rounds
        return out, state

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (q_up, k_up, k_down, q_in, k_in, k_out, rising, falling, decay, last, v, beta, inverse,
         raw, within, erase, update, states) = ctx.saved_tensors  # fmt: skip
        d_out, d_state = grads[0].contiguous(), grads[1].clone()
        d_update, d_next = _backward_rounds(
            ctx.rounds, d_out, d_state, (q_in, k_out, erase, within, decay[:, :, -1:])
        )
        d_within = torch.matmul(d_out, update.transpose(2, 3)).tril_()
        d_q_in = torch.matmul(d_out, states.transpose(2, 3))
        d_k_out = torch.matmul(update, d_next.transpose(2, 3))
        d_erase = torch.matmul(d_update, states.transpose(2, 3)).neg_()
        write = inverse * beta.unsqueeze(-2)
        both = torch.cat([d_update, d_erase], 3)
        d_v_k = torch.matmul(write.transpose(2, 3), both)
        d_v, d_k_in = d_v_k[..., : v.shape[-1]], d_v_k[..., v.shape[-1] :]
        d_write = torch.matmul(both, torch.cat([v, k_in], 3).transpose(2, 3))
        d_beta = (d_write * inverse).sum(2)
        turned = inverse.transpose(2, 3)
        d_lower = torch.matmul(torch.matmul(turned, d_write * beta.unsqueeze(-2)), turned)
        d_lower = d_lower.tril_(-1).neg_()
        d_beta += (d_lower * raw).sum(3)
        d_inner = torch.cat([d_within, d_lower * beta.unsqueeze(-1)], 2)
        d_up = torch.matmul(d_inner, k_down)
        d_q_up, d_k_up = d_up[:, :, :TILE], d_up[:, :, TILE:]
        d_k_down = torch.matmul(d_inner.transpose(2, 3), torch.cat([q_up, k_up], 2))
        d_q = (d_q_up * rising).addcmul_(d_q_in, decay)
        d_k = (d_k_up * rising).addcmul_(d_k_in, decay)
        d_k.addcmul_(d_k_down.addcmul_(d_k_out, last), falling)
        # dG: each product contributes x dx with the sign its exponent has in G.
        d_run = (q_up * d_q_up).addcmul_(k_up, d_k_up).addcmul_(q_in, d_q_in)
        d_run.addcmul_(k_in, d_k_in).addcmul_(k_down, d_k_down, value=-1.0)
        d_run[:, :, -1] += (k_out * d_k_out).sum(2)
        d_run[:, :, -1] += (states * d_next).sum(3) * decay[:, :, -1]
        d_g = torch.matmul(d_run.new_ones(TILE, TILE).triu_(), d_run)
        return d_q, d_k, d_v, d_g, d_beta, d_state, None, None


def _backward_rounds(
    rounds: tuple[int, ...], d_out: Tensor, d_state: Tensor, saved: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Gradients that run against time; `d_state` [N, H, K, V] ends as that of the first state.

    Returns d_update [C, H, 16, V], and the gradient of the state behind each tile [C, H, K, V].
    """
    q_in, k_out, erase, within, keep = saved
    d_update = torch.matmul(within.transpose(2, 3), d_out)
    d_states = torch.matmul(q_in.transpose(2, 3), d_out)
    d_next = torch.empty_like(d_states)
    for part, count in reversed(list(zip(_rounds(rounds), rounds, strict=True))):
        now = d_state[:count]
        d_next[part] = now
        change = _flat(d_update[part]).baddbmm_(_flat(k_out[part]), _flat(now))
        now.mul_(keep[part].transpose(2, 3)).add_(d_states[part])
        _flat(now).baddbmm_(_flat(erase[part]).transpose(1, 2), change, alpha=-1.0)
    return d_update, d_next


def delta_tiles(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor,
    rounds: tuple[int, ...], lower_bound: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the rule over tiles.

    Args:
        q: [C, H, 16, K], normed and scaled.
        k: [C, H, 16, K], normed.
        v: [C, H, 16, V].
        g: [C, H, 16, K] log-decay in [lower_bound, 0]; 0 where there is no token.
        beta: [C, H, 16]; 0 where there is no token.
        state: [N, H, K, V], sequences in `Layout.rank` order.
        rounds: `Layout.round_sizes`.
        lower_bound: At least -5.

    Returns:
        Outputs [C, H, 16, V] and the states after each sequence's last token [N, H, K, V].

    """
    shift = 2.0 ** round(-lower_bound * (TILE - 1) / 2 / math.log(2))
    run = cast(Any, _DeltaTiles).apply
    out, after = run(q, k, v, g, beta, state, rounds, shift)
    return out, after


def delta_pairs(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor,
    rounds: tuple[int, ...],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `delta_tiles` for log-decays without a bound, which no split of exponents survives.

    Row by row of the tile every exponent G_i - G_j is formed before it is exponentiated. Slower,
    and the gradient is autograd's.
    """
    running = torch.matmul(g.new_ones(TILE, TILE).tril_(), g)
    raw_columns, within_columns = [], []
    for column in range(TILE):
        # Rows above the column are cut away below; capping their exponent keeps them finite.
        fall = (running - running[:, :, column : column + 1]).clamp(max=0.0).exp()
        key = k[:, :, column : column + 1] * fall
        raw_columns.append((k * key).sum(-1))
        within_columns.append((q * key).sum(-1))
    raw, within = torch.stack(raw_columns, -1).tril(-1), torch.stack(within_columns, -1).tril()
    eye = torch.eye(TILE, dtype=g.dtype, device=g.device)
    lower = eye + raw * beta.unsqueeze(-1)
    write = torch.linalg.solve_triangular(lower, torch.diag_embed(beta), upper=False)
    decay, last = running.exp(), running[:, :, -1:]
    erase, update = torch.matmul(write, k * decay), torch.matmul(write, v)
    k_out, q_in, keep = k * (last - running).exp(), q * decay, last.exp().transpose(2, 3)
    outs = []
    for part, count in zip(_rounds(rounds), rounds, strict=True):
        now = state[:count]
        fresh = update[part] - torch.matmul(erase[part], now)
        outs.append(torch.matmul(q_in[part], now) + torch.matmul(within[part], fresh))
        after = now * keep[part] + torch.matmul(k_out[part].transpose(2, 3), fresh)
        state = torch.cat([after, state[count:]])
    return torch.cat(outs), state


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> Tensor:
    """One token of each of B sequences; `state` [B, H, K, V] is updated in place.

    q, k: [B, H, K]; decay = e^g: [B, H, K] or flat; v: [B, H, V]; beta: [B, H] with any further
    axes of 1. Returns [B, H, V].
    """
    key_size, value_size = state.shape[2:]
    flat = _flat(state)
    column = k.reshape(-1, key_size, 1)
    flat.mul_(decay.reshape(column.shape))
    value = v.reshape(-1, 1, value_size)
    fresh = torch.baddbmm(value, column.transpose(1, 2), flat, alpha=-1.0)
    flat.baddbmm_(column, fresh.mul_(beta.reshape(-1, 1, 1)))
    return torch.bmm(q.reshape(-1, 1, key_size), flat).view(v.shape)
