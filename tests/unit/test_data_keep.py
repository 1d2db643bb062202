"""Columns renamed, rows left out by where and filter, and what is said of both."""

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rloo_pipeline.data.keep import LeftOut, Rows, keep, rename
from rloo_pipeline.data.load import load_kept, load_rows
from rloo_pipeline.data_config import TableConfig
from rloo_pipeline.errors import UserError

ROWS = [
    {"question": "1 + 1?", "lang": "en", "level": 1, "share": 0.1, "done": True},
    {"question": "2 + 2?", "lang": "de", "level": 2, "share": 0.5, "done": False},
    {"question": "3 + 3?", "lang": "en", "level": 3, "share": 0.9, "done": None},
    {"question": "4 + 4?", "lang": None, "level": None, "share": None, "done": True},
]


def kept(root: Path, rows: Sequence[dict[str, Any]] = ROWS, **settings: Any) -> Rows:
    (root / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_kept(TableConfig(file=Path("data.jsonl"), **settings), root)


def places(root: Path, **settings: Any) -> list[int]:
    return kept(root, **settings).places_N.tolist()


def filtered(root: Path, body: str, **settings: Any) -> list[int]:
    (root / "keep.py").write_text(f"def keep(row):\n    {body}\n")
    return places(root, filter="keep.py:keep", **settings)


def test_columns_take_new_names_and_lose_the_old_ones() -> None:
    table = pa.table({"a": [1], "question": ["x"], "target": [2]})
    assert rename(table, {"prompt": "question", "answer": "target"}, "d").to_pylist() == [
        {"a": 1, "prompt": "x", "answer": 2}
    ]


def test_columns_that_change_places_and_one_under_two_names() -> None:
    assert rename(pa.table({"a": [1], "b": [2]}), {"a": "b", "b": "a"}, "d").to_pylist() == [{"b": 1, "a": 2}]
    assert rename(pa.table({"a": [1]}), {"a": "a", "b": "a"}, "d").to_pylist() == [{"a": 1, "b": 1}]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": "text"}, "d: columns: prompt: no column text; there are a, question"),
        ({"a": "question"}, "d: two columns have the name a; columns: give a another name too"),
    ],
)
def test_columns_that_cannot_be_renamed(columns: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        rename(pa.table({"a": [1], "question": ["x"]}), columns, "d")


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({"lang": "en"}, [0, 2]),
        ({"lang": ["en", "de"]}, [0, 1, 2]),
        ({"level": 2}, [1]),
        ({"level": [3.0, 1]}, [0, 2]),
        ({"share": 0.5}, [1]),
        ({"done": True}, [0, 3]),
        ({"done": [True, False]}, [0, 1, 3]),
        ({"lang": "en", "level": [1, 2]}, [0]),
    ],
)
def test_where(tmp_path: Path, where: dict[str, Any], expected: list[int]) -> None:
    assert places(tmp_path, where=where) == expected


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_where_of_other_string_types(tmp_path: Path, kind: pa.DataType) -> None:
    pq.write_table(pa.table({"a": pa.array(["x", "y", None, "x"]).cast(kind)}), tmp_path / "data.parquet")
    rows = load_kept(TableConfig(file=Path("data.parquet"), where={"a": "x"}), tmp_path)
    assert rows.places_N.tolist() == [0, 3]


def test_dictionaries_are_what_they_stand_for(tmp_path: Path) -> None:
    """As pandas writes a categorical: beside text of another dataset they are text."""
    words = pa.array(["x", "y", "x"])
    table = pa.table({"a": words.dictionary_encode(), "b": words.cast(pa.dictionary(pa.int8(), pa.large_string()))})
    kept = keep(table, TableConfig(file=Path("data.parquet")), "data.parquet", tmp_path).table
    assert kept.schema.types == [pa.string(), pa.large_string()]
    assert kept.to_pylist() == table.to_pylist()


def test_rows_of_views_can_be_taken(tmp_path: Path) -> None:
    """As some writers of Parquet leave them, in lists and structs too."""
    text = pa.string_view()
    turns = pa.list_(pa.struct([("role", text), ("content", text)]))
    table = pa.table(
        {
            "prompt": pa.array([[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]], turns),
            "tags": pa.array([["x"], None], pa.large_list(text)),
            "raw": pa.array([b"1", b"2"], pa.binary_view()),
        }
    )
    kept = keep(table, TableConfig(file=Path("data.parquet")), "data.parquet", tmp_path).table
    assert kept.take(pa.array([1, 0])).to_pylist() == table.to_pylist()[::-1]


def test_where_of_small_numbers(tmp_path: Path) -> None:
    table = pa.table({"a": pa.array([1, 2], pa.int8()), "b": pa.array([0.1, 0.2], pa.float32())})
    pq.write_table(table, tmp_path / "data.parquet")
    for where in ({"a": 2}, {"b": 0.2}):
        rows = load_kept(TableConfig(file=Path("data.parquet"), where=where), tmp_path)
        assert rows.places_N.tolist() == [1]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"language": "en"}, "where: no column language; there are question, lang, level, share, done"),
        ({"level": "1"}, 'where: level: "1" cannot be in a column of type int64; write a value .*, as in 1'),
        ({"level": True}, "where: level: true cannot be in a column of type int64"),
        ({"level": 1.5}, "where: level: 1.5 cannot be in a column of type int64"),
        ({"level": 2**70}, "where: level: .* cannot be in a column of type int64"),
        ({"lang": 1}, 'where: lang: 1 cannot be in a column of type string; .*, as in "en"'),
        ({"lang": ["en", True]}, "where: lang: true cannot be in a column of type string"),
        ({"done": 1}, "where: done: 1 cannot be in a column of type bool; .*, as in true"),
        ({"done": "true"}, 'where: done: "true" cannot be in a column of type bool'),
        ({"lang": "fr"}, r'none of 4 rows is kept \(where: lang is not "fr": 4 rows\); mend where or filter'),
    ],
)
def test_where_that_cannot_be(tmp_path: Path, where: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"data.jsonl: {message}"):
        kept(tmp_path, where=where)


