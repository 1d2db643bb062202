"""Groups of completions that share a prompt, addressed by an integer index per row, in any row order."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from rloo_pipeline.errors import UserError

WithoutSignal = Literal["keep", "drop", "resample"]
SINGLE = 4 * float(np.finfo(np.float32).eps)  # stored rewards are rounded: a smaller share of them is no difference


def index_groups(prompt_ids_N: Sequence[str]) -> tuple[np.ndarray, list[str]]:
    """Group index of each row, int64 [N], and the prompt ids [G] by group index, in order of first appearance."""
    names_G = list(dict.fromkeys(prompt_ids_N))
    position = {name: index for index, name in enumerate(names_G)}
    return np.fromiter((position[name] for name in prompt_ids_N), np.int64, len(prompt_ids_N)), names_G


def check_group_sizes(groups_N: np.ndarray, names_G: Sequence[str], completions_per_prompt: int) -> None:
    """Raises UserError that names the first group without exactly K rows, invalid rows included."""
    counts_G = np.bincount(groups_N, minlength=len(names_G))
    wrong_G = np.flatnonzero(counts_G != completions_per_prompt)
    if len(wrong_G):
        first = int(wrong_G[0])
        raise UserError(
            f"prompt_id {names_G[first]}: {counts_G[first]} completions where completions_per_prompt is "
            f"{completions_per_prompt} ({len(wrong_G)} of {len(names_G)} groups have a wrong size); "
            "look for rows that were lost, doubled or given a wrong prompt_id, or generate the rollouts anew"
        )


def group_sums(values_N: np.ndarray, groups_N: np.ndarray, groups: int) -> np.ndarray:
    """Sum of each group, float64 [G]; the same to the last bit for every order of the rows."""
    order = np.lexsort((values_N, groups_N))
    return np.bincount(groups_N[order], weights=values_N[order], minlength=groups)


def group_minima(values_N: np.ndarray, groups_N: np.ndarray, groups: int) -> np.ndarray:
    """Least value of each group, float64 [G]; inf for an empty group."""
    low_G = np.full(groups, np.inf)
    np.minimum.at(low_G, groups_N, values_N)
    return low_G


def informative(
    rewards_N: np.ndarray, groups_N: np.ndarray, valid_N: np.ndarray, groups: int, scale_N: np.ndarray | None = None
) -> np.ndarray:
    """Whether the valid rewards of a group differ by more than their rounding, bool [G].

    A group with fewer than two valid rows has no signal. scale_N: size of what a reward was computed from, of which
    the rounding is a share; |rewards_N| if None.
    """
    values, rows = rewards_N[valid_N], groups_N[valid_N]
    scale = np.abs(rewards_N if scale_N is None else scale_N)[valid_N]
    low_G, high_G = group_minima(values, rows, groups), -group_minima(-values, rows, groups)
    rounding_G = SINGLE * np.maximum(-group_minima(-scale, rows, groups), 0.0)
    with np.errstate(invalid="ignore"):  # an empty group is from inf to -inf
        differ_G: np.ndarray = high_G > low_G + rounding_G
    return differ_G


def levelled(rewards_N: np.ndarray, groups_N: np.ndarray, level_N: np.ndarray) -> np.ndarray:
    """The rewards, but in the rows of level_N each group's least of them, float64 [N]."""
    rows = groups_N[level_N]
    levelled_N = rewards_N.copy()
    levelled_N[level_N] = group_minima(rewards_N[level_N], rows, int(groups_N.max(initial=-1)) + 1)[rows]
    return levelled_N


def select_groups(informative_G: np.ndarray, without_signal: WithoutSignal, wanted: int | None = None) -> np.ndarray:
    """Which groups are trained on, bool [G]: all, the informative ones, or the first `wanted` informative ones.

    resample is dynamic sampling (Yu et al. 2025, arXiv:2503.14476, DAPO) over prompts drawn in surplus beforehand;
    the order is that of the group indices. Whole groups are taken or left, never rows. Raises ValueError on resample
    without `wanted`.
    """
    if without_signal == "keep":
        return np.ones_like(informative_G)
    if without_signal == "drop":
        return informative_G.copy()
    if wanted is None:
        raise ValueError("resample needs the number of groups wanted")
    return informative_G & (np.cumsum(informative_G) <= wanted)
