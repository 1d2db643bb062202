"""`rloo estimators`: all baselines on the stored completions, against exact gradients of the tiny model."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from rloo_pipeline.audit import estimators
from rloo_pipeline.commands.audit import app
from rloo_pipeline.config import parse_params
from rloo_pipeline.errors import UserError
from rloo_pipeline.objective.baselines import BASELINES, RunningMean
from rloo_pipeline.objective.gradient_variance import GradientMoments, subsample
from rloo_pipeline.objective_config import AdvantagesConfig
from rloo_pipeline.policy.handle import open_policy
from rloo_pipeline.stages.advantages import scored
from rloo_pipeline.stages.context import make_context
from rloo_pipeline.stages.estimator_state import State
from tests.enumeration import one_thread
from tests.lab import sampled_lab
from tests.project import PARAMS

CONFIG = AdvantagesConfig(beta=0.05)
FIGURES = {
    "advantage_mean",
    "advantage_variance",
    "zero_groups",
    "sign_agreement",
    "gradient_squared_norm",
    "gradient_variance",
    "relative_variance",
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(autouse=True)
def _few_subsets(monkeypatch):
    monkeypatch.setattr(estimators, "SUBSETS", 32)


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
    """Gradient of each completion's log-prob at temperature 1."""
    return gradients_by_hand(lab, completions, 1.0)


def gradients_by_hand(lab, completions, temperature):
    """Gradient of each completion's log-prob in float64, by transformers' own logits, [N, D]."""
    model = LlamaForCausalLM.from_pretrained(lab.layout.model("0001"), dtype=torch.float64).eval()
    rows = []
    for row in completions.to_pylist():
        prompt, completion = row["prompt_token_ids"], row["completion_token_ids"]
        logits_TV = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        logprob = (
            torch.distributions.Categorical(logits=logits_TV / temperature).log_prob(torch.tensor(completion)).sum()
        )
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


def rewarded(lab, rewards):
    """The stored completions with other rewards, in key order, and without KL."""
    given = stored(lab)
    at = given.table.column_names.index("reward")
    table = given.table.set_column(at, "reward", [np.array(rewards, np.float32)])
    return replace(given, table=table, state=State(RunningMean(), 0.0))


def of(rows, completions, baseline):
    return next(r for r in rows if (r["completions_per_prompt"], r["baseline"]) == (completions, baseline))


def test_zero_groups(lab):
    rewards = [0.5] * 4 + [*stored(lab).table["reward"].to_pylist()][4:]
    rows = estimators.compare(rewarded(lab, rewards), np.eye(16), AdvantagesConfig(), 0)
    whole = {row["baseline"]: row for row in rows if row["completions_per_prompt"] == 4}
    assert whole["leave_one_out"]["zero_groups"] == whole["group_standardized"]["zero_groups"] == 0.25
    assert whole["none"]["zero_groups"] == whole["best_of_k"]["zero_groups"] == 0


def test_relative_variance_is_a_ratio_of_means_over_the_subsets(lab, exact_ND):
    """One success in each of four groups of 4: half of the pairs are flat, and some subsets have no gradient at all."""
    rewards_N, groups_N = np.tile([0.0, 0, 0, 1], 4), np.repeat(np.arange(4), 4)
    drifting_ND = exact_ND / np.linalg.norm(exact_ND, axis=1, keepdims=True)
    drifting_ND[:, 0] += rewards_N  # so that all groups pull one way
    found = of(
        estimators.compare(rewarded(lab, rewards_N), drifting_ND @ drifting_ND.T, AdvantagesConfig(), 5),
        2,
        "leave_one_out",
    )
    squared, variances = [], []
    for seed in range(5, 5 + estimators.SUBSETS):
        parts_GD = []
        for first, second in subsample(groups_N, 2, seed).reshape(4, 2):
            difference = rewards_N[first] - rewards_N[second]
            parts_GD.append(difference * (drifting_ND[first] - drifting_ND[second]) / 8)
        squared.append((np.sum(parts_GD, 0) ** 2).sum())
        variances.append(4 * np.var(parts_GD, 0, ddof=1).sum())
    assert min(squared) == 0
    assert found["gradient_variance"] == pytest.approx(np.mean(variances))
    assert found["gradient_squared_norm"] == pytest.approx(np.mean(squared))
    assert found["relative_variance"] == pytest.approx(np.mean(variances) / (np.mean(squared) - np.mean(variances)))
    assert found["sign_agreement"] == 1


def sums(**changes):
    alike = {"trained": 2, "advantage": 0.0, "squares": 0.0, "groups": 4, "zero_groups": 4, "compared": 0}
    return estimators.Sums(**{**alike, "agreeing": 0, "moments": GradientMoments(0, 0), **changes})


def test_choices_without_signal_have_no_sign_and_dilute_no_ratio():
    """A flat choice beside one with 3 of 4 signs alike and variance 2 of |G|^2 8: 3/4, not 7/8; 1 / (4 - 1)."""
    other = sums(trained=6, advantage=2.0, squares=12.0, zero_groups=1, compared=4, agreeing=3)
    found = estimators.figures_of([sums(), replace(other, moments=GradientMoments(8, 2))])
    assert found == pytest.approx(
        {
            "advantage_mean": 2 / 8,
            "advantage_variance": 12 / 8,
            "zero_groups": 5 / 8,
            "sign_agreement": 3 / 4,
            "gradient_squared_norm": 4,
            "gradient_variance": 1,
            "relative_variance": 1 / 3,
        }
    )


