"""The off-policy guard: what is trained on was sampled by the weights at hand and scored as it stands on disk."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rloo_pipeline import fingerprint
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import Layout
from rloo_pipeline.manifest import read_manifest
from rloo_pipeline.objective.kl import sequence_kl, token_kl
from rloo_pipeline.policy.batches import rows_of
from rloo_pipeline.progress import say
from rloo_pipeline.schema import KEY_NAMES
from rloo_pipeline.shards import read_shards

EXACT_LEVEL = 1e-2  # nats, largest of a token: float32 makes 6e-5, one optimizer step 1.3e-2
ROUNDED_LEVEL = 1e-1  # nats, mean over tokens: bfloat16 makes 4e-2, and single tokens 4e-1


def check_on_policy(sampled: str, updated: str, iteration: str, previous: str) -> None:
    """Raise UserError if the rollouts were sampled from other weights than those to be updated."""
    if sampled != updated:
        raise UserError(
            f"rollouts {iteration} were sampled from other weights ({sampled[:12]}) than policy {previous} "
            f"({updated[:12]}), so the step would not be on-policy; run `dvc repro rollouts@{iteration}` again"
        )


def check_rows_on_policy(rollouts: pa.Table, updated: str, iteration: str, previous: str) -> None:
    """Raise UserError if a row says that other weights sampled it than those to be updated."""
    other_N = rollouts["policy_fingerprint"].to_numpy() != updated
    if other_N.any():
        row = int(other_N.argmax())
        raise UserError(
            f"rollouts {iteration}: {int(other_N.sum())} of {len(other_N)} completions, {names_of(rollouts)[row]} the "
            f"first, were sampled from other weights ({rollouts['policy_fingerprint'][row].as_py()[:12]}) than policy "
            f"{previous} ({updated[:12]}); run `dvc repro rollouts@{iteration}` again"
        )


def check_made_from(actual: str | None, expected: str, stage: str, iteration: str, source: str = "rollouts") -> None:
    """Raise UserError if a stage's output was made from other rollouts (or another `source`) than those in place."""
    if actual != expected:
        raise UserError(
            f"{stage} {iteration} were made from other {source} ({(actual or 'unknown')[:12]}) than those in place "
            f"({expected[:12]}); run `dvc repro {stage}@{iteration}` again"
        )


def rewards_fingerprint(rewards: pa.Table) -> str:
    """Fingerprint of what advantages read of the rewards: another component of weight 0 does not change it."""
    ordered = rewards.select([*KEY_NAMES, "reward"]).sort_by([(name, "ascending") for name in KEY_NAMES])
    return fingerprint.of_table(ordered)


def check_advantages(layout: Layout, iteration: str, facts: Mapping[str, Any], rollouts: str) -> None:
    """Raise UserError unless advantages with these facts were made from the rollouts and scores that are in place.

    rollouts: fingerprint of those in place. `update` reads no rewards, so a project without them goes on, and says so.
    """
    check_made_from(facts["rollouts_fingerprint"], rollouts, "advantages", iteration)
    logprobs = read_manifest(layout.logprobs(iteration))
    check_made_from(logprobs["facts"]["rollouts_fingerprint"], rollouts, "logprobs", iteration)
    check_made_from(facts.get("logprobs_fingerprint"), logprobs["fingerprint"], "advantages", iteration, "log-probs")
    if not layout.rewards(iteration).exists():
        say(f"rewards {iteration} are not here, so it is not checked that the advantages were made from them")
        return
    rewards = read_shards(layout.rewards(iteration))
    made_from = facts.get("rewards_fingerprint")
    check_made_from(made_from, rewards_fingerprint(rewards), "advantages", iteration, "rewards")


def names_of(table: pa.Table) -> list[str]:
    """How each completion is told to people."""
    keys = zip(table["prompt_id"].to_pylist(), table["sample_index"].to_pylist(), strict=True)
    return [f"prompt_id {prompt_id}, sample_index {sample_index}" for prompt_id, sample_index in keys]


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


def largest_gaps(sampler_N: Sequence[np.ndarray], policy_N: Sequence[np.ndarray]) -> np.ndarray:
    """The largest gap of a token in each completion, nats, float64; NaN if one is NaN, 0 without tokens."""
    gaps = np.abs(token_kl(np.concatenate(policy_N), np.concatenate(sampler_N)))
    largest_N = np.zeros(len(sampler_N))
    owners = np.repeat(np.arange(len(sampler_N)), [len(row) for row in sampler_N])
    with np.errstate(invalid="ignore"):
        np.maximum.at(largest_N, owners, gaps)
    return largest_N


def tell_gap(rollouts: pa.Table, logprobs: pa.Table, exact: bool, iteration: str) -> dict[str, float]:
    """The gap between the sampler's and the policy's log-probs; above the noise of the precision, a warning.

    exact: whether both are of float32. Nothing is refused here, since the tolerance belongs to `update`.
    """
    sampler_N, policy_N = rows_of(rollouts, "sampler_logprobs"), rows_of(logprobs, "policy_logprobs")
    gap = sampler_gap(sampler_N, policy_N)
    kind, level = ("token_max", EXACT_LEVEL) if exact else ("token_mean", ROUNDED_LEVEL)
    measured = gap[f"sampler_gap/{kind}"]
    if not measured <= level:
        row = int(largest_gaps(sampler_N, policy_N).argmax())
        how = "by up to" if exact else "on average by"
        say(
            f"warning: rollouts {iteration}: the sampler's log-probs differ from the policy's {how} {measured:.4g} "
            f"nats per token, where rounding makes less than {level:g}; most in {names_of(rollouts)[row]}; if other "
            f"weights sampled them, run `dvc repro rollouts@{iteration}` again"
        )
    return gap
