"""Each part of the model against the plainest code for its formula, in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from k3rl.errors import UserInputError
from k3rl.model.attn_res import mix
from k3rl.model.config import KdaConfig
from k3rl.model.conv import causal_conv
from k3rl.model.kda import KimiDeltaAttention
from k3rl.model.layout import Layout
from k3rl.model.mla import GatedMla
from k3rl.model.moe import LatentMoe
from k3rl.model.ops import decay_gate, l2_norm, rms_norm, sigmoid_gate, situ_glu
from k3rl.model.routing import Routing
from tests.model.model_builders import filled, norm, parts, randn, small_config

CU = torch.tensor([0, 1, 3, 8, 25])


def leaves(*tensors):
    return tuple(x.requires_grad_() for x in tensors)


def situ(gate, up):
    return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)


def test_layout_gathers_and_returns_every_token():
    layout = Layout.of(CU, 25)
    assert layout.round_sizes == (4, 1)
    x = randn(25, 3, 2, 5)
    there, back, mask = layout.head_rows(3, 2)
    tiles = x.reshape(-1, 5)[there].view(3, layout.num_tiles, 2, 16, 5)
    assert torch.equal(tiles.reshape(-1, 5)[back].view(25, 3, 2, 5), x)
    assert mask.sum() == 25 * 2
    # The longest sequence owns the first tile of both rounds.
    assert torch.equal(tiles[1, 0, 1], x[8:24, 1, 1])
    assert torch.equal(tiles[2, 4, 0, :1], x[24:, 2, 0])


@pytest.mark.parametrize("bounds", [[0, 3, 3, 25], [0, 26], [1, 25], [0, 30, 25]])
def test_layout_refuses_bounds_that_do_not_fit(bounds):
    with pytest.raises(UserInputError, match="cu_seqlens"):
        Layout.of(torch.tensor(bounds), 25)


def test_norms_and_gates_match_their_formulas_and_gradients():
    x, weight, gate = leaves(randn(5, 7), randn(7, seed=1), randn(5, 7, seed=2))
    assert torch.allclose(rms_norm(x, weight, 1e-5), norm(x, weight, 1e-5), atol=1e-14)
    unit = 0.5 * x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.allclose(l2_norm(x, 0.5), unit, atol=1e-14)
    assert torch.allclose(sigmoid_gate(x, gate), x * torch.sigmoid(gate), atol=1e-14)
    assert gradcheck(lambda a, b: rms_norm(a, b, 1e-2), (x, weight))
    assert gradcheck(lambda a: l2_norm(a, 0.5), (x,))
    assert gradcheck(sigmoid_gate, (x, gate))


def test_decay_gate_matches_its_formula_and_gradient():
    z, rate = leaves(randn(4, 3, 5), randn(3, seed=1))
    expected = -5 * torch.sigmoid(rate.exp().unsqueeze(-1) * z)
    assert torch.allclose(decay_gate(z, rate, -5.0), expected, atol=1e-14)
    assert gradcheck(lambda a, b: decay_gate(a, b, -5.0), (z, rate))


def test_situ_glu_is_bounded_and_its_gradient_holds_far_out():
    gate, up = leaves(randn(6, 5) * 10, randn(6, 5, seed=1) * 40)
    assert torch.allclose(situ_glu(gate, up, 4.0, 25.0), situ(gate, up), atol=1e-12)
    assert situ_glu(torch.tensor([1e6]), torch.tensor([-1e6]), 4.0, 25.0).item() == -100.0
    assert gradcheck(lambda a, b: situ_glu(a, b, 4.0, 25.0), (gate, up))


def test_mix_is_a_softmax_over_normed_scores_of_raw_sources():
    sources = leaves(*(randn(6, 5, seed=n) for n in range(3)))
    weight, proj = leaves(randn(5, seed=8), randn(1, 5, seed=9))
    scores = torch.stack([(norm(v, weight, 1e-5) * proj[0]).sum(-1) for v in sources])
    law = torch.softmax(scores, 0).unsqueeze(-1)
    expected = (law * torch.stack(sources)).sum(0)
    assert torch.allclose(mix(list(sources), weight, proj, 1e-5), expected, atol=1e-13)
    assert gradcheck(lambda w, p, *v: mix(list(v), w, p, 1e-2), (weight, proj, *sources))


def test_zero_pseudo_query_averages():
    sources = [randn(6, 5, seed=n) for n in range(3)]
    mixed = mix(sources, torch.ones(5).double(), torch.zeros(1, 5).double(), 1e-5)
    assert torch.allclose(mixed, torch.stack(sources).mean(0), atol=1e-14)


def test_conv_sees_its_own_past_only():
    x, taps, history = leaves(randn(25, 6), randn(4, 6, seed=1), randn(4, 3, 6, seed=2))
    layout = Layout.of(CU, 25)
    out, after = causal_conv(x, taps, layout, history)
    for index, span in enumerate(parts(CU)):
        whole = torch.cat([history[index], x[span]])
        expected = F.conv1d(whole.t()[None], taps.t()[:, None], groups=6)[0].t()
        assert torch.allclose(out[span], expected, atol=1e-13)
        assert torch.equal(after[index], whole[-3:])
    out, _ = causal_conv(x, taps, layout, None)
    zeros, _ = causal_conv(x, taps, layout, torch.zeros(4, 3, 6).double())
    assert torch.equal(out, zeros)
    assert gradcheck(lambda a, b, c: causal_conv(a, b, layout, c), (x, taps, history))


def test_kda_layer_is_its_formula():
    config = small_config()
    layer = filled(KimiDeltaAttention(config))
    x = randn(20, config.hidden_size, seed=3)
    found, after = layer(x, Layout.of(torch.tensor([0, 20]), 20), None)

    def project(module):
        return x @ module.weight.t()

    def short_conv(y, conv):
        y = torch.cat([y.new_zeros(3, y.shape[1]), y])
        y = F.conv1d(y.t()[None], conv.weight, groups=conv.weight.shape[0])[0].t()
        return F.silu(y).view(20, 2, 8)

    q = short_conv(project(layer.q_proj), layer.q_conv1d)
    k = short_conv(project(layer.k_proj), layer.k_conv1d)
    v = short_conv(project(layer.v_proj), layer.v_conv1d)
    q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() * 8**-0.5
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    z = (project(layer.f_a_proj) @ layer.f_b_proj.weight.t() + layer.dt_bias).view(20, 2, 8)
    decay = (-5 * torch.sigmoid(layer.A_log.exp()[:, None] * z)).exp()
    beta = torch.sigmoid(project(layer.b_proj))
    memory, rows = torch.zeros(2, 8, 8).double(), []
    for t in range(20):
        memory = decay[t].unsqueeze(-1) * memory
        fresh = beta[t].unsqueeze(-1) * (v[t] - torch.einsum("hkv,hk->hv", memory, k[t]))
        memory = memory + torch.einsum("hk,hv->hkv", k[t], fresh)
        rows.append(torch.einsum("hkv,hk->hv", memory, q[t]))
    out = norm(torch.stack(rows), layer.o_norm.weight, 1e-5).flatten(1)
    expected = (out * torch.sigmoid(project(layer.g_proj))) @ layer.o_proj.weight.t()
    assert torch.allclose(found, expected, atol=1e-12)
    assert torch.allclose(after.memory[0], memory, atol=1e-12)


def test_mla_expands_and_absorbs_to_the_same():
    config = small_config()
    layer, mla = filled(GatedMla(config)), config.mla
    x = randn(25, config.hidden_size, seed=3)
    layout = Layout.of(CU, 25)
    expanded, nothing = layer(x, layout, None, None)
    assert nothing is None
    # Room that no sequence fills yet: what lies there must not matter.
    room, lengths = randn(4, 3, mla.latent_dim, seed=7), torch.zeros(4, dtype=torch.int64)
    absorbed, cached = layer(x, layout, room, lengths)
    again, latents = layer(x, layout, room[:, :0], lengths)
    assert torch.allclose(expanded, absorbed, atol=1e-12)
    assert torch.equal(expanded, again)
    assert torch.equal(cached[3], latents[3])
    assert cached.shape == (4, 17, mla.latent_dim)

    y = x[8:]
    low = norm(y @ layer.q_a_proj.weight.t(), layer.q_a_layernorm.weight, 1e-6)
    q = (low @ layer.q_b_proj.weight.t()).view(17, 2, 11)
    down = y @ layer.kv_a_proj_with_mqa.weight.t()
    inner = norm(down[:, :12], layer.kv_a_layernorm.weight, 1e-6)
    kv = (inner @ layer.kv_b_proj.weight.t()).view(17, 2, 16)
    k = torch.cat([kv[..., :7], down[:, None, 12:].expand(17, 2, 4)], -1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * 11**-0.5
    scores = scores.masked_fill(torch.ones(17, 17).triu(1).bool(), -torch.inf)
    out = torch.einsum("hij,jhd->ihd", scores.softmax(-1), kv[..., 7:]).flatten(1)
    expected = (out * torch.sigmoid(y @ layer.g_proj.weight.t())) @ layer.o_proj.weight.t()
    assert torch.allclose(expanded[8:], expected, atol=1e-12)


def naive_moe(layer, x, chosen):
    def glu(z, gate, up, down):
        return situ(z @ gate.t(), z @ up.t()) @ down.t()

    scores = torch.sigmoid(x @ layer.gate.weight.t())
    rows = []
    for t in range(len(x)):
        z = x[t] @ layer.routed_expert_down_proj.weight.t()
        total = scores[t, chosen[t]].sum() + 1e-20
        mixed = sum(
            scores[t, e] / total
            * glu(z, layer.experts.w1[e], layer.experts.w3[e], layer.experts.w2[e])
            for e in chosen[t].tolist()
        )  # fmt: skip
        mixed = norm(mixed, layer.routed_expert_norm.weight, 1e-5)
        shared = layer.shared_experts
        dense = glu(x[t], shared.gate_proj.weight, shared.up_proj.weight, shared.down_proj.weight)
        rows.append(dense + mixed @ layer.routed_expert_up_proj.weight.t())
    return torch.stack(rows)


def test_moe_equals_a_loop_over_tokens_in_both_forms_and_in_gradients():
    config = small_config()
    layer = filled(LatentMoe(config))
    layer.gate.e_score_correction_bias.copy_(randn(6, seed=4))
    x = randn(30, config.hidden_size, seed=5).requires_grad_()
    routing = Routing.record()
    found = layer(x, routing)
    scores = torch.sigmoid(x @ layer.gate.weight.t())
    top = (scores + layer.gate.e_score_correction_bias).topk(3)
    chosen = routing.ids[:, 0]
    assert torch.equal(chosen, top.indices[:, :2])
    assert torch.allclose(routing.margins[:, 0], top.values[:, 1] - top.values[:, 2])
    expected = naive_moe(layer, x, chosen)
    assert torch.allclose(found, expected, atol=1e-12)
    with torch.no_grad():
        assert torch.allclose(layer(x, None), expected, atol=1e-12)
    tensors = [x, *layer.parameters()]
    wanted = torch.autograd.grad(expected.square().sum(), tensors)
    got = torch.autograd.grad(found.square().sum(), tensors)
    for a, b in zip(wanted, got, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-10)


def test_pinned_experts_are_used_and_still_weighted_by_their_scores():
    config = small_config()
    layer = filled(LatentMoe(config))
    x = randn(30, config.hidden_size, seed=5)
    pinned = torch.stack([torch.randperm(6)[:2] for _ in range(30)]).unsqueeze(1)
    found = layer(x, Routing.pin(pinned))
    assert torch.allclose(found, naive_moe(layer, x, pinned[:, 0]), atol=1e-12)
    found.sum().backward()
    assert layer.gate.weight.grad.abs().max() > 0


def test_induction_heads_start_with_shared_queries_and_keys_one_token_late():
    config = small_config(kda=KdaConfig(2, 8, 5, num_induction_heads=1))
    layer = filled(KimiDeltaAttention(config))
    layer.reset(torch.Generator().manual_seed(0))
    assert torch.equal(layer.k_proj.weight[:8], layer.q_proj.weight[:8])
    assert not torch.equal(layer.k_proj.weight[8:], layer.q_proj.weight[8:])
    assert layer.k_conv1d.weight[:8, 0].tolist() == [[0.0, 0.0, 1.0, 0.0]] * 8
    assert layer.q_conv1d.weight[:8, 0].tolist() == [[0.0, 0.0, 0.0, 1.0]] * 8
