"""What differs between two tables, joined by key and never by row order, and between two trees of JSON values."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rloo_pipeline.audit.differences import Array, differences, first_difference, unnamed, whole
from rloo_pipeline.errors import UserError
from rloo_pipeline.schema import KEY_NAMES


@dataclass(frozen=True)
class Cell:
    """Where two cells of one row begin to differ.

    position: of the list element, or of the character in a string; None for anything else, and where one is null.
    left, right: the whole strings, else the values at `position`; None for null and behind the end of a list.
    """

    key: tuple[Any, ...]
    column: str
    position: int | None
    left: Any
    right: Any


@dataclass(frozen=True)
class ColumnDifference:
    """The M rows in which a column differs, in key order: keys and both values, and how far apart they are.

    values_M: how many values differ in a row (elements of a list that differ or have no partner; else 1).
    sizes_M: largest absolute difference between two numbers of a row, float64; NaN where no numbers differ.
    """

    column: str
    keys: pa.Table
    left: pa.Array
    right: pa.Array
    values_M: Array
    sizes_M: Array

    @property
    def rows(self) -> int:
        """How many rows differ (M)."""
        return len(self.values_M)

    @property
    def values(self) -> int:
        """How many values differ."""
        return int(self.values_M.sum())

    @property
    def largest(self) -> float | None:
        """Largest absolute difference between two numbers; None if no numbers differ."""
        sizes_M = self.sizes_M[~np.isnan(self.sizes_M)]
        return float(sizes_M.max()) if len(sizes_M) else None

    def cell(self, row: int) -> Cell:
        """The difference in the row at this place among the M."""
        key = tuple(self.keys[name][row].as_py() for name in self.keys.column_names)
        left, right = self.left[row].as_py(), self.right[row].as_py()
        if isinstance(left, str) and isinstance(right, str):
            return Cell(key, self.column, first_difference(left, right), left, right)
        if isinstance(left, list) and isinstance(right, list):
            position = first_difference(left, right)
            return Cell(key, self.column, position, _at(left, position), _at(right, position))
        return Cell(key, self.column, None, left, right)

    def largest_first(self, limit: int | None = None) -> list[Cell]:
        """The differences, the largest number first, those without numbers last, equal ones in key order."""
        order = np.argsort(np.nan_to_num(-self.sizes_M, nan=np.inf), kind="stable")
        return [self.cell(int(row)) for row in order[:limit]]


@dataclass(frozen=True)
class Comparison:
    """What differs between two tables.

    rows: how many keys both have. only_left, only_right: key columns of the rows without a partner, in key order.
    columns_only_left, columns_only_right, retyped (both types): columns whose values are not compared.
    columns: those that differ, in the order of the left table.
    """

    rows: int
    only_left: pa.Table
    only_right: pa.Table
    columns_only_left: list[str]
    columns_only_right: list[str]
    retyped: dict[str, tuple[str, str]]
    columns: list[ColumnDifference]

    @cached_property
    def first(self) -> Cell | None:
        """The difference in the first row in key order that has one, in its first column that does."""
        heads = [(cell.key, index, cell) for index, cell in enumerate(c.cell(0) for c in self.columns)]
        return min(heads, key=lambda head: head[:2])[2] if heads else None

    @property
    def identical(self) -> bool:
        """Whether the tables hold the same rows, columns, types and values, in whatever order."""
        return not (
            self.only_left.num_rows
            or self.only_right.num_rows
            or self.columns_only_left
            or self.columns_only_right
            or self.retyped
            or self.columns
        )


def compare_tables(left: pa.Table, right: pa.Table, keys: Sequence[str] = KEY_NAMES) -> Comparison:
    """What differs between two tables, rows joined by `keys`; raises UserError if a key stands twice in one.

    Null equals null, NaN equals NaN, 0.0 and -0.0 differ, as in fingerprints. Columns of another type count as
    different without a look at their values.
    """
    keys = list(keys)
    left, right = _ordered(left, keys), _ordered(right, keys)
    in_left, in_right = _partners(left, right, keys)
    both_left, both_right = left.filter(in_left), right.filter(in_right)
    shared = [name for name in left.column_names if name in right.column_names and name not in keys]
    types = {name: (_kind(left, name), _kind(right, name)) for name in shared}
    same = [name for name in shared if types[name][0] == types[name][1]]
    found = [_column(name, both_left, both_right, keys) for name in same]
    return Comparison(
        rows=both_left.num_rows,
        only_left=left.select(keys).filter(pc.invert(in_left)),
        only_right=right.select(keys).filter(pc.invert(in_right)),
        columns_only_left=[name for name in left.column_names if name not in right.column_names],
        columns_only_right=[name for name in right.column_names if name not in left.column_names],
        retyped={name: types[name] for name in shared if name not in same},
        columns=[column for column in found if column.rows],
    )


@dataclass(frozen=True)
class Change:
    """A value that differs between two trees of JSON values; `side`: both, or the only one that has it."""

    name: str
    side: str
    left: Any
    right: Any

    @property
    def size(self) -> float | None:
        """Absolute difference of two numbers; None for anything else."""
        numbers = [value for value in (self.left, self.right) if isinstance(value, int | float)]
        both = len(numbers) == 2 and not any(isinstance(value, bool) for value in numbers)
        return abs(float(self.left) - float(self.right)) if both else None


def compare_values(left: Any, right: Any) -> list[Change]:
    """What differs between two trees of JSON values (params, metrics, facts), by dotted name, sorted."""
    ours, theirs = dict(_leaves(left)), dict(_leaves(right))
    changes = []
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs:
            changes.append(Change(name, "left", ours[name], None))
        elif name not in ours:
            changes.append(Change(name, "right", None, theirs[name]))
        elif ours[name] != theirs[name] or isinstance(ours[name], bool) != isinstance(theirs[name], bool):
            changes.append(Change(name, "both", ours[name], theirs[name]))
    return changes


def shown(value: Any, position: int | None = None, width: int = 48) -> str:
    """A value for people on one line: control characters escaped, a long string cut around `position`."""
    if isinstance(value, str):
        start = max(0, (position or 0) - width // 4) if len(value) > width else 0
        cut = value[start : start + width]
        return ("..." if start else "") + repr(cut) + ("..." if start + width < len(value) else "")
    if isinstance(value, float):
        return f"{value:.9g}"
    text = repr(value)
    return text if len(text) <= width else text[:width] + "..."


def printable(text: str) -> str:
    """The text on one line, with line breaks, control characters and marks of direction as escapes."""
    return "".join(mark if mark.isprintable() else repr(mark)[1:-1] for mark in text)


def jsonable(value: Any) -> Any:
    """The value as strict JSON can hold it: NaN and infinities as strings, and whatever JSON has no type for."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    known = value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))
    return value if known else str(value)


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if items is None or not value:
        yield name, value
        return
    for key, item in items:
        yield from _leaves(item, f"{name}.{key}" if name else str(key))


