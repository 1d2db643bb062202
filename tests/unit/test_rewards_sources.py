"""Callables of the user's own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rloo_pipeline.errors import UserError
from rloo_pipeline.rewards.sources import load_callable, user_file


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ("reward.py:score", Path("reward.py")),
        ("/some where/reward.py:score", Path("/some where/reward.py")),
        ("trl.rewards:accuracy_reward", None),
        ("reward", None),
    ],
)
def test_user_file(spec: str, path: Path | None) -> None:
    assert user_file(spec) == path


def test_a_file_is_read_anew_even_within_the_second(tmp_path: Path) -> None:
    for value in ("1", "2", "3"):
        (tmp_path / "reward.py").write_text(f"def score(): return {value}")
        assert load_callable("reward.py:score", tmp_path)() == int(value)
    assert [path.name for path in tmp_path.iterdir()] == ["reward.py"]


def test_a_file_may_use_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "rloo_test_neighbour.py").write_text("VALUE = 7")
    code = "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\ndef score():\n"
    (tmp_path / "reward.py").write_text(code + "    from rloo_test_neighbour import VALUE\n    return A(VALUE).x")
    assert load_callable("reward.py:score", tmp_path)() == 7


def test_spawned_processes_find_the_functions_of_a_file(tmp_path: Path) -> None:
    """As they must where processes are not forked, as in Python 3.14."""
    (tmp_path / "rloo_test_pool.py").write_text(
        "from multiprocessing import get_context\n"
        "def single(text):\n    return len(text)\n"
        "def score():\n"
        "    with get_context('spawn').Pool(1) as pool:\n"
        "        return pool.map_async(single, ['a', 'bc']).get(60)\n"
    )
    script = (
        "import sys; from pathlib import Path; from rloo_pipeline.rewards.sources import load_callable; "
        "print(load_callable('rloo_test_pool.py:score', Path(sys.argv[1]))())"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=False)
    assert done.stdout == "[1, 2]\n", done.stderr


@pytest.mark.parametrize("name", ["json", "time", "pytest", "two words"])
def test_a_file_takes_no_other_modules_name(name: str, tmp_path: Path) -> None:
    taken = sys.modules.get(name)
    (tmp_path / f"{name}.py").write_text("def score(): return 7")
    assert load_callable(f"{name}.py:score", tmp_path)() == 7
    assert sys.modules.get(name) is taken


def test_two_files_of_one_name(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "reward.py").write_text(f"def score(): return {name!r}")
    assert [load_callable(f"{name}/reward.py:score", tmp_path)() for name in ("a", "b")] == ["a", "b"]


def test_module() -> None:
    assert load_callable("json:dumps", Path()) is json.dumps


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("reward.py", "'reward.py': write it as path/file.py:callable or module:callable"),
        (":score", "write it as"),
        ("reward.py:", "write it as"),
        ("gone.py:score", "gone.py: no such file; the path is taken from the project's folder"),
        ("no_such_module:score", "module no_such_module could not be imported: ModuleNotFoundError"),
        ("json:score", "json has no score; it has .*dumps"),
        ("json:__name__", "__name__ is a str, not a callable"),
    ],
)
def test_bad_specs(tmp_path: Path, spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_callable(spec, tmp_path)
