"""Variance of the gradient under any advantages, from inner products of the completions' score functions alone.

The gradient is G = sum_i A_i g_i / D with g_i the gradient of completion i's log-prob and D the trained completions;
so one backward per completion serves every baseline.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class GradientMoments:
    """Of one iteration's gradient."""

    squared_norm: float  # |G|^2 as it fell out; its mean is |E G|^2 + variance
    variance: float  # trace of the covariance of G over new prompts and completions


def gradient_moments(
    gram_NN: np.ndarray, advantages_N: np.ndarray, trained_N: np.ndarray, groups_N: np.ndarray
) -> GradientMoments:
    """Squared norm and variance of G, the groups taken as independent draws; gram_NN[i, j] = <g_i, g_j>, float64.

    With u_p the share of group p in G, the variance is P / (P - 1) * sum_p |u_p - mean u|^2: unbiased where the
    advantages of a group depend on that group alone. Raises ValueError with fewer than two groups.
    """
    names_G, rows_N = np.unique(groups_N, return_inverse=True)
    groups = len(names_G)
    if groups < 2:
        raise ValueError("the variance of the gradient is taken over groups and needs at least two")
    weights_N = np.where(trained_N, advantages_N, 0.0) / max(int(trained_N.sum()), 1)
    shares_GN = np.zeros((groups, len(rows_N)))
    shares_GN[rows_N, np.arange(len(rows_N))] = weights_N
    products_GG = shares_GN @ gram_NN @ shares_GN.T
    squared_norm = float(products_GG.sum())
    spread = float(np.trace(products_GG)) - squared_norm / groups
    return GradientMoments(squared_norm, groups / (groups - 1) * spread)


def subsample(groups_N: np.ndarray, completions: int, seed: int) -> np.ndarray:
    """Rows of a random choice of that many completions of each group, ascending int64; all subsets are equally likely.

    Raises ValueError if a group has fewer.
    """
    _, rows_N, counts_G = np.unique(groups_N, return_inverse=True, return_counts=True)
    if counts_G.min(initial=completions) < completions:
        raise ValueError(f"a group has {counts_G.min()} completions, fewer than {completions}")
    order = np.lexsort((np.random.default_rng(seed).random(len(rows_N)), rows_N))
    rank = np.arange(len(rows_N)) - np.repeat(np.cumsum(counts_G) - counts_G, counts_G)
    return np.sort(order[rank < completions])
