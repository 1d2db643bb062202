"""The settings of the estimator: what is refused, and why."""

import copy
from typing import Any, get_args

import pytest

from rloo_pipeline.config import Params, parse_params
from rloo_pipeline.errors import UserError
from rloo_pipeline.objective.baselines import BASELINES
from rloo_pipeline.objective_config import BaselineName
from tests.project import PARAMS


def parsed(**sections: dict[str, Any]) -> Params:
    """The tiny project's params with keys of sections changed."""
    values = copy.deepcopy(PARAMS)
    for name, changes in sections.items():
        values[name] |= changes
    return parse_params(values)


def test_every_baseline_can_be_chosen() -> None:
    assert set(get_args(BaselineName)) == set(BASELINES)
    assert len(BASELINES) == 8


@pytest.mark.parametrize(
    ("baseline", "reason"),
    [
        ("leave_one_out", "a single completion has none; use at least 2"),
        ("group_mean", "own reward, so every advantage would be 0; use at least 2"),
        ("group_standardized", "own reward, so every advantage would be 0; use at least 2"),
        ("best_of_k", "nothing is selected; use at least 2"),
    ],
)
def test_a_group_of_one_is_refused_where_siblings_are_needed(baseline: str, reason: str) -> None:
    with pytest.raises(UserError, match=rf"rollouts\.completions_per_prompt is 1: .*{reason}"):
        parsed(rollouts={"completions_per_prompt": 1}, advantages={"baseline": baseline})


@pytest.mark.parametrize("baseline", ["none", "moving_average", "batch_mean", "global_standardized"])
def test_a_group_of_one_is_taken_where_no_sibling_is_needed(baseline: str) -> None:
    assert parsed(rollouts={"completions_per_prompt": 1}, advantages={"baseline": baseline})


REFUSED = [
    (
        {
            "advantages": {"baseline": "none", "groups_without_signal": "drop"},
            "rollouts": {"completions_per_prompt": 1},
        },
        "a group of one completion never has signal",
    ),
    (
        {
            "advantages": {"baseline": "batch_mean"},
            "rollouts": {"completions_per_prompt": 1, "prompts_per_iteration": 1},
        },
        "batch_mean compares a completion with the others of the iteration",
    ),
    (
        {
            "advantages": {"baseline": "global_standardized"},
            "rollouts": {"completions_per_prompt": 1, "prompts_per_iteration": 1},
        },
        "global_standardized compares a completion with the others of the iteration",
    ),
    ({"advantages": {"baseline": "best_of_k"}, "update": {"epochs": 2}}, "best_of_k trains on the plain likelihood"),
    (
        {"advantages": {"baseline": "best_of_k"}, "update": {"sampler_correction": "truncate"}},
        "best_of_k trains on the plain likelihood",
    ),
    ({"advantages": {"baseline": "mean"}}, r"advantages\.baseline: .*leave_one_out"),
    ({"advantages": {"truncated": "penalize"}}, "penalize needs missing_eos_penalty, overlong_ramp or both"),
    ({"advantages": {"missing_eos_penalty": 1.0}}, "no effect with truncated: keep; set penalize"),
    ({"advantages": {"overlong_ramp": [3, 5], "truncated": "mask"}}, "no effect with truncated: mask"),
    ({"advantages": {"overlong_ramp": [5, 5], "truncated": "penalize"}}, "end after its beginning"),
    (
        {"advantages": {"overlong_ramp": [4, 7], "truncated": "penalize"}},
        r"overlong_ramp ends at 7 tokens, but rollouts\.max_tokens is 6",
    ),
    ({"advantages": {"beta": 0.0, "target_kl": 1.0}}, "a beta of 0 stays 0; set beta above 0"),
    ({"advantages": {"baseline": "best_of_k", "normalize": True}}, "makes every advantage of best_of_k 0"),
    ({"advantages": {"groups_without_signal": "resample"}}, r"needs prompts in surplus; set rollouts\.oversample"),
    ({"rollouts": {"oversample": 0.5}}, r"rollouts\.oversample: .*greater than or equal to 1"),
    ({"update": {"loss_normalization": "constant"}}, "constant and constant_length need each other"),
    ({"update": {"constant_length": 8}}, "constant and constant_length need each other"),
    ({"update": {"epsilon": 1.0}}, r"update\.epsilon: "),
    (
        {"update": {"minibatches": 2, "sampler_correction": "truncate", "sampler_correction_level": "token"}},
        "sampler_correction_level: token needs ratio_level: token",
    ),
]


@pytest.mark.parametrize(("sections", "message"), REFUSED)
def test_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parsed(**sections)


@pytest.mark.parametrize(
    ("baseline", "sizes"),
    [
        ("batch_mean", {"completions_per_prompt": 1, "prompts_per_iteration": 2}),
        ("batch_mean", {"completions_per_prompt": 2, "prompts_per_iteration": 1}),
        ("global_standardized", {"completions_per_prompt": 1, "prompts_per_iteration": 1, "oversample": 2.0}),
        ("none", {"completions_per_prompt": 1, "prompts_per_iteration": 1}),
    ],
)
def test_two_completions_in_all_are_enough(baseline: str, sizes: dict[str, Any]) -> None:
    assert parsed(rollouts=sizes, advantages={"baseline": baseline})


def test_prompts_asked_tell_how_many_are_drawn() -> None:
    asked = parsed(rollouts={"prompts_per_iteration": 16, "oversample": 4.0}).rollouts.prompts_asked
    assert asked == "16 x oversample 4 = 64"
    assert parsed(rollouts={"prompts_per_iteration": 16}).rollouts.prompts_asked == "16"


@pytest.mark.parametrize(
    ("prompts", "oversample", "drawn"), [(16, 1.0, 16), (4, 1.5, 6), (10, 1.1, 11), (3, 1.1, 4), (7, 3, 21)]
)
def test_prompts_drawn_are_rounded_up(prompts: int, oversample: float, drawn: int) -> None:
    params = parsed(rollouts={"prompts_per_iteration": prompts, "oversample": oversample})
    assert params.rollouts.prompts_drawn == drawn
