import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rloo_pipeline.config import ExecutionConfig
from rloo_pipeline.engines import Request
from rloo_pipeline.engines.choose import open_engine
from rloo_pipeline.engines.transformers import draw
from rloo_pipeline.errors import UserError
from rloo_pipeline.seeds import derive
from tests.sampling import (
    Counter,
    add_sampling_defaults,
    assert_ends_at_eos,
    chi_square_p,
    forward_logprobs,
    largest_gap,
    ragged_requests,
    set_eos,
    tokens,
)
from tests.tiny import make_model, make_policy

REQUESTS = ragged_requests(13)


def sample(model, requests, *, batch_size=5, max_tokens=8, temperature=0.7, context=64):
    engine = open_engine(
        "transformers",
        model,
        max_model_len=context,
        max_tokens=max_tokens,
        temperature=temperature,
        dtype="float32",
        seed=0,
        execution=ExecutionConfig(generation_batch_size=batch_size),
    )
    return engine.generate(requests, Counter())


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def samples(policy):
    return sample(policy, REQUESTS)


def test_logprobs_are_those_of_a_plain_forward_pass(samples):
    model = make_model()
    for request, got in zip(REQUESTS, samples, strict=True):
        expected = forward_logprobs(model, request.prompt_token_ids, got.token_ids, temperature=0.7)
        assert got.logprobs == pytest.approx(expected, abs=1e-4)


def test_temperature():
    ids, logprobs = draw(torch.tensor([[2.0, 1.0, 0.0]]) / 0.5, torch.tensor([0.5], dtype=torch.float64))
    assert ids.tolist() == [0]
    assert logprobs.item() == pytest.approx(-0.14293, abs=1e-5)


@given(
    st.lists(st.sampled_from([-math.inf, -3.0, 0.0, 0.5, 2.0]), min_size=1, max_size=6).filter(
        lambda row: max(row) > -math.inf
    ),
    st.floats(0, 1, exclude_max=True),
)
def test_draw_inverts_the_cumulative_distribution(row, uniform):
    ids, logprobs = draw(torch.tensor([row]), torch.tensor([uniform], dtype=torch.float64))
    weights = [math.exp(value) for value in row]
    below = sum(weights[: ids.item()]) / sum(weights)
    probability = weights[ids.item()] / sum(weights)
    assert probability > 0
    assert below - 1e-6 <= uniform <= below + probability + 1e-6
    assert logprobs.item() == pytest.approx(math.log(probability), abs=1e-5)


def test_frequencies_are_those_of_the_exact_softmax(policy):
    prompt = [17, 101, 42]
    requests = [Request(prompt, derive(3, "frequencies", index)) for index in range(4000)]
    drawn = tokens(sample(set_eos(policy_copy(policy), None), requests, batch_size=1000, max_tokens=2))
    model = make_model()
    with torch.inference_mode():
        first_V = torch.softmax(model(torch.tensor([prompt])).logits[0, -1].double() / 0.7, -1)
        continued_VT = torch.tensor([[*prompt, token] for token in range(258)])
        second_V = first_V @ torch.softmax(model(continued_VT).logits[:, -1].double() / 0.7, -1)
    assert chi_square_p([pair[0] for pair in drawn], first_V) > 1e-3
    assert chi_square_p([pair[1] for pair in drawn], second_V) > 1e-3


def policy_copy(policy, **overrides):
    return make_policy(policy.parent / f"copy{len(list(policy.parent.iterdir()))}", **overrides)


def test_seed_twins(policy, samples):
    assert sample(policy, REQUESTS) == samples
    same_prompt = [Request([5, 6, 7], seed) for seed in range(20)]
    assert len({tuple(ids) for ids in tokens(sample(policy, same_prompt))}) == 20


@pytest.mark.parametrize("batch_size", [1, 3, 13])
def test_batch_and_order_do_not_change_the_tokens(policy, samples, batch_size):
    reversed_samples = sample(policy, REQUESTS[::-1], batch_size=batch_size)[::-1]
    assert tokens(reversed_samples) == tokens(samples)
    assert largest_gap(reversed_samples, samples) < 1e-4


def test_eos_kept(policy):
    eos = list(range(40, 80))
    endless = sample(set_eos(policy_copy(policy), None), REQUESTS, max_tokens=12)
    ended = sample(set_eos(policy_copy(policy), eos), REQUESTS, max_tokens=12)
    assert {len(ids) for ids in tokens(endless)} == {12}
    assert_ends_at_eos(endless, ended, eos)


def test_defaults_of_the_model_change_nothing(policy, samples):
    assert sample(add_sampling_defaults(policy_copy(policy)), REQUESTS) == samples


def test_dropout(policy, samples):
    assert sample(policy_copy(policy, attention_dropout=0.1), REQUESTS) == samples


def test_too_long(policy):
    engine = open_engine(
        "transformers",
        policy,
        max_model_len=16,
        max_tokens=4,
        temperature=1.0,
        dtype="float32",
        seed=0,
        execution=ExecutionConfig(),
    )
    counter = Counter()
    fits, too_long = Request([5] * 12, 1), Request([5] * 13, 2)
    with pytest.raises(UserError, match=r"request 1: prompt of 13 tokens \+ max_tokens 4 .* 16 tokens"):
        engine.generate([fits, too_long], counter)
    assert counter.done == 0
    assert len(engine.generate([fits], counter)[0].token_ids) == 4
    assert counter.done == 1


def test_a_prompt_without_tokens_is_refused(policy):
    with pytest.raises(UserError, match="request 0: the prompt has no tokens"):
        sample(policy, [Request([], 1)])


def test_a_directory_without_a_model_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere: no model here"):
        sample(tmp_path / "nowhere", REQUESTS)


def test_settings_hold_what_sampling_depended_on_and_no_path(policy):
    engine = open_engine(
        "transformers",
        policy,
        max_model_len=64,
        max_tokens=8,
        temperature=0.7,
        dtype="bfloat16",
        seed=0,
        execution=ExecutionConfig(),
    )
    settings = engine.settings
    assert settings["temperature"] == 0.7
    assert settings["max_tokens"] == 8
    assert settings["dtype"] == "bfloat16"
    assert settings["eos_token_ids"] == [1]
    assert str(policy) not in repr(settings)
    engine.close()
