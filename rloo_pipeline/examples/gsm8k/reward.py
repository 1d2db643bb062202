"""Whether the final number of a completion is that of the solution."""

import re
from decimal import Decimal
from typing import Any

# The final answer stands behind #### (on that line or the next) or in \boxed{}; the last of them counts.
MARKED = re.compile(r"####\s*([^\n]*)|\\boxed\{((?:[^{}\n]|\{[^{}\n]*\})*)\}")
# A minus is a sign unless it stands right behind a digit, as in 9-1; commas count only between thousands.
NUMBER = re.compile(r"(?:(?<![0-9])-)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+")


def correct(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """1 if the completion's final number equals that of the dataset's solution, else 0; nothing for the format."""
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [float(_equal(final_number(text), final_number(right))) for text, right in zip(texts, answer, strict=True)]


def final_number(text: str) -> Decimal | None:
    """The number behind the last mark, else the last number; None if there is none or the mark has several.

    Of an equation behind the mark, as in `#### 9 * 2 = 18`, the right side counts.
    """
    text = text.replace("\N{MINUS SIGN}", "-")
    marked = [first or second for first, second in MARKED.findall(text)]
    behind = _numbers(marked[-1].rpartition("=")[2]) if marked else []
    if behind:
        return behind[0] if len(behind) == 1 else None
    numbers = _numbers(text)
    return numbers[-1] if numbers else None


def _numbers(text: str) -> list[Decimal]:
    return [Decimal(number.replace(",", "")) for number in NUMBER.findall(text)]


def _equal(given: Decimal | None, right: Decimal | None) -> bool:
    if right is None:
        raise ValueError("the column answer has a row without a number; GSM8K's solutions end with #### and one")
    return given == right
