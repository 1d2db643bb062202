"""Judges: what they are asked, and how an answer becomes a score."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
)

from rloo_pipeline.config import ExecutionConfig
from rloo_pipeline.data.prompts import MESSAGES
from rloo_pipeline.errors import UserError
from rloo_pipeline.reward_config import FunctionReward, JudgeReward, ModelReward
from rloo_pipeline.rewards.call import TrainerState
from rloo_pipeline.rewards.judge import numbers, open_judge
from rloo_pipeline.rewards.kept import Shards
from rloo_pipeline.rewards.model import open_model
from rloo_pipeline.rewards.question import questions
from rloo_pipeline.rewards.score import score_shards
from rloo_pipeline.rewards.scored import Scored
from rloo_pipeline.shards import read_table
from tests.tiny import make_tokenizer
from tests.unit.test_rewards_model import make_reward_model

TEXTS = ["ok", "a much longer answer, with words", "", "b", "c" * 40, "{prompt} {answer} {{x}}"]
ENDS = [1, *range(2, 258, 6)]  # so that answers end at different lengths
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
CONFIGS = {
    "llama": (LlamaConfig, SIZES),
    "gemma2": (Gemma2Config, SIZES | {"num_key_value_heads": 1, "head_dim": 16, "final_logit_softcapping": 3.0}),
    "gpt2": (GPT2Config, {"n_embd": 32, "n_layer": 2, "n_head": 2}),
}


def make_judge(directory: Path, kind: str = "llama", *, template: bool = True) -> Path:
    """A random tiny language model with the byte tokenizer, whose defaults would sample and penalize."""
    config, sizes = CONFIGS[kind]
    settings = {"vocab_size": 258, "max_position_embeddings": 160, "bos_token_id": None, "eos_token_id": 1}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**sizes, **settings, pad_token_id=1, initializer_range=0.3))
    model.save_pretrained(directory)
    defaults = {
        "do_sample": True,
        "temperature": 5.0,
        "repetition_penalty": 9.0,
        "no_repeat_ngram_size": 1,
        "min_new_tokens": 9,
    }
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS, **defaults}))
    tokenizer = make_tokenizer()
    if not template:
        tokenizer.chat_template = None
    tokenizer.save_pretrained(directory)
    return directory


def rows(texts: list[str] = TEXTS, prompts: list[Any] | None = None, **columns: Any) -> pa.Table:
    prompts = prompts or [f"Question {'?' * row}" for row in range(len(texts))]
    return pa.table(
        {
            "prompt_id": [f"p{row}" for row in range(len(texts))],
            "completion_text": texts,
            "prompt_text": ["rendered"] * len(texts),
            "prompt": pa.array(prompts, pa.string() if isinstance(prompts[0], str) else MESSAGES),
            **columns,
        }
    )


def config(**settings: Any) -> JudgeReward:
    return JudgeReward(name="good", judge="judge", **({"prompt": "{prompt} > {completion} ?"} | settings))


def scored(root: Path, table: pa.Table, batch_tokens: int = 1000, **settings: Any) -> Scored:
    execution = ExecutionConfig(rewards_batch_tokens=batch_tokens)
    with open_judge(config(**settings), root, execution) as score:
        return score(table)


def asked_ids(table: pa.Table, *, template: bool) -> list[list[int]]:
    """The rows' questions, written out by hand."""
    pairs = zip(table["prompt"].to_pylist(), table["completion_text"].to_pylist(), strict=True)
    texts = [f"{prompt} > {completion} ?" for prompt, completion in pairs]
    if template:
        texts = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in texts]
    return [make_tokenizer()(text)["input_ids"] for text in texts]


