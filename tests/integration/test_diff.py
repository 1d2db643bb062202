"""`rloo diff`: two iterations, and one iteration of two git revisions."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rloo_pipeline.audit import diff
from rloo_pipeline.layout import Layout
from tests.conftest import REWARD, CommandLine
from tests.project import Project


def rows(project: Project, artifact: str, iteration: str, column: str) -> dict[tuple[str, int], Any]:
    """A column by prompt and sample, from the Parquet files."""
    table = pq.read_table(sorted((project.root / "artifacts" / artifact / iteration).glob("*.parquet")))
    keys = zip(table["prompt_id"].to_pylist(), table["sample_index"].to_pylist(), strict=True)
    return dict(zip(keys, table[column].to_pylist(), strict=True))


def told(project: Project, capsys: pytest.CaptureFixture[str], a: str, b: str, limit: int = 5) -> Any:
    capsys.readouterr()
    diff.run(Layout(project.root), a, b, limit, json_output=True)
    return json.loads(capsys.readouterr().out)


def files(project: Project) -> dict[str, bytes]:
    """All files but those of git itself."""
    paths = [path for path in project.root.rglob("*") if path.is_file() and ".git" not in path.parts]
    return {path.relative_to(project.root).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def changed(finished_project: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project whose HEAD is the finished run; since then learning rate and reward have been edited. Not to be
    written to."""
    project = finished_project.copy(tmp_path_factory.mktemp("diff") / "project")
    commit(project)
    (project.root / "reward.py").write_text(REWARD.replace("% 11 / 10", "% 11 / 20"))
    project.change("update.learning_rate", 2e-3)
    return project


def commit(project: Project) -> None:
    project.run("git", "add", "--all")
    project.run("git", "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", "run")


