"""The whole pipeline around the tiny model: what runs again, what must not, and what the artifacts hold."""

import fcntl
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rloo_pipeline import process
from rloo_pipeline.shards import read_shards, read_table
from tests.conftest import EOS_IDS, REWARD, CommandLine
from tests.project import Project

ITERATIONS = ("0001", "0002")
STEPS = ("rollouts", "logprobs", "rewards", "advantages", "update")
KEYS = {"iteration": pa.int32(), "prompt_id": pa.string(), "sample_index": pa.int32()}
INTS, FLOATS = pa.list_(pa.int32()), pa.list_(pa.float32())
ROLLOUTS = KEYS | {
    "prompt_text": pa.string(),
    "prompt_token_ids": INTS,
    "completion_text": pa.string(),
    "completion_token_ids": INTS,
    "sampler_logprobs": FLOATS,
    "finish_reason": pa.string(),
    "seed": pa.int64(),
    "policy_fingerprint": pa.string(),
}
REWARDS = {"reward/letters": pa.float32(), "reward": pa.float32()}
REWARDS |= {"reward_error": pa.string(), "reward_extra": pa.string()}
COLUMNS = {
    "rollouts": ROLLOUTS,
    "logprobs": KEYS | {"policy_logprobs": FLOATS, "reference_logprobs": FLOATS},
    "rewards": KEYS | REWARDS,
    "advantages": KEYS
    | dict.fromkeys(("reward", "kl", "penalized_reward", "baseline", "advantage"), pa.float64())
    | {"in_baseline": pa.bool_(), "trained": pa.bool_(), "exclusion_reason": pa.string()},
    "evaluation": ROLLOUTS | REWARDS | {"kl": pa.float64(), "dataset_reward": pa.float32()},
}


@pytest.fixture
def project(finished_project: Project, tmp_path: Path) -> Project:
    """A copy of the finished project."""
    return finished_project.copy(tmp_path / "project")


def table(project: Project, artifact: str, iteration: str) -> pa.Table:
    """The rows of an artifact in the order of their keys."""
    rows = read_shards(project.root / "artifacts" / artifact / iteration)
    return rows.sort_by([(name, "ascending") for name in KEYS])


def changed(project: Project) -> list[str]:
    """The commands that a repro would start with, as DVC sees the project now."""
    return project.repro("--dry")


def files(project: Project, *folders: str) -> dict[str, bytes]:
    paths = [path for folder in folders for path in (project.root / folder).rglob("*") if path.is_file()]
    return {path.relative_to(project.root).as_posix(): path.read_bytes() for path in paths}


def test_nothing_runs_twice(project: Project) -> None:
    assert project.repro() == []


def test_learning_rate_reruns_the_update_and_what_follows(project: Project) -> None:
    project.change("update.learning_rate", 2e-3)
    assert changed(project) == ["rloo update 0001", "rloo update 0002"]
    # The cascade: the next policy's rollouts follow the update.
    assert project.repro("rollouts@0002") == ["rloo update 0001", "rloo rollouts 0002"]


def test_edited_reward_scores_again_without_a_model_pass(project: Project, finished_project: Project) -> None:
    (project.root / "reward.py").write_text(REWARD.replace("% 11 / 10", "% 7 / 10"))
    done = project.run("dvc", "repro", "advantages@0001", "evaluate_initial")
    ran = [line.removeprefix("> ") for line in done.stdout.splitlines() if line.startswith("> ")]
    assert sorted(ran) == [
        "rloo advantages 0001", "rloo evaluate 0000", "rloo rewards 0001", "rloo sources reward",
    ]  # fmt: skip
    assert "generating" not in done.stdout + done.stderr
    would_run = changed(project)
    assert "rloo update 0001" in would_run
    assert not {"rloo rollouts 0001", "rloo logprobs 0001", "rloo prepare"} & set(would_run)
    before, after = table(finished_project, "evaluation", "0000"), table(project, "evaluation", "0000")
    assert before["completion_token_ids"] == after["completion_token_ids"]
    texts = after["completion_text"].to_pylist()
    np.testing.assert_allclose(after["reward"].to_numpy(), [sum(map(ord, t)) % 7 / 10 for t in texts], atol=1e-6)


