"""What the project's files say, before any store is asked: keys, parameters, secrets, outdated and NaN records."""

import hashlib
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from rloo_pipeline.config import Params
from rloo_pipeline.errors import UserError
from rloo_pipeline.files import write_json
from rloo_pipeline.layout import Layout
from rloo_pipeline.stages.context import Record, make_context
from rloo_pipeline.system import watched
from rloo_pipeline.tracking.files import flat_params, metric_key, read_contents
from rloo_pipeline.tracking.outdated import outdated_records
from rloo_pipeline.tracking.secrets import hide, hide_in_url
from tests.project import PARAMS


def params_with(**sections: Any) -> Params:
    return TypeAdapter(Params).validate_python({**PARAMS, **sections})


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("evaluate/pass@4", "evaluate/pass_at_4"),
        ("logprobs/gap/token_max", "logprobs/gap/token_max"),
        ("rewards/reward/a-b.c", "rewards/reward/a-b.c"),
        ("rewards/reward/a+b", "rewards/reward/a_b"),
    ],
)
def test_metric_keys_are_those_that_mlflow_takes(key: str, expected: str) -> None:
    assert metric_key(key) == expected


def test_params_of_all_sections_by_dotted_path() -> None:
    flat = flat_params(params_with())
    assert flat["seed"] == "3"
    assert flat["iterations.0002.previous"] == "0001"
    assert flat["update.learning_rate"] == "0.001"
    assert flat["evaluate.pass_k"] == "[1]"
    assert flat["policy.revision"] == "null"
    assert flat["rewards.letters.function"] == "reward.py:score"
    assert {key.split(".")[0] for key in flat} == set(Params.model_fields)


def test_secrets_are_hidden() -> None:
    kwargs = {"api_key": "s3cret", "url": "https://me:s3cret@host/v1?token=s3cret&n=1", "max_tokens": 5}
    kwargs |= {"headers": {"Authorization": "Bearer s3cret"}}
    flat = flat_params(params_with(rewards=[{"name": "mine", "function": "reward.py:score", "kwargs": kwargs}]))
    assert "s3cret" not in json.dumps(flat)
    shown = json.loads(flat["rewards.mine.kwargs"])
    assert shown["max_tokens"] == 5
    assert shown["url"] == "https://host/v1?token=(hidden)&n=1"
    assert flat["rollouts.max_tokens"] == "6"
    assert hide("hf_token", None) == "null"
    assert hide_in_url("http://user:s3cret@127.0.0.1:5000/x") == "http://127.0.0.1:5000/x"


@pytest.mark.parametrize(
    "key",
    [
        "hf_token",
        "secret_key",
        "client_secret_key",
        "private_key",
        "privateKey",
        "auth",
        "basic_auth",
        "bearer",
        "pwd",
        "passcode",
        "token_value",
        "key",
        "openai_key",
        "X-Api-Key",
        "Cookie",
        "cookies",
    ],
)
def test_values_of_secret_names_are_hidden(key: str) -> None:
    assert hide(key, "s3cret") == "(hidden)"
    assert json.loads(hide("kwargs", {"headers": {key: "s3cret"}})) == {"headers": {key: "(hidden)"}}
    assert hide(key, {"user": "me", "value": "s3cret"}) == "(hidden)"
    assert hide(key, None) == "null"


@pytest.mark.parametrize("key", ["max_tokens", "monkey", "author", "design", "keys", "compass", "tokenizer"])
def test_values_of_other_names_are_shown(key: str) -> None:
    assert hide(key, "plain") == "plain"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:p@ss@host/db", "http://host/db"),
        ("postgresql://u:a/b@h/db", "postgresql://h/db"),
        ("postgresql://u:a?b#c@h:5432/db", "postgresql://h:5432/db"),
        ("https://token@host/x", "https://host/x"),
        ("https://host/@scope/package?mail=me@there", "https://host/@scope/package?mail=me@there"),
        ("at http://u:p@a/x and http://u:p@b/y", "at http://a/x and http://b/y"),
        ("https://blob/x?sv=1&sig=s3c%2Fret&sp=r", "https://blob/x?sv=1&sig=(hidden)&sp=r"),
        ("https://maps/x?key=s3cret", "https://maps/x?key=(hidden)"),
        ("https://s3/x?X-Amz-Signature=s3cret&n=1", "https://s3/x?X-Amz-Signature=(hidden)&n=1"),
        ("https://hooks.slack.com/services/T0/B0/s3cret", "https://hooks.slack.com/(hidden)"),
        ("Bearer s3cret", "Bearer (hidden)"),
        ("Authorization: bearer s3cret", "Authorization: bearer (hidden)"),
        ("the bearer of news", "the bearer of news"),
    ],
)
def test_secrets_in_values_are_hidden(text: str, shown: str) -> None:
    assert hide("text", text) == shown
    assert json.loads(hide("texts", [text])) == [shown]


