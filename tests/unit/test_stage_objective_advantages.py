"""From joined rows and settings to advantages, and the state that is handed on; expected values by hand."""

import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rloo_pipeline.config import ExecutionConfig, IterationConfig
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import Layout
from rloo_pipeline.objective.baselines import RunningMean
from rloo_pipeline.objective_config import AdvantagesConfig
from rloo_pipeline.stages.advantages import describe, estimate
from rloo_pipeline.stages.context import Context, Record
from rloo_pipeline.stages.estimator_state import State

# Prompt b was drawn before a; rows are in key order.
REWARDS = [1.0, 0.0, 2.0, 2.0, 4.0, 1.0]
PROMPTS = ["a", "a", "b", "b", "c", "c"]
POLICY = [[-1.0], [-1.0, -2.0], [-1.0, -1.0, -1.0], [-2.0], [-1.0, -1.0, -1.0, -1.0], [-3.0]]
REFERENCE = [[-1.5], [-1.0, -1.0], [-1.0, -1.0, -1.0], [-2.0], [-1.25, -1.25, -1.25, -1.25], [-3.0]]
LINK = IterationConfig(previous="0000", reference="0000")
FINISH = ["stop", "length", "stop", "stop", "length", "stop"]


def joined(rewards=REWARDS, reference=REFERENCE):
    return pa.table(
        {
            "iteration": pa.array([1] * 6, pa.int32()),
            "prompt_id": PROMPTS,
            "sample_index": pa.array([0, 1] * 3, pa.int32()),
            "reward": pa.array(rewards, pa.float32()),
            "policy_logprobs": pa.array(POLICY, pa.list_(pa.float32())),
            "reference_logprobs": pa.array(reference, pa.list_(pa.float32())),
            "finish_reason": FINISH,
        }
    )


def computed(state=None, facts=None, table=None, **settings):
    config = AdvantagesConfig(**settings)
    facts = {"completions_per_prompt": 2, **(facts or {})}
    return estimate(table or joined(), ["b", "a", "c"], facts, config, state or State(RunningMean(), config.beta))


@pytest.mark.parametrize(
    ("baseline", "advantages"),
    [
        ("leave_one_out", [1, -1, 0, 0, 3, -3]),
        ("none", [1, 0, 2, 2, 4, 1]),
        ("moving_average", [0.5, -0.5, 1.5, 1.5, 3.5, 0.5]),
        ("batch_mean", [1 - 9 / 5, 0 - 10 / 5, 2 - 8 / 5, 2 - 8 / 5, 4 - 6 / 5, 1 - 9 / 5]),
        ("group_mean", [0.5, -0.5, 0, 0, 1.5, -1.5]),
        ("group_standardized", [1, -1, 0, 0, 1, -1]),
        # Mean 10/6, mean square 26/6.
        ("global_standardized", [(r - 10 / 6) / math.sqrt(26 / 6 - 100 / 36) for r in REWARDS]),
        ("best_of_k", [1, 0, 1, 0, 1, 0]),
    ],
)
def test_baselines(baseline, advantages):
    result = computed(State(RunningMean(0.5, 7), 0.0), baseline=baseline)
    assert result.advantage_N == pytest.approx(advantages, abs=1e-12)


def test_normalize():
    """Leave-one-out advantages have mean 0; sum of squares 20 over 5."""
    assert computed(normalize=True).advantage_N == pytest.approx(np.array([1, -1, 0, 0, 3, -3]) / (2 + 1e-4))


@pytest.mark.parametrize(
    ("estimator", "kl"),
    [
        ("k1", [0.5, -1.0, 0, 0, 1.0, 0]),
        ("k2", [0.125, 0.5, 0, 0, 4 * 0.03125, 0]),
        ("k3", [math.exp(-0.5) - 0.5, math.e - 2, 0, 0, 4 * (math.exp(-0.25) - 0.75), 0]),
        ("abs", [0.5, 1.0, 0, 0, 1.0, 0]),
    ],
)
def test_kl_estimators(estimator, kl):
    result = computed(kl_estimator=estimator, beta=2.0)
    assert result.kl_N == pytest.approx(kl, abs=1e-12)
    assert result.penalized_reward_N == pytest.approx(np.array(REWARDS) - 2 * np.array(kl), abs=1e-12)


