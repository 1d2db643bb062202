"""Reward model: one model trained from preference pairs, and what held-out pairs say of it."""

import shutil
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict

import numpy as np
import pyarrow as pa

from rloo_pipeline import fingerprint, seeds
from rloo_pipeline.config import PolicyConfig, RewardModelConfig
from rloo_pipeline.data.load import load_kept
from rloo_pipeline.data.preferences import fits, pair_table, shared_pairs, side_rows, split_pairs
from rloo_pipeline.disk import refusals_told
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import REWARD_MODEL
from rloo_pipeline.manifest import write_model_manifest
from rloo_pipeline.objective.preference import brier, calibration_error, pair_loss, reliability, won
from rloo_pipeline.objective.statistics import bootstrap_interval
from rloo_pipeline.policy.initial import fetch
from rloo_pipeline.policy.load import pass_conditions
from rloo_pipeline.preference.base import Scorer, load_base
from rloo_pipeline.preference.passes import score
from rloo_pipeline.preference.train import Pairs, Step, count_steps, train
from rloo_pipeline.progress import say
from rloo_pipeline.rewards.model import token_ids
from rloo_pipeline.schema import STEPS, preferences_schema
from rloo_pipeline.shards import write_shards_manifest, write_table
from rloo_pipeline.sources import fingerprints
from rloo_pipeline.stages.context import Context, Record, start


def run(context: Context, config: RewardModelConfig) -> None:
    """Train, score the held-out pairs, write both; raises UserError on an unusable base or pairs.

    Killed, it starts over.
    """
    layout, name = context.layout, context.iteration
    where = f"reward_models.{name}"
    record = start(context, REWARD_MODEL, config, fingerprints(context.sources, "reward_models", layout.root))
    work = record.work
    shutil.rmtree(work.parent, ignore_errors=True)

    tables = _tables(record, config, where)
    base = PolicyConfig(model=config.model, revision=config.revision)
    fetch(base, layout.root, work / "base", where)
    record.notes["base"] = fingerprint.of_model(work / "base")[0]
    scorer = load_base(work / "base", _seed(context, "head"), f"{where}.model {config.model}")
    record.notes["initialized"] = scorer.added
    kept, pairs = _usable(record, scorer, tables, _limit(config, scorer, where), where)
    steps = _train(record, scorer, pairs["train"], config, where)
    with refusals_told(work):
        scorer.model.save_pretrained(work / "model")
        scorer.tokenizer.save_pretrained(work / "model")
    made = write_model_manifest(work / "model")
    scored = _evaluate(record, scorer, kept["eval"], pairs["eval"], config)
    tables_made = {"eval": scored, "steps": pa.Table.from_pylist([asdict(step) for step in steps], STEPS)}
    entries = [
        (f"{file}.parquet", table.num_rows, write_table(work / "preferences" / f"{file}.parquet", table))
        for file, table in tables_made.items()
    ]
    write_shards_manifest(work / "preferences", entries, {"reward_model_fingerprint": made})
    shutil.rmtree(work / "base")
    outputs = {work / "preferences": layout.preferences(name), work / "model": layout.reward_model(name)}
    (_, _, pairs_made), (_, _, steps_made) = entries
    record.finish(outputs, fingerprint.of_json({"model": made, "pairs": pairs_made, "steps": steps_made}))


def _seed(context: Context, purpose: str) -> int:
    return seeds.derive(context.seed, REWARD_MODEL, context.iteration, purpose)


def _tables(record: Record, config: RewardModelConfig, where: str) -> dict[str, pa.Table]:
    """The pairs to train on and those held out, checked; what the settings leave out of the tables is counted."""
    context, tables = record.context, {}
    for split, table in (("train", config.train), ("eval", config.eval)):
        if table.fraction is not None:
            continue
        try:
            rows = load_kept(table, context.layout.root)
            tables[split] = pair_table(rows, split)
        except UserError as error:
            raise UserError(f"{where}.{split}: {error}") from error
        if rows.left_out:
            record.metrics[f"{split}_rows_left_out"] = sum(item.rows for item in rows.left_out)
            record.notes[f"{split}_rows_left_out"] = [asdict(item) for item in rows.left_out]
    if config.eval.fraction is not None:
        try:
            halves = split_pairs(tables["train"], config.eval.fraction, _seed(context, "eval"))
        except UserError as error:
            raise UserError(f"{where}.{error}") from error
        tables = dict(zip(("train", "eval"), halves, strict=True))
    return tables


def _limit(config: RewardModelConfig, scorer: Scorer, where: str) -> int:
    if config.max_tokens is None:
        return scorer.longest
    if config.max_tokens > scorer.longest:
        raise UserError(f"{where}.max_tokens is {config.max_tokens}, but the base takes {scorer.longest}; lower it")
    return config.max_tokens


