"""Every stage killed before every rename of its own and run again: the same content, no finished shard made again."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REWARD
from tests.project import Project
from tests.zygote import Zygote

EVALUATION = ("artifacts/evaluation/0002",)
POLICY = ("artifacts/policy/0002/trainer_state", "artifacts/policy/0002/model")  # in the order that they change


@dataclass(frozen=True)
class Case:
    """A command, what it puts in place, and how to change a setting of it."""

    command: tuple[str, ...]
    outputs: tuple[str, ...]
    change: Callable[[Project], Any] | None = None

    @property
    def records(self) -> tuple[str, ...]:
        """Metrics and provenance; timings differ from run to run."""
        stage, iteration = (*self.command, "0000")[:2]
        return () if self.change is None else tuple(f"{kind}/{stage}/{iteration}.json" for kind in RECORDS)


RECORDS = ("metrics", "provenance")


def setting(path: str, value: Any) -> Callable[[Project], Any]:
    return lambda project: project.change(path, value)


def another_reward(project: Project) -> None:
    (project.root / "reward.py").write_text(REWARD.replace("% 11 / 10", "% 7 / 10"))


CASES = {
    "sources": Case(("sources", "reward"), ("sources/rewards/reward.json",)),
    "prepare": Case(
        ("prepare",),
        ("artifacts/prompts", "artifacts/policy/0000/model", "artifacts/policy/0000/trainer_state"),
        setting("prompts.max_prompt_tokens", 36),
    ),
    "rollouts": Case(("rollouts", "0002"), ("artifacts/rollouts/0002",), setting("rollouts.temperature", 0.9)),
    "logprobs": Case(("logprobs", "0002"), ("artifacts/logprobs/0002",), setting("logprobs.dtype", "bfloat16")),
    "rewards": Case(("rewards", "0002"), ("artifacts/rewards/0002",), another_reward),
    "advantages": Case(("advantages", "0002"), ("artifacts/advantages/0002",), setting("advantages.beta", 0.5)),
    "update": Case(("update", "0002"), POLICY, setting("update.learning_rate", 2e-3)),
    "evaluate": Case(("evaluate", "0002"), EVALUATION, setting("evaluate.temperature", 0.9)),
    "history": Case(("history",), ("artifacts/history.json",)),
}
RESUMED = ("rollouts", "logprobs", "rewards", "advantages", "evaluate")
STAGES = [name for name, case in CASES.items() if case.change]


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Forks stages."""
    zygote = Zygote(tmp_path_factory.mktemp("zygote"))
    yield zygote
    zygote.close()


@pytest.fixture
def copy(finished_project: Project, tmp_path: Path) -> Iterator[Callable[..., Project]]:
    """`copy(*without)`: the finished project in a folder of its own, without the paths and without work in progress."""
    made: list[Path] = []

    def make(*without: str) -> Project:
        root = tmp_path / str(len(made))
        made.append(root)
        shutil.copytree(finished_project.root, root, ignore=shutil.ignore_patterns(".git", ".dvc", ".rloo"))
        for path in without:
            shutil.rmtree(root / path) if (root / path).is_dir() else (root / path).unlink()
        return Project(root)

    yield make
    for root in made:
        shutil.rmtree(root)


def contents(project: Project, *paths: str) -> dict[str, bytes]:
    """Every file at or below the paths."""
    roots = [project.root / path for path in paths]
    files = [file for root in roots for file in ([root] if root.is_file() else root.rglob("*")) if file.is_file()]
    return {file.relative_to(project.root).as_posix(): file.read_bytes() for file in files}


def check_no_mixture(project: Project, case: Case, *runs: Project) -> None:
    """What stands is whole, and of one run with its records; or nothing stands."""
    standing = [path for path in case.outputs if (project.root / path).exists()]
    if standing:
        found = contents(project, *standing, *case.records)
        assert found in [contents(run, *standing, *case.records) for run in runs]


def check_no_leftovers(project: Project, case: Case) -> None:
    """Nothing temporary anywhere, and no work in progress but an evaluation's samples and their note."""
    assert [path for path in project.root.rglob("*") if path.name.endswith((".tmp", ".retired", ".records"))] == []
    left = list((project.root / ".rloo").glob("work/*/*/*"))
    assert len(left) == (2 if case.command[0] == "evaluate" else 0)


