"""Clipped ratio, sampler correction and KL in the loss: proofs by enumeration, and values by hand."""

import math

import numpy as np
import pytest
import torch

from rloo_pipeline.objective.baselines import leave_one_out
from rloo_pipeline.objective.clipped_loss import sequence_clipped_loss, token_clipped_loss
from rloo_pipeline.objective.correction import (
    effective_sample_size,
    sequence_log_ratio,
    sequence_weights,
    token_weights,
)
from rloo_pipeline.objective.kl import adapted_beta, sequence_kl, token_kl
from rloo_pipeline.objective.kl_loss import kl_loss
from rloo_pipeline.objective.loss import sequence_loss
from tests.enumeration import (
    MASK_CT,
    expected_gradient,
    logprobs_of,
    make_logits,
    policy_gradient,
    probabilities_of,
)

REWARDS_C = np.array([0.3, -1.0, 2.0, 0.5, 1.5, -0.2, 0.9])
LENGTHS_C = MASK_CT.sum(-1)
WIDE = 1e9


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def advantages_of(drawn):
    rewards_N = REWARDS_C[drawn.completions_N]
    return torch.from_numpy(rewards_N - leave_one_out(rewards_N, drawn.groups_N, np.full(len(rewards_N), True)))


def exact_gradient(logits):
    return policy_gradient(logits, lambda prompt, _: torch.from_numpy(REWARDS_C))


def padded(seed=0):
    """Log-probs with a gradient, mask and advantages of five ragged completions."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(6) < torch.tensor([6, 1, 3, 4, 2])[:, None]
    logprobs = -torch.rand(5, 6, dtype=torch.float64, generator=generator)
    return logprobs.requires_grad_(), mask, torch.tensor([1.0, -2.0, 0.0, 0.5, -0.3])


@pytest.mark.parametrize("loss_of", [sequence_clipped_loss, token_clipped_loss])
@pytest.mark.parametrize("epsilon", [0.0, 1e-9, 0.2])
def test_with_one_step_the_clip_never_acts(loss_of, epsilon):
    logprobs, mask, advantages = padded()
    plain = torch.autograd.grad(sequence_loss(logprobs, mask, advantages, 5), logprobs)[0]
    result = loss_of(logprobs, logprobs.detach(), mask, advantages, 5, epsilon, epsilon)
    torch.testing.assert_close(torch.autograd.grad(result.loss, logprobs)[0], plain, rtol=1e-14, atol=0)
    assert not (result.clipped_low | result.clipped_high).any()
    assert (result.ratio == 1).all()


def test_loss_zero_at_ratio_one_is_no_dead_run():
    logprobs = torch.full((2, 1), -0.7, dtype=torch.float64, requires_grad=True)
    mask, advantages = torch.full((2, 1), True), torch.tensor([1.0, -1.0])
    result = sequence_clipped_loss(logprobs, logprobs.detach(), mask, advantages, 2, 0.2, 0.2)
    result.loss.backward()
    assert result.loss.item() == 0
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-0.5], [0.5]], dtype=torch.float64))


def test_clipping_by_sequence():
    """Ratios 1.5, 1.5, 0.5 and 0.5 over two tokens each, bounds 0.8 and 1.3."""
    half = torch.tensor([1.5, 1.5, 0.5, 0.5], dtype=torch.float64).log()[:, None].expand(4, 2) / 2
    logprobs = (half - 1).requires_grad_()
    mask, advantages = torch.full((4, 2), True), torch.tensor([1.0, -1.0, 1.0, -1.0])
    result = sequence_clipped_loss(logprobs, torch.full((4, 2), -1.0), mask, advantages, 4, 0.2, 0.3)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-(1.3 - 1.5 + 0.5 - 0.8) / 4)
    assert result.clipped_high.tolist() == [True, False, False, False]
    assert result.clipped_low.tolist() == [False, False, False, True]
    expected = torch.tensor([[0, 0], [1.5, 1.5], [-0.5, -0.5], [0, 0]], dtype=torch.float64) / 4
    torch.testing.assert_close(logprobs.grad, expected)


def test_clipping_by_token():
    logprobs = torch.tensor([[1.5, 0.9, 99.0]], dtype=torch.float64).log().requires_grad_()
    mask = torch.tensor([[True, True, False]])
    weights = torch.tensor([[1.0, 0.5, float("nan")]])
    result = token_clipped_loss(logprobs, torch.zeros(1, 3), mask, torch.ones(1), 2, 0.2, 0.3, weights)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-(1.3 + 0.5 * 0.9) / 2)
    assert result.clipped_high.tolist() == [[True, False, False]]
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0, -0.225, 0]], dtype=torch.float64))


def test_an_overflowing_ratio_without_advantage_is_harmless():
    logprobs = torch.full((1, 2), 0.0, requires_grad=True)
    mask = torch.full((1, 2), True)
    for loss_of in (sequence_clipped_loss, token_clipped_loss):
        result = loss_of(logprobs, torch.full((1, 2), -500.0), mask, torch.zeros(1), 1, 0.2, 0.2)
        (gradient,) = torch.autograd.grad(result.loss, logprobs)
        assert (result.loss.item(), gradient.abs().max().item()) == (0, 0)


@pytest.mark.parametrize("loss_of", [sequence_clipped_loss, token_clipped_loss])
def test_an_overflowing_ratio_that_is_clipped_has_no_gradient(loss_of):
    """The other row's gradient stays what it is alone: ratio 1, advantage 0.5, divided by 2."""
    logprobs = torch.zeros(2, 2, requires_grad=True)
    old, advantages = torch.tensor([[-500.0, -500.0], [0.0, 0.0]]), torch.tensor([1.0, 0.5])
    result = loss_of(logprobs, old, torch.full((2, 2), True), advantages, 2, 0.2, 0.3)
    (gradient,) = torch.autograd.grad(result.loss, logprobs)
    assert gradient.tolist() == [[0, 0], [-0.25, -0.25]]
    assert result.loss.item() == pytest.approx(-(1.3 + 0.5) / 2 * (1 if loss_of is sequence_clipped_loss else 2))
    assert result.clipped_high.reshape(2, -1).any(-1).tolist() == [True, False]


