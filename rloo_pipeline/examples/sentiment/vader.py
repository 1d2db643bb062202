"""VADER as a judge that has never seen the reward model or the ratings that it was trained on."""

from typing import Any

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

ANALYZER = SentimentIntensityAnalyzer()


def compound(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    """VADER's compound score of prompt and completion, -1 (negative) to 1 (positive); Hutto and Gilbert (2014)."""
    texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    return [float(ANALYZER.polarity_scores(text)["compound"]) for text in texts]
