"""Which dataset each draw is from."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rloo_pipeline.data.mixture import draws, most, whole_weights

WEIGHTS = st.lists(st.integers(1, 40), min_size=2, max_size=6)


def counts(datasets: np.ndarray, size: int) -> np.ndarray:
    """Draws of each dataset after 0, 1, 2, ... draws, [draws + 1, D]."""
    return np.concatenate([np.zeros((1, size), int), np.cumsum(datasets[:, None] == np.arange(size), axis=0)])


@pytest.mark.parametrize(
    ("weights", "whole"),
    [([0.7, 0.3], [7, 3]), ([1, 1], [1, 1]), ([10.0, 2.5], [4, 1]), ([0.1, 1e-3], [100, 1]), ([6, 4, 2], [3, 2, 1])],
)
def test_whole_weights(weights: list[float], whole: list[int]) -> None:
    assert whole_weights(weights) == whole


def test_two_datasets_by_hand() -> None:
    # Shares 3/4 and 1/4, off by at most 1/2. After 1 draw that leaves (1, 0) alone; after 2 both (2, 0) and (1, 1),
    # where the first dataset is taken; after 3 (2, 1) alone; after 4 (3, 1).
    assert draws([3, 1], 10).tolist() == [0, 0, 1, 0, 0, 0, 1, 0, 0, 0]
    assert draws([1, 1], 4).tolist() == [0, 1, 0, 1]


@given(WEIGHTS, st.integers(1, 400))
def test_shares_are_never_off_by_a_whole_draw(weights: list[int], n: int) -> None:
    datasets = draws(weights, n)
    assert datasets.shape == (n,)
    total, size = sum(weights), len(weights)
    expected = np.arange(n + 1)[:, None] * np.array(weights)  # times sum(weights), so that all are whole numbers
    off = np.abs(counts(datasets, size) * total - expected).max()
    assert Fraction(int(off), total) <= 1 - Fraction(1, 2 * size - 2) < 1


@given(WEIGHTS, st.integers(1, 200), st.integers(0, 200))
def test_further_draws_change_no_former_ones(weights: list[int], n: int, more: int) -> None:
    assert draws(weights, n + more)[:n].tolist() == draws(weights, n).tolist()


@given(WEIGHTS, st.integers(1, 30), st.integers(1, 12))
def test_most_is_never_exceeded(weights: list[int], per_iteration: int, iterations: int) -> None:
    drawn = counts(draws(weights, per_iteration * iterations), len(weights))[::per_iteration]
    for dataset, weight in enumerate(weights):
        assert np.diff(drawn[:, dataset]).max() <= most(weight, sum(weights), len(weights), per_iteration)


def test_most_is_exact_where_the_share_is_whole() -> None:
    assert most(1, 4, 2, 8) == 2
    assert most(1, 4, 2, 9) == 3
