"""The DVC graph, the command line, the settings and the algorithm versions name the same stages."""

from typing import Any

import pytest
import typer
from ruamel.yaml import YAML

from rloo_pipeline import config
from rloo_pipeline.cli import app
from rloo_pipeline.layout import REWARD_MODEL, STAGES
from tests.project import REPOSITORY

ALGORITHMS = "rloo_pipeline/algorithms.yaml"
GRAPH: dict[str, Any] = YAML(typ="safe").load((REPOSITORY / "dvc.yaml").read_text())["stages"]
PARAMS = {
    "sources": set(),
    "reward_model": {"seed", "reward_models.${key}", "version of reward_model"},
    "prepare": {"seed", "policy", "prompts", "rollouts.max_tokens", "evaluate.max_tokens", "version of prepare"},
    "evaluate_initial": {"seed", "evaluate", "rewards", "version of evaluate"},
    "rollouts": {"seed", "rollouts", "version of rollouts"},
    "logprobs": {"logprobs", "version of logprobs"},
    "rewards": {"rewards", "version of rewards"},
    "advantages": {"advantages", "version of advantages"},
    "update": {"seed", "update", "version of update"},
    "evaluate": {"seed", "evaluate", "rewards", "iterations.${key}", "version of evaluate"},
    "history": {"iterations"},
}
PREVIOUS, REFERENCE = "artifacts/policy/${item.previous}", "artifacts/policy/${item.reference}/model"
DEPS = {
    "sources": {"${item.path}"},
    "reward_model": {"sources/reward_models"},
    "prepare": {"sources/policy", "sources/prompts"},
    "evaluate_initial": {"artifacts/prompts/eval.parquet", "artifacts/policy/0000/model", "sources/rewards"},
    "rollouts": {"artifacts/prompts/train.parquet", f"{PREVIOUS}/model"},
    "logprobs": {"artifacts/rollouts/${key}", f"{PREVIOUS}/model", REFERENCE},
    "rewards": {"artifacts/prompts/train.parquet", "artifacts/rollouts/${key}", "sources/rewards"},
    "advantages": {
        "artifacts/rollouts/${key}", "artifacts/logprobs/${key}", "artifacts/rewards/${key}",
        f"{PREVIOUS}/trainer_state",
    },
    "update": {
        "artifacts/rollouts/${key}", "artifacts/logprobs/${key}", "artifacts/advantages/${key}",
        f"{PREVIOUS}/model", f"{PREVIOUS}/trainer_state",
    },
    "evaluate": {
        "artifacts/prompts/eval.parquet", "artifacts/policy/${key}/model", REFERENCE, "artifacts/evaluation/0000",
        "sources/rewards",
    },
    "history": {"metrics"},
}  # fmt: skip


def body(stage: str) -> dict[str, Any]:
    return GRAPH[stage].get("do", GRAPH[stage])


def params_of(stage: str) -> set[str]:
    found = set()
    for item in body(stage).get("params", []):
        if isinstance(item, str):
            found.add(item)
        else:
            (file, keys) = next(iter(item.items()))
            assert file == ALGORITHMS
            found |= {f"version of {key}" for key in keys}
    return found


def test_stages_of_the_graph() -> None:
    assert set(GRAPH) == set(PARAMS) == set(DEPS)
    assert set(GRAPH) - {"sources", "evaluate_initial", "history"} == {REWARD_MODEL, *STAGES}


@pytest.mark.parametrize("stage", GRAPH)
def test_a_stage_depends_on_its_own_params_alone(stage: str) -> None:
    assert params_of(stage) == PARAMS[stage]
    assert not {name for name in params_of(stage) if name.startswith("execution")}


@pytest.mark.parametrize("stage", GRAPH)
def test_a_stage_depends_on_its_inputs_and_no_module(stage: str) -> None:
    deps = body(stage)["deps"]
    assert set(deps) == DEPS[stage]
    assert len(set(deps)) == len(deps)
    assert not [dep for dep in deps if dep.endswith(".py") or dep.startswith("rloo_pipeline")]


@pytest.mark.parametrize("stage", GRAPH)
def test_a_stage_runs_the_command_of_its_name(stage: str) -> None:
    arguments = {"prepare": "", "history": "", "evaluate_initial": " 0000"}.get(stage, " ${key}")
    assert body(stage)["cmd"] == f"rloo {stage.removesuffix('_initial')}{arguments}"


def test_metrics_are_kept_in_git() -> None:
    for stage in (REWARD_MODEL, *STAGES):
        (metrics,) = body(stage)["metrics"]
        ((path, options),) = metrics.items()
        assert path.startswith(f"metrics/{stage}/")
        assert options == {"cache": False}


def test_no_output_is_of_a_place_that_differs_between_runs() -> None:
    for stage in GRAPH:
        outs = [out if isinstance(out, str) else next(iter(out)) for out in body(stage)["outs"]]
        assert all(out.startswith(("artifacts/", "sources/")) for out in outs)


def test_one_name_everywhere() -> None:
    versions = YAML(typ="safe").load((REPOSITORY / ALGORITHMS).read_text())
    assert list(versions) == [REWARD_MODEL, *STAGES]
    assert all(isinstance(version, int) and version >= 1 for version in versions.values())
    assert {REWARD_MODEL, *STAGES} <= set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert {f"{REWARD_MODEL}s", *STAGES} - set(config.Params.model_fields) == {"prepare"}
    for stage in (REWARD_MODEL, *STAGES):
        assert (REPOSITORY / "rloo_pipeline" / "stages" / f"{stage}.py").is_file()


def sections() -> list[type[config.Section]]:
    return [
        value
        for value in vars(config).values()
        if isinstance(value, type) and issubclass(value, config.Section) and value is not config.Section
    ]


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.__name__)
def test_every_setting_says_what_it_means(section: type[config.Section]) -> None:
    assert "__doc__" in vars(section)
    assert section.__doc__
    for name, field in section.model_fields.items():
        kind = field.annotation
        described_by_its_section = isinstance(kind, type) and issubclass(kind, config.Section) and kind.__doc__
        assert field.description or described_by_its_section, f"{section.__name__}.{name} has no description"
    assert section.model_config["extra"] == "forbid"
    assert section.model_config["frozen"]
