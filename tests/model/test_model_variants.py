"""The switches of a config: each form against its formula, and one function however it is run."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from k3rl.errors import UserInputError
from k3rl.model import dispatch
from k3rl.model.attn_res import Residuals, mix
from k3rl.model.config import KdaConfig, MlaConfig, MoeConfig
from k3rl.model.kda import KimiDeltaAttention
from k3rl.model.layout import Layout
from k3rl.model.mla import GatedMla
from k3rl.model.moe import LatentMoe
from k3rl.model.mxfp4 import fake_quantise_activation, fake_quantise_weight
from k3rl.model.ops import rms_norm, situ_glu
from k3rl.model.routing import Routing
from k3rl.model.state import BatchState, ModelState, StatePool
from k3rl.model.stepping import StepPlan
from tests.model.model_builders import (
    batch,
    filled,
    lively_model,
    norm,
    parts,
    small_config,
    stepped,
)

LENGTHS = [37, 1, 20]
KIMI_KDA = KdaConfig(2, 8, decay_rank=5, decay="softplus", gate_rank=6)
KIMI_MLA = MlaConfig(2, None, 12, 7, 4, 9, output_gate=False)
KIMI_MOE = MoeConfig(40, 6, 2, None, 12, 16, routed_scaling_factor=2.5)
LATENT_MOE = MoeConfig(40, 6, 2, 10, 12, 16)
QUANTISED = MoeConfig(40, 6, 2, 32, 32, 16, quantised=True)
FORMS = {
    "released": {},
    "full": {"attn_res": "full"},
    "no MLA": {"layer_kinds": ("kda", "kda", "kda")},
    "no KDA": {"layer_kinds": ("mla", "mla")},
    "all dense": {"moe": MoeConfig(40, 6, 2, 10, 12, 16, num_dense_layers=5)},
    "off": {"attn_res": "off"},
    "latent router": {"moe": dataclasses.replace(LATENT_MOE, router_input="latent")},
    "kimi linear": {"attn_res": "off", "activation": "silu", "kda": KIMI_KDA, "mla": KIMI_MLA,
                    "moe": KIMI_MOE},
    "quantised": {"moe": QUANTISED},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forward_extend_and_step_are_one_function(form):
    model = lively_model(config=small_config(**FORMS[form]))
    ids, cu = batch(LENGTHS)
    with torch.no_grad():
        whole, _ = model(ids, cu)
    pool = StatePool(model.config, 4, 40, torch.float64)
    slots = [pool.allocate() for _ in LENGTHS]
    assert float((stepped(model, ids, cu, pool, slots) - whole).abs().max()) < 1e-9
    lays_out = form in {"released", "no MLA", "no KDA", "all dense"}
    assert StepPlan.lays_out(model.config) == lays_out
    state = pool.gather(torch.tensor(slots))
    again = ModelState.from_bytes(state.split()[0].to_bytes(), model.config)
    assert again.num_tokens == LENGTHS[0]
    assert torch.equal(BatchState.join(state.split()).lengths, state.lengths)
    for slot in slots:
        pool.clear(slot)
    extended = model.extend(ids, cu, pool, torch.tensor(slots))
    assert float((extended - whole).abs().max()) < 1e-9
    with torch.no_grad():
        for span in parts(cu):
            alone, _ = model(ids[span], torch.tensor([0, span.stop - span.start]))
            assert float((alone - whole[span]).abs().max()) < 1e-10


@pytest.mark.parametrize("form", FORMS)
def test_every_parameter_that_is_used_learns(form):
    model = lively_model(config=small_config(**FORMS[form]))
    ids, cu = batch(LENGTHS)
    hidden, _ = model(ids, cu)
    model.head(hidden).log_softmax(-1)[:, 0].sum().backward()
    unused = {name for name, p in model.named_parameters() if p.grad is None}
    mixers = {f"model.layers.0.self_attention_res_{part}.weight" for part in ("norm", "proj")}
    assert unused == (set() if model.config.attn_res == "off" else mixers)
    for name, parameter in model.named_parameters():
        assert name in unused or bool(parameter.grad.isfinite().all()), name


def test_kimi_linear_kda_is_its_formula():
    """Decay without a bound, output gate through a low rank (arXiv 2510.26692)."""
    config = small_config(**FORMS["kimi linear"])
    layer = filled(KimiDeltaAttention(config))
    x = torch.randn(20, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found, after = layer(x, Layout.of(torch.tensor([0, 20]), 20), None)

    def conv(weight, taps):
        y = F.pad((x @ weight.weight.t()).t()[None], (3, 0))
        return F.silu(F.conv1d(y, taps.weight, groups=16)[0].t()).view(20, 2, 8)

    def unit(y):
        return y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    q = unit(conv(layer.q_proj, layer.q_conv1d)) * 8**-0.5
    k = unit(conv(layer.k_proj, layer.k_conv1d))
    v = conv(layer.v_proj, layer.v_conv1d)
    z = x @ layer.f_a_proj.weight.t() @ layer.f_b_proj.weight.t() + layer.dt_bias
    decay = (-layer.A_log.exp()[:, None] * F.softplus(z.view(20, 2, 8))).exp()
    beta = torch.sigmoid(x @ layer.b_proj.weight.t())
    memory, rows = torch.zeros(2, 8, 8).double(), []
    for t in range(20):
        memory = decay[t].unsqueeze(-1) * memory
        fresh = beta[t].unsqueeze(-1) * (v[t] - torch.einsum("hkv,hk->hv", memory, k[t]))
        memory = memory + torch.einsum("hk,hv->hkv", k[t], fresh)
        rows.append(torch.einsum("hkv,hk->hv", memory, q[t]))
    out = norm(torch.stack(rows), layer.o_norm.weight, 1e-5).flatten(1)
    gate = torch.sigmoid(x @ layer.g_a_proj.weight.t() @ layer.g_b_proj.weight.t())
    assert torch.allclose(found, (out * gate) @ layer.o_proj.weight.t(), atol=1e-12)
    assert torch.allclose(after.memory[0], memory, atol=1e-12)


def test_kimi_linear_attention_has_no_query_latent_and_no_gate():
    config = small_config(**FORMS["kimi linear"])
    layer = filled(GatedMla(config))
    assert not hasattr(layer, "g_proj")
    x = torch.randn(17, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found, _ = layer(x, Layout.of(torch.tensor([0, 17]), 17), None, None)
    q = (x @ layer.q_proj.weight.t()).view(17, 2, 11)
    down = x @ layer.kv_a_proj_with_mqa.weight.t()
    inner = norm(down[:, :12], layer.kv_a_layernorm.weight, 1e-6)
    kv = (inner @ layer.kv_b_proj.weight.t()).view(17, 2, 16)
    k = torch.cat([kv[..., :7], down[:, None, 12:].expand(17, 2, 4)], -1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * 11**-0.5
    scores = scores.masked_fill(torch.ones(17, 17).triu(1).bool(), -torch.inf)
    out = torch.einsum("hij,jhd->ihd", scores.softmax(-1), kv[..., 7:]).flatten(1)
    assert torch.allclose(found, out @ layer.o_proj.weight.t(), atol=1e-12)


@pytest.mark.parametrize("form", ["kimi linear", "latent router"])
def test_experts_of_other_forms_equal_a_loop_over_tokens(form):
    config = small_config(**FORMS[form])
    layer = filled(LatentMoe(config))
    x = torch.randn(30, 24, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    routing = Routing.record()
    found = layer(x, routing)

    def unit(a, b):
        return situ_glu(a, b, 4.0, 25.0) if form == "latent router" else F.silu(a) * b

    z = x if form == "kimi linear" else x @ layer.routed_expert_down_proj.weight.t()
    scores = torch.sigmoid((z if form == "latent router" else x) @ layer.gate.weight.t())
    assert torch.equal(routing.ids[:, 0], scores.topk(2).indices)
    rows = []
    for t, experts in enumerate(routing.ids[:, 0].tolist()):
        law = (
            scores[t, experts]
            / (scores[t, experts].sum() + 1e-20)
            * config.moe.routed_scaling_factor
        )
        w1, w2, w3 = layer.experts.w1, layer.experts.w2, layer.experts.w3
        rows.append(
            sum(
                p * (w2[e] @ unit(w1[e] @ z[t], w3[e] @ z[t]))
                for p, e in zip(law, experts, strict=True)
            )
        )
    routed = torch.stack(rows)
    if form == "latent router":
        routed = norm(routed, layer.routed_expert_norm.weight, 1e-5)
        routed = routed @ layer.routed_expert_up_proj.weight.t()
    shared = layer.shared_experts
    inner = unit(x @ shared.gate_proj.weight.t(), x @ shared.up_proj.weight.t())
    assert torch.allclose(found, inner @ shared.down_proj.weight.t() + routed, atol=1e-12)


def test_the_full_form_mixes_every_sublayer_output():
    model = lively_model(config=small_config(attn_res="full"))
    sites = model.model.sites()
    outs = [
        torch.randn(9, 24, generator=torch.Generator().manual_seed(n)).double() for n in range(8)
    ]
    sources = Residuals(outs[0], sites, model.config)
    for n, out in enumerate(outs[1:]):
        site = n
        sources.mix(site)
        if n % 2 == 0:
            sources.begin(n // 2)
        sources.add(out)
        norm_weight, proj = sites[site + 1]
        expected = mix(outs[: n + 2], norm_weight.weight, proj.weight, 1e-5)
        assert torch.allclose(sources.mix(site + 1), expected, atol=1e-13)


def test_without_mixing_layers_add_to_a_residual_stream():
    model = lively_model(config=small_config(attn_res="off"))
    assert not [name for name in model.state_dict() if "_res_" in name]
    ids, cu = batch([12])
    layers, x = model.model.layers, model.model.embed_tokens.weight[ids]
    layout = Layout.of(cu, 12)
    for layer in layers:
        normed = rms_norm(x, layer.input_layernorm.weight, 1e-5)
        rest = (None,) if layer.is_kda else (None, None)
        x = x + layer.self_attn(normed, layout, *rest)[0]
        x = x + layer.feed_forward(rms_norm(x, layer.post_attention_layernorm.weight, 1e-5), None)
    expected = rms_norm(x, model.model.norm.weight, 1e-5)
    assert torch.allclose(model(ids, cu)[0], expected, atol=1e-12)


@pytest.mark.parametrize("block_size", [1, 2, 3, 12])
def test_two_phases_are_the_same_function_and_gradient(block_size):
    model = lively_model(config=small_config(attn_res_block_size=block_size))
    ids, cu = batch(LENGTHS)
    found = []
    for is_two_phase in (False, True):
        model.zero_grad()
        model.model.two_phase = is_two_phase
        hidden, _ = model(ids, cu)
        hidden.square().sum().backward()
        found.append((hidden.detach(), {n: p.grad for n, p in model.named_parameters()}))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-11)
    for name, grad in found[0][1].items():
        other = found[1][1][name]
        assert (grad is None) == (other is None)
        assert grad is None or torch.allclose(grad, other, rtol=1e-9, atol=1e-10), name


def test_quantised_experts_compute_with_the_values_they_will_be_served_with():
    config = small_config(moe=QUANTISED)
    layer = filled(LatentMoe(config))
    plain = LatentMoe(small_config(moe=dataclasses.replace(QUANTISED, quantised=False))).double()
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(30, 24, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    z = x @ layer.routed_expert_down_proj.weight.t()
    chosen, weights = layer.gate(x, None)
    w1, w2, w3 = (
        fake_quantise_weight(w) for w in (layer.experts.w1, layer.experts.w2, layer.experts.w3)
    )
    z, rows = fake_quantise_activation(z), []
    for t, experts in enumerate(chosen.tolist()):
        inner = [
            fake_quantise_activation(situ_glu(w1[e] @ z[t], w3[e] @ z[t], 4.0, 25.0))
            for e in experts
        ]
        rows.append(
            sum(p * (w2[e] @ h) for p, e, h in zip(weights[t], experts, inner, strict=True))
        )
    mixed = norm(torch.stack(rows), layer.routed_expert_norm.weight, 1e-5)
    expected = layer.shared_experts(x) + mixed @ layer.routed_expert_up_proj.weight.t()
    found = layer(x, None)
    assert torch.allclose(found, expected, atol=1e-10)
    assert 1e-3 < float((found - plain(x, None)).detach().abs().max()) < 1.0
    found.sum().backward()
    assert all(float(w.grad.abs().max()) > 0 for w in layer.experts.parameters())


def test_a_kernel_takes_over_what_it_fits_and_only_under_the_same_signature():
    gate, up = torch.randn(6, 4), torch.randn(6, 4)
    calls = []

    def by_formula(gate, up, gate_beta, up_beta):
        calls.append(gate.shape)
        return (
            gate_beta * up_beta * (gate / gate_beta).tanh() * gate.sigmoid() * (up / up_beta).tanh()
        )

    expected = situ_glu(gate, up, 4.0, 25.0)
    dispatch.add_kernel("situ_glu", by_formula, lambda gate, *rest: len(gate) > 5)
    try:
        assert torch.allclose(situ_glu(gate, up, 4.0, 25.0), expected, atol=1e-6)
        assert torch.equal(situ_glu(gate[:3], up[:3], 4.0, 25.0), expected[:3])
        with dispatch.using("torch"):
            assert torch.equal(situ_glu(gate, up, 4.0, 25.0), expected)
        assert calls == [(6, 4)]
        with pytest.raises(UserInputError, match="takes"):
            dispatch.add_kernel("situ_glu", lambda gate, up: gate, lambda *_: True)
        with pytest.raises(UserInputError, match="no operation 'sitting'"):
            dispatch.add_kernel("sitting", by_formula, lambda *_: True)
    finally:
        dispatch.remove_kernel("situ_glu")
    assert dispatch.operations() == ["causal_conv", "delta_rule", "expert_mlp", "mix", "situ_glu"]


def test_states_of_other_forms_carry_gradients():
    model = lively_model(config=small_config(**FORMS["kimi linear"]))
    ids, _ = batch([30])
    state = BatchState.zeros(model.config, 1, torch.float64)
    first, state = model(ids[:13], torch.tensor([0, 13]), state)
    second, _ = model(ids[13:], torch.tensor([0, 17]), state)
    whole, _ = model(ids, torch.tensor([0, 30]))
    parameter = model.model.layers[0].self_attn.A_log
    (found,) = torch.autograd.grad(torch.cat([first, second]).square().sum(), parameter)
    (wanted,) = torch.autograd.grad(whole.square().sum(), parameter)
    assert torch.allclose(found, wanted, rtol=1e-10)