def shards(project: Project) -> dict[int, str]:
    """The finished shards among the work in progress, by the number of the file on the disk."""
    found = (project.root / ".rloo").glob("work/*/*/**/shard-*.parquet")
    return {path.stat().st_ino: path.name for path in found}


def kept(project: Project, case: Case) -> set[int]:
    """The numbers of the files of all shards, in place or kept for the next evaluation."""
    found = [file for path in case.outputs for file in (project.root / path).glob("shard-*.parquet")]
    return {path.stat().st_ino for path in found} | set(shards(project))


@pytest.mark.parametrize("name", CASES)
def test_killed_before_every_rename(
    name: str, zygote: Zygote, copy: Callable[..., Project], finished_project: Project
) -> None:
    case = CASES[name]
    undisturbed = zygote.run(copy(*case.outputs, *case.records), *case.command)
    assert undisturbed.code == 0, undisturbed.log
    for number in undisturbed.renames():
        if name != "rollouts" and ".records/." in undisturbed.events[number][1]:
            continue  # written aside before anything moves, by the same lines in every stage
        project = copy(*case.outputs, *case.records)
        assert zygote.run(project, *case.command, stop=number).code == -9
        check_no_mixture(project, case, finished_project)
        whole = shards(project)
        again = zygote.run(project, *case.command)
        assert again.code == 0, again.log
        assert contents(project, *case.outputs, *case.records) == contents(
            finished_project, *case.outputs, *case.records
        )
        assert again.log.count("kept") == len(whole)
        assert set(whole) <= kept(project, case)
        check_no_leftovers(project, case)


@pytest.mark.parametrize("name", ["rollouts", "update"])
def test_killed_while_an_older_artifact_is_replaced(
    name: str, zygote: Zygote, copy: Callable[..., Project], finished_project: Project
) -> None:
    case = CASES[name]
    assert case.change is not None
    new = copy()
    case.change(new)
    undisturbed = zygote.run(new, *case.command)
    first = undisturbed.events.index(("os.rename", case.outputs[0]))
    for number in [number for number in undisturbed.renames() if number >= first]:
        project = copy()
        case.change(project)
        assert zygote.run(project, *case.command, stop=number).code == -9
        check_no_mixture(project, case, finished_project, new)
        assert zygote.run(project, *case.command).code == 0
        assert contents(project, *case.outputs, *case.records) == contents(new, *case.outputs, *case.records)
        check_no_leftovers(project, case)


@pytest.mark.parametrize("name", STAGES)
def test_a_partial_under_other_settings_is_never_taken(
    name: str, zygote: Zygote, copy: Callable[..., Project], finished_project: Project
) -> None:
    """Killed with all work done and nothing in place; other settings run from the start, then the first ones."""
    case = CASES[name]
    assert case.change is not None
    first, expected = copy(*case.outputs, *case.records), copy(*case.outputs, *case.records)
    case.change(expected)
    run = zygote.run(expected, *case.command)
    assert run.code == 0
    result = contents(expected, *case.outputs, *case.records)
    assert result != contents(finished_project, *case.outputs, *case.records)

    before = contents(first, "params.yaml", "reward.py")
    last = zygote.run(copy(*case.outputs, *case.records), *case.command).renames()[-4]
    assert zygote.run(first, *case.command, stop=last).code == -9
    assert (name in RESUMED) == bool(shards(first))
    case.change(first)
    changed = zygote.run(first, *case.command)
    assert "kept" not in changed.log
    assert contents(first, *case.outputs, *case.records) == result
    for path, content in before.items():
        (first.root / path).write_bytes(content)
    assert zygote.run(first, *case.command).code == 0
    assert contents(first, *case.outputs, *case.records) == contents(finished_project, *case.outputs, *case.records)


@pytest.mark.parametrize(("signal", "code"), [(15, -15), (2, 130)])
def test_update_ended_by_sigterm_or_ctrl_c(
    signal: int, code: int, zygote: Zygote, copy: Callable[..., Project], finished_project: Project
) -> None:
    case = CASES["update"]
    renames = zygote.run(copy(*case.outputs), *case.command).renames()
    for number in renames[1 :: len(renames) // 3]:
        project = copy(*case.outputs, *case.records)
        assert zygote.run(project, *case.command, stop=number, signal=signal).code == code
        check_no_mixture(project, case, finished_project)
        assert zygote.run(project, *case.command).code == 0
        assert contents(project, *case.outputs, *case.records) == contents(
            finished_project, *case.outputs, *case.records
        )
