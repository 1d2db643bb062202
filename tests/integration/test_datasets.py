"""Several datasets from params.yaml through prepare, rollouts and rewards."""

import json
from pathlib import Path

import pytest

from rloo_pipeline.shards import read_shards, read_table
from tests.conftest import CommandLine
from tests.project import Project

KEEP = "def short(row):\n    return len(row['prompt']) < 8\n"
REWARD = """
def score(completions, answer, task, **kwargs):
    assert not {"mixture", "mixture_weight"} & kwargs.keys()
    return [1.0 if kind == "letters" else 0.0 for kind in task]
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Two weighted datasets: 8 rows of which 6 are kept, and 2."""
    project = Project.create(tmp_path / "project")
    rows = [
        {"ask": f"Say {letter}:" + "!!" * (letter == "h"), "answer": letter, "n": i}
        for i, letter in enumerate("abcdefgh")
    ]
    (project.root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (project.root / "digits.csv").write_text("prompt,answer\nSay 1:,1\nSay 2:,2\n")
    (project.root / "keep.py").write_text(KEEP)
    (project.root / "reward.py").write_text(REWARD)
    letters = {"file": "train.jsonl", "columns": {"prompt": "ask"}, "where": {"n": [1, 2, 3, 4, 5, 6, 7]}}
    letters |= {"filter": "keep.py:short", "task": "letters", "weight": 3}
    digits = {"file": "digits.csv", "task": "digits", "weight": 1}
    project.change("prompts.train", [letters, digits])
    project.change("sources.digits", {"path": "digits.csv", "used_by": "prompts"})
    project.change("sources.keep", {"path": "keep.py", "used_by": "prompts"})
    return project


def test_weighted_datasets(project: Project, rloo: CommandLine) -> None:
    done = rloo(project, "prepare")
    assert done.code == 2
    # The answers of letters are text, those of digits numbers.
    assert "column answer is of type string in prompts.train.0 (train.jsonl), but of type int64 in" in done.stderr
    (project.root / "digits.csv").write_text("prompt,answer\nSay 1:,one\nSay 2:,two\n")

    done = rloo(project, "prepare")
    assert done.code == 0, done.stderr
    metrics, provenance = (project.json(f"{kind}/prepare/0000.json") for kind in ("metrics", "provenance"))
    assert {name: value for name, value in metrics.items() if name.startswith("train")} == {
        "train_prompts": 8,
        "train_prompts_filtered": 2,
        "train_prompts_filtered/filter": 1,
        "train_prompts_filtered/where": 1,
    }
    assert [(item["dataset"], item["kind"], item["rows"]) for item in provenance["train_left_out"]] == [
        ("train.jsonl", "where", 1),
        ("train.jsonl", "filter", 1),
    ]
    prompts, _ = read_table(project.root / "artifacts/prompts/train.parquet")
    assert prompts["prompt_id"].to_pylist()[5:] == ["train-0-000006", "train-1-000000", "train-1-000001"]

    done = rloo(project, "rollouts", "0001")
    assert done.code == 0, done.stderr
    assert {name: value for name, value in project.json("metrics/rollouts/0001.json").items() if "epoch" in name} == {
        "epoch": 4 / 8,
        "epoch/0": 3 / 6,
        "epoch/1": 1 / 2,
    }
    done = rloo(project, "rewards", "0001")
    assert done.code == 0, done.stderr
    rewards = read_shards(project.root / "artifacts/rewards/0001").to_pylist()
    assert {row["prompt_id"][:7] for row in rewards if row["reward"] == 1.0} == {"train-0"}
    assert len({row["prompt_id"] for row in rewards if row["reward"] == 0.0}) == 1
