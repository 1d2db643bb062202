import pytest
import torch

from rloo_pipeline.policy.images import RowImages, Vision, placeholder_ids
from rloo_pipeline.policy.logprobs import score
from tests.pictures import PICTURES, PROMPTS
from tests.sampling import Counter, assert_ends_at_eos, chi_square_p, forward_logprobs, largest_gap, tokens
from tests.tiny import make_model, make_vlm
from tests.vllm.scenarios import EOS, FREQUENCY_PROMPT, PREFIXED, TINY

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def first(run):
    return run("first_process")


@pytest.fixture(scope="module")
def second(run):
    return run("second_process")


@pytest.fixture(scope="module")
def third(run):
    return run("third_process")


def assert_scored_by(model, requests, samples, temperature=0.7):
    for request, got in zip(requests, samples, strict=True):
        expected = forward_logprobs(model, request.prompt_token_ids, got.token_ids, temperature)
        assert list(got.logprobs) == pytest.approx(expected, abs=1e-4)


def test_two_processes_and_two_engine_seeds_give_the_same_bits(first, second):
    assert second["samples"] == first["samples"]


def test_logprobs_are_those_of_the_distribution_sampled(first):
    assert_scored_by(make_model(), TINY, first["samples"])


def test_seed_twins(first):
    assert first["again"] == first["samples"]
    assert len({tuple(ids) for ids in tokens(first["twins"])}) == 20


def test_batch_and_order_do_not_change_the_tokens(first):
    assert tokens(first["reversed"]) == tokens(first["samples"])
    assert tokens(first["alone"]) == tokens(first["samples"])[:4]
    assert largest_gap(first["reversed"], first["samples"]) < 1e-4
    assert largest_gap(first["alone"], first["samples"][:4]) < 1e-4


def test_earlier_requests_leave_no_trace(first, second):
    assert first["after_others"] == second["first_in_engine"]


def test_stale_cache(third):
    assert "did not reset its prefix cache" in third["unfinished"]


def test_shared_prefixes_are_scored_as_whole_sequences(first):
    assert_scored_by(make_model(), PREFIXED, first["after_others"])


def test_stale_weights(second):
    """An engine opened after another in one process samples from its own weights."""
    assert_scored_by(make_model(seed=1), TINY, second["other_weights"])


def test_defaults_of_the_model_change_nothing(first, second):
    assert second["defaults"] == first["samples"]


def test_eos_kept(second):
    assert {len(ids) for ids in tokens(second["endless"])} == {12}
    assert_ends_at_eos(second["endless"], second["ended"], EOS)


def test_eos_of_the_tokenizer_alone_ends_a_completion(second):
    assert_ends_at_eos(second["endless"], second["ended_by_tokenizer"], [second["tokenizer_eos"]])


def test_frequencies_are_those_of_the_exact_softmax(second):
    pairs = tokens(second["frequencies"])
    model = make_model()
    with torch.inference_mode():
        first_V = torch.softmax(model(torch.tensor([FREQUENCY_PROMPT])).logits[0, -1].double() / 0.7, -1)
        continued_VT = torch.tensor([[*FREQUENCY_PROMPT, token] for token in range(258)])
        second_V = first_V @ torch.softmax(model(continued_VT).logits[:, -1].double() / 0.7, -1)
    assert chi_square_p([pair[0] for pair in pairs], first_V) > 1e-3
    assert chi_square_p([pair[1] for pair in pairs], second_V) > 1e-3


def test_double_bos(third):
    """The ids given are the ids scored, though the tokenizer would put BOS before them once more."""
    model = make_model()
    for request, got in zip(TINY, third["bos"], strict=True):
        expected = forward_logprobs(model, [0, *request.prompt_token_ids], got.token_ids, temperature=0.7)
        assert list(got.logprobs) == pytest.approx(expected, abs=1e-4)


def test_too_long(third):
    assert "request 1: prompt of 25 tokens + max_tokens 8 is more than the 32 tokens" in third["too_long"]
    assert third["generated_before_the_refusal"] == 0
    assert len(third["just_fits"][0].token_ids) == 8


def test_an_engine_that_does_not_start_says_why(third):
    assert "vLLM does not start" in third["context_too_large"]
    assert "10000" in third["context_too_large"]


def test_progress_counts_every_request(first):
    assert first["counted"] == len(TINY)


def test_settings_hold_what_sampling_depended_on_and_no_path(first):
    settings = first["settings"]
    assert settings["engine"] == "vllm"
    assert settings["temperature"] == 0.7
    assert settings["logprobs_mode"] == "processed_logprobs"
    assert settings["eos_token_ids"] == [1]
    assert not [value for value in settings.values() if "/" in str(value)]


def test_images_are_seen_as_the_trainer_sees_them(third):
    model, processor = make_vlm("idefics3")
    vision = Vision(processor, placeholder_ids(model.config), "idefics3")
    _, prompts = vision.render(PROMPTS, PICTURES)
    rows = [row for row in range(len(PROMPTS)) for _ in (0, 1)]
    images = RowImages(vision, [PICTURES[row] for row in rows])
    completions = tokens(third["seen"])
    assert len({tuple(ids) for ids in completions}) > len(PROMPTS)
    got = score(model, [prompts[row] for row in rows], completions, 0.7, 200, Counter(), images)
    for logprobs, sample in zip(got, third["seen"], strict=True):
        assert logprobs.tolist() == pytest.approx(list(sample.logprobs), abs=1e-4)


def test_prompts_that_vllm_reads_otherwise_are_refused(third):
    assert "the policy's processor as other" in third["read_otherwise"]
