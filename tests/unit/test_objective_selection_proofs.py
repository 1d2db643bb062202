"""What leaving completions or groups out, and dividing by a deviation, do to the expected gradient: by enumeration."""

import numpy as np
import pytest
import torch

from rloo_pipeline.objective import advantages
from rloo_pipeline.objective.loss import sequence_loss
from tests.enumeration import (
    COMPLETIONS,
    EOS,
    every_draw,
    expected_gradient,
    make_logits,
    policy_gradient,
    probabilities_of,
)

REWARDS_C = np.array([0.3, -1.0, 2.0, 0.5, 1.5, -0.2, 0.9])
TWO_PC = np.stack([REWARDS_C, 2 - REWARDS_C[::-1]])
RARE_PC = np.array([[0.0, 1, 0, 0, 1, 0, 1], [0.0, 0, 0, 1, 0, 0, 0]])
CUT_C = np.array([ids[-1] != EOS for ids in COMPLETIONS])


def loss_of(rewards_PC, masked_C=None, **settings):
    """The sequence loss over the rows trained on, from whole advantages without KL."""

    def loss(logprobs_NT, mask_NT, drawn):
        found = advantages.compute(
            rewards_PC[drawn.groups_N, drawn.completions_N],
            None,
            drawn.groups_N,
            np.full(len(drawn.groups_N), True),
            names_G=[str(prompt) for prompt in range(len(rewards_PC))],
            completions_per_prompt=len(drawn.groups_N) // len(rewards_PC),
            beta=0.0,
            masked_N=None if masked_C is None else masked_C[drawn.completions_N],
            **settings,
        )
        return sequence_loss(logprobs_NT, mask_NT, torch.from_numpy(found.advantage_N), float(found.trained_N.sum()))

    return loss


def exact_gradient(logits, rewards_PC):
    return policy_gradient(logits, lambda prompt, _: torch.from_numpy(rewards_PC[prompt]))


def along(found, exact):
    """Factor of the nearest multiple of the exact gradient, and the cosine of the angle between them."""
    product = float((found * exact).sum())
    return product / float((exact**2).sum()), product / float(found.norm() * exact.norm())


def chances_of_signal(logits, rewards_PC):
    """Chance that two completions of a prompt have different rewards."""
    chances = []
    for logits_SV, rewards_C in zip(logits, rewards_PC, strict=True):
        success = float((probabilities_of(logits_SV) * torch.from_numpy(rewards_C)).sum())
        chances.append(2 * success * (1 - success))
    return chances


def test_dropping_groups_without_signal_weighs_each_prompt_by_how_many_others_have_some():
    """By hand: P = 2 prompts times E[1 / groups trained on], with the prompt itself trained on."""
    logits = make_logits(3, prompts=2)
    found = expected_gradient(logits, 2, loss_of(RARE_PC, without_signal="drop"))
    exact = exact_gradient(logits, RARE_PC)
    first, second = chances_of_signal(logits, RARE_PC)
    factors = [2 * (1 - other / 2) for other in (second, first)]
    assert factors == pytest.approx([1.85, 1.51], abs=0.005)
    for prompt, factor in enumerate(factors):
        torch.testing.assert_close(found[prompt], factor * exact[prompt], rtol=0, atol=1e-10)
    assert along(found, exact)[1] == pytest.approx(0.997, abs=5e-4)


def test_resampling_weighs_each_prompt_by_its_chance_to_be_needed():
    """One group wanted of two: the second is trained on only where the first has no signal."""
    logits = make_logits(3, prompts=2)
    settings = {"without_signal": "resample", "groups_wanted": 1}
    found, exact = expected_gradient(logits, 2, loss_of(RARE_PC, **settings)), exact_gradient(logits, RARE_PC)
    factors = [2.0, 2 * (1 - chances_of_signal(logits, RARE_PC)[0])]
    assert factors[1] == pytest.approx(1.02, abs=0.005)
    for prompt, factor in enumerate(factors):
        torch.testing.assert_close(found[prompt], factor * exact[prompt], rtol=0, atol=1e-10)
    assert along(found, exact)[1] == pytest.approx(0.978, abs=5e-4)


def test_keeping_groups_without_signal_leaves_every_prompt_its_weight():
    logits = make_logits(3, prompts=2)
    found = expected_gradient(logits, 2, loss_of(RARE_PC, without_signal="keep"))
    torch.testing.assert_close(found, exact_gradient(logits, RARE_PC), rtol=0, atol=1e-10)


def test_masking_what_was_cut_gives_the_gradient_of_the_reward_given_an_end():
    """Times the chance that two of three completions end; it can point away from the gradient of the reward."""
    logits = make_logits(3)
    found = expected_gradient(logits, 3, loss_of(REWARDS_C[None], masked_C=CUT_C))
    leaf = logits.clone().requires_grad_()
    ended = probabilities_of(leaf[0])[torch.from_numpy(~CUT_C)]
    (-(ended * torch.from_numpy(REWARDS_C[~CUT_C])).sum() / ended.sum()).backward()
    end = float(ended.sum().detach())
    torch.testing.assert_close(found, (3 * end**2 * (1 - end) + end**3) * leaf.grad, rtol=0, atol=1e-10)
    assert along(found, exact_gradient(logits, REWARDS_C[None]))[1] == pytest.approx(-0.08, abs=0.005)


@pytest.mark.parametrize(("k", "factor", "cosine"), [(1, 0.475, 0.959), (2, 0.714, 0.986)])
def test_dividing_by_the_deviation_of_the_iteration_changes_the_direction(k, factor, cosine):
    logits = make_logits(3, prompts=2)
    found = expected_gradient(logits, k, loss_of(TWO_PC, baseline="global_standardized"))
    exact = exact_gradient(logits, TWO_PC)
    assert along(found, exact) == pytest.approx((factor, cosine), abs=1e-3)
    deviations = {
        drawn.completions_N.tobytes(): TWO_PC[drawn.groups_N, drawn.completions_N].std()
        for drawn in every_draw(logits, k)
    }
    divided = loss_of(TWO_PC, baseline="global_standardized")

    def undivided(logprobs_NT, mask_NT, drawn):
        return divided(logprobs_NT, mask_NT, drawn) * deviations[drawn.completions_N.tobytes()]

    # Without the division it is the own reward's share in the mean alone, with N = 2 K.
    expected = (2 * k - 1) / (2 * k) * exact
    torch.testing.assert_close(expected_gradient(logits, k, undivided), expected, rtol=0, atol=1e-10)


def test_normalizing_advantages_changes_the_direction():
    logits = make_logits(3)
    found = expected_gradient(logits, 2, loss_of(REWARDS_C[None], normalize=True))
    factor, cosine = along(found, exact_gradient(logits, REWARDS_C[None]))
    assert factor == pytest.approx(0.625, abs=1e-3)
    assert cosine == pytest.approx(0.976, abs=1e-3)
