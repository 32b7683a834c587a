"""States: cut, joined, moved and written, a sequence continues as if nothing had happened."""

import pytest
import torch

from k3rl.errors import UserInputError
from k3rl.model.released import load_released
from k3rl.model.state import BatchState, ModelState
from tests.model.model_builders import GOLDEN, batch, lively_model, parts, small_config

LENGTHS = [21, 3, 34]
NAMES = ("kda", "conv", "latents")
KIMI_LINEAR = {"attn_res": "off", "activation": "silu"}


def after(model, lengths=LENGTHS, seed=0):
    """The state behind sequences, the ids that follow each, and what the model says to those."""
    ids, cu = batch([n + 6 for n in lengths], seed)
    spans = parts(cu)
    whole, _ = model(ids, cu)
    first = torch.cat([ids[span][:-6] for span in spans])
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    _, state = model(first, bounds, BatchState.zeros(model.config, len(lengths), torch.float64))
    rest = [ids[span][-6:] for span in spans]
    return state, rest, [whole[span][-6:] for span in spans]


def continued(model, state, rest):
    bounds = 6 * torch.arange(len(rest) + 1)
    return model(torch.cat(rest), bounds, state)[0].split(6)


def same(found, wanted):
    return (
        max(float((a - b).detach().abs().max()) for a, b in zip(found, wanted, strict=True)) < 1e-10
    )


@pytest.mark.parametrize("changes", [{}, KIMI_LINEAR, {"attn_res": "full"}], ids=str)
def test_selected_and_concatenated_batches_continue(changes):
    model = lively_model(config=small_config(**changes))
    state, rest, wanted = after(model)
    assert same(continued(model, state, rest), wanted)
    picked = state.select(torch.tensor([2, 0]))
    assert picked.lengths.tolist() == [34, 21]
    assert same(continued(model, picked, [rest[2], rest[0]]), [wanted[2], wanted[0]])
    short = state.select(torch.tensor([1]))
    assert short.latents.shape[2] == 3
    joined = BatchState.concat([short, picked])
    assert same(
        continued(model, joined, [rest[1], rest[2], rest[0]]), [wanted[n] for n in (1, 2, 0)]
    )


def test_single_states_join_again_whatever_became_of_them():
    model = lively_model()
    state, rest, wanted = after(model)
    travelled = [
        ModelState.from_bytes(one.detach().to(device="cpu").to_bytes(), model.config)
        for one in state.split()
    ]
    for one, length in zip(travelled, LENGTHS, strict=True):
        assert (one.num_tokens, one.latents.shape[1]) == (length, length)
    assert same(continued(model, BatchState.join(travelled[::-1]), rest[::-1]), wanted[::-1])


def test_gradients_flow_through_select_concat_split_and_join():
    model = lively_model()
    state, rest, _ = after(model)
    direct = torch.cat(continued(model, state, rest)).square().sum()
    turned = BatchState.concat(
        [state.select(torch.tensor([2])), state.select(torch.tensor([0, 1]))]
    )
    turned = BatchState.join(turned.split())
    round_about = torch.cat(continued(model, turned, [rest[2], rest[0], rest[1]])).square().sum()
    parameter = model.model.layers[0].self_attn.v_proj.weight
    (wanted,) = torch.autograd.grad(direct, parameter, retain_graph=True)
    (found,) = torch.autograd.grad(round_about, parameter)
    assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-12)
    assert not any(getattr(state.detach(), name).requires_grad for name in NAMES)
    assert all(getattr(state, name).requires_grad for name in NAMES)


def test_a_state_in_another_dtype_keeps_its_lengths():
    state, _, _ = after(lively_model())
    narrow = state.detach().to(dtype=torch.float32)
    assert {getattr(narrow, name).dtype for name in NAMES} == {torch.float32}
    assert torch.equal(narrow.lengths, state.lengths)
    one = state.split()[0].detach().to(dtype=torch.bfloat16)
    assert ModelState.from_bytes(one.to_bytes(), small_config()).kda.dtype == torch.bfloat16


def test_bytes_of_a_state_name_what_does_not_fit():
    state, _, _ = after(lively_model())
    other = small_config(attn_res_block_size=1, layer_kinds=("kda", "mla", "mla"))
    with pytest.raises(UserInputError, match="the model wants"):
        ModelState.from_bytes(state.split()[0].detach().to_bytes(), other)


@pytest.mark.parametrize("cuts", [(1,), (2, 3), (16, 17, 18), (5, 60, 61), tuple(range(1, 70))])
def test_any_split_of_the_golden_model_gives_the_whole(cuts):
    model = load_released(GOLDEN / "tiny_k3", torch.float64)
    ids, _ = batch([70], 3, vocab_size=300)
    with torch.no_grad():
        whole, _ = model(ids, torch.tensor([0, 70]))
        state, outs = BatchState.zeros(model.config, 1, torch.float64), []
        for start, end in zip((0, *cuts), (*cuts, 70), strict=True):
            out, state = model(ids[start:end], torch.tensor([0, end - start]), state)
            outs.append(out)
    assert float((torch.cat(outs) - whole).abs().max()) < 1e-10
    assert state.lengths.tolist() == [70]
