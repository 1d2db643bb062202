"""`rloo estimators` from files, with settings that all matter: its JSON against values by hand."""

import copy

import numpy as np
import pytest

from rloo_pipeline.audit import estimators
from rloo_pipeline.config import parse_params
from rloo_pipeline.objective_config import AdvantagesConfig
from rloo_pipeline.stages.context import make_context
from tests.enumeration import one_thread
from tests.integration.test_estimators import gradients_by_hand
from tests.lab import SAMPLED, sampled_lab
from tests.project import PARAMS

TEMPERATURE, BETA = 0.7, 0.05
SETTINGS = {"beta": BETA, "truncated": "mask", "normalize": True}
KEY_ORDER = [("prompt_id", "ascending"), ("sample_index", "ascending")]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    lab = sampled_lab(tmp_path_factory.mktemp("estimators") / "project")
    lab.run("0001", "advantages", advantages=SETTINGS)
    lab.run("0002", *SAMPLED, rollouts={"temperature": TEMPERATURE})
    return lab


@pytest.fixture(scope="module")
def found(lab):
    """The JSON's figures at the whole K, by baseline."""
    context = make_context(parse_params(copy.deepcopy(PARAMS)), lab.layout, "0002")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimators, "SUBSETS", 2)
        estimators.run(context, AdvantagesConfig(**SETTINGS), ["0001"])
    rows = lab.json("reports/estimators/0002.json")["estimators"]
    return {row["baseline"]: row for row in rows if row["completions_per_prompt"] == 4}


def scored(lab, iteration):
    """Of each completion in key order: reward less beta times the KL, whether it ended, and its prompt."""
    sampled, rewards, logprobs = (
        lab.table(stage, iteration).sort_by(KEY_ORDER) for stage in ("rollouts", "rewards", "logprobs")
    )
    policy, reference = (logprobs[f"{name}_logprobs"].to_pylist() for name in ("policy", "reference"))
    kl_N = np.array([np.subtract(mine, theirs).sum() for mine, theirs in zip(policy, reference, strict=True)])
    ended_N = np.array(sampled["finish_reason"].to_pylist()) != "length"
    assert 0 < ended_N.sum() < len(ended_N)
    return rewards["reward"].to_numpy() - BETA * kl_N, ended_N, np.array(sampled["prompt_id"].to_pylist())


@pytest.fixture(scope="module")
def leave_one_out(lab):
    """Advantage of each completion that ended and has a sibling that did, else 0, and which those are."""
    values_N, ended_N, prompts_N = scored(lab, "0002")
    advantage_N, trained_N = np.zeros(len(values_N)), np.zeros(len(values_N), bool)
    for row in np.flatnonzero(ended_N):
        siblings_N = ended_N & (prompts_N == prompts_N[row])
        siblings_N[row] = False
        if siblings_N.any():
            trained_N[row], advantage_N[row] = True, values_N[row] - values_N[siblings_N].mean()
    return advantage_N, trained_N, prompts_N


def test_the_moving_average_is_of_the_earlier_iterations_completions_that_ended(lab, found):
    (values_N, ended_N, _), (past_N, past_ended_N, _) = scored(lab, "0002"), scored(lab, "0001")
    mean = values_N[ended_N].mean() - past_N[past_ended_N].mean()
    assert found["moving_average"]["advantage_mean"] == pytest.approx(mean, abs=1e-7)
    assert found["none"]["advantage_mean"] == pytest.approx(values_N[ended_N].mean(), abs=1e-7)
    assert abs(past_N[past_ended_N].mean() - past_N.mean()) > 1e-3


def test_advantages_have_the_kl_in_the_reward_and_are_not_normalized(leave_one_out, found):
    advantage_N, trained_N, _ = leave_one_out
    assert found["leave_one_out"]["advantage_variance"] == pytest.approx(advantage_N[trained_N].var(), rel=1e-5)
    assert not 0.9 < advantage_N[trained_N].var() < 1.1


def test_the_gradient_is_that_at_the_rollouts_temperature(lab, leave_one_out, found):
    advantage_N, trained_N, prompts_N = leave_one_out
    gradients_ND = gradients_by_hand(lab, lab.table("rollouts", "0002").sort_by(KEY_ORDER), TEMPERATURE)
    groups_GN = np.unique(prompts_N)[:, None] == prompts_N
    parts_GD = groups_GN @ (advantage_N[:, None] * gradients_ND) / trained_N.sum()
    residuals_GD = parts_GD - np.outer((groups_GN & trained_N).sum(1) / trained_N.sum(), parts_GD.sum(0))
    variance = 4 / 3 * (residuals_GD**2).sum()
    assert found["leave_one_out"]["gradient_variance"] == pytest.approx(variance, rel=0.05)
