"""Full disks, damaged files, places that cannot be written: told with the file and the remedy, and never half done."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rloo_pipeline.stages import update
from tests.conftest import CommandLine, Outcome
from tests.project import Project

PAGE = 4096
STAGES = ("rollouts", "logprobs", "rewards", "advantages", "update", "evaluate")
OUTPUTS = {stage: (f"artifacts/{stage}/0001",) for stage in STAGES} | {
    "update": ("artifacts/policy/0001/model", "artifacts/policy/0001/trainer_state"),
    "evaluate": ("artifacts/evaluation/0001",),
}


def copied(finished_project: Project, root: Path) -> Project:
    shutil.copytree(
        finished_project.root,
        root,
        ignore=shutil.ignore_patterns(".git", ".dvc", "0002"),
        copy_function=shutil.copyfile,
    )
    return Project(root)


@pytest.fixture
def project(finished_project: Project, tmp_path: Path) -> Project:
    """The finished project's first iteration, without DVC's cache and git, to be written to."""
    return copied(finished_project, tmp_path / "project")


def files(project: Project, *folders: str) -> dict[str, bytes]:
    return {
        path.relative_to(project.root).as_posix(): path.read_bytes()
        for folder in folders
        for path in (project.root / folder, *sorted((project.root / folder).rglob("*")))
        if path.is_file()
    }


def assert_told(done: Outcome, *parts: str) -> None:
    """A user error: status 2, one message, no traceback."""
    assert done.code == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "error: " in done.stderr
    for part in parts:
        assert part in done.stderr, done.stderr


@contextmanager
def mounted(place: Path, size: str) -> Iterator[None]:
    """A small file system of its own at `place`; skips where mounting is not allowed."""
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture
def small_disk(finished_project: Project, tmp_path: Path) -> Iterator[Project]:
    """The project on a file system of 24 MiB."""
    with mounted(tmp_path / "disk", "24m"):
        yield copied(finished_project, tmp_path / "disk" / "project")


def fill(project: Project, left: int) -> None:
    """Leave this many free pages on the project's disk."""
    ballast = project.root.parent / "ballast"
    ballast.unlink(missing_ok=True)
    free = shutil.disk_usage(project.root).free
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free - left * PAGE)
    assert shutil.disk_usage(project.root).free == left * PAGE


def whole_or_absent(project: Project, finished_project: Project, stage: str) -> None:
    for output in OUTPUTS[stage]:
        found = files(project, output)
        assert found in ({}, files(finished_project, output))


@pytest.mark.parametrize("stage", ["rewards", "advantages", "rollouts"])
def test_disk_full_at_any_write(stage: str, small_disk: Project, finished_project: Project, rloo: CommandLine) -> None:
    """Page after page more: shard, manifest, metrics and provenance in turn do not fit, until all do."""
    records = [f"{kind}/{stage}/0001.json" for kind in ("metrics", "provenance")]
    for path in (*OUTPUTS[stage], f".rloo/work/{stage}"):
        shutil.rmtree(small_disk.root / path, ignore_errors=True)
    named = set()
    for left in range(100):
        fill(small_disk, left)
        done = rloo(small_disk, stage, "0001")
        whole_or_absent(small_disk, finished_project, stage)
        if done.code == 0:
            break
        assert_told(done, "the disk is full (0.0 MiB free); make room", "run the command again")
        assert not list(small_disk.root.rglob("*.tmp"))
        named.add(done.stderr.split("error: ")[1].split(": ")[0].rpartition("/")[2])
    assert done.code == 0
    assert len(named) > 2, named
    for path in (*OUTPUTS[stage], *records):
        assert files(small_disk, path) == files(finished_project, path)


