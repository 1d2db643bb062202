"""params.yaml: every refusal says where and why."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rloo_pipeline.config import load_params, parse_params
from rloo_pipeline.errors import UserError
from tests.project import PARAMS, REPOSITORY


def changed(changes: Mapping[str, Any]) -> dict[str, Any]:
    """PARAMS with values set by dotted path; None removes a key."""
    values = copy.deepcopy(PARAMS)
    for path, value in changes.items():
        *parents, last = path.split(".")
        section = values
        for key in parents:
            section = section[key]
        if value is None:
            del section[last]
        else:
            section[last] = value
    return values


def test_good_params() -> None:
    params = parse_params(PARAMS)
    assert params.rollouts.completions_per_prompt == 4
    assert params.iterations["0002"].previous == "0001"
    with pytest.raises(ValidationError):
        params.rollouts.max_tokens = 3


def test_the_projects_own_params() -> None:
    assert list(load_params(REPOSITORY / "params.yaml").iterations)


LINKS = {"previous": "0000", "reference": "0000"}
FILE = {"file": "a.csv"}
REFUSED = [
    # Keys.
    ({"rollouts.temprature": 1.0}, r"rollouts\.temprature: there is no such key; check its spelling"),
    ({"rollout": {}}, r"params\.yaml: rollout: there is no such key"),
    ({"iterations.0001.refrence": "0000"}, r"iterations\.0001\.refrence: there is no such key"),
    ({"seed": None}, r"seed: this key is missing; add it"),
    ({"update.learning_rate": None}, r"update\.learning_rate: this key is missing"),
    # Values.
    ({"seed": -1}, r"seed: .*greater than or equal to 0"),
    ({"seed": "many"}, r"seed: .*integer"),
    ({"rollouts.max_tokens": 0}, r"rollouts\.max_tokens: .*greater than or equal to 1"),
    ({"rollouts.temperature": 0.0}, r"rollouts\.temperature: .*greater than 0"),
    ({"rollouts.temperature": float("nan")}, r"rollouts\.temperature: "),
    ({"rollouts.engine": "vlm"}, r"rollouts\.engine: .*'vllm'"),
    ({"rollouts.dtype": "float16"}, r"rollouts\.dtype: .*bfloat16"),
    ({"advantages.beta": -0.1}, r"advantages\.beta: "),
    ({"advantages.baseline": "no_such"}, r"advantages\.baseline: .*leave_one_out"),
    ({"advantages.reward_clip_range": [1.0, 1.0]}, r"reward_clip_range: the lowest must be less than the highest"),
    ({"update.learning_rate": float("inf")}, r"update\.learning_rate: .*finite"),
    ({"update.learning_rate": -1e-3}, r"update\.learning_rate: "),
    ({"update.max_grad_norm": 0}, r"update\.max_grad_norm: "),
    # The chain.
    ({"iterations": {"1": LINKS}}, r"iterations: 1: an iteration id has four digits"),
    ({"iterations": {"0001": {**LINKS, "previous": "0005"}}}, r"its previous 0005 is not in the chain"),
    ({"iterations": {"0001": {**LINKS, "reference": "0009"}}}, r"its reference 0009 is not in the chain"),
    ({"iterations": {"0001": {**LINKS, "previous": "0001"}}}, r"its previous 0001 must come before it"),
    ({"iterations": {"0000": LINKS}}, r"iteration 0000: its previous 0000 must come before it"),
    # Origins.
    ({"prompts.train": {}}, r"prompts\.train: name exactly one of file, hub, generator, fraction; given: none"),
    ({"prompts.train": {"file": "a.csv", "hub": "a/b"}}, r"prompts\.train: name exactly one.*given: file, hub"),
    ({"prompts.train": {"hub": "a/b"}}, r"prompts\.train: a hub dataset needs its split"),
    ({"prompts.train": {"fraction": 0.5}}, r"train\.fraction: only eval can be a fraction"),
    ({"prompts.train": "a.csv"}, r"prompts\.train: write a dataset, or a list of datasets"),
    ({"prompts.train": []}, r"prompts\.train: .*at least 1"),
    ({"prompts.train": [FILE, {}]}, r"prompts\.train\.1: name exactly one of file"),
    ({"prompts.train": [FILE, {**FILE, "colums": {}}]}, r"prompts\.train\.1\.colums: there is no such key"),
    ({"prompts.train": [{**FILE, "weight": 1}, FILE]}, r"train: give a weight to each of several datasets"),
    ({"prompts.train": {**FILE, "weight": 1}}, r"train: give a weight to each of several datasets"),
    ({"prompts.eval": [FILE, {**FILE, "weight": 1}]}, r"eval: weight is without effect"),
    ({"prompts.eval": [FILE, {"fraction": 0.5}]}, r"eval: a fraction of the train rows stands alone"),
    ({"prompts.eval": {"fraction": 0.5, "where": {"a": 1}}}, r"prompts\.eval: where: without effect on fraction"),
    ({"prompts.eval": {"fraction": 0.5, "task": "a"}}, r"prompts\.eval: task: without effect on fraction"),
    ({"prompts.train": {**FILE, "where": {"a": None}}}, r"prompts\.train\.where: a: write text, a number"),
    ({"prompts.eval": {"fraction": 1.0}}, r"prompts\.eval\.fraction: .*less than 1"),
    ({"sources.policy.used_by": "rollouts"}, r"sources\.policy\.used_by: .*'policy'"),
    # Rewards.
    ({"rewards": []}, r"rewards: .*at least 1"),
    ({"rewards": [{"name": "a"}]}, r"rewards\.0: name exactly one of function, model, judge and url"),
    ({"rewards": [{"name": "a", "function": "f:g", "model": "m"}]}, r"rewards\.0: name exactly one of function"),
    ({"rewards": [{"name": "a/b", "function": "f:g"}]}, r"rewards\.0\.name: .*pattern"),
    ({"rewards": [{"name": "a", "function": "f:g"}] * 2}, r"two components have the name a: give each its own"),
    ({"rewards": [{"name": "a", "function": "f:g", "weight": 0}]}, r"every weight is 0"),
    # The estimator.
    ({"advantages.truncated": "penalize"}, r"penalize needs missing_eos_penalty, overlong_ramp or both"),
    ({"advantages.missing_eos_penalty": 1.0}, r"have no effect with truncated: keep; set penalize"),
    ({"advantages.beta": 0.0, "advantages.target_kl": 1.0}, r"a beta of 0 stays 0; set beta above 0"),
    ({"advantages.baseline": "best_of_k", "advantages.normalize": True}, r"every advantage of best_of_k 0"),
    ({"advantages.groups_without_signal": "resample"}, r"set rollouts\.oversample above 1"),
    ({"advantages.truncated": "penalize", "advantages.overlong_ramp": [2, 7]}, r"ends at 7 tokens, .*is 6"),
    ({"advantages.truncated": "penalize", "advantages.overlong_ramp": [5, 5]}, r"overlong_ramp: it must begin at 0"),
    ({"update.loss_normalization": "constant"}, r"constant and constant_length need each other"),
    ({"update.epsilon": 1.0}, r"update\.epsilon: .*less than 1"),
    ({"update.sampler_correction_cap": 0.5}, r"update\.sampler_correction_cap: "),
    # Sections together.
    ({"logprobs.reference": False}, r"beta is above 0 but logprobs\.reference is false.*or advantages\.beta to 0"),
    ({"update.schedule": "linear"}, r"schedule linear needs schedule_steps"),
    ({"update.schedule": "cosine", "update.schedule_steps": 5, "update.warmup_steps": 5}, r"more than warmup_steps"),
    ({"evaluate.pass_k": [3]}, r"pass_k: 3 is not between 1 and samples_per_prompt \(2\)"),
    ({"evaluate.pass_k": [0]}, r"pass_k: 0 is not between 1"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_params(changed(changes))


@pytest.mark.parametrize(
    ("key", "value"), [("top_p", 0.9), ("top_k", 50), ("min_p", 0.05), ("repetition_penalty", 1.1)]
)
def test_top_p(key: str, value: float) -> None:
    with pytest.raises(
        UserError, match=rf"{key}={value} is refused: .*renormalized.*gradient would be wrong; leave {key}"
    ):
        parse_params(changed({f"rollouts.{key}": value}))


def test_group_size() -> None:
    with pytest.raises(
        UserError, match=r"completions_per_prompt is 1: .*siblings, and a single.*has none; use at least 2"
    ):
        parse_params(changed({"rollouts.completions_per_prompt": 1}))


def test_every_wrong_key_is_named() -> None:
    with pytest.raises(UserError) as refused:
        parse_params(changed({"rollouts.temprature": 1.0, "update.lr": 1.0}))
    assert "rollouts.temprature" in str(refused.value)
    assert "update.lr" in str(refused.value)


def test_a_wrong_item_of_a_list_is_told_once() -> None:
    with pytest.raises(UserError) as refused:
        parse_params(changed({"prompts.train": [{}]}))
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: [1", r"params\.yaml: not readable as YAML"),
        ("- 1", r"params\.yaml: expected sections such as policy and rollouts, found .*[Ll]ist"),
        ("", r"params\.yaml: expected sections"),
        ("seed: 1\nseed: 2", r"params\.yaml: not readable as YAML.*duplicate key"),
    ],
)
def test_broken_file(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "params.yaml").write_text(text)
    with pytest.raises(UserError, match=f"(?s){message}"):
        load_params(tmp_path / "params.yaml")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"params\.yaml: no such file; run this in a project's folder"):
        load_params(tmp_path / "params.yaml")
