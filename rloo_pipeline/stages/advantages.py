"""Advantages: KL folded into the reward, then a baseline subtracted, by default the mean of the siblings."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa

from rloo_pipeline.errors import UserError
from rloo_pipeline.guard import check_made_from, rewards_fingerprint
from rloo_pipeline.layout import Layout
from rloo_pipeline.manifest import read_manifest
from rloo_pipeline.objective.advantages import INVALID, Advantages, compute
from rloo_pipeline.objective.kl import sequence_kl, token_kl
from rloo_pipeline.objective.penalties import missing_eos_penalty, soft_overlong_penalty
from rloo_pipeline.objective_config import AdvantagesConfig
from rloo_pipeline.policy.trainer_state import checked_state
from rloo_pipeline.progress import say
from rloo_pipeline.schema import ADVANTAGES, KEY_NAMES
from rloo_pipeline.shards import read_shards, write_shards, write_shards_manifest
from rloo_pipeline.stages.context import Context, Record, start
from rloo_pipeline.stages.estimator_state import State


def run(context: Context, config: AdvantagesConfig) -> None:
    """Join rollouts, rewards and log-probs, compute, write one shard and the manifest; raises UserError on a mismatch.

    The manifest's facts tell `update` the KL term of its loss and the state to hand on, where there is any.
    """
    layout, iteration = context.layout, context.iteration
    rollouts = read_manifest(layout.rollouts(iteration))
    inputs = {"rollouts": rollouts["fingerprint"], **scored_fingerprints(layout, iteration, rollouts["fingerprint"])}
    state_directory = layout.trainer_state(context.link.previous)
    inputs["trainer_state"] = checked_state(state_directory, rollouts["facts"]["policy_fingerprint"])
    record = start(context, "advantages", config, inputs)

    state = State.read(state_directory, config)
    table, names_G = scored(layout, iteration)
    computed = estimate(table, names_G, rollouts["facts"], config, state)
    entries = write_shards(record.work, 1, lambda _: _table(table, computed), ADVANTAGES)
    facts = {
        "rollouts_fingerprint": rollouts["fingerprint"],
        "logprobs_fingerprint": inputs["logprobs"],
        "rewards_fingerprint": rewards_fingerprint(table),
        **state.facts(config, computed),
    }
    output = write_shards_manifest(record.work, entries, facts)
    describe(record, table, computed, config, state)
    record.finish({record.work: layout.advantages(iteration)}, output)


def scored_fingerprints(layout: Layout, iteration: str, rollouts: str) -> dict[str, str]:
    """Fingerprints of rewards and log-probs; raises UserError if they are not of the rollouts of this fingerprint."""
    found = {}
    for stage, directory in (("rewards", layout.rewards(iteration)), ("logprobs", layout.logprobs(iteration))):
        manifest = read_manifest(directory)
        check_made_from(manifest["facts"]["rollouts_fingerprint"], rollouts, stage, iteration)
        found[stage] = manifest["fingerprint"]
    return found


def scored(layout: Layout, iteration: str) -> tuple[pa.Table, list[str]]:
    """Rewards, log-probs and finish reasons in key order, and the prompt ids in the order that they were drawn."""
    sampled = read_shards(layout.rollouts(iteration), [*KEY_NAMES, "finish_reason"])
    table = join(join(read_shards(layout.rewards(iteration)), read_shards(layout.logprobs(iteration))), sampled)
    return table, list(dict.fromkeys(sampled["prompt_id"].to_pylist()))


def estimate(
    table: pa.Table, names_G: Sequence[str], facts: Mapping[str, Any], config: AdvantagesConfig, state: State
) -> Advantages:
    """The advantages of the joined rows by the settings; names_G: prompt ids in the order drawn, facts: of rollouts."""
    position = {name: index for index, name in enumerate(names_G)}
    reward_N = table["reward"].to_numpy()
    truncated_N = truncated(table)
    return compute(
        reward_N,
        _kl(table, config),
        np.array([position[name] for name in table["prompt_id"].to_pylist()], np.int64),
        ~np.isnan(reward_N),
        names_G=names_G,
        completions_per_prompt=facts["completions_per_prompt"],
        beta=state.beta if config.kl_in == "reward" else 0.0,
        reward_clip_range=config.reward_clip_range,
        penalty_N=_penalty(table, truncated_N, config),
        masked_N=truncated_N if config.truncated == "mask" else None,
        baseline=config.baseline,
        past_mean=state.past.mean,
        normalize=config.normalize,
        without_signal=config.groups_without_signal,
        groups_wanted=facts.get("groups_wanted", len(names_G)) if config.groups_without_signal == "resample" else None,
    )


def truncated(table: pa.Table) -> np.ndarray:
    """Whether each completion was cut at max_tokens, bool [N]."""
    return np.asarray(table["finish_reason"].to_numpy() == "length")


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
        if config.beta > 0:
            raise UserError(
                f"advantages.beta is {config.beta} without reference log-probs; set logprobs.reference to true"
            )
        return None
    policy, reference = (table[name].combine_chunks() for name in ("policy_logprobs", "reference_logprobs"))
    per_token = token_kl(policy.flatten().to_numpy(), reference.flatten().to_numpy(), config.kl_estimator)
    offsets = np.concatenate([[0], np.cumsum(policy.value_lengths().to_numpy())])
    return sequence_kl(per_token, offsets, config.kl_normalization)


def _penalty(table: pa.Table, truncated_N: np.ndarray, config: AdvantagesConfig) -> np.ndarray | None:
    """What is taken off each reward for its completion's length, reward units; None if nothing is."""
    if config.truncated != "penalize":
        return None
    penalty_N = missing_eos_penalty(truncated_N, config.missing_eos_penalty or 0.0)
    if config.overlong_ramp is not None:
        begin, end = config.overlong_ramp
        penalty_N = penalty_N + soft_overlong_penalty(_lengths(table), end, end - begin, config.overlong_penalty)
    return penalty_N


