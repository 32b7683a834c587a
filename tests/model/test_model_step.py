"""One-token steps: the plan follows the weights, wherever the sequences lie in their pool."""

import copy
import dataclasses

import pytest
import torch

from k3rl.model.config import load_config
from k3rl.model.model import K3Model
from k3rl.model.routing import Routing
from k3rl.model.state import BatchState, StatePool
from tests.model.model_builders import batch, lively_model, small_config

LENGTHS = [9, 1, 30, 17, 4]


def filled(model, slots, num_slots=12, dtype=torch.float64, lengths=LENGTHS):
    """A pool with a sequence in each of the slots."""
    pool = StatePool(model.config, num_slots, 48, dtype)
    # What lies behind the sequences must not matter.
    # What lies behind a sequence and in unused slots must not matter.
    pool.latents.fill_(100.0)
    ids, cu = batch(lengths, vocab_size=model.config.vocab_size)
    model.extend(ids, cu, pool, torch.tensor(slots))
    return pool


def after_a_step(model, weights_of=None):
    """Hidden [5, d] of one step behind states that another model's weights have made."""
    pool = filled(weights_of or model, range(5))
    return model.step(torch.tensor([3, 1, 4, 1, 5]), pool, torch.arange(5))


@pytest.mark.parametrize(
    "slots",
    [[4, 2, 3, 0, 1], [7, 3, 4, 5, 9], [11, 0, 3, 6, 8], [0, 1, 2, 3, 11]],
    ids=["shuffled", "near", "far", "with one away"],
)
def test_scattered_slots_step_as_neighbours(slots):
    model = lively_model()
    near, far = filled(model, range(5)), filled(model, slots)
    places = torch.tensor(slots)
    others = torch.tensor([slot for slot in range(12) if slot not in slots])
    untouched = [part.index_select(1, others) for part in (far.kda, far.conv, far.latents)]
    for token in range(4):
        ids = torch.arange(5) + 7 * token
        expected = model.step(ids, near, torch.arange(5))
        found = model.step(ids, far, places)
        assert float((found - expected).abs().max()) < 1e-12
    for a, b in zip(near.gather(torch.arange(5)).split(), far.gather(places).split(), strict=True):
        assert a.num_tokens == b.num_tokens
        for name in ("kda", "conv", "latents"):
            last = getattr(a, name)[:, : a.num_tokens]
            assert torch.allclose(last, getattr(b, name)[:, : a.num_tokens], atol=1e-12)
    for part, before in zip((far.kda, far.conv, far.latents), untouched, strict=True):
        assert torch.equal(part.index_select(1, others), before)
    assert far.lengths[others].tolist() == [0] * len(others)


def edit_in_place(model, other):
    with torch.no_grad():
        model.model.layers[1].block_sparse_moe.experts.w2.copy_(
            other.model.layers[1].block_sparse_moe.experts.w2
        )


def edit_a_buffer(model, other):
    with torch.no_grad():
        model.model.layers[2].block_sparse_moe.gate.e_score_correction_bias.add_(
            torch.arange(6).flip(0)
        )


def load_other(model, other):
    model.load_state_dict(other.state_dict())


def optimise(model, other):
    ids, cu = batch([12])
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model(ids, cu)[0].square().sum().backward()
    optimiser.step()


def replace_a_parameter(model, other):
    model.model.layers[3].self_attn.A_log = torch.nn.Parameter(
        other.model.layers[3].self_attn.A_log + 1
    )


def swap_storage(model, other):
    model.model.norm.weight.data = other.model.norm.weight.detach() * 2


@pytest.mark.parametrize(
    "change",
    [edit_in_place, edit_a_buffer, load_other, optimise, replace_a_parameter, swap_storage],
)
def test_steps_follow_every_change_of_the_weights(change):
    model, start = lively_model(), lively_model()
    before = after_a_step(model, start)
    plan = model._plan
    assert torch.equal(after_a_step(model, start), before)
    assert model._plan is plan
    change(model, lively_model(5))
    fresh = K3Model(model.config, None).double()
    fresh.load_state_dict(model.state_dict())
    found = after_a_step(model, start)
    assert torch.equal(found, after_a_step(fresh, start))
    assert not torch.equal(found, before)


def test_a_copy_of_a_model_has_steps_of_its_own():
    model = lively_model()
    before = after_a_step(model)
    twin = copy.deepcopy(model)
    edit_in_place(twin, lively_model(5))
    assert torch.equal(after_a_step(model), before)
    assert not torch.equal(after_a_step(twin, model), before)
    assert set(twin.state_dict()) == set(model.state_dict())


def test_steps_record_and_pin_the_experts_of_the_training_path():
    model = lively_model()
    ids, cu = batch([1] * 7)
    recorded = Routing.record(keep_scores=True)
    with torch.no_grad():
        expected, _ = model(ids, cu, None, recorded)
    slots = torch.arange(7)

    def step(routing):
        pool = StatePool(model.config, 7, 4, torch.float64)
        return model.step(ids, pool, slots, routing)

    routing = Routing.record(keep_scores=True)
    assert float((step(routing) - expected).abs().max()) < 1e-9
    assert torch.equal(routing.ids, recorded.ids)
    assert torch.allclose(routing.scores, recorded.scores, atol=1e-12)
    assert torch.allclose(routing.margins, recorded.margins, atol=1e-12)
    shifted = (recorded.ids + 1) % 6
    with torch.no_grad():
        other, _ = model(ids, cu, None, Routing.pin(shifted))
    assert float((step(Routing.pin(shifted)) - other).abs().max()) < 1e-9
    assert float((other - expected).abs().max()) > 1e-3


@pytest.mark.parametrize("kinds", [("kda",), ("mla",), ("mla", "mla", "kda")])
def test_models_of_any_kinds_of_layers_step(kinds):
    model = lively_model(config=small_config(layer_kinds=kinds, attn_res_block_size=1))
    ids, cu = batch([6, 6, 6])
    state = BatchState.zeros(model.config, 3, torch.float64)
    with torch.no_grad():
        expected, _ = model(ids, cu, state)
    pool = StatePool(model.config, 3, 6, torch.float64)
    for offset in range(6):
        found = model.step(ids.view(3, 6)[:, offset], pool, torch.arange(3))
        assert float((found - expected.view(3, 6, -1)[:, offset]).abs().max()) < 1e-9


def test_many_experts_are_sorted_rather_than_all_run():
    """More (token, expert) pairs than `DENSE_PAIRS`; both forms agree with the training path."""
    config = small_config()
    config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, num_experts=300))
    model = lively_model(config=config)
    for count in (6, 7):
        ids, cu = batch([1] * count)
        with torch.no_grad():
            expected, _ = model(ids, cu)
        pool = StatePool(config, count, 2, torch.float64)
        found = model.step(ids, pool, torch.arange(count))
        assert float((found - expected).abs().max()) < 1e-9


def test_float32_steps_agree_with_extending_in_the_shipped_shape():
    model = K3Model(load_config("configs/model/k3_nano.yaml"), 4)
    lengths = [40, 3, 17, 25, 8]
    pool = filled(model, [5, 9, 0, 7, 3], dtype=torch.float32, lengths=lengths)
    other = filled(model, range(5), dtype=torch.float32, lengths=lengths)
    slots = torch.tensor([5, 9, 0, 7, 3])
    for token in (5, 60, 7):
        ids = torch.full((5,), token)
        recorded = Routing.record()
        expected = model.extend(ids, torch.arange(6), other, torch.arange(5), recorded)
        found = model.step(ids, pool, slots, Routing.pin(recorded.ids))
        assert float((found - expected).abs().max()) < 2e-4
