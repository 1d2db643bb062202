"""From rewards and KL to the advantages of one iteration's completions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rloo_pipeline.errors import UserError
from rloo_pipeline.objective.baselines import leave_one_out
from rloo_pipeline.objective.groups import check_group_sizes, informative

INVALID = "no valid reward"
NO_SIBLING = "no valid sibling to compare with"


@dataclass(frozen=True)
class Counts:
    """Rows and groups of one iteration by what became of them."""

    rows: int
    rows_invalid: int
    rows_trained: int
    groups: int
    groups_without_signal: int  # fewer than two distinct valid rewards before the KL; contains the two below
    groups_of_one_valid_row: int
    groups_without_valid_rows: int


@dataclass(frozen=True)
class Advantages:
    """The columns of the advantages artifact, in the rows' own order; NaN where a value does not exist."""

    reward_N: np.ndarray  # float64
    kl_N: np.ndarray  # float64, nats
    penalized_reward_N: np.ndarray  # float64
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
) -> Advantages:
    """Advantages A_i = R_i - b_i with R_i = clip(reward_i) - beta * kl_i and the leave-one-out baseline b_i of R.

    rewards_N, kl_N: float [N], kl_N None without a reference; groups_N: index into names_G, any row order; valid_N:
    rows with a usable reward. Raises UserError on K < 2, on groups without exactly K rows, on a valid reward or a KL
    that is not finite, and on beta > 0 without kl_N.
    """
    if completions_per_prompt < 2:
        raise UserError(
            f"completions_per_prompt is {completions_per_prompt}: the leave_one_out baseline of a completion is the "
            "mean reward of its siblings, and a single completion has none; use at least 2"
        )
    check_group_sizes(groups_N, names_G, completions_per_prompt)
    reward_N = _clipped(rewards_N, valid_N, reward_clip_range)
    penalized_N = _penalized(reward_N, kl_N, beta)
    _check_finite(reward_N, penalized_N, groups_N, valid_N, names_G)
    baseline_N = leave_one_out(penalized_N, groups_N, valid_N)
    valid_G = np.bincount(groups_N[valid_N], minlength=len(names_G))
    trained_N = valid_N & (valid_G[groups_N] > 1)
    return Advantages(
        reward_N=reward_N,
        kl_N=np.full(len(reward_N), np.nan) if kl_N is None else np.asarray(kl_N, np.float64),
        penalized_reward_N=penalized_N,
        baseline_N=baseline_N,
        advantage_N=np.where(trained_N, penalized_N - baseline_N, 0.0),
        in_baseline_N=valid_N.copy(),
        trained_N=trained_N,
        exclusion_reason_N=_reasons(valid_N, trained_N),
        counts=_count(reward_N, groups_N, valid_N, trained_N, valid_G),
    )


def _clipped(rewards_N: np.ndarray, valid_N: np.ndarray, limits: tuple[float, float] | None) -> np.ndarray:
    reward_N = np.where(valid_N, np.asarray(rewards_N, np.float64), np.nan)
    return reward_N if limits is None else np.clip(reward_N, *limits)


def _penalized(reward_N: np.ndarray, kl_N: np.ndarray | None, beta: float) -> np.ndarray:
    if beta == 0:
        return reward_N
    if kl_N is None:
        raise UserError(f"advantages.beta is {beta} without reference log-probs; set logprobs.reference to true")
    return reward_N - beta * np.asarray(kl_N, np.float64)


def _reasons(valid_N: np.ndarray, trained_N: np.ndarray) -> np.ndarray:
    reason_N = np.full(len(valid_N), None, dtype=object)
    reason_N[~trained_N] = NO_SIBLING
    reason_N[~valid_N] = INVALID
    return reason_N


def _check_finite(
    reward_N: np.ndarray, penalized_N: np.ndarray, groups_N: np.ndarray, valid_N: np.ndarray, names_G: Sequence[str]
) -> None:
    bad = np.flatnonzero(valid_N & ~np.isfinite(penalized_N))
    if len(bad):
        row = int(bad[0])
        what = "KL" if np.isfinite(reward_N[row]) else "reward"
        raise UserError(
            f"row {row}, prompt_id {names_G[groups_N[row]]}: its {what} is not finite ({len(bad)} rows in all); "
            "a reward must be a number or null, and log-probs must be finite"
        )


def _count(
    reward_N: np.ndarray, groups_N: np.ndarray, valid_N: np.ndarray, trained_N: np.ndarray, valid_G: np.ndarray
) -> Counts:
    signal_G = informative(reward_N, groups_N, valid_N, len(valid_G))
    return Counts(
        rows=len(reward_N),
        rows_invalid=int((~valid_N).sum()),
        rows_trained=int(trained_N.sum()),
        groups=len(valid_G),
        groups_without_signal=int((~signal_G).sum()),
        groups_of_one_valid_row=int((valid_G == 1).sum()),
        groups_without_valid_rows=int((valid_G == 0).sum()),
    )
