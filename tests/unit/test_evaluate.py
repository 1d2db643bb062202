import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rloo_pipeline.config import EvaluateConfig
from rloo_pipeline.errors import UserError
from rloo_pipeline.stages.evaluate import against_dataset, kl_to, quality, rewards_by_prompt


def config(**settings):
    return EvaluateConfig(max_tokens=4, **{"samples_per_prompt": 3, "pass_k": (1, 2), **settings})


def table(rewards, kl=None):
    """Rewards by prompt id, samples in order."""
    rows = [(name, sample, value) for name, values in rewards.items() for sample, value in enumerate(values)]
    return pa.table(
        {
            "iteration": pa.array([1] * len(rows), pa.int32()),
            "prompt_id": pa.array([name for name, _, _ in rows]),
            "sample_index": pa.array([sample for _, sample, _ in rows], pa.int32()),
            "reward": pa.array([value for _, _, value in rows], pa.float32()),
            "kl": pa.array(kl or [0.0] * len(rows), pa.float64()),
        }
    )


MINE = table({"a": [1.0, 0.0, 1.0], "b": [0.0, 0.0, 0.5], "c": [1.0, 1.0, 1.0]}, kl=[0.5, -0.25, 0, 0, 1, 0, 0, 0, 1])
OPPONENT = table({"a": [0.0, 1.0], "b": [0.0, 0.0], "c": [1.0, 0.5]})


def test_quality_by_hand():
    """pass@1: 2/3, 0, 1. pass@2 = 1 - C(3 - c, 2) / 3: 1, 0, 1.

    Win rates, six pairs each, ties half. a: each 1 beats 0 and ties 1, the 0 ties 0 and loses: (3 + 0.5) / 6.
    b: 0.5 beats both, the zeros tie four times: (2 + 2) / 6. c: three ties, three wins: 4.5 / 6.
    """
    got = quality(MINE, OPPONENT, config(), seed=0)
    assert got["pass@1"] == pytest.approx((2 / 3 + 0 + 1) / 3)
    assert got["pass@2"] == pytest.approx(2 / 3)
    assert got["win_rate"] == pytest.approx((3.5 / 6 + 4 / 6 + 4.5 / 6) / 3)
    assert got["kl"] == pytest.approx(2.25 / 9)
    assert got["reward"] == pytest.approx((2 / 3 + 0.5 / 3 + 1) / 3)
    assert got["reward_low"] < got["reward"] < got["reward_high"]
    assert got["win_rate_low"] <= got["win_rate"] <= got["win_rate_high"]


def test_the_interval_is_over_prompts_not_samples():
    """Two prompts whose samples all agree: a mean of two draws is 0, 0.5 or 1 (a quarter, a half, a quarter)."""
    got = quality(table({"a": [0.0] * 3, "b": [1.0] * 3}), None, config(), seed=0)
    assert (got["reward_low"], got["reward_high"]) == (0.0, 1.0)


def test_the_initial_policy_has_no_win_rate():
    assert not any("win_rate" in key for key in quality(MINE, None, config(), seed=0))


def test_against_itself_half_is_won():
    assert quality(MINE, MINE, config(), seed=0)["win_rate"] == pytest.approx(0.5)


