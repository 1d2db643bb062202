"""Unusable input: exit status 2, a message that says where and what to do, no traceback, nothing half-written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import CommandLine
from tests.project import Project
from tests.tiny import make_policy

ROWS = [{"prompt": f"Say {letter}:", "answer": letter} for letter in "abcdefgh"]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project in which nothing has run."""
    return Project.create(tmp_path / "project")


def written(project: Project) -> dict[str, bytes]:
    """Every file that a stage leaves behind, save its work in progress."""
    folders = ("artifacts", "metrics", "provenance", "timings", "sources")
    paths = [path for folder in folders for path in (project.root / folder).rglob("*") if path.is_file()]
    return {path.relative_to(project.root).as_posix(): path.read_bytes() for path in paths}


def assert_told(stderr: str, *expected: str) -> None:
    assert "Traceback" not in stderr
    assert "error: " in stderr
    for part in expected:
        assert part in stderr


def train(project: Project, rows: list[dict[str, Any]]) -> None:
    (project.root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def with_param(path: str, value: Any) -> Callable[[Project], None]:
    return lambda project: project.change(path, value)


def with_rows(rows: list[dict[str, Any]]) -> Callable[[Project], None]:
    return lambda project: train(project, rows)


def with_broken_parquet(project: Project) -> None:
    (project.root / "train.parquet").write_bytes(b"PAR1 but no more")
    project.change("prompts.train", {"file": "train.parquet"})
    project.change("sources.train.path", "train.parquet")


def with_params_text(text: str) -> Callable[[Project], None]:
    def write(project: Project) -> None:
        (project.root / "params.yaml").write_text(text)

    return write


def without(name: str) -> Callable[[Project], None]:
    return lambda project: (project.root / name).unlink()


def with_unlisted_reward(project: Project) -> None:
    (project.root / "other.py").write_text("def score(completions, **kwargs):\n    return [0.0] * len(completions)\n")
    project.change("rewards", [{"name": "other", "function": "other.py:score"}])


PREPARE = [
    (with_param("rollouts.temprature", 1.0), ["params.yaml", "rollouts.temprature", "check its spelling"]),
    (with_param("rolouts", {"max_tokens": 3}), ["params.yaml", "rolouts", "check its spelling"]),
    (with_param("rollouts.completions_per_prompt", 1), ["completions_per_prompt is 1", "siblings", "at least 2"]),
    (with_param("rollouts.top_p", 0.9), ["top_p", "renormalized", "leave top_p at 1.0"]),
    (with_param("rollouts.max_tokens", 256), ["prompts.train: max_tokens is 256", "256 tokens", "lower max_tokens"]),
    (with_param("prompts.max_prompt_tokens", 3), ["none of 8 prompts", "max_prompt_tokens is 3", "shorten"]),
    (with_rows([{"prompt": "x" * 300}] * 2), ["prompts.train: none of 2 prompts", "300 tokens", "256", "shorten"]),
    (with_rows([]), ["train.jsonl", "no rows", "at least one"]),
    (with_rows([*ROWS, {"prompt": " "}]), ["train.jsonl", "row 9", "empty prompt", "fill or remove"]),
    (with_rows([{"prompt_id": name, **ROWS[0]} for name in "aba"]), ["train.jsonl", "rows 1 and 3", "prompt_id 'a'"]),
    (with_rows([{"question": "a"}]), ["train.jsonl", "no column prompt", "question", "prompts.prompt_column"]),
    (with_rows([{"prompt": "a", "advantage": 1}]), ["train.jsonl", "column advantage", "rename the column"]),
    (with_rows([{"prompt": "a", "reward/x": 1}]), ["train.jsonl", "column reward/x", "rename the column"]),
    (with_broken_parquet, ["train.parquet", "not readable as Parquet", "write or copy it anew"]),
    (without("train.jsonl"), ["train.jsonl", "no such file", "project's folder"]),
    (with_param("policy.model", "nowhere"), ["policy.model nowhere", "no such directory"]),
    (with_param("policy.model", "./models/nowhere"), ["policy.model ./models/nowhere", "no such directory"]),
    (with_param("policy.model", "package:no_such"), ["policy.model package:no_such", "pip install"]),
    (with_unlisted_reward, ["other.py", "`sources` does not list", "used_by: rewards"]),
    (with_params_text("seed: ["), ["params.yaml", "not readable as YAML"]),
    (without("params.yaml"), ["params.yaml", "no such file", "project's folder"]),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "expected"), PREPARE)
def test_prepare(project: Project, rloo: CommandLine, spoil: Callable[[Project], None], expected: list[str]) -> None:
    spoil(project)
    before = written(project)
    done = rloo(project, "prepare")
    assert done.code == 2, done.stderr
    assert_told(done.stderr, *expected)
    assert written(project) == before


