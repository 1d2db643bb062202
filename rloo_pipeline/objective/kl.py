"""KL divergence of the policy from the reference, estimated on the sampled tokens. All values in nats."""

from collections.abc import Callable
from typing import Literal

import numpy as np

Estimator = Literal["k1", "k2", "k3", "abs"]
Normalization = Literal["none", "length"]

_ESTIMATORS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: 0.5 * log_ratio**2,
    "k3": lambda log_ratio: np.expm1(-log_ratio) + log_ratio,
    "abs": np.abs,
}


def token_kl(policy_logprobs: np.ndarray, reference_logprobs: np.ndarray, estimator: Estimator = "k1") -> np.ndarray:
    """KL estimate of each sampled token, float64 in the shape of the inputs (Schulman, Approximating KL, 2020).

    With d = log pi - log pi_ref: k1 = d (unbiased, may be negative), k2 = d^2/2 (biased, never negative),
    k3 = exp(-d) - 1 + d (unbiased, never negative), abs = |d| (biased). Raises ValueError on unequal shapes.
    """
    if np.shape(policy_logprobs) != np.shape(reference_logprobs):
        raise ValueError(f"log-probs of policy {np.shape(policy_logprobs)} and reference "
                         f"{np.shape(reference_logprobs)} differ in shape")  # fmt: skip
    log_ratio = np.asarray(policy_logprobs, np.float64) - np.asarray(reference_logprobs, np.float64)
    return _ESTIMATORS[estimator](log_ratio)


def sequence_kl(token_kl_flat: np.ndarray, offsets_N1: np.ndarray, normalization: Normalization = "none") -> np.ndarray:
    """KL estimate of each completion, float64 [N]: the sum over its tokens, with length divided by their number.

    Row i holds the tokens offsets_N1[i] to offsets_N1[i + 1], as in an Arrow list array; an empty row gives 0.
    Only these tokens count, so neither padding nor another row can enter.
    """
    offsets_N1 = np.asarray(offsets_N1, np.int64)
    lengths_N = np.diff(offsets_N1)
    rows = np.repeat(np.arange(len(lengths_N)), lengths_N)
    tokens = np.asarray(token_kl_flat, np.float64)[offsets_N1[0] : offsets_N1[-1]]
    kl_N = np.bincount(rows, weights=tokens, minlength=len(lengths_N))
    return kl_N / np.maximum(lengths_N, 1) if normalization == "length" else kl_N


def adapted_beta(beta: float, kl: float, target: float, gain: float = 0.1) -> float:
    """Next beta of the adaptive controller: beta * (1 + gain * clip(kl / target - 1, -0.2, 0.2)).

    kl: mean over the iteration's completions; target > 0; both nats. Source: Ziegler et al. 2019, arXiv:1909.08593,
    section 2.2, with gain 0.1.
    """
    return beta * (1 + gain * min(max(kl / target - 1, -0.2), 0.2))
