"""A prefix comes out bit for bit the same alone, and whatever follows it; on a CPU."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from k3rl.model.config import load_config
from k3rl.model.model import K3Model
from k3rl.model.released import load_released
from tests.model.model_builders import GOLDEN, lively, lively_model, small_config

FEWEST_ROWS = 8
KIMI_LINEAR = {"attn_res": "off", "activation": "silu"}


@pytest.fixture(params=[1, 2], ids=lambda n: f"{n} threads")
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def models(dtype):
    return {
        "released": load_released(GOLDEN / "tiny_k3", dtype),
        "nano": lively(K3Model(load_config("configs/model/k3_nano.yaml"), 0)).to(dtype),
        "odd widths": lively_model(config=small_config()).to(dtype),
        "full": lively_model(config=small_config(attn_res="full")).to(dtype),
        "residual stream": lively_model(config=small_config(**KIMI_LINEAR)).to(dtype),
    }


def logits(model, ids):
    return model.head(model(ids, torch.tensor([0, len(ids)]))[0]).detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", list(models(torch.float32)))
def test_a_prefix_alone_is_the_prefix_of_the_whole(name, dtype, threads):
    model = models(dtype)[name]
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, (600,), generator=generator)
    whole = logits(model, ids)
    for length in (
        1,
        2,
        7,
        8,
        9,
        15,
        16,
        17,
        31,
        33,
        63,
        64,
        65,
        127,
        129,
        255,
        257,
        384,
        513,
        599,
    ):
        assert torch.equal(logits(model, ids[:length]), whole[:length]), length
    with torch.no_grad():
        assert torch.equal(logits(model, ids), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_prefix_does_not_see_what_follows(dtype, threads):
    model = models(dtype)["released"]
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 300, (2, 300), generator=generator)
    for length in (1, 5, 16, 100, 256, 299):
        other = torch.cat([ids[0, :length], ids[1, length:]])
        assert torch.equal(logits(model, other)[:length], logits(model, ids[0])[:length])


class ProductRows(TorchDispatchMode):
    """Notes the rows of every matrix product."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in {"mm", "bmm", "mv", "linear", "matmul", "dot"}:
            self.rows.append((name, args[0].shape[-2] if name != "mv" else 0))
        elif name in {"addmm", "baddbmm", "baddbmm_", "addmv", "addmm_"}:
            self.rows.append((name, args[1].shape[-2]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", list(models(torch.float32)))
def test_no_product_has_fewer_than_eight_rows(name):
    """Experts' included: with 20 tokens most experts get fewer rows than that."""
    model = models(torch.float32)[name]
    for length in (1, 3, 20):
        with torch.no_grad(), ProductRows() as seen:
            logits(model, torch.arange(length))
        assert len(seen.rows) > 20
        assert not [entry for entry in seen.rows if entry[1] < FEWEST_ROWS]


def test_the_count_of_rows_can_fail():
    with ProductRows() as seen:
        torch.nn.functional.linear(torch.ones(3, 4), torch.ones(2, 4))
        torch.mv(torch.ones(9, 4), torch.ones(4))
    assert sorted(seen.rows) == [("mm", 3), ("mv", 0)]
