"""Who generates: one protocol, several engines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rloo_pipeline.progress import Progress


@dataclass(frozen=True)
class Request:
    """One completion to sample."""

    prompt_token_ids: Sequence[int]
    seed: int
    images: Sequence[bytes] = ()  # encoded, in the order of their placeholders among the ids
    prompt_text: str = ""  # with one placeholder for each image, for engines that put in the others themselves


@dataclass(frozen=True)
class Sample:
    """One sampled completion: ids with a sampled EOS included, their log-probs in nats, and why it ended."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str


class Engine(Protocol):
    """Samples completions from one set of weights, each request by its own seed."""

    name: str
    settings: Mapping[str, Any]

    def generate(self, requests: Sequence[Request], done: Progress) -> list[Sample]:
        """One sample for each request, in the order of the requests; `done` is told of each that ended."""
        ...

    def close(self) -> None:
        """Give back all memory."""
        ...
