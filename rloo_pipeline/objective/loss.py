"""The loss whose gradient is the policy gradient."""

import torch


def sequence_loss(
    logprobs_NT: torch.Tensor,
    completion_mask_NT: torch.Tensor,
    advantages_N: torch.Tensor,
    denominator: float,
    token_weights_NT: torch.Tensor | None = None,
) -> torch.Tensor:
    """A microbatch's share of -(1 / denominator) * sum_i A_i * sum_t w_it log pi(y_it), a scalar in logprobs' dtype.

    The whole completion is the action (Ahmadian et al. 2024, arXiv:2402.14740). completion_mask_NT: True at completion
    tokens; token_weights_NT: w, of the sampler correction by token, 1 if None. denominator: the optimizer step's own,
    of loss_denominator, whatever the microbatches, so that the shares add up; 0 (nothing to train on, all advantages
    0) gives 0.
    """
    logprobs_NT = logprobs_NT.masked_fill(~completion_mask_NT, 0)
    if token_weights_NT is not None:
        logprobs_NT = logprobs_NT * token_weights_NT.to(logprobs_NT.dtype).masked_fill(~completion_mask_NT, 0)
    return -(advantages_N.to(logprobs_NT.dtype) * logprobs_NT.sum(-1)).sum() / (denominator or 1)
