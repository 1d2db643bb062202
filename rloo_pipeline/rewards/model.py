"""Reward models: a logit of a sequence classification model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rloo_pipeline.config import ExecutionConfig
from rloo_pipeline.data.prompts import is_conversational
from rloo_pipeline.data.template import Message, render_chat
from rloo_pipeline.errors import UserError
from rloo_pipeline.progress import progress
from rloo_pipeline.reward_config import ModelReward
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
from rloo_pipeline.rewards.scored import Scored


@contextmanager
def open_model(config: ModelReward, root: Path, execution: ExecutionConfig) -> Iterator[ScoreRows]:
    """A reward model, loaded once: the logit of each completion after its prompt.

    The score is what the model gives the row alone, whatever the batch: at most `execution.rewards_batch_tokens`
    padded tokens. Its memory is given back on leaving. Raises UserError if it cannot be loaded, has no trained head or
    no such logit; a row that does not fit its context, or whose logit is not finite, is an error of that row.
    """
    what = f"reward {config.name}: model {config.model}"
    with model_files(config.model, config.revision, root, what) as directory:
        tokenizer, model = _load(config, directory, what)
    with freed(model):
        batch_tokens = execution.rewards_batch_tokens if takes_padding(model) else 1
        yield lambda rows: _score(config, rows, tokenizer, model, batch_tokens)


def token_ids(rows: pa.Table, tokenizer: Any) -> list[Ids]:
    """Prompt and completion of each row in the reward model's tokens; special tokens written once."""
    prompts, completions = rows["prompt"].to_pylist(), rows["completion_text"].to_pylist()
    conversational = is_conversational(rows["prompt"])
    if conversational:
        answered: list[list[Message]] = [
            [*prompt, {"role": "assistant", "content": text}] for prompt, text in zip(prompts, completions, strict=True)
        ]
        texts = render_chat(answered, tokenizer, add_generation_prompt=False)
    else:
        texts = [prompt + text for prompt, text in zip(prompts, completions, strict=True)]
    return tokenize(texts, tokenizer, by_template=conversational)


def _load(config: ModelReward, directory: Path, what: str) -> tuple[Any, Any]:
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    from rloo_pipeline.policy.load import device, load_config, load_tokenizer

    logging.disable_progress_bar()
    try:
        tokenizer = load_tokenizer(directory)
        model, report = AutoModelForSequenceClassification.from_pretrained(
            directory,
            config=load_config(directory),
            dtype=getattr(torch, config.dtype),
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError, UserError) as error:
        raise UserError(f"{what}: not a sequence classification model with its tokenizer: {error}") from error
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"]))
        raise UserError(
            f"{what}: has no weights for {missing}: it is not a trained reward model; train its head first or name "
            "another"
        )
    check_logit(config, model.config.num_labels, what)
    return tokenizer, model.to(device()).eval()


def check_logit(config: ModelReward, logits: int, what: str) -> None:
    """Raise UserError, which begins with `what`, if the model has no such logit, or several and none is chosen."""
    if config.logit is None and logits != 1:
        raise UserError(f"{what}: has {logits} logits; set logit to the one that is the score, 0 to {logits - 1}")
    if config.logit is not None and config.logit >= logits:
        raise UserError(f"{what}: logit is {config.logit}, but it has {logits}, counted from 0; name one of them")


def takes_padding(model: Any) -> bool:
    """Whether a padded row gets the score that it gets alone; some architectures mix padding in whatever the mask.

    An encoder-decoder's head wants as many EOS in every row of a batch, so it gets each row alone as well.
    """
    import torch

    if model.config.is_encoder_decoder:
        return False
    short, long = list(range(4)), list(range(16))
    alone, padded = _logits(model, [short], 0)[0], _logits(model, [short, long], 0)[0]
    tolerance = 1e-4 if model.dtype == torch.float32 else 0.1
    return bool(abs(padded - alone) <= tolerance * max(1.0, abs(alone)))


def _score(config: ModelReward, rows: pa.Table, tokenizer: Any, model: Any, batch_tokens: int) -> Scored:
    from rloo_pipeline.policy.batches import plan

    ids = token_ids(rows, tokenizer)
    lengths_N = lengths_of(ids)
    errors = misfits(lengths_N, context_of(model, tokenizer), config.model)
    fitting = np.setdiff1d(np.arange(len(ids)), list(errors))
    scores_N = np.full(len(ids), np.nan)
    with progress(f"reward {config.name}", len(ids), "completions") as done:
        done.advance(len(errors))
        for batch in plan(lengths_N[fitting], batch_tokens):
            rows_B = fitting[batch]
            scores_N[rows_B] = _logits(model, [ids[row] for row in rows_B], config.logit or 0)
            done.advance(len(rows_B))
    for row in fitting[~np.isfinite(scores_N[fitting])].tolist():
        errors[row] = f"{config.model} gives {scores_N[row]}"
        scores_N[row] = np.nan
    return Scored(scores_N, errors)


def _logits(model: Any, ids: Sequence[Ids], logit: int) -> npt.NDArray[np.float64]:
    """One logit of each row, padded on the right."""
    import torch

    from rloo_pipeline.policy.batches import ragged

    text, own = model.config.get_text_config(), model.config.get_text_config().pad_token_id
    text.pad_token_id = _fill(text, ids)
    width = int(lengths_of(ids).max())
    padded, mask = ragged(ids, np.zeros(len(ids), np.int64), width, text.pad_token_id)
    given = {"input_ids": torch.from_numpy(padded), "attention_mask": torch.from_numpy(mask.astype(np.int64))}
    with torch.inference_mode():
        logits_B = model(**{name: tensor.to(model.device) for name, tensor in given.items()}).logits[:, logit]
    text.pad_token_id = own
    found: npt.NDArray[np.float64] = logits_B.double().cpu().numpy()
    return found


def _fill(text_config: Any, ids: Sequence[Ids]) -> int:
    """What to pad with: the model's own pad id, else any id that no row ends with.

    Heads that read one position read the last token that is not the model's pad id. So a row that ends in it is scored
    at the token before, alone and in a batch; without a pad id, alone, the last token is scored whatever it is, and
    with such a fill it is in a batch too.
    """
    if text_config.pad_token_id in range(text_config.vocab_size):
        return int(text_config.pad_token_id)
    last = {tokens[-1] for tokens in ids}
    return next(candidate for candidate in range(len(last) + 1) if candidate not in last)
