"""Each part of the model against golden values of the released code, gradients where stored."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from k3rl.model import moe
from k3rl.model.attn_res import merge, mix, mix_bank
from k3rl.model.kda import KdaState, KimiDeltaAttention, delta_rule
from k3rl.model.layout import Layout
from k3rl.model.mla import GatedMla
from k3rl.model.moe import LatentMoe, Router
from k3rl.model.ops import situ_glu, wide
from k3rl.model.routing import Routing
from tests.model.golden import (
    CASES,
    DTYPES,
    assert_stored,
    below,
    bfloat16_steps,
    distance,
    equal_layout,
    golden,
    golden_config,
)

DELTA_CASES = [name for name in CASES if name.startswith("kda_op_")]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float64", "float32"])


def leaf(x, dtype):
    return x.to(dtype).requires_grad_()


def delta_layout(case, is_aligned):
    batch, length = case["q"].shape[:2]
    cu_seqlens = case.get("cu_seqlens", torch.arange(batch + 1) * length)
    return Layout.of(cu_seqlens, batch * length, is_aligned)


def run_delta_rule(case, layout, leaves):
    """Outputs [B, T, H, V] and final states of raw inputs as the released layer has them."""
    heads, width = case["q"].shape[2:]
    padding = (0, layout.num_rows - layout.num_tokens)
    z = leaves["g_raw"] + leaves["dt_bias"].view(heads, width)
    qkv = torch.stack([leaves[name] for name in "qkv"], 2).flatten(0, 1)
    out, after = delta_rule(
        F.pad(qkv, (0, 0, 0, 0, 0, 0, *padding)),
        F.pad(z.flatten(0, 1), (0, 0, 0, 0, *padding)),
        F.pad(leaves["beta_logit"].flatten(0, 1), (0, 0, *padding)),
        leaves["A_log"], -5.0, leaves.get("initial_state"), layout,
    )  # fmt: skip
    return out[: layout.num_tokens].view(case["o"].shape), after


@pytest.mark.parametrize("is_aligned", [False, True], ids=["packed", "aligned"])
@each_dtype
@pytest.mark.parametrize("name", DELTA_CASES)
def test_the_delta_rule_is_the_released_one(name, dtype, is_aligned):
    case = golden(name)
    assert CASES[name]["config"]["lower_bound"] == -5.0
    leaves = {n.removeprefix("d_"): n for n in case if n.startswith("d_")}
    leaves = {n: leaf(case[n], dtype) for n in leaves}
    out, after = run_delta_rule(case, delta_layout(case, is_aligned), leaves)
    assert_stored(out, case["o"], 1e-4, "o")
    assert_stored(after, case["final_state"], 1e-4, "final_state")
    loss = (out * case["do"]).sum() + (after * case["dS"]).sum()
    grads = torch.autograd.grad(loss, leaves.values())
    for key, grad in zip(leaves, grads, strict=True):
        assert_stored(grad, case[f"d_{key}"], 1e-3, key)


def test_every_delta_rule_case_has_all_its_gradients():
    assert len(DELTA_CASES) == 7
    for name in DELTA_CASES:
        case = golden(name)
        inputs = {"q", "k", "v", "g_raw", "beta_logit", "A_log", "dt_bias"}
        inputs |= {"initial_state"} & set(case)
        assert {n for n in case if n.startswith("d_")} == {f"d_{n}" for n in inputs}


def kda_layer(dtype):
    """A_log is stored with zeros behind its heads."""
    weights = below(golden("kda_layer"), "w.")
    layer = KimiDeltaAttention(golden_config()).to(dtype)
    layer.load_state_dict(weights | {"A_log": weights["A_log"][: layer.kda.num_heads]})
    return layer


def packed(x, dtype):
    return x.to(dtype).flatten(0, 1)


@each_dtype
def test_a_kda_layer_is_the_released_one(dtype):
    case, layer = golden("kda_layer"), kda_layer(dtype)
    x = case["full.x"]
    out, _ = layer(packed(x, dtype), equal_layout(*x.shape[:2]), None)
    assert_stored(out.view(x.shape), case["full.y"], 1e-4)
    x, cu_seqlens = case["varlen.x"], case["varlen.cu_seqlens"]
    assert {1, 3} <= set(cu_seqlens.diff().tolist())
    out, _ = layer(packed(x, dtype), Layout.of(cu_seqlens, x.shape[1]), None)
    assert_stored(out.view(x.shape), case["varlen.y"], 1e-4)


@each_dtype
def test_a_kda_layer_carries_the_released_state(dtype):
    """Released memories are value-first, and of 4 convolution inputs the oldest is not needed."""
    case, layer, state = golden("kda_layer"), kda_layer(dtype), None
    for number in range(3):
        x = case[f"carry.x{number}"]
        out, state = layer(packed(x, dtype), equal_layout(*x.shape[:2]), state)
        assert_stored(out.view(x.shape), case[f"carry.y{number}"], 1e-4)
        memory = case[f"carry.state_v_first{number}"].transpose(2, 3)
        assert_stored(state.memory, memory, 1e-4)
        for kind, found in zip("qkv", state.history.chunk(3, -1), strict=True):
            stored = case[f"carry.conv_{kind}{number}"][..., 1:].transpose(1, 2)
            assert_stored(found, stored, 1e-4)
    assert isinstance(state, KdaState)


def mla_layer(dtype):
    layer = GatedMla(golden_config()).to(dtype)
    layer.load_state_dict(below(golden("gated_mla_layer"), "w."))
    return layer


def no_latents(layer, count, room):
    """Nothing cached for `count` sequences, in a cache with `room`; with room, MLA absorbs."""
    shape = (count, room, layer.mla.latent_dim)
    return torch.zeros(shape, dtype=layer.o_proj.weight.dtype), torch.zeros(count).long()


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
@each_dtype
def test_an_mla_layer_and_its_gradients_are_the_released_ones(dtype, form):
    case, layer = golden("gated_mla_layer"), mla_layer(dtype)
    x = leaf(case["x"], dtype)
    layout = equal_layout(*x.shape[:2])
    past = (None, None) if form == "expanded" else no_latents(layer, layout.num_sequences, 1)
    out, _ = layer(x.flatten(0, 1), layout, *past)
    assert_stored(out.view(x.shape), case["y"], 1e-4)
    (out.view(x.shape) * case["dy"]).sum().backward()
    assert_stored(x.grad, case["d_x"], 1e-4, "x")
    stored = below(case, "d_w.")
    assert len(stored) == 6
    for name, parameter in layer.named_parameters():
        if name in stored:
            assert_stored(parameter.grad, stored[name], 1e-4, name)


@each_dtype
def test_an_mla_layer_decodes_as_released(dtype):
    case, layer = golden("gated_mla_layer"), mla_layer(dtype)
    x, (past, lengths) = case["x"].to(dtype), no_latents(layer, 2, 0)
    _, past = layer(x[:, :32].flatten(0, 1), equal_layout(2, 32), past, lengths)
    out, past = layer(x[:, 32], equal_layout(2, 1), past, lengths + 32)
    assert_stored(out, case["decode_y_last"][:, 0], 1e-4)
    inner, shared = past.tensor_split([layer.mla.kv_lora_rank], -1)
    up_k, up_v = layer.up()
    key = torch.einsum("hdr,btr->bhtd", up_k, inner)
    key = torch.cat([key, shared.unsqueeze(1).expand(-1, key.shape[1], -1, -1)], -1)
    assert_stored(key, case["cache_key"], 1e-4)
    assert_stored(torch.einsum("hdr,btr->bhtd", up_v, inner), case["cache_value"], 1e-4)


def moe_layer(dtype):
    weights = below(golden("latent_moe_block"), "w.")
    layer = LatentMoe(golden_config()).to(dtype)
    state = {n: x for n, x in weights.items() if not n.startswith("experts.")}
    for part in ("w1", "w2", "w3"):
        experts = [weights[f"experts.{index}.{part}.weight"] for index in range(16)]
        state[f"experts.{part}"] = torch.stack(experts)
    layer.load_state_dict(state)
    return layer


@each_dtype
def test_a_mixture_of_experts_and_its_inside_are_the_released_ones(dtype, monkeypatch):
    case, layer = golden("latent_moe_block"), moe_layer(dtype)
    seen, norm = {}, moe.rms_norm

    def keep_experts(_, inputs, out):
        seen["latent_in"], seen["chosen"], seen["weights"] = inputs
        seen["routed_latent_sum"] = out

    def keep_norm(*args):
        seen["routed_latent_normed"] = norm(*args)
        return seen["routed_latent_normed"]

    monkeypatch.setattr(moe, "rms_norm", keep_norm)
    layer.experts.register_forward_hook(keep_experts)
    layer.shared_experts.register_forward_hook(lambda _, __, out: seen.update(shared_out=out))
    x = case["x"]
    seen["y"] = layer(packed(x, dtype), None)
    chosen, order = seen["chosen"].sort(1)
    assert torch.equal(chosen, case["route_ids"].long())
    assert distance(seen["weights"].gather(1, order), case["route_weights"]) <= (
        1e-12 if dtype == torch.float64 else 1e-6
    )
    for name in ("latent_in", "routed_latent_sum", "routed_latent_normed", "shared_out", "y"):
        assert_stored(seen[name].view(case[name].shape), case[name], 1e-4, name)


def one_phase(sources, norm, proj):
    return mix(sources, norm, proj, 1e-5)


def two_phase(sources, norm, proj):
    """The bank first, the running sum behind it."""
    query = wide(norm) * wide(proj[0])
    partial = mix_bank(sources[:-1], query.unsqueeze(0), 1e-5)
    return merge(partial, 0, query, sources[-1], 1e-5)


MIXES = [(one_phase, count) for count in range(1, 10)]
MIXES += [(two_phase, count) for count in range(2, 10)]


@each_dtype
@pytest.mark.parametrize(
    ("form", "count"), MIXES, ids=[f"{form.__name__}-m{count}" for form, count in MIXES]
)
def test_a_mixer_and_its_gradients_are_the_released_ones(form, count, dtype):
    case = golden("attnres_mixer")
    assert CASES["attnres_mixer"]["config"]["eps"] == 1e-5
    sources = [leaf(source, dtype) for source in case["sources"][:count]]
    norm, proj = leaf(case["norm_weight"], dtype), leaf(case["proj_weight"], dtype)
    out = form(sources, norm, proj)
    assert_stored(out, case[f"out.m{count}"], 1e-4)
    if f"d_sources.m{count}" not in case:
        return
    *d_sources, d_norm, d_proj = torch.autograd.grad(
        (out * case["dout"]).sum(), [*sources, norm, proj]
    )
    assert_stored(torch.stack(d_sources), case[f"d_sources.m{count}"], 1e-4, "sources")
    assert_stored(d_norm, case[f"d_norm_weight.m{count}"], 1e-4, "norm")
    assert_stored(d_proj, case[f"d_proj_weight.m{count}"], 1e-4, "proj")


@pytest.mark.parametrize("form", [one_phase, two_phase])
def test_a_mixer_in_bfloat16_rounds_once(form):
    case = golden("attnres_mixer")
    out = form([*case["sources"][:7]], case["norm_weight"], case["proj_weight"])
    assert bfloat16_steps(out, case["out_bf16.m7"]) <= 1


# Without a bound the linear half passes as it is: the limit of a large one.
BETAS = {"b4_25": (4.0, 25.0), "b4_none": (4.0, 1e9), "b1.5_3": (1.5, 3.0)}


@each_dtype
@pytest.mark.parametrize("name", BETAS)
def test_the_gated_unit_and_its_gradients_are_the_released_ones(name, dtype):
    case = golden("situ_glu")
    gate, up = leaf(case["gate"], dtype), leaf(case["up"], dtype)
    out = situ_glu(gate, up, *BETAS[name])
    found = (out, *torch.autograd.grad(out.sum(), (gate, up)))
    for kind, value in zip(("y", "d_gate", "d_up"), found, strict=True):
        expected = case[f"{name}.{kind}"]
        part = 1e-12 if dtype == torch.float64 else 1e-5
        assert distance(value, expected) <= part * max(1.0, float(expected.abs().max())), kind


def test_the_gated_unit_in_bfloat16_rounds_once():
    case = golden("situ_glu")
    out = situ_glu(*case["bf16.x"].chunk(2, -1), 4.0, 25.0)
    assert bfloat16_steps(out, case["bf16.y"]) <= 1


def router_of(name, dtype):
    case, told = golden(name), CASES[name]["config"]
    config = golden_config()
    sizes = dataclasses.replace(
        config.moe, num_experts=told["num_experts"], top_k=told["top_k"],
        routed_scaling_factor=told["routed_scaling_factor"],
    )  # fmt: skip
    config = dataclasses.replace(config, hidden_size=case["x"].shape[1], moe=sizes)
    router = Router(config).to(dtype)
    router.load_state_dict({n: case[n] for n in ("weight", "e_score_correction_bias")})
    return router


@pytest.mark.parametrize("recorded", [False, True], ids=["plain", "recorded"])
@each_dtype
@pytest.mark.parametrize("name", ["router_e16", "router_e896"])
def test_a_router_is_the_released_one(name, dtype, recorded):
    case, router = golden(name), router_of(name, dtype)
    routing = Routing.record(keep_scores=True) if recorded else None
    chosen, weights = router(case["x"].to(dtype), routing)
    chosen, order = chosen.sort(1)
    assert torch.equal(chosen, case["route_ids"].long())
    is_wide = dtype == torch.float64
    told = case["route_weights" if is_wide else "route_weights_fp32"]
    assert distance(weights.gather(1, order), told) <= (1e-12 if is_wide else 1e-6)
    if recorded:
        assert_stored(routing.scores[:, 0], case["scores"], 1e-6)
        margin = CASES[name]["stats"]["min_margin"]
        assert float(routing.margins.min()) == pytest.approx(margin, abs=1e-6)


@pytest.mark.parametrize("name", ["router_e16", "router_e896"])
def test_a_router_reads_bfloat16_in_float32(name):
    case, router = golden(name), router_of(name, torch.bfloat16)
    router.e_score_correction_bias = case["e_score_correction_bias"]
    chosen, weights = router(case["x"], None)
    chosen, order = chosen.sort(1)
    assert torch.equal(chosen, case["route_ids"].long())
    assert weights.dtype == torch.float32
    assert distance(weights.gather(1, order), case["route_weights_fp32"]) <= 1e-6
