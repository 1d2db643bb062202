"""Variance of the gradient under any advantages, from inner products of the completions' score functions alone.

The gradient is G = sum_i A_i g_i / D with g_i the gradient of completion i's log-prob and D the trained completions;
so one backward per completion serves every baseline.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ROUNDING = 1e-9  # share of |G|^2 below which what is left after a subtraction in float64 counts as 0


@dataclass(frozen=True)
class GradientMoments:
    """Of one iteration's gradient."""

    squared_norm: float  # |G|^2 as it fell out; its mean is |E G|^2 + variance
    variance: float  # trace of the covariance of G over new prompts and completions


def gradient_moments(
    gram_NN: np.ndarray, advantages_N: np.ndarray, trained_N: np.ndarray, groups_N: np.ndarray
) -> GradientMoments:
    """Squared norm and variance of G, the groups taken as independent draws; gram_NN[i, j] = <g_i, g_j>, float64.

    With u_p the part of G that group p gives and f_p its share of the D rows, the variance is
    P / (P - 1) * sum_p |u_p - f_p G|^2, that of a ratio of sums over groups (Cochran 1977, Sampling Techniques,
    chapter 6), since D too depends on the draw. Unbiased where every group has as many trained rows and advantages
    that depend on that group alone. Raises ValueError with fewer than two groups.
    """
    names_G, rows_N = np.unique(groups_N, return_inverse=True)
    groups = len(names_G)
    if groups < 2:
        raise ValueError("the variance of the gradient is taken over groups and needs at least two")
    rows = max(int(trained_N.sum()), 1)
    share_G = np.bincount(rows_N[trained_N], minlength=groups) / rows
    parts_GN = np.zeros((groups, len(rows_N)))
    parts_GN[rows_N, np.arange(len(rows_N))] = np.where(trained_N, advantages_N, 0.0) / rows
    residuals_GN = parts_GN - np.outer(share_G, parts_GN.sum(0))
    spread = float(((residuals_GN @ gram_NN) * residuals_GN).sum())
    whole_N = parts_GN.sum(0)
    return GradientMoments(float(whole_N @ gram_NN @ whole_N), groups / (groups - 1) * spread)


def relative_variance(moments: Sequence[GradientMoments]) -> float | None:
    """Variance of G over |E G|^2, each a mean over all subsets; None where the completions show no E G.

    |E G|^2 is estimated by the mean of |G|^2 less that of the variance: the sum of <u_p, u_q> over pairs of different
    groups, without bias where the variance has none, and so negative at times.
    """
    if not moments:
        return None
    squared_norm = float(np.mean([each.squared_norm for each in moments]))
    variance = float(np.mean([each.variance for each in moments]))
    signal = squared_norm - variance
    return variance / signal if signal > ROUNDING * squared_norm else None


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
