"""Prompts as the policy sees them: chat template and token ids."""

from collections.abc import Sequence
from typing import Any, cast

from rloo_pipeline.errors import UserError

Message = dict[str, str]


def render(prompts: Sequence[str] | Sequence[list[Message]], tokenizer: Any) -> tuple[list[str], list[list[int]]]:
    """Text and token ids of each prompt: messages by the chat template, strings as they are.

    The template writes the special tokens itself, so the tokenizer adds none to messages. Raises UserError if there
    is no chat template, if it refuses a prompt, or if a prompt has no tokens.
    """
    conversational = bool(prompts) and not isinstance(prompts[0], str)
    if conversational:
        texts = render_chat(cast(Sequence[list[Message]], prompts), tokenizer, add_generation_prompt=True)
    else:
        texts = list(cast(Sequence[str], prompts))
    ids = tokenizer(texts, add_special_tokens=not conversational, verbose=False)["input_ids"] if texts else []
    for row, tokens in enumerate(ids, start=1):
        if not tokens:
            raise UserError(f"prompt {row} ({texts[row - 1]!r}) has no tokens in the policy's tokenizer; remove it")
    return texts, ids


def render_chat(conversations: Sequence[list[Message]], tokenizer: Any, *, add_generation_prompt: bool) -> list[str]:
    """The text of each conversation by the tokenizer's chat template; UserError if it has none or refuses one."""
    name = getattr(tokenizer, "name_or_path", None) or "the model"
    if not tokenizer.chat_template:
        raise UserError(
            f"the prompts are messages, but the tokenizer of {name} has no chat "
            "template; use an instruction-tuned model, add a chat_template.jinja beside its tokenizer, or give prompts "
            "as strings (and no system_prompt)"
        )
    from jinja2.exceptions import TemplateError

    def apply(some: Sequence[list[Message]]) -> list[str]:
        texts = tokenizer.apply_chat_template(list(some), tokenize=False, add_generation_prompt=add_generation_prompt)
        return cast(list[str], texts)

    try:
        return apply(conversations)
    except TemplateError:
        for row, conversation in enumerate(conversations, start=1):
            try:
                apply([conversation])
            except TemplateError as error:
                raise UserError(
                    f"prompt {row}: the chat template of {name} refuses it "
                    f"({error}); change its messages (or prompts.system_prompt)"
                ) from error
        raise
