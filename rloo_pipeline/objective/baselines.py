"""What is subtracted from a completion's reward so that the gradient varies less."""

import numpy as np

from rloo_pipeline.objective.groups import group_minima, group_sums


def leave_one_out(rewards_N: np.ndarray, groups_N: np.ndarray, valid_N: np.ndarray) -> np.ndarray:
    """Mean reward of each row's valid siblings, float64 [N] (Kool et al. 2019; Ahmadian et al. 2024, eq. 8).

    groups_N: group index of each row, in any order. A valid row without a valid sibling gets its own reward, so that
    its advantage is 0; an invalid row gets NaN. A group of equal rewards gives exactly that reward.
    """
    baseline_N = np.full(len(rewards_N), np.nan)
    rewards, rows = np.asarray(rewards_N, np.float64)[valid_N], groups_N[valid_N]
    groups = int(groups_N.max(initial=-1)) + 1
    # Sums over the excess above the group's minimum keep a flat group's advantages at exactly 0.
    low = group_minima(rewards, rows, groups)[rows]
    excess = rewards - low
    siblings = np.bincount(rows, minlength=groups)[rows] - 1
    others = group_sums(excess, rows, groups)[rows] - excess
    baseline_N[valid_N] = low + others / np.maximum(siblings, 1)
    return baseline_N
