"""How components make one reward."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rloo_pipeline.objective import advantages
from rloo_pipeline.reward_config import FunctionReward
from rloo_pipeline.rewards.combine import NONE_APPLIES, combine, extras, reasons
from rloo_pipeline.rewards.scored import Scored

NAN = np.nan


def component(name: str, weight: float = 1.0, **settings: Any) -> FunctionReward:
    return FunctionReward(name=name, function="reward.py:f", weight=weight, **settings)


def found(scores: Sequence[float], errors: Mapping[int, str] | None = None, **more: Any) -> Scored:
    return Scored(np.array(scores), errors or {}, **more)


def test_none_is_not_zero() -> None:
    configs = [component("a", 1.0), component("b", 2.0)]
    scored = {"a": found([1.0, NAN, NAN]), "b": found([NAN, 0.5, NAN])}
    reward_N = combine(configs, scored)
    np.testing.assert_array_equal(reward_N, [1.0, 1.0, NAN])
    assert reasons(configs, scored, reward_N) == [None, None, NONE_APPLIES]


def test_none_is_not_zero_among_its_siblings() -> None:
    """Rewards 1, 0 and invalid: by hand, each valid one has the other as its baseline, 1 - 0 and 0 - 1."""
    reward_N = combine([component("a")], {"a": found([1.0, 0.0, NAN])})
    result = advantages.compute(
        reward_N, None, np.zeros(3, int), ~np.isnan(reward_N), names_G=["p"], completions_per_prompt=3, beta=0.0
    )
    np.testing.assert_array_equal(result.advantage_N, [1.0, -1.0, 0.0])
    np.testing.assert_array_equal(result.trained_N, [True, True, False])
    np.testing.assert_array_equal(result.in_baseline_N, [True, True, False])
    assert result.counts.rows_invalid == 1


def test_weights_go_by_name() -> None:
    scored = {"b": found([1.0]), "a": found([10.0])}
    assert combine([component("a", -0.5), component("b", 3.0)], scored).tolist() == [3.0 - 5.0]


def test_a_weight_of_zero_is_reported_and_no_more() -> None:
    configs = [component("seen", 0.0), component("a")]
    scored = {"seen": found([9.0, 9.0, NAN, NAN], {3: "no"}), "a": found([1.0, NAN, 2.0, 3.0])}
    reward_N = combine(configs, scored)
    np.testing.assert_array_equal(reward_N, [1.0, NAN, 2.0, 3.0])
    assert reasons(configs, scored, reward_N) == [None, NONE_APPLIES, None, "seen: no"]


def test_a_row_with_an_error_is_invalid_whatever_else_applies() -> None:
    configs = [component("a"), component("b", -1.0), component("c", 0.0)]
    scored = {"a": found([1.0, NAN], {1: "broke"}), "b": found([1.0, NAN], {1: "hung"}), "c": found([1.0, 1.0])}
    reward_N = combine(configs, scored)
    np.testing.assert_array_equal(reward_N, [0.0, NAN])
    assert reasons(configs, scored, reward_N) == [None, "a: broke; b: hung"]


def test_clips_before_the_weight() -> None:
    configs = [component("a", -2.0, clip=(-1.0, 0.5)), component("b")]
    scored = {"a": found([3.0, -3.0, NAN]), "b": found([10.0, 10.0, 10.0])}
    assert combine(configs, scored).tolist() == [10.0 - 1.0, 10.0 + 2.0, 10.0]


def test_what_was_logged_of_rows() -> None:
    configs = [component("a"), component("b")]
    scored = {
        "a": found([0.0] * 3, extra={0: {"x": 1, "y": "\u00e9"}, 2: {"x": 2}}),
        "b": found([0.0] * 3, extra={0: {"x": 3}}),
    }
    assert extras(configs, scored, 3) == ['{"b/x": 3, "x": 1, "y": "\u00e9"}', None, '{"x": 2}']


@given(arrays(np.float64, (3, 7), elements=st.floats(-100, 100) | st.just(NAN)), st.permutations(range(7)))
def test_each_row_stands_alone(scores_CN: np.ndarray, order: list[int]) -> None:
    weights = {"0": 1.0, "1": -2.0, "2": 0.25}
    configs = [component(name, weight) for name, weight in weights.items()]
    reward_N = combine(configs, {str(c): found(row) for c, row in enumerate(scores_CN)})
    permuted = combine(configs, {str(c): found(row[order]) for c, row in enumerate(scores_CN)})
    np.testing.assert_array_equal(permuted, reward_N[order])
    for row in range(7):
        terms = [weights[str(c)] * scores_CN[c, row] for c in range(3) if not np.isnan(scores_CN[c, row])]
        assert reward_N[row] == pytest.approx(sum(terms), abs=1e-9) if terms else np.isnan(reward_N[row])
