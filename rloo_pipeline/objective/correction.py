"""Importance weights for the gap between the sampler's probabilities and the trainer's, for the same weights.

The ratio is recomputed policy / sampler, fixed for the whole iteration: it never carries a gradient and never enters
the clipped ratio, which is current policy / recomputed policy.
"""

from typing import Literal

import numpy as np

from rloo_pipeline.objective.kl import sequence_kl, token_kl

Correction = Literal["truncate", "mask"]


def token_weights(
    policy_logprobs: np.ndarray, sampler_logprobs: np.ndarray, correction: Correction, cap: float
) -> np.ndarray:
    """Weight of each token, float64 in the shape of the inputs.

    truncate: min(ratio, cap) (Yao et al. 2025, truncated importance sampling); mask: the ratio, 0 above the cap.
    """
    log_ratio = np.asarray(policy_logprobs, np.float64) - np.asarray(sampler_logprobs, np.float64)
    return _limited(log_ratio, correction, cap)


def sequence_weights(
    policy_logprobs: np.ndarray,
    sampler_logprobs: np.ndarray,
    offsets_N1: np.ndarray,
    correction: Correction,
    cap: float,
) -> np.ndarray:
    """Weight of each completion, float64 [N], from the product of its tokens' ratios; multiply the advantages by it.

    Row i holds the tokens offsets_N1[i] to offsets_N1[i + 1]. truncate and mask as for tokens; a completion of
    weight 0 still counts in the denominator, since it is one of the sample that the mean is taken over.
    """
    return _limited(sequence_log_ratio(policy_logprobs, sampler_logprobs, offsets_N1), correction, cap)


def sequence_log_ratio(policy_logprobs: np.ndarray, sampler_logprobs: np.ndarray, offsets_N1: np.ndarray) -> np.ndarray:
    """log(policy / sampler) of each completion, nats, float64 [N]."""
    return sequence_kl(token_kl(policy_logprobs, sampler_logprobs), offsets_N1)


def _limited(log_ratio: np.ndarray, correction: Correction, cap: float) -> np.ndarray:
    # Limited before the exponential, which would overflow for a long completion; exp(log(cap)) need not be cap.
    ratio = np.exp(np.minimum(log_ratio, np.log(cap)))
    return np.where(log_ratio > np.log(cap), 0.0 if correction == "mask" else cap, ratio)


def effective_sample_size(log_ratio_N: np.ndarray) -> float:
    """(sum w)^2 / (N * sum w^2) of the uncorrected weights w = exp(log_ratio), 1 if all agree (Kong 1992)."""
    weights_N = np.exp(log_ratio_N - log_ratio_N.max())
    return float(weights_N.sum() ** 2 / (weights_N**2).sum() / len(weights_N))
