"""The same run without any server, and how DVC's failures are told apart."""

import subprocess
import sys
from pathlib import Path

import pytest

from flows import dvc
from rloo_pipeline import gpu
from rloo_pipeline.layout import Layout
from rloo_pipeline.tracking.book import lock_hash, read_runs
from tests.conftest import CommandLine
from tests.project import Project


def plainly(project: Project, *arguments: str) -> tuple[int, str]:
    """`python -m flows.training` with no server configured; its status and what it said."""
    unset = {"PREFECT_HOME": str(project.root / "prefect"), "PREFECT_API_URL": ""}
    done = project.run("python", "-m", "flows.training", *arguments, check=False, **unset)
    return done.returncode, done.stderr


def test_prefect_sqlite(finished_project: Project, tmp_path: Path) -> None:
    """Without a server no server is started and no database made, and the stages run."""
    project = finished_project.copy(tmp_path / "copy")
    project.run("dvc", "remote", "add", "store", str(tmp_path / "store"))
    settings = ("iterations.0002.evaluate=false", "execution.tracking=true")
    code, said = plainly(project, *(word for value in settings for word in ("--set", value)), "--target", "store")
    assert code == 0, said
    assert "> rloo evaluate 0002" in said
    assert "> rloo history" in said
    assert "> rloo rollouts" not in said
    assert not list((project.root / "prefect").rglob("*.db"))
    assert project.run("dvc", "status", "--json").stdout.strip() == "{}"
    assert project.run("dvc", "status", "--remote", "store", "--json").stdout.strip() == "{}"
    (run,) = read_runs(Layout(project.root))
    assert [link.dvc_lock for link in run.links] == [lock_hash(project.lock())], "MLflow learns of the finished lock"


def test_user_errors_are_told(finished_project: Project, tmp_path: Path) -> None:
    project = finished_project.copy(tmp_path / "copy")
    code, said = plainly(project, "--set", "advantages.betta=1")
    assert code == 2
    assert "error: params.yaml: advantages.betta: there is no such key" in said
    code, said = plainly(project, "--target", "nowhere")
    assert code == 2
    assert "error: target nowhere: no such DVC remote; there are: none" in said


def test_a_user_error_in_a_stage_is_not_tried_again(finished_project: Project, tmp_path: Path) -> None:
    """DVC's exit status is 255 for every failure; the stage's own message and kind come through."""
    project = finished_project.copy(tmp_path / "copy")
    project.change("rewards", [{"name": "letters", "function": "reward.py:missing"}])
    lines: list[str] = []
    with pytest.raises(dvc.Failed, match=r"^rewards@0001: reward.py:missing: reward.py has no missing") as failed:
        dvc.repro(project.root, "rewards@0001", lines.append)
    assert not isinstance(failed.value, dvc.CanPass)
    assert "> rloo rewards 0001" in lines


def test_a_lock_of_dvc_can_pass(finished_project: Project, tmp_path: Path) -> None:
    project = finished_project.copy(tmp_path / "copy")
    hold = "import sys; from dvc.repo import Repo; repo = Repo('.'); repo.lock.lock(); print('held'); sys.stdin.read()"
    command = [sys.executable, "-u", "-c", hold]
    with subprocess.Popen(command, cwd=project.root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as held:
        assert held.stdout is not None
        assert held.stdout.readline() == "held\n"
        with pytest.raises(dvc.CanPass, match="Unable to acquire lock"):
            dvc.repro(project.root, "history", print)
        held.kill()


def test_a_stage_that_is_not_there(finished_project: Project) -> None:
    with pytest.raises(dvc.Failed, match=r"nonsense@0001 failed with status 255") as failed:
        dvc.repro(finished_project.root, "nonsense@0001", print)
    assert not isinstance(failed.value, dvc.CanPass)


def test_a_stage_by_hand_is_held_off_a_taken_gpu(
    finished_project: Project, tmp_path: Path, rloo: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = finished_project.copy(tmp_path / "copy")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setattr(gpu, "SECONDS_TO_DIE", 0.0)
    with gpu.exclusive(Layout(tmp_path / "other"), "update 0003"):
        held_off = rloo(project, "rewards", "0001")
        assert held_off.code == 2
        assert "update 0003" in held_off.stderr
        assert f"{tmp_path / 'other'}" in held_off.stderr
        assert "runs on GPU 7 of this machine; wait for it or stop it, then run rewards 0001 again" in held_off.stderr
        assert rloo(project, "history").code == 0