@pytest.mark.parametrize("loss_of", [sequence_clipped_loss, token_clipped_loss])
def test_an_overflowing_ratio_that_nothing_bounds_shows_in_the_gradient(loss_of):
    logprobs = torch.zeros(1, 2, requires_grad=True)
    result = loss_of(logprobs, torch.full((1, 2), -500.0), torch.full((1, 2), True), -torch.ones(1), 1, 0.2, 0.3)
    (gradient,) = torch.autograd.grad(result.loss, logprobs)
    assert not gradient.isfinite().any()


def test_an_overflowing_ratio_in_the_kl_loss():
    """It is harmless in a completion of weight 0, and shows in the gradient of one that counts."""
    logprobs, old = torch.zeros(2, 2, requires_grad=True), torch.tensor([[-500.0, -500.0], [0.0, 0.0]])
    given = logprobs, old, torch.full((2, 2), -0.5), torch.full((2, 2), True), 2, "k1", "none"
    (gradient,) = torch.autograd.grad(kl_loss(*given, torch.tensor([0.0, 1.0])), logprobs)
    assert gradient.tolist() == [[0, 0], [0.5, 0.5]]
    (gradient,) = torch.autograd.grad(kl_loss(*given, torch.tensor([1.0, 1.0])), logprobs)
    assert not gradient[0].isfinite().any()


@pytest.mark.parametrize("loss_of", [sequence_clipped_loss, token_clipped_loss])
def test_clipped_losses_do_not_depend_on_the_microbatches(loss_of):
    logprobs, mask, advantages = padded()
    old = padded(1)[0].detach()
    whole = loss_of(logprobs, old, mask, advantages, 5, 0.2, 0.3).loss
    parts = sum(
        loss_of(logprobs[p], old[p], mask[p], advantages[p], 5, 0.2, 0.3).loss for p in torch.arange(5).split(2)
    )
    gradients = [torch.autograd.grad(loss, logprobs)[0] for loss in (whole, parts)]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-12)


def old_logprobs(sampler):
    return logprobs_of(sampler[0]).detach()


@pytest.mark.parametrize(("loss_of", "unbiased"), [(sequence_clipped_loss, True), (token_clipped_loss, False)])
def test_the_unclipped_ratio_off_policy(loss_of, unbiased):
    """The whole completion's ratio gives the current policy's gradient from another policy's samples; a token's not."""
    logits, sampler = make_logits(3), make_logits(3) + 0.3 * make_logits(7)

    def loss(logprobs_NT, mask_NT, drawn):
        old_NT = old_logprobs(sampler)[drawn.completions_N]
        return loss_of(logprobs_NT, old_NT, mask_NT, advantages_of(drawn), 2, WIDE, WIDE).loss

    gap = (expected_gradient(logits, 2, loss, sampler) - exact_gradient(logits)).abs().max()
    assert (gap < 1e-10) == unbiased
    assert unbiased or gap > 1e-3


def ragged(logits, drawn):
    """Flat log-probs of the drawn completions and their offsets, as the artifacts hold them."""
    mask_NT = MASK_CT[drawn.completions_N]
    flat = logprobs_of(logits[0])[drawn.completions_N][mask_NT].numpy()
    return flat, np.concatenate([[0], mask_NT.sum(-1).numpy().cumsum()])


