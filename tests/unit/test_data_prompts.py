"""Ids, checks, system prompts and the held-out share."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rloo_pipeline.data.prompts import MESSAGES, is_conversational, prompt_table, split_rows
from rloo_pipeline.data_config import DatasetConfig, PromptsConfig
from rloo_pipeline.errors import UserError


def config(**settings: Any) -> PromptsConfig:
    return PromptsConfig(train=DatasetConfig(file="data.jsonl"), eval=DatasetConfig(fraction=0.5), **settings)


def table(rows: Sequence[dict[str, Any]] | pa.Table, **settings: Any) -> pa.Table:
    rows = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)
    return prompt_table(rows, config(**settings), "train", "data.jsonl")


def user(text: str | None) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_strings_get_ids_and_keep_every_column() -> None:
    made = table([{"answer": "8", "prompt": "3 + 5?"}, {"answer": "2", "prompt": "1 + 1?"}])
    assert made.to_pylist() == [
        {"prompt_id": "train-000000", "prompt": "3 + 5?", "answer": "8"},
        {"prompt_id": "train-000001", "prompt": "1 + 1?", "answer": "2"},
    ]
    assert made.schema.field("prompt").type == pa.string()


@pytest.mark.parametrize(("given_ids", "kept"), [(["b", "a"], ["b", "a"]), ([7, 3], ["7", "3"])])
def test_given_ids_are_kept_as_strings(given_ids: list[Any], kept: list[str]) -> None:
    made = table([{"prompt": "x", "prompt_id": value} for value in given_ids])
    assert made["prompt_id"].to_pylist() == kept
    assert made.schema.field("prompt_id").type == pa.string()


def test_another_prompt_column_stays_beside_the_prompt() -> None:
    made = table([{"question": "3 + 5?", "answer": 8}], prompt_column="question")
    assert made.to_pylist() == [{"prompt_id": "train-000000", "prompt": "3 + 5?", "question": "3 + 5?", "answer": 8}]


@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.string_view()])
def test_other_string_types(kind: pa.DataType) -> None:
    made = table(pa.table({"prompt": pa.array(["a", "b"]).cast(kind)}))
    assert made["prompt"].type == pa.string()
    assert made["prompt"].to_pylist() == ["a", "b"]


def test_messages() -> None:
    prompts = [[user("Hi")], [{"role": "system", "content": ""}, user("Hi"), {"role": "assistant", "content": "Yes?"}]]
    made = table([{"prompt": prompt} for prompt in prompts])
    assert made["prompt"].type == MESSAGES
    assert made["prompt"].to_pylist() == prompts
    assert is_conversational(made["prompt"])


def test_messages_in_a_sliced_large_list_with_an_unused_field() -> None:
    kind = pa.large_list(pa.struct([("content", pa.large_string()), ("role", pa.string()), ("name", pa.string())]))
    prompts = [[user("no")], [user("a"), user("b")], [user("c")]]
    made = table(pa.table({"prompt": pa.array(prompts, kind)}).slice(1))
    assert made["prompt"].to_pylist() == prompts[1:]


def test_system_prompt_makes_strings_conversational() -> None:
    made = table([{"prompt": "Hi"}], system_prompt="Be brief.")
    assert made["prompt"].to_pylist() == [[{"role": "system", "content": "Be brief."}, user("Hi")]]
    assert made["prompt"].type == MESSAGES


def test_system_prompt_before_messages() -> None:
    made = table([{"prompt": [user("Hi")]}], system_prompt="Be brief.")
    assert made["prompt"].to_pylist() == [[{"role": "system", "content": "Be brief."}, user("Hi")]]


def test_two_system_prompts_are_refused() -> None:
    rows = [{"prompt": [user("a")]}, {"prompt": [{"role": "system", "content": "s"}, user("b")]}]
    with pytest.raises(UserError, match="row 2: has a system message of its own"):
        table(rows, system_prompt="Be brief.")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (pa.table({"prompt": pa.array([], pa.string())}), "data.jsonl: no rows; prompts.train needs at least one"),
        ([{"question": "a", "answer": "b"}], "no column prompt; there are question, answer; set prompts.prompt_column"),
        (
            [{"prompt": "a", "prompt_id": key} for key in ("x", "y", "x", "y")],
            "rows 1 and 3 have the same prompt_id 'x'; ids must differ",
        ),
        ([{"prompt": "a", "prompt_id": "x"}, {"prompt": "b", "prompt_id": None}], "column prompt_id, row 2: no id"),
        ([{"prompt": "a", "prompt_id": ""}], "column prompt_id, row 1: no id"),
        ([{"prompt": "a", "prompt_id": 1.5}], "column prompt_id is of type double; ids are strings or whole numbers"),
        ([{"prompt": "a", "reward": 1.0}], "column reward has a name that the pipeline uses itself; rename"),
        ([{"prompt": "a", "completions": "b"}], "column completions has a name"),
        ([{"prompt": "a", "reward/length": 1.0}], "column reward/length has a name"),
        (pa.table([["a"], ["b"]], ["prompt", "prompt"]), "two columns have the name prompt; rename one"),
        (
            [{"prompt": "a"}, {"prompt": None}, {"prompt": None}],
            r"column prompt, row 2 \(and 1 more\): an empty prompt",
        ),
        ([{"prompt": "a"}, {"prompt": " \n"}], "column prompt, row 2: an empty prompt; fill or remove it"),
        ([{"prompt": None}], "column prompt, row 1: an empty prompt"),
        ([{"prompt": 7}], "column prompt: its type is int64; a prompt is a string, or a list of messages"),
        ([{"prompt": ["a"]}], "each message needs role and content"),
        ([{"prompt": [{"role": "user"}]}], "each message needs role and content"),
        ([{"prompt": [user("a")]}, {"prompt": []}], "row 2: no message; fill or remove it"),
        ([{"prompt": [user("a")]}, {"prompt": None}], "row 2: no message; fill or remove it"),
        ([{"prompt": [user("a")]}, {"prompt": [user("b"), user(None)]}], "row 2: a message without content"),
        ([{"prompt": [user(None)]}], "row 1: a message without content"),
        ([{"prompt": [user("a")]}, {"prompt": [user(" "), user("")]}], "row 2: every message is empty"),
        ([{"prompt": [{**user("a"), "name": "Ann"}]}], "row 1: a message with name; only role and content"),
        ([{"prompt": [{"role": "user", "content": ["a"]}]}], "content of the messages is of type list.* must be a str"),
    ],
)
def test_bad_rows(rows: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        table(rows)
    assert str(caught.value).startswith("data.jsonl")


def test_prompt_beside_another_prompt_column() -> None:
    with pytest.raises(UserError, match="prompt_column is question, but there is a column prompt too"):
        table([{"question": "a", "prompt": "b"}], prompt_column="question")


def ids_table(ids: Sequence[str]) -> pa.Table:
    return pa.table({"prompt_id": list(ids), "prompt": ["x"] * len(ids)})


def test_fraction_holds_out_about_its_share() -> None:
    train, held_out = split_rows(ids_table([f"p{i}" for i in range(4000)]), 0.25, seed=1)
    # Binomial(4000, .25): standard deviation 27.4; five of them.
    assert abs(held_out.num_rows - 1000) < 137
    assert train.num_rows + held_out.num_rows == 4000
    assert not set(train["prompt_id"].to_pylist()) & set(held_out["prompt_id"].to_pylist())


@given(st.sets(st.text(min_size=1), min_size=20, max_size=60), st.randoms(use_true_random=False))
def test_a_rows_side_depends_on_its_id_alone(ids: set[str], random: Any) -> None:
    order = sorted(ids)
    train, _ = split_rows(ids_table([*order, *(f"fixed-{i}" for i in range(40))]), 0.5, seed=3)
    random.shuffle(order)
    again, _ = split_rows(ids_table([*order[: len(order) // 2], *(f"fixed-{i}" for i in range(40))]), 0.5, seed=3)
    sides = set(train["prompt_id"].to_pylist())
    for key in order[: len(order) // 2]:
        assert (key in sides) == (key in again["prompt_id"].to_pylist())


def test_another_seed_holds_out_others() -> None:
    prompts = ids_table([f"p{i}" for i in range(200)])
    assert split_rows(prompts, 0.5, seed=1)[1] != split_rows(prompts, 0.5, seed=2)[1]
    assert split_rows(prompts, 0.5, seed=1)[1] == split_rows(prompts, 0.5, seed=1)[1]


def test_a_fraction_that_leaves_a_side_empty() -> None:
    with pytest.raises(UserError, match=r"prompts.eval.fraction 0.01: of 2 prompts 0 would be held out"):
        split_rows(ids_table(["a", "b"]), 0.01, seed=0)
