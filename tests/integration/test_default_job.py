"""The default job for real: SmolLM2, its prompts, its reward, the engine that is there, DVC."""

from pathlib import Path

import pytest

from rloo_pipeline.table import verdict
from tests.project import REPOSITORY, Project


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A clone of the repository after two iterations of the default job."""
    project = Project(tmp_path_factory.mktemp("default") / "clone")
    project.root.mkdir()
    project.run("git", "clone", "-q", str(REPOSITORY), ".")
    project.rloo("iterations", "2")
    project.change("iterations.0001.evaluate", False)
    project.run("dvc", "repro")
    return project


@pytest.mark.timeout(1500)
def test_held_out_accuracy_at_least_doubles(job: Project) -> None:
    """On operand pairs never trained on, with the interval clear of the initial value."""
    before, after = (job.json(f"metrics/evaluate/{iteration}.json") for iteration in ("0000", "0002"))
    assert job.json("metrics/prepare/0000.json")["eval_prompts_also_in_train"] == 0
    assert after["reward"] >= 2 * before["reward"]
    assert after["reward_low"] > before["reward"]
    assert after["win_rate_low"] > 0.5
    assert "improved" in verdict(job.json("artifacts/history.json"))


def test_the_kl_penalty_acts(job: Project) -> None:
    """The second iteration's policy is no longer the reference, and the penalty is in its rewards."""
    first, second = (job.json(f"metrics/advantages/{iteration}.json") for iteration in ("0001", "0002"))
    assert first["kl"] == 0
    assert second["kl"] > 0.01
    assert second["penalized_reward"] == pytest.approx(second["reward"] - 0.01 * second["kl"], rel=1e-6)


def test_checkpoints_are_links_into_the_cache(job: Project) -> None:
    """Two names of one file: the work tree and the cache."""
    weights = next(Path(job.root / "artifacts/policy/0002/model").glob("*.safetensors"))
    assert weights.stat().st_nlink == 2
