"""Evaluation against the dataset's own completions of the held-out prompts."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rloo_pipeline.config import load_params
from rloo_pipeline.layout import Layout
from rloo_pipeline.policy.handle import Policy
from rloo_pipeline.stages import dispatch
from rloo_pipeline.stages.dataset_completions import completions, texts_of
from rloo_pipeline.stages.sampling import Prompts
from tests.conftest import CommandLine, varied_project
from tests.project import Project
from tests.tiny import make_policy

# The reward of these projects: the sum of the characters' numbers modulo 11, in tenths.
OWN = {"i": "ab", "j": None, "k": "zz", "l": ""}
REWARDS = {"i": 0.8, "j": None, "k": 0.2, "l": 0.0}  # (97 + 98) % 11 = 8, 244 % 11 = 2

SAID = {"role": "assistant", "content": "ab"}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Held-out prompts with completions of their own, the initial policy evaluated without them; 0001 is its copy."""
    project = varied_project(tmp_path_factory.mktemp("prepared") / "project")
    rows = [{"prompt": f"Say {name}:", "answer": name, "own": text} for name, text in OWN.items()]
    (project.root / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    layout, params = Layout(project.root), load_params(project.root / "params.yaml")
    for stage in ("prepare", "evaluate"):
        dispatch.run(stage, layout, params, "0000")
    shutil.copytree(layout.policy("0000"), layout.policy("0001"))
    return project


@pytest.fixture
def project(prepared: Project, tmp_path: Path) -> Project:
    return prepared.copy(tmp_path / "project")


def evaluated(project: Project, iteration: str) -> list[dict[str, object]]:
    (path,) = (project.root / "artifacts" / "evaluation" / iteration).glob("*.parquet")
    return pq.read_table(path).to_pylist()


def test_win_rate_against_the_dataset(project: Project, rloo: CommandLine) -> None:
    before = evaluated(project, "0000")
    project.change("evaluate.opponent_column", "own")
    for iteration in ("0000", "0001"):
        outcome = rloo(project, "evaluate", iteration)
        assert outcome.code == 0, outcome.stderr
        assert "generating" not in outcome.stderr or iteration == "0001"
    for iteration in ("0000", "0001"):
        rows = evaluated(project, iteration)
        names = {row["prompt_id"]: str(row["prompt_text"])[4] for row in rows}
        for row in rows:
            expected = REWARDS[names[row["prompt_id"]]]
            assert row["dataset_reward"] == (None if expected is None else pytest.approx(expected))
        wins = []
        for name in "ikl":
            mine = [row["reward"] for row in rows if names[row["prompt_id"]] == name]
            theirs = [row["dataset_reward"] for row in rows if names[row["prompt_id"]] == name]
            wins.append(sum((a > b) + (a == b) / 2 for a, b in zip(mine, theirs, strict=True)) / len(mine))
        metrics = project.json(f"metrics/evaluate/{iteration}.json")
        assert metrics["win_rate_dataset"] == pytest.approx(sum(wins) / 3)
        assert metrics["win_rate_dataset_low"] <= metrics["win_rate_dataset"] <= metrics["win_rate_dataset_high"]
        assert metrics["dataset_reward"] == pytest.approx((0.8 + 0.2 + 0.0) / 3)
        assert {key: metrics[key] for key in metrics if key.startswith("dataset_completions")} == {
            "dataset_completions": 3,
            "dataset_completions_null": 1,
            "dataset_completions_invalid": 0,
        }
        # It is no part of what the policy itself is measured by.
        assert metrics["completions"] == 8
    assert [{**row, "dataset_reward": None} for row in evaluated(project, "0000")] == before


def test_rows_that_cannot_be_scored(project: Project, rloo: CommandLine) -> None:
    (project.root / "reward.py").write_text(
        "def score(completions, **kwargs):\n"
        "    return [1 / len(text) if text != 'zz' else None for text in completions]\n"
    )
    project.change("evaluate.opponent_column", "own")
    outcome = rloo(project, "evaluate", "0000")
    assert outcome.code == 2
    assert "opponent_column: the dataset's own completions cannot be scored: reward letters: " in outcome.stderr
    assert "ZeroDivisionError" in outcome.stderr
    params = project.params()
    params["rewards"][0]["on_error"] = "invalid"
    project.write_params(params)
    assert rloo(project, "evaluate", "0000").code == 0
    metrics = project.json("metrics/evaluate/0000.json")
    assert metrics["dataset_reward"] == 0.5
    assert metrics["dataset_completions_invalid"] == 2


@pytest.mark.parametrize(
    ("column", "told"),
    [
        ("nothing", "have no column nothing, but prompt_id, prompt, answer, own"),
        ("level", "column level is of type int64; a completion is a string"),
        ("turns", "a completion is a string, or a list of one message with role and content"),
        ("empty", "no held-out prompt has a completion in column empty"),
    ],
)
def test_a_column_that_is_none(project: Project, rloo: CommandLine, column: str, told: str) -> None:
    rows = [
        {"prompt": "Say i:", "answer": "i", "own": "i", "level": 1, "turns": [SAID, SAID]},
        {"prompt": "Say j:", "answer": "j", "own": "j", "turns": [SAID]},
    ]
    if column == "empty":
        rows[0] |= {"empty": "x", "prompt": "long " * 60}
    (project.root / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    project.change("evaluate.opponent_column", column)
    assert rloo(project, "prepare").code == 0
    outcome = rloo(project, "evaluate", "0000")
    assert outcome.code == 2
    assert told.split(", but")[0] in outcome.stderr


def test_an_initial_evaluation_without_them(project: Project, rloo: CommandLine) -> None:
    project.change("evaluate.opponent_column", "own")
    outcome = rloo(project, "evaluate", "0001")
    assert outcome.code == 2
    assert "made with evaluate.opponent_column null, not own; run `dvc repro evaluate_initial` again" in outcome.stderr


def test_rows_are_made_like_sampled_ones(tmp_path: Path) -> None:
    policy = Policy(make_policy(tmp_path / "tiny"), "", False, {})
    prompts = Prompts(["p", "q"], ["P", "Q"], [[50], [51]], {})
    (row,) = completions({"q": "ab"}, prompts, policy).to_pylist()
    assert (row["prompt_id"], row["sample_index"], row["prompt_text"], row["prompt_token_ids"]) == ("q", 0, "Q", [51])
    assert row["completion_text"] == "ab"
    # A byte for each letter, then the EOS, as of a completion that ended by itself.
    assert len(row["completion_token_ids"]) == 3
    assert row["completion_token_ids"][-1] == 1


def test_completions_that_are_messages() -> None:
    table = pa.table({"prompt_id": ["p", "q", "r"], "own": [[SAID], None, [{**SAID, "content": "c"}]]})
    assert texts_of(table, "own") == {"p": "ab", "r": "c"}