def record(layout: Layout, stage: str, iteration: str, inputs: dict[str, str], output: str = "") -> None:
    write_json(layout.provenance(stage, iteration), {"inputs": inputs, "output": output})
    write_json(layout.metrics(stage, iteration), {"value": 1.0})


def model(layout: Layout, iteration: str, fingerprint: str) -> None:
    write_json(layout.model(iteration) / "manifest.json", {"fingerprint": fingerprint})


def chain(root: Path) -> Layout:
    """Two whole iterations: rollouts, update and evaluation each, made from one another."""
    layout = Layout(root)
    for iteration, previous in (("0001", "0000"), ("0002", "0001")):
        record(layout, "rollouts", iteration, {"policy": f"p{previous}"}, f"r{iteration}")
        record(layout, "update", iteration, {"policy": f"p{previous}", "rollouts": f"r{iteration}"})
        record(layout, "evaluate", iteration, {"policy": f"p{iteration}", "reference": "p0000"})
    for iteration in ("0000", "0001", "0002"):
        model(layout, iteration, f"p{iteration}")
    return layout


def test_nothing_is_outdated_in_a_whole_chain(tmp_path: Path) -> None:
    assert outdated_records(chain(tmp_path), params_with(), {}) == set()


def test_another_update_makes_all_that_came_of_it_outdated(tmp_path: Path) -> None:
    layout = chain(tmp_path)
    model(layout, "0001", "another")
    expected = {("evaluate", "0001"), ("rollouts", "0002"), ("update", "0002"), ("evaluate", "0002")}
    assert outdated_records(layout, params_with(), {}) == expected


def test_other_rollouts_make_the_update_outdated(tmp_path: Path) -> None:
    layout = chain(tmp_path)
    record(layout, "rollouts", "0002", {"policy": "p0001"}, "another")
    assert outdated_records(layout, params_with(), {}) == {("update", "0002"), ("evaluate", "0002")}


def test_outdated_records_are_not_tracked(tmp_path: Path) -> None:
    layout = chain(tmp_path)
    model(layout, "0001", "another")
    contents = read_contents(layout, params_with(), {})
    assert {(point.key, point.step) for point in contents.points} == {("rollouts/value", 1), ("update/value", 1)}
    assert not contents.complete
    assert [(item.iteration, item.fingerprint) for item in contents.checkpoints] == [("0001", "another")]


def lock_of(layout: Layout) -> dict[str, Any]:
    """The chain's dvc.lock, with letters for the hashes of artifacts."""
    stages = {}
    for iteration, previous in (("0001", "0000"), ("0002", "0001")):
        policy, rollouts = f"artifacts/policy/{iteration}/model", f"artifacts/rollouts/{iteration}"
        links = {
            "rollouts": ([f"artifacts/policy/{previous}/model"], [rollouts]),
            "update": ([f"artifacts/policy/{previous}/model", rollouts], [policy]),
            "evaluate": ([policy, "artifacts/policy/0000/model"], []),
        }
        for stage, (deps, outs) in links.items():
            md5 = hashlib.md5(layout.metrics(stage, iteration).read_bytes()).hexdigest()
            stages[f"{stage}@{iteration}"] = {
                "deps": [{"path": path, "md5": path} for path in deps],
                "outs": [
                    *({"path": path, "md5": path} for path in outs),
                    {"path": f"metrics/{stage}/{iteration}.json", "md5": md5},
                ],
            }
    return {"stages": stages}


