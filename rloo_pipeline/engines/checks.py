"""What every engine refuses before it generates."""

from collections.abc import Sequence
from pathlib import Path

from rloo_pipeline.engines import Request
from rloo_pipeline.errors import UserError


def check_model(model: Path) -> None:
    """Raises UserError if `model` is not a directory with a config.json."""
    if not (model / "config.json").is_file():
        raise UserError(f"{model}: no model here (config.json is missing); run the stage that writes it")


def check_requests(requests: Sequence[Request], *, max_model_len: int, max_tokens: int) -> None:
    """Raises UserError if a prompt is empty or leaves no room for max_tokens in the context."""
    for index, request in enumerate(requests):
        length = len(request.prompt_token_ids)
        if length == 0:
            raise UserError(f"request {index}: the prompt has no tokens; give it text, or a chat template")
        if length + max_tokens > max_model_len:
            raise UserError(
                f"request {index}: prompt of {length} tokens + max_tokens {max_tokens} is more than the "
                f"{max_model_len} tokens that the context allows; shorten the prompt, lower max_tokens, or filter "
                "such prompts with prompts.max_prompt_tokens"
            )
