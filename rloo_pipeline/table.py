"""The table of a run, for people."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rloo_pipeline.config import Params
from rloo_pipeline.history import Row, collect, read_numbers, seconds
from rloo_pipeline.layout import INITIAL, REWARD_MODEL, Layout
from rloo_pipeline.schema import reward_column

if TYPE_CHECKING:
    from rich.table import Table

DATASET = "evaluate/win_rate_dataset"


def show(layout: Layout, params: Params) -> None:
    """Print the reward models, the table of the run, and below it what else was measured on held-out prompts."""
    from rich.console import Console

    rows = collect(layout, params)
    for name in params.reward_models:
        print(reward_model(layout, name))
    console = Console()
    console.print(_of_the_run(layout, rows))
    names = [reward.name for reward in params.rewards] if len(params.rewards) > 1 else []
    if names or any(DATASET in row for row in rows):
        console.print(_held_out(rows, names))


def _of_the_run(layout: Layout, rows: list[Row]) -> "Table":
    # In the 80 columns of a log, headings may wrap, figures not.
    table = _table("RLOO run", ("id", "train reward", "held-out reward (95%)", "win rate", "KL", "no signal", "sec"))
    for row in rows:
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
    return table


def _held_out(rows: list[Row], names: list[str]) -> "Table":
    """The mean score of each component, and the win rate against the dataset's own completions."""
    against = any(DATASET in row for row in rows)
    table = _table("held-out prompts", ("id", *names, *(["wins over the dataset (95%)"] if against else [])))
    for row in rows:
        cells = [_number(row, f"evaluate/{reward_column(name)}", ".3f") for name in names]
        if against:
            rate, low, high = (_number(row, f"{DATASET}{end}", ".3f") for end in ("", "_low", "_high"))
            cells.append("-" if rate == "-" else f"{rate} ({low} to {high})")
        table.add_row(row["iteration"], *cells)
    return table


def _table(title: str, columns: Sequence[str]) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, box=SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right", no_wrap="95%" in column)
    return table


def reward_model(layout: Layout, name: str) -> str:
    """One line on what held-out pairs say of a reward model."""
    found = read_numbers(layout.metrics(REWARD_MODEL, name))
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
