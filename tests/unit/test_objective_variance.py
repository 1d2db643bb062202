"""Measured gradient variance, subsampled groups, and the sketch that makes both affordable."""

from itertools import combinations, product

import numpy as np
import pytest
import torch

from rloo_pipeline.objective.baselines import BASELINES
from rloo_pipeline.objective.gradient_variance import (
    GradientMoments,
    gradient_moments,
    relative_variance,
    subsample,
)
from rloo_pipeline.objective.loss import sequence_loss
from rloo_pipeline.objective.sketch import CountSketch
from tests.enumeration import Drawn, every_draw, logprobs_of, make_logits, probabilities_of
from tests.tiny import make_model


def score_functions(logits, drawn):
    """Gradient of each drawn completion's log-prob, [N, parameters], by one backward each."""
    rows = []
    for prompt, completion in zip(drawn.groups_N, drawn.completions_N, strict=True):
        leaf = logits.clone().requires_grad_()
        mask = torch.tensor([[True, completion > 0]])
        sequence_loss(logprobs_of(leaf[prompt])[completion][None], mask, torch.tensor([-1.0]), 1).backward()
        rows.append(leaf.grad.flatten())
    return torch.stack(rows).numpy()


def test_gradient_moments_against_the_gradients_themselves():
    rng = np.random.default_rng(0)
    scores_ND, advantages_N = rng.normal(size=(8, 5)), rng.normal(size=8)
    groups_N = np.array([0, 1, 0, 1, 2, 2, 3, 3])
    found = gradient_moments(scores_ND @ scores_ND.T, advantages_N, np.full(8, True), groups_N)
    shares = np.array([(advantages_N / 8 * (groups_N == group)) @ scores_ND for group in range(4)])
    assert found.squared_norm == pytest.approx((shares.sum(0) ** 2).sum())
    assert found.variance == pytest.approx(4 * np.cov(shares.T).trace())


def test_gradient_moments_are_unbiased():
    """Over every draw for two prompts that are alike, the mean variance is that of the gradient over these draws."""
    logits = make_logits(3).expand(2, -1, -1).contiguous()
    rewards_C = np.array([0.3, -1.0, 2.0, 0.5, 1.5, -0.2, 0.9])
    mean, mean_square, mean_variance = 0.0, 0.0, 0.0
    for drawn in every_draw(logits, 1):
        # Both prompts are the same one, so their parameters are shared: sum the two copies' gradients.
        scores_ND = score_functions(logits, drawn).reshape(2, 2, 9).sum(1)
        advantages_N = rewards_C[drawn.completions_N]
        gradient = advantages_N @ scores_ND / 2
        moments = gradient_moments(scores_ND @ scores_ND.T, advantages_N, np.full(2, True), drawn.groups_N)
        mean = mean + drawn.probability * gradient
        mean_square += drawn.probability * float(gradient @ gradient)
        mean_variance += drawn.probability * moments.variance
        assert moments.squared_norm == pytest.approx(float(gradient @ gradient))
    assert mean_variance == pytest.approx(mean_square - float(mean @ mean), abs=1e-12)


def test_groups_with_unlike_numbers_of_trained_rows_by_hand():
    """Sums 4, 5, 0 of 2, 1, 0 rows: G = 9/3, residuals 4 - 2 G, 5 - G, 0, so 3/2 (4 + 4 + 0) / 3^2 = 4/3."""
    trained_N = np.array([True, True, True, False, False])
    found = gradient_moments(np.ones((5, 5)), np.array([1.0, 3, 5, 7, 9]), trained_N, np.array([0, 0, 1, 1, 2]))
    assert (found.squared_norm, found.variance) == pytest.approx((9, 4 / 3))


def test_groups_left_out_do_not_vary_the_gradient():
    """However many groups of equal gradient are trained on, G is that gradient."""
    found = gradient_moments(np.ones((4, 4)), np.full(4, 2.0), np.array([True, True, True, False]), np.arange(4))
    assert (found.squared_norm, found.variance) == pytest.approx((4, 0))


# The one prompt of the tests below: probability, score function and reward of each completion.
REWARDS_C = np.array([0.3, -1.0, 2.0, 0.5, 1.5, -0.2, 0.9])


