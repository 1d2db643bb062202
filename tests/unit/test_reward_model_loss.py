"""Bradley-Terry loss and calibration against hand calculation, float64 and scikit-learn."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rloo_pipeline.objective.preference import (
    bradley_terry_loss,
    brier,
    calibration_error,
    pair_loss,
    reliability,
    won,
)

LN3 = math.log(3)  # sigmoid 0.75


def loss(chosen: list[float], rejected: list[float], margin: list[float], denominator: int) -> float:
    tensors = (torch.tensor(values) for values in (chosen, rejected, margin))
    return bradley_terry_loss(*tensors, denominator).item()


def test_loss_by_hand() -> None:
    assert loss([1.0], [0.0], [0.0], 1) == pytest.approx(0.313262, abs=1e-6)  # log(1 + 1/e)
    assert loss([1.0], [0.0], [0.5], 1) == pytest.approx(0.474077, abs=1e-6)  # log(1 + 1/sqrt(e))
    assert loss([2.0], [2.0], [0.0], 1) == pytest.approx(math.log(2), abs=1e-6)
    assert loss([LN3, 0.0], [0.0, LN3], [0.0, 0.0], 4) == pytest.approx((math.log(4 / 3) + math.log(4)) / 4, abs=1e-6)


def test_loss_of_hopeless_pairs_is_finite() -> None:
    chosen = torch.tensor([-1000.0], requires_grad=True)
    value = bradley_terry_loss(chosen, torch.tensor([1000.0]), torch.zeros(1), 1)
    value.backward()
    assert value.item() == pytest.approx(2000)
    assert chosen.grad is not None
    assert chosen.grad.item() == pytest.approx(-1)


def test_half_precision_rewards_are_compared_in_float32() -> None:
    chosen, rejected = (torch.tensor([value], dtype=torch.bfloat16) for value in (8.0, 0.03125))
    exact = math.log1p(math.exp(-(8.0 - 0.03125)))
    assert bradley_terry_loss(chosen, rejected, torch.zeros(1), 1).item() == pytest.approx(exact, rel=1e-5)


def test_ties_count_half() -> None:
    np.testing.assert_array_equal(won(np.array([0.1, 0.0, -3.0])), [1.0, 0.5, 0.0])


def test_brier_and_loss_by_hand() -> None:
    assert brier(np.array([0.0])) == 0.25
    assert brier(np.array([LN3, -LN3])) == pytest.approx((0.25**2 + 0.75**2) / 2)
    np.testing.assert_allclose(pair_loss(np.array([LN3, 0.0, -800.0])), [math.log(4 / 3), math.log(2), 800])


def test_brier_and_loss_as_in_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    difference_N = np.random.default_rng(0).normal(0.3, 2, 200)
    chosen_wins_N = 1 / (1 + np.exp(-difference_N))
    assert brier(difference_N) == pytest.approx(metrics.brier_score_loss(np.ones(200), chosen_wins_N, pos_label=1))
    expected = metrics.log_loss(np.ones(200), chosen_wins_N, labels=[0, 1])
    assert pair_loss(difference_N).mean() == pytest.approx(expected)


def test_calibration_by_hand() -> None:
    """Three of four pairs at P = 16/21 are won, both at P = 0.5 half: ECE = (4 * |3/4 - 16/21| + 0) / 6."""
    strong = math.log(16 / 5)
    table = reliability(np.array([strong, strong, strong, -strong, 0.0, 0.0]))
    filled = [(round(item.low, 2), item.pairs, item.accuracy) for item in table if item.pairs]
    assert filled == [(0.5, 2, 0.5), (0.75, 4, 0.75)]
    assert table[5].confidence == pytest.approx(16 / 21)
    assert calibration_error(table) == pytest.approx(4 * (16 / 21 - 0.75) / 6)


def test_a_model_that_says_what_happens_is_calibrated() -> None:
    rng = np.random.default_rng(0)
    difference_N = np.abs(rng.normal(0, 2, 20000))
    truth_N = rng.random(20000) < 1 / (1 + np.exp(-difference_N))
    sure = calibration_error(reliability(np.where(truth_N, difference_N, -difference_N)))
    boasting = calibration_error(reliability(np.where(truth_N, 3 * difference_N, -3 * difference_N)))
    assert sure < 0.02 < 0.08 < boasting


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=30))
def test_laws_of_the_reliability_table(difference: list[float]) -> None:
    difference_N = np.array(difference)
    table, swapped = reliability(difference_N), reliability(-difference_N)
    assert sum(item.pairs for item in table) == len(difference)
    assert 0 <= calibration_error(table) <= 1
    for item, other in zip(table, swapped, strict=True):
        assert item.pairs == other.pairs
        if item.pairs:
            assert item.low - 1e-9 <= item.confidence <= item.high + 1e-9
            assert item.accuracy == pytest.approx(1 - other.accuracy)
