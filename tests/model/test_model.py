"""The whole model: one function however it is evaluated, and one gradient however it is packed."""

import dataclasses

import pytest
import torch

from k3rl.errors import EngineError, UserInputError
from k3rl.model.attn_res import mix
from k3rl.model.config import load_config
from k3rl.model.layout import Layout
from k3rl.model.model import Cells, K3Model
from k3rl.model.ops import rms_norm
from k3rl.model.routing import Routing
from k3rl.model.state import ModelState, StatePool
from tests.model.model_builders import batch, lively_model, parts, small_config, stepped

LENGTHS = [37, 1, 5, 64, 20, 16]


def logprobs(model, hidden):
    return model.head(hidden).log_softmax(-1)


def filled_pool(model, count, max_tokens=400, dtype=torch.float64):
    pool = StatePool(model.config, count + 2, max_tokens, dtype)
    return pool, [pool.allocate() for _ in range(count)]


def test_layers_are_wired_as_released():
    """Mixers, banks and running sums spelled out; the sub-layers themselves are tested apart."""
    model = lively_model()
    inner, (ids, cu) = model.model, batch([9, 4])
    eps, block = 1e-5, model.config.attn_res_block_size
    cells = Cells(inner.layers, Layout.of(cu, 13), None)

    def mixed(sources, norm, proj):
        return mix(sources, norm.weight, proj.weight, eps)

    bank, prefix = [], inner.embed_tokens.weight[ids]
    for index, layer in enumerate(inner.layers):
        h = prefix
        if bank:
            h = mixed([*bank, prefix], layer.self_attention_res_norm, layer.self_attention_res_proj)
        if index % block == 0:
            bank, prefix = [*bank, prefix], 0
        prefix = prefix + cells.attend(index, rms_norm(h, layer.input_layernorm.weight, eps))
        h = mixed([*bank, prefix], layer.mlp_res_norm, layer.mlp_res_proj)
        h = rms_norm(h, layer.post_attention_layernorm.weight, eps)
        prefix = prefix + layer.feed_forward(h, None)
    h = mixed([*bank, prefix], inner.output_attn_res_norm, inner.output_attn_res_proj)
    expected = rms_norm(h, inner.norm.weight, eps)
    found, state = model(ids, cu)
    assert state is None
    assert torch.allclose(found, expected, atol=1e-12)
    assert len(bank) == 3


def test_steps_equal_forward():
    model = lively_model()
    ids, cu = batch(LENGTHS)
    with torch.no_grad():
        expected, _ = model(ids, cu)
    pool, slots = filled_pool(model, len(LENGTHS))
    found = stepped(model, ids, cu, pool, slots)
    assert float((found - expected).abs().max()) < 1e-9
    assert pool.lengths[slots].tolist() == LENGTHS
    scattered, shuffled = filled_pool(model, len(LENGTHS))
    again = stepped(model, ids, cu, scattered, shuffled[::-1])
    assert float((again - expected).abs().max()) < 1e-9


@pytest.mark.parametrize("cut", [1, 3, 15, 16, 17, 31, 63])
def test_extending_at_any_token_equals_forward(cut):
    model = lively_model()
    ids, cu = batch(LENGTHS)
    with torch.no_grad():
        expected, _ = model(ids, cu)
    pool, slots = filled_pool(model, len(LENGTHS))
    slots = slots[::-1]
    for first in (True, False):
        spans, used = [], []
        for index, span in enumerate(parts(cu)):
            middle = min(span.start + cut, span.stop)
            span = slice(span.start, middle) if first else slice(middle, span.stop)
            if span.stop > span.start:
                spans.append(span)
                used.append(slots[index])
        bounds = torch.tensor([0, *(s.stop - s.start for s in spans)]).cumsum(0)
        part = torch.cat([ids[span] for span in spans])
        found = model.extend(part, bounds, pool, torch.tensor(used))
        wanted = torch.cat([expected[span] for span in spans])
        assert float((found - wanted).abs().max()) < 1e-9
    after = pool.gather(torch.tensor(slots))
    other, slots = filled_pool(model, len(LENGTHS))
    stepped(model, ids, cu, other, slots)
    for a, b in zip(after.split(), other.gather(torch.tensor(slots)).split(), strict=True):
        assert a.num_tokens == b.num_tokens
        for name in ("kda", "conv", "latents"):
            assert torch.allclose(getattr(a, name), getattr(b, name), atol=1e-9)