@pytest.mark.parametrize("correction", ["truncate", "mask"])
def test_sequence_correction_below_its_cap_removes_the_samplers_bias(correction):
    logits, sampler = make_logits(3), make_logits(3) + 0.3 * make_logits(7)

    def loss(logprobs_NT, mask_NT, drawn):
        policy, offsets = ragged(logits, drawn)
        weights_N = sequence_weights(policy, ragged(sampler, drawn)[0], offsets, correction, WIDE)
        return sequence_loss(logprobs_NT, mask_NT, advantages_of(drawn) * torch.from_numpy(weights_N), 2)

    def uncorrected(logprobs_NT, mask_NT, drawn):
        return sequence_loss(logprobs_NT, mask_NT, advantages_of(drawn), 2)

    exact = exact_gradient(logits)
    assert_equal(expected_gradient(logits, 2, loss, sampler), exact)
    assert (expected_gradient(logits, 2, uncorrected, sampler) - exact).abs().max() > 1e-2


def test_sequence_clip_meets_the_policys_own_ratio_alone():
    """A sampler far off changes the weight of a completion, never whether it is clipped."""
    logprobs, mask, advantages = padded()
    lengths = mask.sum(-1)
    offsets = np.concatenate([[0], lengths.numpy().cumsum()])
    policy = logprobs.detach()[mask].numpy()
    weights_N = torch.from_numpy(sequence_weights(policy, policy - 0.4, offsets, "truncate", 2.0))
    torch.testing.assert_close(weights_N, (0.4 * lengths.double()).exp().clamp(max=2))
    result = sequence_clipped_loss(logprobs, logprobs.detach(), mask, advantages * weights_N, 5, 0.2, 0.2)
    assert not (result.clipped_low | result.clipped_high).any()


def test_correction_by_token_and_by_sequence():
    policy, sampler = np.log([1.0, 0.5, 0.9, 0.2]), np.log([0.5, 0.5, 0.3, 0.4])
    np.testing.assert_allclose(token_weights(policy, sampler, "truncate", 2.5), [2, 1, 2.5, 0.5])
    np.testing.assert_allclose(token_weights(policy, sampler, "mask", 2.5), [2, 1, 0, 0.5])
    offsets = np.array([0, 2, 4])
    np.testing.assert_allclose(sequence_weights(policy, sampler, offsets, "truncate", 1.8), [1.8, 1.5])
    np.testing.assert_allclose(sequence_weights(policy, sampler, offsets, "mask", 1.8), [0, 1.5])
    with np.errstate(over="raise"):
        assert token_weights(np.zeros(1), np.full(1, -1e5), "mask", 2.0) == 0


def test_effective_sample_size():
    assert effective_sample_size(np.zeros(5)) == 1
    assert effective_sample_size(np.log([1.0, 3.0])) == pytest.approx(16 / 10 / 2)
    assert effective_sample_size(np.array([0.0, -2000.0])) == 0.5
    np.testing.assert_allclose(sequence_log_ratio(np.ones(3), np.zeros(3), np.array([0, 1, 3])), [1, 2])


def test_token_weights_in_the_sequence_loss():
    logprobs = torch.tensor([[-1.0, -2.0, float("nan")]], dtype=torch.float64)
    mask, weights = torch.tensor([[True, True, False]]), torch.tensor([[0.5, 2.0, float("nan")]])
    assert sequence_loss(logprobs, mask, torch.tensor([3.0]), 2, weights).item() == pytest.approx(3 * 4.5 / 2)


ESTIMATORS = ("k1", "k2", "k3", "abs")


def kl_values(estimator, normalization, logits_SV, reference_SV):
    """KL estimate of each completion as a function of the logits, written out anew."""
    d_CT = logprobs_of(logits_SV) - logprobs_of(reference_SV)
    tokens_CT = {"k1": d_CT, "k2": d_CT**2 / 2, "k3": (-d_CT).exp() - 1 + d_CT, "abs": d_CT.abs()}[estimator]
    sums_C = torch.where(MASK_CT, tokens_CT, 0).sum(-1)
    return sums_C / LENGTHS_C if normalization == "length" else sums_C


def kl_gradient(logits, reference, estimator, normalization):
    """Gradient of E[kl], through the estimate and through what is sampled."""
    leaf = logits.clone().requires_grad_()
    values_C = kl_values(estimator, normalization, leaf[0], reference[0])
    (probabilities_of(leaf[0]) * values_C).sum().backward()
    return leaf.grad