def one_prompt():
    logits = make_logits(3)
    scores_CD = score_functions(logits, Drawn(np.arange(7), np.zeros(7, int), 1.0))
    return probabilities_of(logits[0]).numpy(), scores_CD


def enumerated(baseline, prompts, completions):
    """True |E G|^2 and variance over every draw for prompts that are alike, and the mean of the measured variance."""
    chance_C, scores_CD = one_prompt()
    rows = prompts * completions
    groups_N, every_N = np.repeat(np.arange(prompts), completions), np.full(rows, True)
    mean, mean_square, measured = np.zeros(9), 0.0, 0.0
    for drawn in map(np.array, product(range(7), repeat=rows)):
        scores_ND = scores_CD[drawn]
        advantages_N = BASELINES[baseline].estimate(REWARDS_C[drawn], groups_N, every_N).advantage_N
        gradient, chance = advantages_N @ scores_ND / rows, chance_C[drawn].prod()
        moments = gradient_moments(scores_ND @ scores_ND.T, advantages_N, every_N, groups_N)
        mean, mean_square = mean + chance * gradient, mean_square + chance * gradient @ gradient
        measured += chance * moments.variance
    return mean @ mean, mean_square - mean @ mean, measured


@pytest.mark.parametrize("baseline", ["leave_one_out", "group_standardized"])
def test_variance_is_unbiased_for_baselines_of_the_group(baseline):
    _, true, measured = enumerated(baseline, 2, 2)
    assert measured == pytest.approx(true, abs=1e-12)


@pytest.mark.parametrize(("prompts", "completions"), [(2, 2), (3, 1)])
def test_variance_of_batch_mean_lacks_a_share_of_the_gradient(prompts, completions):
    """Groups share its baseline. By hand: u_p and u_q covary by |E G|^2 / (P^2 (N - 1)^2), P^2 times which is lost."""
    squared_mean, true, measured = enumerated("batch_mean", prompts, completions)
    assert true - measured == pytest.approx(squared_mean / (prompts * completions - 1) ** 2, abs=1e-12)


def test_variance_of_global_standardized_lacks_that_of_its_deviation():
    _, true, measured = enumerated("global_standardized", 2, 2)
    assert measured / true == pytest.approx(0.84, abs=0.005)


def test_leave_one_out_varies_by_one_over_k_minus_one_where_rewards_are_noise():
    """By hand: A varies by s^2 K / (K - 1), over K completions, and the cross terms vanish: s^2 E|g|^2 / (K - 1)."""
    chance_C, scores_CD = one_prompt()
    expected = float(chance_C @ (scores_CD**2).sum(1))  # rewards of +-1 have s = 1
    for completions in (2, 3):
        found = 0.0
        for drawn in map(np.array, product(range(7), repeat=completions)):
            for rewards in map(np.array, product([-1.0, 1.0], repeat=completions)):
                advantages = (rewards - rewards.mean()) * completions / (completions - 1)
                gradient = advantages @ scores_CD[drawn] / completions
                found += chance_C[drawn].prod() / 2**completions * float(gradient @ gradient)
        assert found == pytest.approx(expected / (completions - 1))


