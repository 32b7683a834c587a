"""Quantile balancing reaches even load in a few steps and moves nothing but the choice."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import distributed as dist
from torch import multiprocessing

from k3rl.errors import UserInputError
from k3rl.model import balance as balance_module
from k3rl.model.balance import (
    QuantileBalancer,
    bin_range,
    histogram_quantile,
    load_imbalance,
    quantile_bias,
    routers,
)
from k3rl.model.routing import Routing
from tests.model import balance_worker
from tests.model.balance_worker import TOP_K, run_steps, scores_of, start_biases
from tests.model.model_builders import batch, lively_model

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "quantile_balancing.safetensors"


@pytest.fixture(scope="module")
def golden():
    tensors = load_file(GOLDEN)
    tensors["scores"] = (tensors["scores_u16"].float() + 0.5) / 65536
    return tensors


@pytest.fixture
def gloo(tmp_path):
    """A group of one rank in this process."""
    dist.init_process_group("gloo", f"file://{tmp_path}/one", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def loads(scores, bias, top_k):
    ids = torch.topk(scores.to(bias.dtype) + bias, top_k, dim=1).indices
    return torch.bincount(ids.flatten(), minlength=len(bias))


def balancer(**settings):
    return QuantileBalancer(start_biases(), TOP_K, **settings)


def test_bias_is_the_order_statistic_of_the_margins():
    scores = torch.rand(40, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bias = torch.linspace(-0.1, 0.1, 5, dtype=torch.float64)
    found = quantile_bias(scores, bias, 2)
    threshold = (scores + bias).sort(1, descending=True).values[:, 2]
    margins = (scores - threshold[:, None]).sort(0, descending=True).values
    raw = -margins[40 * 2 // 5]
    assert torch.allclose(found, raw - raw.mean(), atol=1e-15)
    with pytest.raises(UserInputError, match="no quantile"):
        quantile_bias(scores[:1], bias, 2)


def test_the_exact_form_agrees_with_golden_biases_and_loads(golden):
    bias = golden["bias0"].double()
    assert torch.equal(loads(golden["scores"], bias, 4), golden["load0"].long())
    for step in range(1, 6):
        bias = quantile_bias(golden["scores"], bias, 4)
        assert (bias - golden[f"bias{step}"]).abs().max() < 1e-12
        assert (loads(golden["scores"], bias, 4) - golden[f"load{step}"]).abs().max() <= 3


def test_the_histogram_form_agrees_with_golden_counts_and_bias(golden):
    bias = golden["bias0"].double()
    low, width = bin_range(bias)
    assert torch.allclose(torch.cat([low, width]), golden["hist_lo_width"], rtol=0, atol=1e-15)
    one = QuantileBalancer([bias.clone()], 4)
    one.observe(golden["scores"][:, None])
    assert one.step() == 4096
    assert torch.equal(one.counts[0], golden["hist"].int())
    found = histogram_quantile(one.counts[0], low, width, 4)
    assert (found - golden["bhat_hist"]).abs().max() < 1e-9
    # A share that a bin reaches with its last count lies on its upper edge.
    assert torch.equal(((found - low) / width - 1e-9).ceil().int() - 1, golden["hist_bin"])
    assert (found - golden["bhat"]).abs().max() <= width
    assert (one.biases[0] - golden["bias1_hist"]).abs().max() < 1e-9


def test_shares_that_are_not_whole_reach_the_bin_that_holds_them():
    # 7 tokens, top 2 of 4: q = 3.5, reached by the fourth count.
    counts = torch.tensor([[3, 1, 3], [4, 0, 3], [0, 0, 7], [7, 0, 0]], dtype=torch.int32)
    low, width = torch.tensor([-1.0]).double(), torch.tensor([0.5]).double()
    found = histogram_quantile(counts, low, width, 2)
    assert found.tolist() == [-1 + 0.5 * 1.5, -1 + 0.5 * 3.5 / 4, -1 + 0.5 * 2.5, -1 + 0.5 * 0.5]


def skewed(num_tokens, num_experts):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(num_tokens, num_experts, generator=generator)
    return noise.add_(torch.randn(num_experts, generator=generator)).sigmoid_()


@pytest.mark.parametrize(
    ("num_tokens", "exact_limit"),
    [
        pytest.param(4096, 1.10, id="4096"),  # 73 tokens an expert: one of them is 1.4 %
        pytest.param(32768, 1.05, id="32768", marks=pytest.mark.slow),
    ],
)
def test_896_experts_are_even_after_eight_steps(num_tokens, exact_limit):
    scores = skewed(num_tokens, 896)
    exact = torch.zeros(896)
    one = QuantileBalancer([torch.zeros(896)], 16)
    for _ in range(8):
        exact = quantile_bias(scores, exact, 16)
        start = one.biases[0].clone()
        one.observe(scores[:, None])
        one.step()
        apart = (one.biases[0] - quantile_bias(scores, start, 16)).abs().max()
        assert apart <= bin_range(start)[1]
    for bias, limit in [(exact, exact_limit), (one.biases[0], 1.20)]:
        ids = torch.topk(scores + bias, 16, dim=1).indices[:, None]
        assert load_imbalance(ids, 896) <= limit


def test_load_is_even_after_a_few_steps():
    model = lively_model()
    with torch.no_grad():
        for gate in routers(model):
            gate.e_score_correction_bias[0] += 1.0
    ids, cu = batch([200, 200, 200])
    balancer, seen = QuantileBalancer.of(model), []
    for _ in range(7):
        routing = Routing.record(keep_scores=True)
        with torch.no_grad():
            model(ids, cu, None, routing)
        seen.append(load_imbalance(routing.ids, 6))
        balancer.observe(routing.scores)
        balancer.step()
    assert seen[0].min() > 2.5
    assert seen[-1].max() < 1.25
    for gate in routers(model):
        assert abs(float(gate.e_score_correction_bias.mean())) < 1e-6


def test_a_model_is_balanced_by_its_owner_alone():
    """Training passes leave biases as they are; a step brings them near the exact ones."""
    ids, cu = batch([200, 200, 200])
    model = lively_model()
    before = [gate.e_score_correction_bias.clone() for gate in routers(model)]
    one = QuantileBalancer.of(model)
    routing = Routing.record(keep_scores=True)
    hidden, _ = model.train()(ids, cu, None, routing)
    hidden.sum().backward()
    one.observe(routing.scores)
    after = [gate.e_score_correction_bias for gate in routers(model)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    one.step()
    for layer, (start, found) in enumerate(zip(before, routers(model), strict=True)):
        exact = quantile_bias(routing.scores[:, layer], start, found.top_k)
        apart = found.e_score_correction_bias - exact
        assert apart.abs().max() <= 2 * bin_range(start)[1]
        assert not torch.equal(found.e_score_correction_bias, start)


def test_micro_batches_do_not_change_a_bit(monkeypatch):
    whole = run_steps([slice(0, 101)], 101)
    cut = run_steps([slice(60, 101), slice(0, 0), slice(0, 1), slice(1, 60)], 101)
    assert all(np.array_equal(a, b) for a, b in zip(whole, cut, strict=True))
    monkeypatch.setattr(balance_module, "_CHUNK", 40)
    small = run_steps([slice(0, 101)], 101)
    assert all(np.array_equal(a, b) for a, b in zip(whole, small, strict=True))
    assert whole[0].dtype == np.int32
    assert whole[1].dtype == np.float32


def test_padding_does_not_count():
    scores = scores_of(0, 50)
    mask = torch.rand(50, generator=torch.Generator().manual_seed(5)) < 0.6
    bare, padded = balancer(), balancer()
    bare.observe(scores[mask])
    padded.observe(torch.where(mask[:, None, None], scores, torch.nan), mask)
    padded.observe(scores[:3], torch.zeros(3, dtype=torch.bool))
    assert bare.step() == padded.step() == int(mask.sum())
    assert torch.equal(bare.counts, padded.counts)
    assert all(torch.equal(a, b) for a, b in zip(bare.biases, padded.biases, strict=True))


def test_average_over_steps_keeps_a_part_of_the_old_bias():
    plain, slow = balancer(), balancer(ema=0.75)
    for one in (plain, slow):
        one.observe(scores_of(0, 50))
        one.step()
    for start, new, mixed in zip(start_biases(), plain.biases, slow.biases, strict=True):
        expected = 0.75 * (start - start.mean()) + 0.25 * new
        assert torch.allclose(mixed, expected, atol=1e-7)


def test_bins_keep_to_the_biases_that_a_step_began_with():
    calm, moved = balancer(), balancer()
    for one in (calm, moved):
        one.observe(scores_of(0, 50))
        if one is moved:
            one.biases[0].add_(torch.arange(12.0))
        one.observe(scores_of(1, 50))
        one.step()
    assert torch.equal(calm.counts, moved.counts)
    assert torch.equal(calm.biases[0], moved.biases[0])


def test_a_failed_step_leaves_no_counts():
    one, other = balancer(), balancer()
    one.observe(scores_of(7, 50))
    one.discard()
    for each in (one, other):
        each.observe(scores_of(0, 50))
        assert each.step() == 50
    assert torch.equal(one.counts, other.counts)
    with pytest.raises(UserInputError, match="without tokens"):
        one.step()
    assert torch.equal(one.biases[0], other.biases[0])


def test_bad_arguments_are_named(monkeypatch):
    for settings in [{"ema": 1.0}, {"num_bins": 0}]:
        with pytest.raises(UserInputError, match="nothing to balance"):
            balancer(**settings)
    with pytest.raises(UserInputError, match="nothing to balance"):
        QuantileBalancer(start_biases(), 12)
    with pytest.raises(UserInputError, match="nothing to balance"):
        QuantileBalancer([], 1)
    one, scores = balancer(), scores_of(0, 5)
    for wrong in (scores[:, :1], scores[0], scores[:, :, :4]):
        with pytest.raises(UserInputError, match="2 routers of 12 experts"):
            one.observe(wrong)
    for mask in (torch.ones(5), torch.ones(4, dtype=torch.bool)):
        with pytest.raises(UserInputError, match="need bool"):
            one.observe(scores, mask)
    for value in (-0.1, 1.1, torch.nan):
        with pytest.raises(UserInputError, match="layer 0: a router score"):
            one.observe(torch.full_like(scores, value))
    one.discard()
    monkeypatch.setattr(balance_module, "MAX_TOKENS", 9)
    one.observe(scores)
    with pytest.raises(UserInputError, match="more than 9 tokens"):
        one.observe(scores)


def test_one_integer_all_reduce_a_step(gloo, monkeypatch):
    alone = run_steps([slice(0, 40)], 40)
    sent = []
    real = dist.all_reduce

    def counted(tensor, *args, **kwargs):
        sent.append((tensor.dtype, tuple(tensor.shape)))
        return real(tensor, *args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", counted)
    again = run_steps([slice(0, 30), slice(30, 40)], 40)
    assert sent == [(torch.int32, (2, 12, 1000))] * balance_worker.NUM_STEPS
    assert all(np.array_equal(a, b) for a, b in zip(alone, again, strict=True))


def test_ranks_agree_with_one_process_bit_for_bit(tmp_path):
    """Three ranks with 70, 0 and 31 tokens."""
    counts, biases = run_steps([slice(0, 101)], 101)
    cuts = [0, 70, 70, 101]
    multiprocessing.spawn(balance_worker.work, (cuts, str(tmp_path)), nprocs=3)
    for rank in range(3):
        assert np.array_equal(np.load(tmp_path / f"counts{rank}.npy"), counts)
        found = np.load(tmp_path / f"biases{rank}.npy")
        assert np.array_equal(found.view(np.int32), biases.view(np.int32))