def test_too_long(tmp_path: Path, rloo: CommandLine) -> None:
    project = Project.create(tmp_path / "project")
    make_policy(project.root / "tiny", context=16)
    train(project, [{"prompt_id": f"of-{n}", "prompt": "x" * n} for n in (8, 16, 20)])
    project.change("rollouts.max_tokens", 4)
    project.change("evaluate.max_tokens", 4)
    done = rloo(project, "prepare")
    assert done.code == 0, done.stderr
    metrics = project.json("metrics/prepare/0000.json")
    assert (metrics["train_prompts"], metrics["train_prompts_filtered"]) == (1, 2)
    assert "2 of 3 prompts are left out" in done.stderr
    filtered = project.json("provenance/prepare/0000.json")["train_filtered"]
    assert filtered.keys() == {"of-16", "of-20"}
    assert "16 tokens" in filtered["of-16"]
    assert "context of 16 leaves 12" in filtered["of-20"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["rollouts", "0001"], ["artifacts/policy/0000/model", "run the stage that makes it"]),
        (["evaluate", "0000"], ["artifacts/policy/0000/model", "run the stage that makes it"]),
        (["rewards", "0001"], ["artifacts/rollouts/0001", "run the stage that makes it"]),
        (["rollouts", "0003"], ["iteration 0003 is not in params.yaml", "0001, 0002", "rloo iterations N"]),
        (["rollouts", "1"], ["iteration '1'", "four digits, as in 0001"]),
        (["sources", "nothing"], ["params.yaml has no nothing", "policy, train, eval, reward"]),
        (["prepare", "0001"], ["prepare 0001", "leave the id out"]),
        (["iterations", "10000"], ["10000 iterations", "0 to 9999"]),
    ],
)
def test_a_command_out_of_place(project: Project, rloo: CommandLine, arguments: list[str], expected: list[str]) -> None:
    before = written(project)
    done = rloo(project, *arguments)
    assert done.code == 2, done.stderr
    assert_told(done.stderr, *expected)
    assert written(project) == before


def with_reward(code: str) -> Callable[[Project], None]:
    def write(project: Project) -> None:
        (project.root / "reward.py").write_text(f"def score(completions, **kwargs):\n    {code}\n")

    return write


def with_damaged_rollouts(project: Project) -> None:
    path = project.root / "artifacts" / "rollouts" / "0001" / "shard-00001.parquet"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-9])


def with_changed_weights(project: Project) -> None:
    path = project.root / "artifacts" / "policy" / "0000" / "model" / "model.safetensors"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


FINISHED = [
    (["rollouts", "0001"], with_param("rollouts.prompts_per_iteration", 9), ["prompts_per_iteration is 9", "8 prompt"]),
    (["rollouts", "0001"], with_changed_weights, ["artifacts/policy/0000/model", "changed", "dvc checkout"]),
    (["rewards", "0001"], with_damaged_rollouts, ["rollouts/0001/shard-00001.parquet", "run the stage that makes it"]),
    (["rewards", "0001"], with_reward("return [0.0]"), ["letters"]),
    (["rewards", "0001"], with_reward("return ['high'] * len(completions)"), ["letters", "high"]),
    (["rewards", "0001"], with_reward("return [float('nan')] * len(completions)"), ["letters", "nan"]),
    (["rewards", "0001"], with_reward("raise RuntimeError('of mine')"), ["letters", "RuntimeError", "of mine"]),
    (["rewards", "0001"], with_reward("("), ["reward.py", "SyntaxError", "mend the file"]),
    (["rewards", "0001"], without("reward.py"), ["reward.py", "no such file"]),
    (["sources", "reward"], without("reward.py"), ["sources.reward.path", "reward.py", "no such file"]),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "spoil", "expected"), FINISHED)
def test_finished_project(
    finished_project: Project,
    tmp_path: Path,
    rloo: CommandLine,
    arguments: list[str],
    spoil: Callable[[Project], None],
    expected: list[str],
) -> None:
    project = finished_project.copy(tmp_path / "project")
    spoil(project)
    before = written(project)
    done = rloo(project, *arguments)
    assert done.code == 2, done.stderr
    assert_told(done.stderr, *expected)
    assert written(project) == before


def test_a_model_that_is_neither_here_nor_on_the_hub(project: Project) -> None:
    project.change("policy.model", "nobody/nothing")
    done = project.rloo("prepare", check=False)
    assert done.returncode == 2
    assert_told(done.stderr, "policy.model nobody/nothing", "neither a directory", "check the name")
    assert not (project.root / "artifacts").exists()


def test_dvc_fails_with_the_message(project: Project) -> None:
    train(project, [])
    done = project.run("dvc", "repro", "prepare", check=False)
    assert done.returncode != 0
    assert "error: train.jsonl: no rows; prompts.train needs at least one" in done.stdout + done.stderr
    assert not (project.root / "artifacts" / "prompts" / "train.parquet").exists()
