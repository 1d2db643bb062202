"""Artifact paths as users' notebooks read them."""

from pathlib import Path

import pytest

from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import Layout, check_iteration

LAYOUT = Layout(Path("p"))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (LAYOUT.params, "p/params.yaml"),
        (LAYOUT.prompts, "p/artifacts/prompts"),
        (LAYOUT.model("0001"), "p/artifacts/policy/0001/model"),
        (LAYOUT.trainer_state("0001"), "p/artifacts/policy/0001/trainer_state"),
        (LAYOUT.rollouts("0001"), "p/artifacts/rollouts/0001"),
        (LAYOUT.logprobs("0001"), "p/artifacts/logprobs/0001"),
        (LAYOUT.rewards("0001"), "p/artifacts/rewards/0001"),
        (LAYOUT.advantages("0001"), "p/artifacts/advantages/0001"),
        (LAYOUT.evaluation("0000"), "p/artifacts/evaluation/0000"),
        (LAYOUT.metrics("evaluate", "0000"), "p/metrics/evaluate/0000.json"),
        (LAYOUT.timings("update", "0001"), "p/timings/update/0001.json"),
        (LAYOUT.provenance("update", "0001"), "p/provenance/update/0001.json"),
        (LAYOUT.source("rewards", "mine"), "p/sources/rewards/mine.json"),
        (LAYOUT.history, "p/artifacts/history.json"),
        (LAYOUT.work("rollouts", "0001", "abc"), "p/.rloo/work/rollouts/0001/abc"),
    ],
)
def test_paths(path: Path, expected: str) -> None:
    assert path == Path(expected)


@pytest.mark.parametrize("iteration", ["0000", "0001", "9999"])
def test_good_ids(iteration: str) -> None:
    assert check_iteration(iteration) == iteration


@pytest.mark.parametrize("iteration", ["", "1", "00001", "-001", "000a", "\u0660\u0660\u0660\u0661", "0 01"])
def test_bad_ids(iteration: str) -> None:
    with pytest.raises(UserError, match="an iteration id has four digits, as in 0001"):
        check_iteration(iteration)
