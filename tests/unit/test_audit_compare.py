"""Tables compared by key, and trees of JSON values."""

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rloo_pipeline.audit.compare import Cell, Change, compare_tables, compare_values, shown
from rloo_pipeline.errors import UserError

FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)
ROW = st.fixed_dictionaries(
    {
        "score": st.none() | FLOATS,
        "text": st.none() | st.text(max_size=5),
        "flag": st.booleans(),
        "ids": st.lists(st.integers(0, 300), max_size=4),
        "logprobs": st.none() | st.lists(FLOATS, max_size=4),
        "messages": st.lists(
            st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": st.text(max_size=3)}),
            max_size=2,
        ),
    }
)
SCHEMA = pa.schema(
    {
        "iteration": pa.int32(),
        "prompt_id": pa.string(),
        "sample_index": pa.int32(),
        "score": pa.float32(),
        "text": pa.string(),
        "flag": pa.bool_(),
        "ids": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        "messages": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
    }
)
OTHER = {
    "score": st.floats(1000, 2000, width=32),
    "text": st.just("another text"),
    "ids": st.just([7] * 9),
    "logprobs": st.just([0.5] * 9),
    "messages": st.just([{"role": "tool", "content": "x"}]),
}


def keyed(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """The rows with keys: two completions a prompt."""
    return [{"iteration": 1, "prompt_id": f"p{i // 2}", "sample_index": i % 2, **row} for i, row in enumerate(rows)]


def table(rows: list[dict[str, object]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def small(**columns: object) -> pa.Table:
    """Three rows of one group."""
    keys = {"iteration": [1, 1, 1], "prompt_id": ["a", "a", "b"], "sample_index": [0, 1, 0]}
    return pa.table({**keys, **columns})


@given(st.lists(ROW, min_size=1, max_size=7), st.randoms(use_true_random=False))
def test_order_and_chunks_change_nothing(rows: list[dict[str, object]], random: object) -> None:
    rows = keyed(rows)
    shuffled = list(rows)
    random.shuffle(shuffled)
    chunks = pa.concat_tables([table([row]) for row in shuffled])

    found = compare_tables(table(rows), chunks)

    assert found.identical
    assert found.rows == len(rows)
    assert found.first is None


@given(st.lists(ROW, min_size=1, max_size=7), st.data())
def test_a_single_changed_cell_is_found_exactly(rows: list[dict[str, object]], data: st.DataObject) -> None:
    rows = keyed(rows)
    place = data.draw(st.integers(0, len(rows) - 1))
    column = data.draw(st.sampled_from(sorted(OTHER)))
    changed = [dict(row) for row in rows]
    changed[place][column] = data.draw(OTHER[column].filter(lambda value: value != rows[place][column]))
    order = data.draw(st.permutations(range(len(rows))))

    found = compare_tables(table(rows), table([changed[i] for i in order]))

    assert [item.column for item in found.columns] == [column]
    assert found.columns[0].rows == 1
    assert found.first is not None
    assert found.first.key == tuple(rows[place][name] for name in ("iteration", "prompt_id", "sample_index"))
    assert found.first.column == column


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=6), st.data())
def test_lists_count_what_a_loop_over_elements_counts(left: list[float], data: st.DataObject) -> None:
    right = data.draw(st.lists(st.sampled_from([0.0, *left]), max_size=6))
    pairs = list(zip(left, right, strict=False))
    gaps = [abs(a - b) for a, b in pairs if a != b or math.copysign(1, a) != math.copysign(1, b)]
    expected = len(gaps) + abs(len(left) - len(right))
    kind = pa.list_(pa.float32())

    found = compare_tables(
        small(x=pa.array([[], left, [1.0]], kind)), small(x=pa.array([[], right, [1.0]], kind))
    ).columns

    assert [item.values for item in found] == ([expected] if expected else [])
    if expected:
        assert found[0].largest == (max(gaps) if gaps else None)


def test_the_first_difference_is_that_of_the_first_key_not_the_first_row() -> None:
    left = small(x=[1.0, 2.0, 3.0], y=[1, 2, 3]).take([2, 1, 0])
    right = small(x=[1.0, 2.0, 3.5], y=[1, 4, 3])

    found = compare_tables(left, right)

    assert found.first == Cell((1, "a", 1), "y", None, 2, 4)
    assert [(item.column, item.rows, item.values, item.largest) for item in found.columns] == [
        ("x", 1, 1, 0.5),
        ("y", 1, 1, 2.0),
    ]


def test_the_position_is_that_of_the_element_or_of_the_character() -> None:
    left = small(x=[[1.0, 2.0], [3.0], []], t=["same", "one two", "q"])
    right = small(x=[[1.0, 2.5], [3.0, 4.0], []], t=["same", "one too", "q"])

    numbers, texts = compare_tables(left, right).columns

    assert numbers.cell(0) == Cell((1, "a", 0), "x", 1, 2.0, 2.5)
    assert numbers.cell(1) == Cell((1, "a", 1), "x", 1, None, 4.0)
    assert (numbers.rows, numbers.values, numbers.largest) == (2, 2, 0.5)
    assert texts.cell(0) == Cell((1, "a", 1), "t", 5, "one two", "one too")
    assert texts.largest is None


def test_largest_first_puts_what_is_not_a_number_last() -> None:
    left = small(x=[1.0, None, 1.0])
    right = small(x=[1.5, 2.0, 4.0])

    found = compare_tables(left, right).columns[0].largest_first()

    assert [cell.key for cell in found] == [(1, "b", 0), (1, "a", 0), (1, "a", 1)]
    assert [cell.right for cell in found] == [4.0, 1.5, 2.0]


def test_nan_is_nan_null_is_null_and_zero_has_a_sign() -> None:
    left = small(x=[float("nan"), None, 0.0], y=[float("nan"), float("inf"), 0.0])
    right = small(x=[float("nan"), None, -0.0], y=[None, float("-inf"), 0.0])

    signs, others = compare_tables(left, right).columns

    assert (signs.rows, signs.largest) == (1, 0.0)
    assert (others.rows, others.largest) == (2, math.inf)


def test_rows_without_a_partner_are_listed_and_the_rest_compared() -> None:
    left, right = small(x=[1, 2, 3]).slice(0, 2), small(x=[1, 5, 3]).slice(1)

    found = compare_tables(left, right)

    assert found.rows == 1
    assert found.only_left.to_pylist() == [{"iteration": 1, "prompt_id": "a", "sample_index": 0}]
    assert found.only_right.to_pylist() == [{"iteration": 1, "prompt_id": "b", "sample_index": 0}]
    assert [item.column for item in found.columns] == ["x"]
    assert not compare_tables(left, left.slice(1)).identical


def test_columns_that_one_lacks_or_holds_in_another_type_are_named() -> None:
    left = small(x=pa.array([1, 2, 3], pa.int32()), old=[1, 2, 3])
    right = small(x=pa.array([1, 2, 3], pa.int64()), new=[1, 2, 3])

    found = compare_tables(left, right)

    assert found.columns_only_left == ["old"]
    assert found.columns_only_right == ["new"]
    assert found.retyped == {"x": ("int32", "int64")}
    assert not found.identical


def test_other_keys_join_other_iterations() -> None:
    left = small(x=[1, 2, 3]).drop_columns("iteration")

    assert compare_tables(left, left.take([1, 2, 0]), ["prompt_id", "sample_index"]).identical


def test_a_key_that_stands_twice_is_refused() -> None:
    doubled = small(x=[1, 2, 3]).take([0, 0, 1])

    with pytest.raises(UserError, match="iteration 1, prompt_id a, sample_index 0 stands 2 times"):
        compare_tables(doubled, small(x=[1, 2, 3]))


def test_empty_tables_are_identical() -> None:
    empty = small(x=[[1.0], [2.0], []]).slice(0, 0)

    assert compare_tables(empty, empty).identical


def test_values_of_json_are_compared_by_dotted_name() -> None:
    left = {"a": {"b": 1.0, "c": [1, 2]}, "gone": None, "flag": True, "empty": {}}
    right = {"a": {"b": 1.5, "c": [1, 3, 4]}, "new": "x", "flag": False, "empty": {}}

    found = compare_values(left, right)

    assert found == [
        Change("a.b", "both", 1.0, 1.5),
        Change("a.c.1", "both", 2, 3),
        Change("a.c.2", "right", None, 4),
        Change("flag", "both", True, False),
        Change("gone", "left", None, None),
        Change("new", "right", None, "x"),
    ]
    assert [change.size for change in found] == [0.5, 1.0, None, None, None, None]


def test_true_is_not_one() -> None:
    assert compare_values({"a": True}, {"a": 1}) == [Change("a", "both", True, 1)]


def test_what_is_shown_is_one_line_without_control_characters() -> None:
    text = "a\x1b[31mred\nline\u202ereversed"

    assert shown(text) == r"'a\x1b[31mred\nline\u202ereversed'"
    cut = shown("x" * 100 + "\x07different" + "y" * 100, position=100)
    assert cut.startswith("...'xxx")
    assert r"\x07different" in cut
    assert shown(np.float32(0.1).item()) == "0.100000001"