def test_comment_in_the_reward_stops_the_cascade(project: Project) -> None:
    with (project.root / "reward.py").open("a") as file:
        file.write("# reworded\n")
    assert project.repro("update@0001") == ["rloo sources reward", "rloo rewards 0001"]


def test_execution_and_modules_rerun_nothing(project: Project) -> None:
    project.change("execution", {"threads": 2, "update_microbatch_tokens": 64, "generation_batch_size": 3})
    with (project.root / "rloo_pipeline" / "algorithms.yaml").open("a") as file:
        file.write("# reworded\n")
    assert changed(project) == []


def test_execution_does_not_change_results(project: Project, finished_project: Project) -> None:
    project.change("execution", {"threads": 1, "update_microbatch_tokens": 20})
    project.rloo("update", "0001")
    assert project.json("metrics/update/0001.json")["grad_norm"] == pytest.approx(
        finished_project.json("metrics/update/0001.json")["grad_norm"], rel=1e-5
    )


def test_a_longer_chain_runs_the_new_iteration_alone(project: Project) -> None:
    project.rloo("iterations", "3")
    new = [f"{stage}@0003" for stage in (*STEPS, "evaluate")]
    assert sorted(json.loads(project.run("dvc", "status", "--json").stdout)) == sorted([*new, "history"])


def test_evaluate_false_skips_an_evaluation(project: Project) -> None:
    project.change("iterations.0002.evaluate", False)
    assert changed(project) == ["rloo evaluate 0002", "rloo history"]
    done = project.rloo("evaluate", "0002")
    assert "generating" not in done.stderr
    assert table(project, "evaluation", "0002").num_rows == 0
    assert project.json("metrics/evaluate/0002.json") == {}


def test_learning_rate_0_leaves_the_policy_as_it_is(project: Project) -> None:
    project.change("update.learning_rate", 0.0)
    project.rloo("update", "0001")
    project.rloo("evaluate", "0001")
    metrics, initial = (project.json(f"metrics/evaluate/{iteration}.json") for iteration in ("0001", "0000"))
    assert metrics.pop("win_rate") == metrics.pop("win_rate_low") == metrics.pop("win_rate_high") == 0.5
    assert metrics == initial
    columns = ["prompt_id", "sample_index", "completion_token_ids", "sampler_logprobs", "reward"]
    assert table(project, "evaluation", "0001").select(columns) == table(project, "evaluation", "0000").select(columns)


def test_two_projects_are_equal_to_the_bit(finished_pair: tuple[Project, Project]) -> None:
    first, second = finished_pair
    assert first.lock() == second.lock()
    folders = ("artifacts", "metrics", "provenance")
    contents = files(first, *folders)
    assert len(contents) > 80
    assert contents == files(second, *folders)


@pytest.mark.parametrize("artifact", COLUMNS)
@pytest.mark.parametrize("iteration", ITERATIONS)
def test_columns(finished_project: Project, artifact: str, iteration: str) -> None:
    schema = table(finished_project, artifact, iteration).schema
    assert dict(zip(schema.names, schema.types, strict=True)) == COLUMNS[artifact]


def test_columns_of_prompts(finished_project: Project) -> None:
    for split, rows in (("train", 8), ("eval", 4)):
        prompts, _ = read_table(finished_project.root / "artifacts" / "prompts" / f"{split}.parquet")
        assert dict(zip(prompts.schema.names, prompts.schema.types, strict=True)) == {
            name: pa.string() for name in ("prompt_id", "prompt", "answer")
        }
        assert prompts.num_rows == rows


def test_no_time_host_or_path_in_what_is_recorded(finished_project: Project) -> None:
    host = socket.gethostname()
    for name, content in files(finished_project, "artifacts", "metrics", "provenance").items():
        assert str(finished_project.root).encode() not in content, name
        if not name.endswith(".json") or ("model/" in name and not name.endswith("manifest.json")):
            continue
        text = content.decode().replace('"time_limit":', "")  # a setting, not when or how long
        assert len(host) < 4 or host not in text, name
        assert not re.search(r'"([^"]*[_/])?(time|date|seconds|host|user)([_/][^"]*)?":', text), name
        assert not re.search(r"20\d\d-\d\d-\d\d", text), name


