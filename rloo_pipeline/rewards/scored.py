"""What scoring a component gives, and what becomes of rows that could not be scored."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rloo_pipeline.errors import UserError
from rloo_pipeline.reward_config import RewardBase

TEXT_SHOWN = 200  # characters of a completion in a message


@dataclass(frozen=True)
class Scored:
    """Scores of one component: `scores_N` (float64, finite or NaN), and why a row could not be scored, by its index.

    NaN without an error means that the component does not apply to the row. `extra`: what a function logged of a row,
    by its index and column. `logged`: what it logged of calls, by name: the sum of value x rows, and the rows.
    """

    scores_N: npt.NDArray[np.float64]
    errors: Mapping[int, str] = field(default_factory=dict)
    extra: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    logged: Mapping[str, tuple[float, int]] = field(default_factory=dict)


Score = Callable[[pa.Table], dict[str, Scored]]  # of the components that are scored together, by name


def summed(logged: Sequence[Mapping[str, tuple[float, int]]]) -> dict[str, tuple[float, int]]:
    """What was logged of several calls as one: sums of value x rows, and rows, by name."""
    sums: dict[str, tuple[float, int]] = {}
    for part in logged:
        for name, (total, rows) in part.items():
            before = sums.get(name, (0.0, 0))
            sums[name] = (before[0] + total, before[1] + rows)
    return sums


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


def applies_to(config: RewardBase, rows: pa.Table) -> list[int] | None:
    """Indices of the rows whose column task is among config.tasks; None for all, where it names no tasks.

    Raises UserError if it names some and there is no such column.
    """
    if config.tasks is None:
        return None
    if "task" not in rows.column_names:
        raise UserError(
            f"reward {config.name}: tasks is {', '.join(config.tasks)}, but the prompts have no column task; add it to "
            "the dataset, or remove tasks so that the reward applies to every row"
        )
    among = pc.is_in(rows["task"].cast(pa.string()), value_set=pa.array(config.tasks))
    return [row for row, applies in enumerate(among.to_pylist()) if applies]


def spread(scored: Scored, which: Sequence[int] | None, count: int) -> Scored:
    """Scores of the rows `which` among `count` rows, NaN in all others."""
    if which is None:
        return scored
    scores_N = np.full(count, np.nan)
    scores_N[list(which)] = scored.scores_N
    errors = {which[row]: reason for row, reason in scored.errors.items()}
    return Scored(scores_N, errors, {which[row]: extra for row, extra in scored.extra.items()}, scored.logged)


def as_stored(scored: Scored) -> Scored:
    """Scores as float32 holds them, in float64; those that it cannot hold are errors."""
    with np.errstate(over="ignore"):
        scores_N = scored.scores_N.astype(np.float32).astype(np.float64)
    errors = dict(scored.errors)
    for row in np.flatnonzero(np.isinf(scores_N)).tolist():
        errors[row] = f"gave {scored.scores_N[row]:g}, which float32 cannot hold"
        scores_N[row] = np.nan
    return Scored(scores_N, errors, scored.extra, scored.logged)
