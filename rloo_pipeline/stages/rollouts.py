"""Rollouts: K completions per prompt, sampled from the policy of the previous iteration."""

import pyarrow as pa

from rloo_pipeline.config import RolloutsConfig
from rloo_pipeline.data.images import write_images
from rloo_pipeline.data.select import select_prompts
from rloo_pipeline.policy.handle import open_policy
from rloo_pipeline.schema import ROLLOUTS
from rloo_pipeline.shards import read_shards, read_table, write_shards_manifest
from rloo_pipeline.stages.context import Context, start
from rloo_pipeline.stages.sampling import Sampler, describe, prepare_prompts


def run(context: Context, config: RolloutsConfig) -> None:
    """Select prompts, sample K completions of each, write shards and manifest; raises UserError on unusable input."""
    policy = open_policy(context.layout.model(context.link.previous))
    train, train_fingerprint = read_table(context.layout.prompts / "train.parquet")
    chosen = select_prompts(train, config.prompts_drawn, context.number, context.seed, config.prompts_asked)
    inputs = {"policy": policy.fingerprint, "prompts": train_fingerprint}
    record = start(context, "rollouts", config, inputs)

    prompts = prepare_prompts(train.take(pa.array(chosen.rows_P)), policy, config.max_tokens)
    purpose = ("rollouts", context.iteration)
    sampler = Sampler(context, policy, config, prompts, config.completions_per_prompt, purpose)
    shards = record.work / "shards"
    entries = sampler.write(shards, lambda table: table, ROLLOUTS)

    facts = {
        "completions_per_prompt": config.completions_per_prompt,
        "dtype": config.dtype,
        "policy_fingerprint": policy.fingerprint,
        "temperature": config.temperature,
    }
    if config.oversample > 1:
        facts["groups_wanted"] = config.prompts_per_iteration
    if prompts.images is not None:
        facts["images"] = write_images(shards, prompts.images)
    output = write_shards_manifest(shards, entries, facts)
    describe(record, read_shards(shards), sampler)
    record.metrics |= chosen.epochs
    record.finish({shards: context.layout.rollouts(context.iteration)}, output)
