"""How components make one reward."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def combine(components: Mapping[str, Floats], weights: Mapping[str, float]) -> Floats:
    """`reward_N` (float64): the weighted sum of the components that apply, NaN where none does.

    In `components[name]` ([N], float64) NaN means that the component does not apply to the row.
    """
    scores_CN = np.stack([np.asarray(values, np.float64) for values in components.values()])
    weights_C = np.array([weights[name] for name in components], np.float64)
    applies_CN = ~np.isnan(scores_CN)
    reward_N = (weights_C[:, None] * np.where(applies_CN, scores_CN, 0.0)).sum(axis=0)
    return np.where(applies_CN.any(axis=0), reward_N, np.nan)
