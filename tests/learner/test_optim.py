"""Muon and AdamW against float64 oracles."""

import math

import pytest
import torch
from torch import nn

from k3rl.errors import ConfigError
from k3rl.learner.optim import (
    UPDATE_SCALE,
    Optimiser,
    Rates,
    head_rows,
    is_matrix,
    orthogonalise,
    split,
)
from k3rl.model.config import KdaConfig, MlaConfig, ModelConfig, MoeConfig
from k3rl.model.model import K3Model

CONFIG = ModelConfig(
    vocab_size=11,
    hidden_size=8,
    layer_kinds=("kda", "mla"),
    kda=KdaConfig(num_heads=3, head_dim=4, decay_rank=4),
    mla=MlaConfig(3, 6, 5, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=4),
    moe=MoeConfig(
        dense_size=16, num_experts=4, top_k=2, latent_size=4, expert_size=6, shared_size=8
    ),
    attn_res_block_size=2,
)
KDA, MLA = "model.layers.0.self_attn.", "model.layers.1.self_attn."


class Bag(nn.Module):
    """Parameters under any dotted names."""

    def __init__(self, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            node = self
            *path, last = name.split(".")
            for part in path:
                if part not in node._modules:
                    node.add_module(part, nn.Module())
                node = node._modules[part]
            node.register_parameter(last, nn.Parameter(tensor.clone()))


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def polar(matrix):
    """The nearest semi-orthogonal matrix, by SVD."""
    left, _, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    return left @ right


def step_once(name, start, grad, rate=0.1, **options):
    model = Bag(**{name: start})
    optimiser = Optimiser(model, CONFIG, **options)
    (parameter,) = model.parameters()
    parameter.grad = grad.clone()
    optimiser.step(Rates(rate, rate))
    return parameter.detach() - start


@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 32, 12), (5, 12, 40), (2, 64, 64)])
def test_singular_values_come_near_one_and_directions_stay(shape):
    # Singular values between 1/20 of the largest and the largest: five steps lift no smaller ones.
    left, values, right = torch.linalg.svd(normal(*shape), full_matrices=False)
    blocks = left * values.clamp_min(values.max() / 20)[..., None, :] @ right
    out = orthogonalise(blocks)
    for block, got in zip(blocks, out, strict=True):
        values = torch.linalg.svdvals(got)
        assert 0.6 < values.min() < values.max() < 1.3
        # The same singular vectors: U^T X V is diagonal.
        left, _, right = torch.linalg.svd(block, full_matrices=False)
        core = left.mT @ got @ right.mT
        assert (core - core.diag().diag()).abs().max() < 1e-9
        want = polar(block)
        cosine = (got * want).sum() / (got.norm() * want.norm())
        assert cosine > 0.98


def test_float32_agrees_with_float64():
    blocks = normal(4, 24, 32)
    error = (orthogonalise(blocks.float()).double() - orthogonalise(blocks)).abs().max()
    assert error < 1e-4


