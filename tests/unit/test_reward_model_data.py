"""Preference pairs: every shape that TRL takes, each fault named by row and column, nothing dropped in silence."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rloo_pipeline.data.keep import Rows
from rloo_pipeline.data.preferences import fits, pair_table, shared_pairs, side_rows, split_pairs
from rloo_pipeline.errors import UserError


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def pairs_of(*rows: dict[str, Any]) -> pa.Table:
    return pair_table(whole(pa.Table.from_pylist(list(rows))), "train")


def whole(table: pa.Table) -> Rows:
    return Rows("pairs.jsonl", table, np.arange(table.num_rows))


SKY = [user("What color is the sky?")]
BLUE, GREEN = [assistant("It is blue.")], [assistant("It is green.")]
SHAPES: dict[str, dict[str, Any]] = {
    "standard": {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
    "standard, implicit": {"chosen": "The sky is blue.", "rejected": "The sky is green."},
    "conversational": {"prompt": SKY, "chosen": BLUE, "rejected": GREEN},
    "conversational, implicit": {"chosen": SKY + BLUE, "rejected": SKY + GREEN},
    "conversational, implicit, with the prompt as a string": {
        "prompt": SKY[0]["content"], "chosen": SKY + BLUE, "rejected": SKY + GREEN,
    },
}  # fmt: skip


@pytest.mark.parametrize("row", SHAPES.values(), ids=SHAPES)
def test_every_shape_is_read_as_trl_reads_it(row: dict[str, Any]) -> None:
    data_utils = pytest.importorskip("trl.data_utils")
    (found,) = pairs_of(row).to_pylist()
    expected = data_utils.maybe_extract_prompt(dict(row))
    assert {name: found[name] for name in ("prompt", "chosen", "rejected")} == expected
    assert (found["pair_id"], found["margin"]) == ("train-000000", 0.0)


@given(st.text(" ab", max_size=6), st.text(" ab", min_size=1, max_size=6), st.text(" ab", min_size=1, max_size=6))
def test_an_implicit_prompt_loses_no_character(prefix: str, one: str, other: str) -> None:
    (found,) = pairs_of({"chosen": prefix + one, "rejected": prefix + other}).to_pylist()
    assert (found["prompt"] + found["chosen"], found["prompt"] + found["rejected"]) == (prefix + one, prefix + other)
    assert found["chosen"]
    assert found["rejected"]


def test_one_conversation_that_goes_on_where_the_other_ends() -> None:
    longer = [*SKY, *BLUE, user("And the sea?"), *GREEN]
    (found,) = pairs_of({"chosen": longer, "rejected": SKY + BLUE}).to_pylist()
    assert (found["prompt"], found["chosen"], found["rejected"]) == (SKY, longer[1:], BLUE)


def test_sides_as_the_reward_stage_has_completions() -> None:
    longer = [*BLUE, user("And the sea?"), assistant("Also blue.")]
    pairs = pairs_of({"prompt": SKY, "chosen": longer, "rejected": GREEN})
    assert side_rows(pairs, "chosen").to_pylist() == [
        {"prompt": [*SKY, *BLUE, user("And the sea?")], "completion_text": "Also blue."}
    ]
    assert side_rows(pairs, "rejected").to_pylist() == [{"prompt": SKY, "completion_text": "It is green."}]


def test_margins() -> None:
    rows = [{**SHAPES["standard"], "margin": margin} for margin in (0.5, None, 2)]
    assert pairs_of(*rows)["margin"].to_pylist() == [0.5, 0.0, 2.0]


GOOD = SHAPES["conversational"]
FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"chosen": None}, "row 2, column chosen: no value; it is a string, or a list of messages"),
    ({"prompt": None}, "row 2, column prompt: no value"),
    ({"chosen": []}, "row 2, column chosen: no message"),
    ({"rejected": [{"role": "assistant", "content": None}]}, "row 2, column rejected, message 1: content is missing"),
    ({"rejected": [user("why?")]}, "row 2, column rejected: the last message is of role user"),
    ({"chosen": SKY + BLUE}, "row 2: chosen begins with the prompt, which would be read twice"),
    ({"margin": float("inf")}, "row 2, column margin: inf is no finite number"),
]


@pytest.mark.parametrize(("change", "told"), FAULTS)
def test_faults_are_named_by_row_and_column(change: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=f"^pairs.jsonl, {told}"):
        pairs_of({**GOOD, "margin": 0.0}, {**GOOD, **change})


def test_further_fields_of_messages_are_refused_unless_null() -> None:
    with_calls = [{**BLUE[0], "tool_calls": "f()"}]
    assert pairs_of({**GOOD, "chosen": [{**BLUE[0], "tool_calls": None}]}).num_rows == 1
    with pytest.raises(UserError, match="message 1: has tool_calls too; only role and content are read"):
        pairs_of({**GOOD, "chosen": with_calls})


def test_missing_column_and_no_rows() -> None:
    with pytest.raises(UserError, match="no column rejected; there are chosen, other; name it under columns"):
        pair_table(whole(pa.table({"chosen": ["a"], "other": ["b"]})), "train")
    with pytest.raises(UserError, match="no rows; a reward model needs pairs"):
        pair_table(whole(pa.table({"chosen": pa.array([], pa.string())})), "train")


def test_numbers_are_no_completions() -> None:
    with pytest.raises(UserError, match="row 1, column chosen: a int; it is a string"):
        pair_table(whole(pa.table({"chosen": [1], "rejected": ["b"]})), "train")


def test_rows_are_told_as_the_dataset_counts_them() -> None:
    rows = Rows("pairs.csv", pa.table({"chosen": ["ab", None], "rejected": ["ac", "d"]}), np.array([4, 7]))
    with pytest.raises(UserError, match=r"^pairs.csv, row 8, column chosen: no value"):
        pair_table(rows, "train")
    one = Rows("pairs.csv", rows.table.slice(0, 1), rows.places_N[:1])
    assert pair_table(one, "eval")["pair_id"].to_pylist() == ["eval-000004"]


def test_what_is_left_out_has_a_reason() -> None:
    rows = [{"prompt": "p", "chosen": chosen, "rejected": rejected} for chosen, rejected in ("aa", "ab", "cd", "ef")]
    kept_N, reasons = fits(pairs_of(*rows), [1, 9, 3, 0], [1, 3, 10, 2], limit=9)
    assert kept_N.tolist() == [False, True, False, False]
    assert reasons == {
        "train-000000": "identical: chosen and rejected are the same",
        "train-000002": "too long: 10 tokens with rejected, the limit is 9",
        "train-000003": "no tokens: chosen is empty",
    }


def test_a_fraction_keeps_the_pairs_of_a_prompt_together() -> None:
    rows = [{"prompt": f"p{n % 40}", "chosen": f"c{n}", "rejected": f"r{n}"} for n in range(120)]
    train, held_out = split_pairs(pairs_of(*rows), 0.25, seed=1)
    assert train.num_rows + held_out.num_rows == 120
    assert 10 <= held_out.num_rows <= 50
    assert not set(train["prompt"].to_pylist()) & set(held_out["prompt"].to_pylist())
    fewer = split_pairs(pairs_of(*rows[:100]), 0.25, seed=1)[1]
    assert set(fewer["pair_id"].to_pylist()) <= set(held_out["pair_id"].to_pylist())
    with pytest.raises(UserError, match=r"of 3 pairs [03] would be held out, all pairs of a prompt on one side"):
        split_pairs(pairs_of(*rows[::40]), 0.25, seed=1)


def test_pairs_without_a_prompt_are_divided_by_their_text() -> None:
    rows = [{"chosen": f"{n} yes", "rejected": f"no {n}"} for n in range(10, 100)]
    _, held_out = split_pairs(pairs_of(*rows), 0.5, seed=1)
    assert 25 < held_out.num_rows < 65


def test_pairs_in_both_tables_are_counted_in_either_order() -> None:
    pair = SHAPES["standard"]
    swapped = {"prompt": pair["prompt"], "chosen": pair["rejected"], "rejected": pair["chosen"]}
    other = {**pair, "chosen": " red."}
    assert shared_pairs(pairs_of(pair), pairs_of(swapped, other, pair)) == 2
