"""Proofs by enumeration: the expected gradient over every draw of a small policy, through the code's own loss."""

import numpy as np
import pytest
import torch

from rloo_pipeline.objective import advantages
from rloo_pipeline.objective.kl import sequence_kl, token_kl
from tests.enumeration import (
    COMPLETIONS,
    MASK_CT,
    every_draw,
    expected_gradient,
    logprobs_of,
    loss_with,
    make_logits,
    policy_gradient,
    probabilities_of,
)

LENGTHS_C = np.array([len(ids) for ids in COMPLETIONS])
OFFSETS_C1 = np.concatenate([[0], LENGTHS_C.cumsum()])
REWARDS_C = np.array([0.3, -1.0, 2.0, 0.5, 1.5, -0.2, 0.9])


def kl_of(logits_SV, reference_SV):
    """KL of each completion by the code under proof, from the ragged log-probs."""
    policy, reference = (logprobs_of(values)[MASK_CT].numpy() for values in (logits_SV, reference_SV))
    return sequence_kl(token_kl(policy, reference), OFFSETS_C1)


def leave_one_out(drawn, k, kl_C=None, beta=0.0):
    return advantages.compute(
        REWARDS_C[drawn.completions_N],
        None if kl_C is None else kl_C[drawn.completions_N],
        drawn.groups_N,
        np.full(len(drawn.groups_N), True),
        names_G=[str(group) for group in range(drawn.groups_N.max() + 1)],
        completions_per_prompt=k,
        beta=beta,
    ).advantage_N


def test_the_policy_is_a_distribution():
    assert float(probabilities_of(make_logits(0)[0]).sum()) == pytest.approx(1, abs=1e-14)
    assert sum(drawn.probability for drawn in every_draw(make_logits(0), 2)) == pytest.approx(1, abs=1e-14)


@pytest.mark.parametrize("k", [2, 3])
def test_leave_one_out_is_unbiased(k):
    logits = make_logits(1)
    found = expected_gradient(logits, k, loss_with(lambda drawn: leave_one_out(drawn, k)))
    exact = policy_gradient(logits, lambda prompt, logprobs_C: torch.from_numpy(REWARDS_C))
    assert exact.abs().max() > 0.1
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-10)


def test_leave_one_out_is_unbiased_with_the_kl_in_the_reward():
    logits, reference, beta = make_logits(1), make_logits(2), 0.4
    kl_C = kl_of(logits[0], reference[0])
    reference_C = probabilities_of(reference[0]).log()
    found = expected_gradient(logits, 3, loss_with(lambda drawn: leave_one_out(drawn, 3, kl_C, beta)))
    # The exact objective is E[reward] - beta * KL(policy || reference), its KL differentiated like all the rest.
    exact = policy_gradient(
        logits,
        lambda prompt, logprobs_C: torch.from_numpy(REWARDS_C) - beta * (logprobs_C - reference_C),
        through_value=True,
    )
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-10)


def test_a_whole_completion_is_the_action():
    """The mean over tokens in place of the sum is another, wrong, gradient for completions of unequal length."""
    logits = make_logits(1)
    lengths = torch.from_numpy(LENGTHS_C)

    def token_mean(logprobs_NT, mask_NT, drawn):
        advantages_N = torch.from_numpy(leave_one_out(drawn, 2))
        means_N = torch.where(mask_NT, logprobs_NT, 0).sum(-1) / lengths[drawn.completions_N]
        return -(advantages_N * means_N).mean()

    exact = policy_gradient(logits, lambda prompt, logprobs_C: torch.from_numpy(REWARDS_C))
    assert (expected_gradient(logits, 2, token_mean) - exact).abs().max() > 0.01
