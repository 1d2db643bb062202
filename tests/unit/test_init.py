"""Starting a project of one's own: what is there afterwards, and what is refused."""

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from dvc.utils.serialize import modify_yaml
from ruamel.yaml import YAML

from rloo_pipeline import algorithms
from rloo_pipeline.config import load_params
from rloo_pipeline.errors import UserError
from rloo_pipeline.init import EXAMPLES, PROJECT, examples, start
from rloo_pipeline.sources import check_listed
from tests.project import REPOSITORY
from tests.project_graph import OF_PROJECTS, of_projects


def files(root: Path) -> set[str]:
    """All files below `root` but git's own."""
    paths = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return {path.as_posix() for path in paths if path.parts[0] != ".git"}


def test_every_example_starts(tmp_path: Path) -> None:
    for name in examples():
        root = tmp_path / name
        start(root, name)
        made = {"params.yaml", "dvc.yaml", "prefect.yaml", "README.md", ".gitignore", ".dvcignore", ".dvc/config"}
        assert made <= files(root)
        check_listed(load_params(root / "params.yaml"), root)
        assert YAML(typ="safe").load((root / "algorithms.yaml").read_text()) == algorithms.installed()
        assert "/artifacts/\n" in (root / ".gitignore").read_text()
        assert (root / ".git").is_dir()
        assert root.stat().st_mode & 0o777 == 0o755
        graph = YAML(typ="safe").load((root / "dvc.yaml").read_text())["stages"]
        deps = {dep for stage in graph.values() for dep in stage.get("do", stage).get("deps", ())}
        for folder in (dep for dep in deps if dep.startswith("sources/")):
            assert (root / folder / "README").is_file(), f"DVC asks for {folder}"
    assert {path.name for path in tmp_path.iterdir()} == set(examples())


def test_what_comes_next_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(tmp_path / "own", "arithmetic")
    said = capsys.readouterr().out
    for command in (f"cd {tmp_path / 'own'}", "rloo check", "dvc repro", "rloo table"):
        assert f"  {command}\n" in said
    assert "part of the git repository" not in said


def test_an_empty_folder_with_git_and_an_environment_will_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "own"
    (root / ".venv").mkdir(parents=True)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    (root / ".git" / "mine").write_text("kept")
    start(root, "arithmetic")
    assert (root / ".git" / "mine").read_text() == "kept"
    assert "params.yaml" in files(root)
    assert not list(root.glob(".rloo-init*"))
    assert "part of the git repository" not in capsys.readouterr().out


def test_what_an_example_keeps_out_of_git_stays_out(tmp_path: Path) -> None:
    start(tmp_path / "own", "sentiment")
    ignored = (tmp_path / "own" / ".gitignore").read_text().splitlines()
    assert {"/data/", "/artifacts/"} <= set(ignored)


def test_inside_a_repository_there_is_no_second_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    start(tmp_path / "part", "arithmetic")
    assert not (tmp_path / "part" / ".git").exists()
    assert f"as a part of the git repository {tmp_path}" in capsys.readouterr().out


def test_a_folder_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds notes\.txt; name a new or an empty folder"):
        start(tmp_path, "arithmetic")
    with pytest.raises(UserError, match="is a file"):
        start(tmp_path / "notes.txt", "arithmetic")
    assert files(tmp_path) == {"notes.txt"}


@pytest.mark.parametrize("name", [None, "arithmetics", "..", "../examples/arithmetic", ""])
def test_unknown_examples_are_refused_and_the_known_listed(tmp_path: Path, name: str | None) -> None:
    with pytest.raises(UserError) as refused:
        start(tmp_path / "own", name)
    for known in examples():
        assert f"--example {known} " in str(refused.value)
    assert not (tmp_path / "own").exists()


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="git is not installed"):
        start(tmp_path / "own", "arithmetic")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="git is not installed"):
        start(tmp_path / "empty", "arithmetic")
    assert os.listdir(tmp_path) == ["empty"]  # noqa: PTH208
    assert not list((tmp_path / "empty").iterdir())


def test_the_graph_is_the_repositorys_own() -> None:
    assert OF_PROJECTS.read_text() == of_projects(), "python -m tests.project_graph writes it anew"


def test_the_settings_of_dvc_git_and_prefect_are_the_repositorys_own() -> None:
    assert (PROJECT / "dvc_config").read_text() == (REPOSITORY / ".dvc" / "config").read_text()
    assert (PROJECT / "dvc_gitignore").read_text() == (REPOSITORY / ".dvc" / ".gitignore").read_text()
    assert (PROJECT / "dvcignore").read_text() == (REPOSITORY / ".dvcignore").read_text()
    assert (PROJECT / "prefect.yaml").read_text() == (REPOSITORY / "prefect.yaml").read_text()
    ignored = (PROJECT / "gitignore").read_text().splitlines()
    assert set(ignored) < set((REPOSITORY / ".gitignore").read_text().splitlines())


def test_the_repository_is_the_example_arithmetic() -> None:
    own = (REPOSITORY / "params.yaml").read_text()
    assert own.replace("rloo_pipeline/examples/arithmetic/", "") == (EXAMPLES / "arithmetic/params.yaml").read_text()


@pytest.mark.parametrize(
    "path", [REPOSITORY / "params.yaml", *sorted(EXAMPLES.glob("*/params.yaml"))], ids=lambda path: path.parent.name
)
def test_dvc_can_write_settings_back(path: Path, tmp_path: Path) -> None:
    """As `dvc exp run -S` does."""
    shutil.copyfile(path, tmp_path / "params.yaml")
    with modify_yaml(str(tmp_path / "params.yaml")) as values:
        values["seed"] = 5
    written = load_params(tmp_path / "params.yaml")
    assert written == load_params(path).model_copy(update={"seed": 5})


def test_a_built_package_has_all_files_of_examples_and_projects() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]
    package = REPOSITORY / "rloo_pipeline"
    packed = {path for pattern in settings["package-data"]["rloo_pipeline"] for path in package.glob(pattern)}
    listed = subprocess.run(
        ["git", "ls-files", "--", "rloo_pipeline/examples", "rloo_pipeline/project"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    assert listed
    assert not [name for name in listed if REPOSITORY / name not in packed]


def test_numbers_are_written_only_where_they_differ(tmp_path: Path) -> None:
    names = list(algorithms.installed())
    assert algorithms.refresh(tmp_path) == [f"{name} none -> {algorithms.installed()[name]}" for name in names]
    before = (tmp_path / "algorithms.yaml").stat()
    assert algorithms.refresh(tmp_path) == []
    assert (tmp_path / "algorithms.yaml").stat() == before
    (tmp_path / "algorithms.yaml").write_text("".join(f"{name}: 0\n" for name in [*names[1:], "gone"]))
    changes = algorithms.refresh(tmp_path)
    assert f"{names[1]} 0 -> {algorithms.installed()[names[1]]}" in changes
    assert "gone 0 -> none" in changes
    assert algorithms.refresh(tmp_path) == []
