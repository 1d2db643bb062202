"""Truncated completions, groups without signal, normalization: what counts, and what it is divided by."""

import numpy as np
import pytest
import torch

from rloo_pipeline.errors import UserError
from rloo_pipeline.objective import advantages
from rloo_pipeline.objective.baselines import BASELINES
from rloo_pipeline.objective.groups import select_groups
from rloo_pipeline.objective.loss import sequence_loss
from rloo_pipeline.objective.normalization import loss_denominator
from rloo_pipeline.objective.penalties import missing_eos_penalty, soft_overlong_penalty
from tests.unit.test_objective_core import compute


def test_masked_rows_leave_loss_and_baseline():
    masked_N = np.array([False, True, False, False])
    result = compute([1, 9, 0, 2], [0] * 4, k=4, masked_N=masked_N)
    np.testing.assert_allclose(result.advantage_N, [0, 0, -1.5, 1.5])
    np.testing.assert_array_equal(result.in_baseline_N, ~masked_N)
    np.testing.assert_array_equal(result.trained_N, ~masked_N)
    assert list(result.exclusion_reason_N) == [None, advantages.MASKED, None, None]
    assert result.reward_N[1] == 9
    assert (result.counts.rows_masked, result.counts.rows_trained) == (1, 3)


def test_an_invalid_masked_row_is_counted_as_invalid():
    result = compute([1, 0, np.nan], [0] * 3, [True, True, False], k=3, masked_N=np.array([False, False, True]))
    assert result.exclusion_reason_N[2] == advantages.INVALID
    assert (result.counts.rows_invalid, result.counts.rows_masked) == (1, 0)


def test_what_masking_leaves_decides_about_the_signal():
    masked_N = np.array([True, False, False])
    assert compute([1, 0, 0], [0] * 3, k=3, masked_N=masked_N).counts.groups_without_signal == 1


@pytest.mark.parametrize("baseline", BASELINES)
def test_everything_masked(baseline):
    result = compute([1, 0], [0, 0], masked_N=np.array([True, True]), baseline=baseline)
    assert not result.trained_N.any()
    np.testing.assert_array_equal(result.advantage_N, 0)


def test_penalties():
    np.testing.assert_array_equal(missing_eos_penalty(np.array([True, False]), 1.5), [1.5, 0])
    found = soft_overlong_penalty(np.array([1, 12, 14, 16]), 16, 4)
    np.testing.assert_array_equal(found, [0, 0, 0.5, 1])
    np.testing.assert_array_equal(soft_overlong_penalty(np.array([14]), 16, 4, penalty=3.0), [1.5])
    with pytest.raises(ValueError, match="ramp_tokens 17"):
        soft_overlong_penalty(np.array([1]), 16, 17)


def test_a_penalty_comes_after_the_clipping_and_before_the_kl():
    result = compute(
        [9, 0], [0, 0], kl=np.array([1.0, 0.0]), beta=0.5, reward_clip_range=(-1, 3), penalty_N=np.array([2.0, 0.0])
    )
    np.testing.assert_array_equal(result.reward_N, [3, 0])
    np.testing.assert_array_equal(result.penalized_reward_N, [0.5, 0])


def test_a_penalty_gives_signal_to_a_group_of_equal_rewards():
    penalty_N = np.array([0.5, 0.0, 0.0, 0.0])
    result = compute([1, 1, 1, 1], [0, 0, 1, 1], penalty_N=penalty_N, without_signal="drop")
    np.testing.assert_array_equal(result.advantage_N, [-0.5, 0.5, 0, 0])
    assert result.counts.groups_without_signal == 1


# Rewards as stored, in 32 bits, and what is taken off them in 64: equal but for rounding, also around 0.
ROUNDED = [([0.7, 1.0], [0.0, 0.3]), ([0.3, 0.0], [0.3, 0.0])]