def expected_kl_gradient(logits, reference, estimator, normalization, sampler=None):
    def loss(logprobs_NT, mask_NT, drawn):
        old_NT = logprobs_NT.detach() if sampler is None else old_logprobs(sampler)[drawn.completions_N]
        reference_NT = logprobs_of(reference[0])[drawn.completions_N]
        return kl_loss(logprobs_NT, old_NT, reference_NT, mask_NT, 1, estimator, normalization)

    return expected_gradient(logits, 1, loss, sampler)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("normalization", ["none", "length"])
@pytest.mark.parametrize("off_policy", [False, True])
def test_kl_in_the_loss_has_the_gradient_of_its_expectation(estimator, normalization, off_policy):
    logits, reference = make_logits(3), make_logits(5)
    sampler = logits + 0.3 * make_logits(7) if off_policy else None
    found = expected_kl_gradient(logits, reference, estimator, normalization, sampler)
    exact = kl_gradient(logits, reference, estimator, normalization)
    assert exact.abs().max() > 0.01
    assert_equal(found, exact)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_differentiating_the_estimate_alone_is_wrong(estimator):
    logits, reference = make_logits(3), make_logits(5)

    def naive(logprobs_NT, mask_NT, drawn):
        d_NT = logprobs_NT - logprobs_of(reference[0])[drawn.completions_N]
        tokens_NT = {"k1": d_NT, "k2": d_NT**2 / 2, "k3": (-d_NT).exp() - 1 + d_NT, "abs": d_NT.abs()}[estimator]
        return torch.where(mask_NT, tokens_NT, 0).sum()

    found = expected_gradient(logits, 1, naive)
    assert (found - kl_gradient(logits, reference, "k1", "none")).abs().max() > 0.01
    if estimator == "k1":
        assert found.abs().max() < 1e-12


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("normalization", ["none", "length"])
def test_kl_in_the_reward_is_the_whole_gradient_for_the_sum_of_k1_alone(estimator, normalization):
    logits, reference = make_logits(3), make_logits(5)
    offsets = np.concatenate([[0], LENGTHS_C.numpy().cumsum()])
    policy, other = (logprobs_of(values[0])[MASK_CT].numpy() for values in (logits, reference))
    kl_C = sequence_kl(token_kl(policy, other, estimator), offsets, normalization)

    def loss(logprobs_NT, mask_NT, drawn):
        penalty_N = kl_C[drawn.completions_N]
        baseline_N = leave_one_out(penalty_N, drawn.groups_N, np.full(2, True))
        return sequence_loss(logprobs_NT, mask_NT, torch.from_numpy(baseline_N - penalty_N), 2)

    found = expected_gradient(logits, 2, loss)
    # As a fixed penalty it is exact for every estimator; only for summed k1 is that also the gradient of E[kl].
    assert_equal(found, policy_gradient(logits, lambda prompt, _: -torch.from_numpy(kl_C)))
    gap = (found - kl_gradient(logits, reference, estimator, normalization)).abs().max()
    assert (gap < 1e-10) == (estimator == "k1" and normalization == "none")


def test_kl_loss_value():
    logprobs = torch.tensor([[-1.0, -1.0], [-2.0, 5.0]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[-1.2, -0.5], [-1.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False]])
    loss = kl_loss(logprobs, logprobs.detach(), reference, mask, 2)
    assert loss.item() == pytest.approx((0.2 - 0.5 - 1.0) / 2)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-0.15, -0.15], [-0.5, 0]], dtype=torch.float64))
    in_nothing = kl_loss(logprobs, logprobs.detach(), reference, mask & False, 0, "k3", "length")
    assert in_nothing.item() == 0


def test_adapted_beta():
    assert adapted_beta(0.5, 6.0, 6.0) == 0.5
    assert adapted_beta(0.5, 6.6, 6.0) == pytest.approx(0.5 * 1.01)
    assert adapted_beta(0.5, 60.0, 6.0) == pytest.approx(0.5 * 1.02)
    assert adapted_beta(0.5, -1.0, 6.0) == pytest.approx(0.5 * 0.98)
    assert math.isclose(adapted_beta(1.0, 12.0, 6.0, gain=0.5), 1.1)


@pytest.mark.parametrize("cap", [2.0, 3.0, 5.0, 8.0, 10.0])
def test_a_truncated_weight_is_the_cap_itself(cap: float) -> None:
    """The exponential of the logarithm of 3 is not 3."""
    policy, sampler = np.zeros(2), np.array([-9.0, 0.0])
    assert token_weights(policy, sampler, "truncate", cap).tolist() == [cap, 1.0]
    assert token_weights(policy, sampler, "mask", cap).tolist() == [0.0, 1.0]
