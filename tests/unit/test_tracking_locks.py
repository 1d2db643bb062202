"""The states of dvc.lock in git: parsed once, then kept."""

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import Layout
from rloo_pipeline.tracking import locks
from rloo_pipeline.tracking.locks import Lock, Locks

TEXT = """schema: '2.0'
stages:
  update@0001:
    cmd: rloo update 0001
    outs:
    - path: metrics/update/0001.json
      md5: abc
    - path: artifacts/policy/0001/model
      md5: def.dir
"""
CONTENT = {
    "schema": "2.0",
    "stages": {
        "update@0001": {
            "cmd": "rloo update 0001",
            "outs": [
                {"path": "metrics/update/0001.json", "md5": "abc"},
                {"path": "artifacts/policy/0001/model", "md5": "def.dir"},
            ],
        }
    },
}
EXPECTED = Lock(
    hashlib.sha256(json.dumps(CONTENT, sort_keys=True).encode()).hexdigest(),
    hashlib.sha256(TEXT.encode()).hexdigest(),
    {"metrics/update/0001.json": "abc"},
)


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """A project of two commits, the second with a dvc.lock."""
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "none")
    (tmp_path / "dvc.lock").write_text(TEXT)
    git(tmp_path, "add", "dvc.lock")
    git(tmp_path, "commit", "-q", "-m", "lock")
    return Layout(tmp_path)


def test_locks_of_now_and_in_git(layout: Layout) -> None:
    assert Locks(layout).working() == EXPECTED
    assert Locks(layout).at("HEAD") == EXPECTED
    assert Locks(layout).at("HEAD~1") is None
    assert list(Locks(layout).committed()) == [(git(layout.root, "rev-parse", "HEAD"), EXPECTED)]


def test_a_committed_lock_is_parsed_once(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    parse = locks.parse_lock
    monkeypatch.setattr(locks, "parse_lock", lambda text: parsed.append(text) or parse(text))
    for _ in range(3):
        assert [lock for _, lock in Locks(layout).committed()] == [EXPECTED]
    assert parsed == [TEXT]


def test_a_broken_cache_is_told(layout: Layout) -> None:
    layout.state.mkdir()
    (layout.state / "locks.json").write_text("{")
    with pytest.raises(UserError, match=r"locks\.json: not readable as JSON .*remove it$"):
        Locks(layout)
