"""How components make one reward."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rloo_pipeline.reward_config import RewardBase
from rloo_pipeline.rewards.scored import Scored

Floats = npt.NDArray[np.float64]
NONE_APPLIES = "no reward applies: every component with a weight returned None"


def combine(configs: Sequence[RewardBase], scored: Mapping[str, Scored]) -> Floats:
    """`reward_N` (float64): the weighted sum of the clipped scores that apply, NaN where none does or one failed.

    A component of weight 0 neither enters the sum nor makes a row valid or invalid.
    """
    weighted = [config for config in configs if config.weight != 0]
    count = len(next(iter(scored.values())).scores_N)
    reward_N, applies_N = np.zeros(count), np.zeros(count, bool)
    failed_N = np.zeros(count, bool)
    for config in weighted:
        scores_N = clipped(config, scored[config.name].scores_N)
        applies_N |= ~np.isnan(scores_N)
        reward_N += config.weight * np.nan_to_num(scores_N, posinf=np.inf, neginf=-np.inf)
        failed_N[list(scored[config.name].errors)] = True
    return np.where(applies_N & ~failed_N, reward_N, np.nan)


def clipped(config: RewardBase, scores_N: Floats) -> Floats:
    """The scores between the component's limits, if it has any."""
    return scores_N if config.clip is None else np.clip(scores_N, *config.clip)


def reasons(configs: Sequence[RewardBase], scored: Mapping[str, Scored], reward_N: Floats) -> list[str | None]:
    """For each row which components failed and why, or that none applies; None where all is well."""
    told: list[list[str]] = [[] for _ in reward_N]
    for config in configs:
        for row, reason in scored[config.name].errors.items():
            told[row].append(f"{config.name}: {reason}")
    for row in np.flatnonzero(np.isnan(reward_N)).tolist():
        if not any(row in scored[config.name].errors for config in configs if config.weight != 0):
            told[row].append(NONE_APPLIES)
    return ["; ".join(lines) or None for lines in told]


def extras(configs: Sequence[RewardBase], scored: Mapping[str, Scored], count: int) -> list[str | None]:
    """What functions logged of each row, as a JSON object by column; None where they logged nothing.

    A column that an earlier component logged of the row too has its component's name in front.
    """
    rows: list[dict[str, Any]] = [{} for _ in range(count)]
    for config in configs:
        for row, columns in scored[config.name].extra.items():
            for column, value in columns.items():
                rows[row][f"{config.name}/{column}" if column in rows[row] else column] = value
    return [json.dumps(row, sort_keys=True, ensure_ascii=False) if row else None for row in rows]
