"""What is subtracted from a completion's reward, and how the difference weighs its log-prob.

R_i: penalized reward of row i; the rows that count are the valid ones. Unbiased means that the expected gradient of
the sequence loss is the policy gradient of E[R]; every claim is proved by enumeration in the tests.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from rloo_pipeline.errors import UserError
from rloo_pipeline.objective.groups import group_minima, group_sums, informative


@dataclass(frozen=True)
class Estimate:
    """What a baseline makes of each row; NaN, 0 and False in rows that do not count."""

    baseline_N: np.ndarray  # float64; NaN also where nothing is subtracted from a reward
    advantage_N: np.ndarray  # float64, 0 where not trained
    trained_N: np.ndarray  # bool: the row belongs in the loss and its denominator


@dataclass(frozen=True)
class RunningMean:
    """Mean of all penalized rewards of earlier iterations, 0 before the first."""

    mean: float = 0.0
    rows: int = 0

    def including(self, penalized_rewards: np.ndarray) -> "RunningMean":
        """The mean with one more iteration's penalized rewards, any shape, all finite."""
        rows = self.rows + penalized_rewards.size
        if not rows:
            return self
        total = self.mean * self.rows + float(np.sort(penalized_rewards, axis=None).sum())
        return RunningMean(total / rows, rows)


Function = Callable[[np.ndarray, np.ndarray, np.ndarray, float], Estimate]


def leave_one_out(rewards_N: np.ndarray, groups_N: np.ndarray, valid_N: np.ndarray) -> np.ndarray:
    """Mean reward of each row's valid siblings, float64 [N] (Kool et al. 2019; Ahmadian et al. 2024).

    groups_N: group index of each row, in any order. A valid row without a valid sibling gets its own reward, so that
    its advantage is 0; an invalid row gets NaN. A group of equal rewards gives exactly that reward.
    """
    baseline_N = np.full(len(rewards_N), np.nan)
    excess = _Excess.of(rewards_N, groups_N, valid_N)
    others = excess.total - excess.values
    baseline_N[valid_N] = excess.low + others / np.maximum(excess.count - 1, 1)
    return baseline_N


@dataclass(frozen=True)
class _Excess:
    """Valid rows' rewards above their group's minimum: sums over these keep a flat group at exactly 0."""

    values: np.ndarray
    low: np.ndarray  # the group's minimum, row by row, as are the two below
    total: np.ndarray
    count: np.ndarray

    @classmethod
    def of(cls, rewards_N: np.ndarray, groups_N: np.ndarray, valid_N: np.ndarray) -> "_Excess":
        rewards, rows = np.asarray(rewards_N, np.float64)[valid_N], groups_N[valid_N]
        groups = int(groups_N.max(initial=-1)) + 1
        low = group_minima(rewards, rows, groups)[rows]
        values = rewards - low
        count = np.bincount(rows, minlength=groups)[rows]
        return cls(values, low, group_sums(values, rows, groups)[rows], count)


def _subtracted(rewards_N: np.ndarray, baseline_N: np.ndarray, trained_N: np.ndarray) -> Estimate:
    return Estimate(baseline_N, np.where(trained_N, rewards_N - baseline_N, 0.0), trained_N)


def with_company(groups_N: np.ndarray, valid_N: np.ndarray) -> np.ndarray:
    """The valid rows whose group has another one; alone, a row has nothing to be compared with."""
    count_G = np.bincount(groups_N[valid_N], minlength=int(groups_N.max(initial=-1)) + 1)
    accompanied_N: np.ndarray = valid_N & (count_G[groups_N] > 1)
    return accompanied_N


def _leave_one_out(rewards_N: np.ndarray, groups_N: np.ndarray, valid_N: np.ndarray, past_mean: float) -> Estimate:
    """A_i = R_i - mean of the valid siblings' R_j, j != i.

    Bias: none. Minimal K: 2. Source: Kool et al. 2019, Buy 4 REINFORCE samples; Ahmadian et al. 2024,
    arXiv:2402.14740, RLOO.
    """
    return _subtracted(rewards_N, leave_one_out(rewards_N, groups_N, valid_N), with_company(groups_N, valid_N))


def _none(rewards_N: np.ndarray, groups_N: np.ndarray, valid_N: np.ndarray, past_mean: float) -> Estimate:
    """A_i = R_i, vanilla REINFORCE.

    Bias: none, but the variance grows with the square of the mean reward. Minimal K: 1. Source: Williams 1992.
    """
    return _subtracted(rewards_N, np.where(valid_N, 0.0, np.nan), valid_N.copy())


def _moving_average(rewards_N: np.ndarray, groups_N: np.ndarray, valid_N: np.ndarray, past_mean: float) -> Estimate:
    """A_i = R_i - mean of the R of all earlier iterations (0 in the first), one number for every prompt.

    Bias: none, since earlier rewards do not depend on this iteration's samples. Minimal K: 1. Source: Williams 1992;
    Ahmadian et al. 2024, arXiv:2402.14740, REINFORCE with baseline.
    """
    return _subtracted(rewards_N, np.where(valid_N, past_mean, np.nan), valid_N.copy())


def _batch_mean(rewards_N: np.ndarray, groups_N: np.ndarray, valid_N: np.ndarray, past_mean: float) -> Estimate:
    """A_i = R_i - mean of every other valid R_j of the iteration, j != i, whatever its prompt.

    Bias: none. Minimal K: 1, with at least two rows in all. Source: Kool et al. 2019, with the batch as the group.
    """
    batch_N = np.zeros_like(groups_N)
    return _subtracted(rewards_N, leave_one_out(rewards_N, batch_N, valid_N), with_company(batch_N, valid_N))


