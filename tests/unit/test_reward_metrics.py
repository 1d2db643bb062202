import statistics

import pyarrow as pa
import pytest

from rloo_pipeline.stages.rewards import reward_metrics


def test_deviation_is_that_of_a_sample_as_trl_reports_it():
    table = pa.table({"reward": pa.array([1.0, None, 0.0, 0.5], pa.float32()), "reward/a": [2.0, None, 2.0, None]})
    metrics = reward_metrics(table, ["a"])
    assert metrics["reward"] == 0.5
    assert metrics["reward_std"] == pytest.approx(statistics.stdev([1.0, 0.0, 0.5]))
    assert metrics["rows_invalid"] == metrics["reward_null"] == 1
    assert (metrics["reward/a"], metrics["reward/a_std"], metrics["reward/a_null"]) == (2.0, 0.0, 2)


def test_a_single_valid_row_has_no_deviation():
    table = pa.table({"reward": pa.array([0.25, None], pa.float32())})
    assert reward_metrics(table, [])["reward_std"] == 0
