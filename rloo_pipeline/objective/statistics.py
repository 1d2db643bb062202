"""Evaluation figures and their uncertainty."""

import numpy as np

_RESAMPLED_VALUES_AT_ONCE = 2**20


def pass_at_k(n: np.ndarray | int, correct: np.ndarray, k: int) -> np.ndarray:
    """Unbiased pass@k of each prompt, 1 - C(n - c, k) / C(n, k), float64 [P] (Chen et al. 2021, eq. 1).

    n: samples of each prompt, int or [P]; correct: how many of them passed, [P]. Raises ValueError if k > n.
    """
    n, correct = np.broadcast_arrays(n, correct)
    if k < 1 or np.any(k > n) or np.any(correct < 0) or np.any(correct > n):
        raise ValueError(f"pass@{k} needs 1 <= k <= n and 0 <= correct <= n for every prompt")
    j = np.arange(k)
    failed = np.maximum(n[..., None] - correct[..., None] - j, 0)
    failing: np.ndarray = np.prod(failed / (n[..., None] - j), axis=-1)
    return 1.0 - failing


def prompt_win_rates(scores_PN: np.ndarray, opponent_scores_PM: np.ndarray) -> np.ndarray:
    """Share of sample pairs won per prompt, ties half, float64 [P]; NaN scores are left out, NaN without a pair."""
    mine, theirs = scores_PN[:, :, None], opponent_scores_PM[:, None, :]
    pairs_P = (~np.isnan(mine) & ~np.isnan(theirs)).sum((1, 2))
    won_P = (mine > theirs).sum((1, 2)) + 0.5 * (mine == theirs).sum((1, 2))
    return np.where(pairs_P > 0, won_P / np.maximum(pairs_P, 1), np.nan)


def win_rate(scores_PN: np.ndarray, opponent_scores_PM: np.ndarray) -> float:
    """Mean of prompt_win_rates over the prompts that have a pair of valid scores; NaN if none has."""
    rates_P = prompt_win_rates(scores_PN, opponent_scores_PM)
    rates_P = rates_P[~np.isnan(rates_P)]
    return float(rates_P.mean()) if len(rates_P) else float("nan")


def bootstrap_interval(values_P: np.ndarray, resamples: int, seed: int, level: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean (Efron 1979). Raises ValueError if empty or not finite."""
    values_P = np.asarray(values_P, np.float64)
    if not len(values_P) or not np.isfinite(values_P).all():
        raise ValueError("a bootstrap interval needs at least one value, all of them finite")
    rng = np.random.default_rng(seed)
    chunk = max(1, _RESAMPLED_VALUES_AT_ONCE // len(values_P))
    means = [
        values_P[rng.integers(len(values_P), size=(min(chunk, resamples - start), len(values_P)))].mean(1)
        for start in range(0, resamples, chunk)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
