"""Every gradient against difference quotients in float64, and against itself in pieces."""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import gradcheck
from torch.func import functional_call

from k3rl.model.attn_res import Residuals
from k3rl.model.config import KdaConfig, MlaConfig, MoeConfig
from k3rl.model.kda import KdaState, KimiDeltaAttention
from k3rl.model.layout import Layout
from k3rl.model.mla import GatedMla
from k3rl.model.moe import GluMlp, LatentMoe
from k3rl.model.routing import Routing
from k3rl.model.state import BatchState
from tests.model.model_builders import batch, filled, lively_model, parts, randn, small_config

LENGTHS = [1, 17, 2]
WIDTH = 4
MOE = {
    "latent": {},
    "no_latent": {"latent_size": None},
    "router_reads_latent": {"router_input": "latent"},
    "scaled": {"routed_scaling_factor": 2.5},
    "no_latent_scaled": {"latent_size": None, "routed_scaling_factor": 2.5},
}
KIMI_LINEAR = {
    "attn_res": "off",
    "activation": "silu",
    "kda": KdaConfig(2, 8, 5, decay="softplus", gate_rank=3),
    "mla": MlaConfig(2, None, 12, 7, 4, 9, output_gate=False),
    "moe": MoeConfig(40, 6, 2, None, 12, 16, routed_scaling_factor=2.5),
}


def layout_of(lengths):
    return Layout.of(torch.tensor([0, *lengths]).cumsum(0), sum(lengths))


def tiny_moe(**changes):
    sizes = {"dense_size": 5, "num_experts": 4, "top_k": 2, "latent_size": 3, "expert_size": 3,
             "shared_size": 3}  # fmt: skip
    return MoeConfig(**(sizes | changes))


def tiny_config(**changes):
    fields = {
        "vocab_size": 7, "hidden_size": WIDTH, "layer_kinds": ("kda", "mla", "kda"),
        "kda": KdaConfig(2, 3, 2), "mla": MlaConfig(2, 3, 2, 2, 1, 3), "moe": tiny_moe(),
    }  # fmt: skip
    return small_config(**(fields | changes))


def pinned(num_tokens, num_layers=1):
    """A fixed choice of 2 of 4 experts, new for every pass."""
    generator = torch.Generator().manual_seed(5)
    order = torch.rand(num_tokens, num_layers, 4, generator=generator).argsort(-1)
    return Routing.pin(order[..., :2])


def leaves(*tensors):
    return tuple(x.requires_grad_() for x in tensors)


def check(function, *inputs, fast=False):
    assert gradcheck(function, inputs, eps=1e-6, atol=1e-7, rtol=1e-5, fast_mode=fast)


def check_module(module, run, *inputs):
    """Of `run(module, *inputs)`: inputs one by one, parameters along a random direction."""
    names, parameters = zip(*module.named_parameters(), strict=True)

    def call(*tensors):
        stand_in = dict(zip(names, tensors[len(inputs) :], strict=True))
        return functional_call(_Run(module, run), {f"module.{n}": x for n, x in stand_in.items()},
                               tensors[: len(inputs)])  # fmt: skip

    held = [parameter.detach() for parameter in parameters]
    check(lambda *tensors: call(*tensors, *held), *leaves(*inputs))
    check(call, *(x.detach() for x in inputs), *parameters, fast=True)


class _Run(torch.nn.Module):
    def __init__(self, module, run):
        super().__init__()
        self.module, self.run = module, run

    def forward(self, *inputs):
        return self.run(self.module, *inputs)


@pytest.mark.parametrize("carried", [False, True], ids=["from_zero", "carried"])
@pytest.mark.parametrize(
    ("decay", "gate_rank"),
    [("bounded", None), ("softplus", 2)],
    ids=["bounded-full_gate", "softplus-low_rank_gate"],
)
def test_kda_layer(decay, gate_rank, carried):
    config = tiny_config(kda=KdaConfig(2, 3, 2, decay=decay, gate_rank=gate_rank))
    layer, layout = filled(KimiDeltaAttention(config)), layout_of(LENGTHS)
    inputs = [randn(sum(LENGTHS), WIDTH, seed=1)]
    if carried:
        inputs += [randn(3, 2, 3, 3, seed=2), randn(3, 3, 18, seed=3)]

    def run(layer, x, *state):
        out, after = layer(x, layout, KdaState(*state) if state else None)
        return out, *after

    check_module(layer, run, *inputs)


