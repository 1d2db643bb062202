"""Rewards: every completion scored by the components named in params.yaml."""

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from rloo_pipeline.config import RewardConfig
from rloo_pipeline.manifest import read_manifest
from rloo_pipeline.policy.load import pass_conditions
from rloo_pipeline.progress import say
from rloo_pipeline.reward_config import JudgeReward, ModelReward
from rloo_pipeline.rewards.call import TrainerState
from rloo_pipeline.rewards.kept import Counted, Kept, Shards
from rloo_pipeline.rewards.score import join_prompts, score_shards
from rloo_pipeline.schema import reward_column
from rloo_pipeline.shards import read_shard, read_shards, read_table, write_shards_manifest
from rloo_pipeline.sources import fingerprints
from rloo_pipeline.stages.context import Context, Record


def run(context: Context, configs: Sequence[RewardConfig]) -> None:
    """Score the rollouts, write shards and manifest; raises UserError if a component fails."""
    layout, iteration = context.layout, context.iteration
    rollouts = read_manifest(layout.rollouts(iteration))
    prompts, prompts_fingerprint = read_table(layout.prompts / "train.parquet")
    files = fingerprints(context.sources, "rewards", layout.root)
    inputs = {"rollouts": rollouts["fingerprint"], "prompts": prompts_fingerprint, **files}
    record = Record(context, "rewards", inputs, {"rewards": [config.model_dump(mode="json") for config in configs]})

    def rows(index: int) -> pa.Table:
        return join_prompts(read_shard(layout.rollouts(iteration), rollouts, index), prompts)

    shards, state = Shards(len(rollouts["shards"]), rows), TrainerState(context.number - 1)
    entries = score_shards(configs, shards, record.work, layout.root, state, context.execution)
    output = write_shards_manifest(record.work, entries, {"rollouts_fingerprint": rollouts["fingerprint"]})
    record.metrics |= reward_metrics(read_shards(record.work), configs, Kept(record.work).counted())
    if shapes := reward_shapes(context, configs):
        record.notes["execution"] = pass_conditions(**shapes)
    record.finish({record.work: layout.rewards(iteration)}, output)


def reward_shapes(context: Context, configs: Sequence[RewardConfig]) -> dict[str, int]:
    """What shapes the passes of reward models and judges, where there are any."""
    if not any(isinstance(config, ModelReward | JudgeReward) for config in configs):
        return {}
    return {"rewards_batch_tokens": context.execution.rewards_batch_tokens}


def reward_metrics(table: pa.Table, configs: Sequence[RewardConfig], counted: Counted) -> dict[str, float]:
    """Statistics of the reward and of each component, rows without a reward, and what functions logged.

    For a component: mean, _std, _min and _max of its scores, rows that it does not apply to (_null) or could not score
    (_errors), and the share of its scores that were clipped (_clipped).
    """
    metrics: dict[str, float] = {"rows_invalid": table["reward"].null_count} | _statistics(table, "reward")
    for config in configs:
        column = reward_column(config.name)
        metrics |= _statistics(table, column)
        errors = counted.errors.get(config.name, 0)
        metrics |= {f"{column}_null": table[column].null_count - errors, f"{column}_errors": errors}
        if config.clip is not None and table[column].null_count < table.num_rows:
            low, high = config.clip
            outside = pc.or_(pc.less(table[column], low), pc.greater(table[column], high))
            metrics[f"{column}_clipped"] = pc.mean(outside.cast(pa.float64())).as_py()
        if config.tasks is not None and table[column].null_count - errors == table.num_rows:
            say(f"reward {config.name} applies to no row: no prompt here has a task among {', '.join(config.tasks)}")
    return metrics | {f"log/{name}": value for name, value in counted.logged.items()}


def _statistics(table: pa.Table, column: str) -> dict[str, float]:
    """Over the rows that have a value; the deviation is that of a sample (N - 1), as TRL reports it."""
    values = table[column].cast(pa.float64())
    found: dict[str, float] = {f"{column}_null": values.null_count}
    if values.null_count < len(values):
        found[column] = pc.mean(values).as_py()
        found[f"{column}_std"] = pc.stddev(values, ddof=int(len(values) - values.null_count > 1)).as_py()
        found[f"{column}_min"], found[f"{column}_max"] = pc.min(values).as_py(), pc.max(values).as_py()
    return found
