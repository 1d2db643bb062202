"""`rloo estimators`: all baselines on the stored completions, against exact gradients of the tiny model."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from rloo_pipeline.audit import estimators
from rloo_pipeline.config import parse_params
from rloo_pipeline.errors import UserError
from rloo_pipeline.objective.baselines import BASELINES, RunningMean
from rloo_pipeline.objective_config import AdvantagesConfig
from rloo_pipeline.policy.handle import open_policy
from rloo_pipeline.stages.advantages import scored
from rloo_pipeline.stages.context import make_context
from rloo_pipeline.stages.estimator_state import State
from tests.enumeration import one_thread
from tests.lab import sampled_lab
from tests.project import PARAMS

CONFIG = AdvantagesConfig(beta=0.05)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    lab = sampled_lab(tmp_path_factory.mktemp("estimators") / "project")
    lab.run("0002", "advantages")
    return lab


@pytest.fixture(scope="module")
def completions(lab):
    """The rollouts in key order."""
    return lab.table("rollouts", "0002").sort_by([("prompt_id", "ascending"), ("sample_index", "ascending")])


@pytest.fixture(scope="module")
def exact_ND(lab, completions):
    """Gradient of each completion's log-prob in float64, by transformers' own logits."""
    model = LlamaForCausalLM.from_pretrained(lab.layout.model("0001"), dtype=torch.float64).eval()
    rows = []
    for row in completions.to_pylist():
        prompt, completion = row["prompt_token_ids"], row["completion_token_ids"]
        logits_TV = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        logprob = torch.distributions.Categorical(logits=logits_TV).log_prob(torch.tensor(completion)).sum()
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(logprob, list(model.parameters()))]))
    return torch.stack(rows).numpy()


def stored(lab, **facts):
    table, names_G = scored(lab.layout, "0002")
    return estimators.Scored(table, names_G, {"completions_per_prompt": 4, **facts}, State(RunningMean(), CONFIG.beta))


def test_gram_matrix_within_five_percent(lab, completions, exact_ND):
    gram_NN = estimators.gram_matrix(open_policy(lab.layout.model("0001")), completions, 1.0, 3, estimators.BUCKETS)
    exact_NN = exact_ND @ exact_ND.T
    assert np.linalg.norm(gram_NN - exact_NN) < 0.05 * np.linalg.norm(exact_NN)
    scale_N = np.sqrt(np.diag(exact_NN))
    assert (np.abs(gram_NN - exact_NN) / np.outer(scale_N, scale_N)).max() < 0.05


def test_figures_of_leave_one_out_by_hand(lab, exact_ND):
    rows = estimators.compare(stored(lab), exact_ND @ exact_ND.T, CONFIG, 0)
    found = next(row for row in rows if (row["baseline"], row["completions_per_prompt"]) == ("leave_one_out", 4))
    table = lab.table("advantages", "0002")
    advantage_N, ids_N = table["advantage"].to_numpy(), np.array(table["prompt_id"].to_pylist())
    assert found["advantage_variance"] == pytest.approx(advantage_N.var())
    assert found["advantage_mean"] == pytest.approx(0, abs=1e-12)
    shares_GD = np.array([advantage_N[ids_N == name] @ exact_ND[ids_N == name] / 16 for name in np.unique(ids_N)])
    assert found["gradient_variance"] == pytest.approx(4 * shares_GD.var(0, ddof=1).sum())
    assert found["gradient_squared_norm"] == pytest.approx((shares_GD.sum(0) ** 2).sum())
    assert found["subsets"] == 1


def test_every_baseline_for_every_k(lab, exact_ND):
    rows = estimators.compare(stored(lab), exact_ND @ exact_ND.T, CONFIG, 0)
    assert [(row["completions_per_prompt"], row["baseline"]) for row in rows] == [
        (k, name) for k in (2, 3, 4) for name in BASELINES
    ]
    for k in (2, 3, 4):
        loo, mean = (
            next(row for row in rows if (row["completions_per_prompt"], row["baseline"]) == (k, name))
            for name in ("leave_one_out", "group_mean")
        )
        # Leave-one-out is K / (K - 1) times the group mean's on every group.
        assert mean["gradient_variance"] == pytest.approx(loo["gradient_variance"] * ((k - 1) / k) ** 2)
        assert mean["relative_variance"] == pytest.approx(loo["relative_variance"], rel=1e-9)
        assert mean["sign_agreement"] == loo["sign_agreement"] == 1
    best = [row for row in rows if row["baseline"] == "best_of_k"]
    # One of K is trained on, and its leave-one-out advantage is positive.
    assert [row["sign_agreement"] for row in best] == pytest.approx([1 / 2, 1 / 3, 1 / 4], abs=0.05)


def test_zero_groups(lab):
    flat = stored(lab)
    first = flat.names_G[0]
    rewards = [0.5 if row["prompt_id"] == first else row["reward"] for row in flat.table.to_pylist()]
    at = flat.table.column_names.index("reward")
    table = flat.table.set_column(at, "reward", [np.array(rewards, np.float32)])
    rows = estimators.compare(
        estimators.Scored(table, flat.names_G, flat.facts, State(RunningMean(), 0.0)), np.eye(16), AdvantagesConfig(), 0
    )
    whole = {row["baseline"]: row for row in rows if row["completions_per_prompt"] == 4}
    assert whole["leave_one_out"]["zero_groups"] == whole["group_standardized"]["zero_groups"] == 0.25
    assert whole["none"]["zero_groups"] == whole["best_of_k"]["zero_groups"] == 0


def test_the_command_writes_table_json_and_plot(lab, rloo):
    done = rloo(lab, "estimators", "0002")
    assert (done.code, "16 backward passes, one a completion" in done.stderr) == (0, True)
    report = json.loads((lab.root / "reports" / "estimators" / "0002.json").read_text())
    assert len(report["estimators"]) == 3 * 8
    assert report["backward_passes"] == 16
    assert report["buckets"] >= 8192
    assert (lab.root / "reports" / "estimators" / "0002.png").read_bytes()[:4] == b"\x89PNG"


def test_rollouts_of_another_policy_are_refused(lab):
    context = make_context(parse_params(PARAMS), lab.layout, "0002")
    link = context.link.model_copy(update={"previous": "0000"})
    with pytest.raises(UserError, match="sampled from other weights"):
        estimators.run(replace(context, link=link), CONFIG, [])


def test_one_prompt_or_one_completion_is_refused(lab):
    with pytest.raises(UserError, match="4 prompts with 1 completions each"):
        estimators.check_groups(stored(lab, completions_per_prompt=1), "0002")


def test_the_moving_average_is_over_earlier_iterations_whatever_their_baseline(lab):
    """By hand: the mean of iteration 0001's penalized rewards, which leave_one_out was trained with."""
    past = estimators.past_rewards(lab.layout, ["0001"])
    rewards = [value for value in lab.table("advantages", "0001")["penalized_reward"].to_pylist() if value is not None]
    assert past.rows == len(rewards) > 0
    assert past.mean == pytest.approx(sum(rewards) / len(rewards), abs=1e-12)
    assert estimators.past_rewards(lab.layout, []) == RunningMean()
