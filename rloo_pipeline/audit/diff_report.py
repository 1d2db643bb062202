"""The differences of two iterations as tables for people; text from data and models is printed as it is, escaped."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rloo_pipeline.audit.artifacts import SOURCE
from rloo_pipeline.audit.compare import printable, shown

Result = Mapping[str, Any]
SPREAD = ("mean", "std", "min", "median", "max")


def show(result: Result, limit: int) -> None:
    """Print what differs, the largest first, at most `limit` lines of each kind."""
    console = Console()
    names = [printable(result[side]["name"]) for side in ("a", "b")]
    _plain(console, f"A = {names[0]}   B = {names[1]}")
    _plain(console, _stages(result["stages"]))
    for line in result["left_out"]:
        _plain(console, printable(line))
    _table(
        console,
        f"settings: {len(result['settings'])} differ",
        ("name", "A", "B", "stages"),
        [
            (printable(item["name"]), _setting(item, "a"), _setting(item, "b"), ", ".join(item["stages"]))
            for item in result["settings"]
        ],
    )
    if "prompts" in result:
        _prompts(console, result["prompts"], limit)
        _completions(console, result["completions"])
    _spread(console, result["columns"])
    equal = [name for name, column in result["columns"].items() if not column["different"]]
    if equal:
        _plain(console, f"no row with a partner differs in {', '.join(map(printable, equal))}")
    for name, column in result["columns"].items():
        if column["different"]:
            _examples(console, name, column)
    _metrics(console, result["metrics"], limit)


def _stages(stages: Mapping[str, Result]) -> str:
    same, other = ([name for name, stage in stages.items() if stage["same"] is state] for state in (True, False))
    return f"outputs with equal fingerprints: {', '.join(same) or 'none'}; others: {', '.join(other) or 'none'}"


def _prompts(console: Console, prompts: Result, limit: int) -> None:
    _plain(
        console,
        f"prompts: {prompts['a']} in A, {prompts['b']} in B, {prompts['shared']} in both, "
        f"{prompts['text_differs']} of these with another text",
    )
    for side in ("a", "b"):
        only = prompts[f"only_{side}"]
        if only:
            some = ", ".join(printable(name) for name in only[:limit])
            _plain(console, f"  only in {side.upper()} ({len(only)}): {some}{', ...' if len(only) > limit else ''}")


def _completions(console: Console, completions: Result) -> None:
    _table(
        console,
        f"completions: {completions['a']} in A, {completions['b']} in B, {completions['shared']} with a partner of the "
        f"same prompt and sample, {completions['different']} of these differ",
        ("prompt", "sample", "tokens", "first", "A", "B"),
        [
            (
                *_key(example),
                str(example["tokens_different"]),
                str(example["first_token"]),
                shown(example["a"]),
                shown(example["b"]),
            )
            for example in completions["examples"]
        ],
    )


def _spread(console: Console, columns: Mapping[str, Result]) -> None:
    rows = [
        (printable(name) if side == "a" else "", side.upper(), str(column[side]["rows"]), str(column[side]["null"]),
         *(_number(column[side].get(key)) for key in SPREAD))
        for name, column in columns.items()
        for side in ("a", "b")
        if any("mean" in column[key] for key in ("a", "b"))
    ]  # fmt: skip
    _table(console, "rewards and advantages, all rows", ("column", "", "rows", "null", *SPREAD), rows)


def _examples(console: Console, name: str, column: Result) -> None:
    largest = "" if column["largest"] is None else f", by {_number(column['largest'])} at most"
    _table(
        console,
        f"{printable(name)}: {column['different']} of {column['shared']} rows with a partner differ{largest}",
        ("prompt", "sample", "A", "B", "difference"),
        [
            (*_key(example), shown(example["a"]), shown(example["b"]), _number(example["difference"]))
            for example in column["examples"]
        ],
    )


def _metrics(console: Console, metrics: Sequence[Result], limit: int) -> None:
    more = f", the {limit} largest" if len(metrics) > limit else ""
    _table(
        console,
        f"metrics: {len(metrics)} differ{more}",
        ("name", "A", "B", "difference"),
        [
            (printable(metric["name"]), shown(metric["a"]), shown(metric["b"]), _number(metric["difference"]))
            for metric in metrics[:limit]
        ],
    )


def _setting(item: Result, side: str) -> str:
    value = item[side]
    return str(value)[:12] if item["name"].startswith(SOURCE) else shown(value)


def _key(example: Result) -> tuple[str, str]:
    return printable(example["prompt_id"]), str(example["sample_index"])


def _number(value: float | None) -> str:
    """Four digits, and what is below 1e-6 as 0: rounding of float64 is no difference to look at."""
    return "-" if value is None else f"{round(value, 6) + 0.0:.4g}"


def _plain(console: Console, line: str) -> None:
    console.print(Text(line), soft_wrap=True)


def _table(console: Console, title: str, headings: Iterable[str], rows: Sequence[Sequence[str]]) -> None:
    """A heading line, and a table if there are rows. Cells are Text, so that no markup in them counts."""
    _plain(console, title)
    if not rows:
        return
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading in ("rows", "null", *SPREAD))
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