def rows(project: Project, iteration: str) -> Iterator[tuple[list[int], list[float], list[float], list[float], str]]:
    rollouts, logprobs = table(project, "rollouts", iteration), table(project, "logprobs", iteration)
    assert rollouts.select(list(KEYS)) == logprobs.select(list(KEYS))
    columns = (
        rollouts["completion_token_ids"], rollouts["sampler_logprobs"], logprobs["policy_logprobs"],
        logprobs["reference_logprobs"], rollouts["finish_reason"],
    )  # fmt: skip
    return zip(*(column.to_pylist() for column in columns), strict=True)


@pytest.mark.parametrize("iteration", ITERATIONS)
def test_eos_kept(finished_project: Project, iteration: str) -> None:
    ends = []
    for ids, sampler, policy, reference, reason in rows(finished_project, iteration):
        assert len(ids) == len(sampler) == len(policy) == len(reference)
        assert not set(ids[:-1]) & set(EOS_IDS)
        assert (ids[-1] in EOS_IDS) == (reason == "stop")
        assert reason == "stop" or len(ids) == 6
        ends.append(reason)
    assert len(ends) == 16
    assert set(ends) == {"stop", "length"}


@pytest.mark.parametrize("iteration", ITERATIONS)
def test_policy_logprobs_are_the_samplers_and_the_reference_is_another_policy(
    finished_project: Project, iteration: str
) -> None:
    for _, sampler, policy, reference, _ in rows(finished_project, iteration):
        np.testing.assert_allclose(policy, sampler, atol=1e-4)
        assert np.allclose(policy, reference, atol=1e-6) == (iteration == "0001")


@pytest.mark.parametrize("iteration", ITERATIONS)
def test_advantages_by_hand(finished_project: Project, iteration: str) -> None:
    names = ("rewards", "logprobs", "advantages")
    rewards, logprobs, advantages = (table(finished_project, name, iteration).to_pylist() for name in names)
    groups: dict[str, list[tuple[float, dict[str, float]]]] = {}
    for reward, logprob, row in zip(rewards, logprobs, advantages, strict=True):
        assert {name: row[name] for name in KEYS} == {name: reward[name] for name in KEYS}
        kl = np.sum(np.float64(logprob["policy_logprobs"]) - np.float64(logprob["reference_logprobs"]))
        penalized = float(np.float32(reward["reward"])) - 0.05 * kl
        assert row["kl"] == pytest.approx(kl, abs=1e-12)
        assert row["penalized_reward"] == pytest.approx(penalized, abs=1e-12)
        groups.setdefault(row["prompt_id"], []).append((penalized, row))
    assert [len(group) for group in groups.values()] == [4] * 4
    assert sum(len({value for value, _ in group}) > 1 for group in groups.values()) >= 3
    for group in groups.values():
        total = sum(value for value, _ in group)
        for value, row in group:
            assert row["baseline"] == pytest.approx((total - value) / 3, abs=1e-12)
            assert row["advantage"] == pytest.approx(value - (total - value) / 3, abs=1e-12)
        assert sum(row["advantage"] for _, row in group) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("iteration", ITERATIONS)
def test_loss_by_hand(finished_project: Project, iteration: str) -> None:
    sums = [sum(policy) for _, _, policy, _, _ in rows(finished_project, iteration)]
    advantages = table(finished_project, "advantages", iteration)["advantage"].to_numpy()
    metrics = finished_project.json(f"metrics/update/{iteration}.json")
    assert metrics["loss"] == pytest.approx(-np.mean(advantages * sums), abs=1e-5)
    assert metrics["grad_norm"] > 0
    assert metrics["step"] == int(iteration)


def test_seed_twins(finished_project: Project) -> None:
    seeds = [
        seed for iteration in ITERATIONS for seed in table(finished_project, "rollouts", iteration)["seed"].to_pylist()
    ]
    assert len(set(seeds)) == len(seeds) == 32
    assert "completions/duplicate_ratio" in finished_project.json("metrics/rollouts/0001.json")


