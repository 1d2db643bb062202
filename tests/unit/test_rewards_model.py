"""Reward models: one score for each row, whatever the batch."""

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BartConfig,
    BertConfig,
    DebertaV2Config,
    FNetConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    RobertaConfig,
    XLNetConfig,
)

from rloo_pipeline.check.models import look
from rloo_pipeline.config import ExecutionConfig
from rloo_pipeline.data.prompts import MESSAGES
from rloo_pipeline.errors import UserError
from rloo_pipeline.reward_config import ModelReward
from rloo_pipeline.rewards.model import open_model, token_ids
from rloo_pipeline.rewards.scored import Scored
from tests.tiny import make_model, make_tokenizer

TEXTS = [
    "ok",
    "a much longer answer, with words",
    "",
    "b<|im_end|>",
    "c" * 40,
    "<|im_end|>d",
    "e<|im_start|>",
    "<|im_end|><|im_end|>",
]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
CONFIGS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen3": Qwen3Config,
    "gpt2": GPT2Config,
    "bert": BertConfig,
    "roberta": RobertaConfig,
    "bart": BartConfig,
    "deberta": DebertaV2Config,
    "fnet": FNetConfig,
    "xlnet": XLNetConfig,
}


def make_reward_model(
    directory: Path, kind: str = "llama", *, pad: int | None = 1, labels: int = 1, tokenizer: Any = None
) -> Path:
    """A random tiny classifier with the byte tokenizer; EOS is id 1, so pad 1 is pad = EOS."""
    settings: dict[str, Any] = {"vocab_size": 258, "num_labels": labels, "pad_token_id": pad, "eos_token_id": 1}
    settings |= {"bos_token_id": None, "max_position_embeddings": 128}
    if kind in ("llama", "mistral", "qwen3", "bert", "roberta", "deberta", "fnet"):
        settings |= SIZES
    if kind in ("mistral", "qwen3"):
        settings |= {"num_key_value_heads": 1, "head_dim": 16}
    elif kind == "gpt2":
        settings |= {"n_embd": 32, "n_layer": 2, "n_head": 2}
    elif kind == "xlnet":
        del settings["max_position_embeddings"]  # it has no limit
        settings |= {"d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 48}
    elif kind == "bart":
        small = {"layers": 1, "attention_heads": 2, "ffn_dim": 48}
        settings |= {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in small.items()}
        settings |= {"d_model": 32, "init_std": 0.2}
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(CONFIGS[kind](initializer_range=0.2, **settings))
    model.save_pretrained(directory)
    (tokenizer or make_tokenizer()).save_pretrained(directory)
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


def scored(root: Path, table: pa.Table, batch_tokens: int = 1000, *, model: str = "model", **settings: Any) -> Scored:
    config = ModelReward(name="quality", model=model, **settings)
    with open_model(config, root, ExecutionConfig(rewards_batch_tokens=batch_tokens)) as score:
        return score(table)


def alone(directory: Path, ids: list[list[int]], logit: int = 0, dtype: torch.dtype = torch.float64) -> list[float]:
    """What the library gives for each row without any padding."""
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=dtype).eval()
    with torch.no_grad():
        return [model(input_ids=torch.tensor([tokens])).logits[0, logit].item() for tokens in ids]


@pytest.mark.parametrize(
    ("kind", "pad", "conversational"),
    [
        ("llama", 1, True),
        ("llama", 1, False),
        ("llama", None, True),
        ("llama", None, False),
        ("llama", 0, True),
        ("llama", -1, False),
        ("llama", ord("c") - 30, False),
        ("mistral", 1, False),
        ("qwen3", None, False),
        ("gpt2", 1, False),
        ("gpt2", None, False),
        ("bert", 1, True),
        ("bert", 0, False),
        ("roberta", 1, False),
        ("deberta", 0, False),
        ("bart", 0, False),
        ("fnet", 0, False),
    ],
)
def test_score_is_that_of_the_row_alone(tmp_path: Path, kind: str, pad: int | None, conversational: bool) -> None:
    directory = make_reward_model(tmp_path / "model", kind, pad=pad)
    table = rows([f"{text}<|im_end|>" if kind == "bart" else text for text in TEXTS], conversational=conversational)
    expected = alone(directory, token_ids(table, make_tokenizer()))
    assert np.ptp(expected) > 0.01
    for batch_tokens in (150, 100_000):
        found = scored(tmp_path, table, batch_tokens)
        assert found.errors == {}
        np.testing.assert_allclose(found.scores_N, expected, atol=1e-5)