def test_what_dvc_restored_from_its_cache_is_not_outdated(tmp_path: Path) -> None:
    """The provenance beside it is that of another run."""
    layout = chain(tmp_path)
    record(layout, "rollouts", "0002", {"policy": "another"}, "another")
    lock = lock_of(layout)
    assert outdated_records(layout, params_with(), lock) == set()
    assert outdated_records(layout, params_with(), {}) == {(s, "0002") for s in ("rollouts", "update", "evaluate")}


def test_dvc_lock_does_not_vouch_for_what_came_of_a_stage_that_just_ran(tmp_path: Path) -> None:
    """dvc.lock has the stage's older outputs until the stage has ended."""
    layout = chain(tmp_path)
    lock = lock_of(layout)
    write_json(layout.metrics("update", "0001"), {"value": 2.0})
    model(layout, "0001", "another")
    expected = {("evaluate", "0001"), ("rollouts", "0002"), ("update", "0002"), ("evaluate", "0002")}
    assert outdated_records(layout, params_with(), lock) == expected


def test_pruned_weights_make_nothing_outdated(tmp_path: Path) -> None:
    layout = chain(tmp_path)
    (layout.model("0001") / "manifest.json").unlink()
    assert outdated_records(layout, params_with(), {}) == set()
    assert read_contents(layout, params_with(), {}).checkpoints[0].fingerprint == "p0001"


def test_a_broken_metrics_file_is_named(tmp_path: Path) -> None:
    layout = chain(tmp_path)
    layout.metrics("update", "0001").write_text("{")
    with pytest.raises(UserError, match=r"metrics/update/0001\.json: not readable as JSON"):
        read_contents(layout, params_with(), {})


def test_a_metric_that_is_not_finite_is_null_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = Layout(tmp_path)
    stage = Record(make_context(params_with(), layout, "0001"), "update", {}, {})
    stage.metrics |= {"loss": math.nan, "norm": -math.inf, "step": 1.0}
    stage.finish({}, "fingerprint")
    assert json.loads(layout.metrics("update", "0001").read_text()) == {"loss": None, "norm": None, "step": 1.0}
    told = json.loads(layout.provenance("update", "0001").read_text())
    assert told["not_finite"] == {"loss": "nan", "norm": "-inf"}
    assert "warning: update 0001: metric loss is nan" in capsys.readouterr().err
    contents = read_contents(layout, params_with(), {})
    assert contents.not_finite == ("update/loss of 0001: nan", "update/norm of 0001: -inf")
    assert [point.key for point in contents.points if not point.measured] == ["update/step"]


def test_system_metrics_are_added_to_the_timings(tmp_path: Path) -> None:
    timings = tmp_path / "timings.json"
    with watched(timings):
        write_json(timings, {"seconds": 1.5})
    values = json.loads(timings.read_text())
    assert values["seconds"] == 1.5
    system = values["system"]
    for name in ("cpu_utilization_percentage", "system_memory_usage_megabytes", "process_memory_megabytes"):
        assert 0 <= system[f"{name}_mean"] <= system[f"{name}_max"]
    assert system["process_memory_megabytes_mean"] > 10
    assert system["cpu_utilization_percentage_max"] <= 100


def test_a_failing_stage_fails_as_itself(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="mine"), watched(tmp_path / "timings.json"):
        raise UserError("mine")


def test_gpus_are_looked_at_through_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs as nvidia-ml-py tells of them, the second a virtual one that does not tell its load."""
    nvml = types.ModuleType("pynvml")
    nvml.NVMLError = type("NVMLError", (Exception,), {})  # type: ignore[attr-defined]

    def load(gpu: str) -> types.SimpleNamespace:
        if gpu == "gpu 1":
            raise nvml.NVMLError
        return types.SimpleNamespace(gpu=75)

    nvml.__dict__.update(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: f"gpu {index}",
        nvmlDeviceGetMemoryInfo=lambda gpu: types.SimpleNamespace(used=3 * 10**9),
        nvmlDeviceGetUtilizationRates=load,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    timings = tmp_path / "timings.json"
    with watched(timings):
        write_json(timings, {})
    system = json.loads(timings.read_text())["system"]
    gpus = {key: value for key, value in system.items() if key.startswith("gpu") and key.endswith("_max")}
    assert gpus == {
        "gpu_0_memory_usage_megabytes_max": 3000,
        "gpu_0_utilization_percentage_max": 75,
        "gpu_1_memory_usage_megabytes_max": 3000,
    }
