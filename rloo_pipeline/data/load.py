"""Rows as people have them: JSONL, CSV, Parquet, a hub dataset or a function, as one Arrow table."""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from rloo_pipeline.data.keep import Rows, keep, told
from rloo_pipeline.data_config import TableConfig
from rloo_pipeline.errors import UserError
from rloo_pipeline.progress import say
from rloo_pipeline.rewards.sources import load_callable

CSV_TYPES = (
    (pa.int64(), r"^(0|-?[1-9][0-9]*)$"),
    (pa.float64(), r"^-?(0|[1-9][0-9]{0,14})?(\.[0-9]{0,17})?([eE][+-]?[0-9]+)?$"),
    (pa.bool_(), r"(?i)^(true|false)$"),
)


def load_rows(dataset: TableConfig, root: Path) -> pa.Table:
    """The rows and columns that the dataset's columns, where and filter leave; raises UserError as `load_kept` does."""
    return load_kept(dataset, root).table


def load_kept(dataset: TableConfig, root: Path) -> Rows:
    """The same with the rows' places in the dataset and what was left out, files and functions taken from `root`.

    Raises UserError if the dataset is missing, broken or not a table, or if no row is left. A fraction has no rows of
    its own.
    """
    source = source_name(dataset)
    rows = keep(_read(dataset, root), dataset, source, root)
    if rows.left_out:
        total = len(rows.places_N) + sum(item.rows for item in rows.left_out)
        say(f"{source}: {len(rows.places_N)} of {total} rows are used; left out by {told(rows.left_out)}")
    return rows


def _read(dataset: TableConfig, root: Path) -> pa.Table:
    if dataset.file is not None:
        return _from_file(root / dataset.file)
    if dataset.hub is not None:
        return _from_hub(dataset)
    if dataset.generator is not None:
        return _from_generator(dataset.generator, dataset.kwargs, root)
    raise ValueError("a fraction is split off the train rows, not loaded")


def source_name(dataset: TableConfig) -> str:
    """How messages name the dataset."""
    return str(dataset.file or dataset.generator or f"{dataset.hub} (split {dataset.split})")


def _from_file(path: Path) -> pa.Table:
    readers = {".jsonl": _read_jsonl, ".csv": _read_csv, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise UserError(f"{path}: {path.suffix or 'no ending'} is not read; use one of {', '.join(readers)}")
    if not path.is_file():
        raise UserError(f"{path}: no such file; the path is taken from the project's folder")
    return readers[path.suffix](path)


def _read_jsonl(path: Path) -> pa.Table:
    rows: list[dict[str, Any]] = []
    lines: list[int] = []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # bad JSON, a number of thousands of digits, or deep nesting
            raise UserError(f"{path}: line {number} is not JSON ({error}); mend or remove it") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}: line {number} is a {type(row).__name__}; each line must be an object")
        rows.append(row)
        lines.append(number)
    return _table(rows, [f"{path}: line {number}" for number in lines])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error}); save it as UTF-8") from error


def _read_csv(path: Path) -> pa.Table:
    """Every column is read as text, then `_typed` finds numbers, true and false; empty cells are null."""
    options = pyarrow.csv.ParseOptions(newlines_in_values=True)
    reading = pyarrow.csv.ReadOptions(use_threads=False)
    try:
        with pyarrow.csv.open_csv(path, reading, options) as reader:
            names = reader.schema.names
        converting = pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=True, null_values=[""]
        )
        table = pyarrow.csv.read_csv(path, reading, options, converting)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not readable as CSV ({error}); mend or remove the row") from error
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise UserError(f"{path}: two columns have the name {doubled[0]}; rename one")
    return pa.table({name: table[name] if name == "prompt_id" else _typed(table[name]) for name in names})


def _typed(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column as whole numbers, decimals, or true and false, if all its cells are; else as it is.

    A column with a cell like 007, or of more digits than a number holds, stays text: it would be another answer.
    """
    for kind, pattern in CSV_TYPES:
        if pc.all(pc.match_substring_regex(column, pattern), min_count=0).as_py():
            with suppress(pa.ArrowInvalid):  # a whole number above 64 bits
                return column.cast(kind)
    return column


def _read_parquet(path: Path) -> pa.Table:
    try:
        return pq.read_table(path).replace_schema_metadata(None)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not readable as Parquet ({error}); write or copy it anew") from error


def _from_hub(dataset: TableConfig) -> pa.Table:
    import datasets

    try:
        loaded = datasets.load_dataset(dataset.hub, dataset.name, split=dataset.split, revision=dataset.revision)
    except Exception as error:
        raise UserError(
            f"hub dataset {source_name(dataset)} could not be loaded ({type(error).__name__}: {error}); check "
            "hub, name, split and revision and the network (and HF_HUB_OFFLINE), or use a file"
        ) from error
    return _of_dataset(loaded)


def hub_caches() -> list[Path]:
    """Where the hub client keeps what it downloads, images that are files among it: the revision names them."""
    import datasets
    from huggingface_hub import constants

    return [Path(constants.HF_HUB_CACHE), Path(datasets.config.HF_DATASETS_CACHE)]


def _of_dataset(dataset: Any) -> pa.Table:
    table: pa.Table = dataset.with_format("arrow")[:]
    return table.replace_schema_metadata(None)


def _from_generator(spec: str, kwargs: Mapping[str, Any], root: Path) -> pa.Table:
    generate = load_callable(spec, root)
    try:
        rows = generate(**kwargs)
    except UserError as error:
        raise UserError(f"{spec}: {error}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{spec}: raised {type(error).__name__}: {error}; mend it or its kwargs") from error
    if "datasets" in sys.modules and isinstance(rows, sys.modules["datasets"].Dataset):
        return _of_dataset(rows)
    if not isinstance(rows, list):
        raise UserError(
            f"{spec}: returned a {type(rows).__name__}; it must return a list of dicts, one for each row, or a "
            "datasets.Dataset"
        )
    places = [f"{spec}: row {index}" for index in range(1, len(rows) + 1)]
    for place, row in zip(places, rows, strict=True):
        if not isinstance(row, dict) or not all(isinstance(key, str) for key in row):
            raise UserError(f"{place} is a {type(row).__name__}; it must be a dict from column names to values")
    return _table(rows, places)


def _table(rows: Sequence[Mapping[str, Any]], places: Sequence[str]) -> pa.Table:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return pa.table({name: _column(name, [row.get(name) for row in rows], places) for name in names})


def _column(name: str, values: Sequence[Any], places: Sequence[str]) -> pa.Array:
    reason = _refusal(values)
    if reason is None:
        return pa.array(values)
    # The first row that does not go together with those before it, by bisection: each trial is one conversion.
    good, bad = 0, len(values)
    while bad - good > 1:
        middle = (good + bad) // 2
        if _refusal(values[:middle]) is None:
            good = middle
        else:
            bad = middle
    fault = "does not go with the rows before it" if good else "cannot be kept"
    raise UserError(
        f"{places[bad - 1]}, column {name}: {values[bad - 1]!r:.200} {fault} ({_refusal(values[:bad])}); give the "
        "column one type, text if no other holds it"
    )


def _refusal(values: Sequence[Any]) -> Exception | None:
    try:
        pa.array(values)
    except (pa.ArrowException, OverflowError, UnicodeError) as error:
        return error
    return None
