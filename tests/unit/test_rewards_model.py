"""Reward models: one score for each row, whatever the batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from rloo_pipeline.config import ExecutionConfig, RewardConfig
from rloo_pipeline.data.prompts import MESSAGES
from rloo_pipeline.errors import UserError
from rloo_pipeline.reward_config import FunctionReward, ModelReward
from rloo_pipeline.rewards.model import score_model, token_ids
from rloo_pipeline.rewards.score import score
from tests.tiny import make_model, make_tokenizer

TEXTS = ["ok", "a much longer answer, with words", "", "b<|im_end|>", "c" * 40, "<|im_end|><|im_end|>"]


def make_reward_model(directory: Path, kind: str = "llama", *, pad: int | None = 1, labels: int = 1) -> Path:
    """A random tiny classifier with the byte tokenizer; EOS is id 1, so pad 1 is pad = EOS."""
    torch.manual_seed(0)
    settings = {"vocab_size": 258, "num_labels": labels, "pad_token_id": pad, "initializer_range": 0.2}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 128}
    model: Any
    if kind == "llama":
        config = LlamaConfig(intermediate_size=48, **sizes, **settings, bos_token_id=None, eos_token_id=1)
        model = LlamaForSequenceClassification(config)
    elif kind == "gpt2":
        gpt2 = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=128, **settings, bos_token_id=1, eos_token_id=1)
        model = GPT2ForSequenceClassification(gpt2)
    else:
        bert = BertConfig(intermediate_size=48, **sizes, **(settings | {"pad_token_id": pad or 0}))
        model = BertForSequenceClassification(bert)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def rows(texts: list[str], *, conversational: bool = True) -> pa.Table:
    prompts: list[Any] = [f"Question {'?' * row}" for row in range(len(texts))]
    if conversational:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return pa.table(
        {
            "iteration": pa.array([1] * len(texts), pa.int32()),
            "prompt_id": [f"p{row}" for row in range(len(texts))],
            "sample_index": pa.array([0] * len(texts), pa.int32()),
            "completion_text": texts,
            "completion_token_ids": pa.array([[1]] * len(texts), pa.list_(pa.int32())),
            "prompt": pa.array(prompts, MESSAGES if conversational else pa.string()),
        }
    )


def config(directory: Path | str) -> RewardConfig:
    return ModelReward(name="judge", model=str(directory))


def alone(directory: Path, ids: list[list[int]]) -> list[float]:
    """What the model itself gives for each row without any padding."""
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float64).eval()
    with torch.no_grad():
        return [model(input_ids=torch.tensor([tokens])).logits.item() for tokens in ids]


@pytest.mark.parametrize("batch_tokens", [1, 150, 100_000])
@pytest.mark.parametrize(
    ("kind", "pad", "conversational"),
    [
        ("llama", 1, True),
        ("llama", 1, False),
        ("llama", None, True),
        ("llama", None, False),
        ("llama", 0, True),
        ("gpt2", 1, False),
        ("gpt2", None, False),
        ("bert", 1, True),
    ],
)
def test_score_is_that_of_the_row_alone(
    tmp_path: Path, kind: str, pad: int | None, conversational: bool, batch_tokens: int
) -> None:
    directory = make_reward_model(tmp_path / "model", kind, pad=pad)
    table = rows(TEXTS, conversational=conversational)
    expected = alone(directory, token_ids(table, make_tokenizer()))
    assert np.ptp(expected) > 0.01
    scores_N = score_model(config(directory), table, tmp_path, batch_tokens)
    np.testing.assert_allclose(scores_N, expected, atol=1e-5)


def test_a_row_with_nothing_but_the_pad_token(tmp_path: Path) -> None:
    directory = make_reward_model(tmp_path / "model", pad=1)
    table = rows(["<|im_end|>", "abc"], conversational=False).set_column(5, "prompt", pa.array(["<|im_end|>", "q"]))
    expected = alone(directory, [[1, 1], make_tokenizer()("qabc")["input_ids"]])
    np.testing.assert_allclose(score_model(config(directory), table, tmp_path, 1000), expected, atol=1e-5)


def test_its_own_template_and_tokens(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}<|im_end|>"
    ids = token_ids(rows(["yes"]), tokenizer)
    assert ids == [tokenizer("[user]Question [assistant]yes<|im_end|>")["input_ids"]]


def with_bos() -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 0)]
    )
    tokenizer.chat_template = "<|im_start|>{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer


@pytest.mark.parametrize("conversational", [True, False])
def test_double_bos(conversational: bool) -> None:
    ids = token_ids(rows(["yes"], conversational=conversational), with_bos())
    assert ids[0][0] == 0
    assert ids[0].count(0) == 1


def test_dropout_is_off(tmp_path: Path) -> None:
    directory = make_reward_model(tmp_path / "model", "bert")
    model = AutoModelForSequenceClassification.from_pretrained(directory)
    assert model.config.hidden_dropout_prob == 0.1
    first, second = (score_model(config(directory), rows(TEXTS), tmp_path, 1000) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_through_score_beside_a_function(tmp_path: Path) -> None:
    make_reward_model(tmp_path / "judge")
    (tmp_path / "reward.py").write_text("def one(prompts, **kwargs):\n    return [1] * len(prompts)\n")
    configs = [
        ModelReward(name="judge", model="judge", weight=2.0),
        FunctionReward(name="one", function="reward.py:one"),
    ]
    table = rows(TEXTS)
    scored = score(configs, table, tmp_path, ExecutionConfig(), global_step=0)
    expected = np.array(alone(tmp_path / "judge", token_ids(table, make_tokenizer())))
    np.testing.assert_allclose(scored["reward/judge"].to_numpy(), expected, atol=1e-5)
    np.testing.assert_allclose(scored["reward"].to_numpy(), 2 * expected + 1, atol=1e-5)


def test_more_than_one_logit(tmp_path: Path) -> None:
    make_reward_model(tmp_path / "model", labels=2)
    with pytest.raises(UserError, match="reward judge: model has 2 logits; a reward model has one"):
        score_model(config("model"), rows(["a"]), tmp_path, 1000)


def test_a_language_model_without_a_trained_head(tmp_path: Path) -> None:
    model = make_model()
    model.config.num_labels = 1
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=r"has no weights for score.weight: it is not a trained reward model"):
        score_model(config("model"), rows(["a"]), tmp_path, 1000)


@pytest.mark.parametrize("name", ["gone", "models/far/gone", "./gone"])
def test_missing_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=f"reward judge: {name} is neither a directory of the project with a sequence"):
        score_model(config(name), rows(["a"]), tmp_path, 1000)


def test_no_chat_template(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        token_ids(rows(["a"]), tokenizer)


def test_longer_than_the_model_can_see(tmp_path: Path) -> None:
    make_reward_model(tmp_path / "model")
    with pytest.raises(UserError, match=r"row 2, prompt_id p1, .* has 210 tokens for model, which takes 1 to 128"):
        score_model(config("model"), rows(["a", "b" * 200], conversational=False), tmp_path, 1000)


def test_a_model_that_gives_nan(tmp_path: Path) -> None:
    directory = make_reward_model(tmp_path / "model")
    model = AutoModelForSequenceClassification.from_pretrained(directory)
    torch.nn.init.constant_(model.score.weight, float("nan"))
    model.save_pretrained(directory)
    with pytest.raises(UserError, match="reward judge: model gives nan for row 1, prompt_id p0"):
        score_model(config("model"), rows(["a"]), tmp_path, 1000)
