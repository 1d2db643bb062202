"""The prompts of the example hh, on made-up dialogues in the dataset's format."""

import pytest

from rloo_pipeline.init import EXAMPLES
from rloo_pipeline.rewards.sources import load_callable

row = load_callable("prompts.py:row", EXAMPLES / "hh")
FIRST = "\n\nHuman: Hello?\n\nAssistant: Hi."


def test_a_dialogue_is_split_before_its_last_reply() -> None:
    assert row(FIRST) == {"prompt": "\n\nHuman: Hello?\n\nAssistant:", "completion": "Hi.", "turns": 1}
    found = row(f"{FIRST}\n\nHuman: Who said 'Assistant: no'?\n\nAssistant: Nobody.\n\nTwo lines. ")
    assert found["prompt"] == f"{FIRST}\n\nHuman: Who said 'Assistant: no'?\n\nAssistant:"
    assert (found["completion"], found["turns"]) == ("Nobody.\n\nTwo lines.", 2)


def test_a_dialogue_without_a_reply_is_told() -> None:
    with pytest.raises(ValueError, match="no turn of the assistant"):
        row("\n\nHuman: Hello?")
