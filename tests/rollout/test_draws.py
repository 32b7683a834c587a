"""The sampling rule: which number, which id, which log-prob."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from k3rl.rollout.draws import sample, uniforms
from k3rl.types import philox

ID = "0123456789abcdef" * 2


def draw(logits, numbers, greedy=None):
    is_greedy = torch.zeros(len(logits), dtype=torch.bool) if greedy is None else greedy
    return sample(logits, torch.as_tensor(numbers, dtype=torch.float64), is_greedy)


def test_a_number_depends_on_seed_id_and_offset_alone():
    whole = uniforms(5, ID, 0, 300)
    assert np.array_equal(whole, philox(5, ID).random(300))
    assert whole.min() >= 0
    assert whole.max() < 1
    for offset in (0, 1, 2, 3, 4, 7, 100, 201):
        assert np.array_equal(uniforms(5, ID, offset, 99), whole[offset : offset + 99])
    assert not np.array_equal(uniforms(6, ID, 0, 300), whole)
    assert not np.array_equal(uniforms(5, ID[::-1], 0, 300), whole)


def test_numbers_are_the_same_in_another_process():
    call = f"uniforms(5, '{ID}', 17, 6)"
    code = f"from k3rl.rollout.draws import uniforms; print({call}.tobytes().hex())"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, check=True)
    assert bytes.fromhex(done.stdout.decode()) == uniforms(5, ID, 17, 6).tobytes()


def test_the_id_is_the_one_whose_interval_holds_the_number():
    probabilities = torch.tensor([0.25, 0.5, 0.25])
    numbers = [0.0, 0.2499, 0.2501, 0.7499, 0.7501, np.nextafter(1, 0)]
    ids, logprobs = draw(probabilities.log().expand(6, 3), numbers)
    assert ids.tolist() == [0, 0, 1, 1, 2, 2]
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, probabilities[ids].log())


def test_agrees_with_a_float64_oracle():
    torch.manual_seed(0)
    logits = torch.randn(400, 849) * 3
    numbers = philox(1, "x").random(400)
    ids, logprobs = draw(logits, numbers)
    law = torch.log_softmax(logits.double(), -1)
    cdf = law.exp().cumsum(-1).numpy()
    oracle = [np.searchsorted(row, u, side="right") for row, u in zip(cdf, numbers, strict=True)]
    assert np.mean(ids.numpy() == oracle) > 0.999
    worst = (law.gather(1, ids[:, None])[:, 0] - logprobs.double()).abs().max()
    assert worst < 2e-6


def test_frequencies_are_those_of_the_law():
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0])
    ids, _ = draw(logits.expand(20_000, 4), philox(3, "y").random(20_000))
    shares = torch.bincount(ids, minlength=4) / 20_000
    assert (shares - logits.softmax(-1)).abs().max() < 0.012


@pytest.mark.parametrize("number", [0.0, 0.5, np.nextafter(1, 0)])
def test_an_impossible_id_is_never_drawn(number):
    logits = torch.full((1, 9), -1e4)
    logits[0, 4] = 0.0
    ids, logprobs = draw(logits, [number])
    assert (ids.item(), logprobs.item()) == (4, 0.0)


def test_greedy_takes_the_first_of_the_most_likely_with_logprob_zero():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]] * 2)
    ids, logprobs = draw(logits, [0.9999, 0.9999], torch.tensor([True, False]))
    assert ids.tolist() == [1, 3]
    assert logprobs[0] == 0.0
    assert logprobs[1] < 0.0
