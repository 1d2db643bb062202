"""Which rows and columns of a dataset are used: columns renamed, then `where`, then `filter`, all by the new names."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rloo_pipeline.data_config import Scalar, TableConfig
from rloo_pipeline.errors import UserError
from rloo_pipeline.rewards.sources import load_callable

Indices = npt.NDArray[np.int64]
FILTER_ROWS = 1000  # rows that are Python objects at the same time


@dataclass(frozen=True)
class LeftOut:
    """How many rows of a dataset one condition leaves out; each row counts at the first that it fails."""

    dataset: str
    kind: Literal["where", "filter"]
    reason: str
    rows: int


@dataclass(frozen=True)
class Rows:
    """The rows that are used, `places_N` (which rows of the dataset they are, from 0), and what was left out."""

    source: str
    table: pa.Table
    places_N: Indices
    left_out: tuple[LeftOut, ...] = ()

    def place(self, index: int | np.int64, column: str | None = None) -> str:
        """How messages name the row at `index` of the table: by its number in the dataset, from 1."""
        of_column = "" if column is None else f", column {column}"
        return f"{self.source}{of_column}, row {self.places_N[index] + 1}"


def keep(table: pa.Table, dataset: TableConfig, source: str, root: Path) -> Rows:
    """Apply the dataset's columns, where and filter; UserError for an unknown column, a bad value, or no row left."""
    table = _takeable(rename(table, dataset.columns, source))
    conditions = [_Where(name, wanted) for name, wanted in dataset.where.items()]
    kept = Rows(source, table, np.arange(table.num_rows, dtype=np.int64))
    for condition in conditions:
        kept = _apply(kept, condition.mask(kept.table, source), "where", condition.reason)
    if dataset.filter is not None:
        passed_N = _passed(kept, dataset.filter, load_callable(dataset.filter, root))
        kept = _apply(kept, passed_N, "filter", f"{dataset.filter} is false")
    if table.num_rows and not kept.table.num_rows:
        raise UserError(
            f"{source}: none of {table.num_rows} rows is kept ({told(kept.left_out)}); mend where or filter"
        )
    return kept


def told(left_out: Sequence[LeftOut]) -> str:
    """The conditions and their counts as messages tell them."""
    return "; ".join(f"{item.kind}: {item.reason}: {item.rows} rows" for item in left_out)


def rename(table: pa.Table, columns: Mapping[str, str], source: str) -> pa.Table:
    """The table with `columns` (new name to old) renamed, the others as they are.

    Raises UserError if an old name is missing or a name would be there twice.
    """
    there = table.column_names
    for new, old in columns.items():
        if old not in there:
            raise UserError(f"{source}: columns: {new}: no column {old}; there are {', '.join(there)}")
    names, places = [], []
    for place, old in enumerate(there):
        wanted = [new for new, name in columns.items() if name == old] or [old]
        names += wanted
        places += [place] * len(wanted)
    for name in names:
        if names.count(name) > 1:
            mend = f"columns: give {name} another name too" if name in columns else "rename one"
            raise UserError(f"{source}: two columns have the name {name}; {mend}")
    return table.select(places).rename_columns(names)


def _takeable(table: pa.Table) -> pa.Table:
    """The table without views, which Arrow cannot filter or take, and dictionaries, also within lists and structs."""
    return table.cast(pa.schema([field.with_type(_simple(field.type)) for field in table.schema]))


def _simple(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _simple(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        made = pa.list_ if pa.types.is_list(kind) else pa.large_list
        return made(kind.value_field.with_type(_simple(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_simple(field.type)) for field in kind])
    return kind


def _apply(rows: Rows, kept_N: npt.NDArray[np.bool_], kind: Literal["where", "filter"], reason: str) -> Rows:
    lost = int((~kept_N).sum())
    left_out = (*rows.left_out, *([LeftOut(rows.source, kind, reason, lost)] if lost else []))
    return Rows(rows.source, rows.table.filter(pa.array(kept_N)), rows.places_N[kept_N], left_out)


@dataclass(frozen=True)
class _Where:
    name: str
    wanted: Scalar | list[Scalar]

    @property
    def reason(self) -> str:
        several = isinstance(self.wanted, list)
        return f"{self.name} is not {'one of ' if several else ''}{json.dumps(self.wanted, ensure_ascii=False)}"

    def mask(self, table: pa.Table, source: str) -> npt.NDArray[np.bool_]:
        """`kept_N`: which rows have a wanted value; a null is none."""
        if self.name not in table.column_names:
            raise UserError(f"{source}: where: no column {self.name}; there are {', '.join(table.column_names)}")
        column = table[self.name]
        values = self.wanted if isinstance(self.wanted, list) else [self.wanted]
        where = f"{source}: where: {self.name}"
        found = pc.is_in(column, value_set=pa.concat_arrays([_value(column, value, where) for value in values]))
        kept_N: npt.NDArray[np.bool_] = found.to_numpy()
        return kept_N


def _value(column: pa.ChunkedArray, value: Scalar, where: str) -> pa.Array:
    """The value as an array of the column's type; UserError if it is of another kind, as 1, true and "1" are."""
    kind = column.type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    number = pa.types.is_integer(kind) or pa.types.is_float32(kind) or pa.types.is_float64(kind)
    if not (text or number or pa.types.is_boolean(kind)):
        raise UserError(f"{where}: its type is {kind}; where compares text, numbers, true and false: use filter")
    fits = isinstance(value, str) if text else isinstance(value, int | float) and isinstance(value, bool) != number
    try:
        if fits:
            return pa.array([value]).cast(kind)
    except (pa.ArrowException, OverflowError):
        pass
    there = column.drop_null()
    example = f", as in {json.dumps(there[0].as_py(), ensure_ascii=False)}" if len(there) else ""
    raise UserError(
        f"{where}: {json.dumps(value, ensure_ascii=False)} cannot be in a column of type {kind}; "
        f"write a value as the column has it{example}"
    )


def _passed(rows: Rows, spec: str, function: Callable[[dict[str, Any]], Any]) -> npt.NDArray[np.bool_]:
    passed: list[bool] = []
    for batch in rows.table.to_batches(max_chunksize=FILTER_ROWS):
        for row in batch.to_pylist():
            place = rows.place(len(passed))
            try:
                output = function(row)
            except (Exception, SystemExit) as error:
                raise UserError(
                    f"filter {spec}: raised {type(error).__name__}: {error} ({place}); it is called with the row, a "
                    f"dict of {', '.join(row)}"
                ) from error
            if not isinstance(output, bool | np.bool_):
                raise UserError(
                    f"filter {spec}: returned {output!r:.80} ({place}); return True to keep the row and False to "
                    "leave it out"
                )
            passed.append(bool(output))
    return np.array(passed, dtype=np.bool_)