def _usable(
    record: Record, scorer: Scorer, tables: Mapping[str, pa.Table], limit: int, where: str
) -> tuple[dict[str, pa.Table], dict[str, Pairs]]:
    """The pairs that can be used with their tokens, as the reward stage will make them; the others counted and told."""
    kept, pairs = {}, {}
    for split, table in tables.items():
        try:
            ids = {side: token_ids(side_rows(table, side), scorer.tokenizer) for side in ("chosen", "rejected")}
        except UserError as error:
            raise UserError(f"{where}.{split}: {error}") from error
        lengths = {side: [len(tokens) for tokens in of_side] for side, of_side in ids.items()}
        kept_N, filtered = fits(table, lengths["chosen"], lengths["rejected"], limit)
        reasons = Counter(reason.partition(":")[0].replace(" ", "_") for reason in filtered.values())
        record.notes[f"{split}_filtered"] = filtered
        record.metrics |= {f"{split}_pairs": int(kept_N.sum()), f"{split}_pairs_filtered": len(filtered)}
        record.metrics |= {f"{split}_pairs_filtered/{reason}": count for reason, count in sorted(reasons.items())}
        _tell(filtered, split, table.num_rows)
        if not kept_N.any():
            told = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in reasons.most_common())
            raise UserError(f"{where}.{split}: none of {table.num_rows} pairs can be used: {told}; give others")
        rows = np.flatnonzero(kept_N)
        kept[split] = table.filter(pa.array(kept_N))
        chosen, rejected = ([ids[side][row] for row in rows] for side in ("chosen", "rejected"))
        pairs[split] = Pairs(chosen, rejected, kept[split]["margin"].to_numpy())
    record.metrics["eval_pairs_also_in_train"] = shared_pairs(kept["train"], kept["eval"])
    return kept, pairs


def _tell(filtered: Mapping[str, str], split: str, pairs: int) -> None:
    if filtered:
        first = "; ".join(f"{pair_id}: {reason}" for pair_id, reason in list(filtered.items())[:3])
        say(f"{len(filtered)} of {pairs} {split} pairs are left out ({first})")


def _train(record: Record, scorer: Scorer, pairs: Pairs, config: RewardModelConfig, where: str) -> list[Step]:
    execution = record.context.execution
    try:
        count = count_steps(config, len(pairs))
    except UserError as error:
        raise UserError(f"{where}.{error}") from error
    started = time.monotonic()
    steps = train(
        scorer.model, pairs, config, count, _seed(record.context, "order"), execution.update_microbatch_tokens
    )
    seconds = time.monotonic() - started
    tokens = [len(chosen) + len(rejected) for chosen, rejected in zip(pairs.chosen_N, pairs.rejected_N, strict=True)]
    record.timings["train_seconds"] = seconds
    record.timings["tokens_per_second"] = float(np.mean(tokens) * config.batch_size * count / seconds)
    budgets = {name: getattr(execution, name) for name in ("update_microbatch_tokens", "rewards_batch_tokens")}
    record.notes["execution"] = pass_conditions(**budgets) | {"attention": scorer.model.config._attn_implementation}
    last = steps[-max(count // 10, 1) :]
    record.metrics |= {
        "steps": count,
        "train_loss": float(np.mean([step.loss for step in last])),
        "train_accuracy": float(np.mean([step.accuracy for step in last])),
        "grad_norm": float(np.mean([step.grad_norm for step in steps])),
    }
    return steps


def _evaluate(record: Record, scorer: Scorer, table: pa.Table, pairs: Pairs, config: RewardModelConfig) -> pa.Table:
    """Score the held-out pairs; returns them with their rewards."""
    budget = record.context.execution.rewards_batch_tokens
    rewards_2N = score(scorer.model, [*pairs.chosen_N, *pairs.rejected_N], budget, "held-out pairs")
    chosen_N, rejected_N = np.split(rewards_2N, 2)
    if not np.isfinite(rewards_2N).all():
        raise UserError(f"reward_models.{record.context.iteration}: the trained model scores NaN; lower learning_rate")
    difference_N = chosen_N - rejected_N
    won_N, bins = won(difference_N), reliability(difference_N)
    low, high = bootstrap_interval(won_N, config.bootstrap_resamples, _seed(record.context, "interval"))
    record.metrics |= {
        "accuracy": float(won_N.mean()),
        "accuracy_low": low,
        "accuracy_high": high,
        "loss": float(pair_loss(difference_N - pairs.margin_N).mean()),
        "margin": float(difference_N.mean()),
        "reward_chosen": float(chosen_N.mean()),
        "reward_rejected": float(rejected_N.mean()),
        "brier": brier(difference_N),
        "calibration_error": calibration_error(bins),
    }
    for item in bins:
        if item.pairs:
            values = {"pairs": item.pairs, "confidence": item.confidence, "accuracy": item.accuracy}
            bounds = f"{item.low:.2f}-{item.high:.2f}"
            record.metrics |= {f"calibration/{bounds}/{name}": value for name, value in values.items()}
    for column, rewards_N in (("chosen_reward", chosen_N), ("rejected_reward", rejected_N)):
        table = table.append_column(column, pa.array(rewards_N.astype(np.float32)))
    return table.cast(preferences_schema(table["prompt"].type))
