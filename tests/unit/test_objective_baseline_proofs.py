"""Which baselines leave the gradient unbiased, and by how much the others change it: by enumeration."""

import numpy as np
import pytest
import torch

from rloo_pipeline.objective.baselines import BASELINES
from rloo_pipeline.objective.loss import sequence_loss
from tests.enumeration import (
    every_draw,
    expected_gradient,
    make_logits,
    policy_gradient,
    probabilities_of,
)

REWARDS_C = np.array([0.3, -1.0, 2.0, 0.5, 1.5, -0.2, 0.9])
BINARY_C = np.array([0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0])
PAST_MEAN = 0.37


def loss_of(baseline, rewards_PC):
    """The sequence loss of a draw under the baseline of that name, rewards by prompt and completion."""

    def loss(logprobs_NT, mask_NT, drawn):
        rewards_N = np.atleast_2d(rewards_PC)[drawn.groups_N, drawn.completions_N]
        valid_N = np.full(len(rewards_N), True)
        estimate = BASELINES[baseline].estimate(rewards_N, drawn.groups_N, valid_N, PAST_MEAN)
        return sequence_loss(
            logprobs_NT, mask_NT, torch.from_numpy(estimate.advantage_N), float(estimate.trained_N.sum())
        )

    return loss


def exact_gradient(logits, rewards_PC):
    return policy_gradient(logits, lambda prompt, _: torch.from_numpy(np.atleast_2d(rewards_PC)[prompt]))


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("baseline", "k"), [("none", 1), ("none", 2), ("moving_average", 2), ("leave_one_out", 3)])
def test_unbiased(baseline, k):
    logits = make_logits(3)
    assert_equal(expected_gradient(logits, k, loss_of(baseline, REWARDS_C)), exact_gradient(logits, REWARDS_C))


@pytest.mark.parametrize(("baseline", "k"), [("batch_mean", 1), ("batch_mean", 2), ("leave_one_out", 2)])
def test_unbiased_over_two_prompts(baseline, k):
    logits, rewards_PC = make_logits(3, prompts=2), np.stack([REWARDS_C, 2 - REWARDS_C[::-1]])
    assert_equal(expected_gradient(logits, k, loss_of(baseline, rewards_PC)), exact_gradient(logits, rewards_PC))


@pytest.mark.parametrize("k", [2, 3])
def test_ones_own_reward_in_the_baseline_shrinks_the_gradient_by_its_share(k):
    logits = make_logits(3)
    found = expected_gradient(logits, k, loss_of("group_mean", REWARDS_C))
    assert_equal(found, (k - 1) / k * exact_gradient(logits, REWARDS_C))


@pytest.mark.parametrize("k", [2, 3])
def test_leave_one_out_is_a_multiple_of_group_mean_in_every_group(k):
    for drawn in every_draw(make_logits(0), k):
        rewards_N, valid_N = REWARDS_C[drawn.completions_N], np.full(k, True)
        leave_one_out, group_mean = (
            BASELINES[name].estimate(rewards_N, drawn.groups_N, valid_N).advantage_N
            for name in ("leave_one_out", "group_mean")
        )
        np.testing.assert_allclose(leave_one_out, k / (k - 1) * group_mean, rtol=0, atol=1e-14)


def collinearity(found, exact):
    """Factor of the nearest multiple of the exact gradient, and the largest deviation from that multiple."""
    factor = float((found * exact).sum() / (exact * exact).sum())
    return factor, float((found - factor * exact).abs().max())


def test_group_standardized_is_collinear_for_binary_rewards():
    for seed in (3, 4):
        logits = make_logits(seed)
        exact = exact_gradient(logits, BINARY_C)
        factor, deviation = collinearity(expected_gradient(logits, 3, loss_of("group_standardized", BINARY_C)), exact)
        assert factor == pytest.approx(2**0.5, abs=1e-10)
        assert deviation < 1e-10


@pytest.mark.parametrize("seed", [3, 4])
def test_group_standardized_weighs_prompts_by_their_difficulty(seed):
    """At K = 4 the factor depends on the success rate p: with more prompts the direction is not the true one."""
    logits = make_logits(seed)
    p = float((probabilities_of(logits[0]) * torch.from_numpy(BINARY_C)).sum())
    # c successes of 4 come with deviation sqrt(c (4 - c)) / 4, so by hand the factor is the binomial mean below.
    binomial = {1: 4 * p * (1 - p) ** 3, 2: 6 * p**2 * (1 - p) ** 2, 3: 4 * p**3 * (1 - p)}
    spread = sum(chance * (c * (4 - c)) ** 0.5 / 4 for c, chance in binomial.items())
    found = expected_gradient(logits, 4, loss_of("group_standardized", BINARY_C))
    factor, deviation = collinearity(found, exact_gradient(logits, BINARY_C))
    assert deviation < 1e-10
    assert factor == pytest.approx(spread / (p * (1 - p)), abs=1e-10)


def test_group_standardized_is_not_collinear_for_other_rewards():
    logits = make_logits(3)
    found = expected_gradient(logits, 3, loss_of("group_standardized", REWARDS_C))
    assert collinearity(found, exact_gradient(logits, REWARDS_C))[1] > 1e-3


def test_global_standardized_is_biased():
    logits, rewards_PC = make_logits(3, prompts=2), np.stack([REWARDS_C, 2 - REWARDS_C[::-1]])
    found = expected_gradient(logits, 1, loss_of("global_standardized", rewards_PC))
    assert collinearity(found, exact_gradient(logits, rewards_PC))[1] > 1e-3


def test_best_of_k_is_the_likelihood_of_the_best():
    logits, k = make_logits(3), 3
    order = REWARDS_C.argsort()
    leaf = logits.clone().requires_grad_()
    probability_C = probabilities_of(leaf[0])
    below = probability_C.detach()[order].cumsum(0)
    chance = below**k - torch.cat([torch.zeros(1, dtype=torch.float64), below[:-1]]) ** k
    (-(chance * probability_C[order].log()).sum()).backward()
    found = expected_gradient(logits, k, loss_of("best_of_k", REWARDS_C))
    assert_equal(found, leaf.grad)
    assert collinearity(found, exact_gradient(logits, REWARDS_C))[1] > 1e-3


def test_a_row_lost_whatever_its_reward_leaves_leave_one_out_unbiased():
    logits = make_logits(3)

    def loss(logprobs_NT, mask_NT, drawn):
        valid_N = np.array([True, False, True])
        rewards_N = np.where(valid_N, REWARDS_C[drawn.completions_N], np.nan)
        estimate = BASELINES["leave_one_out"].estimate(rewards_N, drawn.groups_N, valid_N)
        return sequence_loss(logprobs_NT, mask_NT, torch.from_numpy(estimate.advantage_N), 2)

    assert_equal(expected_gradient(logits, 3, loss), exact_gradient(logits, REWARDS_C))
