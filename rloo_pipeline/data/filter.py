"""Which prompts are short enough."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rloo_pipeline.errors import UserError


@dataclass(frozen=True)
class Limit:
    """The longest prompt, tokens, and where the limit comes from."""

    tokens: int
    origin: str


def prompt_limit(context: int, max_tokens: int, max_prompt_tokens: int | None = None) -> Limit:
    """What `context` tokens leave for a prompt beside `max_tokens` sampled ones, or `max_prompt_tokens` if less."""
    room = context - max_tokens
    if room < 1:
        raise UserError(
            f"max_tokens is {max_tokens}, but the policy's context has {context} tokens: no room is left for a prompt; "
            "lower max_tokens"
        )
    if max_prompt_tokens is not None and max_prompt_tokens < room:
        return Limit(max_prompt_tokens, f"prompts.max_prompt_tokens is {max_prompt_tokens}")
    return Limit(room, f"a context of {context} leaves {room} beside max_tokens {max_tokens}")


def fits(lengths: Sequence[int], limit: Limit) -> tuple[npt.NDArray[np.bool_], dict[int, str]]:
    """`kept_P` and, for each prompt that is too long, its index and the reason. Raises UserError if none is left."""
    lengths_P = np.asarray(lengths, dtype=np.int64)
    kept_P = lengths_P <= limit.tokens
    if not kept_P.any():
        raise UserError(
            f"none of {len(lengths_P)} prompts is short enough: the shortest has "
            f"{lengths_P.min() if len(lengths_P) else 0} tokens, {limit.origin}; shorten the prompts or allow more"
        )
    reasons = {int(row): f"too long: {lengths_P[row]} tokens, {limit.origin}" for row in np.flatnonzero(~kept_P)}
    return kept_P, reasons
