"""From rewards and KL to the advantages of one iteration's completions."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rloo_pipeline.errors import UserError
from rloo_pipeline.objective.baselines import BASELINES, Estimate, check_completions, with_company
from rloo_pipeline.objective.groups import WithoutSignal, check_group_sizes, informative, levelled, select_groups

INVALID = "no valid reward"
MASKED = "truncated at max_tokens"
NO_SIGNAL = "group without signal: fewer than two different rewards"
SURPLUS = "group not needed: enough informative groups before it"
NO_SIBLING = "no valid sibling to compare with"
NOT_BEST = "not the best of its group"


@dataclass(frozen=True)
class Counts:
    """Rows and groups of one iteration by what became of them."""

    rows: int  # the sum of those trained on and of the next six, one for each exclusion reason
    rows_trained: int
    rows_invalid: int
    rows_masked: int
    rows_without_signal: int  # left out for it, so 0 where groups without signal are kept
    rows_surplus: int
    rows_without_sibling: int
    rows_not_best: int
    groups: int
    groups_without_signal: int  # fewer than two distinct usable rewards before the KL; contains the next two
    groups_of_one_valid_row: int
    groups_without_valid_rows: int
    groups_trained: int
    groups_surplus: int  # with signal, but resample had enough before them
    groups_short: int  # of those wanted by resample, how many could not be had


@dataclass(frozen=True)
class Advantages:
    """The columns of the advantages artifact, in the rows' own order; NaN where a value does not exist."""

    reward_N: np.ndarray  # float64, clipped
    kl_N: np.ndarray  # float64, nats
    penalized_reward_N: np.ndarray  # float64, reward less the penalty for its length and beta times the KL
    baseline_N: np.ndarray  # float64
    advantage_N: np.ndarray  # float64, 0 in rows that are not trained on
    in_baseline_N: np.ndarray  # bool
    trained_N: np.ndarray  # bool
    exclusion_reason_N: np.ndarray  # object: str, or None in rows that are trained on
    counts: Counts


def compute(
    rewards_N: np.ndarray,
    kl_N: np.ndarray | None,
    groups_N: np.ndarray,
    valid_N: np.ndarray,
    *,
    names_G: Sequence[str],
    completions_per_prompt: int,
    beta: float,
    reward_clip_range: tuple[float, float] | None = None,
    penalty_N: np.ndarray | None = None,
    masked_N: np.ndarray | None = None,
    baseline: str = "leave_one_out",
    past_mean: float = 0.0,
    normalize: bool = False,
    without_signal: WithoutSignal = "keep",
    groups_wanted: int | None = None,
) -> Advantages:
    """Advantages of R_i = clip(reward_i) - penalty_i - beta * kl_i by the baseline of that name in BASELINES.

    rewards_N, kl_N: float [N], kl_N None without a reference; groups_N: index into names_G, any row order; valid_N:
    rows with a usable reward; penalty_N: for overlong completions; masked_N: rows left out of loss, baseline and
    denominator; past_mean: of RunningMean; normalize: as in normalized; without_signal, groups_wanted: as in
    select_groups. Raises UserError on too small a K, on groups without exactly K rows, on a reward or KL that is not
    finite in a valid row, on beta > 0 without kl_N and on normalize with best_of_k.
    """
    check_completions(baseline, completions_per_prompt)
    check_group_sizes(groups_N, names_G, completions_per_prompt)
    if normalize and baseline == "best_of_k":
        raise UserError("advantages.normalize makes every advantage of best_of_k 0; set it to false")
    reward_N = _clipped(rewards_N, valid_N, reward_clip_range)
    before_kl_N = reward_N if penalty_N is None else reward_N - penalty_N
    _check_finite(reward_N, _penalized(before_kl_N, kl_N, beta), kl_N, groups_N, valid_N, names_G)
    usable_N = valid_N if masked_N is None else valid_N & ~masked_N
    scale_N = np.abs(reward_N) + np.abs(reward_N - before_kl_N)
    signal_G = informative(before_kl_N, groups_N, usable_N, len(names_G), scale_N)
    # Rewards that differ by rounding are made equal, so that their advantages are 0 and no deviation is rounding.
    before_kl_N = levelled(before_kl_N, groups_N, usable_N & ~signal_G[groups_N])
    penalized_N = _penalized(before_kl_N, kl_N, beta)
    selected_G = select_groups(signal_G, without_signal, groups_wanted)
    in_baseline_N = usable_N & selected_G[groups_N]
    estimate = BASELINES[baseline].estimate(penalized_N, groups_N, in_baseline_N, past_mean)
    reason_N = _reasons(
        (estimate.trained_N, None),
        (~valid_N, INVALID),
        (~usable_N, MASKED),
        (~selected_G[groups_N] & ~signal_G[groups_N], NO_SIGNAL),
        (~in_baseline_N, SURPLUS),
        (with_company(groups_N, in_baseline_N), NOT_BEST),
        (in_baseline_N, NO_SIBLING),
    )
    return Advantages(
        reward_N=reward_N,
        kl_N=np.full(len(reward_N), np.nan) if kl_N is None else np.asarray(kl_N, np.float64),
        penalized_reward_N=penalized_N,
        baseline_N=estimate.baseline_N,
        advantage_N=normalized(estimate) if normalize else estimate.advantage_N,
        in_baseline_N=in_baseline_N,
        trained_N=estimate.trained_N,
        exclusion_reason_N=reason_N,
        counts=_count(groups_N, usable_N, estimate.trained_N, reason_N, signal_G, selected_G, groups_wanted),
    )


