"""Measured gradient variance, subsampled groups, and the sketch that makes both affordable."""

from itertools import combinations

import numpy as np
import pytest
import torch

from rloo_pipeline.objective.gradient_variance import gradient_moments, subsample
from rloo_pipeline.objective.loss import sequence_loss
from rloo_pipeline.objective.sketch import CountSketch
from tests.enumeration import every_draw, logprobs_of, make_logits
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
    trained_N = np.array([True] * 7 + [False])
    found = gradient_moments(scores_ND @ scores_ND.T, advantages_N, trained_N, groups_N)
    shares = np.array([(advantages_N * trained_N / 7 * (groups_N == group)) @ scores_ND for group in range(4)])
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
