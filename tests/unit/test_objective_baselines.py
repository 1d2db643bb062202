"""Baselines against values worked out by hand, and the laws that each keeps or breaks."""

import inspect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rloo_pipeline.errors import UserError
from rloo_pipeline.objective.baselines import BASELINES, RunningMean, check_completions

NAMES = list(BASELINES)
NAN = np.nan


def estimate(name, rewards, groups, valid=None, past_mean=0.0):
    valid_N = np.full(len(rewards), True) if valid is None else np.array(valid)
    return BASELINES[name].estimate(np.array(rewards, float), np.array(groups), valid_N, past_mean)


def test_the_family_is_complete():
    assert set(NAMES) == {
        "leave_one_out", "none", "moving_average", "batch_mean",
        "group_mean", "group_standardized", "global_standardized", "best_of_k",
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_each_is_documented(name):
    text = inspect.getdoc(BASELINES[name].function)
    assert text is not None
    for part in ("A", "Bias:", f"Minimal K: {BASELINES[name].minimal_completions}", "Source:"):
        assert part in text


REWARDS, GROUPS = [1.0, 0.0, 5.0, 2.0], [0, 0, 1, 1]
BATCH_DEVIATION = 3.5**0.5  # of 1, 0, 5, 2 around 2


@pytest.mark.parametrize(
    ("name", "baseline", "advantage", "trained"),
    [
        ("leave_one_out", [0, 1, 2, 5], [1, -1, 3, -3], [1, 1, 1, 1]),
        ("none", [0, 0, 0, 0], [1, 0, 5, 2], [1, 1, 1, 1]),
        ("moving_average", [4, 4, 4, 4], [-3, -4, 1, -2], [1, 1, 1, 1]),
        ("batch_mean", [7 / 3, 8 / 3, 1, 2], [-4 / 3, -8 / 3, 4, 0], [1, 1, 1, 1]),
        ("group_mean", [0.5, 0.5, 3.5, 3.5], [0.5, -0.5, 1.5, -1.5], [1, 1, 1, 1]),
        ("group_standardized", [0.5, 0.5, 3.5, 3.5], [1, -1, 1, -1], [1, 1, 1, 1]),
        ("global_standardized", [2, 2, 2, 2], np.array([-1, -2, 3, 0]) / BATCH_DEVIATION, [1, 1, 1, 1]),
        ("best_of_k", [NAN] * 4, [1, 0, 1, 0], [1, 0, 1, 0]),
    ],
)
def test_by_hand(name, baseline, advantage, trained):
    found = estimate(name, REWARDS, GROUPS, past_mean=4.0)
    np.testing.assert_allclose(found.baseline_N, baseline, atol=1e-15)
    np.testing.assert_allclose(found.advantage_N, advantage, atol=1e-15)
    np.testing.assert_array_equal(found.trained_N, np.array(trained, bool))


@pytest.mark.parametrize("name", NAMES)
def test_invalid_rows_count_for_nothing(name):
    with_rows = estimate(name, [1, 9e9, 0, 5, -9e9, 2], [0, 0, 0, 1, 1, 1], np.ones(6) == [1, 0, 1, 1, 0, 1], 4.0)
    plain = estimate(name, REWARDS, GROUPS, past_mean=4.0)
    kept = [0, 2, 3, 5]
    np.testing.assert_array_equal(with_rows.baseline_N[kept], plain.baseline_N)
    np.testing.assert_array_equal(with_rows.advantage_N[kept], plain.advantage_N)
    for row in (1, 4):
        assert np.isnan(with_rows.baseline_N[row])
        assert with_rows.advantage_N[row] == 0
        assert not with_rows.trained_N[row]


@pytest.mark.parametrize("name", NAMES)
def test_a_lone_row(name):
    found = estimate(name, [3, 1, 2], [0, 1, 1])
    compares = name in ("leave_one_out", "group_mean", "group_standardized", "best_of_k")
    assert found.trained_N[0] == (not compares)
    assert (found.advantage_N[0] == 0) == compares
    assert found.baseline_N[0] == 3 or name not in ("leave_one_out", "group_mean", "group_standardized")


def test_amplification_of_rare_successes():
    """3.02 for 1 success of 8 against 2.00 for 4 of 8, relative to the advantage before division."""
    for successes, factor in ((1, 8 / 7**0.5), (4, 2.0)):
        rewards = [1.0] * successes + [0.0] * (8 - successes)
        divided, plain = (estimate(name, rewards, [0] * 8).advantage_N for name in ("group_standardized", "group_mean"))
        np.testing.assert_allclose(divided / plain, factor)
    assert pytest.approx(3.02, abs=0.005) == 8 / 7**0.5


def test_a_baseline_per_prompt_has_less_variance_than_a_global_one():
    """Rewards normal around 0.9 and 0.1 with deviation 0.05: 0.0025 * 24/25 against 0.0025 + 0.4^2."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(2000), 25)
    rewards = rng.normal(np.where(groups % 2, 0.9, 0.1), 0.05)
    assert estimate("group_mean", rewards, groups).advantage_N.var() == pytest.approx(0.0024, rel=0.03)
    assert estimate("leave_one_out", rewards, groups).advantage_N.var() == pytest.approx(0.0025 * 25 / 24, rel=0.03)
    for name in ("batch_mean", "none"):
        assert estimate(name, rewards, groups).advantage_N.var() == pytest.approx(0.1625, rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_too_few_completions_are_refused_with_the_reason(name):
    needed = BASELINES[name].minimal_completions
    check_completions(name, needed)
    if needed > 1:
        with pytest.raises(UserError, match=f"completions_per_prompt is 1: .*; use at least {needed}"):
            check_completions(name, 1)


# Multiples of 1/64: adding a shift to them does not round, and none differs from another by rounding alone.
batches = hnp.arrays(np.float64, (3, 4), elements=st.integers(-640, 640)).map(lambda drawn: drawn.ravel() / 64)
FOUR_EACH = np.repeat(np.arange(3), 4)
VALID = np.arange(12) % 7 != 3


@pytest.mark.parametrize("name", [name for name in NAMES if name != "best_of_k"])
@given(rewards=batches, order=st.permutations(range(12)))
def test_the_order_of_rows_changes_nothing(name, rewards, order):
    plain, moved = (estimate(name, rewards[o], FOUR_EACH[o], VALID[o], 0.5) for o in (np.arange(12), np.array(order)))
    np.testing.assert_array_equal(moved.advantage_N, plain.advantage_N[order])
    np.testing.assert_array_equal(moved.baseline_N, plain.baseline_N[order])


@given(order=st.permutations(range(12)), distinct=st.permutations(range(12)))
def test_the_order_of_rows_changes_nothing_for_best_of_k_without_ties(order, distinct):
    rewards, order = np.array(distinct, float), np.array(order)
    plain, moved = (estimate("best_of_k", rewards[o], FOUR_EACH[o]) for o in (np.arange(12), order))
    np.testing.assert_array_equal(moved.advantage_N, plain.advantage_N[order])


def test_the_order_of_rows_decides_between_equals_for_best_of_k():
    np.testing.assert_array_equal(estimate("best_of_k", [0, 1, 1], [0, 0, 0]).advantage_N, [0, 1, 0])


PER_GROUP = ("leave_one_out", "group_mean", "group_standardized", "best_of_k")


@pytest.mark.parametrize("name", PER_GROUP)
@given(rewards=batches, shift=st.sampled_from([-64.0, 0.5, 3.0, 128.0]))
def test_a_constant_added_to_a_group_changes_nothing(name, rewards, shift):
    shifted = rewards + np.where(FOUR_EACH == 1, shift, 0.0)
    plain, moved = (estimate(name, values, FOUR_EACH, VALID).advantage_N for values in (rewards, shifted))
    np.testing.assert_allclose(moved, plain, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(PER_GROUP)))
def test_a_constant_added_to_a_group_changes_the_others(name):
    plain, moved = (estimate(name, [1, 0, 5 + shift, 2 + shift], GROUPS).advantage_N for shift in (0, 7))
    assert np.abs(moved - plain).max() > 0.1


@pytest.mark.parametrize("name", ["leave_one_out", "group_mean", "group_standardized"])
@given(rewards=batches)
def test_advantages_of_a_group_sum_to_zero(name, rewards):
    advantage_N = estimate(name, rewards, FOUR_EACH, VALID).advantage_N
    np.testing.assert_allclose(np.bincount(FOUR_EACH, weights=advantage_N), 0, atol=1e-7)


@pytest.mark.parametrize("name", ["none", "moving_average", "batch_mean", "global_standardized", "best_of_k"])
def test_advantages_of_a_group_do_not_sum_to_zero_for_the_others(name):
    sums = np.bincount(GROUPS, weights=estimate(name, REWARDS, GROUPS, past_mean=4.0).advantage_N)
    assert np.abs(sums).min() > 0.1


@pytest.mark.parametrize("name", ["batch_mean", "global_standardized"])
@given(rewards=batches)
def test_advantages_of_the_batch_sum_to_zero(name, rewards):
    assert abs(estimate(name, rewards, FOUR_EACH, VALID).advantage_N.sum()) < 1e-6


@pytest.mark.parametrize("name", ["leave_one_out", "group_mean", "group_standardized"])
@given(reward=st.floats(-1e6, 1e6))
def test_flat_groups_give_exactly_zero(name, reward):
    found = estimate(name, [reward] * 4 + [reward + 1, 0.1, 0.2, 0.3], [0] * 4 + [1] * 4)
    np.testing.assert_array_equal(found.advantage_N[:4], 0)
    assert found.trained_N.all()


@pytest.mark.parametrize("name", ["batch_mean", "global_standardized"])
def test_a_flat_batch_gives_exactly_zero(name):
    np.testing.assert_array_equal(estimate(name, [0.1] * 6, [0, 0, 0, 1, 1, 1]).advantage_N, 0)


@pytest.mark.parametrize("name", ["group_standardized", "global_standardized"])
def test_rounding_is_not_blown_up(name):
    """0.7 in 32 bits and 1 - 0.3 in 64 differ by 1.2e-8; a thousandth is a difference."""
    rewards = [np.float32(0.7), 1 - 0.3]
    np.testing.assert_array_equal(estimate(name, rewards, [0, 0]).advantage_N, 0)
    np.testing.assert_allclose(estimate(name, [0.7, 0.7007], [0, 0]).advantage_N, [-1, 1])
    # Each group by its own size: a large reward elsewhere does not hide what is small.
    beside = estimate(name, [0.7, 0.7007, 1e6, 1e6 + 1], [0, 0, 1, 1]).advantage_N
    assert name == "global_standardized" or beside == pytest.approx([-1, 1, -1, 1])


def test_rewards_whose_deviation_underflows_are_equal():
    np.testing.assert_array_equal(estimate("group_standardized", [1e-200, 0.0], [0, 0]).advantage_N, 0)


def test_zero_std_is_no_division_by_zero():
    with np.errstate(all="raise"):
        for name in NAMES:
            assert np.isfinite(estimate(name, [0.95] * 8, [0] * 8).advantage_N).all()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_valid(name):
    found = estimate(name, [NAN, NAN], [0, 0], [False, False])
    np.testing.assert_array_equal(found.advantage_N, 0)
    assert not found.trained_N.any()


def test_running_mean():
    first = RunningMean().including(np.array([1.0, 3.0]))
    assert first == RunningMean(2.0, 2)
    assert first.including(np.array([8.0, 8.0])) == RunningMean(5.0, 4)
    assert first.including(np.zeros(0)) == first
    assert RunningMean().including(np.zeros(0)) == RunningMean()