@pytest.mark.parametrize(("kind", "template"), [("llama", True), ("llama", False), ("gpt2", True), ("gemma2", False)])
def test_probability_is_that_of_the_row_alone(tmp_path: Path, kind: str, template: bool) -> None:
    directory = make_judge(tmp_path / "judge", kind, template=template)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    (yes,) = make_tokenizer()("Y")["input_ids"]
    with torch.no_grad():
        logits = [model(input_ids=torch.tensor([ids])).logits[0, -1] for ids in asked_ids(rows(), template=template)]
    expected = [torch.softmax(row, -1)[yes].item() for row in logits]
    assert np.ptp(expected) > 1e-4
    for batch_tokens in (1, 150, 100_000):
        found = scored(tmp_path, rows(), batch_tokens, token="Y")
        assert found.errors == {}
        np.testing.assert_allclose(found.scores_N, expected, atol=1e-5)


def test_a_judge_that_always_says_seven(tmp_path: Path) -> None:
    """Its last hidden state is all ones, so a token's logit is the sum of its embedding: 4 for 7, else 0."""
    directory = make_judge(tmp_path / "judge", "gpt2")
    model = AutoModelForCausalLM.from_pretrained(directory)
    (seven,) = make_tokenizer()("7")["input_ids"]
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.fill_(1.0)
        model.transformer.wte.weight.zero_()[seven] = 1 / 8
    model.save_pretrained(directory)
    answered = scored(tmp_path, rows(), pattern=r"(\d\d\d)", max_tokens=5)
    assert answered.errors == {}
    np.testing.assert_array_equal(answered.scores_N, [777.0] * len(TEXTS))
    np.testing.assert_allclose(scored(tmp_path, rows(), token="7").scores_N, np.exp(4) / (np.exp(4) + 257), atol=1e-6)
    np.testing.assert_allclose(scored(tmp_path, rows(), token="8").scores_N, 1 / (np.exp(4) + 257), atol=1e-6)


def greedy(model: Any, ids: list[int], max_tokens: int) -> str:
    """The answer to one row, token by token, each from a pass over the whole of it."""
    tokens = list(ids)
    with torch.no_grad():
        for _ in range(max_tokens):
            token = int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax())
            if token in ENDS:
                break
            tokens.append(token)
    return str(make_tokenizer().decode(tokens[len(ids) :], skip_special_tokens=True))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_answer_is_that_of_the_row_alone(tmp_path: Path, kind: str) -> None:
    """No number can be found, so each row's error tells its answer."""
    directory = make_judge(tmp_path / "judge", kind)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    answers = [greedy(model, ids, 12) for ids in asked_ids(rows(), template=True)]
    assert len(set(answers)) > 2
    assert len(set(map(len, answers))) > 2
    pattern = "(q{9})"
    expected = {
        row: f"what pattern {pattern!r} asks for is nowhere in the judge's answer {answer!r}"
        for row, answer in enumerate(answers)
    }
    for batch_tokens in (1, 300, 100_000):
        found = scored(tmp_path, rows(), batch_tokens, pattern=pattern, max_tokens=12)
        assert found.errors == expected
        assert np.isnan(found.scores_N).all()


@pytest.mark.parametrize(
    ("answer", "pattern", "number", "lack"),
    [
        ("Score: 7", r"Score: (\d+)", 7.0, ""),
        ("I say 3.5, not 4", r"([0-9.]+)", 3.5, ""),
        ("-2e-1 of 10", r"^(\S+)", -0.2, ""),
        ("none", r"(\d+)", np.nan, "is nowhere"),
        ("7/10", r"(.*)", np.nan, "is no finite number: '7/10'"),
        ("inf", r"(.*)", np.nan, "is no finite number: 'inf'"),
        ("no", r"no(\d)?", np.nan, "is no finite number: None"),
        ("", r"(\d)", np.nan, "is nowhere"),
    ],
)
def test_the_number_in_an_answer(answer: str, pattern: str, number: float, lack: str) -> None:
    numbers_N, errors = numbers([answer], re.compile(pattern))
    told = f"what pattern {pattern!r} asks for {lack} in the judge's answer {answer!r}"
    assert errors == ({0: told} if lack else {})
    np.testing.assert_array_equal(numbers_N, [number])


