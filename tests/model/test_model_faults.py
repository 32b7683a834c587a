"""What must not spread, and what is refused by name before anything has changed."""

import pytest
import torch

from k3rl.errors import EngineError, UserInputError
from k3rl.model.released import load_released
from k3rl.model.routing import Routing
from k3rl.model.state import BatchState, StatePool
from k3rl.model.vision import Patches
from tests.model.model_builders import GOLDEN, batch, lively_model, parts, small_config


def pool_of(model, count=3, dtype=torch.float64):
    pool = StatePool(model.config, count, 60, dtype)
    return pool, torch.tensor([pool.allocate() for _ in range(count)])


def test_a_nan_stays_in_its_sequence():
    model = lively_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[60] = torch.nan
    ids, cu = batch([20, 5, 37], vocab_size=60)
    for poisoned in range(3):
        bent = ids.clone()
        bent[cu[poisoned]] = 60
        pool, slots = pool_of(model)
        with torch.no_grad():
            outs = [model(bent, cu)[0], model.extend(bent, cu, pool, slots)]
        for out in outs:
            spoiled = [bool(out[span].isnan().any()) for span in parts(cu)]
            assert spoiled == [n == poisoned for n in range(3)]
        pool.free(int(slots[poisoned]))
        assert pool.allocate() == int(slots[poisoned])
        assert bool(model.step(torch.tensor([1, 2, 3]), pool, slots)[poisoned].isfinite().all())


def test_a_routing_serves_one_pass():
    model = lively_model()
    ids, cu = batch([4, 3])
    routing = Routing.record()
    with torch.no_grad():
        model(ids, cu, None, routing)
        with pytest.raises(UserInputError, match="one pass"):
            model(ids, cu, None, routing)
    pool, slots = pool_of(model)
    with pytest.raises(UserInputError, match="one pass"):
        model.step(ids[:3], pool, slots, routing)


@pytest.mark.parametrize(
    "bend",
    [lambda p: p + 6, lambda p: p - 7, lambda p: p.repeat(1, 2, 1), lambda p: p[:, :, :1],
     lambda p: p[1:]],
    ids=["id too large", "negative id", "too many layers", "too few experts", "too few tokens"],
)  # fmt: skip
def test_pinned_ids_that_do_not_fit_change_nothing(bend):
    model = lively_model()
    pool, slots = pool_of(model)
    model.extend(torch.arange(12), torch.tensor([0, 4, 8, 12]), pool, slots)
    before = [state.to_bytes() for state in pool.gather(slots).split()]
    pinned = bend(torch.ones(3, model.num_router_layers, 2, dtype=torch.int64))
    for run in (
        lambda: model.step(torch.arange(3), pool, slots, Routing.pin(pinned)),
        lambda: model.extend(torch.arange(3), torch.arange(4), pool, slots, Routing.pin(pinned)),
    ):
        with pytest.raises(UserInputError, match="pinned expert id"):
            run()
    assert [state.to_bytes() for state in pool.gather(slots).split()] == before


def test_a_model_without_experts_records_none():
    moe = small_config().moe
    config = small_config(moe=type(moe)(40, 6, 2, 10, 12, 16, num_dense_layers=5))
    routing = Routing.record(keep_scores=True)
    lively_model(config=config)(torch.arange(5), torch.tensor([0, 5]), None, routing)
    assert routing.margins.shape == (5, 0)


def test_steps_say_what_they_cannot_do():
    model = lively_model()
    pool, slots = pool_of(model, dtype=torch.float32)
    with pytest.raises(EngineError, match="float32"):
        model.step(torch.arange(3), pool, slots)
    pool, slots = pool_of(model)
    for run in (
        lambda: model.step(torch.arange(0), pool, slots[:0]),
        lambda: model.extend(torch.arange(0), torch.tensor([0]), pool, slots[:0]),
    ):
        with pytest.raises(EngineError, match="0 s"):
            run()
    with pytest.raises(UserInputError, match="no sequence"):
        model(torch.arange(0), torch.tensor([0]))


def test_media_need_their_tokens_and_a_tower():
    model = load_released(GOLDEN / "tiny_k3")
    media = Patches(torch.zeros(4, 3, 14, 14), torch.tensor([[1, 2, 2]]))
    one = torch.tensor([5, model.config.vision.media_token_id])
    hidden, _ = model(one, torch.tensor([0, 2]), media=media)
    assert hidden.shape == (2, 64)
    for ids in (torch.tensor([5, 6]), one.repeat(2)):
        with pytest.raises(UserInputError, match="item"):
            model(ids, torch.tensor([0, len(ids)]), media=media)
    with pytest.raises(UserInputError, match="no vision tower"):
        lively_model()(torch.arange(3), torch.tensor([0, 3]), media=media)
    pool = StatePool(model.config, 1, 9)
    slots = torch.tensor([pool.allocate()])
    assert torch.equal(model.extend(one, torch.tensor([0, 2]), pool, slots, media=media), hidden)
    assert pool.lengths.tolist() == [2]


def test_a_bfloat16_product_is_as_exact_as_torch_makes_it():
    from k3rl.model.ops import linear

    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 1024, generator=generator).bfloat16() for n in (9, 20))
    exact = x.double() @ w.double().t()
    ours, theirs = linear(x, w), torch.nn.functional.linear(x, w)
    assert float((ours - exact).abs().mean()) <= 1.01 * float((theirs - exact).abs().mean())


def test_a_state_of_other_sequences_is_not_taken():
    model = lively_model()
    state = BatchState.zeros(model.config, 2, torch.float64)
    with pytest.raises(UserInputError, match="2 sequences"):
        model(torch.arange(6), torch.tensor([0, 1, 3, 6]), state)