def test_kl_per_token():
    assert computed(kl_normalization="length").kl_N == pytest.approx([0.5, -0.5, 0, 0, 0.25, 0])


def test_kl_in_the_loss_leaves_the_reward():
    config = AdvantagesConfig(beta=2.0, kl_in="loss", kl_estimator="k3", kl_normalization="length")
    result = computed(beta=2.0, kl_in="loss")
    assert result.penalized_reward_N.tolist() == result.reward_N.tolist() == REWARDS
    assert State(RunningMean(), 2.0).facts(config, result) == {
        "kl_in_loss": {"beta": 2.0, "estimator": "k3", "normalization": "length"}
    }


def test_the_adapted_beta_is_that_of_the_loss():
    """0.7 by now, not the 0.2 of the settings; the mean KL is 1/12, far below the target."""
    config = AdvantagesConfig(beta=0.2, target_kl=1.0, kl_in="loss")
    state = State(RunningMean(), 0.7)
    facts = state.facts(config, computed(state, beta=0.2, target_kl=1.0, kl_in="loss"))
    assert facts["kl_in_loss"]["beta"] == 0.7
    assert facts["carried"] == {"beta": pytest.approx(0.7 * 0.98)}


@pytest.mark.parametrize("where", ["reward", "loss"])
def test_kl_without_reference_is_refused(where):
    with pytest.raises(UserError, match=r"beta is 0\.1 without reference log-probs"):
        computed(table=joined(reference=[None] * 6), beta=0.1, kl_in=where)


def test_reward_clip_range():
    assert computed(reward_clip_range=(0.5, 2.0)).reward_N.tolist() == [1, 0.5, 2, 2, 2, 1]


def test_masked_rows_leave_loss_and_baseline():
    result = computed(truncated="mask", baseline="batch_mean")
    # Left: 1, 2, 2, 1.
    assert result.advantage_N == pytest.approx([1 - 5 / 3, 0, 2 - 4 / 3, 2 - 4 / 3, 0, 1 - 5 / 3])
    assert result.trained_N.tolist() == [True, False, True, True, False, True]
    assert result.exclusion_reason_N[1] == "truncated at max_tokens"


def test_missing_eos_penalty():
    result = computed(truncated="penalize", missing_eos_penalty=0.5)
    assert result.reward_N.tolist() == REWARDS
    assert result.penalized_reward_N.tolist() == [1, -0.5, 2, 2, 3.5, 1]


def test_overlong_ramp():
    """Lengths 1, 2, 3, 1, 4, 1: nothing up to 1, all of 0.6 from 4 on."""
    result = computed(truncated="penalize", overlong_ramp=(1, 4), overlong_penalty=0.6, missing_eos_penalty=1.0)
    assert result.penalized_reward_N == pytest.approx([1, 0 - 0.2 - 1, 2 - 0.4, 2, 4 - 0.6 - 1, 1])


def metrics_of(table=None, state=None, facts=None, **settings):
    config, state = AdvantagesConfig(**settings), state or State(RunningMean(), 0.0)
    table = table or joined()
    record = Record(Context(Layout(Path()), "0001", LINK, 0, ExecutionConfig()), "advantages", {}, {})
    describe(record, table, computed(state, facts, table, **settings), config, state)
    return record.metrics


def test_metrics_by_hand():
    """Rewards 1, 0, 2, 2, 4, 1; leave-one-out advantages 1, -1, 0, 0, 3, -3; KL 0.5, -1, 0, 0, 1, 0 over 12 tokens."""
    metrics = metrics_of()
    assert metrics["reward"] == pytest.approx(10 / 6)
    assert metrics["reward_std"] == pytest.approx(math.sqrt((26 - 100 / 6) / 5))
    assert metrics["penalized_reward"] == pytest.approx(10 / 6)
    assert (metrics["kl"], metrics["kl_per_token"]) == pytest.approx((0.5 / 6, 0.5 / 12))
    assert (metrics["advantage_mean"], metrics["advantage_std"]) == pytest.approx((0.0, math.sqrt(20 / 6)))
    assert metrics["frac_reward_zero_std"] == pytest.approx(1 / 3)
    assert (metrics["rows"], metrics["rows_trained"], metrics["groups_trained"]) == (6, 6, 3)
    assert not {"clipped_reward", "truncation_penalty", "beta", "past_mean"} & set(metrics)


