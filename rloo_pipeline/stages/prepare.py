"""Prepare: the initial policy and the prompt tables, once, before the first iteration."""

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa

from rloo_pipeline import fingerprint
from rloo_pipeline.config import PolicyConfig, PromptsConfig
from rloo_pipeline.data.filter import Limit, fits, prompt_limit
from rloo_pipeline.data.images import images_of
from rloo_pipeline.data.keep import LeftOut
from rloo_pipeline.data.splits import Split, check_mixture, load_prompts
from rloo_pipeline.disk import check_space
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import INITIAL
from rloo_pipeline.manifest import write_model_manifest
from rloo_pipeline.policy.images import Read, reader
from rloo_pipeline.policy.initial import fetch
from rloo_pipeline.policy.load import context_length
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

    loaded = load_prompts(prompts, context.layout.root, context.seed, context.sources)
    fetch(policy, context.layout.root, work / "model")
    policy_fingerprint = write_model_manifest(work / "model", trust_remote_code=policy.trust_remote_code)
    write_initial_state(work / "trainer_state")
    write_model_manifest(work / "trainer_state", policy_fingerprint=policy_fingerprint)
    check_space(context.layout, work / "model", iterations)

    read, context_tokens = _reading(policy, work / "model", images=prompts.images_column is not None)
    made, entries = {"policy": policy_fingerprint}, []
    for split, part in loaded.items():
        try:
            limit = prompt_limit(context_tokens, max_tokens[split], prompts.max_prompt_tokens)
            kept, filtered = _short_enough(part.table, read, limit)
        except UserError as error:
            raise UserError(f"prompts.{split}: {error}") from error
        check_mixture(prompts, kept)
        made[split] = write_table(work / "prompts" / f"{split}.parquet", kept)
        entries.append((f"{split}.parquet", kept.num_rows, made[split]))
        record.metrics |= {f"{split}_prompts": kept.num_rows, **_counts(split, part.left_out, len(filtered))}
        record.notes[f"{split}_filtered"] = filtered
        if part.left_out:
            record.notes[f"{split}_left_out"] = [asdict(item) for item in part.left_out]
    write_shards_manifest(work / "prompts", entries, {})
    record.metrics["eval_prompts_also_in_train"] = shared({split: part.table for split, part in loaded.items()})
    layout = context.layout
    outputs = {
        work / "prompts": layout.prompts,
        work / "trainer_state": layout.trainer_state(INITIAL),
        work / "model": layout.model(INITIAL),
    }
    record.finish(outputs, fingerprint.of_json(made))


def _reading(policy: PolicyConfig, model: Path, *, images: bool) -> tuple[Read, int]:
    """How the fetched model reads prompts, and its context length; errors name it as params.yaml does."""
    try:
        return reader(model, policy.trust_remote_code, images=images), context_length(model, policy.trust_remote_code)
    except UserError as error:
        raise UserError(f"policy.model {policy.model}: {error}") from error


def _short_enough(table: pa.Table, read: Read, limit: Limit) -> tuple[pa.Table, Mapping[str, str]]:
    _, token_ids = read(table)
    kept_P, reasons = fits([len(ids) for ids in token_ids], limit)
    ids = table["prompt_id"].to_pylist()
    filtered = {ids[row]: reason for row, reason in reasons.items()}
    tell_filtered(filtered, len(ids))
    return table.filter(pa.array(kept_P)), filtered


def _counts(split: Split, left_out: Sequence[LeftOut], too_long: int) -> dict[str, float]:
    """How many rows are left out in all, and by each kind of reason that there was."""
    kinds = Counter({"too_long": too_long})
    for item in left_out:
        kinds[item.kind] += item.rows
    total = f"{split}_prompts_filtered"
    return {total: kinds.total(), **{f"{total}/{kind}": rows for kind, rows in sorted(kinds.items()) if rows}}


def shared(tables: Mapping[Split, pa.Table]) -> int:
    """How many held-out prompts are trained on too, with the same images if they have any."""
    trained = set(map(str, _seen(tables["train"])))
    return sum(str(prompt) in trained for prompt in _seen(tables["eval"]))


def _seen(table: pa.Table) -> list[Any]:
    prompts: list[Any] = table["prompt"].to_pylist()
    images = images_of(table) or {}
    if not images:
        return prompts
    hashes = {prompt_id: [sha256(image).hexdigest() for image in some] for prompt_id, some in images.items()}
    return [(prompt, hashes.get(key)) for prompt, key in zip(prompts, table["prompt_id"].to_pylist(), strict=True)]
