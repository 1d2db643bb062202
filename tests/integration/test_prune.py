"""`rloo prune`: the disk that it frees, what stays, and how the chain goes on."""

import fcntl
import json
import shutil
from pathlib import Path

import pytest
import torch
from dvc.repo import Repo

from rloo_pipeline import history, process, prune
from rloo_pipeline.chain import set_length
from rloo_pipeline.config import load_params
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import STAGES, Layout
from rloo_pipeline.prune_plan import Rule
from rloo_pipeline.stages import dispatch
from tests.conftest import CommandLine
from tests.project import Project

NEW_STAGES = STAGES[1:]
BIG = ("model/model.safetensors", "trainer_state/optimizer.safetensors")


def lengthen(project: Project, *iterations: str) -> None:
    """Run whole iterations in this process, with as many threads as the project's own stages have."""
    layout = Layout(project.root)
    set_length(layout.params, int(iterations[-1]))
    params = load_params(layout.params)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for iteration in iterations:
            for stage in NEW_STAGES:
                dispatch.run(stage, layout, params, iteration)
    finally:
        torch.set_num_threads(threads)
    history.run(layout, params)


@pytest.fixture(scope="module")
def finished_four(finished_project: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project of four finished iterations. Not to be written to."""
    project = finished_project.copy(tmp_path_factory.mktemp("four") / "project")
    lengthen(project, "0003", "0004")
    project.run("dvc", "commit", "--force", "--quiet")
    # A copied project shares no files between work tree and cache; after a checkout it does, as every run's.
    shutil.rmtree(project.root / "artifacts")
    project.run("dvc", "checkout", "--quiet")
    return project


@pytest.fixture
def four(finished_four: Project, tmp_path: Path) -> Project:
    """A copy of it that keeps the hard links."""
    finished_four.run("cp", "-a", str(finished_four.root), str(tmp_path / "project"))
    return Project(tmp_path / "project")


def cut(project: Project, rule: Rule, *, dry_run: bool = False) -> None:
    prune.run(Layout(project.root), rule, dry_run=dry_run)


def size(project: Project) -> int:
    """Bytes of the files in work tree and cache, each once however many names it has."""
    files = [path.stat() for place in ("artifacts", ".dvc/cache") for path in (project.root / place).rglob("*")
             if path.is_file()]  # fmt: skip
    return sum({file.st_ino: file.st_size for file in files}.values())


def files(project: Project) -> dict[str, int]:
    paths = [path for place in ("artifacts", ".dvc/cache") for path in (project.root / place).rglob("*")]
    return {path.relative_to(project.root).as_posix(): path.stat().st_ino for path in paths if path.is_file()}


def cached(project: Project, output: str) -> dict[str, Path]:
    """The objects of an output of dvc.lock by file name, its listing as ".", whether they are there or not."""
    outs = [out for stage in project.lock()["stages"].values() for out in stage.get("outs", [])]
    (md5,) = {out["md5"] for out in outs if out["path"] == output}
    store = project.root / ".dvc" / "cache" / "files" / "md5"
    listing = store / md5[:2] / md5[2:]
    entries = json.loads(listing.read_text()) if listing.exists() else []
    return {".": listing} | {e["relpath"]: store / e["md5"][:2] / e["md5"][2:] for e in entries}


def policies(project: Project) -> list[str]:
    return sorted(path.name for path in (project.root / "artifacts" / "policy").iterdir())


def test_pruned_chain_goes_on_as_the_whole_one(
    four: Project, finished_four: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = finished_four.copy(tmp_path / "whole")
    lengthen(whole, "0005")
    before = size(four)
    dropped = [four.root / "artifacts" / "policy" / it / name for it in ("0001", "0003") for name in BIG]
    weights = sum(path.stat().st_size for path in dropped)
    capsys.readouterr()

    cut(four, Rule(keep_last=1, keep_every=2))

    said = capsys.readouterr().out
    assert "gone: 0001, 0003" in said
    assert "kept: 0000 (initial); 0002 (every 2); 0004 (the last 1)" in said
    assert policies(four) == ["0000", "0002", "0004"]
    # Beside weights and moments only manifests, listings and the like go, which are small.
    assert weights <= before - size(four) < 1.05 * weights + 20_000
    for output in ("0000/model", "0002/model", "0002/trainer_state", "0004/model", "0004/trainer_state"):
        assert all(path.exists() for path in cached(four, f"artifacts/policy/{output}").values())

    assert "disk: 1 iterations will write" in four.rloo("iterations", "5").stderr
    assert sorted(four.repro("--allow-missing")) == sorted([*(f"rloo {s} 0005" for s in NEW_STAGES), "rloo history"])
    for output in ("rollouts", "logprobs", "rewards", "advantages", "evaluation", "policy"):
        path = f"artifacts/{output}/0005/{'model/' if output == 'policy' else ''}manifest.json"
        assert four.json(path) == whole.json(path)
    for stage in NEW_STAGES:
        assert four.json(f"provenance/{stage}/0005.json") == whole.json(f"provenance/{stage}/0005.json")
    assert policies(four) == ["0000", "0002", "0004", "0005"]


def test_says_what_can_still_be_replayed(four: Project, capsys: pytest.CaptureFixture[str]) -> None:
    cut(four, Rule(keep_last=1, keep_every=2))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    told = {row[0]: row[1:] for row in rows if row and row[0] in NEW_STAGES}
    # Policies 0001 and 0003 are gone. Iterations 0002 and 0004 sampled from them; update needs both ends.
    from_previous = ["0001,", "0003", "0002,", "0004"]
    assert told == {
        "rollouts": from_previous,
        "logprobs": from_previous,
        "rewards": ["0001-0004", "-"],
        "advantages": from_previous,
        "update": ["-", "0001-0004"],
        "evaluate": ["0002,", "0004", "0001,", "0003"],
    }


@pytest.mark.parametrize(("stage", "iteration"), [("advantages", "0003"), ("advantages", "0004"), ("update", "0001")])
def test_verify_agrees_on_what_can_be_replayed(four: Project, rloo: CommandLine, stage: str, iteration: str) -> None:
    cut(four, Rule(keep_last=1, keep_every=2))
    done = rloo(four, "verify", iteration, "--stage", stage)
    assert done.code == (0 if (stage, iteration) == ("advantages", "0003") else 1)


def test_plain_status_is_not_quiet_and_plain_repro_makes_it_again(four: Project) -> None:
    cut(four, Rule(keep_last=1))
    deleted = json.loads(four.run("dvc", "status", "--json").stdout)
    assert {"update@0001", "update@0002", "update@0003"} <= set(deleted)
    assert four.repro("--dry", "--allow-missing") == []
    assert four.repro("--dry", "update@0001") == ["rloo update 0001"]


def test_dry_run_removes_nothing_and_tells_the_same(four: Project, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(four)
    cut(four, Rule(keep_last=2), dry_run=True)
    planned = capsys.readouterr().out
    assert files(four) == before
    assert "would go: 0001-0002" in planned
    cut(four, Rule(keep_last=2))
    assert capsys.readouterr().out == planned.replace("would go", "gone")
    assert policies(four) == ["0000", "0003", "0004"]
    cut(four, Rule(keep_last=2))
    assert "gone: -, 0.00 MiB" in capsys.readouterr().out


def test_a_killed_prune_is_ended_by_the_next(four: Project) -> None:
    model = "artifacts/policy/0001/model"
    objects = cached(four, model)
    shared = set(cached(four, "artifacts/policy/0000/model").values())
    # As after a kill: the folder is set aside, a part of the objects is gone.
    (four.root / ".rloo" / "pruned").mkdir()
    (four.root / model).rename(four.root / ".rloo" / "pruned" / "0")
    objects["model.safetensors"].unlink()
    assert four.repro("--dry", "--allow-missing") == []
    cut(four, Rule(keep_last=3))
    assert not (four.root / ".rloo" / "pruned").exists()
    assert not [path for path in objects.values() if path.exists() and path not in shared]
    assert all(path.exists() for path in shared)


def test_objects_that_another_output_shares_stay(four: Project) -> None:
    # A learning rate of 0 gives policies that are equal to the byte; here by a copy.
    lock = four.root / "dvc.lock"
    md5 = {name: next(iter(cached(four, f"artifacts/policy/{name}/model").values())) for name in ("0001", "0004")}
    hashes = {name: f"{path.parent.name}{path.name}" for name, path in md5.items()}
    lock.write_text(lock.read_text().replace(hashes["0004"], hashes["0001"]))
    shutil.rmtree(four.root / "artifacts" / "policy" / "0004" / "model")
    four.run("dvc", "checkout", "--quiet", "artifacts/policy/0004/model")
    objects = cached(four, "artifacts/policy/0001/model")
    cut(four, Rule(keep_last=1))
    assert policies(four) == ["0000", "0004"]
    assert all(path.exists() for path in objects.values())


def commit(project: Project, *arguments: str) -> None:
    project.run("git", "add", "--all")
    project.run("git", "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", "run", *arguments)


def test_what_another_branch_or_tag_holds_stays_unless_the_user_agrees(
    four: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(four)
    four.run("git", "branch", "other")
    four.run("git", "tag", "v1")
    objects = cached(four, "artifacts/policy/0001/model")
    cut(four, Rule(keep_last=3))
    said = capsys.readouterr().out
    for name in ("branch other", "tag v1"):
        assert f"still in the cache for {name}: files of 0001; --all-revisions drops those too" in said
    assert all(path.exists() for path in objects.values())
    four.run("dvc", "checkout", "--quiet")
    assert policies(four) == ["0000", "0001", "0002", "0003", "0004"]

    cut(four, Rule(keep_last=3, all_revisions=True))
    assert "still in the cache" not in capsys.readouterr().out
    assert not objects["."].exists()
    assert not objects["model.safetensors"].exists()


def test_commits_of_the_current_branch_hold_nothing(four: Project, capsys: pytest.CaptureFixture[str]) -> None:
    commit(four)
    listing = cached(four, "artifacts/policy/0001/model")["."]
    cut(four, Rule(keep_last=3))
    assert "still in the cache" not in capsys.readouterr().out
    assert not listing.exists()


def test_a_policy_that_is_not_evaluated_yet_stays(four: Project, capsys: pytest.CaptureFixture[str]) -> None:
    (four.root / "metrics" / "evaluate" / "0002.json").unlink()
    (four.root / "artifacts" / "evaluation" / "0002" / "shard-00000.parquet").unlink()
    (four.root / "artifacts" / "evaluation" / "0002" / "shard-00000.parquet").write_text("cut short")
    cut(four, Rule(keep_last=1))
    assert "0002 (evaluate@0002 is not up to date and reads it)" in capsys.readouterr().out
    assert policies(four) == ["0000", "0002", "0004"]


def test_a_cache_of_others_is_left_alone(four: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = tmp_path / "shared cache"
    (four.root / ".dvc" / "cache").rename(shared)
    four.run("dvc", "cache", "dir", "--local", str(shared))
    before = {path for path in shared.rglob("*") if path.is_file()}
    cut(four, Rule(keep_last=1))
    assert "lies outside this project" in capsys.readouterr().out
    assert policies(four) == ["0000", "0004"]
    assert {path for path in shared.rglob("*") if path.is_file()} == before


def test_refuses_while_a_stage_or_dvc_runs(four: Project, rloo: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SECONDS_TO_DIE", 0.0)
    before = files(four)
    with (four.root / ".rloo" / "lock").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = rloo(four, "prune", "--keep-last", "1")
    assert done.code == 2
    assert "runs in this project" in done.stderr
    with Repo(str(four.root)).lock, pytest.raises(UserError, match="DVC is at work in this project"):
        cut(four, Rule(keep_last=1))
    assert files(four) == before


def test_command_line(four: Project, rloo: CommandLine) -> None:
    assert rloo(four, "prune").code == 2
    assert rloo(four, "prune", "--keep-last", "0").code == 2
    assert rloo(four, "prune", "--keep-last", "1", "--keep-every", "3", "--dry-run").code == 0
    assert policies(four) == ["0000", "0001", "0002", "0003", "0004"]
    assert rloo(four, "prune", "--keep-last", "1", "--keep-every", "3").code == 0
    assert policies(four) == ["0000", "0003", "0004"]
    (four.root / "dvc.lock").write_text("garbage: [")
    done = rloo(four, "prune", "--keep-last", "1")
    assert (done.code, "dvc.lock" in done.stderr, "`rloo clean` mends" in done.stderr) == (2, True, True)
    (four.root / "dvc.lock").unlink()
    done = rloo(four, "prune", "--keep-last", "1")
    assert (done.code, "run `dvc repro` first" in done.stderr) == (2, True)
    shutil.rmtree(four.root / ".git")
    done = rloo(four, "prune", "--keep-last", "1")
    assert (done.code, "`git init`" in done.stderr, "core.no_scm" in done.stderr) == (2, True, True)
    shutil.rmtree(four.root / ".dvc")
    assert "no DVC project" in rloo(four, "prune", "--keep-last", "1").stderr
