"""The metrics of all iterations as one list, for plots and for the table of the run."""

import json
from pathlib import Path
from typing import Any

from rloo_pipeline.config import Params
from rloo_pipeline.errors import UserError
from rloo_pipeline.files import write_json
from rloo_pipeline.layout import INITIAL, STAGES, Layout

Row = dict[str, Any]


def read_numbers(path: Path, only: str | None = None) -> dict[str, Any]:
    """The values in a file, or only one of them; none without it. Raises UserError unless they are numbers or null."""
    try:
        values = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(values, dict):
        raise _damaged(path, "it holds no values by name")
    chosen = {name: value for name, value in values.items() if only in (None, name)}
    for name, value in chosen.items():
        if not isinstance(value, int | float | None):
            raise _damaged(path, f"{name} is no number")
    return chosen


def _damaged(path: Path, why: str) -> UserError:
    return UserError(
        f"{path}: not readable as {path.parts[-3]} ({why}); restore it from git, or remove it and `dvc repro`"
    )


def collect(layout: Layout, params: Params) -> list[Row]:
    """One row for each iteration, the initial policy first: id and every metric as <stage>/<name>; raises UserError."""
    rows = []
    for iteration in (INITIAL, *params.iterations):
        row: Row = {"iteration": iteration}
        for stage in STAGES:
            metrics = read_numbers(layout.metrics(stage, iteration))
            row |= {f"{stage}/{name}": value for name, value in metrics.items()}
        rows.append(row)
    return rows


def run(layout: Layout, params: Params) -> None:
    """Write the history, every key in every row, null where it has no value: `dvc plots` shows nothing otherwise."""
    rows = collect(layout, params)
    keys = sorted({key for row in rows for key in row})
    write_json(layout.history, [{key: row.get(key) for key in keys} for row in rows], staging=layout.state)


def seconds(layout: Layout, iteration: str) -> float:
    """How long the stages of an iteration took, in all."""
    files = [read_numbers(layout.timings(stage, iteration), only="seconds") for stage in STAGES]
    return float(sum(values.get("seconds") or 0.0 for values in files))
