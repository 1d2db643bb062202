"""Views of the joined table: groups, one group, one completion's tokens."""

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from rloo_pipeline.audit.joined import ROOT
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import INITIAL, Layout
from rloo_pipeline.manifest import read_manifest
from rloo_pipeline.schema import KEY_NAMES, reward_column

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GROUP = ["iteration", "prompt_id"]
LISTED = {"reward": "rewards", "kl": "kl", "baseline": "baselines", "advantage": "advantages"}
SHOWN = (
    *("completion_text", "finish_reason", "reward", "reward_error", "reward_extra", "clipped_reward", "kl"),
    *("penalized_reward", "baseline", "advantage", "trained", "exclusion_reason"),
)
LOGPROBS = ("policy_logprobs", "reference_logprobs", "sampler_logprobs")


def groups(table: pa.Table, limit: int | None = None) -> pa.Table:
    """One row a group, in key order, the first `limit` of them; lists are in the order of sample_index.

    iteration, prompt_id, prompt_text, completions (K), reward_mean (over valid rows), rewards, kl (nats), baselines,
    advantages, has_signal (two valid rewards differ, before the KL); without those that `table` lacks columns for.
    """
    rows = table.sort_by([(name, "ascending") for name in KEY_NAMES])
    signal = "clipped_reward" if "clipped_reward" in rows.column_names else "reward"
    summaries: list[tuple[str | list[str], str]] = [("prompt_text", "first"), ([], "count_all")]
    if "reward" in rows.column_names:
        summaries.append(("reward", "mean"))
    if signal in rows.column_names:
        summaries += [(signal, "min"), (signal, "max")]
    found = rows.group_by(GROUP, use_threads=False).aggregate(summaries)
    columns = {name: found[name] for name in GROUP}
    columns |= {"prompt_text": found["prompt_text_first"], "completions": found["count_all"]}
    if "reward" in rows.column_names:
        columns["reward_mean"] = found["reward_mean"]
    offsets = pa.array([0, *pc.cumulative_sum(found["count_all"]).to_pylist()], pa.int32())
    for name, plural in LISTED.items():
        if name in rows.column_names:
            columns[plural] = pa.ListArray.from_arrays(offsets, rows[name].combine_chunks())
    if signal in rows.column_names:
        columns["has_signal"] = pc.fill_null(pc.greater(found[f"{signal}_max"], found[f"{signal}_min"]), False)
    return pa.table(columns).slice(0, limit)


def group(table: pa.Table, prompt_id: str) -> pa.Table:
    """The completions of one prompt, one row each: text, rewards, KL (nats), baseline and advantage beside each other.

    Raises UserError if the table has no such prompt_id.
    """
    rows = _of_prompt(table, prompt_id)
    components = [name for name in rows.column_names if name.startswith(reward_column(""))]
    shown = [name for name in SHOWN if name in rows.column_names]
    lengths = pc.list_value_length(rows["completion_token_ids"])
    return rows.select(["sample_index", *shown[:2], *components, *shown[2:]]).add_column(3, "tokens", lengths)


def tokens(table: pa.Table, prompt_id: str, sample_index: int, model_dir: str | Path | None = None) -> pa.Table:
    """One completion's tokens, one row each, an EOS included.

    position, token_id, token (the vocabulary's spelling), text (decoded alone; part of a character gives U+FFFD) and
    policy_logprob, reference_logprob, sampler_logprob (float32, nats; without those not in `table`). The tokenizer is
    that in `model_dir`, by default the initial policy's of the loaded project. Raises UserError if there is no such
    completion or no tokenizer.
    """
    rows = _of_prompt(table, prompt_id)
    row = rows.filter(pc.equal(rows["sample_index"], sample_index))
    if row.num_rows == 0:
        known = ", ".join(map(str, rows["sample_index"].to_pylist()))
        raise UserError(f"prompt_id {prompt_id}: no sample_index {sample_index}; it has {known}")
    ids = row["completion_token_ids"][0].as_py()
    tokenizer = _tokenizer(table, model_dir)
    columns = {
        "position": pa.array(range(len(ids)), pa.int32()),
        "token_id": pa.array(ids, pa.int32()),
        "token": pa.array(tokenizer.convert_ids_to_tokens(ids), pa.string()),
        "text": pa.array([tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in ids], pa.string()),
    }
    for name in LOGPROBS:
        if name in row.column_names:
            values = row[name][0].values
            columns[name.removesuffix("s")] = pa.nulls(len(ids), pa.float32()) if values is None else values
    return pa.table(columns)


def _of_prompt(table: pa.Table, prompt_id: str) -> pa.Table:
    rows = table.filter(pc.equal(table["prompt_id"], prompt_id)).sort_by("sample_index")
    if rows.num_rows == 0:
        some = ", ".join(pc.unique(table["prompt_id"]).slice(0, 5).to_pylist())
        raise UserError(f"prompt_id {prompt_id}: not in this iteration, which has {some}, ...; see audit.groups")
    return rows


def _tokenizer(table: pa.Table, model_dir: str | Path | None) -> "PreTrainedTokenizerBase":
    from rloo_pipeline.policy.load import load_tokenizer

    if model_dir is not None:
        return load_tokenizer(Path(model_dir))
    root = (table.schema.metadata or {}).get(ROOT, b".").decode()
    model = Layout(Path(root)).model(INITIAL)
    return load_tokenizer(model, read_manifest(model)["facts"]["trust_remote_code"])