def test_where_of_a_column_that_is_no_value(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"where: a: its type is list<.*; where compares text, numbers.*: use filter"):
        kept(tmp_path, [{"a": [1]}], where={"a": 1})


@pytest.mark.parametrize("wanted", [[], None, [None], {"b": 1}, [[1]], datetime.date(2026, 1, 2), float("nan")])
def test_where_takes_plain_values_alone(wanted: Any) -> None:
    with pytest.raises(ValidationError, match="where") as refused:
        TableConfig(file=Path("data.jsonl"), where={"a": wanted})
    assert wanted != [] or "a: write text, a number, true or false" in str(refused.value)


def test_filter_sees_whole_rows_by_their_new_names(tmp_path: Path) -> None:
    body = "return row['prompt'][0] in '13' and 'question' not in row"
    assert filtered(tmp_path, body, columns={"prompt": "question"}) == [0, 2]


def test_filter_sees_what_where_leaves(tmp_path: Path) -> None:
    assert filtered(tmp_path, "return row['level'] > 1", where={"level": [1, 2, 3]}) == [1, 2]


def test_filter_may_return_numpys_truth_and_be_in_a_module(tmp_path: Path) -> None:
    assert filtered(tmp_path, "import numpy; return numpy.bool_(row['done'] is True)") == [0, 3]
    config = TableConfig(file=Path("data.jsonl"), filter="operator:truth")
    assert load_rows(config, tmp_path).num_rows == 4


def test_filter_leaves_a_column_of_bytes_alone(tmp_path: Path) -> None:
    images = pa.array([{"bytes": b"\xff\x00", "path": None}] * 3)
    pq.write_table(pa.table({"image": images, "n": [1, 2, 3]}), tmp_path / "data.parquet")
    (tmp_path / "keep.py").write_text("def keep(row): return row['image']['bytes'] == b'\\xff\\x00' and row['n'] != 2")
    config = TableConfig(file=Path("data.parquet"), filter="keep.py:keep", columns={"picture": "image"})
    with pytest.raises(UserError, match=r"KeyError: 'image' \(data.parquet, row 1\).*dict of picture, n"):
        load_rows(config, tmp_path)
    rows = load_rows(config.model_copy(update={"columns": {}}), tmp_path)
    assert rows["image"].to_pylist() == [{"bytes": b"\xff\x00", "path": None}] * 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return row['level'] > 1", r"filter keep.py:keep: raised TypeError: .* \(data.jsonl, row 4\)"),
        ("raise SystemExit(3)", r"raised SystemExit: 3 \(data.jsonl, row 1\)"),
        ("return row['lang']", r"filter keep.py:keep: returned 'en' \(data.jsonl, row 1\); return True"),
        ("pass", "returned None"),
        ("return False", r"none of 4 rows is kept \(filter: keep.py:keep is false: 4 rows\)"),
    ],
)
def test_filter_that_fails(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        filtered(tmp_path, body)


def test_rows_are_named_by_their_place_in_the_dataset(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\(data.jsonl, row 3\)"):
        filtered(tmp_path, "return row['level'] < 3 or 1 / 0", where={"lang": "en"})


def test_what_is_left_out_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "keep.py").write_text("def keep(row): return row['share'] < 0.5")
    rows = kept(tmp_path, where={"lang": ["en", "de"], "done": [True, False]}, filter="keep.py:keep")
    assert rows.table["question"].to_pylist() == ["1 + 1?"]
    assert rows.left_out == (
        LeftOut("data.jsonl", "where", 'lang is not one of ["en", "de"]', 1),
        LeftOut("data.jsonl", "where", "done is not one of [true, false]", 1),
        LeftOut("data.jsonl", "filter", "keep.py:keep is false", 1),
    )
    assert "data.jsonl: 1 of 4 rows are used; left out by where: lang is not one of" in capsys.readouterr().err


VALUES = st.one_of(st.none(), st.integers(-3, 3))


@given(st.lists(VALUES, min_size=1, max_size=20), st.lists(st.integers(-3, 3), min_size=1, max_size=4))
def test_where_keeps_exactly_the_equal_rows(values: list[int | None], wanted: list[int]) -> None:
    table = pa.table({"a": pa.array(values, pa.int64())})
    expected = [place for place, value in enumerate(values) if value in wanted]
    config = TableConfig(file=Path("d"), where={"a": wanted})
    if not expected:
        with pytest.raises(UserError, match="none of"):
            keep(table, config, "d", Path())
        return
    rows = keep(table, config, "d", Path())
    assert rows.places_N.tolist() == expected
    assert rows.table["a"].to_pylist() == [values[place] for place in expected]
    assert sum(item.rows for item in rows.left_out) == len(values) - len(expected)
    assert rows.places_N.dtype == np.int64
