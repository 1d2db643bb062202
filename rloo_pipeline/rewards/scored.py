"""What scoring a component gives, and what becomes of rows that could not be scored."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rloo_pipeline.errors import UserError
from rloo_pipeline.reward_config import RewardBase

TEXT_SHOWN = 200  # characters of a completion in a message


@dataclass(frozen=True)
class Scored:
    """Scores of one component: `scores_N` (float64, finite or NaN), and why a row could not be scored, by its index.

    NaN without an error means that the component does not apply to the row.
    """

    scores_N: npt.NDArray[np.float64]
    errors: Mapping[int, str] = field(default_factory=dict)


def place(rows: pa.Table, row: int) -> str:
    """How messages name a row of completions."""
    prompt_id, sample = rows["prompt_id"][row].as_py(), rows["sample_index"][row].as_py()
    return f"row {row + 1}, prompt_id {prompt_id}, sample_index {sample}"


def settle(config: RewardBase, rows: pa.Table, scored: Scored) -> Scored:
    """`scored` itself; raises UserError that names the first row with an error if config.on_error is fail."""
    if config.on_error == "fail" and scored.errors:
        row = min(scored.errors)
        text = rows["completion_text"][row].as_py()
        shown = f"{text[:TEXT_SHOWN]!r}{'...' if len(text) > TEXT_SHOWN else ''}"
        more = f" ({len(scored.errors)} rows in all)" if len(scored.errors) > 1 else ""
        raise UserError(
            f"reward {config.name}: {scored.errors[row]} ({place(rows, row)}, completion {shown}){more}; mend it, or "
            "leave such rows out with on_error: invalid"
        )
    return scored