def normalized(estimate: Estimate) -> np.ndarray:
    """(A - mean) / (standard deviation + 1e-4) over the trained rows, as TRL's normalize_advantages, float64 [N].

    The deviation is that of a sample (N - 1). Not unbiased: the step's length depends on the samples.
    """
    trained = np.sort(estimate.advantage_N[estimate.trained_N])
    if len(trained) < 2:
        return np.zeros_like(estimate.advantage_N)
    centred_N = estimate.advantage_N - trained.mean()
    return np.where(estimate.trained_N, centred_N / (trained.std(ddof=1) + 1e-4), 0.0)


def _clipped(rewards_N: np.ndarray, valid_N: np.ndarray, limits: tuple[float, float] | None) -> np.ndarray:
    reward_N = np.where(valid_N, np.asarray(rewards_N, np.float64), np.nan)
    return reward_N if limits is None else np.clip(reward_N, *limits)


def _penalized(reward_N: np.ndarray, kl_N: np.ndarray | None, beta: float) -> np.ndarray:
    if beta == 0:
        return reward_N
    if kl_N is None:
        raise UserError(f"advantages.beta is {beta} without reference log-probs; set logprobs.reference to true")
    return reward_N - beta * np.asarray(kl_N, np.float64)


def _check_finite(
    reward_N: np.ndarray,
    penalized_N: np.ndarray,
    kl_N: np.ndarray | None,
    groups_N: np.ndarray,
    valid_N: np.ndarray,
    names_G: Sequence[str],
) -> None:
    finite_N = np.isfinite(penalized_N) & (True if kl_N is None else np.isfinite(kl_N))
    bad = np.flatnonzero(valid_N & ~finite_N)
    if len(bad):
        row = int(bad[0])
        what = "KL" if np.isfinite(reward_N[row]) else "reward"
        raise UserError(
            f"row {row}, prompt_id {names_G[groups_N[row]]}: its {what} is not finite ({len(bad)} rows in all); "
            "a reward must be a number or null, and log-probs must be finite"
        )


def _reasons(*cases: tuple[np.ndarray, str | None]) -> np.ndarray:
    """The first case that holds of each row; one of them always does."""
    reason_N = np.full(len(cases[0][0]), None, dtype=object)
    for holds_N, reason in reversed(cases):
        reason_N[holds_N] = reason
    return reason_N


def _count(
    groups_N: np.ndarray,
    usable_N: np.ndarray,
    trained_N: np.ndarray,
    reason_N: np.ndarray,
    signal_G: np.ndarray,
    selected_G: np.ndarray,
    groups_wanted: int | None,
) -> Counts:
    usable_G = np.bincount(groups_N[usable_N], minlength=len(signal_G))
    rows = Counter(reason_N.tolist())
    return Counts(
        rows=len(groups_N),
        rows_trained=int(trained_N.sum()),
        rows_invalid=rows[INVALID],
        rows_masked=rows[MASKED],
        rows_without_signal=rows[NO_SIGNAL],
        rows_surplus=rows[SURPLUS],
        rows_without_sibling=rows[NO_SIBLING],
        rows_not_best=rows[NOT_BEST],
        groups=len(signal_G),
        groups_without_signal=int((~signal_G).sum()),
        groups_of_one_valid_row=int((usable_G == 1).sum()),
        groups_without_valid_rows=int((usable_G == 0).sum()),
        groups_trained=len(np.unique(groups_N[trained_N])),
        groups_surplus=int((signal_G & ~selected_G).sum()),
        groups_short=0 if groups_wanted is None else max(0, groups_wanted - int(signal_G.sum())),
    )
