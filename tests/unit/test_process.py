"""One stage at a time."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rloo_pipeline import process as module
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import Layout
from rloo_pipeline.process import die_with_dvc, exclusive

HOLD = """
import sys
from pathlib import Path
from rloo_pipeline.layout import Layout
from rloo_pipeline.process import exclusive
with exclusive(Layout(Path(sys.argv[1])), "rollouts 0001"):
    print("held", flush=True)
    sys.stdin.read()
"""

STAGE = """
import time
from rloo_pipeline.process import die_with_dvc
die_with_dvc()
print("started", flush=True)
time.sleep(600)
"""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that is held is refused at once."""
    monkeypatch.setattr(module, "SECONDS_TO_DIE", 0.0)


@pytest.mark.usefixtures("impatient")
def test_one_at_a_time(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    refusal = r"update 0001.* runs in this project; wait.*run rewards 0001 again"
    with exclusive(layout, "update 0001"), pytest.raises(UserError, match=refusal), exclusive(layout, "rewards 0001"):
        raise AssertionError
    with exclusive(layout, "rewards 0001"):
        pass


def test_another_project_is_free(tmp_path: Path) -> None:
    with exclusive(Layout(tmp_path / "a"), "update 0001"), exclusive(Layout(tmp_path / "b"), "update 0001"):
        assert (tmp_path / "a/.rloo/lock").read_text() == (tmp_path / "b/.rloo/lock").read_text() != ""


def test_a_failed_stage_gives_the_lock_back(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), exclusive(Layout(tmp_path), "update 0001"):
        raise ZeroDivisionError
    with exclusive(Layout(tmp_path), "update 0001"):
        pass


@pytest.mark.usefixtures("impatient")
def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with (
            pytest.raises(UserError, match=rf"rollouts 0001.*{process.pid}"),
            exclusive(Layout(tmp_path), "update 0001"),
        ):
            raise AssertionError
        process.kill()
        process.wait()
    with exclusive(Layout(tmp_path), "update 0001"):
        pass


def test_a_process_that_is_being_killed_is_waited_for(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        killing = threading.Timer(0.5, process.kill)
        killing.start()
        with exclusive(Layout(tmp_path), "update 0001"):
            assert process.wait() == -9


def test_outside_dvc_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DVC_STAGE", raising=False)
    before = threading.active_count()
    die_with_dvc()
    assert threading.active_count() == before


def test_a_stage_ends_when_its_dvc_was_killed_and_nobody_waits_for_that(tmp_path: Path) -> None:
    """As in a container whose first process reaps nobody: the killed DVC stays in the table of processes."""
    (tmp_path / "stage.py").write_text(STAGE)
    start = "import subprocess, sys; subprocess.run(sys.argv[1], shell=True)"  # the shell stays, for `true`
    dvc = subprocess.Popen(
        [sys.executable, "-c", start, f"'{sys.executable}' '{tmp_path / 'stage.py'}'; true"],
        env={**os.environ, "DVC_STAGE": "update@0001"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert dvc.stdout is not None
    try:
        assert dvc.stdout.readline() == "started\n"
        os.kill(dvc.pid, signal.SIGKILL)
        # Reads to the end of the stage's output, and only then waits for the killed process.
        _, said = dvc.communicate(timeout=60)
        assert "DVC, which started this stage, is gone" in said
    finally:
        if dvc.returncode is None:
            os.killpg(dvc.pid, signal.SIGKILL)
            dvc.communicate()
