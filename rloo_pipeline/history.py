"""The metrics of all iterations as one list, for plots and for the closing table."""

import json
from pathlib import Path
from typing import Any

from rloo_pipeline.config import Params
from rloo_pipeline.errors import UserError
from rloo_pipeline.files import write_json
from rloo_pipeline.layout import INITIAL, REWARD_MODEL, STAGES, Layout

Row = dict[str, Any]


def _read(path: Path, only: str | None = None) -> dict[str, Any]:
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
            metrics = _read(layout.metrics(stage, iteration))
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
    files = [_read(layout.timings(stage, iteration), only="seconds") for stage in STAGES]
    return float(sum(values.get("seconds") or 0.0 for values in files))


def show(layout: Layout, params: Params) -> None:
    """Print the table of the run: rewards, win rate, KL, groups without signal, seconds; above it the reward models."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    # In the 80 columns of a log, headings may wrap, figures not.
    table = Table(title="RLOO run", box=SIMPLE_HEAD)
    for title in ("id", "train reward", "held-out reward (95%)", "win rate", "KL", "no signal", "sec"):
        table.add_column(title, justify="right", no_wrap=title.startswith("held-out"))
    for row in collect(layout, params):
        reward, low, high = (_number(row, f"evaluate/reward{end}", ".3f") for end in ("", "_low", "_high"))
        table.add_row(
            row["iteration"],
            _number(row, "advantages/reward", ".3f"),
            "-" if reward == "-" else f"{reward} ({low} to {high})",
            _number(row, "evaluate/win_rate", ".3f"),
            _number(row, "evaluate/kl", ".3f"),
            _number(row, "advantages/frac_reward_zero_std", ".0%"),
            f"{seconds(layout, row['iteration']):.0f}",
        )
    for name in params.reward_models:
        print(reward_model(layout, name))
    Console().print(table)


def reward_model(layout: Layout, name: str) -> str:
    """One line on what held-out pairs say of a reward model."""
    found = _read(layout.metrics(REWARD_MODEL, name))
    if not found:
        return f"reward model {name}: not trained yet"
    accuracy, low, high, error = (
        _number(found, key, ".3f") for key in ("accuracy", "accuracy_low", "accuracy_high", "calibration_error")
    )
    return (
        f"reward model {name}: held-out pairs won {accuracy} (95% {low} to {high}) of {found.get('eval_pairs')}, "
        f"calibration error {error}"
    )


def verdict(rows: list[Row]) -> str:
    """Whether the held-out reward of the last evaluated policy is above the initial one, its interval clear of it."""
    evaluated = [row for row in rows if row.get("evaluate/reward") is not None]
    if len(evaluated) < 2 or evaluated[0]["iteration"] != INITIAL:
        return "held-out reward: nothing to compare with the initial policy yet"
    before, last = evaluated[0]["evaluate/reward"], evaluated[-1]
    after, low, high = (last[f"evaluate/reward{end}"] for end in ("", "_low", "_high"))
    what = f"held-out reward {before:.3f} before, {after:.3f} after {last['iteration']} (95% {low:.3f} to {high:.3f})"
    if low > before:
        return f"{what}: improved{_times(before, after)}, the interval is clear of the initial value"
    return f"{what}: no improvement that the interval is clear of"


def _number(row: Row, name: str, form: str) -> str:
    return "-" if row.get(name) is None else format(row[name], form)


def _times(before: float, after: float) -> str:
    return f" {after / before:.1f} times" if before > 0 else ""
