"""The reward of the arithmetic example."""

from pathlib import Path
from typing import Any

import pytest

from rloo_pipeline.rewards.sources import load_callable

last_number = load_callable("rloo_pipeline/examples/arithmetic/reward.py:last_number", Path(__file__).parents[2])


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("8", 1.0),
        ("08", 1.0),
        ("8.0", 1.0),
        ("8.", 1.0),
        ("The answer is 8.", 1.0),
        ("3 + 5 = 8", 1.0),
        ("3+5=8\n", 1.0),
        ("18, no: 10-8", 1.0),
        ("The answer is 5.", 0.0),
        ("8 is 3 + 5", 0.0),
        ("-8", 0.0),
        ("= \u22128", 0.0),
        ("18", 0.0),
        ("8.5", 0.0),
        ("8,000", 0.0),
        ("eight", 0.0),
        ("", 0.0),
    ],
)
def test_last_number(completion: str, reward: float) -> None:
    assert last_number(completions=[completion], answer=["8"]) == [reward]


@pytest.mark.parametrize(("completion", "reward"), [("1,000", 1.0), ("1000", 1.0), ("1,00", 0.0), ("1, 000", 0.0)])
def test_thousands(completion: str, reward: float) -> None:
    assert last_number(completions=[completion], answer=["1000"]) == [reward]


def test_messages_and_other_columns() -> None:
    completions: list[Any] = [[{"role": "assistant", "content": text}] for text in ("8", "It is 7")]
    assert last_number(completions=completions, answer=["8", "8"], a=[3, 3], trainer_state=None) == [1.0, 0.0]
