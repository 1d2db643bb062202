"""KL to the reference as a term of the loss, with the gradient that belongs to it."""

from collections.abc import Callable

import torch

from rloo_pipeline.objective.kl import Estimator, Normalization

_ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: 0.5 * log_ratio**2,
    "k3": lambda log_ratio: torch.expm1(-log_ratio) + log_ratio,
    "abs": torch.abs,
}


def kl_loss(
    logprobs_NT: torch.Tensor,
    old_logprobs_NT: torch.Tensor,
    reference_logprobs_NT: torch.Tensor,
    completion_mask_NT: torch.Tensor,
    denominator: float,
    estimator: Estimator = "k1",
    normalization: Normalization = "none",
    weights_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """A microbatch's share of (1 / denominator) * sum_i r_i kl_i, whose expected gradient is that of E[kl]; a scalar.

    kl_i is the completion's estimate as in sequence_kl, r_i = pi / pi_old its importance ratio. Differentiating kl_i
    alone would miss that the policy also chooses which completions are sampled: k1 would then push nowhere on average,
    k3 towards another divergence. Through r_i that part is there, and with k1 (summed) it is the whole gradient, the
    other part having mean 0, so kl_i is taken as constant. old_logprobs_NT: those of the policy that sampled;
    logprobs_NT.detach() in the first step. Times beta it is added to the loss; denominator as in sequence_loss;
    weights_N: of the sampler correction by sequence, 1 if None.
    Source: Tang and Munos 2025, arXiv:2506.09477.
    """
    log_ratio_NT = (logprobs_NT - reference_logprobs_NT).masked_fill(~completion_mask_NT, 0)
    kl_N = _ESTIMATORS[estimator](log_ratio_NT).sum(-1)
    if normalization == "length":
        kl_N = kl_N / completion_mask_NT.sum(-1).clamp(min=1)
    if estimator == "k1" and normalization == "none":
        kl_N = kl_N.detach()
    log_ratio_N = (logprobs_NT - old_logprobs_NT).masked_fill(~completion_mask_NT, 0).sum(-1)
    if weights_N is not None:
        kl_N = kl_N * weights_N.to(kl_N.dtype)
        # An overflowing ratio would give 0 * inf. Elsewhere nothing bounds it, and it must show in the gradient's norm.
        log_ratio_N = log_ratio_N.masked_fill(weights_N == 0, 0)
    return (log_ratio_N.exp() * kl_N).sum() / (denominator or 1)
