"""The way round a BLAS whose rows depend on their number, on any machine."""

import pytest
import torch
from torch.nn import functional as F

from k3rl.model import tiled
from k3rl.model.config import load_config
from k3rl.model.model import K3Model
from tests.model.model_builders import lively, lively_model, small_config

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("length", [1, 31, 32, 33, 200])
def test_attention_by_tiles_is_attention_with_its_gradients(length):
    inputs = [draw(2, 3, length, 24, seed=n).requires_grad_() for n in range(3)]
    ours = tiled.causal_attention_by_tiles(*inputs, scale=0.3)
    theirs = F.scaled_dot_product_attention(*inputs, is_causal=True, scale=0.3)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
    turn = draw(*ours.shape, seed=9)
    for one, other in zip(
        torch.autograd.grad(ours, inputs, turn),
        torch.autograd.grad(theirs, inputs, turn),
        strict=True,
    ):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_large_scores_do_not_overflow():
    q, k, v = (100 * draw(1, 2, 70, 8, seed=n) for n in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
    assert torch.allclose(tiled.causal_attention_by_tiles(q, k, v, 1.0), expected, atol=1e-9)


@DTYPES
@pytest.mark.parametrize("width", [3, 64, 200])
def test_rows_of_products_and_attention_do_not_depend_on_their_number(dtype, width):
    x, weight = draw(150, width, dtype=dtype), draw(50, width, dtype=dtype, seed=1)
    whole = tiled.linear_by_tiles(x, weight)
    assert torch.allclose(whole, x @ weight.T, atol=1e-4)
    q = draw(1, 2, 150, width, dtype=dtype)
    attended = tiled.causal_attention_by_tiles(q, q, q, 0.1)
    for rows in range(1, 150, 7):
        assert torch.equal(tiled.linear_by_tiles(x[:rows], weight), whole[:rows])
        part = q[:, :, :rows]
        again = tiled.causal_attention_by_tiles(part, part, part, 0.1)
        assert torch.equal(again, attended[:, :, :rows])


@DTYPES
def test_a_model_by_tiles_is_the_model_and_keeps_prefixes(dtype, monkeypatch):
    for model in (
        lively(K3Model(load_config("configs/model/k3_nano.yaml"), 0)).to(dtype),
        lively_model(config=small_config()).to(dtype),
    ):
        ids = torch.arange(150) % model.config.vocab_size
        with torch.no_grad():
            plain = logits(model, ids)
            with monkeypatch.context() as patch:
                patch.setattr(tiled, "_keeps_rows", lambda *_: False)
                whole = logits(model, ids)
                for length in (1, 8, 31, 65, 149):
                    assert torch.equal(logits(model, ids[:length]), whole[:length]), length
        assert torch.allclose(whole, plain, rtol=0, atol=1e-3 if dtype == torch.float32 else 1e-10)


def logits(model, ids):
    return model.head(model(ids, torch.tensor([0, len(ids)]))[0])


def test_where_the_blas_keeps_rows_or_nothing_is_promised_nothing_is_tiled(monkeypatch):
    asked = []
    monkeypatch.setattr(tiled, "_keeps_rows", lambda *what: asked.append(what))
    assert not tiled.needs_tiles(torch.zeros(2, dtype=torch.bfloat16))
    assert asked == []
    assert tiled.needs_tiles(torch.zeros(2))
    assert asked == [(torch.float32, torch.get_num_threads())]