def test_an_iteration_does_not_differ_from_itself(
    finished_project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(finished_project, capsys, "0001", "0001")
    assert all(stage["same"] for stage in found["stages"].values())
    assert found["settings"] == found["metrics"] == found["left_out"] == []
    assert found["completions"]["different"] == 0
    assert {column["different"] for column in found["columns"].values()} == {0}


def test_two_iterations(finished_project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(finished_project, capsys, "0001", "0002")
    # Eight prompts, four an iteration: no prompt is in both.
    prompts = [{key[0] for key in rows(finished_project, "rollouts", it, "seed")} for it in ("0001", "0002")]
    assert found["prompts"] == {"a": 4, "b": 4, "shared": 0, "text_differs": 0,
                                "only_a": sorted(prompts[0]), "only_b": sorted(prompts[1])}  # fmt: skip
    assert found["completions"] == {"a": 16, "b": 16, "shared": 0, "different": 0, "examples": []}
    assert found["settings"] == []
    assert not any(stage["same"] for stage in found["stages"].values())
    for side, iteration in (("a", "0001"), ("b", "0002")):
        rewards = list(rows(finished_project, "rewards", iteration, "reward").values())
        summary = found["columns"]["rewards.reward"][side]
        assert (summary["rows"], summary["null"]) == (16, 0)
        assert summary["mean"] == pytest.approx(sum(rewards) / 16)
        assert (summary["min"], summary["max"]) == (min(rewards), max(rewards))
    metrics = {item["name"]: item for item in found["metrics"]}
    assert metrics["update.step"]["difference"] == 1
    loss = [finished_project.json(f"metrics/update/{iteration}.json")["loss"] for iteration in ("0001", "0002")]
    assert [metrics["update.loss"][side] for side in ("a", "b")] == loss


def test_an_iteration_of_two_revisions(
    changed: Project, finished_project: Project, tmp_path: Path, rloo: CommandLine, capsys: pytest.CaptureFixture[str]
) -> None:
    project = changed.copy(tmp_path / "project")
    for stage in ("rewards", "advantages", "update"):
        assert rloo(project, stage, "0001").code == 0
    before = files(project)
    found = told(project, capsys, "HEAD:0001", "0001", limit=3)
    assert files(project) == before
    assert found["a"]["commit"] == project.run("git", "rev-parse", "HEAD").stdout.strip()
    assert {name: stage["same"] for name, stage in found["stages"].items()} == {
        "rollouts": True, "logprobs": True, "rewards": False, "advantages": False, "update": False, "evaluate": True,
    }  # fmt: skip
    # How many threads this test's process has is no setting.
    settings = {item["name"]: (item["a"], item["b"]) for item in found["settings"]}
    assert {name for name in settings if not name.startswith("execution.")} == {
        "update.learning_rate",
        "source:reward.py",
    }
    assert settings["update.learning_rate"] == (1e-3, 2e-3)
    assert found["completions"]["different"] == 0

    # Rewards are halved: as many differ as are not 0, the largest by its half.
    old = rows(finished_project, "rewards", "0001", "reward")
    column = found["columns"]["rewards.reward"]
    assert column["different"] == sum(value > 0 for value in old.values())
    assert column["largest"] == pytest.approx(max(old.values()) / 2)
    assert [example["difference"] for example in column["examples"]] == pytest.approx(
        sorted((value / 2 for value in old.values()), reverse=True)[:3], abs=1e-7
    )
    for example in column["examples"]:
        key = (example["prompt_id"], example["sample_index"])
        assert example["a"] == old[key]
        assert example["b"] == pytest.approx(old[key] / 2)
    diff.run(Layout(project.root), "HEAD:0001", "0001", 3, json_output=False)
    said = capsys.readouterr().out
    assert "outputs with equal fingerprints: rollouts, logprobs, evaluate; others: rewards, advantages, update" in said
    assert "update.learning_rate" in said


def test_completions_of_two_revisions(
    changed: Project, finished_project: Project, tmp_path: Path, rloo: CommandLine, capsys: pytest.CaptureFixture[str]
) -> None:
    project = changed.copy(tmp_path / "project")
    project.change("rollouts.temperature", 2.0)
    assert rloo(project, "rollouts", "0001").code == 0
    found = told(project, capsys, "0001", "HEAD:0001", limit=100)
    hot, cold = (rows(item, "rollouts", "0001", "completion_token_ids") for item in (project, finished_project))
    different = {key for key in cold if hot[key] != cold[key]}
    assert found["prompts"]["shared"] == 4
    assert (found["completions"]["shared"], found["completions"]["different"]) == (16, len(different))
    assert len(different) > 4
    examples = found["completions"]["examples"]
    assert {(item["prompt_id"], item["sample_index"]) for item in examples} == different
    counts = [item["tokens_different"] for item in examples]
    assert counts == sorted(counts, reverse=True)
    texts = rows(finished_project, "rollouts", "0001", "completion_text")
    for item in examples:
        key = (item["prompt_id"], item["sample_index"])
        ours, theirs = hot[key], cold[key]
        first = item["first_token"]
        assert ours[:first] == theirs[:first]
        assert ours[first : first + 1] != theirs[first : first + 1]
        assert item["b"] == texts[key]


def test_a_revision_that_the_cache_lacks(changed: Project, tmp_path: Path, rloo: CommandLine) -> None:
    project = changed.copy(tmp_path / "project")
    (md5,) = {out["md5"] for stage in project.lock()["stages"].values() for out in stage.get("outs", [])
              if out["path"] == "artifacts/rewards/0001"}  # fmt: skip
    store = project.root / ".dvc" / "cache" / "files" / "md5"
    listing = store / md5[:2] / md5[2:]
    shard = next(entry["md5"] for entry in json.loads(listing.read_text()) if entry["relpath"].startswith("shard"))
    for lost in (store / shard[:2] / shard[2:], listing):
        lost.unlink()
        done = rloo(project, "diff", "HEAD:0001", "0001")
        assert done.code == 2
        assert "artifacts/rewards/0001 of that revision is not in the DVC cache" in done.stderr
        assert "dvc fetch --all-commits" in done.stderr
        assert rloo(project, "diff", "HEAD:0002", "0001").code == 0


@pytest.mark.parametrize(
    ("a", "message"),
    [
        ("elsewhere:0001", "git knows no revision 'elsewhere'"),
        ("--help:0001", "No such option"),
        ("HEAD:1", "has four digits"),
        ("1", "has four digits"),
        ("0009", "no provenance of iteration 0009"),
        ("HEAD:0009", "no provenance of iteration 0009"),
    ],
)
def test_sides_that_are_not_there(changed: Project, rloo: CommandLine, a: str, message: str) -> None:
    done = rloo(changed, "diff", a, "0001")
    assert done.code == 2
    assert message in done.stderr


def test_a_folder_without_a_project_and_one_without_git(
    finished_project: Project, tmp_path: Path, rloo: CommandLine
) -> None:
    (tmp_path / "empty").mkdir()
    project = finished_project.copy(tmp_path / "project")
    shutil.rmtree(project.root / ".git")

    elsewhere = rloo(Project(tmp_path / "empty"), "diff", "0001", "0002")
    without = rloo(project, "diff", "HEAD:0001", "0001")

    assert (elsewhere.code, without.code) == (2, 2)
    assert "params.yaml" in elsewhere.stderr
    assert "is in no git repository" in without.stderr


def test_a_revision_before_the_run(changed: Project, tmp_path: Path, rloo: CommandLine) -> None:
    project = changed.copy(tmp_path / "project")
    project.run("git", "rm", "-q", "--cached", "dvc.lock")
    project.run("git", "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", "no lock")
    done = rloo(project, "diff", "HEAD:0001", "0001")
    assert (done.code, "has no dvc.lock" in done.stderr) == (2, True)
    assert rloo(project, "diff", "HEAD~1:0001", "0001").code == 0


def test_a_broken_manifest_is_told(changed: Project, tmp_path: Path, rloo: CommandLine) -> None:
    project = changed.copy(tmp_path / "project")
    path = project.root / "artifacts" / "rewards" / "0001" / "shard-00000.parquet"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-9])
    done = rloo(project, "diff", "HEAD:0001", "0001")
    assert done.code == 2
    assert "artifacts/rewards/0001/shard-00000.parquet" in done.stderr