def test_metrics_of_advantages_are_over_the_rows_trained_on():
    """Without the flat group and without a baseline they are 1, 0, 4, 1."""
    metrics = metrics_of(groups_without_signal="drop", baseline="none")
    assert metrics["advantage_mean"] == pytest.approx(6 / 4)
    assert metrics["advantage_std"] == pytest.approx(math.sqrt(18 / 4 - 36 / 16))
    assert metrics["reward"] == pytest.approx(10 / 6)


def test_the_raw_reward_stands_apart_from_clip_and_penalty():
    metrics = metrics_of(reward_clip_range=(0.5, 2.0), truncated="penalize", missing_eos_penalty=0.25)
    assert metrics["reward"] == pytest.approx(10 / 6)
    assert metrics["reward_std"] == pytest.approx(math.sqrt((26 - 100 / 6) / 5))
    assert metrics["clipped_reward"] == pytest.approx((1 + 0.5 + 2 + 2 + 2 + 1) / 6)
    assert metrics["truncation_penalty"] == pytest.approx(0.5 / 6)
    assert metrics["penalized_reward"] == pytest.approx((8.5 - 0.5) / 6)


def test_rows_without_reward_are_out_of_the_means():
    metrics = metrics_of(joined([1.0, None, 2.0, 2.0, 4.0, None]), truncated="penalize", missing_eos_penalty=0.5)
    assert metrics["reward"] == pytest.approx(9 / 4)
    assert metrics["reward_std"] == pytest.approx(math.sqrt((25 - 81 / 4) / 3))
    assert metrics["truncation_penalty"] == pytest.approx(0.5 / 4)
    assert (metrics["rows_invalid"], metrics["rows_without_sibling"], metrics["rows_trained"]) == (2, 2, 2)


def test_kl_per_token_is_over_all_tokens_whatever_the_normalization():
    metrics = metrics_of(kl_normalization="length")
    assert metrics["kl"] == pytest.approx((0.5 - 0.5 + 0.25) / 6)
    assert metrics["kl_per_token"] == pytest.approx(0.5 / 12)


def test_surplus_groups_are_counted():
    metrics = metrics_of(facts={"groups_wanted": 1}, groups_without_signal="resample")
    assert (metrics["groups_trained"], metrics["groups_surplus"], metrics["groups_without_signal"]) == (1, 1, 1)
    assert (metrics["rows_surplus"], metrics["rows_without_signal"], metrics["rows_trained"]) == (2, 2, 2)


def test_state_is_in_the_metrics_where_it_is_used():
    state = State(RunningMean(0.5, 7), 0.4)
    metrics = metrics_of(state=state, baseline="moving_average", beta=0.3, target_kl=1.0)
    assert (metrics["past_mean"], metrics["beta"]) == (0.5, 0.4)


def test_drop():
    result = computed(groups_without_signal="drop", baseline="batch_mean")
    # Left: 1, 0, 4, 1.
    assert result.advantage_N == pytest.approx([1 - 5 / 3, -2, 0, 0, 4 - 2 / 3, 1 - 5 / 3])
    assert result.counts.groups_trained == 2


def test_resample_takes_groups_in_the_order_drawn():
    """Drawn b, a, c with b flat: of one wanted it is a, though b and a both come before c by id."""
    result = computed(facts={"groups_wanted": 1}, groups_without_signal="resample")
    assert result.trained_N.tolist() == [True, True, False, False, False, False]
    assert result.exclusion_reason_N[2].startswith("group without signal")
    assert result.exclusion_reason_N[4].startswith("group not needed")
    later = joined(rewards=[1.0, 0.0, 2.0, 3.0, 4.0, 1.0])
    first_drawn = computed(table=later, facts={"groups_wanted": 1}, groups_without_signal="resample")
    assert first_drawn.trained_N.tolist() == [False, False, True, True, False, False]


