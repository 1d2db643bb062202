"""Judges: a causal language model is asked about each completion."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rloo_pipeline.config import ExecutionConfig
from rloo_pipeline.data.template import render_chat
from rloo_pipeline.errors import UserError
from rloo_pipeline.progress import Progress, progress
from rloo_pipeline.reward_config import JudgeReward
from rloo_pipeline.rewards.loading import (
    Ids,
    ScoreRows,
    context_of,
    freed,
    lengths_of,
    misfits,
    model_files,
    tokenize,
)
from rloo_pipeline.rewards.question import questions
from rloo_pipeline.rewards.scored import TEXT_SHOWN, Scored

Answered = tuple[npt.NDArray[np.float64], dict[int, str]]  # scores, and why a row has none by its index
Ask = Callable[[Sequence[Ids], Progress], Answered]
ARCHITECTURE = re.compile("ForCausalLM|LMHeadModel|ForConditionalGeneration")


@contextmanager
def open_judge(config: JudgeReward, root: Path, execution: ExecutionConfig) -> Iterator[ScoreRows]:
    """A judge, loaded once: the probability, in [0, 1], that `token` comes next, or the number in its greedy answer.

    Neither depends on the batch: at most `execution.rewards_batch_tokens` padded tokens, answers included. Its memory
    is given back on leaving. Raises UserError if it cannot be loaded, or if `token` is not one token; a question that
    does not fit its context, and an answer without a number, are errors of their row.
    """
    what = f"reward {config.name}: judge {config.judge}"
    with model_files(config.judge, config.revision, root, what) as directory:
        tokenizer, model, ends = _load(config, directory, what)
    with freed(model):
        reserve, ask = _asker(config, tokenizer, model, ends, execution.rewards_batch_tokens, what)
        longest = context_of(model, tokenizer) - reserve
        yield lambda rows: _score(config, rows, tokenizer, longest, ask, what)


def _asker(
    config: JudgeReward, tokenizer: Any, model: Any, ends: Sequence[int], batch_tokens: int, what: str
) -> tuple[int, Ask]:
    """The most tokens of an answer, and how questions become scores and errors."""
    if config.token is not None:
        token = token_id(config.token, tokenizer, what)
        return 1, lambda asked, done: (_probabilities(model, asked, token, batch_tokens, done), {})
    pattern = re.compile(str(config.pattern))

    def ask(asked: Sequence[Ids], done: Progress) -> Answered:
        answers = _answers(model, asked, config.max_tokens, ends, batch_tokens, done)
        return numbers(tokenizer.batch_decode(answers, skip_special_tokens=True), pattern)

    return config.max_tokens, ask


def _load(config: JudgeReward, directory: Path, what: str) -> tuple[Any, Any, tuple[int, ...]]:
    from safetensors import SafetensorError
    from transformers import GenerationConfig

    from rloo_pipeline.engines.eos import eos_token_ids
    from rloo_pipeline.policy.load import load_config, load_model, load_tokenizer
    from rloo_pipeline.policy.logprobs import check_head

    try:
        made_as = load_config(directory).architectures or []
        if not any(map(ARCHITECTURE.search, made_as)):
            raise UserError(f"its architecture is {', '.join(made_as) or 'not told'}")
        tokenizer, model = load_tokenizer(directory), load_model(directory, config.dtype)
        check_head(model)
    except (OSError, ValueError, RuntimeError, SafetensorError, UserError) as error:
        raise UserError(f"{what}: not a causal language model that can be used, with its tokenizer: {error}") from error
    # generate() fills what is unset from the model's own defaults: sampling, penalties and the like.
    model.generation_config = GenerationConfig()
    return tokenizer, model, eos_token_ids(directory)


def token_id(token: str, tokenizer: Any, what: str) -> int:
    """The id of `token`; raises UserError, which begins with `what`, if it is not one token."""
    ids = tokenizer(token, add_special_tokens=False)["input_ids"]
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        parts = ", ".join(repr(part) for part in tokenizer.convert_ids_to_tokens(ids)) or "nothing"
        raise UserError(
            f"{what}: token {token!r} is not one token in its vocabulary but {parts}; choose a word that is one token, "
            "and mind that a leading space belongs to the token"
        )
    return int(ids[0])


def question_ids(texts: Sequence[str], tokenizer: Any) -> list[Ids]:
    """Each question in the judge's tokens, as a user's message if it has a chat template."""
    by_template = bool(tokenizer.chat_template)
    if by_template:
        asked = [[{"role": "user", "content": text}] for text in texts]
        texts = render_chat(asked, tokenizer, add_generation_prompt=True)
    return tokenize(texts, tokenizer, by_template=by_template)


def _score(config: JudgeReward, rows: pa.Table, tokenizer: Any, longest: int, ask: Ask, what: str) -> Scored:
    texts, errors = questions(config.prompt, rows, what)
    ids = question_ids(texts, tokenizer)
    errors = misfits(lengths_of(ids), longest, f"the judge {config.judge}") | errors
    fitting = np.setdiff1d(np.arange(len(ids)), list(errors))
    scores_N = np.full(len(ids), np.nan)
    with progress(f"reward {config.name}", len(ids), "completions") as done:
        done.advance(len(errors))
        scores_N[fitting], unanswered = ask([ids[row] for row in fitting], done)
    errors |= {int(fitting[index]): reason for index, reason in unanswered.items()}
    silent = [row for row in fitting.tolist() if np.isnan(scores_N[row]) and row not in errors]
    return Scored(scores_N, errors | dict.fromkeys(silent, f"the judge {config.judge} gives NaN"))


def _probabilities(
    model: Any, asked: Sequence[Ids], token: int, batch_tokens: int, done: Progress
) -> npt.NDArray[np.float64]:
    """Probability of `token` after each question: softmax in float32 over the last position's logits alone."""
    from rloo_pipeline.policy.logprobs import score

    logprobs = score(model, asked, [[token]] * len(asked), 1.0, batch_tokens, done)
    return np.exp(np.array(logprobs, np.float64).reshape(len(asked)))


