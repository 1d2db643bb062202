"""The prompts of the arithmetic example."""

from pathlib import Path
from typing import Any

import pytest

from rloo_pipeline.data.load import load_kept, load_rows
from rloo_pipeline.data.prompts import MESSAGES, prompt_table
from rloo_pipeline.data_config import DatasetConfig, PromptsConfig
from rloo_pipeline.errors import UserError

ROOT = Path(__file__).parents[2]
TRAIN = DatasetConfig(generator="rloo_pipeline/examples/arithmetic/prompts.py:train")
EVAL = DatasetConfig(generator="rloo_pipeline/examples/arithmetic/prompts.py:evaluation")


def rows(dataset: DatasetConfig, **kwargs: Any) -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = load_rows(dataset.model_copy(update={"kwargs": kwargs}), ROOT).to_pylist()
    return loaded


def pairs(some: list[dict[str, Any]]) -> set[frozenset[int]]:
    return {frozenset((row["a"], row["b"])) for row in some}


def test_train_and_held_out_pairs_are_all_pairs_and_disjoint() -> None:
    train, held_out = rows(TRAIN), rows(EVAL)
    assert not pairs(train) & pairs(held_out)
    assert len(pairs(train)) == 37
    assert len(pairs(held_out)) == 18
    assert sorted((row["a"], row["b"]) for row in train + held_out) == [(a, b) for a in range(10) for b in range(10)]


def test_pairs_are_disjoint_whatever_seeds_and_sizes() -> None:
    assert not pairs(rows(TRAIN, seed=5)) & pairs(rows(EVAL, seed=9, size=8))


def test_answers_and_questions() -> None:
    for row in rows(TRAIN) + rows(EVAL):
        assert row["answer"] == str(row["a"] + row["b"])
        question = f"What is {row['a']} + {row['b']}? Answer with just the number."
        assert row["prompt"] == [{"role": "user", "content": question}]


def test_deterministic_and_seeded() -> None:
    assert rows(TRAIN, size=20) == rows(TRAIN, size=20) == rows(TRAIN)[:20]
    assert rows(TRAIN, seed=1) != rows(TRAIN, seed=0)


def test_they_make_a_table_of_prompts() -> None:
    table = prompt_table(load_kept(TRAIN, ROOT), TRAIN, PromptsConfig(train=TRAIN, eval=EVAL), "train")
    assert table.column_names == ["prompt_id", "prompt", "answer", "a", "b"]
    assert table.schema.field("prompt").type == MESSAGES


def test_more_than_there_are() -> None:
    with pytest.raises(UserError, match="size 36: there are 35 additions of this kind"):
        rows(EVAL, size=36)
