"""Parts of verify that need no project: settings as recorded, the scratch, tensors, and what is printed."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from safetensors.numpy import save_file

from rloo_pipeline.audit.compare import Change, compare_tables, jsonable, printable
from rloo_pipeline.audit.recorded import changed, conditions, recorded_params
from rloo_pipeline.audit.replay import Scratch, link
from rloo_pipeline.audit.tensors import PartDifference, compare_parts
from rloo_pipeline.audit.verify_report import Outcome, as_json, lines, of_metrics, of_table
from rloo_pipeline.config import Params, parse_params
from rloo_pipeline.errors import UserError
from rloo_pipeline.files import remove, write_json
from rloo_pipeline.layout import Layout
from rloo_pipeline.manifest import write_model_manifest
from tests.project import PARAMS


@pytest.fixture
def params() -> Params:
    return parse_params(PARAMS)


def rows(**columns: object) -> pa.Table:
    return pa.table({"iteration": [1, 1], "prompt_id": ["a", "b\x07"], "sample_index": [0, 0], **columns})


def model(directory: Path, **tensors: np.ndarray) -> Path:
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text("{}")
    write_model_manifest(directory)
    return directory


def test_settings_come_from_the_record_and_the_rest_from_params(params: Params) -> None:
    rollouts = {**params.rollouts.model_dump(mode="json"), "temperature": 0.5}

    found = recorded_params(params, "rollouts", "0001", {"settings": {"rollouts": rollouts}, "seed": 9})

    assert (found.rollouts.temperature, found.seed) == (0.5, 9)
    assert found.update == params.update
    assert changed(params, found, "rollouts") == [
        Change("rollouts.temperature", "both", 0.5, 1.0),
        Change("seed", "both", 9, 3),
    ]


def test_prepare_and_rewards_and_a_skipped_evaluation_are_read_back(params: Params) -> None:
    prepare = {
        "policy": {**params.policy.model_dump(mode="json"), "revision": "v1"},
        "prompts": params.prompts.model_dump(mode="json"),
        "max_tokens": {"train": 11, "eval": 12},
    }
    rewards = [{"name": "other", "function": "reward.py:score", "weight": 2.0}]
    skipped = {"evaluate": params.evaluate.model_dump(mode="json"), "skipped": True}

    of_prepare = recorded_params(params, "prepare", "0000", {"settings": prepare, "seed": 3})
    of_rewards = recorded_params(params, "rewards", "0001", {"settings": {"rewards": rewards}, "seed": 3})
    of_evaluate = recorded_params(params, "evaluate", "0002", {"settings": skipped, "seed": 3})

    assert (of_prepare.rollouts.max_tokens, of_prepare.evaluate.max_tokens) == (11, 12)
    assert of_prepare.policy.revision == "v1"
    assert [(item.name, item.weight) for item in of_rewards.rewards] == [("other", 2.0)]
    assert [item.evaluate for item in of_evaluate.iterations.values()] == [True, False]


def test_batch_shapes_are_those_recorded_and_threads_those_of_now(params: Params) -> None:
    provenance = {
        "settings": {"evaluate": params.evaluate.model_dump(mode="json")},
        "seed": 3,
        "execution": {"logprobs_batch_tokens": 77, "threads": 9, "attention": "sdpa", "cuda": "13"},
        "engine": {"batch_size": 5, "threads": 9},
    }

    found = recorded_params(params, "evaluate", "0001", provenance).execution

    assert (found.logprobs_batch_tokens, found.generation_batch_size, found.threads) == (77, 5, 1)


def test_settings_of_another_version_are_told(params: Params) -> None:
    with pytest.raises(UserError, match="update 0001: its recorded settings are not those of this version"):
        recorded_params(params, "update", "0001", {"settings": {"update": {"momentum": 1}}, "seed": 3})


def test_conditions_are_compared_where_both_tell_them() -> None:
    then = {"versions": {"torch": "1", "vllm": "2"}, "device": "cpu", "inputs": {"a": "b"}, "engine": "vllm"}
    now = {"versions": {"torch": "1"}, "device": "gpu", "inputs": {}}

    assert conditions(then, now) == [
        Change("device", "both", "cpu", "gpu"),
        Change("versions.vllm", "left", "2", None),
    ]


def test_what_is_done_in_the_scratch_does_not_reach_the_originals(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    model_dir = layout.model("0001")
    write_json(model_dir / "config.json", {"a": 1})
    layout.prompts.mkdir()
    (layout.prompts / "train.parquet").write_bytes(b"rows")
    scratch = Scratch(tmp_path, tmp_path / ".rloo" / "verify-x")

    link(layout, scratch, [model_dir, layout.prompts / "train.parquet"])

    copy = scratch.model("0001")
    assert copy != model_dir
    assert json.loads((copy / "config.json").read_text()) == {"a": 1}
    assert (scratch.prompts / "train.parquet").read_bytes() == b"rows"
    write_json(copy / "config.json", {"a": 2})
    (copy / "new").write_text("x")
    remove(scratch.artifacts)
    assert json.loads((model_dir / "config.json").read_text()) == {"a": 1}
    assert [path.name for path in model_dir.iterdir()] == ["config.json"]
    assert (layout.prompts / "train.parquet").read_bytes() == b"rows"


def test_tensors_are_compared_by_value_and_listed_by_size_of_difference(tmp_path: Path) -> None:
    one = np.zeros((2, 3), np.float32)
    left = model(tmp_path / "left", same=one, small=one, big=one, shape=one, gone=one)
    small, big = one.copy(), one.copy()
    small[0, 0], big[1] = 0.25, [1.0, -2.0, 0.0]
    right = model(tmp_path / "right", same=one, small=small, big=big, shape=one[:1], new=one)
    (right / "config.json").write_text("{ }")
    (right / "manifest.json").unlink()
    write_model_manifest(right)

    assert compare_parts(left, left) == []
    assert compare_parts(left, right) == [
        PartDifference("big", "both", 2, 6, 2.0),
        PartDifference("small", "both", 1, 6, 0.25),
        PartDifference("file:config.json", "both"),
        PartDifference("gone", "left"),
        PartDifference("new", "right"),
        PartDifference("shape", "both"),
    ]


def test_damaged_weights_are_not_compared(tmp_path: Path) -> None:
    left = model(tmp_path / "left", a=np.zeros(2, np.float32))
    right = model(tmp_path / "right", a=np.ones(2, np.float32))
    (left / "config.json").write_text("{ }")

    with pytest.raises(UserError, match=r"file:config.json changed after the manifest was written"):
        compare_parts(left, right)


def test_the_first_row_that_differs_leads_and_untrusted_text_is_escaped() -> None:
    left = rows(x=[1.0, 2.0], text=["same", "a\x1b[31m[red]"])
    right = rows(x=[1.0, 2.5], text=["some", "a"])
    outcome = Outcome("rollouts", "0001", "differs", differences=of_table("rollouts", compare_tables(left, right)))

    told = lines(outcome)

    assert told == [
        "rollouts 0001: differs",
        "  rollouts: text: 2 of 2 rows differ; first at iteration 1, prompt_id a, sample_index 0, character 1: "
        "stored 'same', replayed 'some'",
        "  rollouts: x: 1 of 2 rows differ, by at most 0.5; first at iteration 1, prompt_id b\\x07, sample_index 0: "
        "stored 2, replayed 2.5",
    ]
    assert all("\x1b" not in line for line in lines(Outcome("rewards", "0001", "failed", "raised \x1b[31m\nred")))


def test_rows_columns_and_types_that_do_not_match_are_told() -> None:
    left = rows(x=[1, 2], old=[1, 2]).slice(0, 1)
    right = rows(x=[1.0, 2.0], new=[1, 2])

    told = [difference.told for difference in of_table("rewards", compare_tables(left, right))]

    assert told == [
        "1 rows are only in the replayed artifact, the first at iteration 1, prompt_id b\x07, sample_index 0",
        "old: only in the stored artifact",
        "new: only in the replayed artifact",
        "x: stored as int64, replayed as double",
    ]


def test_people_are_told_of_five_and_machines_of_all() -> None:
    differences = of_metrics({f"m{i}": i for i in range(8)}, {f"m{i}": i + 1 for i in range(7)})
    outcome = Outcome("update", "0001", "differs", differences=differences)

    assert lines(outcome)[-1] == "  metrics: and 3 more that differ"
    assert lines(outcome)[1] == "  metrics: m0: stored 0, replayed 1"
    assert [item["name"] for item in as_json(outcome)["differences"]] == [f"m{i}" for i in range(8)]


def test_json_is_strict() -> None:
    assert jsonable({"a": [float("nan"), float("inf"), 1.5, None, True], 1: b"x"}) == {
        "a": ["nan", "inf", 1.5, None, True],
        "1": "b'x'",
    }
    assert printable("a\tb\u2066c d") == r"a\tb\u2066c d"
