"""Rewards: every completion scored by the components named in params.yaml."""

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from rloo_pipeline.config import RewardConfig
from rloo_pipeline.manifest import read_manifest
from rloo_pipeline.policy.load import pass_conditions
from rloo_pipeline.progress import progress
from rloo_pipeline.reward_config import ModelReward
from rloo_pipeline.rewards.score import join_prompts, score
from rloo_pipeline.schema import reward_column, rewards_schema
from rloo_pipeline.shards import read_shard, read_shards, read_table, write_shards, write_shards_manifest
from rloo_pipeline.sources import fingerprints
from rloo_pipeline.stages.context import Context, Record


def run(context: Context, configs: Sequence[RewardConfig]) -> None:
    """Score the rollouts shard by shard, write shards and manifest; raises UserError if a component fails."""
    layout, iteration = context.layout, context.iteration
    rollouts = read_manifest(layout.rollouts(iteration))
    prompts, prompts_fingerprint = read_table(layout.prompts / "train.parquet")
    files = fingerprints(context.sources, "rewards", layout.root)
    inputs = {"rollouts": rollouts["fingerprint"], "prompts": prompts_fingerprint, **files}
    record = Record(context, "rewards", inputs, {"rewards": [config.model_dump(mode="json") for config in configs]})

    with progress("scoring, rewards", rollouts["rows"], "completions") as done:

        def make(index: int) -> pa.Table:
            table = read_shard(layout.rollouts(iteration), rollouts, index)
            rows = join_prompts(table, prompts)
            scored = score(configs, rows, layout.root, context.execution, global_step=context.number - 1)
            done.advance(table.num_rows)
            return scored

        schema = rewards_schema([config.name for config in configs])
        entries = write_shards(record.work, len(rollouts["shards"]), make, schema)

    output = write_shards_manifest(record.work, entries, {"rollouts_fingerprint": rollouts["fingerprint"]})
    record.metrics |= reward_metrics(read_shards(record.work), [config.name for config in configs])
    if shapes := reward_shapes(context, configs):
        record.notes["execution"] = pass_conditions(**shapes)
    record.finish({record.work: layout.rewards(iteration)}, output)


def reward_shapes(context: Context, configs: Sequence[RewardConfig]) -> dict[str, int]:
    """What shapes the passes of reward models, where there are any."""
    budget = context.execution.rewards_batch_tokens
    return {"rewards_batch_tokens": budget} if any(isinstance(config, ModelReward) for config in configs) else {}


def reward_metrics(table: pa.Table, names: Sequence[str]) -> dict[str, float]:
    """Mean and standard deviation of the reward and of each component, and how many rows have none."""
    metrics: dict[str, float] = {"rows_invalid": table["reward"].null_count}
    for column in ("reward", *map(reward_column, names)):
        if table[column].null_count < table.num_rows:
            values = table[column].cast(pa.float64())
            metrics[column] = pc.mean(values).as_py()
            metrics[f"{column}_std"] = pc.stddev(values, ddof=int(len(values) - values.null_count > 1)).as_py()
        metrics[f"{column}_null"] = table[column].null_count
    return metrics
