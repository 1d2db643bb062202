"""Ids, checks, system prompts and tasks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rloo_pipeline.data.keep import Rows
from rloo_pipeline.data.prompts import MESSAGES, is_conversational, prompt_table
from rloo_pipeline.data_config import DatasetConfig, PromptsConfig
from rloo_pipeline.errors import UserError


def config(**settings: Any) -> PromptsConfig:
    return PromptsConfig(train=DatasetConfig(file="data.jsonl"), eval=DatasetConfig(fraction=0.5), **settings)


def table(rows: Sequence[dict[str, Any]] | pa.Table, **settings: Any) -> pa.Table:
    rows = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)
    dataset = {key: settings.pop(key) for key in ("system_column", "task") if key in settings}
    whole = Rows("data.jsonl", rows, np.arange(rows.num_rows))
    return prompt_table(whole, DatasetConfig(file="data.jsonl", **dataset), config(**settings), "train")


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


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view()])
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


def test_rows_are_named_and_numbered_by_their_place_in_the_dataset() -> None:
    rows = Rows("data.jsonl", pa.table({"prompt": ["a", "b"]}), np.array([3, 7]))
    dataset = DatasetConfig(file="data.jsonl")
    made = prompt_table(rows, dataset, config(), "train.1")
    assert made["prompt_id"].to_pylist() == ["train-1-000003", "train-1-000007"]
    empty = Rows("data.jsonl", pa.table({"prompt": ["a", " "], "prompt_id": ["x", "x"]}), np.array([3, 7]))
    with pytest.raises(UserError, match="column prompt, row 8: an empty prompt"):
        prompt_table(empty, dataset, config(), "train")
    twins = Rows("data.jsonl", empty.table.set_column(0, "prompt", pa.array(["a", "b"])), np.array([3, 7]))
    with pytest.raises(UserError, match="rows 4 and 8 have the same prompt_id 'x'"):
        prompt_table(twins, dataset, config(), "train")


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def test_system_column() -> None:
    rows = [{"prompt": "a", "sys": "Rhyme."}, {"prompt": "b", "sys": None}, {"prompt": "c", "sys": ""}]
    made = table(rows, system_column="sys", system_prompt="Be brief.")
    assert made["prompt"].to_pylist() == [
        [system("Rhyme."), user("a")],
        [system("Be brief."), user("b")],
        [user("c")],
    ]
    assert made["sys"].to_pylist() == ["Rhyme.", None, ""]
    assert table(rows, system_column="sys")["prompt"].to_pylist()[1] == [user("b")]


def test_system_column_before_messages() -> None:
    rows = [{"prompt": [user("a")], "sys": "Rhyme."}, {"prompt": [system("Own."), user("b")], "sys": None}]
    made = table(rows, system_column="sys")
    assert made["prompt"].to_pylist() == [[system("Rhyme."), user("a")], [system("Own."), user("b")]]
    with pytest.raises(UserError, match="row 2: has a system message of its own"):
        table(rows, system_column="sys", system_prompt="Be brief.")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a", "b": 1}], "system_column: no column sys; there are prompt, b"),
        ([{"prompt": "a", "sys": 1}], "system_column sys is of type int64; it must hold strings"),
    ],
)
def test_bad_system_column(rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UserError, match=f"data.jsonl: {message}"):
        table(rows, system_column="sys")


def test_task_of_all_rows_and_of_each() -> None:
    assert table([{"prompt": "a"}, {"prompt": "b"}], task="math")["task"].to_pylist() == ["math", "math"]
    rows = [{"prompt": "a", "task": "code", "n": 1}, {"prompt": "b", "task": None, "n": 2}]
    made = table(rows)
    assert made.column_names == ["prompt_id", "prompt", "task", "n"]
    assert made["task"].to_pylist() == ["code", None]
    assert table([{"prompt": "a", "task": None}])["task"].type == pa.string()


def test_bad_tasks() -> None:
    with pytest.raises(UserError, match=r"data.jsonl: task is math, but there is a column task too"):
        table([{"prompt": "a", "task": "code"}], task="math")
    with pytest.raises(UserError, match=r"data.jsonl: column task is of type int64; it must hold strings"):
        table([{"prompt": "a", "task": 1}])
