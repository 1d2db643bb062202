"""The loss whose gradient is the policy gradient."""

import torch


def sequence_loss(
    logprobs_NT: torch.Tensor, completion_mask_NT: torch.Tensor, advantages_N: torch.Tensor, denominator: float
) -> torch.Tensor:
    """A microbatch's share of -(1 / denominator) * sum_i A_i * sum_t log pi(y_it), a scalar in logprobs' dtype.

    The whole completion is the action (Ahmadian et al. 2024, eq. 9). completion_mask_NT: True at completion tokens.
    denominator: the optimizer step's own count of trained sequences, whatever the microbatches, so that the shares
    add up; 0 (nothing to train on, all advantages 0) gives 0.
    """
    sequence_logprobs_N = logprobs_NT.masked_fill(~completion_mask_NT, 0).sum(-1)
    return -(advantages_N.to(logprobs_NT.dtype) * sequence_logprobs_N).sum() / (denominator or 1)
