"""Several datasets put together, and the held-out share."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rloo_pipeline.data.images import COLUMN, IMAGES
from rloo_pipeline.data.keep import LeftOut
from rloo_pipeline.data.splits import Loaded, check_mixture, concatenate, load_prompts, split_rows
from rloo_pipeline.data_config import PromptsConfig
from rloo_pipeline.errors import UserError
from rloo_pipeline.stages.prepare import shared

Rows = Sequence[dict[str, Any]]


def load(root: Path, train: Sequence[Rows], *, eval_: Any = None, each: Any = (), **settings: Any) -> dict[str, Loaded]:
    """The prompts of files a.jsonl, b.jsonl ...; each: further settings of the dataset at the same place."""
    datasets = []
    for number, rows in enumerate(train):
        name = f"{'abc'[number]}.jsonl"
        (root / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        datasets.append({"file": name, **(each[number] if each else {})})
    (root / "eval.jsonl").write_text('{"prompt": "held out"}\n')
    config = PromptsConfig(train=datasets, eval=eval_ or {"file": "eval.jsonl"}, **settings)
    return load_prompts(config, root, seed=1)


def prompts(texts: str) -> Rows:
    return [{"prompt": text} for text in texts]


def test_datasets_are_put_together_with_nulls(tmp_path: Path) -> None:
    loaded = load(tmp_path, [[{"prompt": "x", "n": 1}], [{"prompt": "y", "answer": "8"}, {"prompt": "z"}]])
    assert loaded["train"].table.to_pylist() == [
        {"prompt_id": "train-0-000000", "prompt": "x", "n": 1, "answer": None},
        {"prompt_id": "train-1-000000", "prompt": "y", "n": None, "answer": "8"},
        {"prompt_id": "train-1-000001", "prompt": "z", "n": None, "answer": None},
    ]
    assert loaded["eval"].table["prompt_id"].to_pylist() == ["eval-000000"]


def test_a_list_of_one_is_as_one(tmp_path: Path) -> None:
    loaded = load(tmp_path, [prompts("xy")], eval_=[{"file": "eval.jsonl"}])
    assert loaded["train"].table["prompt_id"].to_pylist() == ["train-000000", "train-000001"]


def test_several_held_out_datasets(tmp_path: Path) -> None:
    loaded = load(tmp_path, [prompts("x")], eval_=[{"file": "eval.jsonl", "task": "a"}, {"file": "eval.jsonl"}])
    assert loaded["eval"].table["prompt_id"].to_pylist() == ["eval-0-000000", "eval-1-000000"]
    assert loaded["eval"].table["task"].to_pylist() == ["a", None]


def test_ids_stay_when_a_filter_is_added(tmp_path: Path) -> None:
    rows = [{"prompt": "x", "n": 1}, {"prompt": "y", "n": 2}, {"prompt": "z", "n": 2}]
    loaded = load(tmp_path, [rows, rows], each=[{}, {"where": {"n": 2}}])["train"]
    assert loaded.table["prompt_id"].to_pylist() == [
        *(f"train-0-00000{i}" for i in range(3)), "train-1-000001", "train-1-000002"
    ]  # fmt: skip
    assert loaded.left_out == (LeftOut("b.jsonl", "where", "n is not 2", 1),)


def test_tasks_by_dataset(tmp_path: Path) -> None:
    loaded = load(tmp_path, [prompts("x"), [{"prompt": "y", "task": "code"}]], each=[{"task": "math"}, {}])
    assert loaded["train"].table["task"].to_pylist() == ["math", "code"]


def test_weights_reach_the_table_of_train_alone(tmp_path: Path) -> None:
    weights = [{"weight": 3}, {"weight": 0.5}]
    table = load(tmp_path, [prompts("xy"), prompts("z")], each=weights)["train"].table
    assert table["mixture"].to_pylist() == [0, 0, 1]
    assert table["mixture_weight"].to_pylist() == [3.0, 3.0, 0.5]
    many = [[{"prompt": f"{name}{i}"} for i in range(40)] for name in "ab"]
    halves = load(tmp_path, many, each=weights, eval_={"fraction": 0.5})
    assert halves["train"].table.column_names == ["prompt_id", "prompt", "mixture", "mixture_weight"]
    assert halves["eval"].table.column_names == ["prompt_id", "prompt"]
    assert halves["train"].table.num_rows + halves["eval"].table.num_rows == 80


def test_a_weighted_dataset_without_prompts_is_refused() -> None:
    datasets = [{"file": "a.jsonl", "weight": 1}, {"file": "b.jsonl", "weight": 0.25}]
    config = PromptsConfig(train=datasets, eval={"file": "c.jsonl"})
    table = pa.table({"prompt_id": ["x", "y"], "mixture": pa.array([0, 1], pa.int32())})
    check_mixture(config, table)
    with pytest.raises(UserError, match=r"prompts.train.1: no prompt is left of it .* its weight 0.25 cannot be kept"):
        check_mixture(config, table.slice(0, 1))


MESSAGE = [{"role": "user", "content": "Hi"}]


def test_strings_and_messages_together(tmp_path: Path) -> None:
    both = [[{"prompt": MESSAGE}], prompts("x")]
    with pytest.raises(
        UserError,
        match=r"prompts.train.1 \(b.jsonl\) has strings as prompts, prompts.train.0 \(a.jsonl\) messages; .*system_pro",
    ):
        load(tmp_path, both)
    loaded = load(tmp_path, both, system_prompt="Be brief.")
    assert [len(prompt) for prompt in loaded["train"].table["prompt"].to_pylist()] == [2, 2]
    with_column = load(tmp_path, [both[0], [{"prompt": "x", "s": None}]], each=[{}, {"system_column": "s"}])
    assert with_column["train"].table["prompt"].to_pylist()[1] == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, "1"), (1, 0.5), (True, 1), ([1], ["a"]), ([1], [0.5]), ({"x": 1}, {"x": "a"}), ({"x": [1]}, {"x": [0.5]})],
)
def test_columns_whose_types_do_not_go_together(tmp_path: Path, one: Any, other: Any) -> None:
    with pytest.raises(
        UserError,
        match=r"column n is of type .* in prompts.train.0 \(a.jsonl\), but of type .* in prompts.train.2 \(c.jsonl\)",
    ):
        load(tmp_path, [[{"prompt": "a", "n": one}], prompts("b"), [{"prompt": "c", "n": other}]])


def test_a_column_of_nulls_has_no_type_to_keep_to(tmp_path: Path) -> None:
    rows = [[{"prompt": f"{n}", "n": n}] for n in (None, 1, "1")]
    with pytest.raises(UserError, match=r"of type int64 in prompts.train.1 \(b.jsonl\), but of type string in"):
        load(tmp_path, rows)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.array(["a"]), pa.array(["b"], pa.large_string())),
        (pa.array([1], pa.int8()), pa.array([300])),
        (pa.nulls(1), pa.array([[1]])),
        (pa.array([{"bytes": b"x"}]), pa.array([{"bytes": b"y", "path": "z"}])),
    ],
)
def test_columns_whose_types_go_together(one: pa.Array, other: pa.Array) -> None:
    tables = [pa.table({"prompt_id": [i], "prompt": ["x"], "n": values}) for i, values in (("a", one), ("b", other))]
    made = concatenate(tables, ["a", "b"])["n"].to_pylist()
    padded = {"path": None, **one.to_pylist()[0]} if pa.types.is_struct(one.type) else one.to_pylist()[0]
    assert made == [padded, *other.to_pylist()]


@pytest.mark.parametrize(
    ("one", "other"),
    [(pa.array([2**63], pa.uint64()), pa.array([1])), (pa.array(["a"]), pa.array([b"a"], pa.large_binary()))],
)
def test_columns_that_would_change_together_are_refused(one: pa.Array, other: pa.Array) -> None:
    tables = [pa.table({"prompt_id": [i], "prompt": ["x"], "n": values}) for i, values in (("a", one), ("b", other))]
    with pytest.raises(UserError, match="column n is of type"):
        concatenate(tables, ["a", "b"])


def test_given_ids_differ_over_all_datasets(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"train.0 \(a.jsonl\) and prompts.train.1 \(b.jsonl\) both have the prompt_id 'q'; .* all dat"
    ):
        load(tmp_path, [[{"prompt": "a", "prompt_id": "q"}], [{"prompt": "b", "prompt_id": "q"}]])
    with pytest.raises(UserError, match="both have the prompt_id 'train-1-000000'"):
        load(tmp_path, [[{"prompt": "a", "prompt_id": "train-1-000000"}], prompts("b")])


def test_the_pipelines_own_columns_are_refused(tmp_path: Path) -> None:
    message = r"a.jsonl: column mixture has a name that the pipeline uses itself.*columns: {old_mixture: mixture}"
    with pytest.raises(UserError, match=message):
        load(tmp_path, [[{"prompt": "a", "mixture": 1}]])
    renamed = load(tmp_path, [[{"prompt": "a", "mixture": 1}]], each=[{"columns": {"old_mixture": "mixture"}}])
    assert renamed["train"].table["old_mixture"].to_pylist() == [1]


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


def test_held_out_prompts_that_are_trained_on_too_are_counted() -> None:
    train = pa.table({"prompt_id": ["a", "b", "c"], "prompt": ["1", "2", "2"]})
    held_out = pa.table({"prompt_id": ["d", "e", "f"], "prompt": ["2", "3", "2"]})
    assert shared({"train": train, "eval": held_out}) == 2
    seen = {"train": [[b"x"], [b"x"], None], "eval": [[b"x"], [b"x"], [b"y"]]}
    tables = {
        split: table.append_column(COLUMN, pa.array(seen[split], IMAGES))
        for split, table in (("train", train), ("eval", held_out))
    }
    assert shared(tables) == 1
