"""The second of two steps on the same completions, against its loss written down once more in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rloo_pipeline.objective_config import UpdateConfig
from rloo_pipeline.policy.step import KlTerm, make_optimizer
from rloo_pipeline.stages.optimize import Learner, optimize
from tests.enumeration import one_thread
from tests.tiny import make_model
from tests.unit.test_stage_objective_update import ADVANTAGES, REFERENCE, apart_by, make_rows

COUNT = len(ADVANTAGES)
EPSILON, EPSILON_HIGH, CAP = 0.05, 0.4, 1.25
COMMON = {
    "learning_rate": 3e-5,  # ratios of completions come to lie between, below and above the bounds
    "epochs": 2,
    "max_grad_norm": None,
    "epsilon": EPSILON,
    "epsilon_high": EPSILON_HIGH,
    "sampler_tolerance": 9.0,
    "sampler_correction_cap": CAP,
}

FASTER = {**COMMON, "learning_rate": 3e-4}  # those of tokens do


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


def uneven_rows():
    """Rows whose sampler was off by another amount at every token, as many above the policy as below."""
    rng = np.random.default_rng(1)
    rows = make_rows(reference_logprobs_N=REFERENCE)
    sampled = [row + rng.normal(0, 0.2, len(row)).astype(np.float32) for row in rows.sampler_logprobs_N]
    return replace(rows, sampler_logprobs_N=sampled)


def logprobs_by_hand(model, rows):
    """Log-probs of each completion's tokens by torch's own distribution, with gradient."""
    return [
        torch.distributions.Categorical(
            logits=model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        ).log_prob(torch.tensor(completion))
        for prompt, completion in zip(rows.prompts_N, rows.completions_N, strict=True)
    ]


def steps_of(rows, config, kl=None):
    """The weights and the gradient of each step, in float64, and the metrics of all."""
    model, taken = make_model().double(), []
    optimizer = make_optimizer(dict(model.named_parameters()), config)

    def keep(*_):
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        taken.append((weights, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])))

    optimizer.register_step_pre_hook(keep)
    metrics = optimize(Learner(model, optimizer, config, 1.0, 1000, kl), rows, 0, 5, "0001")
    return taken, metrics


def clipped(ratio, advantage):
    return torch.minimum(ratio * advantage, ratio.clamp(1 - EPSILON, 1 + EPSILON_HIGH) * advantage)


def weight(log_ratio, correction):
    """exp(log_ratio), at most the cap or 0 above it."""
    ratio = log_ratio.exp()
    return ratio.clamp(max=CAP) if correction == "truncate" else ratio * (ratio <= CAP)


def second_step(rows, term):
    """Second step's loss by `term`(log-probs now, at the start, sampled, of the reference, advantage) of each row."""
    old = [row.detach() for row in logprobs_by_hand(make_model().double(), rows)]

    def at(weights):
        model = make_model().double()
        model.load_state_dict(weights)
        model.requires_grad_(True)
        sampled, reference = (
            [torch.tensor(row, dtype=torch.float64) for row in values]
            for values in (rows.sampler_logprobs_N, rows.reference_logprobs_N)
        )
        columns = zip(logprobs_by_hand(model, rows), old, sampled, reference, ADVANTAGES.tolist(), strict=True)
        terms = [term(*row) for row in columns]
        gradient = torch.autograd.grad(torch.stack(terms).sum() / COUNT, list(model.parameters()))
        return torch.cat([part.flatten() for part in gradient]), torch.stack(terms).detach()

    return at


def assert_second_step(config, term, kl=None):
    rows = uneven_rows()
    taken, metrics = steps_of(rows, config, kl)
    assert len(taken) == 2
    expected, _ = second_step(rows, term)(taken[1][0])
    assert apart_by(taken[1][1], expected) < 1e-4
    return metrics


def test_the_bounds_of_the_sequence_ratio():
    """epsilon is below 1 and epsilon_high above: the ratios of the second step lie beyond both."""
    ratios = []

    def term(now, old, _sampled, _reference, advantage):
        ratio = (now - old).sum().exp()
        ratios.append(ratio.item())
        return -clipped(ratio, advantage)

    metrics = assert_second_step(UpdateConfig(**COMMON), term)
    ratios_N = np.array(ratios)
    low_N = (ratios_N < 1 - EPSILON) & (ADVANTAGES < 0)
    high_N = (ratios_N > 1 + EPSILON_HIGH) & (ADVANTAGES > 0)
    assert (low_N.sum(), high_N.sum()) == (2, 1)
    # Nothing is clipped in the first step, so the means over both are half of the second's.
    assert metrics["clip_ratio/low_mean"] == pytest.approx(low_N.mean() / 2)
    assert metrics["clip_ratio/high_mean"] == pytest.approx(high_N.mean() / 2)
    assert metrics["clip_ratio/region_mean"] == pytest.approx((low_N | high_N).mean() / 2)
    assert metrics["clip_ratio/low_min"] == 0
    assert metrics["clip_ratio/high_max"] == high_N.any() / 2


