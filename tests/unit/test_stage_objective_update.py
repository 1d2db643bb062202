"""Several steps, importance ratios, the sampler's correction and the KL in the loss, on the tiny model."""

import numpy as np
import pytest
import torch

from rloo_pipeline.errors import UserError
from rloo_pipeline.objective_config import UpdateConfig
from rloo_pipeline.policy.logprobs import score
from rloo_pipeline.policy.step import KlTerm, Rows, accumulate, make_optimizer
from rloo_pipeline.progress import progress
from rloo_pipeline.stages.optimize import Learner, _minibatches, optimize
from tests.enumeration import one_thread
from tests.tiny import make_model

LENGTHS = ((3, 4), (9, 1), (1, 6), (5, 3), (7, 8), (2, 2))
ADVANTAGES = np.array([1.0, -0.5, 0.25, -1.0, 0.75, -0.5])
PLAIN = UpdateConfig(learning_rate=1e-3)
REFERENCE = [np.full(length, -5.0, np.float32) for _, length in LENGTHS]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


def logprobs(model, prompts, completions):
    with progress("test", len(prompts), "completions") as done:
        return score(model, prompts, completions, 1.0, 1000, done)


def make_rows(shift=0.0, **extra):
    """Rows of the tiny model; `shift`: how much higher the sampler's log-probs are than the model's, nats a token."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 258, prompt) for prompt, _ in LENGTHS]
    completions = [rng.integers(2, 258, completion) for _, completion in LENGTHS]
    sampled = [row + np.float32(shift) for row in logprobs(make_model(), prompts, completions)]
    return Rows(prompts, completions, sampled, ADVANTAGES, **extra)


def trained(rows, config, kl=None, batch_tokens=1000, seed=5):
    """Weights and metrics after the iteration's steps."""
    model = make_model()
    learner = Learner(model, make_optimizer(dict(model.named_parameters()), config), config, 1.0, batch_tokens, kl)
    metrics = optimize(learner, rows, 0, seed, "0001")
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}, metrics


def gradient(rows, config=PLAIN, kl=None, batch_tokens=1000):
    model = make_model()
    totals = accumulate(model, rows, 1.0, config, batch_tokens, kl)
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]), totals


def apart_by(first, second):
    """Largest difference, as a share of the largest value."""
    return float((first - second).abs().max() / second.abs().max())


def assert_same(first, second):
    assert all(torch.equal(first[name], second[name]) for name in first)


def apart(first, second):
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.parametrize("settings", [{"epsilon": 1e-6}, {"epsilon_high": 1e-6, "ratio_level": "token"}])
def test_with_one_step_the_clip_never_acts(settings):
    plain, metrics = trained(make_rows(), PLAIN)
    assert_same(trained(make_rows(), UpdateConfig(learning_rate=1e-3, **settings))[0], plain)
    assert "clip_ratio/region_mean" not in metrics
    assert metrics["step"] == 1


@pytest.mark.parametrize("level", ["sequence", "token"])
@pytest.mark.parametrize("tokens", [20, 1000])
def test_at_the_old_policy_the_clipped_gradient_is_the_plain_one(level, tokens):
    """Ratio 1 everywhere, as in the first of several steps: no epsilon matters."""
    rows = make_rows()
    config = UpdateConfig(learning_rate=1e-3, epochs=2, ratio_level=level, epsilon=1e-3)
    clipped, totals = gradient(make_rows(old_logprobs_N=rows.sampler_logprobs_N), config, batch_tokens=tokens)
    torch.testing.assert_close(clipped, gradient(rows)[0], rtol=0, atol=2e-5)
    assert not totals.clip.low_N.any()
    assert not totals.clip.high_N.any()
    assert totals.clip.ratios_N.tolist() == [1 if level == "sequence" else length for _, length in LENGTHS]


def gradients_of_steps(rows, config, kl=None, seed=5):
    """What the optimizer is given at each of the iteration's steps."""
    model, taken = make_model(), []
    optimizer = make_optimizer(dict(model.named_parameters()), config)
    optimizer.register_step_pre_hook(
        lambda *_: taken.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    )
    optimize(Learner(model, optimizer, config, 1.0, 1000, kl), rows, 0, seed, "0001")
    return taken