def test_a_long_answer_is_shortened_in_the_message() -> None:
    _, errors = numbers(["x" * 300], re.compile(r"(\d)"))
    assert errors[0].endswith(f"in the judge's answer {'x' * 200!r}...")


def filled(template: str, table: pa.Table) -> list[str]:
    texts, errors = questions(template, table, "reward good: judge judge")
    assert errors == {}
    return texts


@given(st.text(), st.text(), st.text())
def test_what_is_filled_in_comes_out_verbatim(prompt: str, completion: str, answer: str) -> None:
    table = rows([completion], [prompt], answer=[answer])
    assert filled("Q: {prompt}\nA: {completion}\nRight: {answer}", table) == [
        f"Q: {prompt}\nA: {completion}\nRight: {answer}"
    ]


def test_braces_in_a_completion_are_not_filled_in() -> None:
    texts = ["{prompt} {answer} {{answer}} {nothing} \\1 \\g<0>"]
    assert filled("[{completion}][{answer}]", rows(texts, ["p"], answer=["{completion}"])) == [
        f"[{texts[0]}][{{completion}}]"
    ]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ('{"score": 5} {completion}', '{"score": 5} done'),
        ('Answer as {"answer": "{completion}", "a": {"b": {}}}', 'Answer as {"answer": "done", "a": {"b": {}}}'),
        ("{{completion}} is {completion}", "{completion} is done"),
        (r"\frac{{a}}{2} {completion}", r"\frac{a}{2} done"),
        ("{gold answer} {count} {ok} {tags} {completion}", '42 3 true ["a", "é"] done'),
        ("{prompt_id}: {completion}{", "p0: done{"),
    ],
)
def test_braces_of_the_template(template: str, text: str) -> None:
    columns = {"gold answer": ["42"], "count": [3], "ok": [True], "tags": [["a", "é"]]}
    assert filled(template, rows(["done"], **columns)) == [text]


def test_the_prompt_of_a_conversation() -> None:
    system, ask = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}
    said = {"role": "assistant", "content": "Because."}
    table = rows(["x", "y", "z"], [[ask], [system, ask], [ask, said, ask]])
    assert filled("{prompt}|{completion}", table) == [
        "Why?|x",
        "system: Be brief.\n\nuser: Why?|y",
        "user: Why?\n\nassistant: Because.\n\nuser: Why?|z",
    ]


def test_a_name_that_is_no_column(tmp_path: Path) -> None:
    make_judge(tmp_path / "judge")
    with pytest.raises(UserError) as caught:
        scored(tmp_path, rows(answer=TEXTS), token="Y", prompt="{completion} {anwser}")
    assert str(caught.value) == (
        "reward good: judge judge: prompt has {anwser}, but there is no such column; there are answer, completion, "
        "prompt, prompt_id; write {{anwser}} if the judge shall read {anwser}"
    )


@pytest.mark.parametrize("prompt", ["{prompt}", "Is {{completion}} good?"])
def test_a_template_without_the_completion(prompt: str) -> None:
    with pytest.raises(ValueError, match=r"\{completion\} is missing"):
        config(prompt=prompt, token="Y")


def test_errors_of_rows(tmp_path: Path) -> None:
    make_judge(tmp_path / "judge", template=False)
    # "> ?" and 151 bytes of text are 155 tokens: with 5 of the answer, all of the context of 160.
    table = rows(["a" * 151, "a" * 152, "b", "c"], ["p"] * 4, answer=["", "", None, ""])
    settings = {"prompt": "> {completion}{answer} ?", "max_tokens": 5}
    found = scored(tmp_path, table, pattern="(?s)()", **settings)
    assert found.errors[1] == "has 156 tokens for the judge judge, which takes 1 to 155"
    assert found.errors[2] == "column answer is null, so the judge cannot be asked; fill it or leave {answer} out"
    assert all(found.errors[row].startswith("what pattern '(?s)()' asks for is no finite number: ''") for row in (0, 3))
    longer = scored(tmp_path, table, token="Y", prompt="> {completion}{answer} ?")
    assert list(longer.errors) == [2]


