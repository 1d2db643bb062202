"""rloo verify: stages run again beside the project, and every kind of difference told exactly."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rloo_pipeline import fingerprint
from rloo_pipeline.layout import Layout
from tests.conftest import CommandLine
from tests.project import Project
from tests.rewriting import edit_json, replaced, rewrite_table, rewrite_weight, stored

Verify = Callable[..., list[dict[str, Any]]]
OF_ITERATION = ("rollouts", "logprobs", "rewards", "advantages", "update", "evaluate")
ALL = [
    *(("prepare", "0000"), ("evaluate", "0000")),
    *[(stage, iteration) for iteration in ("0001", "0002") for stage in OF_ITERATION],
]


@pytest.fixture
def project(finished_project: Project, tmp_path: Path) -> Project:
    """A finished project that a test may damage."""
    return finished_project.copy(tmp_path / "project")


@pytest.fixture
def verify(project: Project, rloo: CommandLine) -> Verify:
    """`verify(code, *arguments)`: the stages as JSON, when the command has ended with this status."""

    def call(code: int, *arguments: str) -> list[dict[str, Any]]:
        outcome = rloo(project, "verify", *arguments, "--json")
        assert outcome.code == code, outcome.stdout + outcome.stderr
        found = json.loads(outcome.stdout)
        assert found["passed"] == (code == 0)
        return found["stages"]

    return call


def key_of(table: pa.Table, row: int) -> dict[str, Any]:
    return {name: table[name][row].as_py() for name in ("iteration", "prompt_id", "sample_index")}


def state_of(root: Path) -> dict[str, tuple[str, int]]:
    """Content and time of change of every file of the project but its lock."""
    files = (path for path in root.rglob("*") if path.is_file() and path != Layout(root).state / "lock")
    return {str(path.relative_to(root)): (fingerprint.of_file(path), path.stat().st_mtime_ns) for path in files}


def test_every_stage_is_replayed_with_what_made_it_and_leaves_no_trace(project: Project, verify: Verify) -> None:
    project.change("update.learning_rate", 0.5)
    project.change("rollouts.temperature", 0.7)
    project.change("rollouts.max_tokens", 5)
    project.change("execution.generation_batch_size", 3)
    before = state_of(project.root)

    stages = verify(0)

    assert [(run["stage"], run["iteration"], run["status"]) for run in stages] == [(*pair, "identical") for pair in ALL]
    changed = {
        (run["stage"], item["name"]): (item["made_with"], item["now"]) for run in stages for item in run["changed"]
    }
    assert changed == {
        ("update", "update.learning_rate"): (0.001, 0.5),
        ("rollouts", "rollouts.temperature"): (1.0, 0.7),
        ("rollouts", "rollouts.max_tokens"): (6, 5),
        ("prepare", "rollouts.max_tokens"): (6, 5),
    }
    assert {run["rows"] for run in stages if run["stage"] in ("rollouts", "logprobs", "advantages")} == {16}
    assert all(run["conditions"] == run["differences"] == [] for run in stages)
    assert state_of(project.root) == before
    assert not [path for name in ("verify-*", "replayed-*") for path in (project.root / ".rloo").glob(name)]


def test_a_changed_value_is_told_with_its_row_and_both_values(
    project: Project, verify: Verify, rloo: CommandLine
) -> None:
    table = stored(project.root, "advantages", "0001")
    changed = replaced(table, "advantage", 5, lambda value: value + 0.25)
    rewrite_table(project.root, "advantages", "0001", changed)

    (found,) = verify(1, "0001", "--stage", "advantages")
    told = rloo(project, "verify", "0001", "--stage", "advantages")

    (difference,) = found["differences"]
    first = difference.pop("first")
    expected = {"rows": 1, "of_rows": 16, "values": 1, "largest": pytest.approx(0.25)}
    assert difference == {"artifact": "advantages", "name": "advantage", "kind": "values", **expected}
    values = (table["advantage"][5].as_py() + 0.25, table["advantage"][5].as_py())
    assert first == {"key": key_of(table, 5), "position": None, "stored": values[0], "replayed": values[1]}
    assert found["status"] == "differs"
    assert told.code == 1
    assert told.stdout.startswith(
        "advantages 0001: differs\n  advantages: advantage: 1 of 16 rows differ, by at most 0.25"
    )
    assert f"prompt_id {key_of(table, 5)['prompt_id']}, sample_index {key_of(table, 5)['sample_index']}" in told.stdout


def test_lists_and_texts_are_told_by_position(project: Project, verify: Verify) -> None:
    table = stored(project.root, "rollouts", "0002")
    row = next(i for i, ids in enumerate(table["completion_token_ids"].to_pylist()) if len(ids) > 2)
    changed = replaced(table, "sampler_logprobs", row, lambda values: [*values[:2], values[2] - 1.5, *values[3:]])
    changed = replaced(changed, "completion_text", 3, lambda text: text + "\x1b[31m\n[red]")
    rewrite_table(project.root, "rollouts", "0002", changed)

    (found,) = verify(1, "0002", "--stage", "rollouts")

    by_name = {item["name"]: item for item in found["differences"]}
    assert set(by_name) == {"sampler_logprobs", "completion_text"}
    logprobs, text = by_name["sampler_logprobs"], by_name["completion_text"]["first"]
    assert (logprobs["rows"], logprobs["values"], logprobs["first"]["position"]) == (1, 1, 2)
    assert logprobs["largest"] == pytest.approx(1.5, abs=1e-6)
    assert logprobs["first"]["key"] == key_of(table, row)
    original = table["completion_text"][3].as_py()
    assert (text["replayed"], text["stored"]) == (original, original + "\x1b[31m\n[red]")
    assert text["position"] == len(original)


def test_other_weights_are_told_by_tensor(project: Project, verify: Verify) -> None:
    rewrite_weight(project.root, "0002", "model.norm.weight", 0.5)

    (found,) = verify(1, "0002", "--stage", "update")

    assert found["differences"] == [
        {
            "artifact": "policy",
            "name": "model.norm.weight",
            "kind": "part",
            "values": 1,
            "size": 64,
            "largest": pytest.approx(0.5, rel=1e-6),
        }
    ]


def test_rows_in_another_order_are_equal_and_the_artifact_is_not(project: Project, verify: Verify) -> None:
    table = stored(project.root, "advantages", "0001")
    rewrite_table(project.root, "advantages", "0001", table.take(list(reversed(range(table.num_rows)))))

    (found,) = verify(1, "0001", "--stage", "advantages")

    assert found["differences"] == [{"artifact": "advantages", "name": "manifest", "kind": "manifest"}]


def test_metrics_are_compared_too(project: Project, verify: Verify) -> None:
    path = project.root / "metrics" / "advantages" / "0001.json"
    reward = json.loads(path.read_text())["reward"]
    edit_json(path, reward=2.5)

    (found,) = verify(1, "0001", "--stage", "advantages")

    expected = {"artifact": "metrics", "name": "reward", "kind": "metric", "stored": 2.5, "replayed": reward}
    assert found["differences"] == [expected]


def test_unstable_bytes(project: Project, verify: Verify, rloo: CommandLine) -> None:
    path = project.root / "provenance" / "advantages" / "0001.json"
    versions = json.loads(path.read_text())["versions"]
    edit_json(path, versions={**versions, "torch": "2.0.0"}, device="another GPU", algorithm_version=0)

    (found,) = verify(0, "0001", "--stage", "advantages")
    told = rloo(project, "verify", "0001", "--stage", "advantages").stdout

    assert {item["name"]: item["recorded"] for item in found["conditions"]} == {
        "versions.torch": "2.0.0",
        "device": "another GPU",
        "algorithm_version": 0,
    }
    assert f"versions.torch was '2.0.0', is '{versions['torch']}'" in told


def test_what_is_pruned_cannot_be_checked_and_fails_nothing_else(project: Project, verify: Verify) -> None:
    shutil.rmtree(project.root / "artifacts" / "policy" / "0001" / "trainer_state")

    first, second = verify(0, "--stage", "advantages")
    (alone,) = verify(1, "0001", "--stage", "update")

    assert (first["status"], second["status"]) == ("identical", "unchecked")
    assert second["reason"].startswith("its input artifacts/policy/0001/trainer_state is not there: pruned")
    assert alone["status"] == "unchecked"
    assert "`dvc pull` in a fresh clone" in alone["reason"]
    assert "`dvc pull` in a fresh clone" in second["reason"]
    assert alone["reason"].startswith("artifacts/policy/0001/trainer_state is not there: pruned")


def test_what_was_made_from_something_else_fails_without_a_replay(project: Project, verify: Verify) -> None:
    table = replaced(stored(project.root, "rewards", "0001"), "reward", 0, lambda value: value + 1)
    rewrite_table(project.root, "rewards", "0001", table)
    (project.root / "reward.py").write_text("def score(completions, **kwargs):\n    return [0.0] * len(completions)\n")
    (project.root / "provenance" / "rollouts" / "0001.json").unlink()
    edit_json(project.root / "provenance" / "logprobs" / "0001.json", output="0" * 64)
    shutil.rmtree(project.root / ".rloo" / "provenance" / "logprobs")

    reasons = {run["stage"]: run["reason"] for run in verify(1, "0001") if run["status"] == "failed"}

    assert set(reasons) == set(OF_ITERATION)
    assert "provenance/rollouts/0001.json: no such file" in reasons["rollouts"]
    assert "tells of another output (000000000000) than the one in place" in reasons["logprobs"]
    assert "`dvc repro -f -s logprobs@0001`" in reasons["logprobs"]
    assert reasons["rewards"].startswith("made from another reward.py")
    assert reasons["advantages"].startswith("made from another artifacts/rewards/0001")
    assert reasons["evaluate"].startswith("made from another reward.py")
    assert reasons["update"].startswith("advantages 0001 were made from other rewards")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"inputs": None}, "inputs: "),
        ({"inputs": {"rewards": 5}}, "inputs.rewards: "),
        ({"inputs": {"foo": "0" * 64}}, "no stage has an input 'foo'"),
        ({"seed": None}, "seed: "),
        ({"settings": None}, "settings: "),
        ({"settings": {"advantages": None}}, "recorded settings are not those"),
        ({"versions": None}, "versions: "),
        ({"output": 7}, "output: "),
        ({"execution": {"logprobs_batch_tokens": "many"}}, "recorded settings are not those"),
        ({"iteration": "0002"}, "is of advantages 0002"),
    ],
)
def test_a_damaged_record_fails_its_own_stage(
    project: Project, verify: Verify, rloo: CommandLine, damage: dict[str, Any], message: str
) -> None:
    (project.root / "artifacts" / "advantages" / "0002" / "manifest.json").unlink()  # not to be replayed here
    edit_json(project.root / "provenance" / "advantages" / "0001.json", **damage)

    first, second = verify(1, "--stage", "advantages")
    traced = rloo(project, "lineage", "0001")

    assert (first["status"], second["status"]) == ("failed", "unchecked")
    assert message in first["reason"]
    assert traced.code == 1 or "recorded settings" in message


def test_a_record_that_is_no_object_is_told(project: Project, verify: Verify) -> None:
    (project.root / "provenance" / "advantages" / "0001.json").write_text("[]")

    (found,) = verify(1, "0001", "--stage", "advantages")

    assert "not the provenance of a stage" in found["reason"]


def test_a_replay_that_is_killed_is_told_and_the_next_one_runs(project: Project, verify: Verify) -> None:
    # The function's process is a grandchild of the replay, which is what it kills here.
    (project.root / "reward.py").write_text(
        "import os\n\nimport psutil\n\n\n"
        "def score(completions, **kwargs):\n    psutil.Process(os.getppid()).parent().kill()\n"
    )
    path = project.root / "provenance" / "rewards" / "0001.json"
    inputs = json.loads(path.read_text())["inputs"]
    edit_json(path, inputs={**inputs, "source:reward.py": fingerprint.of_file(project.root / "reward.py")})

    by_iteration = {run["iteration"]: run for run in verify(1, "--stage", "rewards")}
    (alive,) = verify(0, "0001", "--stage", "advantages")

    assert by_iteration["0001"]["status"] == "failed"
    assert "its process was killed" in by_iteration["0001"]["reason"]
    assert alive["status"] == "identical"


def test_a_stage_that_refuses_is_told(project: Project, verify: Verify) -> None:
    path = project.root / "provenance" / "update" / "0001.json"
    settings = json.loads(path.read_text())["settings"]
    versions = {**json.loads(path.read_text())["versions"], "numpy": "1.0"}
    edit_json(path, settings={"update": {**settings["update"], "sampler_tolerance": 1e-12}}, versions=versions)

    (found,) = verify(1, "0001", "--stage", "update")

    assert found["status"] == "failed"
    assert "sampler" in found["reason"]
    assert [item["name"] for item in found["changed"]] == ["update.sampler_tolerance"]
    assert [(item["name"], item["recorded"]) for item in found["conditions"]] == [("versions.numpy", "1.0")]


def test_the_scratch_can_be_kept_and_what_a_kill_left_goes(project: Project, rloo: CommandLine) -> None:
    (project.root / ".rloo" / "verify-killed" / "update-0001").mkdir(parents=True)

    outcome = rloo(project, "verify", "0001", "--stage", "advantages", "--keep")

    (scratch,) = (project.root / ".rloo").glob("replayed-*")
    kept = scratch / "advantages-0001" / "artifacts" / "advantages" / "0001" / "manifest.json"
    assert str(scratch.relative_to(project.root)) in outcome.stderr
    assert json.loads(kept.read_text()) == project.json("artifacts/advantages/0001/manifest.json")
    assert not list((project.root / ".rloo").glob("verify-*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["0009"], "iteration 0009 is not in params.yaml, which has 0000, 0001, 0002"),
        (["1"], "four digits"),
        (["--stage", "train"], "--stage train: there is no such stage; it is one of reward_model, prepare"),
        (["0001", "--stage", "prepare"], "iteration 0001 has no such stage; it has rollouts, logprobs"),
    ],
)
def test_what_does_not_exist_is_the_users_error(
    project: Project, rloo: CommandLine, arguments: list[str], message: str
) -> None:
    outcome = rloo(project, "verify", *arguments)

    assert outcome.code == 2
    assert message in outcome.stderr
