"""Movie snippets with human ratings, as preference pairs for the reward model and as prompts for the policy.

The snippets are divided by their first five words into four parts that have no opening in common: the reward model's
training and test pairs, the prompts to train on, and the held-out prompts.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ratings import fetch

FILE = Path(__file__).resolve().parent / "data" / "movie_snippets.txt"
INTRODUCTION = "Movie review:"
OPENING_WORDS = 5
LEAST_WORDS = 8  # of a snippet whose opening is a prompt: fewer leave hardly anything to continue
TURNS = 40  # each gives at most one pair for two snippets
PARTS = {"model_train": 0.5, "model_test": 0.6, "train": 0.9, "eval": 1.0}  # upper ends of shares of the openings

Part = Literal["model_train", "model_test", "train", "eval"]


@dataclass(frozen=True)
class Snippet:
    """A sentence from a review, words divided by one space, and its mean rating, -4 to 4."""

    id: int
    rating: float
    words: tuple[str, ...]

    @property
    def opening(self) -> str:
        return " ".join(self.words[:OPENING_WORDS])

    @property
    def continuation(self) -> str:
        return " " + " ".join(self.words[OPENING_WORDS:])


def pairs(part: Literal["model_train", "model_test"], size: int, gap: float) -> list[dict[str, Any]]:
    """`size` distinct pairs of snippets of the part whose ratings differ by at least `gap`, the better one chosen.

    Raises ValueError if there are not so many.
    """
    return pair_up(_part(part), size, gap)


def prompts(part: Literal["train", "eval"], size: int | None = None) -> list[dict[str, Any]]:
    """Openings of `size` snippets of the part (all if None) as prompts, with the snippet's own continuation."""
    rows = [
        {
            "prompt_id": f"snippet-{snippet.id:05d}",
            "prompt": f"{INTRODUCTION} {snippet.opening}",
            "continuation": snippet.continuation,
            "rating": snippet.rating,
        }
        for snippet in _part(part)
        if len(snippet.words) >= LEAST_WORDS
    ]
    if size is not None and not 1 <= size <= len(rows):
        raise ValueError(f"size {size}: there are {len(rows)} snippets of this kind")
    return rows[:size]


def pair_up(snippets: Iterable[Snippet], size: int, gap: float) -> list[dict[str, Any]]:
    """As `pairs`; turn after turn every snippet meets a neighbour in a new order, so all occur about equally often."""
    pool, found = list(snippets), dict[tuple[int, int], dict[str, Any]]()
    for turn in range(TURNS):
        order = sorted(pool, key=lambda snippet: _draw(f"{turn} {snippet.id}"))
        for one, other in zip(order[::2], order[1::2], strict=False):
            worse, better = sorted((one, other), key=lambda snippet: snippet.rating)
            if better.rating - worse.rating >= gap and len(found) < size:
                found.setdefault((better.id, worse.id), _pair(better, worse))
        if len(found) == size:
            return list(found.values())
    raise ValueError(f"size {size}: only {len(found)} pairs with a gap of {gap:g} were found; lower one of them")


def _pair(better: Snippet, worse: Snippet) -> dict[str, Any]:
    texts = {name: " " + " ".join(snippet.words) for name, snippet in (("chosen", better), ("rejected", worse))}
    return {"prompt": INTRODUCTION, **texts, "rating_chosen": better.rating, "rating_rejected": worse.rating}


def _part(part: Part) -> list[Snippet]:
    """The part's snippets in an order without meaning."""
    if part not in PARTS:
        raise ValueError(f"part {part!r}: there are {', '.join(PARTS)}")
    chosen = [snippet for snippet in snippets() if part_of(snippet) == part]
    return sorted(chosen, key=lambda snippet: _draw(f"order {snippet.id}"))


def part_of(snippet: Snippet) -> str:
    """By the opening alone, so that snippets that begin alike are in one part."""
    return next(part for part, end in PARTS.items() if _draw(snippet.opening.lower()) < end)


@cache
def snippets() -> tuple[Snippet, ...]:
    """All snippets, fetched if they are not here."""
    return parse(fetch(FILE).read_text(encoding="utf-8"))


def parse(text: str) -> tuple[Snippet, ...]:
    """Lines of id, mean rating and text, divided by tabs."""
    rows = (line.split("\t") for line in text.splitlines())
    return tuple(Snippet(int(number), float(rating), tuple(words.split())) for number, rating, words in rows)


def _draw(key: str) -> float:
    """A number in [0, 1) that is the same on every machine."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "big") / 2**48