@pytest.mark.parametrize("baseline", ["leave_one_out", "group_mean", "group_standardized"])
@pytest.mark.parametrize(("rewards", "penalties"), ROUNDED)
def test_what_rounding_leaves_of_a_penalty_is_no_signal(rewards, penalties, baseline):
    rewards, penalty_N = np.array([*rewards, 1.0, 0.0], np.float32), np.array([*penalties, 0.0, 0.0])
    assert 0 < np.ptp(rewards[:2].astype(float) - penalty_N[:2]) < 1e-7
    given = {"rewards": rewards, "groups": [0, 0, 1, 1], "penalty_N": penalty_N, "baseline": baseline}
    kept = compute(**given)
    np.testing.assert_array_equal(kept.advantage_N[:2], 0)
    assert kept.advantage_N[2] > 0.4
    assert kept.counts.groups_without_signal == 1
    assert list(compute(**given, without_signal="drop").trained_N) == [False, False, True, True]


def test_a_group_without_signal_keeps_the_rewards_of_its_masked_rows():
    result = compute([5.0, 0.7, 0.7], [0] * 3, k=3, masked_N=np.arange(3) == 0)
    np.testing.assert_array_equal(result.penalized_reward_N, [5.0, 0.7, 0.7])


def test_select_groups():
    signal_G = np.array([False, True, True, False, True])
    np.testing.assert_array_equal(select_groups(signal_G, "keep"), [1, 1, 1, 1, 1])
    np.testing.assert_array_equal(select_groups(signal_G, "drop"), [0, 1, 1, 0, 1])
    np.testing.assert_array_equal(select_groups(signal_G, "resample", 2), [0, 1, 1, 0, 0])
    np.testing.assert_array_equal(select_groups(signal_G, "resample", 9), [0, 1, 1, 0, 1])
    with pytest.raises(ValueError, match="number of groups"):
        select_groups(signal_G, "resample")


FLAT_THEN_THREE = {"rewards": [5, 5, 1, 0, 2, 0, 3, 0], "groups": [0, 0, 1, 1, 2, 2, 3, 3]}


def test_dropped_groups_are_out_of_the_baseline_and_the_denominator():
    result = compute(**FLAT_THEN_THREE, without_signal="drop", baseline="batch_mean")
    np.testing.assert_allclose(result.baseline_N[2:4], [1, 1.2])
    assert np.isnan(result.baseline_N[:2]).all()
    assert list(result.exclusion_reason_N[:3]) == [advantages.NO_SIGNAL, advantages.NO_SIGNAL, None]
    assert (result.counts.rows_trained, result.counts.groups_trained) == (6, 3)


def test_kept_groups_without_signal_stay_in_the_denominator():
    result = compute(**FLAT_THEN_THREE)
    assert (result.counts.rows_trained, result.counts.groups_trained, result.counts.groups_without_signal) == (8, 4, 1)


def test_resample_trains_on_the_first_informative_groups_in_prompt_order():
    result = compute(**FLAT_THEN_THREE, without_signal="resample", groups_wanted=2)
    np.testing.assert_array_equal(result.trained_N, [0, 0, 1, 1, 1, 1, 0, 0])
    assert [*result.exclusion_reason_N[[0, 2, 6]]] == [advantages.NO_SIGNAL, None, advantages.SURPLUS]
    assert (result.counts.groups_trained, result.counts.groups_surplus, result.counts.groups_short) == (2, 1, 0)
    assert (result.counts.rows_trained, result.counts.rows_surplus, result.counts.rows_without_signal) == (4, 2, 2)


def test_resample_reports_its_shortfall():
    result = compute(**FLAT_THEN_THREE, without_signal="resample", groups_wanted=5)
    assert (result.counts.groups_trained, result.counts.groups_surplus, result.counts.groups_short) == (3, 0, 2)


def test_filter_split_keeps_the_lone_winner_with_its_group():
    result = compute([1, 0, 0, 0] + [0.95] * 4, [0] * 4 + [1] * 4, k=4, without_signal="drop")
    np.testing.assert_allclose(result.advantage_N, [1, -1 / 3, -1 / 3, -1 / 3, 0, 0, 0, 0])
    np.testing.assert_array_equal(result.trained_N, [1, 1, 1, 1, 0, 0, 0, 0])


def test_best_of_k_says_why_the_others_are_left_out():
    result = compute([1, 2, 0], [0] * 3, k=3, baseline="best_of_k")
    np.testing.assert_array_equal(result.advantage_N, [0, 1, 0])
    assert list(result.exclusion_reason_N) == [advantages.NOT_BEST, None, advantages.NOT_BEST]
    assert result.in_baseline_N.all()


