"""The tiled delta rule against a float64 token recurrence: outputs, states and every gradient."""

import pytest
import torch

from k3rl.model.delta import delta_step, delta_tiles
from k3rl.model.layout import Layout
from tests.model.model_builders import parts

LENGTHS = [1, 16, 47, 1, 85]
NAMES = ("q", "k", "v", "g", "beta", "state")


def recurrence(q, k, v, g, beta, state, cu_seqlens):
    """Token by token, as the formula stands (arXiv 2510.26692): [T, H, .], state [N, H, K, V]."""
    out, states = torch.empty_like(v), []
    for index, span in enumerate(parts(cu_seqlens)):
        memory, rows = state[index], []
        for t in range(span.start, span.stop):
            memory = memory * g[t].exp().unsqueeze(-1)
            known = torch.einsum("hkv,hk->hv", memory, k[t])
            fresh = beta[t].unsqueeze(-1) * (v[t] - known)
            memory = memory + torch.einsum("hk,hv->hkv", k[t], fresh)
            rows.append(torch.einsum("hkv,hk->hv", memory, q[t]))
        out = torch.cat([out[: span.start], torch.stack(rows), out[span.stop :]])
        states.append(memory)
    return out, torch.stack(states)


def inputs(kind: str, lengths=LENGTHS, heads=2, width=8, v_width=8, seed=0):
    torch.manual_seed(seed)
    count = sum(lengths)
    q = torch.nn.functional.normalize(torch.randn(count, heads, width).double(), dim=-1)
    k = torch.randn(count, heads, width).double()
    if kind == "correlated":
        k = k * 0.3 + torch.randn(heads, width).double()
    k = torch.nn.functional.normalize(k, dim=-1)
    v = torch.randn(count, heads, v_width).double()
    z = torch.randn(count, heads, width).double()
    g = {
        "mixed": -5 * torch.sigmoid(3 * z - 2),
        "saturated": torch.full_like(z, -5.0),
        "still": -1e-6 * z.abs(),
        "correlated": -0.01 * z.abs(),
        "edges": -5.0 * (z > 0).double(),
    }[kind]
    beta = torch.sigmoid(torch.randn(count, heads).double() + (3 if kind == "correlated" else 0))
    state = torch.randn(len(lengths), heads, width, v_width).double()
    tensors = [q, k, v, g, beta, state]
    return [x.requires_grad_() for x in tensors], torch.tensor([0, *lengths]).cumsum(0)


def tiled(q, k, v, g, beta, state, cu_seqlens):
    layout = Layout.of(cu_seqlens, len(q))
    there, back, mask = layout.head_rows(1, q.shape[1])
    shape = (layout.num_tiles, q.shape[1], 16)

    def tile(x):
        x = x.reshape(-1, x.shape[-1])[there]
        return (x if mask is None else x * mask).view(*shape, -1)

    out, after = delta_tiles(
        tile(q), tile(k), tile(v), tile(g), tile(beta.unsqueeze(-1)).squeeze(-1),
        state[layout.rank], layout.round_sizes, -5.0,
    )  # fmt: skip
    out = out.reshape(-1, v.shape[-1])[back].view(v.shape)
    return out, after[torch.argsort(layout.rank)]


@pytest.mark.parametrize("kind", ["mixed", "saturated", "still", "correlated", "edges"])
def test_tiles_equal_the_recurrence_in_values_and_gradients(kind):
    tensors, cu_seqlens = inputs(kind)
    torch.manual_seed(1)
    expected = recurrence(*tensors, cu_seqlens)
    found = tiled(*tensors, cu_seqlens)
    weights = [torch.randn_like(x) for x in expected]
    wanted = torch.autograd.grad(
        sum((a * b).sum() for a, b in zip(expected, weights, strict=True)), tensors
    )
    got = torch.autograd.grad(
        sum((a * b).sum() for a, b in zip(found, weights, strict=True)), tensors
    )
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-11)
    for name, a, b in zip(NAMES, wanted, got, strict=True):
        scale = float(a.abs().max())
        assert float((a - b).abs().max()) <= 1e-10 * max(scale, 1.0), name


@pytest.mark.parametrize("kind", ["mixed", "saturated", "correlated"])
def test_float32_tiles_stay_near_the_float64_recurrence(kind):
    tensors, cu_seqlens = inputs(kind, width=32, v_width=32)
    expected, _ = recurrence(*tensors, cu_seqlens)
    narrow = [x.detach().float().requires_grad_() for x in tensors]
    found, _ = tiled(*narrow, cu_seqlens)
    found.sum().backward()
    assert float((found - expected).detach().abs().max()) < 2e-5
    assert all(bool(x.grad.isfinite().all()) for x in narrow)


def test_steps_equal_the_recurrence():
    tensors, cu_seqlens = inputs("mixed", [9, 9, 9])
    q, k, v, g, beta, state = (x.detach() for x in tensors)
    expected, states = recurrence(q, k, v, g, beta, state, cu_seqlens)
    memory = state.clone()
    for t in range(9):
        rows = cu_seqlens[:-1] + t
        out = delta_step(q[rows], k[rows], v[rows], g[rows].exp(), beta[rows].unsqueeze(-1), memory)
        torch.testing.assert_close(out, expected[rows], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(memory, states, rtol=1e-12, atol=1e-13)


def test_a_carried_state_continues_at_any_token():
    tensors, _ = inputs("mixed", [70])
    q, k, v, g, beta, state = (x.detach() for x in tensors)
    whole, last = tiled(q, k, v, g, beta, state, torch.tensor([0, 70]))
    for cut in (1, 15, 16, 17, 40, 69):
        memory, outs = state, []
        for part in (slice(0, cut), slice(cut, 70)):
            bounds = torch.tensor([0, part.stop - part.start])
            out, memory = tiled(q[part], k[part], v[part], g[part], beta[part], memory, bounds)
            outs.append(out)
        torch.testing.assert_close(torch.cat(outs), whole, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(memory, last, rtol=1e-10, atol=1e-11)


def test_a_prefix_does_not_depend_on_later_tokens_of_its_tile():
    """Bit for bit in float32, in values and gradients: the anchor is row 0."""
    tensors, cu_seqlens = inputs("mixed", [32], width=32, v_width=32)
    first = [x.detach().float() for x in tensors]
    second = [x.clone() for x in first]
    for x in second[:5]:
        x[21:] = x[21:].flip(0) * 0.5
    grads = []
    for group in (first, second):
        leaves = [x.requires_grad_() for x in group]
        out, _ = tiled(*leaves, cu_seqlens)
        grads.append((out[:21], torch.autograd.grad(out[:21].square().sum(), leaves)))
    assert torch.equal(grads[0][0], grads[1][0])
    for a, b in zip(grads[0][1][:5], grads[1][1][:5], strict=True):
        assert torch.equal(a[:21], b[:21])
        assert not b[21:].any()