def pages(path: Path) -> int:
    return sum(-(-file.stat().st_size // PAGE) for file in (path, *path.rglob("*")) if file.is_file())


@pytest.mark.parametrize("file", ["model", "optimizer.safetensors", "state.json"])
def test_disk_full_while_a_checkpoint_is_written(
    file: str, small_disk: Project, finished_project: Project, rloo: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program takes the room after it was looked at: half of the file does not fit."""
    model, state = (small_disk.root / path for path in OUTPUTS["update"])
    weights, moments = pages(model / "model.safetensors"), pages(state / "optimizer.safetensors")
    room = {"model": weights // 2, "optimizer.safetensors": pages(model) + moments // 2}
    room["state.json"] = pages(model) - 1 + moments  # the note of the key is there, the manifest comes later
    for path in (model, state):
        shutil.rmtree(path)
    fill(small_disk, room[file])
    if file == "model":
        assert_told(rloo(small_disk, "update", "0001"), "iterations will write", "rloo iterations N")
    with monkeypatch.context() as patch:
        patch.setattr(update, "check_space", lambda *_: None)
        assert_told(rloo(small_disk, "update", "0001"), f"/{file}: the disk is full (", "make room")
    whole_or_absent(small_disk, finished_project, "update")
    (small_disk.root.parent / "ballast").unlink()
    done = rloo(small_disk, "update", "0001")
    assert done.code == 0, done.stderr
    for path in OUTPUTS["update"]:
        assert files(small_disk, path) == files(finished_project, path)


def test_disk_full_leaves_the_older_artifact_in_place(small_disk: Project, rloo: CommandLine) -> None:
    before = files(small_disk, "artifacts", "metrics", "provenance")
    small_disk.change("advantages.beta", 0.5)
    fill(small_disk, 4)
    assert_told(rloo(small_disk, "advantages", "0001"), "the disk is full")
    assert files(small_disk, "artifacts", "metrics", "provenance") == before


def test_read_only_file_system(small_disk: Project, finished_project: Project, rloo: CommandLine) -> None:
    disk = small_disk.root.parent
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    try:
        assert_told(rloo(small_disk, "advantages", "0001"), ".rloo/lock", "the file system is read-only", "mount it")
    finally:
        os.chdir("/")
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    assert rloo(small_disk, "advantages", "0001").code == 0
    assert files(small_disk, "artifacts/advantages") == files(finished_project, "artifacts/advantages/0001")


def test_artifacts_on_another_file_system(project: Project, rloo: CommandLine) -> None:
    folder = project.root / "artifacts" / "advantages"
    shutil.rmtree(folder)
    with mounted(folder, "1m"):
        done = rloo(project, "advantages", "0001")
        os.chdir("/")
    assert_told(done, "on two file systems")


@pytest.fixture
def open_project(finished_project: Project) -> Iterator[Project]:
    """A project that another user can reach, and owns if root runs the tests."""
    root = Path(tempfile.mkdtemp(prefix="rloo-faults-"))
    root.chmod(0o755)
    project = copied(finished_project, root / "project")
    if os.geteuid() == 0:
        for path in (project.root, *project.root.rglob("*")):
            os.chown(path, 65534, 65534)
    yield project
    os.chdir("/")
    shutil.rmtree(root)


@contextmanager
def without_rights() -> Iterator[None]:
    """As an ordinary user, since root may write anywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_read_only_artifacts(open_project: Project, finished_project: Project, rloo: CommandLine) -> None:
    folder = open_project.root / "artifacts" / "advantages"
    before = files(open_project, "artifacts", "metrics", "provenance")
    open_project.change("advantages.beta", 0.5)
    folder.chmod(0o555)
    with without_rights():
        done = rloo(open_project, "advantages", "0001")
    assert_told(done, "artifacts/advantages/0001", "permission denied", "give yourself the right")
    assert files(open_project, "artifacts", "metrics", "provenance") == before
    folder.chmod(0o755)
    open_project.change("advantages.beta", 0.05)
    with without_rights():
        assert rloo(open_project, "advantages", "0001").code == 0
    assert files(open_project, "artifacts/advantages") == files(finished_project, "artifacts/advantages/0001")


def test_unreadable_inputs(open_project: Project, rloo: CommandLine) -> None:
    for name in ("rewards/0001/shard-00000.parquet", "rewards/0001/manifest.json"):
        path = open_project.root / "artifacts" / name
        path.chmod(0o000)
        with without_rights():
            assert_told(rloo(open_project, "advantages", "0001"), f"artifacts/{name}", "permission denied")


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100 if path.suffix == ".parquet" else len(content) // 2] ^= 4
    path.write_bytes(content)


def flipped_in_the_footer(path: Path) -> None:
    """In the name of the program that wrote it: no row changes."""
    content = bytearray(path.read_bytes())
    content[content.rindex(b"parquet-cpp")] ^= 1
    path.write_bytes(content)


READS = {
    "logprobs": ["rollouts/0001", "policy/0000/model"],
    "rewards": ["rollouts/0001", "prompts"],
    "advantages": ["rollouts/0001", "logprobs/0001", "rewards/0001", "policy/0000/trainer_state"],
    "update": [
        "rollouts/0001",
        "rewards/0001",
        "advantages/0001",
        "policy/0000/model",
        "policy/0000/trainer_state",
    ],
    "rollouts": ["prompts", "policy/0000/model"],
    "evaluate": ["evaluation/0000", "policy/0001/model"],
}
INPUTS = [(stage, name) for stage, names in READS.items() for name in names]
FILES = {"prompts": "train.parquet", "model": "model.safetensors", "trainer_state": "state.json"}


@pytest.mark.parametrize("damage", [truncated, flipped, flipped_in_the_footer])
@pytest.mark.parametrize(("stage", "name"), INPUTS)
def test_damaged_inputs(
    stage: str, name: str, damage: Callable[[Path], None], project: Project, rloo: CommandLine
) -> None:
    file = FILES.get(name.rpartition("/")[2])
    if damage is flipped_in_the_footer and file in ("model.safetensors", "state.json"):
        pytest.skip("no Parquet file")
    directory = project.root / "artifacts" / name
    path = directory / file if file else max(directory.glob("shard-*.parquet"))
    damage(path)
    before = files(project, "artifacts", "metrics", "provenance")
    by_parts = file == "state.json" or (file == "model.safetensors" and damage is flipped)
    told = path.parent if by_parts else path
    assert_told(rloo(project, stage, "0001"), f"{told.relative_to(project.root)}: ", "restore it")
    assert files(project, "artifacts", "metrics", "provenance") == before


@pytest.mark.parametrize("stage", ["rollouts", "logprobs", "rewards"])
@pytest.mark.parametrize("damage", [truncated, flipped, flipped_in_the_footer])
def test_damaged_work_in_progress_is_made_again(
    stage: str, damage: Callable[[Path], None], project: Project, finished_project: Project, rloo: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Stopped before its output is put in place, then a shard is damaged."""
    from rloo_pipeline.stages import context

    shutil.rmtree(project.root / OUTPUTS[stage][0])

    def stop(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(context, "publish", stop)
        assert_told(rloo(project, stage, "0001"), "the disk is full")
    shards = sorted((project.root / ".rloo" / "work" / stage / "0001").rglob("shard-*.parquet"))
    assert len(shards) == 2
    damage(shards[1])
    done = rloo(project, stage, "0001")
    assert done.code == 0, done.stderr
    assert "made again" in done.stderr
    assert "shard-00000.parquet is there from an interrupted run: kept" in done.stderr
    assert files(project, OUTPUTS[stage][0]) == files(finished_project, OUTPUTS[stage][0])


def missing(path: Path) -> None:
    path.unlink()


def of_another_version(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": 99}))


def not_json(path: Path) -> None:
    path.write_text(path.read_text()[:-5])


def with_an_edited_fact(path: Path) -> None:
    manifest = json.loads(path.read_text())
    manifest["facts"] = {**manifest["facts"], "rollouts_fingerprint": "0" * 64}
    path.write_text(json.dumps(manifest))


def without_facts(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "facts": {}}))


def with_trust_in_code(path: Path) -> None:
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "facts": {**manifest["facts"], "trust_remote_code": True}}))


MANIFESTS = {
    missing: "no such file, so",
    of_another_version: "schema version 99, this package reads 1",
    not_json: "not readable as JSON",
    with_an_edited_fact: "changed after it was written",
    without_facts: "changed after it was written",
    with_trust_in_code: "changed after it was written",
}


@pytest.mark.parametrize("damage", MANIFESTS)
@pytest.mark.parametrize(("stage", "name"), [item for item in INPUTS if item[1] != "prompts"])
def test_damaged_manifests(
    stage: str, name: str, damage: Callable[[Path], None], project: Project, rloo: CommandLine
) -> None:
    path = project.root / "artifacts" / name / "manifest.json"
    damage(path)
    before = files(project, "artifacts", "metrics", "provenance")
    assert_told(rloo(project, stage, "0001"), f"artifacts/{name}/manifest.json: {MANIFESTS[damage]}")
    assert files(project, "artifacts", "metrics", "provenance") == before
