"""The learning rate by step."""

import pytest

from rloo_pipeline.objective.schedule import learning_rate


def test_resume_state_of_the_warm_up():
    rates = [learning_rate(step, 1e-3, 10, "constant") for step in range(12)]
    assert rates[:5] == pytest.approx([1e-4, 2e-4, 3e-4, 4e-4, 5e-4])
    assert rates[9:] == [1e-3] * 3


def test_linear_and_cosine_reach_zero_at_their_end():
    assert [learning_rate(step, 1.0, 2, "linear", 6) for step in (1, 2, 3, 5, 6, 9)] == [1, 1, 0.75, 0.25, 0, 0]
    found = [learning_rate(step, 1.0, 2, "cosine", 6) for step in (2, 3, 4, 6, 9)]
    assert found == pytest.approx([1, 0.5 + 2**0.5 / 4, 0.5, 0, 0], abs=1e-15)


def test_no_warm_up_starts_at_the_peak():
    assert learning_rate(0, 0.5, 0) == 0.5
    assert learning_rate(0, 0.5, 0, "linear", 4) == 0.5


def test_a_schedule_without_its_end_is_refused():
    with pytest.raises(ValueError, match="schedule_steps"):
        learning_rate(5, 1.0, 2, "linear", None)
    with pytest.raises(ValueError, match="schedule_steps"):
        learning_rate(5, 1.0, 5, "cosine", 5)