@pytest.mark.parametrize("cached", [None, 0, 3], ids=["no_cache", "empty_cache", "cached"])
@pytest.mark.parametrize("output_gate", [True, False], ids=["gate", "no_gate"])
@pytest.mark.parametrize("q_rank", [None, 3], ids=["no_query_latent", "query_latent"])
def test_mla_layer(q_rank, output_gate, cached):
    config = tiny_config(mla=MlaConfig(2, q_rank, 2, 2, 1, 3, output_gate=output_gate))
    layer, layout = filled(GatedMla(config)), layout_of([1, 6, 2])
    inputs = [randn(9, WIDTH, seed=1)]
    if cached is not None:
        inputs.append(randn(3, cached, 3, seed=2))
    lengths = torch.tensor([2, 0, 3]) if cached else torch.zeros(3, dtype=torch.int64)

    def run(layer, x, *past):
        out, latents = layer(x, layout, *(past or (None,)), lengths if past else None)
        return (out, latents) if past else out

    check_module(layer, run, *inputs)


@pytest.mark.parametrize("activation", ["situ", "silu"])
@pytest.mark.parametrize("changes", MOE.values(), ids=MOE)
def test_mixture_of_experts(changes, activation):
    layer = filled(LatentMoe(tiny_config(moe=tiny_moe(**changes), activation=activation)))
    check_module(
        layer, lambda layer, x: layer(x, pinned(len(x))), randn(sum(LENGTHS), WIDTH, seed=1)
    )


@pytest.mark.parametrize("activation", ["situ", "silu"])
def test_dense_mlp(activation):
    layer = filled(GluMlp(tiny_config(activation=activation), 5))
    check_module(layer, lambda layer, x: layer(x), randn(6, WIDTH, seed=1))


