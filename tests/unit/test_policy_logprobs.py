import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig, LlamaForCausalLM

from rloo_pipeline.errors import UserError
from rloo_pipeline.manifest import write_model_manifest
from rloo_pipeline.policy import logprobs
from rloo_pipeline.policy.batches import collate
from rloo_pipeline.policy.handle import open_policy
from rloo_pipeline.policy.logprobs import Scorer, check_head, score, score_batch
from tests.enumeration import one_thread
from tests.sampling import Counter
from tests.tiny import make_model, make_policy

GENERATOR = np.random.default_rng(0)
PROMPTS = [GENERATOR.integers(2, 258, length) for length in (3, 9, 1, 5, 7)]
COMPLETIONS = [GENERATOR.integers(2, 258, length) for length in (4, 1, 6, 3, 8)]
TEMPERATURE = 0.7


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model():
    return make_model().double()


@torch.no_grad()
def token_by_token(model, prompt, completion, temperature):
    """Each token's log-prob from a forward pass over what stands before it, and nothing else."""
    values = []
    for step, token in enumerate(completion):
        before = torch.tensor([[*prompt, *completion[:step]]])
        logits_V = model(input_ids=before, use_cache=False).logits[0, -1].double() / temperature
        values.append((logits_V[token] - logits_V.logsumexp(0)).item())
    return np.array(values)


def assert_rows_equal(got, expected, tolerance):
    assert [len(row) for row in got] == [len(row) for row in expected]
    for got_T, expected_T in zip(got, expected, strict=True):
        np.testing.assert_allclose(got_T, expected_T, rtol=0, atol=tolerance)