def test_a_judge_that_gives_nan(tmp_path: Path) -> None:
    directory = make_judge(tmp_path / "judge")
    model = AutoModelForCausalLM.from_pretrained(directory)
    torch.nn.init.constant_(model.model.embed_tokens.weight[make_tokenizer()("z")["input_ids"][0]], float("nan"))
    model.save_pretrained(directory)
    found = scored(tmp_path, rows(["fine", "z", "fine"]), token="Y")
    assert found.errors == {1: "the judge judge gives NaN"}
    assert np.isnan(found.scores_N).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("token", "parts"), [("Yes", "'Y', 'e', 's'"), (" Y", "'Ġ', 'Y'"), ("é", "'Ã', '©'"), ("", "nothing")]
)
def test_a_token_that_is_not_one(tmp_path: Path, token: str, parts: str) -> None:
    make_judge(tmp_path / "judge")
    with pytest.raises(UserError) as caught:
        scored(tmp_path, rows(), token=token)
    assert f"reward good: judge judge: token {token!r} is not one token in its vocabulary but {parts};" in str(
        caught.value
    )


def test_a_special_token_can_be_asked_for(tmp_path: Path) -> None:
    make_judge(tmp_path / "judge")
    assert scored(tmp_path, rows(), token="<|im_end|>").errors == {}


def test_a_classifier_is_not_a_judge(tmp_path: Path) -> None:
    BertForSequenceClassification(BertConfig(vocab_size=258, **SIZES)).save_pretrained(tmp_path / "judge")
    make_tokenizer().save_pretrained(tmp_path / "judge")
    told = "judge judge: not a causal language model .*: its architecture is BertForSequenceClassification"
    with pytest.raises(UserError, match=told):
        scored(tmp_path, rows(), token="Y")


def test_a_missing_judge(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="reward good: judge judge: no such directory below"):
        scored(tmp_path, rows(), token="Y")


def test_a_model_a_judge_and_a_function_together(tmp_path: Path) -> None:
    """Two shards; the judge of weight 0 finds no number, so its rows say why and the sum of the others stands."""
    make_judge(tmp_path / "judge")
    make_reward_model(tmp_path / "quality")
    (tmp_path / "reward.py").write_text("def one(prompts, **kwargs):\n    return [1] * len(prompts)\n")
    configs = [
        ModelReward(name="quality", model="quality", weight=2.0),
        config(token="Y", weight=3.0),
        FunctionReward(name="one", function="reward.py:one"),
        JudgeReward(name="grade", judge="judge", prompt="{completion}", pattern="(q{9})", on_error="invalid", weight=0),
    ]
    table = rows()
    keys = {"iteration": [1] * len(TEXTS), "sample_index": [0] * len(TEXTS)}
    for name, values in keys.items():
        table = table.append_column(name, pa.array(values, pa.int32()))
    table = table.append_column("completion_token_ids", pa.array([[5]] * len(TEXTS), pa.list_(pa.int32())))
    shards = Shards(2, lambda index: table.slice(4 * index, 4 - 2 * index))
    entries = score_shards(configs, shards, tmp_path / "work" / "key", tmp_path, TrainerState(0), ExecutionConfig())
    found = pa.concat_tables([read_table(tmp_path / "work" / "key" / file)[0] for file, _, _ in entries])
    with open_model(configs[0], tmp_path, ExecutionConfig()) as score:
        quality_N = score(table).scores_N
    good_N = scored(tmp_path, table, token="Y").scores_N
    np.testing.assert_allclose(found["reward/quality"].to_numpy(), quality_N, atol=1e-5)
    np.testing.assert_allclose(found["reward/good"].to_numpy(), good_N, atol=1e-5)
    assert found["reward/grade"].null_count == len(TEXTS)
    assert all("grade: what pattern" in reason for reason in found["reward_error"].to_pylist())
    np.testing.assert_allclose(found["reward"].to_numpy(), 2 * quality_N + 3 * good_N + 1, atol=1e-4)
