"""Chat templates and token ids."""

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from rloo_pipeline.data.template import render
from rloo_pipeline.errors import UserError
from tests.tiny import make_tokenizer

BOS_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def with_bos(template: str | None = BOS_TEMPLATE) -> PreTrainedTokenizerFast:
    """A tokenizer that puts <|im_start|> (id 0) before whatever it tokenizes."""
    tokenizer = make_tokenizer()
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 0)]
    )
    tokenizer.chat_template = template
    return tokenizer


def test_messages_go_through_the_template() -> None:
    texts, ids = render([user("Hi"), user("3 + 5?")], make_tokenizer())
    assert texts == [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in ("Hi", "3 + 5?")]
    assert [tokens.count(0) for tokens in ids] == [2, 2]
    assert [tokens.count(1) for tokens in ids] == [1, 1]
    # Two markers, one end, and a token for each byte of "user\n", the content, "\n" and "assistant\n".
    assert [len(tokens) for tokens in ids] == [3 + 5 + 2 + 1 + 10, 3 + 5 + 6 + 1 + 10]


def test_strings_stay_as_they_are() -> None:
    texts, ids = render(["ab", "b"], make_tokenizer())
    assert texts == ["ab", "b"]
    assert ids[0][1:] == ids[1]
    assert [len(tokens) for tokens in ids] == [2, 1]


def test_double_bos() -> None:
    texts, ids = render([user("Hi"), user("Ho")], with_bos())
    assert texts[0] == "<|im_start|>[user]Hi[assistant]"
    assert [tokens.count(0) for tokens in ids] == [1, 1]
    assert ids[0][0] == 0


def test_a_tokenizer_that_adds_bos_adds_it_to_strings() -> None:
    texts, ids = render(["Hi"], with_bos())
    assert texts == ["Hi"]
    assert ids[0][0] == 0
    assert ids[0].count(0) == 1


def test_no_chat_template() -> None:
    with pytest.raises(UserError, match=r"has no chat template; use an instruction-tuned model, add a chat_template"):
        render([user("Hi")], with_bos(None))


def test_a_prompt_that_the_template_refuses() -> None:
    tokenizer = with_bos("{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}x")
    refused = [{"role": "system", "content": "Be brief."}, *user("Hi")]
    with pytest.raises(UserError, match=r"prompt 2: the chat template of .* refuses it \(no system role\)"):
        render([user("Hi"), refused], tokenizer)


def test_a_prompt_without_tokens() -> None:
    with pytest.raises(UserError, match=r"prompt 2 \(''\) has no tokens"):
        render(["a", ""], make_tokenizer())


def test_no_prompts() -> None:
    assert render([], make_tokenizer()) == ([], [])