def test_a_row_that_ends_in_the_pad_token_is_scored_before_it(tmp_path: Path) -> None:
    """By hand: the head's weights on the hidden state of the last token that is not the pad token."""
    directory = make_reward_model(tmp_path / "model", pad=1)
    table = rows(["b<|im_end|>", "<|im_end|>c" * 9], conversational=False)
    ids = token_ids(table, make_tokenizer())
    assert ids[0][-1] == 1
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float64).eval()
    with torch.no_grad():
        hidden = [model.model(input_ids=torch.tensor([tokens])).last_hidden_state[0] for tokens in ids]
        expected = [model.score(hidden[0][-2]).item(), model.score(hidden[1][-1]).item()]
    np.testing.assert_allclose(scored(tmp_path, table).scores_N, expected, atol=1e-5)


def test_a_row_with_nothing_but_the_pad_token(tmp_path: Path) -> None:
    directory = make_reward_model(tmp_path / "model", pad=1)
    table = rows(["<|im_end|>", "abc"], conversational=False).set_column(5, "prompt", pa.array(["<|im_end|>", "q"]))
    expected = alone(directory, [[1, 1], make_tokenizer()("qabc")["input_ids"]])
    np.testing.assert_allclose(scored(tmp_path, table).scores_N, expected, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("stored", [True, False])
def test_what_the_tokenizer_pads_and_cuts_is_left_aside(tmp_path: Path, side: str, stored: bool) -> None:
    """Tokenizers of sentence encoders carry padding and truncation in their files."""
    tokenizer = make_tokenizer()
    if stored:
        tokenizer.backend_tokenizer.enable_padding(direction=side, length=64)
        tokenizer.backend_tokenizer.enable_truncation(8)
    directory = make_reward_model(tmp_path / "model", tokenizer=tokenizer)
    settings = directory / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "padding_side": side}))
    assert AutoTokenizer.from_pretrained(directory).padding_side == side
    table = rows(TEXTS, conversational=False)
    expected = alone(directory, token_ids(table, make_tokenizer()))
    np.testing.assert_allclose(scored(tmp_path, table).scores_N, expected, atol=1e-5)


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
    assert AutoModelForSequenceClassification.from_pretrained(directory).config.hidden_dropout_prob == 0.1
    first, second = (scored(tmp_path, rows(TEXTS)) for _ in range(2))
    np.testing.assert_array_equal(first.scores_N, second.scores_N)


def test_bfloat16(tmp_path: Path) -> None:
    directory = make_reward_model(tmp_path / "model")
    expected = alone(directory, token_ids(rows(TEXTS), make_tokenizer()))
    found = scored(tmp_path, rows(TEXTS), dtype="bfloat16").scores_N
    np.testing.assert_allclose(found, expected, atol=0.1)
    assert np.abs(found - expected).max() > 1e-4
    assert found.dtype == np.float64


@pytest.mark.parametrize("logit", [0, 2])
def test_one_logit_of_several(tmp_path: Path, logit: int) -> None:
    directory = make_reward_model(tmp_path / "model", labels=3)
    expected = alone(directory, token_ids(rows(TEXTS), make_tokenizer()), logit)
    np.testing.assert_allclose(scored(tmp_path, rows(TEXTS), logit=logit).scores_N, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("labels", "logit", "told"),
    [
        (2, None, "model model: has 2 logits; set logit to the one that is the score, 0 to 1"),
        (2, 2, "model model: logit is 2, but it has 2, counted from 0"),
        (1, 1, "model model: logit is 1, but it has 1, counted from 0"),
    ],
)
def test_a_logit_that_is_not_there(tmp_path: Path, labels: int, logit: int | None, told: str) -> None:
    make_reward_model(tmp_path / "model", labels=labels)
    with pytest.raises(UserError, match=f"reward quality: {told}"):
        scored(tmp_path, rows(["a"]), logit=logit)


