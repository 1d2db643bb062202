"""The reward of the example gsm8k, on completions worked out by hand."""

from decimal import Decimal

import pytest

from rloo_pipeline.init import EXAMPLES
from rloo_pipeline.rewards.sources import load_callables

correct, final_number = load_callables(["reward.py:correct", "reward.py:final_number"], EXAMPLES / "gsm8k")
SOLUTION = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether 48+24 = <<48+24=72>>72 clips.\n#### 72"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (SOLUTION, "72"),
        ("#### 72", "72"),
        ("####72", "72"),
        ("The sum is 70.\n####\n72\n", "72"),
        ("#### $1,200.50", "1200.50"),
        ("#### 72 clips.", "72"),
        ("#### 72.", "72"),
        ("#### **72**", "72"),
        ("#### -5", "-5"),
        ("#### \N{MINUS SIGN}5", "-5"),
        ("#### .5", "0.5"),
        ("#### 10%", "10"),
        ("#### 9 * 2 = 18", "18"),
        ("#### 7 or 8", None),
        (r"so \boxed{72}", "72"),
        (r"so $\boxed{\$1,200}$.", "1200"),
        (r"so \boxed{72\text{ clips}}", "72"),
        (r"so \boxed{\frac{18}{2}}", None),
        (r"\boxed{71} no, \boxed{72}", "72"),
        ("#### Step 2: 24\nHence 72.\n#### 73", "73"),
        ("#### Conclusion\nShe sold 72 clips.", "72"),
        ("48 and 24 make 72 clips.", "72"),
        ("It costs 1,234,567 dollars", "1234567"),
        ("in 2, 3 or 4 days", "4"),
        ("9-1", "1"),
        ("no idea", None),
        ("", None),
    ],
)
def test_final_number(text: str, number: str | None) -> None:
    assert final_number(text) == (None if number is None else Decimal(number))


def test_equal_numbers_are_right_however_written() -> None:
    texts = ["#### 72", "#### 72.00", "about 71", "72 it is, not 73", "none"]
    assert correct(completions=texts, answer=[SOLUTION] * 5, prompts=[""] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_messages_and_the_answer_of_the_own_row() -> None:
    completions = [[{"role": "assistant", "content": text}] for text in ("#### 1,200", "#### 72")]
    assert correct(completions=completions, answer=["#### 1200", "#### 71"]) == [1.0, 0.0]


def test_a_row_without_a_solution_is_told() -> None:
    with pytest.raises(ValueError, match="a row without a number"):
        correct(completions=["#### 1"], answer=["not known"])
