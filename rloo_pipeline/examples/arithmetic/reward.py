"""Whether the last number of a completion is the answer."""

import re
from decimal import Decimal
from typing import Any

# A minus counts as a sign unless it stands right behind a digit, as in 9-1; commas count only between thousands.
NUMBER = re.compile(r"(?:(?<![0-9])-)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


def last_number(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """1 if the last number of the completion equals the answer, else 0; nothing in between.

    reasoning-gym's own scorer gives part of the reward for any text, which would be learnt in place of the task.
    """
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [float(_last(text) == Decimal(right)) for text, right in zip(texts, answer, strict=True)]


def _last(text: str) -> Decimal | None:
    numbers = NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return Decimal(numbers[-1].replace(",", "")) if numbers else None
