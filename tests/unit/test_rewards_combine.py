"""How components make one reward."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rloo_pipeline.rewards.combine import combine

NAN = np.nan


def test_none_is_not_zero() -> None:
    components = {"a": np.array([1.0, NAN, NAN]), "b": np.array([NAN, 0.5, NAN])}
    np.testing.assert_array_equal(combine(components, {"a": 1.0, "b": 2.0}), [1.0, 1.0, NAN])


def test_weights_go_by_name() -> None:
    components = {"b": np.array([1.0]), "a": np.array([10.0])}
    assert combine(components, {"a": -0.5, "b": 3.0}).tolist() == [3.0 - 5.0]


def test_a_weight_of_zero_still_applies() -> None:
    assert combine({"a": np.array([4.0])}, {"a": 0.0}).tolist() == [0.0]


@given(arrays(np.float64, (3, 7), elements=st.floats(-100, 100) | st.just(NAN)), st.permutations(range(7)))
def test_each_row_stands_alone(scores_CN: np.ndarray, order: list[int]) -> None:
    weights = {"0": 1.0, "1": -2.0, "2": 0.25}
    reward_N = combine({str(c): row for c, row in enumerate(scores_CN)}, weights)
    permuted = combine({str(c): row[order] for c, row in enumerate(scores_CN)}, weights)
    np.testing.assert_array_equal(permuted, reward_N[order])
    for row in range(7):
        terms = [weights[str(c)] * scores_CN[c, row] for c in range(3) if not np.isnan(scores_CN[c, row])]
        assert reward_N[row] == pytest.approx(sum(terms), abs=1e-9) if terms else np.isnan(reward_N[row])
