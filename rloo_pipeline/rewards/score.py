"""Rewards of an iteration's completions."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rloo_pipeline.config import ExecutionConfig, RewardConfig
from rloo_pipeline.errors import UserError
from rloo_pipeline.reward_config import FunctionReward, ModelReward
from rloo_pipeline.rewards.combine import combine
from rloo_pipeline.rewards.functions import TrainerState, score_functions
from rloo_pipeline.schema import KEY_NAMES, rewards_schema

NONE_APPLIES = "no reward applies: every component returned None"


def join_prompts(rollouts: pa.Table, prompts: pa.Table) -> pa.Table:
    """`rollouts` with the columns of `prompts` beside them, joined by prompt_id; UserError if a prompt is missing."""
    index = pc.index_in(rollouts["prompt_id"], value_set=prompts["prompt_id"].combine_chunks())
    if index.null_count:
        missing = rollouts["prompt_id"].filter(index.is_null())[0].as_py()
        raise UserError(
            f"prompt_id {missing}: its completions are in the rollouts, but it is not among the prompts; run prepare "
            "and rollouts again"
        )
    columns = [name for name in prompts.column_names if name != "prompt_id"]
    beside = prompts.select(columns).take(index)
    for name in columns:
        rollouts = rollouts.append_column(beside.schema.field(name), beside[name])
    return rollouts


def score(
    configs: Sequence[RewardConfig], rows: pa.Table, root: Path, execution: ExecutionConfig, *, global_step: int
) -> pa.Table:
    """The rewards (schema.rewards_schema) of `rows`, completions joined with their prompts, in the order of `rows`.

    `global_step` is the number of optimizer steps before the completions were sampled. Raises UserError for a
    component that cannot be loaded, fails or gives anything but a finite number or None.
    """
    by_function = [config for config in configs if isinstance(config, FunctionReward)]
    scored = score_functions(by_function, rows, root, TrainerState(global_step)) if by_function else {}
    for config in configs:
        if isinstance(config, ModelReward):
            from rloo_pipeline.rewards.model import score_model

            scored[config.name] = score_model(config, rows, root, execution.rewards_batch_tokens)
    components = {config.name: scored[config.name] for config in configs}
    with np.errstate(over="ignore"):
        reward_N = combine(components, {config.name: config.weight for config in configs}).astype(np.float32)
    if np.isinf(reward_N).any():
        raise UserError("rewards: the weighted sum is not finite in float32; lower the weights")
    columns = [rows[name] for name in KEY_NAMES]
    columns += [_nullable(components[config.name]) for config in configs]
    errors = pa.array([NONE_APPLIES if invalid else None for invalid in np.isnan(reward_N)], pa.string())
    schema = rewards_schema([config.name for config in configs])
    return pa.Table.from_arrays([*columns, _nullable(reward_N), errors], schema=schema)


def _nullable(values_N: npt.NDArray[np.floating]) -> pa.Array:
    return pa.array(values_N.astype(np.float32), pa.float32(), from_pandas=True)