def test_choices_that_train_on_nothing_have_no_gradient():
    """Of two choices of which one keeps no group, the other alone gives the gradient's figures."""
    nothing = sums(trained=0)
    found = estimators.figures_of([nothing, sums(moments=GradientMoments(8, 2))])
    assert (found["gradient_squared_norm"], found["gradient_variance"]) == (8, 2)
    assert estimators.figures_of([nothing]) == dict.fromkeys(FIGURES) | {"zero_groups": 1}


def test_flat_rewards_compare_nothing(lab):
    rows = estimators.compare(rewarded(lab, np.ones(16)), np.eye(16), AdvantagesConfig(), 0)
    for row in (of(rows, k, name) for k in (2, 4) for name in ("leave_one_out", "group_standardized")):
        assert (row["sign_agreement"], row["relative_variance"]) == (None, None)
        assert (row["gradient_variance"], row["zero_groups"], row["advantage_variance"]) == (0, 1, 0)
    assert of(rows, 4, "none")["advantage_mean"] == 1


def test_signs_of_rounding_are_not_compared(lab):
    """The middle of 0.1, 0.2, 0.3 is the mean of the others but for its rounding to 32 bits."""
    rows = estimators.compare(rewarded(lab, [0.1, 0.2, 0.3, 0.2] * 4), np.eye(16), AdvantagesConfig(), 0)
    # All rewards are positive; of the signs of leave-one-out, -, 0, + and 0, only one of two compared is.
    assert of(rows, 4, "none")["sign_agreement"] == 0.5


def test_the_command_writes_table_json_and_plot(lab, rloo):
    done = rloo(lab, "estimators", "0002")
    assert (done.code, "16 backward passes, one a completion, in " in done.stderr) == (0, True)
    report = lab.json("reports/estimators/0002.json")
    assert report.keys() == {"iteration", "backward_passes", "buckets", "estimators"}
    assert len(report["estimators"]) == 3 * 8
    for row in report["estimators"]:
        assert row.keys() == FIGURES | {"completions_per_prompt", "baseline", "subsets"}
    assert report["backward_passes"] == 16
    assert report["buckets"] >= 8192
    assert (lab.root / "reports" / "estimators" / "0002.png").read_bytes()[:4] == b"\x89PNG"


IGNORED = ("loss_normalization", "sampler", "KL in the loss", "clipping over several steps", "max_grad_norm")


def test_help_and_note_say_what_the_comparison_ignores(lab, rloo):
    flat = " ".join(CliRunner().invoke(app, ["estimators", "--help"]).stdout.replace("│", " ").split())
    note = " ".join(rloo(lab, "estimators", "0002").stderr.split())
    for text in (flat, note):
        for name in (*IGNORED, "batch_mean", "global_standardized"):
            assert name in text


def test_the_printed_table(capsys, monkeypatch):
    """Every column is there at 80 characters a line, with a dash for what does not exist."""
    monkeypatch.setenv("COLUMNS", "80")
    row = {"completions_per_prompt": 12, "baseline": "global_standardized", "subsets": 32} | dict.fromkeys(FIGURES)
    known = {"zero_groups": 0.25, "sign_agreement": 0.5, "advantage_mean": -1e-17, "advantage_variance": 0.0625}
    known |= {"gradient_variance": 1234567.0, "relative_variance": 2345678.0}
    estimators.show([row, row | known], "Title")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["K", "baseline", "A", "mean", "A", "var", "zero", "sign", "grad", "var", "/", "|E", "G|²"] in lines
    assert ["12", "global_standardized", *["-"] * 6] in lines
    assert ["12", "global_standardized", "0.000", "0.0625", "25%", "50%", "1.23e+06", "2.35e+06"] in lines


def test_the_plot_leaves_gaps(tmp_path):
    rows = [
        {"completions_per_prompt": k, "baseline": name, "gradient_variance": 1.0, "relative_variance": None}
        for k in (2, 3)
        for name in BASELINES
    ]
    estimators.plot(rows, tmp_path / "new" / "plot.png")
    assert (tmp_path / "new" / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_rollouts_of_another_policy_are_refused(lab):
    context = make_context(parse_params(PARAMS), lab.layout, "0002")
    link = context.link.model_copy(update={"previous": "0000"})
    with pytest.raises(UserError, match="sampled from other weights"):
        estimators.run(replace(context, link=link), CONFIG, [])


def test_an_edited_trainer_state_is_refused(lab):
    path = lab.layout.trainer_state("0001") / "state.json"
    written = path.read_text()
    path.write_text(written.replace("{", '{"added": 1,', 1))
    try:
        with pytest.raises(UserError, match=r"state\.json changed after the manifest was written"):
            estimators.run(make_context(parse_params(PARAMS), lab.layout, "0002"), CONFIG, [])
    finally:
        path.write_text(written)


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
