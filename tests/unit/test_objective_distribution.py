"""Log-probs and entropy at a temperature."""

import math

import pytest
import torch

from rloo_pipeline.objective.distribution import entropy_of, token_logprobs_of


def test_temperature():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    assert token_logprobs_of(logits, torch.tensor([0]), 0.5).item() == pytest.approx(-0.14293, abs=1e-5)
    assert token_logprobs_of(logits, torch.tensor([0]), 1.0).item() == pytest.approx(-0.40760, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_temperature_leaves_the_kl_of_equal_policies_at_zero(temperature):
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(5)
    first, second = (token_logprobs_of(logits.clone(), ids, temperature) for _ in range(2))
    assert torch.equal(first, second)


def test_half_softmax():
    logits = (8 * torch.randn(64, 1000, generator=torch.Generator().manual_seed(1))).bfloat16()
    ids = torch.arange(64)
    exact = logits.double()[torch.arange(64), ids] / 0.7 - torch.logsumexp(logits.double() / 0.7, -1)
    found = token_logprobs_of(logits, ids, 0.7)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-4)
    half = torch.log_softmax(logits / 0.7, -1)[torch.arange(64), ids]
    assert (half.double() - exact).abs().max() > 1e-2


def test_float64_stays_float64():
    logits = torch.randn(2, 3, dtype=torch.float64)
    assert token_logprobs_of(logits, torch.tensor([0, 1]), 1.0).dtype == torch.float64
    assert entropy_of(logits, 1.0).dtype == torch.float64


def test_entropy():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [math.log(4), 0.0, float("-inf"), float("-inf")]])
    halved = -(16 / 17) * math.log(16 / 17) - (1 / 17) * math.log(1 / 17)
    assert entropy_of(logits, 1.0)[0].item() == pytest.approx(math.log(4))
    assert entropy_of(logits, 0.5).tolist() == pytest.approx([math.log(4), halved])
