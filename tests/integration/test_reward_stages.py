"""Rewards through the stages: rows that cannot be scored, what functions log, and an end in the middle."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rloo_pipeline.config import parse_params
from rloo_pipeline.errors import UserError
from rloo_pipeline.stages import dispatch
from tests.lab import Lab
from tests.project import PARAMS, Project

# Every fourth completion, counted by its ids' sum, raises.
REWARD = """
def score(completions, completion_ids, log_extra, log_metric, trainer_state, **kwargs):
    log_metric("step", trainer_state.global_step)
    log_extra("tokens", [len(ids) for ids in completion_ids])
    log_metric("rows", len(completions))
    return [1 / (sum(ids) % 4) for ids in completion_ids]

def length(completion_ids, **kwargs):
    return [len(ids) for ids in completion_ids]
"""
LETTERS = {"name": "letters", "function": "reward.py:score", "on_error": "invalid"}
SEEN = {"name": "seen", "function": "reward.py:length", "weight": 0.0, "clip": [0, 3]}


@pytest.fixture
def run(finished_project: Project, tmp_path: Path) -> Callable[..., Lab]:
    """`run(*stages, rewards=...)`: stages of the second iteration in a copy of the finished project."""
    root = tmp_path / "project"
    shutil.copytree(finished_project.root, root, ignore=shutil.ignore_patterns(".git", ".dvc"))
    (root / "reward.py").write_text(REWARD)

    def call(*stages: str, rewards: list[dict[str, Any]]) -> Lab:
        lab = Lab(root)
        for stage in stages:
            dispatch.run(stage, lab.layout, parse_params({**PARAMS, "rewards": rewards}), "0002")
        return lab

    return call


def fails(row: dict[str, Any]) -> bool:
    return sum(row["completion_token_ids"]) % 4 == 0


def test_rows_that_cannot_be_scored_are_left_out_and_say_why(run: Callable[..., Lab]) -> None:
    lab = run("rewards", "advantages", "update", rewards=[LETTERS, SEEN])
    order = [(name, "ascending") for name in ("prompt_id", "sample_index")]
    stages = ("rollouts", "rewards", "advantages")
    tables = [lab.table(stage, "0002").sort_by(order).to_pylist() for stage in stages]
    reason = "letters: reward.py:score raised ZeroDivisionError: division by zero"
    broken = 0
    for sampled, scored, trained in zip(*tables, strict=True):
        assert scored["reward/seen"] == len(sampled["completion_token_ids"])
        assert (scored["reward"] is None) == fails(sampled)
        assert scored["reward_error"] == (reason if fails(sampled) else None)
        if fails(sampled):
            assert (trained["exclusion_reason"], trained["in_baseline"]) == (f"no valid reward: {reason}", False)
            broken += 1
        else:
            assert json.loads(scored["reward_extra"]) == {"tokens": len(sampled["completion_token_ids"])}
    assert 0 < broken < len(tables[0])
    metrics = lab.metrics("rewards", "0002")
    assert metrics["rows_invalid"] == metrics["reward/letters_errors"] == broken
    assert metrics["reward/letters_null"] == 0
    assert metrics["log/rows"] == 1  # each row was called alone
    assert metrics["log/step"] == 1  # sampled after one iteration
    assert metrics["reward/seen_clipped"] > 0
    assert lab.metrics("advantages", "0002")["rows_invalid"] == broken


def test_a_row_that_must_not_fail_stops_the_stage(run: Callable[..., Lab]) -> None:
    with pytest.raises(UserError, match=r"reward letters: reward.py:score raised ZeroDivisionError: .* \(row \d"):
        run("rewards", rewards=[{**LETTERS, "on_error": "fail"}])


def test_what_functions_log_survives_an_end_in_the_second_shard(run: Callable[..., Lab], tmp_path: Path) -> None:
    root = tmp_path / "project"
    code = (
        "from pathlib import Path\n"
        "def score(completions, log_metric, **kwargs):\n"
        "    calls = Path(__file__).with_name('calls')\n"
        "    number = len(calls.read_text()) if calls.exists() else 0\n"
        "    calls.write_text('x' * (number + 1))\n"
        "    log_metric('call', number)\n"
        "    return [0] * (len(completions) if number != 1 else 1)\n"
    )
    (root / "reward.py").write_text(code)
    rewards = [{"name": "letters", "function": "reward.py:score"}]
    with pytest.raises(UserError, match="returned 1 values for 8 completions"):
        run("rewards", rewards=rewards)
    calls = len((root / "calls").read_text())
    lab = run("rewards", rewards=rewards)
    assert len((root / "calls").read_text()) == calls + 1
    assert lab.metrics("rewards", "0002")["log/call"] == (0 + calls) / 2


def test_evaluation_scores_by_the_same_rules(run: Callable[..., Lab]) -> None:
    safe = {"name": "safe", "function": "reward.py:safe"}
    reward = REWARD + (
        "\ndef safe(completion_ids, log_extra, trainer_state, **kwargs):\n"
        "    log_extra('step', [trainer_state.global_step] * len(completion_ids))\n"
        "    return [sum(ids) % 5 for ids in completion_ids]\n"
    )
    lab = run(rewards=[safe])
    (lab.root / "reward.py").write_text(reward)
    before = set((lab.root / ".rloo").rglob("shard-*.parquet"))
    run("evaluate", rewards=[safe, {**LETTERS, "weight": 0.0}])
    assert before == set((lab.root / ".rloo").rglob("shard-*.parquet"))  # sampled before
    rows = lab.table("evaluation", "0002").to_pylist()
    for row in rows:
        assert row["reward"] == row["reward/safe"] == sum(row["completion_token_ids"]) % 5
        assert (row["reward_error"] is not None) == fails(row)
        assert json.loads(row["reward_extra"])["step"] == 2
    metrics = lab.metrics("evaluate", "0002")
    assert metrics["rows_invalid"] == 0
    assert metrics["reward/letters_errors"] == sum(map(fails, rows))