def test_a_zero_block_stays_zero():
    assert torch.equal(orthogonalise(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


def test_update_is_scaled_by_the_longer_side():
    grad = normal(12, 8)
    change = step_once("layer.weight", normal(12, 8, seed=1), grad, rate=0.1)
    unit = -change / (0.1 * UPDATE_SCALE * math.sqrt(12))
    torch.testing.assert_close(unit, orthogonalise(grad[None])[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        *((f"{KDA}{p}_proj.weight", (4,)) for p in "qkv"),
        (f"{KDA}o_proj.weight", None),
        (f"{KDA}g_proj.weight", None),
        (f"{MLA}q_b_proj.weight", (5,)),
        (f"{MLA}kv_b_proj.weight", (3, 4)),
        (f"{MLA}q_a_proj.weight", None),
        (f"{MLA}o_proj.weight", None),
        ("model.layers.1.block_sparse_moe.gate.weight", None),
    ],
)
def test_which_projections_are_split_along_heads(name, parts):
    assert head_rows(CONFIG, name) == parts


def test_every_projection_with_heads_is_found_in_a_model():
    names = [n for n, _ in K3Model(CONFIG, seed=0).named_parameters() if head_rows(CONFIG, n)]
    expected = [f"{KDA}{p}_proj.weight" for p in "qkv"]
    assert set(names) == {*expected, f"{MLA}q_b_proj.weight", f"{MLA}kv_b_proj.weight"}


def test_heads_are_orthogonalised_one_by_one():
    """Heads whose gradients differ in scale by 1e4 move equally far, each as if alone."""
    scales = torch.tensor([1.0, 1e-4, 10.0], dtype=torch.float64)
    grad = (normal(3, 4, 8) * scales[:, None, None]).reshape(12, 8)
    change = step_once(f"{KDA}q_proj.weight", normal(12, 8, seed=1), grad).view(3, 4, 8)
    size = 0.1 * UPDATE_SCALE * math.sqrt(8)
    for got, block in zip(change, grad.view(3, 4, 8), strict=True):
        torch.testing.assert_close(-got / size, orthogonalise(block[None])[0], rtol=0, atol=1e-9)
    whole = step_once(f"{KDA}o_proj.weight", normal(12, 8, seed=1), grad).view(3, 4, 8)
    assert whole[1].norm() < 0.1 * whole[0].norm()


def test_key_and_value_parts_of_a_latent_head_are_blocks_of_their_own():
    grad = normal(21, 5)
    change = step_once(f"{MLA}kv_b_proj.weight", normal(21, 5, seed=1), grad)
    for got, block in zip(split(change, (3, 4)), split(grad, (3, 4)), strict=True):
        size = 0.1 * UPDATE_SCALE * math.sqrt(5)
        assert got.shape == block.shape
        torch.testing.assert_close(-got / size, orthogonalise(block), rtol=0, atol=1e-12)


def test_stacked_experts_are_matrices_of_their_own():
    grad = normal(4, 6, 8)
    change = step_once("experts.w1", normal(4, 6, 8, seed=1), grad)
    size = 0.1 * UPDATE_SCALE * math.sqrt(8)
    torch.testing.assert_close(-change / size, orthogonalise(grad), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.embed_tokens.weight", (11, 8), False),
        ("lm_head.weight", (11, 8), False),
        ("model.norm.weight", (8,), False),
        (f"{KDA}q_conv1d.weight", (12, 1, 4), False),
        (f"{KDA}q_conv1d.weight", (12, 4), False),
        ("model.layers.0.mlp_res_proj.weight", (1, 8), False),
        (f"{KDA}A_log", (3,), False),
        ("model.layers.1.block_sparse_moe.experts.w1", (4, 6, 8), True),
        ("model.layers.1.block_sparse_moe.gate.weight", (4, 8), True),
        ("model.layers.0.mlp.up_proj.weight", (16, 8), True),
    ],
)
def test_what_is_a_matrix(name, shape, expected):
    assert is_matrix(name, torch.zeros(shape)) is expected


def test_momentum_is_nesterov():
    start, first, second = normal(6, 6), normal(6, 6, seed=1), normal(6, 6, seed=2)
    model = Bag(**{"a.weight": start})
    optimiser = Optimiser(model, CONFIG, momentum=0.9)
    (parameter,) = model.parameters()
    for grad in (first, second):
        before = parameter.detach().clone()
        parameter.grad = grad.clone()
        optimiser.step(Rates(1.0, 1.0))
    momentum = 0.9 * first + second
    wanted = orthogonalise((second + 0.9 * momentum)[None])[0]
    got = (before - parameter.detach()) / (UPDATE_SCALE * math.sqrt(6))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_vectors_follow_torch_adamw():
    start = normal(7)
    model = Bag(**{"norm.weight": start})
    optimiser = Optimiser(model, CONFIG, betas=(0.9, 0.95), weight_decay=0.1)
    (ours,), theirs = model.parameters(), nn.Parameter(start.clone())
    reference = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for seed in range(5):
        ours.grad, theirs.grad = normal(7, seed=seed), normal(7, seed=seed)
        optimiser.step(Rates(1.0, 0.01))
        reference.step()
    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=0, atol=1e-13)


def test_weight_decay_is_decoupled():
    start = normal(6, 4)
    grad = normal(6, 4, seed=1)
    plain = step_once("a.weight", start, grad)
    decayed = step_once("a.weight", start, grad, weight_decay=0.5)
    torch.testing.assert_close(decayed - plain, -0.1 * 0.5 * start, rtol=0, atol=1e-14)


def test_a_frozen_parameter_is_left_alone():
    model = Bag(**{"a.weight": normal(4, 4), "bias": normal(4)})
    model.bias.requires_grad_(False)
    optimiser = Optimiser(model, CONFIG)
    assert set(optimiser.parameters) == {"a.weight"}


def test_state_travels_and_what_does_not_fit_is_named():
    tensors = {"a.weight": normal(4, 6), "norm.weight": normal(4)}
    models = [Bag(**tensors), Bag(**tensors)]
    one, two = (Optimiser(model, CONFIG) for model in models)
    for seed in range(4):
        if seed == 2:
            two.load_state_dict({k: v.clone() for k, v in one.state_dict().items()})
            models[1].load_state_dict(models[0].state_dict())
        for model, optimiser in zip(models, (one, two), strict=True):
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = normal(*parameter.shape, seed=10 * seed + number)
            optimiser.step(Rates(0.1, 0.1))
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)
    state = one.state_dict()
    with pytest.raises(ConfigError, match=r"momentum\.a\.weight"):
        two.load_state_dict({k: v for k, v in state.items() if k != "momentum.a.weight"})
    with pytest.raises(ConfigError, match=r"first\.norm\.weight"):
        two.load_state_dict({**state, "first.norm.weight": torch.zeros(9)})