def test_several_models_one_after_another_give_their_memory_back(tmp_path: Path) -> None:
    directories = [make_reward_model(tmp_path / name, name) for name in ("bert", "gpt2")]
    table, kept = rows(["abc"], conversational=False), []
    for directory in directories:
        config = ModelReward(name="quality", model=directory.name)
        with open_model(config, tmp_path, ExecutionConfig()) as score:
            score(table)
            weights = [weakref.ref(item) for item in gc.get_objects() if type(item) is torch.nn.Parameter]
            assert sum(ref().numel() for ref in weights if ref() is not None and ref().device.type == "cpu") > 1000
        kept.append(score)
        left = [item for item in gc.get_objects() if type(item) is torch.nn.Parameter and item.device.type == "cpu"]
        assert left == []


def test_a_model_inside_a_python_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "packages" / "tiny_scorer"
    directory = make_reward_model(package / "weights")
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(package.parent))
    expected = alone(directory, token_ids(rows(TEXTS), make_tokenizer()))
    found = scored(tmp_path, rows(TEXTS), model="package:tiny_scorer/weights")
    np.testing.assert_allclose(found.scores_N, expected, atol=1e-5)


def test_a_language_model_without_a_trained_head(tmp_path: Path) -> None:
    model = make_model()
    model.config.num_labels = 1
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=r"has no weights for score.weight: it is not a trained reward model"):
        scored(tmp_path, rows(["a"]))


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    make_reward_model(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"reward quality: model model: no \.safetensors file"):
        scored(tmp_path, rows(["a"]))


def test_weights_that_are_not_whole(tmp_path: Path) -> None:
    weights = make_reward_model(tmp_path / "model") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match="reward quality: model model: not a sequence classification model with its"):
        scored(tmp_path, rows(["a"]))
    with pytest.raises(UserError, match=r"model: a \.safetensors file of it is not whole"):
        look("model", None, tmp_path, "AutoModelForSequenceClassification")


def test_no_tokenizer_beside_it(tmp_path: Path) -> None:
    for path in make_reward_model(tmp_path / "model").glob("token*"):
        path.unlink()
    with pytest.raises(
        UserError, match="reward quality: model model: not a sequence classification model with its tok"
    ):
        scored(tmp_path, rows(["a"]))


@pytest.mark.parametrize(
    ("name", "told"), [("gone", "no such directory below"), ("./gone", "no such"), ("a/gone", "neither a directory of")]
)
def test_missing_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, told: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=f"reward quality: model {name}: {told}"):
        scored(tmp_path, rows(["a"]), model=name)


def test_no_chat_template(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        token_ids(rows(["a"]), tokenizer)


@pytest.mark.parametrize(("kind", "longest"), [("llama", 128), ("roberta", 126)])
def test_a_row_longer_than_the_model_can_see(tmp_path: Path, kind: str, longest: int) -> None:
    directory = make_reward_model(tmp_path / "model", kind)
    # The prompts have 9, 10 and 11 tokens.
    table = rows(["a", "b" * (longest - 10), "b" * (longest - 10)], conversational=False)
    found = scored(tmp_path, table)
    assert found.errors == {2: f"has {longest + 1} tokens for model, which takes 1 to {longest}"}
    expected = alone(directory, token_ids(table, make_tokenizer())[:2])
    np.testing.assert_allclose(found.scores_N, [*expected, np.nan], atol=1e-5)


def test_a_model_without_a_limit_of_length(tmp_path: Path) -> None:
    directory = make_reward_model(tmp_path / "model", "xlnet", pad=0)
    table = rows(["a", "b" * 300], conversational=False)
    expected = alone(directory, token_ids(table, make_tokenizer()), dtype=torch.float32)  # it has no float64
    np.testing.assert_allclose(scored(tmp_path, table).scores_N, expected, atol=1e-5)


def test_a_row_without_tokens(tmp_path: Path) -> None:
    make_reward_model(tmp_path / "model")
    table = rows(["a", ""], conversational=False).set_column(5, "prompt", pa.array(["a", ""]))
    assert scored(tmp_path, table).errors == {1: "has 0 tokens for model, which takes 1 to 128"}


def test_a_row_that_gives_nan(tmp_path: Path) -> None:
    directory = make_reward_model(tmp_path / "model")
    model = AutoModelForSequenceClassification.from_pretrained(directory)
    torch.nn.init.constant_(model.model.embed_tokens.weight[make_tokenizer()("z")["input_ids"][0]], float("nan"))
    model.save_pretrained(directory)
    found = scored(tmp_path, rows(["fine", "z", "fine too"]))
    assert found.errors == {1: "model gives nan"}
    assert np.isnan(found.scores_N).tolist() == [False, True, False]
