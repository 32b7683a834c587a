"""The tiled delta rule against a float64 token recurrence: outputs, states and every gradient."""

import pytest
import torch

from k3rl.model.delta import delta_pairs, delta_step, delta_tiles
from k3rl.model.kda import delta_rule
from k3rl.model.layout import Layout
from tests.model.model_builders import parts

LENGTHS = [1, 16, 47, 1, 85]
NAMES = ("q", "k", "v", "g", "beta", "state")


def recurrence(q, k, v, g, beta, state, cu_seqlens):
    """Token by token, as the formula stands (arXiv 2510.26692): [T, H, .], state [N, H, K, V]."""
    rows, states = [], []
    decay = g.exp().unsqueeze(-1)
    tokens = list(zip(*(x.unbind(0) for x in (q, k, v, decay, beta.unsqueeze(-1))), strict=True))
    for memory, span in zip(state.unbind(0), parts(cu_seqlens), strict=True):
        for query, key, value, keep, write in tokens[span]:
            memory = memory * keep
            known = torch.einsum("hkv,hk->hv", memory, key)
            memory = memory + torch.einsum("hk,hv->hkv", key, write * (value - known))
            rows.append(torch.einsum("hkv,hk->hv", memory, query))
        states.append(memory)
    return torch.stack(rows), torch.stack(states)


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


def tiled(q, k, v, g, beta, state, cu_seqlens, bound=-5.0):
    """`bound` None: the form for log-decays without one."""
    layout = Layout.of(cu_seqlens, len(q))
    there, back, mask = layout.head_rows(1, q.shape[1])
    shape = (layout.num_tiles, q.shape[1], 16)

    def tile(x):
        x = x.reshape(-1, x.shape[-1])[there]
        return (x if mask is None else x * mask).view(*shape, -1)

    tiles = tile(q), tile(k), tile(v), tile(g), tile(beta.unsqueeze(-1)).squeeze(-1)
    inputs = *tiles, state[layout.rank], layout.round_sizes
    out, after = delta_pairs(*inputs) if bound is None else delta_tiles(*inputs, bound)
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


LONG_DECAYS = {"gone": -5.0, "kept": -1e-9}


def long_inputs(kind, lengths, heads=2, width=16):
    """Keys of cosine 0.9 on average, strong writes; log-decays all at one end of their range."""
    generator = torch.Generator().manual_seed(3)
    count = sum(lengths)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def unit(x):
        return torch.nn.functional.normalize(x, dim=-1)

    common, own = unit(drawn(heads, width)), unit(drawn(count, heads, width))
    k = unit(0.9**0.5 * common + 0.1**0.5 * own)
    q, v = unit(drawn(count, heads, width)) * width**-0.5, drawn(count, heads, width)
    g = torch.full_like(q, LONG_DECAYS[kind])
    beta = torch.sigmoid(drawn(count, heads) + 2)
    state = drawn(len(lengths), heads, width, width)
    return [q, k, v, g, beta, state], torch.tensor([0, *lengths]).cumsum(0)


def off(found, expected, least=0.0):
    """The largest difference, as a part of the largest value or of `least`."""
    assert found.isfinite().all()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=least))


@pytest.mark.parametrize("kind", LONG_DECAYS)
def test_tiles_equal_the_recurrence_over_4096_tokens(kind):
    """In float32 within 16 units in the last place: every tile rounds the state anew, and its
    erasures take back what earlier ones left wrong, so that nothing piles up.
    """
    tensors, cu_seqlens = long_inputs(kind, [4096])
    cosines = torch.einsum("ihk,jhk->hij", tensors[1][:300], tensors[1][:300])
    assert float(cosines.mean()) == pytest.approx(0.9, abs=0.02)
    expected = recurrence(*tensors, cu_seqlens)
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 2e-6)):
        found = tiled(*(x.to(dtype) for x in tensors), cu_seqlens)
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == dtype
            assert off(a, b) <= bound


@pytest.mark.parametrize("kind", LONG_DECAYS)
def test_the_rule_equals_the_recurrence_over_4096_tokens(kind):
    """Raw decays so far out that the gate is at its bound."""
    (q, k, v, g, beta, state), cu_seqlens = long_inputs(kind, [4096])
    z = torch.full_like(q, {"gone": 60.0, "kept": -22.0}[kind])
    rate = torch.tensor([0.0, 0.1], dtype=torch.float64)
    g = -5.0 * torch.sigmoid(rate.exp()[:, None] * z)
    norms = [x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k)]
    expected = recurrence(norms[0] * 16**-0.5, norms[1], v, g, beta, state, cu_seqlens)
    qkv, layout = torch.stack([q, k, v], 1), Layout.of(cu_seqlens, 4096)
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 2e-6)):
        raw = (x.to(dtype) for x in (qkv, z, torch.logit(beta), rate))
        found = delta_rule(*raw, -5.0, state.to(dtype), layout)
        for a, b in zip(found, expected, strict=True):
            assert off(a, b) <= bound


def weighed(outs, weights):
    return sum((a * b).sum() for a, b in zip(outs, weights, strict=True))


@pytest.mark.parametrize("kind", LONG_DECAYS)
def test_long_gradients_equal_those_of_the_recurrence(kind):
    """In float32 that of a decay of e^-5 is the small rest of sums that cancel."""
    tensors, cu_seqlens = long_inputs(kind, [512])
    leaves = [x.requires_grad_() for x in tensors]
    outs = recurrence(*leaves, cu_seqlens)
    generator = torch.Generator().manual_seed(4)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in outs]
    expected = torch.autograd.grad(weighed(outs, weights), leaves)
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 5e-5)):
        narrow = [x.detach().to(dtype).requires_grad_() for x in tensors]
        found = tiled(*narrow, cu_seqlens)
        grads = torch.autograd.grad(weighed(found, [x.to(dtype) for x in weights]), narrow)
        for name, a, b in zip(NAMES, grads, expected, strict=True):
            assert off(a, b) <= bound, name


@pytest.mark.parametrize("kind", ["all_gone", "some_gone", "spread"])
def test_the_unbounded_form_equals_the_recurrence_down_to_minus_200(kind):
    """In float32 a running log-decay of 16 * 200 is known to 1.2e-4, and so is its exponential.

    Where all is gone, so are the gradients of decays and states: e^-200 of the others.
    """
    (q, k, v, g, beta, state), cu_seqlens = long_inputs("kept", [1, 16, 47, 150])
    draw = torch.rand(g.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    g = {
        "all_gone": torch.full_like(g, -200.0),
        "some_gone": torch.where(draw < 0.2, -200.0, -0.1 * draw),
        "spread": -200.0 * draw**6,
    }[kind]
    tensors = [x.requires_grad_() for x in (q, k, v, g, beta, state)]
    outs = recurrence(*tensors, cu_seqlens)
    generator = torch.Generator().manual_seed(4)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in outs]
    expected = torch.autograd.grad(weighed(outs, weights), tensors)
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 1.2e-4)):
        narrow = [x.detach().to(dtype).requires_grad_() for x in tensors]
        found = tiled(*narrow, cu_seqlens, bound=None)
        for a, b in zip(found, outs, strict=True):
            assert off(a.detach(), b.detach()) <= bound
        grads = torch.autograd.grad(weighed(found, [x.to(dtype) for x in weights]), narrow)
        for name, a, b in zip(NAMES, grads, expected, strict=True):
            assert off(a, b, least=1e-3) <= bound, name
