"""One-digit additions from reasoning-gym's chain_sum, with operand pairs held out for evaluation."""

from collections.abc import Iterator
from typing import Any

from reasoning_gym.arithmetic.chain_sum import ChainSumConfig, ChainSumDataset

HELD_OUT_PAIRS = 18  # of the 55 unordered pairs of digits
HELD_OUT_SEED = 20
DRAWS = 4096  # enough to meet all 100 ordered pairs many times


def train(size: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """`size` distinct additions (all if None) whose operands are not a held-out pair, in either order."""
    held_out = _held_out()
    return _take([row for row in _distinct(seed) if _pair(row) not in held_out], size)


def evaluation(size: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """`size` distinct additions (all if None) of held-out pairs alone."""
    held_out = _held_out()
    return _take([row for row in _distinct(seed) if _pair(row) in held_out], size)


def _take(rows: list[dict[str, Any]], size: int | None) -> list[dict[str, Any]]:
    if size is not None and not 1 <= size <= len(rows):
        raise ValueError(f"size {size}: there are {len(rows)} additions of this kind")
    return rows[:size]


def _held_out() -> set[tuple[int, int]]:
    pairs = list(dict.fromkeys(_pair(row) for row in _additions(HELD_OUT_SEED)))
    return set(pairs[:HELD_OUT_PAIRS])


def _distinct(seed: int) -> list[dict[str, Any]]:
    return list({(row["a"], row["b"]): row for row in _additions(seed)}.values())


def _pair(row: dict[str, Any]) -> tuple[int, int]:
    return min(row["a"], row["b"]), max(row["a"], row["b"])


def _additions(seed: int) -> Iterator[dict[str, Any]]:
    # Its item i is drawn from seed + i, so neighbouring seeds would give nearly the same list.
    config = ChainSumConfig(min_terms=2, max_terms=2, min_digits=1, max_digits=1, seed=seed * DRAWS, size=DRAWS)
    for item in ChainSumDataset(config):
        a, operator, b = item["metadata"]["expression"].split()
        if operator == "+":  # chain_sum draws minus as often and cannot be told not to
            question = f"What is {a} + {b}? Answer with just the number."
            yield {
                "prompt": [{"role": "user", "content": question}],
                "answer": item["answer"],
                "a": int(a),
                "b": int(b),
            }
