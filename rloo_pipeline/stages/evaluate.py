"""Evaluate: n samples of each held-out prompt, scored, and compared with the initial policy's."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from rloo_pipeline.config import EvaluateConfig, RewardConfig
from rloo_pipeline.data.images import Encoded
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import INITIAL, Layout
from rloo_pipeline.manifest import read_manifest
from rloo_pipeline.objective.kl import sequence_kl, token_kl
from rloo_pipeline.objective.statistics import bootstrap_interval, pass_at_k, prompt_win_rates
from rloo_pipeline.policy.handle import Policy, open_policy
from rloo_pipeline.policy.load import pass_conditions
from rloo_pipeline.policy.logprobs import Scorer
from rloo_pipeline.progress import say
from rloo_pipeline.rewards.call import TrainerState
from rloo_pipeline.rewards.kept import Kept, Shards
from rloo_pipeline.rewards.score import join_prompts, score_shards
from rloo_pipeline.schema import DATASET_REWARD, KEY_NAMES, evaluation_schema
from rloo_pipeline.seeds import derive
from rloo_pipeline.shards import Entry, read_shards, read_table, write_shards, write_shards_manifest
from rloo_pipeline.sources import fingerprints
from rloo_pipeline.stages.context import Context, Record
from rloo_pipeline.stages.dataset_completions import beside, dataset_rewards
from rloo_pipeline.stages.rewards import reward_metrics, reward_shapes
from rloo_pipeline.stages.sampling import COLUMNS, Sampler, describe, prepare_prompts

AFTER_SAMPLING = {"pass_k", "pass_threshold", "bootstrap_resamples", "opponent_column"}
KL = pa.schema([pa.field("kl", pa.float64(), False)])


def run(context: Context, config: EvaluateConfig, rewards: Sequence[RewardConfig]) -> None:
    """Sample, score and compare, write shards and manifest; raises UserError on unusable input.

    The completions stay among the work in progress, so that an edited reward scores them again without a model pass.
    """
    layout, iteration = context.layout, context.iteration
    if not context.link.evaluate:
        _write_nothing(context, config, rewards)
        return
    policy, reference = open_policy(layout.model(iteration)), open_policy(layout.model(context.link.reference))
    opponent = {} if iteration == INITIAL else {"opponent": _initial_fingerprint(layout)}
    held_out, prompts_fingerprint = read_table(layout.prompts / "eval.parquet")
    prompts = prepare_prompts(held_out, policy, config.max_tokens)

    # The seeds are those of every other iteration: with equal weights the evaluations are equal.
    sampler = Sampler(context, policy, config, prompts, config.samples_per_prompt, ("evaluate",))
    inputs = {"policy": policy.fingerprint, "reference": reference.fingerprint, "prompts": prompts_fingerprint}
    sampling = config.model_dump(mode="json", exclude=AFTER_SAMPLING)
    sampling_record = Record(context, "evaluate", inputs, {"sampling": sampling})
    sampled = sampling_record.work
    files = [file for file, _, _ in sampler.write(sampled / "shards", lambda table: table, COLUMNS)]
    _score_reference(context, config, sampled, files, policy, reference, prompts.images)

    settings = {
        "evaluate": config.model_dump(mode="json"),
        "rewards": [item.model_dump(mode="json") for item in rewards],
    }
    all_inputs = {**inputs, **fingerprints(context.sources, "rewards", layout.root), **opponent}
    record = Record(context, "evaluate", all_inputs, settings, started=sampling_record.started)
    own_work = record.work.with_name(f"{record.work.name}.dataset")
    own = dataset_rewards(context, config, rewards, held_out, prompts, policy, own_work)
    entries = _score_rewards(context, rewards, held_out, own, sampled, record.work, files)
    facts = {"policy_fingerprint": policy.fingerprint, "skipped": False, "opponent_column": config.opponent_column}
    output = write_shards_manifest(record.work, entries, facts)
    table = read_shards(record.work)
    describe(record, table, sampler)
    budgets = {"logprobs_batch_tokens": context.execution.logprobs_batch_tokens}
    record.notes["execution"] = pass_conditions(**budgets, **reward_shapes(context, rewards))
    record.metrics |= reward_metrics(table, rewards, Kept(record.work).counted())
    record.metrics |= quality(table, _opponent(context, table), config, context.seed)
    if own is not None:
        record.metrics |= against_dataset(table, own, config, context.seed)
    record.finish({record.work: layout.evaluation(iteration)}, output, keep=sampled)


def _write_nothing(context: Context, config: EvaluateConfig, rewards: Sequence[RewardConfig]) -> None:
    """An empty evaluation, for an iteration whose entry says evaluate: false."""
    record = Record(context, "evaluate", {}, {"evaluate": config.model_dump(mode="json"), "skipped": True})
    shutil.rmtree(record.work, ignore_errors=True)
    empty = evaluation_schema([item.name for item in rewards]).empty_table()
    entries = write_shards(record.work, 1, lambda _: empty, empty.schema)
    output = write_shards_manifest(record.work, entries, {"skipped": True})
    record.finish({record.work: context.layout.evaluation(context.iteration)}, output)


def _score_reference(
    context: Context,
    config: EvaluateConfig,
    sampled: Path,
    files: Sequence[str],
    policy: Policy,
    reference: Policy,
    images: Mapping[str, Encoded] | None,
) -> None:
    """KL of each completion to the reference, in shards beside the sampled ones; 0 without a pass for equal weights."""
    budget = context.execution.logprobs_batch_tokens
    scorer = Scorer(reference, config.dtype, config.temperature, budget, "reference", images)

    def make(index: int) -> pa.Table:
        table, _ = read_table(sampled / "shards" / files[index])
        if policy.fingerprint == reference.fingerprint:
            return pa.table({"kl": np.zeros(table.num_rows)}, schema=KL)
        return pa.table({"kl": kl_to(scorer(table), table)}, schema=KL)

    write_shards(sampled / "kl", len(files), make, KL)


def kl_to(reference_logprobs: pa.Array, table: pa.Table) -> np.ndarray:
    """Sum over each completion of sampler minus reference log-probs, nats, float64."""
    sampler = table["sampler_logprobs"].combine_chunks()
    offsets = np.concatenate([[0], np.cumsum(sampler.value_lengths().to_numpy())])
    return sequence_kl(token_kl(sampler.flatten().to_numpy(), reference_logprobs.flatten().to_numpy()), offsets)


def _score_rewards(
    context: Context,
    rewards: Sequence[RewardConfig],
    held_out: pa.Table,
    own: pa.Table | None,
    sampled: Path,
    work: Path,
    files: Sequence[str],
) -> list[Entry]:
    schema = evaluation_schema([item.name for item in rewards])

    def rows(index: int) -> pa.Table:
        return join_prompts(read_table(sampled / "shards" / files[index])[0], held_out)

    def finish(index: int, scored: pa.Table) -> pa.Table:
        table, _ = read_table(sampled / "shards" / files[index])
        kl, _ = read_table(sampled / "kl" / files[index])
        columns = {name: table[name] for name in table.column_names}
        columns |= {name: scored[name] for name in scored.column_names if name not in KEY_NAMES}
        return pa.table({**columns, "kl": kl["kl"], DATASET_REWARD: beside(table, own)})

    shards, state = Shards(len(files), rows), TrainerState(context.number)
    return score_shards(
        rewards, shards, work, context.layout.root, state, context.execution, finish=finish, schema=schema
    )


def _initial_fingerprint(layout: Layout) -> str:
    """The fingerprint of the initial policy's evaluation; raises UserError if it is one of other weights."""
    evaluation, model = read_manifest(layout.evaluation(INITIAL)), layout.model(INITIAL)
    if not model.exists():
        say(f"policy {INITIAL} is not here, so it is not checked that evaluation {INITIAL} is of it")
        return str(evaluation["fingerprint"])
    evaluated, initial = evaluation["facts"].get("policy_fingerprint"), read_manifest(model)["fingerprint"]
    if evaluated != initial:
        raise UserError(
            f"{layout.evaluation(INITIAL)}: of other weights ({str(evaluated)[:12]}) than policy {INITIAL} "
            f"({initial[:12]}); restore it with `dvc checkout` or run `dvc repro evaluate_initial` again"
        )
    return str(evaluation["fingerprint"])