def test_invalid_rows_count_nowhere():
    """a: one of two valid samples passes; b: one of three. Pairs of a: four valid ones, 1 > 0, 1 = 1, 0 = 0, 0 < 1."""
    mine = table({"a": [1.0, None, 0.0], "b": [1.0, 0.0, 0.0]})
    opponent = table({"a": [0.0, 1.0, None], "b": [None, None, 0.0]})
    got = quality(mine, opponent, config(), seed=0)
    assert got["pass@1"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert got["pass@2"] == pytest.approx((1 + 2 / 3) / 2)
    assert got["win_rate"] == pytest.approx((2 / 4 + (1 + 0.5 + 0.5) / 3) / 2)
    assert got["reward"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert got["reward_low"] <= got["reward"] <= got["reward_high"]


def test_pass_at_k_needs_k_valid_samples_of_every_prompt():
    got = quality(table({"a": [1.0, None, None], "b": [1.0, 0.0, 0.0]}), None, config(), seed=0)
    assert got["pass@1"] == pytest.approx((1 + 1 / 3) / 2)
    assert "pass@2" not in got


def test_a_prompt_without_any_valid_reward_takes_no_part_and_is_counted():
    """b has none here and c has none in the opponent's evaluation; of a, 1 > 0 and 0 = 0: 3 of 4 pairs."""
    mine = table({"a": [1.0, 0.0], "b": [None] * 2, "c": [0.0, 0.0]})
    got = quality(mine, table({"a": [0.0, 0.0], "b": [1.0] * 2, "c": [None] * 2}), config(), seed=0)
    assert got["prompts_invalid"] == 1
    assert got["reward"] == pytest.approx((1 / 2 + 0) / 2)
    assert got["pass@1"] == pytest.approx((1 / 2 + 0) / 2)
    assert got["pass@2"] == pytest.approx((1 + 0) / 2)
    assert got["win_rate"] == pytest.approx(3 / 4)
    assert quality(MINE, None, config(), seed=0)["prompts_invalid"] == 0


def test_no_pair_of_valid_rewards_gives_no_win_rate():
    mine, opponent = table({"a": [1.0, 0.0], "b": [None] * 2}), table({"a": [None] * 2, "b": [1.0, 0.0]})
    assert not any("win_rate" in key for key in quality(mine, opponent, config(), seed=0))


def test_without_any_valid_reward_there_is_nothing_to_report():
    with pytest.raises(UserError, match="no held-out completion has a valid reward"):
        quality(table({"a": [None] * 3, "b": [None] * 3}), None, config(), seed=0)


def test_prompts_without_a_valid_reward_against_the_dataset():
    """a: 1 > 0.5 and 0 < 0.5; b has no valid reward of the policy's, c none of the dataset's."""
    both = table({"a": [1.0, 0.0], "b": [None] * 2, "c": [1.0, 1.0]})
    both = both.append_column("dataset_reward", pa.array([0.5, 0.5, 0.25, 0.25, None, None], pa.float32()))
    got = against_dataset(both, pa.table({"prompt_id": ["a", "b", "c"]}), config(opponent_column="own"), seed=0)
    assert got["win_rate_dataset"] == pytest.approx(1 / 2)
    assert (got["dataset_completions"], got["dataset_completions_invalid"]) == (3, 1)


@pytest.mark.parametrize("threshold", [0.1, 0.3, 0.7, 0.9, 1.0])
def test_a_reward_that_is_the_threshold_passes(threshold):
    below = float(np.nextafter(np.float32(threshold), np.float32(0)))
    got = quality(table({"a": [threshold, below]}), None, config(pass_threshold=threshold, pass_k=(1,)), seed=0)
    assert got["pass@1"] == 0.5


def test_the_same_seed_gives_the_same_intervals():
    one, again, other = (quality(MINE, OPPONENT, config(bootstrap_resamples=100), seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert {key: value for key, value in one.items() if "low" not in key and "high" not in key} == {
        key: value for key, value in other.items() if "low" not in key and "high" not in key
    }


@given(st.permutations(range(9)))
def test_the_order_of_rows_does_not_matter(order):
    shuffled = MINE.take(pa.array(order))
    np.testing.assert_array_equal(rewards_by_prompt(shuffled), [[1, 0, 1], [0, 0, 0.5], [1, 1, 1]])
    assert quality(shuffled, OPPONENT, config(bootstrap_resamples=100), 0) == quality(
        MINE, OPPONENT, config(bootstrap_resamples=100), 0
    )


def test_rewards_by_prompt_marks_invalid_rows():
    got_PN = rewards_by_prompt(table({"b": [None, 1.0], "a": [0.5, None]}))
    np.testing.assert_array_equal(got_PN, [[0.5, math.nan], [math.nan, 1.0]])


def test_kl_to_by_hand():
    lists = pa.list_(pa.float32())
    sampler = pa.chunked_array([pa.array([[-1.0, -2.0], [-0.5]], lists), pa.array([[], [-4.0]], lists)])
    reference = pa.array([[-1.5, -2.25], [-0.25], [], [-4.0]], lists)
    assert kl_to(reference, pa.table({"sampler_logprobs": sampler})).tolist() == [0.75, -0.25, 0.0, 0.0]