def _standardized(rewards_N: np.ndarray, groups_N: np.ndarray, valid_N: np.ndarray, divide: bool) -> Estimate:
    baseline_N, advantage_N = np.full(len(rewards_N), np.nan), np.zeros(len(rewards_N))
    excess = _Excess.of(rewards_N, groups_N, valid_N)
    mean = excess.total / excess.count
    centred = excess.values - mean
    baseline_N[valid_N] = excess.low + mean
    if divide:
        rows, groups = groups_N[valid_N], int(groups_N.max(initial=-1)) + 1
        deviation = np.sqrt(group_sums(centred**2, rows, groups)[rows] / excess.count)
        differ = informative(rewards_N, groups_N, valid_N, groups)[rows] & (deviation > 0)
        centred = np.divide(centred, deviation, out=np.zeros_like(centred), where=differ)
    trained_N = with_company(groups_N, valid_N)
    advantage_N[valid_N] = centred
    return Estimate(baseline_N, np.where(trained_N, advantage_N, 0.0), trained_N)


def _group_mean(rewards_N: np.ndarray, groups_N: np.ndarray, valid_N: np.ndarray, past_mean: float) -> Estimate:
    """A_i = R_i - mean of all valid R_j of the group, its own among them.

    Bias: the gradient is (K - 1) / K of the true one, since a reward is compared in part with itself. Minimal K: 2
    (with 1 every advantage is 0). Source: Liu et al. 2025, arXiv:2503.20783, Dr. GRPO.
    """
    return _standardized(rewards_N, groups_N, valid_N, divide=False)


def _group_standardized(rewards_N: np.ndarray, groups_N: np.ndarray, valid_N: np.ndarray, past_mean: float) -> Estimate:
    """A_i = (R_i - group mean) / standard deviation of the group (that of a population); a flat group gives 0.

    Bias: prompts are weighted by 1 / deviation, so the rare success of a hard prompt (and the rare failure of an easy
    one) counts for more: at K = 8, 3.02 times its group_mean advantage for 1 success against 2.00 for 4; and a
    difference above the rounding of rewards is blown up to size 1. Minimal K: 2. Source: Shao et al. 2024,
    arXiv:2402.03300, GRPO.
    """
    return _standardized(rewards_N, groups_N, valid_N, divide=True)


def _global_standardized(
    rewards_N: np.ndarray, groups_N: np.ndarray, valid_N: np.ndarray, past_mean: float
) -> Estimate:
    """A_i = (R_i - mean of all valid R_j) / their standard deviation, over the whole iteration.

    Bias: own reward included ((N - 1) / N), and divided by a deviation that depends on the samples, which changes the
    direction too; both fade as N grows. Minimal K: 1, with at least two rows in all. Source: Hu 2025,
    arXiv:2501.03262, REINFORCE++.
    """
    return _standardized(rewards_N, np.zeros_like(groups_N), valid_N, divide=True)


def _best_of_k(rewards_N: np.ndarray, groups_N: np.ndarray, valid_N: np.ndarray, past_mean: float) -> Estimate:
    """A = 1 for the best valid completion of each group, the first in row order among equals; the rest is left out.

    A valid row without a valid sibling is not the best of anything and is left out too.

    Bias: not a policy gradient at all but maximum likelihood on the policy's best samples: size and sign of the
    rewards play no part, and a group of equal rewards is trained on like any other. Minimal K: 2. Source: Dong et al.
    2023, arXiv:2304.06767, RAFT.
    """
    rows = np.flatnonzero(with_company(groups_N, valid_N))
    order = rows[np.lexsort((rows, -rewards_N[rows], groups_N[rows]))]
    _, first = np.unique(groups_N[order], return_index=True)
    trained_N = np.zeros(len(rewards_N), bool)
    trained_N[order[first]] = True
    return Estimate(np.full(len(rewards_N), np.nan), trained_N.astype(np.float64), trained_N)


@dataclass(frozen=True)
class Baseline:
    """One way to turn rewards into advantages; the function's docstring has its formula, bias, minimal K and source."""

    function: Function
    minimal_completions: int
    reason: str = ""  # why fewer completions per prompt are refused

    def estimate(
        self, rewards_N: np.ndarray, groups_N: np.ndarray, valid_N: np.ndarray, past_mean: float = 0.0
    ) -> Estimate:
        """Baseline and advantage of each row; rewards_N float64 and finite where valid, past_mean of RunningMean."""
        return self.function(np.asarray(rewards_N, np.float64), groups_N, valid_N, past_mean)


_OWN_MEAN = "the mean of a group of one is the completion's own reward, so every advantage would be 0"

BASELINES: Mapping[str, Baseline] = {
    "leave_one_out": Baseline(
        _leave_one_out,
        2,
        "the leave_one_out baseline of a completion is the mean reward of its siblings, "
        "and a single completion has none",
    ),
    "none": Baseline(_none, 1),
    "moving_average": Baseline(_moving_average, 1),
    "batch_mean": Baseline(_batch_mean, 1),
    "group_mean": Baseline(_group_mean, 2, _OWN_MEAN),
    "group_standardized": Baseline(_group_standardized, 2, _OWN_MEAN),
    "global_standardized": Baseline(_global_standardized, 1),
    "best_of_k": Baseline(_best_of_k, 2, "the best of a single completion is that completion, so nothing is selected"),
}


def check_completions(baseline: str, completions_per_prompt: int) -> None:
    """Raises UserError with the reason if the baseline needs more completions per prompt."""
    needed = BASELINES[baseline].minimal_completions
    if completions_per_prompt < needed:
        raise UserError(
            f"completions_per_prompt is {completions_per_prompt}: {BASELINES[baseline].reason}; use at least {needed}"
        )