def _lengths(table: pa.Table) -> np.ndarray:
    """Tokens of each completion, int32 [N]."""
    return np.asarray(table["policy_logprobs"].combine_chunks().value_lengths().to_numpy())


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
        "exclusion_reason": pa.array(_reasons(table, computed), pa.string()),
    }
    return pa.table(columns)


def _reasons(table: pa.Table, computed: Advantages) -> list[str | None]:
    """Why rows are not trained on; of an invalid one, what its reward_error says too."""
    pairs = zip(computed.exclusion_reason_N, table["reward_error"].to_pylist(), strict=True)
    return [f"{reason}: {error}" if reason == INVALID and error else reason for reason, error in pairs]


def describe(record: Record, table: pa.Table, computed: Advantages, config: AdvantagesConfig, state: State) -> None:
    """Raw reward and KL apart, advantages, and what became of rows and groups."""
    counts = computed.counts
    trained_N = computed.trained_N
    record.metrics |= _of_rewards(table, computed, config)
    if not np.isnan(computed.kl_N).all():
        record.metrics |= _of_kl(table, computed.kl_N, config)
    if trained_N.any():
        record.metrics |= {
            "advantage_mean": float(computed.advantage_N[trained_N].mean()),
            "advantage_std": float(computed.advantage_N[trained_N].std()),
        }
    record.metrics |= {key: float(value) for key, value in asdict(counts).items()}
    record.metrics["frac_reward_zero_std"] = counts.groups_without_signal / counts.groups
    if config.target_kl is not None:
        record.metrics["beta"] = state.beta
    if config.baseline == "moving_average":
        record.metrics["past_mean"] = state.past.mean
    if counts.groups_short:
        say(
            f"advantages {record.context.iteration}: {counts.groups_short} groups with signal are missing of those "
            f"wanted, so {counts.groups_trained} are trained on; raise rollouts.oversample"
        )


def _of_rewards(table: pa.Table, computed: Advantages, config: AdvantagesConfig) -> dict[str, float]:
    """Means over the valid rows: the reward as the rewards stage gave it, and what clip, penalty and KL made of it."""
    valid_N = ~np.isnan(computed.reward_N)
    if not valid_N.any():
        return {}
    raw = table["reward"].to_numpy()[valid_N].astype(np.float64)
    metrics = {
        "reward": float(raw.mean()),
        "reward_std": float(raw.std(ddof=int(len(raw) > 1))),
        "penalized_reward": float(computed.penalized_reward_N[valid_N].mean()),
    }
    if config.reward_clip_range is not None:
        metrics["clipped_reward"] = float(computed.reward_N[valid_N].mean())
    penalty_N = _penalty(table, truncated(table), config)
    if penalty_N is not None:
        metrics["truncation_penalty"] = float(penalty_N[valid_N].mean())
    return metrics


def _of_kl(table: pa.Table, kl_N: np.ndarray, config: AdvantagesConfig) -> dict[str, float]:
    """The KL, nats: mean over completions of what the artifact says, and mean over all their tokens."""
    lengths_N = _lengths(table)
    sums_N = kl_N * lengths_N if config.kl_normalization == "length" else kl_N
    return {"kl": float(kl_N.mean()), "kl_per_token": float(sums_N.sum() / max(lengths_N.sum(), 1))}