def test_relative_variance_is_a_ratio_of_means():
    """A choice of completions without gradient counts: variance (0 + 2) / 2 over (0 + 8) / 2 - 1."""
    assert relative_variance([GradientMoments(0, 0), GradientMoments(8, 2)]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("moments", [[], [GradientMoments(0, 0)], [GradientMoments(1, 1)], [GradientMoments(1, 2)]])
def test_no_relative_variance_without_signal(moments):
    assert relative_variance(moments) is None


def test_rounding_is_no_signal():
    for advantages_N in np.random.default_rng(0).normal(size=(20, 3)):
        # Groups at right angles: every <u_p, u_q> is 0, but the two sums that are subtracted are rounded.
        assert relative_variance([gradient_moments(np.eye(3), advantages_N, np.full(3, True), np.arange(3))]) is None


def test_the_signal_of_leave_one_out_is_the_same_at_every_k():
    """Its mean over all subsets is the whole's: it is made of pairs of groups, and a group's part is a U-statistic."""
    rng = np.random.default_rng(1)
    scores_ND, rewards_N, groups_N = rng.normal(size=(6, 4)), rng.normal(size=6), np.repeat([0, 1], 3)

    def signal(rows):
        groups, every = groups_N[rows], np.full(len(rows), True)
        advantages = BASELINES["leave_one_out"].estimate(rewards_N[rows], groups, every).advantage_N
        moments = gradient_moments(scores_ND[rows] @ scores_ND[rows].T, advantages, every, groups)
        return moments.squared_norm - moments.variance

    pairs = list(combinations(range(3), 2))
    halves = [signal(np.array([*first, *(3 + row for row in second)])) for first in pairs for second in pairs]
    assert np.mean(halves) == pytest.approx(signal(np.arange(6)))


def test_gradient_moments_need_two_groups():
    with pytest.raises(ValueError, match="at least two"):
        gradient_moments(np.eye(2), np.ones(2), np.full(2, True), np.zeros(2, int))


def test_nothing_trained_has_no_variance():
    found = gradient_moments(np.eye(2), np.ones(2), np.full(2, False), np.arange(2))
    assert (found.squared_norm, found.variance) == (0, 0)


def test_subsample_takes_each_subset_equally_often():
    groups_N = np.array([7, 3, 7, 3, 7, 3, 7, 3])
    counts = dict.fromkeys(combinations([0, 2, 4, 6], 2), 0)
    for seed in range(600):
        rows = subsample(groups_N, 2, seed)
        assert (np.diff(rows) > 0).all()
        assert (groups_N[rows] == 3).sum() == 2
        counts[tuple(rows[groups_N[rows] == 7])] += 1
    assert min(counts.values()) > 60
    np.testing.assert_array_equal(subsample(groups_N, 4, 0), np.arange(8))
    np.testing.assert_array_equal(subsample(groups_N, 2, 5), subsample(groups_N, 2, 5))
    with pytest.raises(ValueError, match="fewer than 5"):
        subsample(groups_N, 5, 0)


def test_sketch_by_hand():
    sketch = CountSketch([torch.zeros(2, 2), torch.zeros(3)], buckets=4, seed=1)
    parts = [torch.arange(1.0, 5).reshape(2, 2), torch.arange(5.0, 8)]
    # Sketches of the single entries are a sign in one bucket each, and add up to the sketch of all.
    units = torch.eye(7)
    columns = torch.stack([sketch([unit[:4].reshape(2, 2), unit[4:]]) for unit in units])
    assert (columns.abs().sum(1) == 1).all()
    torch.testing.assert_close(sketch(parts), torch.arange(1.0, 8, dtype=torch.float64) @ columns)


def test_sketched_inner_products_are_unbiased():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 50, generator=generator, dtype=torch.float64)
    products = []
    for seed in range(3000):
        sketch = CountSketch([x], buckets=8, seed=seed)
        products.append(float(sketch([x]) @ sketch([y])))
    bound = (2 / 8) ** 0.5 * float(x.norm() * y.norm())
    assert np.std(products) < bound
    assert np.mean(products) == pytest.approx(float(x @ y), abs=5 * bound / 3000**0.5)


def test_the_gram_matrix_of_a_tiny_model_within_five_percent():
    model = make_model()
    parameters = [p for p in model.parameters() if p.requires_grad]
    sketch = CountSketch(parameters, buckets=8192, seed=0)
    ids = torch.randint(2, 258, (12, 10), generator=torch.Generator().manual_seed(0))
    full, short = [], []
    for row in ids:
        logprobs = model(input_ids=row[None, :-1]).logits.log_softmax(-1)[0, torch.arange(9), row[1:]]
        gradients = torch.autograd.grad(logprobs.sum(), parameters)
        full.append(torch.cat([g.flatten() for g in gradients]).double())
        short.append(sketch(gradients))
    exact, found = (rows @ rows.T for rows in (torch.stack(full), torch.stack(short)))
    assert ((found - exact).norm() / exact.norm()) < 0.05
    scale = exact.diagonal().sqrt()
    assert ((found - exact).abs() / scale[:, None] / scale).max() < 0.05