def test_resample_counts_a_shortfall_beyond_the_prompts_drawn():
    result = computed(facts={"groups_wanted": 5}, groups_without_signal="resample")
    assert (result.counts.groups_trained, result.counts.groups_short) == (2, 3)


def test_resample_counts_a_shortfall():
    result = computed(facts={"groups_wanted": 3}, groups_without_signal="resample")
    assert (result.counts.groups_trained, result.counts.groups_short) == (2, 1)


def test_zero_std_after_kl():
    """A group of equal rewards is without signal although the KL tells its completions apart."""
    table = joined(rewards=[1.0, 1.0, 2.0, 2.0, 4.0, 1.0])
    result = computed(table=table, beta=1.0)
    assert result.counts.groups_without_signal == 2
    assert result.advantage_N[:2] == pytest.approx([-1.5, 1.5])


def written(directory, **state):
    (directory / "state.json").write_text(json.dumps({"step": 3, **state}))
    return directory


def test_state_starts_anew(tmp_path):
    config = AdvantagesConfig(beta=0.3, target_kl=1.0, baseline="moving_average")
    assert State.read(written(tmp_path), config) == State(RunningMean(0.0, 0), 0.3)


def test_state_goes_on(tmp_path):
    directory = written(tmp_path, past_rewards={"mean": 0.25, "rows": 8}, beta=0.7)
    config = AdvantagesConfig(beta=0.3, target_kl=1.0, baseline="moving_average")
    assert State.read(directory, config) == State(RunningMean(0.25, 8), 0.7)
    assert State.read(directory, AdvantagesConfig(beta=0.3)).beta == 0.3


def test_moving_average_is_handed_on():
    """Eight rewards of mean 0.25 and these six of sum 10."""
    state = State(RunningMean(0.25, 8), 0.0)
    config = AdvantagesConfig(baseline="moving_average")
    facts = state.facts(config, computed(state, baseline="moving_average"))
    assert facts == {"carried": {"past_rewards": {"mean": pytest.approx(12 / 14), "rows": 14}}}


def test_moving_average_is_over_the_rows_in_the_baseline():
    """The cut completions, of rewards 0 and 4, are masked: 1, 2, 2 and 1 are left."""
    state, config = State(RunningMean(), 0.0), AdvantagesConfig(baseline="moving_average", truncated="mask")
    facts = state.facts(config, computed(state, baseline="moving_average", truncated="mask"))
    assert facts["carried"]["past_rewards"] == {"mean": pytest.approx(6 / 4), "rows": 4}


def test_beta_is_adapted_to_the_kl_of_all_completions():
    """KL 0.5, -1, 0, 0, 1, 0: of all 1/12, of those not masked 1/8; the error is within its bounds."""
    settings = {"beta": 0.4, "target_kl": 0.1, "truncated": "mask"}
    state = State(RunningMean(), 0.4)
    facts = state.facts(AdvantagesConfig(**settings), computed(state, **settings))
    assert facts["carried"]["beta"] == pytest.approx(0.4 * (1 + 0.1 * (1 / 1.2 - 1)))


@pytest.mark.parametrize(("target", "factor"), [(0.01, 1.02), (1.0, 0.98), (1 / 12, 1.0), (0.5 / 6 / 1.1, 1.01)])
def test_beta_is_adapted(target, factor):
    """The mean KL is 0.5 / 6 = 1/12; the error is clipped to 20%, of which a tenth is applied."""
    config = AdvantagesConfig(beta=0.5, target_kl=target)
    state = State(RunningMean(), 0.4)
    facts = state.facts(config, computed(state, beta=0.5, target_kl=target))
    assert facts["carried"]["beta"] == pytest.approx(0.4 * factor)


def test_the_adapted_beta_is_used():
    result = computed(State(RunningMean(), 2.0), beta=0.5, target_kl=1.0)
    assert result.penalized_reward_N[:2] == pytest.approx([0.0, 2.0])


def test_nothing_is_handed_on_by_default():
    assert State(RunningMean(), 0.1).facts(AdvantagesConfig(beta=0.1), computed(beta=0.1)) == {}
