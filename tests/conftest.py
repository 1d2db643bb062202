"""Finished projects, made once for all tests, and the command line called in this process."""

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import settings

from tests.project import Project

# No test fails for being slow, on a loaded machine say.
settings.register_profile("rloo", deadline=None)
settings.load_profile("rloo")

# Scores that differ between nearly all completions of a random model.
REWARD = '''
def score(completions, **kwargs):
    """Sum of the characters' numbers modulo 11, in tenths."""
    return [sum(map(ord, text)) % 11 / 10 for text in completions]
'''
EOS_IDS = [1, *range(2, 258, 6)]


def varied_project(root: Path) -> Project:
    """A new project whose rewards vary and whose completions often end in an EOS."""
    project = Project.create(root)
    (root / "reward.py").write_text(REWARD)
    path = root / "tiny" / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": EOS_IDS}))
    return project


def finish(root: Path) -> Project:
    """A varied project after `dvc repro`."""
    project = varied_project(root)
    project.repro()
    return project


@pytest.fixture(scope="session")
def finished_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Project]:
    """Two equal projects in different places, each made by a `dvc repro` of its own. Not to be written to."""
    folder = tmp_path_factory.mktemp("finished")
    # One after the other, since both draw weights from torch's global generator; only the commands run at once.
    first, second = varied_project(folder / "first"), varied_project(folder / "another place")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(Project.repro, [first, second]))
    return first, second


@pytest.fixture(scope="session")
def finished_project(finished_pair: tuple[Project, Project]) -> Project:
    """A project after `dvc repro` of two iterations. Not to be written to: work on a `.copy(tmp_path / ...)`."""
    return finished_pair[0]


@dataclass(frozen=True)
class Outcome:
    """How a command ended and what it wrote."""

    code: int
    stderr: str
    stdout: str = ""


CommandLine = Callable[..., Outcome]


@pytest.fixture
def rloo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """`rloo(project, *arguments)`: the command line in this process, which saves its start."""
    from rloo_pipeline.cli import main

    def call(project: Project, *arguments: str) -> Outcome:
        monkeypatch.chdir(project.root)
        monkeypatch.setattr(sys, "argv", ["rloo", *arguments])
        capsys.readouterr()
        with mock.patch.dict(os.environ), pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        written = capsys.readouterr()
        return Outcome(code if isinstance(code, int) else 0 if code is None else 1, written.err, written.out)

    return call
