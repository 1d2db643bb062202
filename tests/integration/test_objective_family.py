"""Other estimators through the stages of a tiny project: what the files say, against values by hand."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from rloo_pipeline.errors import UserError
from tests.enumeration import one_thread
from tests.lab import SAMPLED, STAGES, Lab, sampled_lab


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A project with iteration 0001 done and 0002 sampled, scored and rewarded. Not to be written to."""
    return sampled_lab(tmp_path_factory.mktemp("family") / "project")


@pytest.fixture
def lab(sampled: Lab, tmp_path: Path) -> Lab:
    shutil.copytree(sampled.root, tmp_path / "project")
    return Lab(tmp_path / "project")


KEY_ORDER = [("prompt_id", "ascending"), ("sample_index", "ascending")]


def apart(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def rows_by_group(table: pa.Table) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        groups.setdefault(row["prompt_id"], []).append(row)
    return groups


def expected(baseline: str, rewards_GK: np.ndarray, past: float) -> np.ndarray:
    """Advantages of K rewards a group, written down once more without any masking."""
    n = rewards_GK.size
    k = rewards_GK.shape[1]
    mean_G1 = rewards_GK.mean(1, keepdims=True)
    if baseline == "best_of_k":
        best_GK = np.zeros_like(rewards_GK)
        best_GK[np.arange(len(rewards_GK)), rewards_GK.argmax(1)] = 1
        return best_GK
    return {
        "leave_one_out": (rewards_GK - mean_G1) * k / (k - 1),
        "none": rewards_GK,
        "moving_average": rewards_GK - past,
        "batch_mean": (rewards_GK - rewards_GK.mean()) * n / (n - 1),
        "group_mean": rewards_GK - mean_G1,
        "group_standardized": (rewards_GK - mean_G1) / rewards_GK.std(1, keepdims=True),
        "global_standardized": (rewards_GK - rewards_GK.mean()) / rewards_GK.std(),
    }[baseline]


@pytest.mark.parametrize(
    "baseline",
    [
        "leave_one_out",
        "none",
        "moving_average",
        "batch_mean",
        "group_mean",
        "group_standardized",
        "global_standardized",
        "best_of_k",
    ],
)
def test_baseline_from_files(lab: Lab, baseline: str) -> None:
    lab.run("0002", "advantages", "update", advantages={"baseline": baseline, "beta": 0.05})
    groups = rows_by_group(lab.table("advantages", "0002"))
    penalized_GK = np.array([[row["penalized_reward"] for row in group] for group in groups.values()])
    assert (penalized_GK.std(1) > 0).all()
    got_GK = np.array([[row["advantage"] for row in group] for group in groups.values()])
    np.testing.assert_allclose(got_GK, expected(baseline, penalized_GK, 0.0), atol=1e-9)
    sums = {
        (row["prompt_id"], row["sample_index"]): sum(row["policy_logprobs"])
        for row in lab.table("logprobs", "0002").to_pylist()
    }
    trained = [row for group in groups.values() for row in group if row["trained"]]
    assert len(trained) == (4 if baseline == "best_of_k" else 16)
    loss = -sum(row["advantage"] * sums[row["prompt_id"], row["sample_index"]] for row in trained) / len(trained)
    assert lab.metrics("update", "0002")["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-5)


def test_another_estimator_repeats_no_model_pass_before_the_update(lab: Lab) -> None:
    before = {path: path.read_bytes() for stage in SAMPLED for path in (lab.root / "artifacts" / stage).rglob("*.*")}
    lab.run("0002", "advantages", advantages={"baseline": "none", "kl_estimator": "k3", "beta": 1.0})
    assert {path: path.read_bytes() for path in before} == before


def test_moving_average_travels_with_the_policy(lab: Lab) -> None:
    settings: dict[str, Any] = {"baseline": "moving_average", "beta": 0.05}
    lab.run("0001", "advantages", "update", advantages=settings)
    first = lab.table("advantages", "0001")
    assert first["baseline"].to_pylist() == [0.0] * 16
    mean = float(np.mean(first["penalized_reward"].to_numpy()))
    assert lab.state("0001")["past_rewards"] == {"mean": pytest.approx(mean, abs=1e-12), "rows": 16}
    lab.run("0002", *SAMPLED, "advantages", "update", advantages=settings)
    second = lab.table("advantages", "0002")
    assert second["baseline"].to_pylist() == pytest.approx([mean] * 16, abs=1e-12)
    both = np.concatenate([table["penalized_reward"].to_numpy() for table in (first, second)])
    assert lab.state("0002") == {"step": 2, "past_rewards": {"mean": pytest.approx(both.mean(), abs=1e-12), "rows": 32}}


def test_beta_adapts_from_policy_to_policy(lab: Lab) -> None:
    settings = {"beta": 0.5, "target_kl": 1e-4}
    lab.run("0001", "advantages", "update", advantages=settings, update={"learning_rate": 5e-3})
    # Policy and reference are one in the first iteration: KL 0, so beta falls by the most it can.
    assert lab.state("0001")["beta"] == pytest.approx(0.5 * 0.98)
    lab.run("0002", *SAMPLED, "advantages", "update", advantages=settings)
    table = lab.table("advantages", "0002")
    reward_N, kl_N, penalized_N = (table[name].to_numpy() for name in ("reward", "kl", "penalized_reward"))
    np.testing.assert_allclose(penalized_N, reward_N - 0.49 * kl_N, atol=1e-12)
    factor = 1 + 0.1 * np.clip(kl_N.mean() / 1e-4 - 1, -0.2, 0.2)
    assert lab.metrics("advantages", "0002")["beta"] == pytest.approx(0.49)
    assert lab.state("0002")["beta"] == pytest.approx(0.49 * factor)


def test_state_is_not_carried_by_default(lab: Lab) -> None:
    lab.run("0002", "advantages", "update")
    assert lab.state("0002") == {"step": 2}


def test_kl_in_the_loss(lab: Lab) -> None:
    """k1 in the loss is the same step as k1 in the reward where nothing is subtracted."""
    lab.run("0002", "advantages", "update", advantages={"baseline": "none", "beta": 0.2})
    in_reward = lab.weights("0002")
    lab.run("0002", "advantages", "update", advantages={"baseline": "none", "beta": 0.2, "kl_in": "loss"})
    assert apart(lab.weights("0002"), in_reward) < 1e-5
    table = lab.table("advantages", "0002")
    assert table["penalized_reward"].to_pylist() == table["reward"].to_pylist()
    metrics = lab.metrics("update", "0002")
    assert metrics["kl_loss"] == pytest.approx(table["kl"].to_numpy().mean(), abs=1e-4)
    assert metrics["beta"] == 0.2
    lab.run("0002", "advantages", "update", advantages={"baseline": "none", "beta": 0.0})
    assert apart(lab.weights("0002"), in_reward) > 1e-5


def test_kl_in_the_loss_refuses_other_log_probs(lab: Lab) -> None:
    lab.run("0002", "advantages", advantages={"beta": 0.2, "kl_in": "loss"})
    shutil.rmtree(lab.root / "artifacts" / "logprobs" / "0002")
    shutil.copytree(lab.root / "artifacts" / "logprobs" / "0001", lab.root / "artifacts" / "logprobs" / "0002")
    with pytest.raises(UserError, match="logprobs 0002 were made from other rollouts"):
        lab.run("0002", "update")


def test_truncated_completions(lab: Lab) -> None:
    reasons = lab.table("rollouts", "0002").sort_by(KEY_ORDER)
    cut_N = np.array(reasons["finish_reason"].to_pylist()) == "length"
    assert 0 < cut_N.sum() < 16
    lab.run("0002", "advantages")
    kept_N = lab.table("advantages", "0002")["reward"].to_numpy()
    lab.run("0002", "advantages", advantages={"truncated": "penalize", "missing_eos_penalty": 0.75})
    penalized = lab.table("advantages", "0002")
    np.testing.assert_array_equal(penalized["reward"].to_numpy(), kept_N)
    before_kl_N = penalized["penalized_reward"].to_numpy() + 0.05 * penalized["kl"].to_numpy()
    np.testing.assert_allclose(before_kl_N, kept_N - 0.75 * cut_N, atol=1e-12)
    metrics = lab.metrics("advantages", "0002")
    assert metrics["truncation_penalty"] == pytest.approx(0.75 * cut_N.mean())
    assert metrics["reward"] == lab.metrics("rewards", "0002")["reward"]
    lab.run("0002", "advantages", "update", advantages={"truncated": "mask"})
    table = lab.table("advantages", "0002")
    assert not table["in_baseline"].to_numpy()[cut_N].any()
    assert set(np.array(table["exclusion_reason"].to_pylist())[cut_N]) == {"truncated at max_tokens"}
    assert lab.metrics("update", "0002")["completions"] == table["trained"].to_numpy().sum() <= 16 - cut_N.sum()
    # The mean reward is that of all completions all the same.
    assert lab.metrics("advantages", "0002")["reward"] == pytest.approx(kept_N.mean())


CONSTANT = "def score(completions, **kwargs):\n    return [1.0] * len(completions)\n"


def test_an_iteration_without_signal_does_not_stop_the_chain(lab: Lab) -> None:
    reward = (lab.root / "reward.py").read_text()
    before = lab.weights("0001"), lab.json("artifacts/policy/0001/trainer_state/manifest.json")
    (lab.root / "reward.py").write_text(CONSTANT)
    lab.run("0002", "rewards", "advantages", "update", advantages={"groups_without_signal": "drop"})
    assert apart(lab.weights("0002"), before[0]) == 0
    assert lab.json("artifacts/policy/0002/trainer_state/manifest.json") == before[1]
    counted = lab.metrics("advantages", "0002")
    assert (counted["rows_without_signal"], counted["rows_trained"], counted["groups_trained"]) == (16, 0, 0)
    assert lab.metrics("update", "0002")["skipped"] == 1
    # Sampling goes on from the policy that was kept, and so does the count of steps.
    (lab.root / "reward.py").write_text(reward)
    third = {"0003": {"previous": "0002", "reference": "0000"}}
    lab.run("0003", *STAGES, iterations=third)
    assert lab.state("0003")["step"] == 2
    assert apart(lab.weights("0003"), before[0]) > 1e-5


def test_truncated_denominator_lengths_are_reported_unmasked(lab: Lab) -> None:
    lab.run("0002", "rollouts", "logprobs", "rewards", "advantages", "update", advantages={"truncated": "mask"})
    table = lab.table("rollouts", "0002")
    lengths_N = np.array([len(ids) for ids in table["completion_token_ids"].to_pylist()])
    cut_N = np.array(table["finish_reason"].to_pylist()) == "length"
    metrics = lab.metrics("rollouts", "0002")
    assert 0 < cut_N.sum() < 16
    assert metrics["completions/mean_length"] == pytest.approx(lengths_N.mean())
    assert metrics["completions/max_length"] == lengths_N[cut_N].max()
    assert metrics["completions/clipped_ratio"] == cut_N.mean()
    # The loss has the tokens that are left.
    trained_N = lab.table("advantages", "0002").sort_by(KEY_ORDER)["trained"].to_numpy()
    lengths_N = np.array([len(ids) for ids in table.sort_by(KEY_ORDER)["completion_token_ids"].to_pylist()])
    assert lab.metrics("update", "0002")["completion_tokens"] == lengths_N[trained_N].sum() < lengths_N.sum()


@pytest.mark.parametrize(("estimator", "normalization"), [("k2", "none"), ("k3", "length"), ("abs", "length")])
def test_kl_in_the_loss_by_other_estimators(lab: Lab, estimator: str, normalization: str) -> None:
    settings = {"beta": 0.2, "kl_in": "loss", "kl_estimator": estimator, "kl_normalization": normalization}
    lab.run("0002", "advantages", "update", advantages=settings)
    function = {
        "k2": lambda d: d**2 / 2,
        "k3": lambda d: np.exp(-d) - 1 + d,
        "abs": np.abs,
    }[estimator]
    each = [
        function(np.subtract(row["policy_logprobs"], row["reference_logprobs"], dtype=np.float64))
        for row in lab.table("logprobs", "0002").to_pylist()
    ]
    kl_N = np.array([row.mean() if normalization == "length" else row.sum() for row in each])
    assert lab.metrics("update", "0002")["kl_loss"] == pytest.approx(kl_N.mean(), rel=1e-4)
    metrics = lab.metrics("advantages", "0002")
    assert metrics["kl"] == pytest.approx(kl_N.mean())
    assert metrics["kl_per_token"] == pytest.approx(np.concatenate(each).mean())


def test_several_steps(lab: Lab) -> None:
    lab.run("0002", "advantages", "update", update={"minibatches": 2, "epochs": 2, "warmup_steps": 10})
    metrics = lab.metrics("update", "0002")
    assert metrics["step"] == lab.state("0002")["step"] == 5
    assert metrics["learning_rate"] == pytest.approx(1e-3 * 5 / 10)
    assert 0 <= metrics["clip_ratio/region_mean"] <= 1
    assert metrics["completions"] == 16


@pytest.mark.parametrize("epsilon", [1e-3, 0.9])
def test_epsilon_is_nothing_to_one_step(lab: Lab, sampled: Lab, epsilon: float) -> None:
    settings = {"learning_rate": 5e-3, "epsilon": epsilon, "ratio_level": "token"}
    lab.run("0001", "update", update=settings)
    fingerprint = "artifacts/policy/0001/model/manifest.json"
    assert lab.json(fingerprint) == sampled.json(fingerprint)


FLAT = '''
def score(completions, prompts, **kwargs):
    """The same for every completion of half of the prompts."""
    return [len(text) % 5 if ord(prompt[4]) % 2 else 1.0 for text, prompt in zip(completions, prompts)]
'''
RESAMPLE: dict[str, Any] = {
    "rollouts": {"prompts_per_iteration": 2, "oversample": 4.0},
    "advantages": {"groups_without_signal": "resample"},
}


def test_resample(lab: Lab) -> None:
    (lab.root / "reward.py").write_text(FLAT)
    lab.run("0001", *STAGES, **RESAMPLE)
    drawn = list(dict.fromkeys(lab.table("rollouts", "0001")["prompt_id"].to_pylist()))
    assert len(drawn) == 8
    groups = rows_by_group(lab.table("advantages", "0001"))
    with_signal = [name for name in drawn if len({row["reward"] for row in groups[name]}) > 1]
    assert 2 < len(with_signal) <= 4
    assert with_signal[:2] != sorted(with_signal)[:2]
    for name, group in groups.items():
        wanted = name in with_signal[:2]
        reason = None if wanted else "group not needed" if name in with_signal else "group without signal"
        assert {row["trained"] for row in group} == {wanted}
        assert all((row["exclusion_reason"] or "None").startswith(str(reason)) for row in group)
    counted = lab.metrics("advantages", "0001")
    assert counted["groups"] == 8
    assert (counted["groups_trained"], counted["groups_short"]) == (2, 0)
    assert counted["groups_surplus"] == len(with_signal) - 2
    assert counted["rows_surplus"] == 4 * (len(with_signal) - 2)
    assert counted["rows_without_signal"] == 4 * (8 - len(with_signal))
    assert counted["frac_reward_zero_std"] == 1 - len(with_signal) / 8
    # The denominator is that of the groups trained on.
    assert lab.metrics("update", "0001")["completions"] == 8


def test_resample_reports_a_shortfall(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    (lab.root / "reward.py").write_text(FLAT)
    settings = {**RESAMPLE, "rollouts": {"prompts_per_iteration": 6, "oversample": 1.3}}
    lab.run("0001", *STAGES, **settings)
    counted = lab.metrics("advantages", "0001")
    assert counted["groups_trained"] + counted["groups_short"] == 6
    assert counted["groups_short"] >= 2
    assert "groups with signal are missing of those wanted" in capsys.readouterr().err
    assert lab.metrics("update", "0001")["completions"] == 4 * counted["groups_trained"]


def test_more_prompts_drawn_than_there_are(lab: Lab) -> None:
    with pytest.raises(UserError, match=r"prompts_per_iteration is 6 x oversample 2 = 12, but there are 8 prompts"):
        lab.run("0001", "rollouts", rollouts={"prompts_per_iteration": 6, "oversample": 2.0})
