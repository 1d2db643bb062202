"""Log-probs: policy and reference score every sampled token."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from rloo_pipeline.config import LogprobsConfig
from rloo_pipeline.manifest import read_manifest
from rloo_pipeline.objective.kl import sequence_kl, token_kl
from rloo_pipeline.policy.batches import rows_of
from rloo_pipeline.policy.handle import open_policy
from rloo_pipeline.policy.logprobs import Scorer
from rloo_pipeline.schema import KEY_NAMES, LOGPROBS
from rloo_pipeline.shards import read_shards, read_table, write_shards, write_shards_manifest
from rloo_pipeline.stages.context import Context, Record, start

FLOATS = pa.list_(pa.float32())


def run(context: Context, config: LogprobsConfig) -> None:
    """Score the rollouts shard by shard, write shards and manifest; raises UserError if an input is not whole."""
    layout, iteration = context.layout, context.iteration
    rollouts = read_manifest(layout.rollouts(iteration))
    temperature = rollouts["facts"]["temperature"]
    policies = {"policy": open_policy(layout.model(context.link.previous))}
    if config.reference:
        policies["reference"] = open_policy(layout.model(context.link.reference))
    inputs = {"rollouts": rollouts["fingerprint"], **{role: policy.fingerprint for role, policy in policies.items()}}
    record = start(context, "logprobs", config, inputs)

    budget = context.execution.logprobs_batch_tokens
    scorers = {role: Scorer(item, config.dtype, temperature, budget, role) for role, item in policies.items()}
    if config.reference and policies["reference"].fingerprint == policies["policy"].fingerprint:
        scorers["reference"] = scorers["policy"]

    def make(index: int) -> pa.Table:
        table, _ = read_table(layout.rollouts(iteration) / rollouts["shards"][index]["file"])
        return _scored(table, scorers)

    entries = write_shards(record.work, len(rollouts["shards"]), make, LOGPROBS)
    output = write_shards_manifest(record.work, entries, {"rollouts_fingerprint": rollouts["fingerprint"]})
    _describe(record, read_shards(layout.rollouts(iteration)), read_shards(record.work))
    seconds = sum(scorer.seconds for scorer in set(scorers.values()))
    if seconds:
        record.timings["tokens_per_second"] = record.timings["tokens"] * len(set(scorers.values())) / seconds
    record.finish({record.work: layout.logprobs(iteration)}, output)


def _scored(table: pa.Table, scorers: dict[str, Scorer]) -> pa.Table:
    columns = {name: table[name] for name in KEY_NAMES}
    columns["policy_logprobs"] = scorers["policy"](table)
    if "reference" in scorers:
        columns["reference_logprobs"] = scorers["reference"](table)
    else:
        columns["reference_logprobs"] = pa.nulls(table.num_rows, FLOATS)
    return pa.table(columns)


def _describe(record: Record, rollouts: pa.Table, logprobs: pa.Table) -> None:
    """The gap between sampler and policy, per token and per completion; the tokens passed over in the timings."""
    record.metrics |= sampler_gap(rows_of(rollouts, "sampler_logprobs"), rows_of(logprobs, "policy_logprobs"))
    names = ("prompt_token_ids", "completion_token_ids")
    record.timings["tokens"] = float(sum(len(row) for name in names for row in rows_of(rollouts, name)))


def sampler_gap(sampler_N: Sequence[np.ndarray], policy_N: Sequence[np.ndarray]) -> dict[str, float]:
    """How far recomputed log-probs are from the sampler's, nats: per token and summed over a completion."""
    gaps = token_kl(np.concatenate(policy_N), np.concatenate(sampler_N))
    sequences = sequence_kl(gaps, np.cumsum([0, *(len(row) for row in sampler_N)]))
    return {
        "sampler_gap/token_mean": float(np.abs(gaps).sum() / max(len(gaps), 1)),
        "sampler_gap/token_max": float(np.abs(gaps).max(initial=0)),
        "sampler_gap/sequence_mean": float(np.abs(sequences).mean()),
        "sampler_gap/sequence_max": float(np.abs(sequences).max()),
    }