def test_the_bounds_of_the_token_ratio():
    shares = []

    def term(now, old, _sampled, _reference, advantage):
        ratio = (now - old).exp()
        low, high = (ratio < 1 - EPSILON) & (advantage < 0), (ratio > 1 + EPSILON_HIGH) & (advantage > 0)
        shares.append((low.sum().item(), high.sum().item(), len(ratio)))
        return -clipped(ratio, advantage).sum()

    metrics = assert_second_step(UpdateConfig(**FASTER, ratio_level="token"), term)
    low_N, high_N, length_N = np.array(shares).T
    assert low_N.sum() > 0
    assert metrics["clip_ratio/low_mean"] == pytest.approx(low_N.sum() / length_N.sum() / 2)
    assert metrics["clip_ratio/high_mean"] == pytest.approx(high_N.sum() / length_N.sum() / 2)
    assert metrics["clip_ratio/low_min"] == pytest.approx((low_N / length_N).min() / 2)
    assert metrics["clip_ratio/high_max"] == pytest.approx((high_N / length_N).max() / 2)


@pytest.mark.parametrize("correction", ["truncate", "mask"])
def test_correction_by_token(correction):
    def term(now, old, sampled, _reference, advantage):
        return -(weight(old - sampled, correction) * clipped((now - old).exp(), advantage)).sum()

    levels = {"ratio_level": "token", "sampler_correction_level": "token"}
    assert_second_step(UpdateConfig(**FASTER, **levels, sampler_correction=correction), term)


@pytest.mark.parametrize("level", ["sequence", "token"])
@pytest.mark.parametrize("correction", ["truncate", "mask"])
def test_correction_by_sequence(correction, level):
    def term(now, old, sampled, _reference, advantage):
        log_ratio = now - old if level == "token" else (now - old).sum()
        return -(clipped(log_ratio.exp(), advantage * weight((old - sampled).sum(), correction))).sum()

    metrics = assert_second_step(UpdateConfig(**COMMON, ratio_level=level, sampler_correction=correction), term)
    assert metrics["sampler_correction/limited_ratio"] in (1 / 6, 2 / 6, 3 / 6)


ESTIMATORS = {
    "k1": lambda d: d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: (-d).exp() - 1 + d,
    "abs": torch.abs,
}


@pytest.mark.parametrize("correction", ["none", "truncate"])
@pytest.mark.parametrize("normalization", ["none", "length"])
@pytest.mark.parametrize("estimator", list(ESTIMATORS))
def test_kl_in_the_loss(estimator, normalization, correction):
    """beta r_i kl_i, with the completion's ratio, unclipped; k1 summed is constant but for the ratio."""

    def term(now, old, sampled, reference, advantage):
        ratio, weighs = (now - old).sum().exp(), 1.0
        if correction == "truncate":
            weighs = weight((old - sampled).sum(), correction)
        kl = ESTIMATORS[estimator](now - reference)
        kl = kl.mean() if normalization == "length" else kl.sum()
        if (estimator, normalization) == ("k1", "none"):
            kl = kl.detach()
        return -clipped(ratio, advantage * weighs) + 0.1 * weighs * ratio * kl

    config = UpdateConfig(**COMMON, sampler_correction=correction)
    assert_second_step(config, term, KlTerm(0.1, estimator, normalization))


@pytest.mark.parametrize("normalization", ["none", "length"])
@pytest.mark.parametrize("estimator", list(ESTIMATORS))
def test_kl_loss_and_entropy_by_hand(estimator, normalization):
    """One step: the term is the mean of the completions' KL; the entropy is a mean over all tokens."""
    rows = make_rows(reference_logprobs_N=REFERENCE)
    _, metrics = steps_of(rows, UpdateConfig(learning_rate=1e-3), KlTerm(0.1, estimator, normalization))
    model = make_model().double()
    with torch.no_grad():
        each = [ESTIMATORS[estimator](row + 5.0) for row in logprobs_by_hand(model, rows)]
        entropies = [
            torch.distributions.Categorical(
                logits=model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
            ).entropy()
            for prompt, completion in zip(rows.prompts_N, rows.completions_N, strict=True)
        ]
    kl = np.mean([float(row.mean() if normalization == "length" else row.sum()) for row in each])
    assert metrics["kl_loss"] == pytest.approx(kl, rel=1e-6)
    assert metrics["beta"] == 0.1
    assert metrics["entropy"] == pytest.approx(torch.cat(entropies).mean().item(), rel=1e-6)