def _answers(
    model: Any, asked: Sequence[Ids], max_tokens: int, ends: Sequence[int], batch_tokens: int, done: Progress
) -> list[Ids]:
    """The most likely token at each step, until one of `ends` (left out) or `max_tokens`."""
    from rloo_pipeline.policy.batches import plan

    answers: list[Ids] = [[] for _ in asked]
    for rows_B in plan(lengths_of(asked) + max_tokens, batch_tokens):
        found = _greedy(model, [asked[row] for row in rows_B], max_tokens, ends)
        for row, answer in zip(rows_B, found, strict=True):
            answers[row] = answer
        done.advance(len(rows_B))
    return answers


def _greedy(model: Any, asked: Sequence[Ids], max_tokens: int, ends: Sequence[int]) -> list[Ids]:
    import torch
    from transformers import GenerationConfig

    from rloo_pipeline.policy.batches import ragged

    lengths_B = lengths_of(asked)
    width = int(lengths_B.max())
    padded, mask = ragged(asked, width - lengths_B, width, 0)
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=max_tokens, eos_token_id=list(ends) or None, pad_token_id=ends[0] if ends else 0
    )
    with torch.inference_mode():
        output = model.generate(
            torch.from_numpy(padded).to(model.device),
            attention_mask=torch.from_numpy(mask.astype(np.int64)).to(model.device),
            generation_config=settings,
        )
    answers_BT = output[:, width:].cpu().numpy()
    ended_BT = np.isin(answers_BT, ends)
    stops_B = np.where(ended_BT.any(1), ended_BT.argmax(1), answers_BT.shape[1])
    return [answer[:stop].tolist() for answer, stop in zip(answers_BT, stops_B, strict=True)]


def numbers(answers: Sequence[str], pattern: re.Pattern[str]) -> Answered:
    """The number that each answer gives, NaN for those that give none, and why they do not."""
    numbers_N, errors = np.full(len(answers), np.nan), {}
    for row, answer in enumerate(answers):
        found = pattern.search(answer)
        try:
            number = float(found[1] if found else "")
        except (TypeError, ValueError):
            number = math.nan
        if math.isfinite(number):
            numbers_N[row] = number
        else:
            shown = f"{answer[:TEXT_SHOWN]!r}{'...' if len(answer) > TEXT_SHOWN else ''}"
            lack = f"is no finite number: {found[1]!r}" if found else "is nowhere"
            errors[row] = f"what pattern {pattern.pattern!r} asks for {lack} in the judge's answer {shown}"
    return numbers_N, errors