def rows_of_batch(model, prompts, completions, temperature=TEMPERATURE):
    scores = score_batch(model, collate(prompts, completions, np.arange(len(prompts))), temperature)
    return [row[: len(ids)] for row, ids in zip(scores.logprobs_BT.detach().numpy(), completions, strict=True)]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_shift(model, temperature):
    expected = [token_by_token(model, p, c, temperature) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    assert_rows_equal(rows_of_batch(model, PROMPTS, COMPLETIONS, temperature), expected, 1e-12)
    assert_rows_equal(score(model, PROMPTS, COMPLETIONS, temperature, 20, Counter()), expected, 1e-6)


def test_eos_kept():
    model = make_model(vocab_size=16, eos_token_id=2, pad_token_id=2).double()
    prompts, completions = [[5, 6], [7]], [[11, 12, 2], [3, 4, 5, 6, 7]]
    batch = collate(prompts, completions, np.arange(2))
    assert batch.completion_mask_BT[0].tolist() == [True, True, True, False, False]
    assert batch.completion_mask_BT[0].sum() == 3
    scores = score(model, prompts, completions, 1.0, 100, Counter())
    assert [len(row) for row in scores] == [3, 5]
    np.testing.assert_allclose(scores[0], token_by_token(model, [5, 6], [11, 12, 2], 1.0), atol=1e-6)


def test_temperature():
    """Hidden states of length 1 along one axis and an output layer that makes them the logits [2, 1, 0]."""
    model = make_model(vocab_size=3, tie_word_embeddings=False, eos_token_id=None, pad_token_id=None).double()
    with torch.no_grad():
        hidden = model.base_model(input_ids=torch.tensor([[1]])).last_hidden_state[0, 0]
        model.lm_head.weight[:] = torch.tensor([2.0, 1.0, 0.0]).double()[:, None] * hidden / hidden.dot(hidden)
    assert rows_of_batch(model, [[1]], [[0]], 0.5)[0][0] == pytest.approx(-0.14293, abs=5e-6)
    assert rows_of_batch(model, [[1]], [[0]], 1.0)[0][0] == pytest.approx(-0.40760, abs=1e-5)


@pytest.mark.parametrize("batch_tokens", [1, 13, 30, 1000])
def test_neither_batch_size_nor_padding_changes_a_score(model, batch_tokens):
    counter = Counter()
    got = score(model, PROMPTS, COMPLETIONS, TEMPERATURE, batch_tokens, counter)
    alone = [rows_of_batch(model, [p], [c])[0] for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    assert_rows_equal(got, alone, 1e-6)
    assert counter.done == 5


def test_padding_is_0_and_changes_nothing(model):
    alone = rows_of_batch(model, PROMPTS[:1], COMPLETIONS[:1])[0]
    scores = score_batch(model, collate(PROMPTS, COMPLETIONS, np.arange(5)), TEMPERATURE)
    together_BT = scores.logprobs_BT.detach().numpy()
    np.testing.assert_allclose(together_BT[0, :4], alone, rtol=0, atol=1e-12)
    assert not together_BT[0, 4:].any()


def test_entropy_is_summed_over_completion_tokens(model):
    expected = 0.0
    with torch.no_grad():
        for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
            ids = torch.tensor([[*prompt, *completion]])
            logits_TV = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
            expected += torch.distributions.Categorical(logits=logits_TV).entropy().sum().item()
    scores = score_batch(model, collate(PROMPTS, COMPLETIONS, np.arange(5)), TEMPERATURE)
    assert scores.entropy.item() == pytest.approx(expected, rel=1e-10)
    assert not scores.entropy.requires_grad


def gradients(model):
    model.zero_grad()
    logprobs_BT = score_batch(model, collate(PROMPTS, COMPLETIONS, np.arange(5)), TEMPERATURE).logprobs_BT
    (logprobs_BT * torch.arange(1, 6)[:, None]).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_chunks_of_logits_change_neither_values_nor_gradients(model, monkeypatch):
    whole, whole_gradients = rows_of_batch(model, PROMPTS, COMPLETIONS), gradients(model)
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", 3 * 258 + 1)
    sizes = []
    hook = model.lm_head.register_forward_hook(lambda _module, _input, output: sizes.append(output.shape[0]))
    assert_rows_equal(rows_of_batch(model, PROMPTS, COMPLETIONS), whole, 1e-12)
    with torch.no_grad():
        assert_rows_equal(rows_of_batch(model, PROMPTS, COMPLETIONS), whole, 1e-12)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, whole_gradients[name], rtol=0, atol=1e-10)
    hook.remove()
    assert max(sizes) == 3
    assert sum(sizes) == 22 * 4  # three forward passes and one recomputation in the backward pass


def test_half_softmax():
    model = make_model().bfloat16()
    seen = []
    hook = model.lm_head.register_forward_hook(lambda _module, _input, output: seen.append(output))
    with torch.no_grad():
        got_BT = score_batch(model, collate(PROMPTS, COMPLETIONS, np.arange(5)), TEMPERATURE).logprobs_BT
    hook.remove()
    (logits_RV,) = seen
    assert logits_RV.dtype == torch.bfloat16
    assert got_BT.dtype == torch.float32
    expected_RV = torch.log_softmax(logits_RV.double() / TEMPERATURE, dim=-1)
    expected_R = expected_RV.gather(1, torch.from_numpy(np.concatenate(COMPLETIONS))[:, None])[:, 0]
    got_R = torch.cat([row[: len(ids)] for row, ids in zip(got_BT, COMPLETIONS, strict=True)])
    torch.testing.assert_close(got_R.double(), expected_R, rtol=0, atol=1e-4)


SIZES = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
ARCHITECTURES = {
    "gemma2": (Gemma2Config, {"head_dim": 16, "final_logit_softcapping": 3.0}),
    "granite": (GraniteConfig, {"logits_scaling": 4.0}),
    "cohere": (CohereConfig, {"logit_scale": 0.25}),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_scaled_or_capped_by_the_architecture(name):
    config_class, extra = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**SIZES, **extra)).eval()
    check_head(model)
    model = model.double()
    expected = [token_by_token(model, p, c, TEMPERATURE) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    assert_rows_equal(rows_of_batch(model, PROMPTS, COMPLETIONS), expected, 1e-6)


class Shifted(LlamaForCausalLM):
    """Adds to one token's logit what no setting tells of."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits[..., 7] += 0.5
        return output


def test_an_unknown_change_of_the_logits_is_refused():
    model = make_model()
    check_head(model)
    model.__class__ = Shifted
    with pytest.raises(UserError, match="llama: this architecture changes its logits"):
        check_head(model)


def table_of(prompts, completions):
    lists = pa.list_(pa.int32())
    return pa.table(
        {
            "prompt_token_ids": pa.array([list(map(int, ids)) for ids in prompts], lists),
            "completion_token_ids": pa.array([list(map(int, ids)) for ids in completions], lists),
        }
    )


def test_scorer_gives_a_list_column_and_asks_the_model_once_per_table(tmp_path):
    write_model_manifest(make_policy(tmp_path), trust_remote_code=False)
    scorer = Scorer(open_policy(tmp_path), "float32", TEMPERATURE, 20, "policy")
    table = table_of(PROMPTS, COMPLETIONS)
    first = scorer(table)
    assert first.type == pa.list_(pa.float32())
    assert scorer(table) is first
    assert scorer(table_of(PROMPTS[:1], COMPLETIONS[:1]))[0].as_py() == pytest.approx(first[0].as_py(), abs=1e-4)
    expected = [token_by_token(make_model(), p, c, TEMPERATURE) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    assert_rows_equal(first.to_pylist(), expected, 1e-4)
