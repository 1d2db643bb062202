"""Log-probs: policy and reference score every sampled token."""

import pyarrow as pa

from rloo_pipeline.config import LogprobsConfig
from rloo_pipeline.data.images import read_images
from rloo_pipeline.guard import check_on_policy, check_rows_on_policy, tell_gap
from rloo_pipeline.manifest import read_manifest
from rloo_pipeline.policy.batches import rows_of
from rloo_pipeline.policy.handle import open_policy
from rloo_pipeline.policy.load import pass_conditions
from rloo_pipeline.policy.logprobs import Scorer
from rloo_pipeline.schema import KEY_NAMES, LOGPROBS
from rloo_pipeline.shards import read_shard, read_shards, write_shards, write_shards_manifest
from rloo_pipeline.stages.context import Context, Record, start

FLOATS = pa.list_(pa.float32())


def run(context: Context, config: LogprobsConfig) -> None:
    """Score the rollouts shard by shard, write shards and manifest; raises UserError if an input is not whole."""
    layout, iteration = context.layout, context.iteration
    rollouts = read_manifest(layout.rollouts(iteration))
    temperature = rollouts["facts"]["temperature"]
    policies = {"policy": open_policy(layout.model(context.link.previous))}
    sampled_by = (policies["policy"].fingerprint, iteration, context.link.previous)
    check_on_policy(rollouts["facts"]["policy_fingerprint"], *sampled_by)
    if config.reference:
        policies["reference"] = open_policy(layout.model(context.link.reference))
    inputs = {"rollouts": rollouts["fingerprint"], **{role: policy.fingerprint for role, policy in policies.items()}}
    record = start(context, "logprobs", config, inputs)

    budget = context.execution.logprobs_batch_tokens
    shared = (config.dtype, temperature, budget)
    images = read_images(layout.rollouts(iteration), rollouts["facts"])
    scorers = {role: Scorer(item, *shared, role, images) for role, item in policies.items()}
    if config.reference and policies["reference"].fingerprint == policies["policy"].fingerprint:
        scorers["reference"] = scorers["policy"]

    def make(index: int) -> pa.Table:
        table = read_shard(layout.rollouts(iteration), rollouts, index)
        check_rows_on_policy(table, *sampled_by)
        return _scored(table, scorers)

    entries = write_shards(record.work, len(rollouts["shards"]), make, LOGPROBS)
    output = write_shards_manifest(record.work, entries, {"rollouts_fingerprint": rollouts["fingerprint"]})
    exact = config.dtype == rollouts["facts"].get("dtype", "float32") == "float32"
    _describe(record, read_shards(layout.rollouts(iteration)), read_shards(record.work), exact)
    seconds = sum(scorer.seconds for scorer in set(scorers.values()))
    if seconds:
        record.timings["tokens_per_second"] = record.timings["tokens"] * len(set(scorers.values())) / seconds
    record.notes["execution"] = pass_conditions(logprobs_batch_tokens=budget)
    record.finish({record.work: layout.logprobs(iteration)}, output)


def _scored(table: pa.Table, scorers: dict[str, Scorer]) -> pa.Table:
    columns = {name: table[name] for name in KEY_NAMES}
    columns["policy_logprobs"] = scorers["policy"](table)
    if "reference" in scorers:
        columns["reference_logprobs"] = scorers["reference"](table)
    else:
        columns["reference_logprobs"] = pa.nulls(table.num_rows, FLOATS)
    return pa.table(columns)


def _describe(record: Record, rollouts: pa.Table, logprobs: pa.Table, exact: bool) -> None:
    """The gap between sampler and policy, per token and per completion; the tokens passed over in the timings."""
    record.metrics |= tell_gap(rollouts, logprobs, exact, record.context.iteration)
    names = ("prompt_token_ids", "completion_token_ids")
    record.timings["tokens"] = float(sum(len(row) for name in names for row in rows_of(rollouts, name)))
