"""Advantages: KL folded into the reward, then the mean of the siblings subtracted."""

from dataclasses import asdict

import numpy as np
import pyarrow as pa

from rloo_pipeline.config import AdvantagesConfig
from rloo_pipeline.errors import UserError
from rloo_pipeline.manifest import read_manifest
from rloo_pipeline.objective.advantages import Advantages, compute
from rloo_pipeline.objective.groups import index_groups
from rloo_pipeline.objective.kl import sequence_kl, token_kl
from rloo_pipeline.schema import ADVANTAGES, KEY_NAMES
from rloo_pipeline.shards import read_shards, write_shards, write_shards_manifest
from rloo_pipeline.stages.context import Context, Record, start


def run(context: Context, config: AdvantagesConfig) -> None:
    """Join rewards and log-probs by key, compute, write one shard and the manifest; raises UserError on a mismatch."""
    layout, iteration = context.layout, context.iteration
    rollouts = read_manifest(layout.rollouts(iteration))
    inputs = {"rollouts": rollouts["fingerprint"]}
    for stage, directory in (("rewards", layout.rewards(iteration)), ("logprobs", layout.logprobs(iteration))):
        manifest = read_manifest(directory)
        check_made_from(manifest["facts"]["rollouts_fingerprint"], rollouts["fingerprint"], stage, iteration)
        inputs[stage] = manifest["fingerprint"]
    inputs["trainer_state"] = read_manifest(layout.trainer_state(context.link.previous))["fingerprint"]
    record = start(context, "advantages", config, inputs)

    table = join(read_shards(layout.rewards(iteration)), read_shards(layout.logprobs(iteration)))
    groups_N, names_G = index_groups(table["prompt_id"].to_pylist())
    reward_N = table["reward"].to_numpy()
    computed = compute(
        reward_N,
        _kl(table, config),
        groups_N,
        ~np.isnan(reward_N),
        names_G=names_G,
        completions_per_prompt=rollouts["facts"]["completions_per_prompt"],
        beta=config.beta,
        reward_clip_range=config.reward_clip_range,
    )
    entries = write_shards(record.work, 1, lambda _: _table(table, computed), ADVANTAGES)
    output = write_shards_manifest(record.work, entries, {"rollouts_fingerprint": rollouts["fingerprint"]})
    _describe(record, computed)
    record.finish({record.work: layout.advantages(iteration)}, output)


def check_made_from(actual: str, expected: str, stage: str, iteration: str) -> None:
    """Raise UserError if a stage's output was made from other rollouts than those that are there."""
    if actual != expected:
        raise UserError(
            f"{stage} {iteration} were made from other rollouts ({actual[:12]}) than those in place ({expected[:12]}); "
            f"run `dvc repro {stage}@{iteration}` again"
        )


def join(left: pa.Table, right: pa.Table) -> pa.Table:
    """Two artifacts of the same completions as one table in key order; raises UserError if their keys differ."""
    order = [(name, "ascending") for name in KEY_NAMES]
    left, right = left.sort_by(order), right.sort_by(order)
    if left.select(KEY_NAMES) != right.select(KEY_NAMES):
        raise UserError("two artifacts of one iteration do not hold the same completions; run its stages again")
    for field in right.schema:
        if field.name not in left.column_names:
            left = left.append_column(field, right[field.name])
    return left


def _kl(table: pa.Table, config: AdvantagesConfig) -> np.ndarray | None:
    """KL of each completion, nats; None without reference log-probs."""
    if table["reference_logprobs"].null_count:
        return None
    policy, reference = (table[name].combine_chunks() for name in ("policy_logprobs", "reference_logprobs"))
    per_token = token_kl(policy.flatten().to_numpy(), reference.flatten().to_numpy())
    offsets = np.concatenate([[0], np.cumsum(policy.value_lengths().to_numpy())])
    return sequence_kl(per_token, offsets, config.kl_normalization)


def _table(table: pa.Table, computed: Advantages) -> pa.Table:
    def nullable(values_N: np.ndarray) -> pa.Array:
        return pa.array(values_N, pa.float64(), from_pandas=True)

    columns = {name: table[name] for name in KEY_NAMES}
    columns |= {
        "reward": nullable(computed.reward_N),
        "kl": nullable(computed.kl_N),
        "penalized_reward": nullable(computed.penalized_reward_N),
        "baseline": nullable(computed.baseline_N),
        "advantage": pa.array(computed.advantage_N),
        "in_baseline": pa.array(computed.in_baseline_N),
        "trained": pa.array(computed.trained_N),
        "exclusion_reason": pa.array(computed.exclusion_reason_N, pa.string()),
    }
    return pa.table(columns)


def _describe(record: Record, computed: Advantages) -> None:
    """Raw reward and KL apart, advantages, and what became of rows and groups."""
    counts = computed.counts
    valid_N, trained_N = computed.in_baseline_N, computed.trained_N
    if valid_N.any():
        record.metrics |= {
            "reward": float(computed.reward_N[valid_N].mean()),
            "reward_std": float(computed.reward_N[valid_N].std()),
            "penalized_reward": float(computed.penalized_reward_N[valid_N].mean()),
        }
    if not np.isnan(computed.kl_N).all():
        record.metrics["kl"] = float(computed.kl_N.mean())
    if trained_N.any():
        record.metrics |= {
            "advantage_mean": float(computed.advantage_N[trained_N].mean()),
            "advantage_std": float(computed.advantage_N[trained_N].std()),
        }
    record.metrics |= {key: float(value) for key, value in asdict(counts).items()}
    record.metrics["frac_reward_zero_std"] = counts.groups_without_signal / counts.groups
