"""How a command ended, told in a file."""

import json
from pathlib import Path

import pytest

from rloo_pipeline.errors import Busy, UserError
from rloo_pipeline.outcome import VARIABLE, told


@pytest.fixture
def told_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "folder" / "outcome.json"
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def read(path: Path) -> dict[str, str]:
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UserError("params.yaml: seed: not a number"), "user"),
        (Busy("update 0001 runs in this project"), "passing"),
        (UserError("model: vLLM does not start: Free memory on device cuda:0 (1/80 GiB) is less than"), "passing"),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"), "passing"),
        (RuntimeError("Engine core initialization failed. See root cause above."), "passing"),
        (ConnectionError("reward service"), "passing"),
        (RuntimeError("shapes differ"), "error"),
    ],
)
def test_kinds(told_in: Path, error: Exception, kind: str) -> None:
    with pytest.raises(type(error)), told():
        raise error
    assert read(told_in) == {"kind": kind, "message": str(error)}


@pytest.mark.parametrize(("code", "kind"), [(0, "done"), (None, "done"), (2, "user")])
def test_exits(told_in: Path, code: int | None, kind: str) -> None:
    with pytest.raises(SystemExit), told():
        raise SystemExit(code)
    assert read(told_in)["kind"] == kind


def test_a_command_that_never_ends_is_killed(told_in: Path) -> None:
    with told():
        assert read(told_in)["kind"] == "killed"
    assert read(told_in)["kind"] == "done"


def test_nothing_is_told_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    with told():
        pass
    assert not list(tmp_path.iterdir())