@pytest.mark.parametrize(
    ("attn_res", "two_phase"),
    [("block", False), ("block", True), ("full", False), ("off", False)],
    ids=["block", "block_two_phase", "full", "off"],
)
def test_residuals(attn_res, two_phase):
    """All mixes of three layers, by the embedding, what sub-layers add and the mixers' weights."""
    config = tiny_config(attn_res=attn_res, layer_kinds=("kda",) * 3, norm_eps=1e-2)
    count = 2 * config.num_layers

    def run(sources, norms, projs):
        sites = [(SimpleNamespace(weight=norm), SimpleNamespace(weight=proj))
                 for norm, proj in zip(norms, projs, strict=True)]  # fmt: skip
        found, mixes = Residuals(sources[0], sites, config, two_phase), []
        for index in range(count):
            mixes.append(found.mix(index))
            if index % 2 == 0:
                found.begin(index // 2)
            found.add(sources[index + 1])
        return torch.stack([*mixes, found.mix(count)])

    sources = randn(count + 1, 2, WIDTH, seed=1)
    weights = randn(count + 1, WIDTH, seed=2), randn(count + 1, 1, WIDTH, seed=3)
    # Without mixers their weights are not read.
    check(run, *leaves(sources), *(weights if attn_res == "off" else leaves(*weights)))


def tiny_state(config, lengths):
    kda, conv = randn(2, 3, 2, 3, 3, seed=2), randn(2, 3, 3, 18, seed=3)
    return kda, conv, randn(1, 3, max(lengths), config.mla.latent_dim, seed=4)


MODELS = {
    "block": ({}, False),
    "block_two_phase": ({}, True),
    "full": ({"attn_res": "full"}, False),
    "off": ({"attn_res": "off"}, False),
    "kimi_linear": (
        {
            "attn_res": "off", "activation": "silu", "moe": tiny_moe(latent_size=None),
            "kda": KdaConfig(2, 3, 2, decay="softplus", gate_rank=2),
            "mla": MlaConfig(2, None, 2, 2, 1, 3, output_gate=False),
        },
        False,
    ),
}  # fmt: skip


FROM_ZERO = ["block", "kimi_linear"]


@pytest.mark.parametrize(
    ("form", "carried"),
    [(form, True) for form in MODELS] + [(form, False) for form in FROM_ZERO],
    ids=[*(f"{form}-carried" for form in MODELS), *(f"{form}-from_zero" for form in FROM_ZERO)],
)
def test_whole_model(form, carried):
    changes, two_phase = MODELS[form]
    model = lively_model(config=tiny_config(**changes))
    model.model.two_phase = two_phase
    cu_seqlens, past = torch.tensor([0, *LENGTHS]).cumsum(0), [4, 0, 2]
    names, parameters = zip(*model.named_parameters(), strict=True)
    inputs = [randn(sum(LENGTHS), WIDTH, seed=1)]
    if carried:
        inputs += tiny_state(model.config, past)

    def run(*tensors):
        embedded, state = tensors[0], None
        if carried:
            state = BatchState(*tensors[1:4], torch.tensor(past))
        named = {f"module.{n}": x for n, x in zip(names, tensors[len(inputs) :], strict=True)}
        return functional_call(_Run(model, whole), named, (embedded, state))

    def whole(model, embedded, state):
        routing = pinned(len(embedded), model.num_router_layers)
        hidden, after = model.forward_embedded(embedded, cu_seqlens, state, routing)
        logits = model.head(hidden)
        return (logits, after.kda, after.conv, after.latents) if carried else logits

    check(run, *leaves(*inputs), *parameters, fast=True)


def test_token_embeddings():
    model, ids = lively_model(config=tiny_config()), torch.tensor([1, 2, 1, 6, 0])
    held = {n: x.detach() for n, x in model.named_parameters()}
    name = "model.embed_tokens.weight"

    def run(table):
        inputs = (ids, torch.tensor([0, 2, 5]), None, pinned(5, 2))
        return functional_call(model, held | {name: table}, inputs)[0]

    check(run, *leaves(held[name].clone()))


def loss_of(model, hidden, ids, weights):
    picked = model.head(hidden).log_softmax(-1).gather(1, ids[:, None])[:, 0]
    return (picked * weights).sum()


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


CUTS = [(1,), (15,), (16,), (17,), (40,), (16, 41)]


@pytest.mark.parametrize("cuts", CUTS, ids=lambda cuts: "_".join(map(str, cuts)))
@pytest.mark.parametrize("changes", [{}, KIMI_LINEAR], ids=["k3", "kimi_linear"])
def test_pieces_with_a_carried_state_have_the_gradient_of_the_whole(changes, cuts):
    model = lively_model(config=small_config(**changes))
    ids, cu_seqlens = batch([63, 44])
    weights = torch.linspace(-1, 2, len(ids), dtype=torch.float64)
    hidden, _ = model(ids, cu_seqlens)
    whole_loss = loss_of(model, hidden, ids, weights)
    whole = gradients(model, whole_loss)
    state, losses = BatchState.zeros(model.config, 2, torch.float64), []
    for start, end in zip((0, *cuts), (*cuts, 63), strict=True):
        rows = [torch.arange(s.start, s.stop)[start:end] for s in parts(cu_seqlens)]
        bounds = torch.tensor([0, *map(len, rows)]).cumsum(0)
        rows = torch.cat(rows)
        hidden, state = model(ids[rows], bounds, state)
        losses.append(loss_of(model, hidden, ids[rows], weights[rows]))
    found = gradients(model, sum(losses))
    assert sum(losses).item() == pytest.approx(whole_loss.item(), rel=1e-11)
    assert found.keys() == whole.keys()
    for name, grad in whole.items():
        off = float((found[name] - grad).abs().max())
        assert off <= 1e-11 * float(grad.abs().max()), (name, off)
