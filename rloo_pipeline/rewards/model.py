"""Reward models: a sequence classification model with one logit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rloo_pipeline.data.prompts import is_conversational
from rloo_pipeline.data.template import Message, render_chat
from rloo_pipeline.errors import UserError
from rloo_pipeline.progress import progress
from rloo_pipeline.reward_config import ModelReward

Ids = list[int]


def score_model(config: ModelReward, rows: pa.Table, root: Path, batch_tokens: int) -> npt.NDArray[np.float64]:
    """`scores_N`: the model's logit for each completion after its prompt, computed in float32.

    Conversations go through the reward model's own chat template. The score is that of the row alone, whatever the
    batch: at most `batch_tokens` padded tokens. Raises UserError if the model cannot be loaded, is not a trained
    model with one logit, or a row is longer than it can see.
    """
    from rloo_pipeline.policy.batches import plan

    tokenizer, model = _load(config, root)
    ids = token_ids(rows, tokenizer)
    lengths_N = np.array([len(tokens) for tokens in ids], dtype=np.int64)
    _check_lengths(config, rows, lengths_N, _longest(tokenizer, model))
    scores_N = np.empty(len(ids), dtype=np.float64)
    with progress(f"reward {config.name}", len(ids), "completions") as done:
        for rows_B in plan(lengths_N, batch_tokens):
            scores_N[rows_B] = _logits(model, [ids[row] for row in rows_B])
            done.advance(len(rows_B))
    if not np.isfinite(scores_N).all():
        row = int(np.flatnonzero(~np.isfinite(scores_N))[0])
        raise UserError(f"reward {config.name}: {config.model} gives {scores_N[row]} for {_place(rows, row)}; check it")
    return scores_N


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
    return cast(list[Ids], tokenizer(texts, add_special_tokens=not conversational, verbose=False)["input_ids"])


def _load(config: ModelReward, root: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    from rloo_pipeline.policy.load import device

    logging.disable_progress_bar()
    local = root / str(config.model)
    origin = str(local) if local.is_dir() else str(config.model)
    try:
        # Unset, trust_remote_code would ask on the terminal.
        shared = {"revision": config.revision, "trust_remote_code": False}
        tokenizer = AutoTokenizer.from_pretrained(origin, **shared)
        model, report = AutoModelForSequenceClassification.from_pretrained(
            origin, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **shared
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"reward {config.name}: {config.model} is neither a directory of the project with a sequence "
            f"classification model and its tokenizer nor a hub id that can be reached: {error}"
        ) from error
    if model.config.num_labels != 1:
        raise UserError(
            f"reward {config.name}: {config.model} has {model.config.num_labels} logits; a reward model has one"
        )
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"]))
        raise UserError(
            f"reward {config.name}: {config.model} has no weights for {missing}: it is "
            "not a trained reward model; train its head first or name another"
        )
    return tokenizer, model.to(device()).eval()


def _longest(tokenizer: Any, model: Any) -> int:
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(min(tokenizer.model_max_length, context or tokenizer.model_max_length))


def _check_lengths(config: ModelReward, rows: pa.Table, lengths_N: npt.NDArray[np.int64], longest: int) -> None:
    wrong = np.flatnonzero((lengths_N > longest) | (lengths_N == 0))
    if wrong.size:
        row = int(wrong[0])
        raise UserError(
            f"reward {config.name}: {_place(rows, row)} has {lengths_N[row]} tokens for {config.model}, "
            f"which takes 1 to {longest}; shorten rollouts.max_tokens or the prompts, or use another model"
        )


def _logits(model: Any, ids: Sequence[Ids]) -> npt.NDArray[np.float64]:
    import torch

    width = max(len(tokens) for tokens in ids)
    fill, restore = _fill(model, ids), model.config.get_text_config().pad_token_id
    padded = torch.tensor([tokens + [fill] * (width - len(tokens)) for tokens in ids], device=model.device)
    mask = torch.tensor([[1] * len(tokens) + [0] * (width - len(tokens)) for tokens in ids], device=model.device)
    model.config.get_text_config().pad_token_id = fill
    with torch.inference_mode():
        logits_B = model(input_ids=padded, attention_mask=mask).logits[:, 0]
    model.config.get_text_config().pad_token_id = restore
    return cast(npt.NDArray[np.float64], logits_B.double().cpu().numpy())


def _fill(model: Any, ids: Sequence[Ids]) -> int:
    """What to pad with: the model's own pad id, else any id that no row ends with.

    Many heads score the last token that is not the pad id. A model without one scores the last token when it gets a
    row alone, and with such a fill it does so in a batch.
    """
    pad = model.config.get_text_config().pad_token_id
    if pad is not None:
        return int(pad)
    last = {tokens[-1] for tokens in ids}
    return next(candidate for candidate in range(len(last) + 1) if candidate not in last)


def _place(rows: pa.Table, row: int) -> str:
    return (
        f"row {row + 1}, prompt_id {rows['prompt_id'][row].as_py()}, sample_index {rows['sample_index'][row].as_py()}"
    )