def test_group_size_shrunk_to_one_valid_row_is_not_the_best_of_its_group():
    result = compute([1, np.nan, 3, 5], [0, 0, 1, 1], [True, False, True, True], baseline="best_of_k")
    np.testing.assert_array_equal(result.advantage_N, [0, 0, 0, 1])
    expected = [advantages.NO_SIBLING, advantages.INVALID, advantages.NOT_BEST, None]
    assert list(result.exclusion_reason_N) == expected
    counts = result.counts
    assert (counts.rows_without_sibling, counts.groups_of_one_valid_row, counts.rows_trained) == (1, 1, 1)


def test_every_row_is_counted_once_by_what_became_of_it():
    """Groups, in order: two invalid and one alone; masked, invalid, masked; flat; trained on; surplus."""
    rewards = [np.nan, np.nan, 1, 1, np.nan, 2, 3, 3, 3, 1, 2, 4, 5, 5, 6]
    masked_N = np.isin(np.arange(15), [3, 5])
    settings = {"groups": np.repeat(np.arange(5), 3), "valid": ~np.isnan(rewards), "k": 3, "masked_N": masked_N}
    dropped = compute(rewards, **settings, without_signal="resample", groups_wanted=1).counts
    assert (dropped.rows_invalid, dropped.rows_masked, dropped.rows_without_signal) == (3, 2, 4)
    assert (dropped.rows_trained, dropped.rows_surplus, dropped.groups_surplus) == (3, 3, 1)
    kept = compute(rewards, **settings).counts
    assert (kept.rows_without_signal, kept.rows_without_sibling, kept.rows_trained) == (0, 1, 9)
    best = compute(rewards, **settings, baseline="best_of_k").counts
    assert (best.rows_not_best, best.rows_without_sibling, best.rows_trained) == (6, 1, 3)


def test_normalize():
    result = compute([1, 0, 5, 2], [0, 0, 1, 1], normalize=True)
    # Advantages 1, -1, 3, -3 have mean 0 and a sample variance of 20 / 3.
    np.testing.assert_allclose(result.advantage_N, np.array([1, -1, 3, -3]) / ((20 / 3) ** 0.5 + 1e-4))
    np.testing.assert_array_equal(compute([2, 2], [0, 0], normalize=True).advantage_N, 0)


def test_normalize_is_over_the_trained_rows_alone():
    result = compute([1, 9, 0, 2], [0] * 4, k=4, baseline="none", normalize=True, masked_N=np.arange(4) == 1)
    np.testing.assert_allclose(result.advantage_N, np.array([0, 0, -1, 1]) / (1 + 1e-4))


def test_normalize_with_best_of_k_is_refused():
    with pytest.raises(UserError, match="normalize"):
        compute([1, 0], [0, 0], baseline="best_of_k", normalize=True)


def test_truncated_denominator():
    lengths_N, trained_N = np.array([10, 5, 15]), np.array([True, False, True])
    assert loss_denominator("token", lengths_N, trained_N) == 25
    assert loss_denominator("sequence", lengths_N, trained_N) == 2
    assert loss_denominator("constant", lengths_N, trained_N, 20) == 40
    with pytest.raises(ValueError, match="constant_length"):
        loss_denominator("constant", lengths_N, trained_N)


@pytest.mark.parametrize("normalization", ["sequence", "token", "constant"])
def test_truncated_denominator_of_nothing_gives_a_finite_zero(normalization):
    denominator = loss_denominator(normalization, np.array([4]), np.array([False]), 8)
    logprobs = torch.full((1, 4), -1.0, requires_grad=True)
    loss = sequence_loss(logprobs, torch.full((1, 4), True), torch.zeros(1), denominator)
    loss.backward()
    assert (loss.item(), logprobs.grad.abs().max().item()) == (0, 0)


def test_token_denominator():
    lengths_N = np.array([100, 900])
    denominator = loss_denominator("token", lengths_N, np.array([True, True]))
    total = 0.0
    for length, value in ((100, 2.0), (900, 0.5)):
        logprobs = torch.full((1, length), -value, dtype=torch.float64)
        total += sequence_loss(logprobs, torch.full((1, length), True), torch.ones(1), denominator).item()
    assert total == pytest.approx(0.65)
