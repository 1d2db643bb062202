"""A project without the package's source: what another project made goes on under its own DVC graph."""

import shutil
from pathlib import Path

import pytest

from flows import chain, dvc
from rloo_pipeline import algorithms
from rloo_pipeline.config import load_params
from rloo_pipeline.init import start
from tests.conftest import CommandLine
from tests.project import PARAMS, Project
from tests.tiny import make_policy

AGAIN = "> rloo algorithms"


@pytest.fixture(scope="module")
def own(finished_project: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project of one's own with the results of another, as if it had made them itself."""
    root = tmp_path_factory.mktemp("own") / "project"
    start(root, "arithmetic")
    there = {".git", ".gitignore", ".dvcignore", "dvc.yaml", "rloo_pipeline", "config"}
    shutil.copytree(
        finished_project.root, root, symlinks=True, dirs_exist_ok=True, ignore=lambda _, names: there & set(names)
    )
    lock = (root / "dvc.lock").read_text()
    (root / "dvc.lock").write_text(lock.replace("rloo_pipeline/algorithms.yaml:", "algorithms.yaml:"))
    return Project(root)


def numbers_were(project: Project, **older: int) -> None:
    """As if the last run had been of a package with these numbers."""
    for name in ("dvc.lock", "algorithms.yaml"):
        text = (project.root / name).read_text()
        for stage, number in older.items():
            text = text.replace(f"{stage}: {algorithms.installed()[stage]}\n", f"{stage}: {number}\n")
        (project.root / name).write_text(text)


def test_nothing_to_do(own: Project) -> None:
    """The numbers are looked at, and nothing else runs; a second time dvc.lock stays as it is, byte for byte."""
    assert own.repro() == ["rloo algorithms"]
    before = (own.root / "dvc.lock").read_bytes()
    said = own.run("dvc", "repro").stdout
    assert [line for line in said.splitlines() if line.startswith("> ")] == [AGAIN]
    assert "algorithms.yaml: as before" in said
    assert (own.root / "dvc.lock").read_bytes() == before
    assert chain.to_run(own.root, load_params(own.root / "params.yaml")) == ([], [])


def test_flows_look_at_the_numbers_first(own: Project, finished_project: Project) -> None:
    assert chain.before_status(own.root) == [algorithms.STAGE]
    assert chain.before_status(finished_project.root) == [], "the package's source is there"


def test_a_risen_number_runs_its_stage_and_no_other(own: Project, tmp_path: Path) -> None:
    """The rewards come out as before, so that what follows them has nothing to do."""
    project = own.copy(tmp_path / "copy")
    numbers_were(project, rewards=0)
    lines: list[str] = []
    assert dvc.repro(project.root, algorithms.STAGE, lines.append)
    assert f"algorithms.yaml: rewards 0 -> {algorithms.installed()['rewards']}" in lines
    assert chain.to_run(project.root, load_params(project.root / "params.yaml")) == ([], ["0001", "0002"])
    assert project.repro() == ["rloo algorithms", "rloo rewards 0001", "rloo rewards 0002"]


def test_prune_knows_the_installed_numbers(own: Project, tmp_path: Path, rloo: CommandLine) -> None:
    """A stage that a newer package would run again keeps the policies that it reads."""
    project = own.copy(tmp_path / "copy")
    assert "0001" in rloo(project, "prune", "--keep-last", "1", "--dry-run").stdout.splitlines()[0]
    numbers_were(project, logprobs=0)
    said = rloo(project, "prune", "--keep-last", "1", "--dry-run").stdout
    assert "0001 (logprobs@0002 is not up to date and reads it)" in said


def test_the_other_commands(own: Project, rloo: CommandLine) -> None:
    for command in (["table"], ["lineage", "0002"], ["diff", "0001", "0002"], ["verify", "0002", "--stage", "rewards"]):
        done = rloo(own, *command)
        assert done.code == 0, f"{command}: {done.stderr}"


def test_stages_run_from_its_files(tmp_path: Path, rloo: CommandLine) -> None:
    """An iteration of the example with another model; DVC, which runs the same commands, is left out."""
    project = Project(tmp_path / "own")
    project.root.mkdir()
    assert rloo(project, "init", ".", "--example", "arithmetics").code == 2
    assert rloo(project, "init", ".", "--example", "arithmetic").stdout.startswith(".: a project from the example")
    make_policy(project.root / "tiny")
    params = project.params()
    params["policy"]["model"] = "tiny"
    params["sources"]["policy"] = {"path": "tiny", "used_by": "policy"}
    params["prompts"]["train"]["kwargs"] = {"size": 8}
    params["prompts"]["eval"]["kwargs"] = {"size": 2}
    for section in ("rollouts", "evaluate", "execution"):
        params[section] = PARAMS[section]
    project.write_params(params)
    sources = [["sources", name] for name in params["sources"]]
    iteration = [[stage, "0001"] for stage in ("rollouts", "logprobs", "rewards", "advantages", "update", "evaluate")]
    for command in [*sources, ["prepare"], ["evaluate", "0000"], *iteration, ["history"]]:
        done = rloo(project, *command)
        assert done.code == 0, f"{command}: {done.stderr}"
    assert project.json("metrics/update/0001.json")["completions"] == 16
    assert project.json("sources/rewards/reward.json")["path"] == "reward.py"


def test_dvc_works_inside_another_repository(tmp_path: Path) -> None:
    outer = Project(tmp_path)
    outer.run("git", "init", "-q")
    start(tmp_path / "part", "arithmetic")
    part = Project(tmp_path / "part")
    part.run("dvc", "repro", "sources")
    assert part.json("sources/prompts/prompts.json")["path"] == "prompts.py"
    outer.run("git", "add", ".")
    staged = outer.run("git", "diff", "--cached", "--name-only").stdout.split()
    assert {"part/dvc.lock", "part/params.yaml", "part/algorithms.yaml", "part/.dvc/config"} <= set(staged)
    assert "part/.dvc/tmp" not in {Path(name).parent.as_posix() for name in staged}