@pytest.mark.parametrize("level", ["sequence", "token"])
@pytest.mark.parametrize("kl", [None, KlTerm(0.3, "k3", "none")])
def test_the_first_of_several_steps_has_ratio_one_exactly(level, kl):
    """In the first pass's other batches log-probs are rounded otherwise; here the clip would show any of that.

    With a completion a step, the first step's gradient is that of one completion, without any ratio.
    """
    config = UpdateConfig(learning_rate=1e-3, max_grad_norm=None, minibatches=6, ratio_level=level, epsilon=1e-9)
    rows = make_rows(reference_logprobs_N=REFERENCE)
    each = [gradient(rows.take(np.array([row])), kl=kl)[0] for row in range(len(rows))]
    for seed in range(6):
        first = gradients_of_steps(rows, config, kl, seed)[0]
        assert min(apart_by(first, plain) for plain in each) < 1e-6


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_clip_ratio_by_hand(level):
    """Old log-probs lower by 0.3 a token: every ratio is exp(0.3) or more, above 1.2, and clipped where A > 0."""
    old = make_rows(shift=-0.3).sampler_logprobs_N
    config = UpdateConfig(learning_rate=1e-3, epochs=2, ratio_level=level)
    _, totals = gradient(make_rows(old_logprobs_N=old), config)
    counts = [1 if level == "sequence" else length for _, length in LENGTHS]
    assert totals.clip.high_N.tolist() == list(np.where(ADVANTAGES > 0, counts, 0))
    assert totals.clip.low_N.tolist() == [0] * 6
    ratios = [np.exp(0.3 * length) if level == "sequence" else np.exp(0.3) for _, length in LENGTHS]
    terms = [
        count * (1.2 * advantage if advantage > 0 else ratio * advantage)
        for ratio, count, advantage in zip(ratios, counts, ADVANTAGES, strict=True)
    ]
    assert totals.loss == pytest.approx(-sum(terms) / len(LENGTHS), rel=1e-4)


def test_sequence_clip():
    """A sampler in low precision, 0.4 nats off at every token, takes nothing away from the clipped steps."""
    config = UpdateConfig(learning_rate=1e-4, epochs=2, sampler_tolerance=1.0)
    exact, exact_metrics = trained(make_rows(), config)
    rough, rough_metrics = trained(make_rows(shift=0.4), config)
    assert_same(exact, rough)
    assert rough_metrics["clip_ratio/region_mean"] == exact_metrics["clip_ratio/region_mean"]
    assert rough_metrics["sampler_gap/token_mean"] == pytest.approx(0.4, abs=1e-5)


def test_minibatches_and_epochs_make_steps():
    weights, metrics = trained(make_rows(), UpdateConfig(learning_rate=1e-3, minibatches=3, epochs=2))
    assert metrics["step"] == 6
    assert set(metrics) >= {"clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"}
    again, _ = trained(make_rows(), UpdateConfig(learning_rate=1e-3, minibatches=3, epochs=2))
    assert_same(weights, again)
    other, _ = trained(make_rows(), UpdateConfig(learning_rate=1e-3, minibatches=3, epochs=2), seed=6)
    assert apart(weights, other) > 1e-5


def test_every_completion_once_an_epoch_in_an_order_of_its_own():
    config = UpdateConfig(learning_rate=1e-3, minibatches=3, epochs=4)
    steps = list(_minibatches(20, config, 5, "0001"))
    assert [len(rows_M) for rows_M in steps] == [7, 7, 6] * 4
    epochs = [np.concatenate(steps[first : first + 3]).tolist() for first in range(0, 12, 3)]
    assert all(sorted(order) == list(range(20)) for order in epochs)
    assert len({tuple(order) for order in epochs}) == 4
    assert list(range(20)) not in epochs


@pytest.mark.parametrize("settings", [{"minibatches": 6}, {"sampler_correction": "truncate"}])
@pytest.mark.parametrize("row", range(len(LENGTHS)))
def test_a_sampler_of_other_weights_is_refused_whichever_completion_shows_it(settings, row):
    """Also where the first step does not have that completion, or weights it."""
    rows = make_rows(names_N=list("abcdef"))
    rows.sampler_logprobs_N[row] = rows.sampler_logprobs_N[row] + np.float32(0.5)
    with pytest.raises(UserError, match=rf"up to 0\.5 nats .* in 1 of 6 completions, most in {'abcdef'[row]};"):
        trained(rows, UpdateConfig(learning_rate=1e-3, **settings))


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_the_upper_bound_is_epsilons_where_it_has_none_of_its_own(level):
    """Ratios of a token exp(0.01 n): with epsilon 0.05 clipped from n = 5 on, by token with 0.005 all."""
    old = make_rows(shift=-0.01).sampler_logprobs_N
    epsilon = 0.05 if level == "sequence" else 0.005
    config = UpdateConfig(learning_rate=1e-3, epochs=2, epsilon=epsilon, ratio_level=level)
    _, totals = gradient(make_rows(old_logprobs_N=old), config)
    lengths_N = np.array([length for _, length in LENGTHS])
    expected_N = np.where(lengths_N > 4, 1, 0) if level == "sequence" else lengths_N
    assert totals.clip.high_N.tolist() == np.where(ADVANTAGES > 0, expected_N, 0).tolist()


