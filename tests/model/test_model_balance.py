"""Quantile balancing reaches even load in a few steps and moves nothing but the choice."""

import pytest
import torch

from k3rl.errors import UserInputError
from k3rl.model.balance import balance, load_imbalance, quantile_bias, routers
from k3rl.model.routing import Routing
from tests.model.model_builders import batch, lively_model


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


def test_load_is_even_after_a_few_steps():
    model = lively_model()
    with torch.no_grad():
        for gate in routers(model):
            gate.e_score_correction_bias[0] += 1.0
    ids, cu = batch([200, 200, 200])
    seen = []
    for _ in range(7):
        routing = Routing.record(keep_scores=True)
        with torch.no_grad():
            model(ids, cu, None, routing)
        seen.append(load_imbalance(routing.ids, 6))
        balance(model, routing.scores)
    assert seen[0].min() > 2.5
    assert seen[-1].max() < 1.25
    for gate in routers(model):
        assert abs(float(gate.e_score_correction_bias.mean())) < 1e-6
    with pytest.raises(UserInputError, match="routed layers"):
        balance(model, routing.scores[:, :2])
