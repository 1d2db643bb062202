"""Evaluation figures against counting and known intervals."""

from itertools import combinations

import numpy as np
import pytest

from rloo_pipeline.objective.statistics import bootstrap_interval, pass_at_k, prompt_win_rates, win_rate


def test_pass_at_k_by_counting_subsets():
    n = 6
    for correct in range(n + 1):
        samples = [index < correct for index in range(n)]
        for k in range(1, n + 1):
            subsets = [any(subset) for subset in combinations(samples, k)]
            assert pass_at_k(n, np.array([correct]), k)[0] == pytest.approx(np.mean(subsets), abs=1e-15)


def test_pass_at_k_with_a_number_of_samples_per_prompt():
    np.testing.assert_allclose(pass_at_k(np.array([4, 2]), np.array([1, 1]), 2), [0.5, 1])
    assert pass_at_k(1000, np.array([1]), 100)[0] == pytest.approx(0.1)


@pytest.mark.parametrize(("n", "correct", "k"), [(2, 1, 3), (2, 3, 1), (2, 1, 0), (2, -1, 1)])
def test_pass_at_k_refuses_the_impossible(n, correct, k):
    with pytest.raises(ValueError, match="1 <= k <= n"):
        pass_at_k(n, np.array([correct]), k)


def test_win_rate_counts_ties_half_and_leaves_invalid_samples_out():
    scores = np.array([[1.0, 0.0], [np.nan, 2.0], [np.nan, np.nan]])
    opponent = np.array([[0.0, 0.0, 1.0], [1.0, np.nan, 3.0], [0.0, 0.0, 0.0]])
    # First prompt: 1 wins 2 and ties 1, 0 ties 2 and loses 1: 3.5 of 6. Second: one win, one loss. Third: no pair.
    np.testing.assert_allclose(prompt_win_rates(scores, opponent), [3.5 / 6, 0.5, np.nan])
    assert win_rate(scores, opponent) == pytest.approx((3.5 / 6 + 0.5) / 2)
    assert win_rate(scores[:1], scores[:1]) == 0.5
    assert np.isnan(win_rate(scores[2:], opponent[2:]))


def test_bootstrap_interval_of_zeros_and_ones():
    values = np.repeat([0.0, 1.0], [60, 40])
    low, high = bootstrap_interval(values, 4000, seed=1)
    # The resampled sum is binomial(100, 0.4), whose 2.5% and 97.5% quantiles are 31 and 50.
    assert low == pytest.approx(0.31, abs=0.011)
    assert high == pytest.approx(0.50, abs=0.011)
    assert bootstrap_interval(values, 4000, seed=1) == (low, high)
    narrow = bootstrap_interval(values, 4000, seed=1, level=0.5)
    assert low < narrow[0] < 0.4 < narrow[1] < high


def test_bootstrap_interval_of_equal_values_has_no_width():
    assert bootstrap_interval(np.full(7, 2.5), 100, seed=0) == (2.5, 2.5)


@pytest.mark.parametrize("values", [[], [1.0, np.nan]])
def test_bootstrap_interval_refuses_what_has_no_mean(values):
    with pytest.raises(ValueError, match="at least one value"):
        bootstrap_interval(np.array(values), 100, seed=0)