def test_more_minibatches_than_completions():
    assert trained(make_rows(), UpdateConfig(learning_rate=1e-3, minibatches=50))[1]["step"] == 6


def test_a_second_epoch_goes_on_where_the_clip_leaves_it():
    """At a large rate the second step's ratios leave the bounds; wide bounds let them."""
    narrow, metrics = trained(make_rows(), UpdateConfig(learning_rate=1e-2, epochs=3, epsilon=0.01))
    wide, wide_metrics = trained(
        make_rows(), UpdateConfig(learning_rate=1e-2, epochs=3, epsilon=0.99, epsilon_high=1e30)
    )
    assert metrics["clip_ratio/region_mean"] > wide_metrics["clip_ratio/region_mean"]
    assert metrics["clip_ratio/region_mean"] == pytest.approx(
        metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]
    )
    assert apart(narrow, wide) > 1e-4


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        # The policy is exp(-0.1) a token less probable than the sampler said, so no weight reaches the cap.
        ({"sampler_correction": "truncate"}, [np.exp(-0.1 * length) for _, length in LENGTHS]),
        ({"sampler_correction": "mask", "sampler_correction_cap": 1.0}, [np.exp(-0.1 * n) for _, n in LENGTHS]),
    ],
)
def test_correction_by_sequence(settings, weights):
    config = UpdateConfig(learning_rate=1e-3, sampler_tolerance=1.0, **settings)
    corrected, metrics = trained(make_rows(shift=0.1), config)
    rows = make_rows()
    weighted = Rows(rows.prompts_N, rows.completions_N, rows.sampler_logprobs_N, ADVANTAGES * np.array(weights))
    by_hand, _ = trained(weighted, PLAIN)
    assert apart(corrected, by_hand) < 1e-5
    assert metrics["sampler_correction/mean"] == pytest.approx(np.mean(weights), abs=1e-5)
    assert metrics["sampler_correction/limited_ratio"] == 0


@pytest.mark.parametrize(("correction", "mean"), [("truncate", 1.25), ("mask", 0.0)])
@pytest.mark.parametrize("level", ["sequence", "token"])
def test_correction_above_the_cap(correction, mean, level):
    config = UpdateConfig(
        learning_rate=1e-3,
        sampler_tolerance=1.0,
        sampler_correction=correction,
        sampler_correction_level=level,
        sampler_correction_cap=1.25,
    )
    _, metrics = trained(make_rows(shift=-0.5), config)
    assert metrics["sampler_correction/mean"] == mean
    assert metrics["sampler_correction/limited_ratio"] == 1.0
    assert (metrics["grad_norm"] == 0) == (correction == "mask")


def test_correction_by_token():
    """One weight for all tokens is the same as the advantages times it."""
    config = UpdateConfig(
        learning_rate=1e-3, sampler_tolerance=1.0, sampler_correction="truncate", sampler_correction_level="token"
    )
    _, metrics = trained(make_rows(shift=0.1), config)
    rows = make_rows()
    scaled = Rows(rows.prompts_N, rows.completions_N, rows.sampler_logprobs_N, ADVANTAGES * np.exp(-0.1))
    assert metrics["loss"] == pytest.approx(trained(scaled, PLAIN)[1]["loss"], rel=1e-4)


def test_effective_sample_size():
    """Weights exp(-0.1 * length) of lengths 4, 1, 6, 3, 8, 2."""
    _, metrics = trained(make_rows(shift=0.1), UpdateConfig(learning_rate=1e-3, sampler_tolerance=1.0))
    weights = np.exp(-0.1 * np.array([length for _, length in LENGTHS]))
    assert metrics["sampler_gap/effective_sample_size"] == pytest.approx(
        weights.sum() ** 2 / (weights**2).sum() / 6, abs=1e-5
    )
    assert metrics["sampler_gap/sequence_mean"] == pytest.approx(0.1 * 24 / 6, abs=1e-5)
    assert metrics["sampler_gap/sequence_max"] == pytest.approx(0.8, abs=1e-5)
    assert trained(make_rows(), PLAIN)[1]["sampler_gap/effective_sample_size"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "denominator"),
    [({"loss_normalization": "token"}, 24), ({"loss_normalization": "constant", "constant_length": 5}, 6 * 5)],
)
@pytest.mark.parametrize("tokens", [20, 1000])
def test_loss_normalization(settings, denominator, tokens):
    config = UpdateConfig(learning_rate=1e-3, **settings)
    got, totals = gradient(make_rows(), config, batch_tokens=tokens)
    plain, plain_totals = gradient(make_rows())
    torch.testing.assert_close(got, plain * 6 / denominator, rtol=0, atol=1e-6)
    assert totals.loss == pytest.approx(plain_totals.loss * 6 / denominator, abs=1e-6)


