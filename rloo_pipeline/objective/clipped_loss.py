"""Losses for more than one optimizer step on the same rollouts: the importance ratio, clipped (Schulman et al. 2017).

The ratio is current policy / recomputed policy at the start of the iteration. In the first step it is 1 everywhere if
old_logprobs_NT is logprobs_NT.detach(): then the gradient is that of sequence_loss, whatever epsilon.
"""

from dataclasses import dataclass

import torch

LARGEST_LOG_RATIO = 80.0  # nats; exp(88.8) is infinite in float32


@dataclass(frozen=True)
class ClippedLoss:
    """A microbatch's share of the loss, and where the clip took the gradient away."""

    loss: torch.Tensor  # scalar
    ratio: torch.Tensor  # [N] or [N, T], detached; 1 at padding and where the advantage is 0, at most exp(80) above it
    clipped_low: torch.Tensor  # bool: ratio below 1 - epsilon with a negative advantage
    clipped_high: torch.Tensor  # bool: ratio above 1 + epsilon_high with a positive advantage


def sequence_clipped_loss(
    logprobs_NT: torch.Tensor,
    old_logprobs_NT: torch.Tensor,
    completion_mask_NT: torch.Tensor,
    advantages_N: torch.Tensor,
    denominator: float,
    epsilon: float,
    epsilon_high: float,
) -> ClippedLoss:
    """-(1 / denominator) * sum_i min(r_i A_i, clip(r_i, 1 - epsilon, 1 + epsilon_high) A_i), r_i of the completion.

    r_i is the product of its tokens' ratios, so 0.2 is a narrow bound for a long completion. A sampler correction by
    sequence multiplies advantages_N; denominator as in sequence_loss.
    """
    log_ratio_N = (logprobs_NT - old_logprobs_NT).masked_fill(~completion_mask_NT, 0).sum(-1)
    return _clipped(log_ratio_N, advantages_N.to(log_ratio_N.dtype), None, denominator, epsilon, epsilon_high)


def token_clipped_loss(
    logprobs_NT: torch.Tensor,
    old_logprobs_NT: torch.Tensor,
    completion_mask_NT: torch.Tensor,
    advantages_N: torch.Tensor,
    denominator: float,
    epsilon: float,
    epsilon_high: float,
    token_weights_NT: torch.Tensor | None = None,
) -> ClippedLoss:
    """-(1 / denominator) * sum_it w_it min(r_it A_i, clip(r_it, 1 - epsilon, 1 + epsilon_high) A_i), r_it of a token.

    Ignores what a token does to the probability of those after it, so off-policy it is biased (by the second order in
    the step). token_weights_NT: w, of the sampler correction by token, 1 if None.
    """
    log_ratio_NT = (logprobs_NT - old_logprobs_NT).masked_fill(~completion_mask_NT, 0)
    weights_NT = completion_mask_NT.to(log_ratio_NT.dtype)
    if token_weights_NT is not None:
        weights_NT = token_weights_NT.to(log_ratio_NT.dtype).masked_fill(~completion_mask_NT, 0)
    advantages_NT = advantages_N.to(log_ratio_NT.dtype)[:, None] * completion_mask_NT
    return _clipped(log_ratio_NT, advantages_NT, weights_NT, denominator, epsilon, epsilon_high)


def _clipped(
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor | None,
    denominator: float,
    epsilon: float,
    epsilon_high: float,
) -> ClippedLoss:
    # An overflowing ratio would give 0 * inf where the advantage is 0, and where the clip takes its gradient away. With
    # a negative advantage there is no upper bound, and the overflow must show in the gradient's norm.
    log_ratio = log_ratio.masked_fill(advantages == 0, 0)
    ratio = torch.where(advantages > 0, log_ratio.clamp(max=LARGEST_LOG_RATIO), log_ratio).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - epsilon, 1 + epsilon_high) * advantages)
    return ClippedLoss(
        loss=-(gain if weights is None else gain * weights).sum() / (denominator or 1),
        ratio=ratio.detach(),
        clipped_low=(ratio < 1 - epsilon) & (advantages < 0),
        clipped_high=(ratio > 1 + epsilon_high) & (advantages > 0),
    )