def test_provenance_names_the_policy_that_sampled(finished_project: Project) -> None:
    for iteration, previous in (("0001", "0000"), ("0002", "0001")):
        policy = finished_project.json(f"artifacts/policy/{previous}/model/manifest.json")["fingerprint"]
        assert set(table(finished_project, "rollouts", iteration)["policy_fingerprint"].to_pylist()) == {policy}
        for stage in ("rollouts", "logprobs", "update"):
            assert finished_project.json(f"provenance/{stage}/{iteration}.json")["inputs"]["policy"] == policy


def test_rollouts_of_another_policy_are_refused(project: Project, rloo: CommandLine) -> None:
    policy = project.root / "artifacts" / "policy"
    (policy / "0000" / "model").rename(policy / "set aside")
    (policy / "0001" / "model").rename(policy / "0000" / "model")
    before = files(project, "artifacts", "metrics")
    done = rloo(project, "update", "0001")
    assert done.code == 2
    assert "dvc repro rollouts@0001" in done.stderr
    assert "other weights" in done.stderr
    assert files(project, "artifacts", "metrics") == before


def test_advantages_of_other_rollouts_are_refused(project: Project, rloo: CommandLine) -> None:
    artifacts = project.root / "artifacts"
    (artifacts / "rewards" / "0001").rename(artifacts / "rewards" / "set aside")
    (artifacts / "rewards" / "0002").rename(artifacts / "rewards" / "0001")
    done = rloo(project, "advantages", "0001")
    assert done.code == 2
    assert "dvc repro rewards@0001" in done.stderr


def test_a_second_stage_at_once_is_refused(
    project: Project, rloo: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "SECONDS_TO_DIE", 0.0)
    before = files(project, "artifacts", "metrics")
    with (project.root / ".rloo" / "lock").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = rloo(project, "advantages", "0001")
    assert done.code == 2
    assert "runs in this project" in done.stderr
    assert "run advantages 0001 again" in done.stderr
    assert files(project, "artifacts", "metrics") == before
    assert rloo(project, "advantages", "0001").code == 0


def test_an_interrupted_stage_goes_on_where_it_stopped(
    project: Project, finished_project: Project, rloo: CommandLine
) -> None:
    stop, calls = project.root / "stop", project.root / "calls"
    (project.root / "reward.py").write_text(
        "from pathlib import Path\n\n"
        "def score(completions, **kwargs):\n"
        "    with Path('calls').open('a') as file:\n        file.write('x')\n"
        "    if Path('stop').exists() and len(Path('calls').read_text()) == 2:\n        raise RuntimeError('stopped')\n"
        "    return [sum(map(ord, text)) % 11 / 10 for text in completions]\n"
    )
    stop.touch()
    before = files(project, "artifacts", "metrics")
    assert rloo(project, "rewards", "0001").code == 2
    assert files(project, "artifacts", "metrics") == before
    stop.unlink()
    calls.unlink()
    done = rloo(project, "rewards", "0001")
    assert done.code == 0
    assert "shard-00000.parquet is there from an interrupted run: kept" in done.stderr
    assert calls.read_text() == "x"
    assert files(project, "artifacts/rewards") == files(finished_project, "artifacts/rewards")


def test_a_finished_stage_leaves_no_work_in_progress_but_the_evaluations_samples(finished_project):
    """Leftovers under other settings would fill the disk; the samples serve a changed reward."""
    left = sorted(path.relative_to(finished_project.root / ".rloo/work") for path in
                  (finished_project.root / ".rloo/work").glob("*/*/*") if path.is_dir())  # fmt: skip
    assert [path.parts[:2] for path in left] == [("evaluate", iteration) for iteration in ("0000", "0001", "0002")]


def test_dvc_plots_the_history(finished_project, tmp_path):
    """The held-out reward of every policy, as the metrics have it; the train reward from the first iteration on."""
    project = finished_project.copy(tmp_path / "copy")
    data = json.loads(project.run("dvc", "plots", "show", "--json").stdout)["data"]
    points = data["held-out reward"][0]["content"]["data"]["values"]
    held_out = {point["iteration"]: point["evaluate/reward"] for point in points}
    expected = ("0000", "0001", "0002")
    assert held_out == {key: project.json(f"metrics/evaluate/{key}.json")["reward"] for key in expected}
