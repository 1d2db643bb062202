"""rloo lineage: the chain back from an iteration's weights, and every way in which a link of it can be broken."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest

from rloo_pipeline.audit import contents
from tests.conftest import CommandLine
from tests.project import Project
from tests.rewriting import edit_json, replaced, rewrite_table, rewrite_weight, stored

CHAIN = [
    *[(stage, it) for it in ("0002", "0001") for stage in ("update", "advantages", "rewards", "logprobs", "rollouts")],
    ("prepare", "0000"),
]


@pytest.fixture
def project(finished_project: Project, tmp_path: Path) -> Project:
    """A finished project that a test may damage."""
    return finished_project.copy(tmp_path / "project")


@pytest.fixture
def lineage(project: Project, rloo: CommandLine) -> Callable[..., dict[str, Any]]:
    """`lineage(code)`: the lineage of 0002 as JSON, when the command has ended with this status."""

    def call(code: int, iteration: str = "0002") -> dict[str, Any]:
        outcome = rloo(project, "lineage", iteration, "--json")
        assert outcome.code == code, outcome.stdout + outcome.stderr
        return json.loads(outcome.stdout)

    return call


def run_of(found: dict[str, Any], stage: str, iteration: str) -> dict[str, Any]:
    return next(run for run in found["stages"] if (run["stage"], run["iteration"]) == (stage, iteration))


def item_of(items: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(item for item in items if item["name"] == name)


def test_an_untouched_chain_is_intact_and_told_to_its_end(project: Project, lineage: Callable[..., Any]) -> None:
    found = lineage(0)

    assert (found["intact"], found["problems"]) == (True, [])
    assert [(run["stage"], run["iteration"]) for run in found["stages"]] == CHAIN
    for run in found["stages"]:
        recorded = project.json(f"provenance/{run['stage']}/{run['iteration']}.json")
        assert run["fingerprint"] == recorded["output"]
        assert run["settings"] == recorded["settings"]
        assert run["versions"] == recorded["versions"]
        assert {item["status"] for item in (*run["inputs"], *run["outputs"])} == {"ok"}
        assert recorded["inputs"].items() <= {item["name"]: item["recorded"] for item in run["inputs"]}.items()
    weights = project.json("artifacts/policy/0002/model/manifest.json")["fingerprint"]
    assert item_of(run_of(found, "update", "0002")["outputs"], "policy")["fingerprint"] == weights


def test_counts_are_those_of_the_rows(project: Project, lineage: Callable[..., Any]) -> None:
    found = lineage(0)

    sampled = stored(project.root, "rollouts", "0001")
    tokens = pc.sum(pc.list_value_length(sampled["completion_token_ids"])).as_py()
    assert run_of(found, "rollouts", "0001")["counts"] == {"rows": 16, "tokens": tokens}
    assert run_of(found, "advantages", "0001")["counts"] == {"rows": 16, "trained": 16}
    assert run_of(found, "update", "0001")["counts"] == {"trained": 16, "step": 1}
    assert run_of(found, "prepare", "0000")["counts"] == {"train_rows": 8, "eval_rows": 4}


@pytest.mark.parametrize("step", [99, None])
def test_counts_are_not_those_of_unchecked_metrics(project: Project, lineage: Callable[..., Any], step: Any) -> None:
    edit_json(project.root / "metrics" / "update" / "0002.json", step=step, completions=7)

    assert run_of(lineage(0), "update", "0002")["counts"] == {"trained": 16, "step": 2}


def test_prepare_is_traced_to_the_users_files(lineage: Callable[..., Any]) -> None:
    (only,) = lineage(0, "0000")["stages"]

    names = [item["name"] for item in only["inputs"]]
    assert sorted(names) == ["source:eval.jsonl", "source:tiny", "source:train.jsonl"]


def test_every_artifact_is_read_once(
    lineage: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, project: Project
) -> None:
    read: Counter[Path] = Counter()
    original = contents._artifact
    monkeypatch.setattr(contents, "_artifact", lambda path: read.update([path]) or original(path))

    lineage(0)

    assert set(read.values()) == {1}
    assert len(read) == 2 + 3 * 2 + 2 * 4  # prompts, three policies of two parts, two iterations of four tables


@pytest.mark.parametrize(
    "file",
    [
        "artifacts/rollouts/0001/shard-00001.parquet",
        "artifacts/policy/0001/model/model.safetensors",
        "artifacts/policy/0001/trainer_state/optimizer.safetensors",
        "artifacts/policy/0000/model/config.json",
        "artifacts/prompts/train.parquet",
        "artifacts/advantages/0002/manifest.json",
    ],
)
def test_a_flipped_byte_is_found_and_named(project: Project, lineage: Callable[..., Any], file: str) -> None:
    path = project.root / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    path.write_bytes(data)

    (problem,) = lineage(1)["problems"]

    assert str(Path(file).parent) in problem
    assert "dvc checkout" in problem


def test_an_artifact_replaced_without_its_provenance_breaks_both_links(
    project: Project, lineage: Callable[..., Any]
) -> None:
    table = replaced(stored(project.root, "rewards", "0002"), "reward", 3, lambda value: value + 1)
    rewrite_table(project.root, "rewards", "0002", table, recorded=False)

    found = lineage(1)

    assert "provenance/rewards/0002.json tells of another output" in found["problems"][0] + found["problems"][1]
    assert any("advantages 0002 was made from another artifacts/rewards/0002" in item for item in found["problems"])
    assert len(found["problems"]) == 2
    assert item_of(run_of(found, "advantages", "0002")["inputs"], "rewards")["status"] == "broken"


def test_weights_replaced_with_everything_of_their_own_break_what_was_made_from_them(
    project: Project, lineage: Callable[..., Any]
) -> None:
    rewrite_weight(project.root, "0001", "model.norm.weight", 0.5)

    problems = lineage(1)["problems"]

    assert [problem.split(" was made from another ")[0] for problem in problems] == [
        "update 0002",
        "logprobs 0002",
        "rollouts 0002",
    ]
    assert all("artifacts/policy/0001/model" in problem for problem in problems)


@pytest.mark.parametrize(
    ("file", "read_by"), [("reward.py", ["rewards 0002", "rewards 0001"]), ("train.jsonl", ["prepare 0000"])]
)
def test_an_edited_file_of_the_user_is_found(
    project: Project, lineage: Callable[..., Any], file: str, read_by: list[str]
) -> None:
    path = project.root / file
    path.write_text(path.read_text() + "\n")

    problems = lineage(1)["problems"]

    assert [problem.split(" read it")[0] for problem in problems] == [
        f"{file}: edited after {name}" for name in read_by
    ]


def test_missing_provenance_breaks_the_chain(project: Project, lineage: Callable[..., Any]) -> None:
    (project.root / "provenance" / "rollouts" / "0001.json").unlink()

    (problem,) = lineage(1)["problems"]

    assert problem.startswith("provenance/rollouts/0001.json: no such file")
    assert "git checkout" in problem


def test_a_setting_changed_and_changed_back(project: Project, rloo: CommandLine) -> None:
    """DVC restores artifacts and metrics of the earlier run and leaves the provenance of the later one."""
    project.run("git", "add", "--all")
    project.run("git", "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", "run")
    for setting, other in (("learning_rate", 0.002), ("sampler_tolerance", 0.02)):  # this one leaves the output equal
        original = project.params()
        project.change(f"update.{setting}", other)
        project.repro("update@0001")
        project.write_params(original)
        project.repro("update@0001")
        assert project.json("provenance/update/0001.json")["settings"]["update"][setting] == other

        found = rloo(project, "lineage", "0001", "--json")
        verified = rloo(project, "verify", "0001", "--stage", "update", "--json")
        differences = json.loads(rloo(project, "diff", "HEAD:0001", "0001", "--json").stdout)

        assert found.code == 0, found.stdout
        assert run_of(json.loads(found.stdout), "update", "0001")["settings"]["update"][setting] != other
        assert verified.code == 0, verified.stdout
        assert json.loads(verified.stdout)["stages"][0]["changed"] == []
        assert all(stage["same"] for stage in differences["stages"].values())
        assert differences["settings"] == differences["metrics"] == differences["left_out"] == []


def test_an_earlier_output_whose_record_is_lost_is_told(project: Project, rloo: CommandLine) -> None:
    shutil.rmtree(project.root / ".rloo" / "provenance")
    edit_json(project.root / "provenance" / "update" / "0001.json", output="0" * 64)

    told = [
        rloo(project, *command)
        for command in (("lineage", "0001"), ("verify", "0001", "--stage", "update"), ("diff", "0002", "0001"))
    ]

    assert [outcome.code for outcome in told] == [1, 1, 0]
    assert all("`dvc repro -f -s update@0001`" in outcome.stdout for outcome in told)


def test_pruned_weights_are_missing_and_not_broken(
    project: Project, lineage: Callable[..., Any], rloo: CommandLine
) -> None:
    shutil.rmtree(project.root / "artifacts" / "policy" / "0001")

    found = lineage(0)

    assert {item["status"] for item in run_of(found, "update", "0001")["outputs"]} == {"missing"}
    assert item_of(run_of(found, "rollouts", "0002")["inputs"], "policy")["status"] == "missing"
    told = rloo(project, "lineage", "0002").stdout
    assert "pruned or not checked out" in told
    assert "known from records alone: artifacts/policy/0001/model, artifacts/policy/0001/trainer_state" in told


@pytest.mark.parametrize("removed", ["artifacts", "artifacts/rollouts/0001", "artifacts/prompts"])
def test_rows_that_are_not_here_are_no_proof(project: Project, rloo: CommandLine, removed: str) -> None:
    shutil.rmtree(project.root / removed)

    plain, as_json = (rloo(project, "lineage", "0002", *options) for options in ((), ("--json",)))

    assert (plain.code, as_json.code) == (1, 1)
    assert "intact" not in plain.stdout
    assert plain.stdout.splitlines()[-1].startswith("not checked: 11 runs of stages, ")
    assert "`dvc pull`" in plain.stdout
    found = json.loads(as_json.stdout)
    assert (found["intact"], found["problems"]) == (False, [])
    items = [item for run in found["stages"] for item in (*run["inputs"], *run["outputs"])]
    recorded = sum(item["status"] == "missing" for item in items)
    assert found["links"] == {"checked": len(items) - recorded, "recorded": recorded}
    assert recorded > 0


def test_records_that_disagree_on_pruned_weights_are_broken(project: Project, lineage: Callable[..., Any]) -> None:
    shutil.rmtree(project.root / "artifacts" / "policy" / "0001")
    path = project.root / "provenance" / "rollouts" / "0002.json"
    edit_json(path, inputs={**json.loads(path.read_text())["inputs"], "policy": "0" * 64})

    (problem,) = lineage(1)["problems"]

    assert "artifacts/policy/0001/model is not there, and its fingerprint is recorded differently" in problem
    assert "rollouts 0002 (000000000000)" in problem


def test_pruned_weights_must_be_those_that_their_own_update_tells_of(
    project: Project, lineage: Callable[..., Any]
) -> None:
    shutil.rmtree(project.root / "artifacts" / "policy" / "0001")
    edit_json(project.root / "provenance" / "update" / "0001.json", output="0" * 64)

    (problem,) = lineage(1)["problems"]

    assert "provenance/update/0001.json tells of another output (000000000000)" in problem


def test_the_tree_tells_stages_settings_and_the_broken_link(project: Project, rloo: CommandLine) -> None:
    intact = rloo(project, "lineage", "0002")
    (project.root / "reward.py").write_text("def score(completions, **kwargs):\n    return [0.0] * len(completions)\n")
    broken = rloo(project, "lineage", "0002")

    assert intact.code == 0
    assert intact.stdout.index("0002") < intact.stdout.index("0001") < intact.stdout.index("prepare")
    assert "learning_rate 0.001" in intact.stdout
    assert "settings as in 0002" in intact.stdout
    assert "intact: 11 runs of stages" in intact.stdout
    assert broken.code == 1
    assert "broken: reward.py: edited after rewards 0002 read it" in broken.stdout
    assert broken.stdout.endswith("2 broken\n")


def test_text_in_records_is_neither_markup_nor_control_characters(project: Project, rloo: CommandLine) -> None:
    path = project.root / "provenance" / "logprobs" / "0002.json"
    edit_json(path, settings={"logprobs": {"dtype": "[red]x[/red]\x1b[31m\nline"}})

    told = rloo(project, "lineage", "0002").stdout

    assert "[red]x[/red]" in told
    assert "\x1b" not in told
    assert "line" in told


def test_an_iteration_that_is_not_there_is_the_users_error(project: Project, rloo: CommandLine) -> None:
    shutil.rmtree(project.root / "provenance" / "update")

    unknown, malformed, not_run = (rloo(project, "lineage", name) for name in ("0009", "2", "0002"))

    assert [outcome.code for outcome in (unknown, malformed, not_run)] == [2, 2, 2]
    assert "0009 is not in params.yaml, which has 0000, 0001, 0002" in unknown.stderr
    assert "update 0002 has not been run" in not_run.stderr
