"""Prompts that are too long."""

import pytest

from rloo_pipeline.data.filter import fits, prompt_limit
from rloo_pipeline.errors import UserError


def test_too_long() -> None:
    kept_P, reasons = fits([8, 16, 20], prompt_limit(context=16, max_tokens=4))
    assert kept_P.tolist() == [True, False, False]
    assert reasons == {
        1: "too long: 16 tokens, a context of 16 leaves 12 beside max_tokens 4",
        2: "too long: 20 tokens, a context of 16 leaves 12 beside max_tokens 4",
    }
    assert kept_P.sum() + len(reasons) == 3


@pytest.mark.parametrize(("length", "kept"), [(12, True), (13, False)])
def test_the_last_token_of_the_context_is_used(length: int, kept: bool) -> None:
    kept_P, _ = fits([1, length], prompt_limit(context=16, max_tokens=4))
    assert kept_P.tolist() == [True, kept]


def test_a_lower_limit_of_ones_own() -> None:
    kept_P, reasons = fits([8, 11], prompt_limit(context=16, max_tokens=4, max_prompt_tokens=10))
    assert kept_P.tolist() == [True, False]
    assert reasons == {1: "too long: 11 tokens, prompts.max_prompt_tokens is 10"}


def test_a_higher_limit_of_ones_own_cannot_exceed_the_context() -> None:
    assert prompt_limit(context=16, max_tokens=4, max_prompt_tokens=100).tokens == 12


@pytest.mark.parametrize(("lengths", "shortest"), [([16, 20], 16), ([], 0)])
def test_none_is_left(lengths: list[int], shortest: int) -> None:
    with pytest.raises(UserError, match=rf"none of {len(lengths)} prompts .* the shortest has {shortest} tokens"):
        fits(lengths, prompt_limit(context=16, max_tokens=4))


def test_no_room_for_any_prompt() -> None:
    with pytest.raises(UserError, match=r"max_tokens is 16, but the policy's context has 16 tokens.*lower max_tokens"):
        prompt_limit(context=16, max_tokens=16)