@pytest.mark.parametrize("tokens", [20, 1000])
def test_kl_in_the_loss_has_the_gradient_of_kl_in_the_reward(tokens):
    """k1, summed: the term's gradient is that of advantages -beta * kl, with beta 0.3 here."""
    kl = KlTerm(0.3, "k1", "none")
    rows = make_rows(reference_logprobs_N=REFERENCE)
    kl_N = np.array([float((sampled + 5.0).sum()) for sampled in rows.sampler_logprobs_N])
    in_loss, totals = gradient(rows, kl=kl, batch_tokens=tokens)
    in_reward = Rows(rows.prompts_N, rows.completions_N, rows.sampler_logprobs_N, ADVANTAGES - 0.3 * kl_N)
    torch.testing.assert_close(in_loss, gradient(in_reward)[0], rtol=1e-4, atol=1e-5)
    assert totals.kl == pytest.approx(kl_N.mean(), abs=1e-4)


@pytest.mark.parametrize("estimator", ["k2", "k3", "abs"])
def test_kl_metrics_and_steps(estimator):
    rows = make_rows(reference_logprobs_N=REFERENCE)
    config = UpdateConfig(learning_rate=1e-3, epochs=2)
    with_kl, metrics = trained(rows, config, KlTerm(0.05, estimator, "length"))
    assert metrics["beta"] == pytest.approx(0.05)
    assert metrics["kl_loss"] > 0
    assert apart(with_kl, trained(make_rows(), config)[0]) > 1e-5


def test_several_steps_in_bfloat16():
    """First pass and steps are in the same precision, so the ratios of the first step are near 1."""
    config = UpdateConfig(learning_rate=0.0, epochs=2, dtype="bfloat16", sampler_tolerance=1.0, epsilon=0.05)
    _, metrics = trained(make_rows(), config)
    assert metrics["clip_ratio/region_mean"] == 0
    assert metrics["sampler_gap/token_max"] > 1e-4


def test_the_kl_in_the_loss_is_corrected_by_sequence_too():
    """One weight exp(-0.1 n) for reward and KL of a completion of n tokens: as with both in the advantage."""
    config = UpdateConfig(learning_rate=1e-3, sampler_tolerance=1.0, sampler_correction="truncate")
    _, metrics = trained(make_rows(shift=0.1, reference_logprobs_N=REFERENCE), config, KlTerm(0.3, "k1", "none"))
    kl_N = np.array([float((row + 5.0).sum()) for row in make_rows().sampler_logprobs_N])
    weights_N = np.exp(-0.1 * np.array([length for _, length in LENGTHS]))
    assert metrics["kl_loss"] == pytest.approx((weights_N * kl_N).mean(), abs=1e-4)
    rows = make_rows()
    in_reward = Rows(rows.prompts_N, rows.completions_N, rows.sampler_logprobs_N, weights_N * (ADVANTAGES - 0.3 * kl_N))
    assert metrics["grad_norm"] == pytest.approx(trained(in_reward, PLAIN)[1]["grad_norm"], rel=1e-4)


def test_the_kl_in_the_loss_is_not_corrected_by_token():
    """One weight exp(-0.1) for all tokens: the advantages get it, the KL does not."""
    config = UpdateConfig(
        learning_rate=1e-3, sampler_tolerance=1.0, sampler_correction="truncate", sampler_correction_level="token"
    )
    _, metrics = trained(make_rows(shift=0.1, reference_logprobs_N=REFERENCE), config, KlTerm(0.3, "k1", "none"))
    rows = make_rows()
    kl_N = np.array([float((row + 5.0).sum()) for row in rows.sampler_logprobs_N])
    assert metrics["kl_loss"] == pytest.approx(kl_N.mean(), abs=1e-4)
    weighed_N = np.exp(-0.1) * ADVANTAGES - 0.3 * kl_N
    in_reward = Rows(rows.prompts_N, rows.completions_N, rows.sampler_logprobs_N, weighed_N)
    assert metrics["grad_norm"] == pytest.approx(trained(in_reward, PLAIN)[1]["grad_norm"], rel=1e-4)
