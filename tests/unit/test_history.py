import json

import pytest

from rloo_pipeline import history, table
from rloo_pipeline.config import parse_params
from rloo_pipeline.errors import UserError
from rloo_pipeline.files import write_json
from rloo_pipeline.layout import Layout
from tests.project import PARAMS


@pytest.fixture
def layout(tmp_path):
    """The initial policy and iteration 0001 are finished; 0002 has only its rollouts."""
    layout = Layout(tmp_path)
    evaluation = {"reward": 0.1125, "reward_low": 0.05, "reward_high": 0.2, "kl": 0.0}
    write_json(layout.metrics("evaluate", "0000"), evaluation)
    write_json(
        layout.metrics("evaluate", "0001"),
        {"reward": 0.48, "reward_low": 0.4013, "reward_high": 0.56, "kl": 1.2345, "win_rate": 0.75},
    )
    write_json(layout.metrics("advantages", "0001"), {"reward": 0.3333, "frac_reward_zero_std": 0.25})
    write_json(layout.metrics("rollouts", "0002"), {"completions": 16})
    write_json(layout.timings("rollouts", "0001"), {"seconds": 19.4, "tokens": 100.0, "system": {"looks": 3}})
    write_json(layout.timings("update", "0001"), {"seconds": 20.2})
    return layout


PARSED = parse_params(PARAMS)


def test_one_row_for_each_iteration(layout):
    rows = history.collect(layout, PARSED)
    assert [row["iteration"] for row in rows] == ["0000", "0001", "0002"]
    assert rows[0]["evaluate/reward"] == 0.1125
    assert rows[1] == {
        "iteration": "0001",
        "evaluate/reward": 0.48,
        "evaluate/reward_low": 0.4013,
        "evaluate/reward_high": 0.56,
        "evaluate/kl": 1.2345,
        "evaluate/win_rate": 0.75,
        "advantages/reward": 0.3333,
        "advantages/frac_reward_zero_std": 0.25,
    }
    assert rows[2] == {"iteration": "0002", "rollouts/completions": 16}


def test_the_history_is_a_list_without_durations(layout):
    history.run(layout, PARSED)
    written = json.loads(layout.history.read_text())
    assert [{key: value for key, value in row.items() if value is not None} for row in written] == history.collect(
        layout, PARSED
    )
    assert len({tuple(row) for row in written}) == 1  # the same keys in every row
    assert "seconds" not in layout.history.read_text()


def test_seconds_are_those_of_all_stages(layout):
    assert history.seconds(layout, "0001") == pytest.approx(39.6)
    assert history.seconds(layout, "0002") == 0


def line_of(text, iteration):
    (line,) = (line for line in text.splitlines() if iteration in line)
    return line


@pytest.mark.parametrize("columns", ["80", "200"])
def test_the_table_shows_each_figure_whole(layout, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    table.show(layout, PARSED)
    text = capsys.readouterr().out
    for figure in ("0.333", "0.480 (0.401 to 0.560)", "0.750", "1.234", "25%", "40"):
        assert figure in line_of(text, "0001")
    assert "0.113 (0.050 to 0.200)" in line_of(text, "0000") or "0.112 (0.050 to 0.200)" in line_of(text, "0000")
    assert line_of(text, "0002").count("0.") == 0


def test_components_and_the_dataset_have_a_table_of_their_own(layout, capsys):
    table.show(layout, PARSED)
    assert "held-out prompts" not in capsys.readouterr().out
    several = [{"name": "liked", "function": "f.py:f"}, {"name": "polite", "function": "f.py:g", "weight": 0}]
    scores = {"reward/liked": 0.5004, "reward/polite": -0.25}
    wins = {"win_rate_dataset": 0.6, "win_rate_dataset_low": 0.5, "win_rate_dataset_high": 0.7}
    write_json(
        layout.metrics("evaluate", "0001"), {"reward": 0.5, "reward_low": 0.4, "reward_high": 0.6, **scores, **wins}
    )
    table.show(layout, parse_params({**PARAMS, "rewards": several}))
    below = capsys.readouterr().out.partition("held-out prompts")[2]
    assert [title for title in ("liked", "polite", "wins over the dataset (95%)") if title not in below] == []
    assert line_of(below, "0001").split() == ["0001", "0.500", "-0.250", "0.600", "(0.500", "to", "0.700)"]
    assert line_of(below, "0002").split() == ["0002", "-", "-", "-"]


def _evaluated(iteration: str, reward: float, low: float, high: float) -> dict[str, object]:
    return {
        "iteration": iteration,
        "evaluate/reward": reward,
        "evaluate/reward_low": low,
        "evaluate/reward_high": high,
    }


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (_evaluated("0002", 0.5, 0.4, 0.6), "improved"),
        (_evaluated("0002", 0.2, 0.1, 0.3), "no improvement"),  # the interval holds the initial value
        (_evaluated("0002", 0.125, 0.07, 0.19), "no improvement"),  # a run at learning rate 0
    ],
)
def test_verdict(last: dict[str, object], expected: str) -> None:
    rows = [_evaluated("0000", 0.125, 0.07, 0.19), {"iteration": "0001"}, last]
    assert f": {expected}" in table.verdict(rows)
    assert "0.125 before" in table.verdict(rows)


def test_verdict_without_a_second_evaluation() -> None:
    assert "nothing to compare" in table.verdict([_evaluated("0000", 0.125, 0.07, 0.19), {"iteration": "0001"}])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("5", "no values by name"),
        ("[1]", "no values by name"),
        ('{"loss": 1', "delimiter"),
        ("", "Expecting value"),
        (b"\xff\xfe", "codec"),
        ('{"seconds": "few"}', "seconds is no number"),
    ],
)
@pytest.mark.parametrize("kind", ["metrics", "timings"])
def test_damaged_metrics_are_named(layout, kind, content, why):
    path = getattr(layout, kind)("update", "0001")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=rf"{kind}/update/0001.json: not readable as {kind} \(.*{why}.*restore it"):
        table.show(layout, PARSED)