def _opponent(context: Context, table: pa.Table) -> pa.Table | None:
    """The initial policy's evaluation of the same prompts; None for the initial policy itself."""
    if context.iteration == INITIAL:
        return None
    opponent = read_shards(context.layout.evaluation(INITIAL))
    if set(opponent["prompt_id"].to_pylist()) != set(table["prompt_id"].to_pylist()):
        raise UserError("the initial policy was evaluated on other prompts; run `dvc repro evaluate_initial` again")
    return opponent


def rewards_by_prompt(table: pa.Table, column: str = "reward") -> np.ndarray:
    """Rewards [P, n], float64, prompts by id and samples by index, NaN where a row has none."""
    ordered = table.sort_by([(name, "ascending") for name in KEY_NAMES])
    prompts = len(set(table["prompt_id"].to_pylist()))
    rewards_N: np.ndarray = ordered[column].cast(pa.float64()).to_numpy()
    return rewards_N.reshape(prompts, -1)


def quality(table: pa.Table, opponent: pa.Table | None, config: EvaluateConfig, seed: int) -> dict[str, float]:
    """Mean reward and its interval over prompts, pass@k, KL, and the win rate against the initial policy.

    A prompt without any valid reward takes no part and is counted; raises UserError if there is no other.
    """
    rewards_PN = rewards_by_prompt(table)
    scored_P = ~np.isnan(rewards_PN).all(1)
    if not scored_P.any():
        raise UserError("no held-out completion has a valid reward; see reward_error in the rows, and mend the reward")
    rewards_P = np.nanmean(rewards_PN[scored_P], axis=1)
    metrics = {"kl": float(table["kl"].to_numpy().mean()), "reward": float(rewards_P.mean())}
    metrics |= _interval("reward", rewards_P, config, seed)
    metrics["prompts_invalid"] = int((~scored_P).sum())
    # Rewards are float32: 0.9 among them is less than 0.9 in float64.
    passed_P = (rewards_PN[scored_P] >= np.float32(config.pass_threshold)).sum(1)
    valid_P = (~np.isnan(rewards_PN[scored_P])).sum(1)
    for k in config.pass_k:
        if valid_P.min() >= k:
            metrics[f"pass@{k}"] = float(pass_at_k(valid_P, passed_P, k).mean())
    if opponent is not None:
        metrics |= _win_rate("win_rate", prompt_win_rates(rewards_PN, rewards_by_prompt(opponent)), config, seed)
    return metrics