def _ordered(table: pa.Table, keys: list[str]) -> pa.Table:
    table = table.sort_by([(name, "ascending") for name in keys]).combine_chunks()
    repeated = table.group_by(keys).aggregate([([], "count_all")]).filter(pc.field("count_all") > 1)
    if repeated.num_rows:
        raise UserError(
            f"{_key(repeated, keys, 0)} stands {repeated['count_all'][0]} times in one artifact; make it again"
        )
    return table


def _partners(left: pa.Table, right: pa.Table, keys: list[str]) -> tuple[pa.Array, pa.Array]:
    """Whether each row of either table has a partner in the other, bool."""
    numbered = [table.select(keys).append_column("row", pa.array(np.arange(table.num_rows))) for table in (left, right)]
    joined = numbered[0].join(numbered[1].cast(numbered[0].schema), keys, join_type="inner", right_suffix="_right")
    found = []
    for table, name in ((left, "row"), (right, "row_right")):
        mask = np.zeros(table.num_rows, bool)
        mask[joined[name].to_numpy()] = True
        found.append(pa.array(mask))
    return found[0], found[1]


def _kind(table: pa.Table, name: str) -> str:
    return str(unnamed(table.schema.field(name).type))


def _column(name: str, left: pa.Table, right: pa.Table, keys: list[str]) -> ColumnDifference:
    ours, theirs = whole(left[name]), whole(right[name])
    values_N, sizes_N = differences(ours, theirs)
    rows_M = np.flatnonzero(values_N)
    taken = pa.array(rows_M)
    return ColumnDifference(
        name, left.select(keys).take(taken), ours.take(taken), theirs.take(taken), values_N[rows_M], sizes_N[rows_M]
    )


def _at(values: list[Any], position: int) -> Any:
    return values[position] if position < len(values) else None


def _key(table: pa.Table, keys: Sequence[str], row: int) -> str:
    return ", ".join(f"{name} {table[name][row].as_py()}" for name in keys)
