"""A real `dvc repro` killed in the middle of a stage and run again at once; two at once."""

import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ruamel.yaml import YAML

from rloo_pipeline import process
from tests.conftest import CommandLine
from tests.project import Project, environment

# Holds `rloo STAGE` before the rename of the file named in HOLD_AT, until there is a file `go`.
HOLD = """
import os, sys, time
if "HOLD_AT" in os.environ and os.path.basename((sys.orig_argv + ["", ""])[1]) == "rloo":
    def hold(event, arguments):
        if event == "os.rename" and os.fspath(arguments[0]).endswith(os.environ["HOLD_AT"]):
            open("held", "w").close()
            while not os.path.exists("go"):
                time.sleep(0.05)
    sys.addaudithook(hold)
"""
SECOND_SHARD = ".shard-00001.parquet.tmp"
FILES = ("artifacts", "metrics", "provenance")


@pytest.fixture
def project(finished_project: Project, tmp_path: Path) -> Project:
    """A copy of the finished project with the hook that holds a stage."""
    project = finished_project.copy(tmp_path / "project")
    (project.root / "hook").mkdir()
    (project.root / "hook" / "sitecustomize.py").write_text(HOLD)
    return project


def forget(project: Project, stage: str) -> None:
    """Make a stage of 0001 one that was never run, as far as DVC can tell."""
    lock = project.lock()
    for out in lock["stages"].pop(f"{stage}@0001")["outs"]:
        (project.root / ".dvc/cache/files/md5" / out["md5"][:2] / out["md5"][2:]).unlink()
    with (project.root / "dvc.lock").open("w") as file:
        YAML().dump(lock, file)


def repro(project: Project, stage: str, **extra: str) -> "subprocess.Popen[str]":
    """`dvc repro` of one stage of 0001 in a process group of its own, its output in the file `log`."""
    with (project.root / "log").open("w") as log:
        command = ["dvc", "repro", "-s", f"{stage}@0001"]
        return subprocess.Popen(
            command, cwd=project.root, env=environment(**extra), stdout=log, stderr=log, text=True, process_group=0
        )


@pytest.fixture
def held(project: Project) -> Iterator[dict[str, "subprocess.Popen[str]"]]:
    """What tests have started by `start`; ended afterwards."""
    started: dict[str, subprocess.Popen[str]] = {}
    yield started
    for dvc in started.values():
        if dvc.poll() is None:
            os.killpg(dvc.pid, signal.SIGKILL)
        dvc.wait()


def start(project: Project, stage: str, at: str, held: dict[str, "subprocess.Popen[str]"]) -> list[psutil.Process]:
    """`dvc repro` of a stage up to the rename of the file `at`; returns DVC's process and all below it."""
    forget(project, stage)
    path = os.pathsep.join([str(project.root / "hook"), *filter(None, [os.environ.get("PYTHONPATH")])])
    dvc = held[stage] = repro(project, stage, PYTHONPATH=path, HOLD_AT=at)
    while not (project.root / "held").exists():
        assert dvc.poll() is None, (project.root / "log").read_text()
        time.sleep(0.1)
    top = psutil.Process(dvc.pid)
    return [top, *top.children(recursive=True)]


def check_as_undisturbed(project: Project, finished: Project) -> None:
    """The same files, the same dvc.lock, and a DVC cache whose every object is what its name says."""
    for folder in FILES:
        files = {p.relative_to(finished.root): p for p in (finished.root / folder).rglob("*") if p.is_file()}
        assert {p.relative_to(project.root) for p in (project.root / folder).rglob("*") if p.is_file()} == set(files)
        for name, path in files.items():
            assert (project.root / name).read_bytes() == path.read_bytes(), name
    assert project.lock() == finished.lock()
    for path in (project.root / ".dvc/cache/files/md5").glob("??/*"):
        content = hashlib.md5(path.read_bytes()).hexdigest()
        assert path.parent.name + path.name.removesuffix(".dir") == content


@pytest.mark.parametrize(
    ("stage", "at", "victim", "number"),
    [
        ("rewards", SECOND_SHARD, "stage", signal.SIGKILL),
        ("rewards", SECOND_SHARD, "dvc", signal.SIGKILL),
        ("rewards", SECOND_SHARD, "group", signal.SIGKILL),
        ("rewards", SECOND_SHARD, "group", signal.SIGINT),
        ("update", ".state.json.tmp", "dvc", signal.SIGTERM),
    ],
)
def test_killed_and_run_again_at_once(
    stage: str,
    at: str,
    victim: str,
    number: int,
    project: Project,
    finished_project: Project,
    held: dict[str, "subprocess.Popen[str]"],
) -> None:
    processes = start(project, stage, at, held)
    assert len(processes) >= 2
    if victim == "group":
        os.killpg(held[stage].pid, number)
    else:
        of_stage = [process for process in processes if "rloo" in [Path(part).name for part in process.cmdline()[:2]]]
        (of_stage if victim == "stage" else processes)[0].send_signal(number)
    held[stage].wait()
    held["again"] = repro(project, stage)
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []
    assert held["again"].wait() == 0, (project.root / "log").read_text()
    log = (project.root / "log").read_text()
    assert f"> rloo {stage} 0001" in log
    assert log.count("kept") == (stage == "rewards")
    check_as_undisturbed(project, finished_project)


def test_output_deleted(
    project: Project,
    finished_project: Project,
    held: dict[str, "subprocess.Popen[str]"],
    rloo: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second repro of the stage, any other stage and the command that tends leftovers stop; the first one ends well.

    DVC deletes the outputs before it starts a stage: partial output stands elsewhere.
    """
    monkeypatch.setattr(process, "SECONDS_TO_DIE", 0.0)
    first = start(project, "rewards", SECOND_SHARD, held)
    assert not (project.root / "artifacts/rewards/0001").exists()
    second = project.run("dvc", "repro", "-s", "rewards@0001", check=False)
    assert second.returncode != 0
    assert f"(PID {first[0].pid})" in second.stderr
    for command in (["advantages", "0002"], ["clean", "--all"]):
        done = rloo(project, *command)
        assert done.code == 2
        assert "rewards 0001" in done.stderr
        assert "runs in this project" in done.stderr
    (project.root / "go").touch()
    assert held["rewards"].wait() == 0, (project.root / "log").read_text()
    check_as_undisturbed(project, finished_project)


def test_a_stage_whose_dvc_was_gone_before_it_looked_ends(tmp_path: Path) -> None:
    """Its parent is then whatever adopts orphans, in another process group."""
    code = (
        "import os, time\nfrom rloo_pipeline.process import die_with_dvc\n"
        "os.write(1, b'%d' % os.getpid())\nos.setpgid(0, 0)\ndie_with_dvc()\ntime.sleep(300)"
    )
    done = subprocess.run(
        ["python", "-c", code], env=environment(DVC_STAGE="update@0001"), capture_output=True, timeout=120, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert b"DVC, which started this stage, is gone" in done.stderr
    assert not psutil.pid_exists(json.loads(done.stdout))