def _win_rate(name: str, rates_P: np.ndarray, config: EvaluateConfig, seed: int) -> dict[str, float]:
    """Mean and interval over the prompts that have a pair of valid rewards; nothing where none has."""
    rates_P = rates_P[~np.isnan(rates_P)]
    return {name: float(rates_P.mean())} | _interval(name, rates_P, config, seed) if len(rates_P) else {}


def against_dataset(table: pa.Table, own: pa.Table, config: EvaluateConfig, seed: int) -> dict[str, float]:
    """Win rate against the dataset's own completions, and their mean reward, over the prompts that have a valid one."""
    own_P1 = rewards_by_prompt(table, DATASET_REWARD)[:, :1]
    valid_P = ~np.isnan(own_P1[:, 0])
    if not valid_P.any():
        raise UserError(
            f"evaluate.opponent_column: no completion in {config.opponent_column} has a valid reward; mend the "
            "rewards, or name another column"
        )
    rates_P = prompt_win_rates(rewards_by_prompt(table), own_P1)
    metrics = {
        "dataset_reward": float(own_P1[valid_P].mean()),
        "dataset_completions": own.num_rows,
        "dataset_completions_null": len(own_P1) - own.num_rows,
        "dataset_completions_invalid": own.num_rows - int(valid_P.sum()),
    }
    return metrics | _win_rate("win_rate_dataset", rates_P, config, seed)


def _interval(name: str, values_P: np.ndarray, config: EvaluateConfig, seed: int) -> dict[str, float]:
    low, high = bootstrap_interval(values_P, config.bootstrap_resamples, derive(seed, "bootstrap"))
    return {f"{name}_low": low, f"{name}_high": high}
