import json
import sys

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

from rloo_pipeline.errors import UserError
from rloo_pipeline.policy.batches import collate
from rloo_pipeline.policy.load import context_length, load_config, load_model, load_tokenizer
from rloo_pipeline.policy.logprobs import score_batch
from tests.enumeration import one_thread
from tests.tiny import make_model, make_policy

BATCH = collate([[3, 4, 5], [6, 7]], [[8, 9], [10, 11, 12]], np.arange(2))


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


def llama():
    return make_model(attention_dropout=0.1)


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, eos_token_id=1,
                                      bos_token_id=1))  # fmt: skip


def opt():
    sizes = {"hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 32}
    return OPTForCausalLM(OPTConfig(**sizes, word_embed_proj_dim=16, max_position_embeddings=16, layerdrop=0.5))


def passes(model):
    with torch.no_grad():
        return [score_batch(model, BATCH, 1.0).logprobs_BT for _ in range(2)]


@pytest.mark.parametrize("make", [llama, gpt2, opt])
def test_dropout(tmp_path, make):
    original = make()
    original.save_pretrained(tmp_path)
    torch.manual_seed(1)
    first, second = passes(original.train())
    assert not torch.equal(first, second)  # so there is something to switch off

    loaded = load_model(tmp_path, "float32")
    first, second = passes(loaded)
    assert torch.equal(first, second)

    loaded.train()
    loaded.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with_gradient = [score_batch(loaded, BATCH, 1.0).logprobs_BT for _ in range(2)]
    assert torch.equal(*with_gradient)
    assert (with_gradient[0] - first).exp().eq(1).all()


def test_the_saved_configuration_keeps_its_dropout(tmp_path):
    llama().save_pretrained(tmp_path)
    assert load_config(tmp_path).attention_dropout == 0
    assert json.loads((tmp_path / "config.json").read_text())["attention_dropout"] == 0.1


def test_precision_and_mode(tmp_path):
    make_policy(tmp_path)
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        model = load_model(tmp_path, name)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert not model.training


def test_context_length(tmp_path):
    make_policy(tmp_path, context=128)
    assert context_length(tmp_path) == 128
    gpt2().save_pretrained(tmp_path / "gpt2")  # which calls it n_positions
    assert context_length(tmp_path / "gpt2") == 16


def test_a_configuration_that_does_not_say_its_context(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bloom"}))
    with pytest.raises(UserError, match=r"config\.json: max_position_embeddings is missing"):
        context_length(tmp_path)


@pytest.mark.parametrize("content", [None, "{", '{"model_type": "nothing-known"}'])
def test_a_configuration_that_cannot_be_loaded(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json: no configuration"):
        load_config(tmp_path)


def test_no_tokenizer(tmp_path):
    make_model().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="no tokenizer could be loaded"):
        load_tokenizer(tmp_path)


def test_a_model_with_code_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "own.py").write_text(
        "from transformers import LlamaConfig\n\n\nclass Own(LlamaConfig):\n    model_type = 'own'\n"
    )
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}, "max_position_embeddings": 99}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert context_length(tmp_path, trust_remote_code=True) == 99
    with pytest.raises(UserError, match="trust_remote_code"):
        context_length(tmp_path)