def test_float32_decode_agrees_with_training_over_300_tokens():
    torch.manual_seed(0)
    config = dataclasses.replace(load_config("configs/model/k3_nano.yaml"), init_std=None)
    model = K3Model(config, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 or parameter.shape[0] == 1:
                parameter.add_(0.05 * torch.randn_like(parameter))
    ids, cu = batch([300] * 4, vocab_size=849)
    routing = Routing.record()
    with torch.no_grad():
        expected = logprobs(model, model(ids, cu, None, routing)[0])
    pool, slots = filled_pool(model, 4, 300, torch.float32)
    ids_by_step = ids.view(4, 300)
    pinned = routing.ids.view(4, 300, model.num_router_layers, 2)
    worst = 0.0
    for t in range(300):
        pin = Routing.pin(pinned[:, t])
        hidden = model.step(ids_by_step[:, t], pool, torch.tensor(slots), pin)
        there = expected.view(4, 300, -1)[:, t]
        worst = max(worst, float((logprobs(model, hidden) - there).detach().abs().max()))
    assert worst < 5e-5


def gradients(model, ids, cu, routing=None):
    model.zero_grad()
    hidden, _ = model(ids, cu, None, routing)
    weights = torch.linspace(-1, 2, len(ids), dtype=hidden.dtype)
    (logprobs(model, hidden).gather(1, ids[:, None])[:, 0] * weights).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_gradient_does_not_depend_on_packing():
    model = lively_model()
    ids, cu = batch(LENGTHS)
    together = gradients(model, ids, cu)
    unused = {n for n, _ in model.named_parameters()} - set(together)
    assert unused == {
        "model.layers.0.self_attention_res_norm.weight",
        "model.layers.0.self_attention_res_proj.weight",
    }
    weights = torch.linspace(-1, 2, len(ids), dtype=torch.float64)
    total = {name: torch.zeros_like(grad) for name, grad in together.items()}
    for span in reversed(parts(cu)):
        model.zero_grad()
        piece = ids[span]
        hidden, _ = model(piece, torch.tensor([0, len(piece)]))
        picked = logprobs(model, hidden).gather(1, piece[:, None])[:, 0]
        (picked * weights[span]).sum().backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                total[name] += parameter.grad
    for name, grad in together.items():
        scale = max(1.0, float(grad.abs().max()))
        assert float((grad - total[name]).abs().max()) < 1e-11 * scale, name


def test_a_sequence_does_not_see_its_neighbours_or_its_future():
    model = lively_model()
    ids, cu = batch(LENGTHS)
    with torch.no_grad():
        hidden, _ = model(ids, cu)
        for index, span in enumerate(parts(cu)):
            changed = ids.clone()
            changed[: span.start] = (changed[: span.start] + 1) % 61
            changed[span.stop :] = (changed[span.stop :] + 1) % 61
            middle = span.start + (span.stop - span.start + 1) // 2
            changed[middle : span.stop] = (changed[middle : span.stop] + 7) % 61
            other, _ = model(changed, cu)
            seen = slice(span.start, middle)
            assert float((other[seen] - hidden[seen]).abs().max()) < 1e-12, index


def test_pinned_routing_reproduces_the_recorded_pass():
    model = lively_model()
    ids, cu = batch(LENGTHS)
    routing = Routing.record(keep_scores=True)
    recorded = gradients(model, ids, cu, routing)
    shape = (len(ids), model.num_router_layers)
    assert routing.ids.shape == (*shape, 2)
    assert routing.scores.shape == (*shape, 6)
    assert bool((routing.margins >= 0).all())
    pinned = gradients(model, ids, cu, Routing.pin(routing.ids))
    for name, grad in recorded.items():
        assert torch.equal(grad, pinned[name])
    shifted = gradients(model, ids, cu, Routing.pin((routing.ids + 1) % 6))
    assert not torch.equal(
        shifted["model.embed_tokens.weight"], recorded["model.embed_tokens.weight"]
    )


def test_weights_follow_from_config_and_seed():
    torch.manual_seed(5)
    first = K3Model(small_config(), 1).state_dict()
    torch.manual_seed(6)
    second = K3Model(small_config(), 1).state_dict()
    third = K3Model(small_config(), 2).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], third["lm_head.weight"])


def test_a_state_survives_export_bytes_and_another_slot():
    model = lively_model()
    ids, cu = batch([33, 20])
    pool, slots = filled_pool(model, 2)
    model.extend(ids, cu, pool, torch.tensor(slots))
    data = pool.export(slots[0]).to_bytes()
    state = ModelState.from_bytes(data, model.config)
    assert state.num_tokens == 33
    assert state.to_bytes() == data
    other, _ = filled_pool(model, 0)
    slot = other.allocate()
    other.load(slot, state)
    token = torch.tensor([7])
    expected = model.step(token, pool, torch.tensor(slots[:1]))
    assert torch.equal(model.step(token, other, torch.tensor([slot])), expected)
    wrong = small_config(layer_kinds=("kda", "mla"))
    for bad, config in ((data[:-8], model.config), (b"", model.config), (data, wrong)):
        with pytest.raises(UserInputError, match="model state"):
            ModelState.from_bytes(bad, config)


def test_a_freed_slot_starts_empty_and_a_full_pool_says_so():
    model = lively_model()
    ids, cu = batch([12])
    pool = StatePool(model.config, 1, 14, torch.float64)
    slots = torch.tensor([pool.allocate()])
    expected = model.extend(ids, cu, pool, slots)
    with pytest.raises(EngineError, match="slots are taken"):
        pool.allocate()
    pool.free(0)
    with pytest.raises(EngineError, match="not in use"):
        pool.free(0)
    assert pool.allocate() == 0
    assert torch.equal(model.extend(ids, cu, pool, slots), expected)
    model.extend(ids[:2], torch.tensor([0, 2]), pool, slots)
    before = pool.export(0)
    with pytest.raises(EngineError, match="max_tokens 14"):
        model.step(ids[:1], pool, slots)
    with pytest.raises(EngineError, match="max_tokens 14"):
        model.extend(ids[:1], torch.tensor([0, 1]), pool, slots)
    assert pool.export(0).to_bytes() == before.to_bytes()


def test_bfloat16_decode_agrees_with_its_own_training_path():
    """k3-KL between the laws of both paths, and between bfloat16 and float32."""
    model = K3Model(load_config("configs/model/k3_nano.yaml"), 3)
    narrow = K3Model(model.config, 3).bfloat16()
    ids, cu = batch([60, 33], vocab_size=849)
    pool, slots = filled_pool(narrow, 2, 60, torch.float32)
    with torch.no_grad():
        wide = logprobs(model, model(ids, cu)[0])
        trained = logprobs(narrow, narrow(ids, cu)[0])
        hidden = stepped(narrow, ids, cu, pool, slots)
    played = logprobs(narrow, hidden).detach()
    assert trained.dtype == torch.float32
    for other in (trained, wide):
        ratio = (other - played).gather(1, ids[:, None])
        assert float((ratio.exp() - 1 - ratio).mean()) < 1e-3
