"""Statistics of rewards."""

import statistics
from typing import Any

import pyarrow as pa
import pytest

from rloo_pipeline.reward_config import FunctionReward
from rloo_pipeline.rewards.kept import Counted
from rloo_pipeline.stages.rewards import reward_metrics


def component(**settings: Any) -> FunctionReward:
    return FunctionReward(name="a", function="m:f", **settings)


def test_statistics_of_the_rows_that_have_a_value() -> None:
    table = pa.table(
        {
            "reward": pa.array([1.0, None, 0.0, 0.5], pa.float32()),
            "reward/a": pa.array([2.0, None, -2.0, None], pa.float32()),
        }
    )
    metrics = reward_metrics(table, [component(clip=(-2.0, 1.0))], Counted({"a": 1}, {"right": 0.25}))
    assert metrics == {
        "rows_invalid": 1,
        "reward": 0.5,
        "reward_std": pytest.approx(statistics.stdev([1.0, 0.0, 0.5])),  # of a sample, as TRL reports it
        "reward_min": 0.0,
        "reward_max": 1.0,
        "reward_null": 1,
        "reward/a": 0.0,
        "reward/a_std": pytest.approx(statistics.stdev([2.0, -2.0])),
        "reward/a_min": -2.0,
        "reward/a_max": 2.0,
        "reward/a_null": 1,
        "reward/a_errors": 1,
        "reward/a_clipped": 0.5,
        "log/right": 0.25,
    }


def test_a_single_valid_row_has_no_deviation() -> None:
    table = pa.table({"reward": pa.array([0.25, None], pa.float32())})
    assert reward_metrics(table, [], Counted({}, {}))["reward_std"] == 0


def test_tasks_that_no_prompt_has(capsys: pytest.CaptureFixture[str]) -> None:
    table = pa.table({name: pa.nulls(2, pa.float32()) for name in ("reward", "reward/a")})
    metrics = reward_metrics(table, [component(tasks=["math"])], Counted({}, {}))
    assert metrics == {"rows_invalid": 2, "reward_null": 2, "reward/a_null": 2, "reward/a_errors": 0}
    assert "reward a applies to no row: no prompt here has a task among math" in capsys.readouterr().err
