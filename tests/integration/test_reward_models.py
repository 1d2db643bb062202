"""A reward model from its pairs to the rewards: DVC orders the stages, and every command knows of it."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from flows import chain
from rloo_pipeline.config import load_params
from rloo_pipeline.layout import Layout
from rloo_pipeline.table import reward_model
from rloo_pipeline.tracking.book import read_lock
from rloo_pipeline.tracking.files import read_contents
from tests.conftest import CommandLine
from tests.project import Project

MODEL = "artifacts/reward_models/quality"
PAIRS = [{"prompt": f"Say {letter}:", "chosen": letter * 3, "rejected": "no"} for letter in "abcdefghijklmnopqrst"]


def with_reward_model(finished: Project, root: Path) -> Project:
    """A copy of the finished project whose reward is a reward model that is still to be trained."""
    project = finished.copy(root)
    (project.root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    params = project.params()
    params["reward_models"] = {
        "quality": {
            "model": "tiny", "train": {"file": "pairs.jsonl"}, "eval": {"fraction": 0.4}, "learning_rate": 1e-3,
            "batch_size": 4, "steps": 8,
        }
    }  # fmt: skip
    params["sources"] |= {
        "pairs": {"path": "pairs.jsonl", "used_by": "reward_models"},
        "base": {"path": "tiny", "used_by": "reward_models"},
        "quality": {"path": MODEL, "used_by": "rewards"},
    }
    params["rewards"] = [{"name": "quality", "model": MODEL}]
    project.write_params(params)
    return project


@pytest.fixture(scope="module")
def project(finished_project: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The project after real DVC trained the reward model and took its hash. Not to be written to."""
    made = with_reward_model(finished_project, tmp_path_factory.mktemp("reward") / "project")
    ran = made.repro("sources@quality")
    assert sorted(ran[:2]) == ["rloo sources base", "rloo sources pairs"]
    assert ran[2:] == ["rloo reward_model quality", "rloo sources quality"]
    return made


def test_dvc_finds_nothing_more_to_run_and_the_flow_has_the_same_order(project: Project) -> None:
    status = json.loads(project.run("dvc", "status", "--json", "reward_model@quality", "sources@quality").stdout)
    assert status == {}
    opening = chain.opening(load_params(project.root / "params.yaml"))
    places = [opening.index(name) for name in ("sources@pairs", "reward_model@quality", "sources@quality", "prepare")]
    assert places == sorted(places)


def test_the_artifact_loads_anywhere_and_gives_the_stored_scores(project: Project) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(project.root / MODEL)
    tokenizer = AutoTokenizer.from_pretrained(project.root / MODEL)
    assert model.config.num_labels == 1
    assert model.config.pad_token_id == tokenizer.pad_token_id
    pairs = pq.read_table(project.root / "artifacts/preferences/quality/eval.parquet").to_pylist()
    for row in pairs:
        for side in ("chosen", "rejected"):
            ids = tokenizer(row["prompt"] + row[side], return_tensors="pt")["input_ids"]
            with torch.no_grad():
                assert model(input_ids=ids).logits.item() == pytest.approx(row[f"{side}_reward"], abs=1e-5)
    metrics = project.json("metrics/reward_model/quality.json")
    won = [row["chosen_reward"] > row["rejected_reward"] for row in pairs]
    assert metrics["accuracy"] == pytest.approx(np.mean(won))
    assert metrics["eval_pairs"] == len(pairs)
    assert metrics["train_pairs"] + metrics["eval_pairs"] == len(PAIRS)
    steps = pq.read_table(project.root / "artifacts/preferences/quality/steps.parquet")
    assert steps["step"].to_pylist() == list(range(8))


def test_its_rewards_lineage_and_verify(project: Project, rloo: CommandLine, tmp_path: Path) -> None:
    copy = project.copy(tmp_path / "project")
    for stage in ("rewards", "advantages", "update"):
        assert rloo(copy, stage, "0001").code == 0
    told = json.loads(rloo(copy, "lineage", "0001", "--json").stdout)
    assert told["intact"], told["problems"]
    trained = told["stages"][-1]
    assert (trained["stage"], trained["iteration"]) == ("reward_model", "quality")
    assert {item["name"] for item in trained["inputs"]} == {"source:pairs.jsonl", "source:tiny"}
    assert {item["status"] for item in (*trained["inputs"], *trained["outputs"])} == {"ok"}
    replayed = rloo(copy, "verify", "--stage", "reward_model")
    assert replayed.code == 0, replayed.stdout
    assert "reward_model quality: identical" in replayed.stdout


def test_mlflow_and_the_table_show_it(project: Project) -> None:
    layout, params = Layout(project.root), load_params(project.root / "params.yaml")
    contents = read_contents(layout, params, read_lock(layout))
    accuracy = project.json("metrics/reward_model/quality.json")["accuracy"]
    points = {(point.key, point.step): point.value for point in contents.points}
    assert points["reward_model/quality/accuracy", 0] == accuracy
    assert "timings/reward_model/quality/seconds" in {point.key for point in contents.points}
    assert reward_model(layout, "quality").startswith(f"reward model quality: held-out pairs won {accuracy:.3f} (95% ")


def test_a_killed_training_starts_over(project: Project, rloo: CommandLine, tmp_path: Path) -> None:
    copy = project.copy(tmp_path / "project")
    left = copy.root / ".rloo/work/reward_model/quality/0123456789abcdef/base"
    left.mkdir(parents=True)
    assert "reward_model starts over" in rloo(copy, "clean", "--dry-run").stdout
    before = copy.json(f"{MODEL}/manifest.json")
    assert rloo(copy, "reward_model", "quality").code == 0
    assert not left.exists()
    assert copy.json(f"{MODEL}/manifest.json") == before
