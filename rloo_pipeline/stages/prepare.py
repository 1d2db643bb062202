"""Prepare: the initial policy and the prompt tables, once, before the first iteration."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from rloo_pipeline import fingerprint
from rloo_pipeline.config import PolicyConfig, PromptsConfig
from rloo_pipeline.data.filter import Limit, fits, prompt_limit
from rloo_pipeline.data.load import load_rows, source_name
from rloo_pipeline.data.prompts import prompt_table, split_rows
from rloo_pipeline.data.template import render
from rloo_pipeline.disk import check_space
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import INITIAL
from rloo_pipeline.manifest import write_model_manifest
from rloo_pipeline.policy.initial import fetch
from rloo_pipeline.policy.load import context_length, load_tokenizer
from rloo_pipeline.policy.trainer_state import write_initial_state
from rloo_pipeline.shards import write_shards_manifest, write_table
from rloo_pipeline.sources import fingerprints
from rloo_pipeline.stages.context import Context, Record
from rloo_pipeline.stages.sampling import tell_filtered


def run(
    context: Context, policy: PolicyConfig, prompts: PromptsConfig, max_tokens: Mapping[str, int], iterations: int
) -> None:
    """Fetch the policy, load and check the prompts, write both; raises UserError on unusable input.

    max_tokens: how many tokens train and eval prompts must leave room for in the context.
    """
    settings = {
        "policy": policy.model_dump(mode="json"),
        "prompts": prompts.model_dump(mode="json"),
        "max_tokens": dict(max_tokens),
    }
    files = {used_by: fingerprints(context.sources, used_by, context.layout.root) for used_by in ("policy", "prompts")}
    record = Record(context, "prepare", {**files["policy"], **files["prompts"]}, settings)
    work = record.work
    shutil.rmtree(work.parent, ignore_errors=True)

    tables = load_prompts(context, prompts)
    fetch(policy, context.layout.root, work / "model")
    policy_fingerprint = write_model_manifest(work / "model", trust_remote_code=policy.trust_remote_code)
    write_initial_state(work / "trainer_state")
    write_model_manifest(work / "trainer_state", policy_fingerprint=policy_fingerprint)
    check_space(context.layout, work / "model", iterations)

    tokenizer, context_tokens = _reading(policy, work / "model")
    made, entries = {"policy": policy_fingerprint}, []
    for split, table in tables.items():
        try:
            limit = prompt_limit(context_tokens, max_tokens[split], prompts.max_prompt_tokens)
            kept, filtered = _short_enough(table, tokenizer, limit)
        except UserError as error:
            raise UserError(f"prompts.{split}: {error}") from error
        made[split] = write_table(work / "prompts" / f"{split}.parquet", kept)
        entries.append((f"{split}.parquet", kept.num_rows, made[split]))
        record.metrics |= {f"{split}_prompts": kept.num_rows, f"{split}_prompts_filtered": len(filtered)}
        record.notes[f"{split}_filtered"] = filtered
    write_shards_manifest(work / "prompts", entries, {})
    record.metrics["eval_prompts_also_in_train"] = _shared(tables)
    layout = context.layout
    outputs = {
        work / "prompts": layout.prompts,
        work / "trainer_state": layout.trainer_state(INITIAL),
        work / "model": layout.model(INITIAL),
    }
    record.finish(outputs, fingerprint.of_json(made))


def load_prompts(context: Context, config: PromptsConfig) -> dict[str, pa.Table]:
    """The tables of the train and eval prompts, checked."""
    root = context.layout.root
    train = prompt_table(load_rows(config.train[0], root), config, "train", source_name(config.train[0]))
    if config.eval_fraction is not None:
        train, held_out = split_rows(train, config.eval_fraction, context.seed)
        return {"train": train, "eval": held_out}
    held_out = prompt_table(load_rows(config.eval[0], root), config, "eval", source_name(config.eval[0]))
    return {"train": train, "eval": held_out}


def _reading(policy: PolicyConfig, model: Path) -> tuple[Any, int]:
    """Tokenizer and context length of the fetched model; errors name it as params.yaml does."""
    try:
        tokenizer = load_tokenizer(model, policy.trust_remote_code)
        return tokenizer, context_length(model, policy.trust_remote_code)
    except UserError as error:
        raise UserError(f"policy.model {policy.model}: {error}") from error


def _short_enough(table: pa.Table, tokenizer: object, limit: Limit) -> tuple[pa.Table, Mapping[str, str]]:
    _, token_ids = render(table["prompt"].to_pylist(), tokenizer)
    kept_P, reasons = fits([len(ids) for ids in token_ids], limit)
    ids = table["prompt_id"].to_pylist()
    filtered = {ids[row]: reason for row, reason in reasons.items()}
    tell_filtered(filtered, len(ids))
    return table.filter(pa.array(kept_P)), filtered


def _shared(tables: Mapping[str, pa.Table]) -> int:
    """How many held-out prompts are trained on too."""
    trained = {str(prompt) for prompt in tables["train"]["prompt"].to_pylist()}
    return sum(str(prompt) in trained for prompt in tables["eval"]["prompt"].to_pylist())
