"""DVC's own commands on a run: push and pull into a fresh clone, metrics, plots, experiments."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rloo_pipeline import prune
from rloo_pipeline.cache import other_revisions
from rloo_pipeline.layout import Layout
from rloo_pipeline.prune_plan import Rule
from tests.project import Project


@pytest.fixture(scope="module")
def stored(finished_project: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A finished run in git, pushed to a remote that is a local directory. Not to be written to."""
    folder = tmp_path_factory.mktemp("remote")
    project = finished_project.copy(folder / "project")
    project.run("dvc", "remote", "add", "--default", "store", str(folder / "store"))
    for key, value in (("user.name", "t"), ("user.email", "t@example.org")):
        project.run("git", "config", key, value)
    # What the README tells a user to commit.
    project.run("git", "add", "--all")
    project.run("git", "commit", "-qm", "run")
    project.run("dvc", "push")
    return project


def files(project: Project, *folders: str) -> dict[str, bytes]:
    paths = [path for folder in folders for path in (project.root / folder).rglob("*") if path.is_file()]
    return {path.relative_to(project.root).as_posix(): path.read_bytes() for path in paths}


def shown(project: Project, *command: str) -> Any:
    return json.loads(project.run("dvc", *command, "--json").stdout)


def test_a_fresh_clone_pulls_the_run_and_has_nothing_to_do(stored: Project, tmp_path: Path) -> None:
    clone = Project(tmp_path / "clone")
    stored.run("git", "clone", "-q", str(stored.root), str(clone.root))
    assert not (clone.root / "artifacts").exists()
    clone.run("dvc", "pull")
    folders = ("artifacts", "metrics", "provenance", "sources")
    assert files(clone, *folders) == files(stored, *folders)
    assert clone.repro() == []
    assert clone.run("git", "status", "--porcelain").stdout == ""
    assert "up to date" in clone.run("dvc", "status").stdout


def test_what_was_pruned_after_a_push_comes_back_with_a_pull(stored: Project, tmp_path: Path) -> None:
    project = stored.copy(tmp_path / "project")
    policy = files(project, "artifacts/policy")
    prune.run(Layout(project.root), Rule(keep_last=1), dry_run=False)
    assert not (project.root / "artifacts" / "policy" / "0001").exists()
    project.run("dvc", "pull")
    assert files(project, "artifacts/policy") == policy
    assert project.repro() == []


def test_an_experiment_with_another_learning_rate(stored: Project, tmp_path: Path) -> None:
    """Reruns the update and what follows; its metrics and plots stand beside the run's."""
    project = stored.copy(tmp_path / "project")
    project.rloo("iterations", "1")
    project.run("dvc", "repro", "history")
    project.run("git", "commit", "-qam", "one iteration")
    kept = ("rollouts", "logprobs", "rewards", "advantages")
    before = files(project, *(f"artifacts/{name}/0001" for name in kept), "artifacts/policy/0000")

    done = project.run("dvc", "exp", "run", "--name", "faster", "--set-param", "update.learning_rate=0.004")

    ran = [line.removeprefix("> ") for line in done.stdout.splitlines() if line.startswith("> ")]
    assert ran == ["rloo update 0001", "rloo evaluate 0001", "rloo history"]
    assert files(project, *(f"artifacts/{name}/0001" for name in kept), "artifacts/policy/0000") == before
    assert project.params()["update"]["learning_rate"] == 0.004
    reward = project.json("metrics/evaluate/0001.json")["reward"]
    old = stored.json("metrics/evaluate/0001.json")["reward"]

    metrics = shown(project, "metrics", "show")
    assert metrics[""]["data"]["metrics/evaluate/0001.json"]["data"]["reward"] == reward
    changes = shown(project, "metrics", "diff", "HEAD")
    assert changes["metrics/update/0001.json"]["learning_rate"] == {"old": 0.001, "new": 0.004, "diff": 0.003}
    assert changes["metrics/evaluate/0001.json"]["reward"] == {"old": old, "new": reward, "diff": reward - old}
    assert not {name for name in changes if name.split("/")[1] in kept}
    params = shown(project, "params", "diff", "HEAD")["params.yaml"]
    assert {name: (value["old"], value["new"]) for name, value in params.items()} == {
        "update.learning_rate": (0.001, 0.004)
    }

    points = shown(project, "plots", "diff", "HEAD", "faster")["data"]["held-out reward"][0]
    assert set(points["revisions"]) == {"HEAD", "faster"}
    last = {point["rev"]: point["evaluate/reward"] for point in points["content"]["data"]["values"]
            if point["iteration"] == "0001"}  # fmt: skip
    assert last == {"HEAD": old, "faster": reward}

    # The experiment is a commit of its own, with the provenance that belongs to it; git brings the first state back.
    assert [name for name, _ in other_revisions(project.root)] == ["experiment faster"]
    refs = project.run("git", "for-each-ref", "--format=%(refname)", "refs/exps").stdout.split()
    (ref,) = [name for name in refs if name.endswith("/faster")]
    provenance = json.loads(project.run("git", "show", f"{ref}:provenance/update/0001.json").stdout)
    assert provenance["settings"]["update"]["learning_rate"] == 0.004
    project.run("git", "checkout", "-q", ".")
    project.run("dvc", "checkout")
    assert project.json("metrics/evaluate/0001.json")["reward"] == old
    assert project.repro() == []


def test_metrics_that_git_lacks_are_not_pulled(stored: Project, tmp_path: Path) -> None:
    """Why the metrics must be in git: DVC has no copy of them, so a clone without them runs stages again."""
    clone = Project(tmp_path / "clone")
    stored.run("git", "clone", "-q", str(stored.root), str(clone.root))
    shutil.rmtree(clone.root / "metrics" / "update")
    clone.run("dvc", "pull", check=False)
    assert "update@0001" in shown(clone, "status")
