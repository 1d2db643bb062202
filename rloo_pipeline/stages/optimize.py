"""The optimizer steps of one iteration: one over all completions, or several over minibatches with a clipped ratio."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rloo_pipeline.errors import UserError
from rloo_pipeline.guard import largest_gaps, sampler_gap
from rloo_pipeline.objective.correction import (
    effective_sample_size,
    sequence_log_ratio,
    sequence_weights,
    token_weights,
)
from rloo_pipeline.objective_config import UpdateConfig
from rloo_pipeline.policy.logprobs import score
from rloo_pipeline.policy.step import KlTerm, Rows, Totals, accumulate, precision, take_step
from rloo_pipeline.progress import progress, say
from rloo_pipeline.seeds import derive

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Learner:
    """The model in training, and how its passes are made."""

    model: "PreTrainedModel"
    optimizer: "torch.optim.Optimizer"
    config: UpdateConfig
    temperature: float
    batch_tokens: int  # padded tokens of one pass
    kl: KlTerm | None = None
    sampled_in: str = "float32"  # dtype of the weights in the engine

    @property
    def parameters(self) -> dict[str, "torch.nn.Parameter"]:
        """The parameters by name."""
        return dict(self.model.named_parameters())


def optimize(learner: Learner, rows: Rows, step: int, seed: int, iteration: str) -> dict[str, float]:
    """Take the iteration's optimizer steps, `step` of which were done before; returns the metrics.

    Log-probs are compared with the sampler's before the first step; raises UserError as check_gap does.
    """
    config = learner.config
    metrics: dict[str, float] = {}
    if config.several_steps or config.sampler_correction != "none":
        old = Totals(0.0, 0.0, _first_pass(learner, rows))
        metrics = check_gap(old, rows, config, iteration, learner.sampled_in)
        rows, corrected = _corrected(rows, old.logprobs_N, config)
        metrics |= corrected
    steps: list[dict[str, float]] = []
    for chosen_M in _minibatches(len(rows), config, seed, iteration):
        part = rows.take(chosen_M)
        if not steps:
            # Still the policy that sampled: log-probs from a pass in other batches would differ by rounding alone.
            part = replace(part, old_logprobs_N=None)
        learner.optimizer.zero_grad()
        totals = accumulate(learner.model, part, learner.temperature, config, learner.batch_tokens, learner.kl)
        metrics = metrics or check_gap(totals, part, config, iteration, learner.sampled_in)
        taken = take_step(learner.optimizer, learner.parameters, config, step + len(steps))
        steps.append({**_of_step(totals, part, learner.kl), **taken})
    return metrics | _summary(steps)


def check_gap(
    totals: Totals, rows: Rows, config: UpdateConfig, iteration: str, sampled_in: str = "float32"
) -> dict[str, float]:
    """The gap between sampler and trainer, nats, and what it leaves of the sample (1: all of it).

    With sampling and passes in float32 a token above the tolerance raises UserError; in bfloat16, where rounding is
    larger than what a step changes, a mean above the warning level is told.
    """
    sampler_N = rows.sampler_logprobs_N
    gap = sampler_gap(sampler_N, totals.logprobs_N)
    flat = np.concatenate(totals.logprobs_N), np.concatenate(sampler_N)
    offsets_N1 = np.cumsum([0, *(len(row) for row in sampler_N)])
    gap["sampler_gap/effective_sample_size"] = effective_sample_size(sequence_log_ratio(*flat, offsets_N1))
    mean, largest = gap["sampler_gap/token_mean"], gap["sampler_gap/token_max"]
    exact = config.dtype == sampled_in == "float32"
    gap["sampler_gap/warning"] = float(not exact and not mean <= config.sampler_warning)
    refused = exact and not largest <= config.sampler_tolerance
    if not refused and not gap["sampler_gap/warning"]:
        return gap
    largest_N = largest_gaps(sampler_N, totals.logprobs_N)
    worst = int(largest_N.argmax())
    where = f", most in {rows.names_N[worst]}" if rows.names_N else ""
    message = f"rollouts {iteration}: the sampler's log-probs differ from the policy's by"
    if refused:
        above = int((~(largest_N <= config.sampler_tolerance)).sum())
        raise UserError(
            f"{message} up to {largest:.4g} nats per token (update.sampler_tolerance is {config.sampler_tolerance:g}) "
            f"in {above} of {len(rows)} completions{where}; either other weights sampled them (run `dvc repro "
            f"rollouts@{iteration}` again) or the engine rounds more than float32 does (raise the tolerance)"
        )
    say(
        f"warning: {message} {mean:.4g} nats per token on average and up to {largest:.4g} (update.sampler_warning is "
        f"{config.sampler_warning:g}){where}; if other weights sampled them, run `dvc repro rollouts@{iteration}` again"
    )
    return gap


def _first_pass(learner: Learner, rows: Rows) -> list[np.ndarray]:
    """Log-probs of the policy that sampled, recomputed in the precision of the steps."""
    with (
        progress("update, first pass", len(rows), "completions") as done,
        precision(learner.config, learner.model.device),
    ):
        given = (rows.prompts_N, rows.completions_N, learner.temperature, learner.batch_tokens, done, rows.images_N)
        return score(learner.model, *given)


def _corrected(rows: Rows, old_N: list[np.ndarray], config: UpdateConfig) -> tuple[Rows, dict[str, float]]:
    """The rows with the sampler's correction put in, and with the policy's own log-probs if a ratio will need them."""
    if config.several_steps:
        rows = replace(rows, old_logprobs_N=old_N)
    correction, cap = config.sampler_correction, config.sampler_correction_cap
    if correction == "none":
        return rows, {}
    policy, sampler = np.concatenate(old_N), np.concatenate(rows.sampler_logprobs_N)
    offsets_N1 = np.cumsum([0, *rows.lengths_N])
    if config.sampler_correction_level == "sequence":
        weights = sequence_weights(policy, sampler, offsets_N1, correction, cap)
        rows = replace(rows, advantages_N=rows.advantages_N * weights, weights_N=weights)
    else:
        weights = token_weights(policy, sampler, correction, cap)
        rows = replace(rows, token_weights_N=np.split(weights, offsets_N1[1:-1]))
    limited = weights == (cap if correction == "truncate" else 0.0)
    return rows, {
        "sampler_correction/mean": float(weights.mean()),
        "sampler_correction/limited_ratio": float(limited.mean()),
    }


def _minibatches(rows: int, config: UpdateConfig, seed: int, iteration: str) -> Iterator[np.ndarray]:
    """Indices of each step's rows: every row once an epoch, in an order of the epoch's own; one step takes all."""
    if not config.several_steps:
        yield np.arange(rows)
        return
    parts = min(config.minibatches, rows)
    if parts < config.minibatches:
        say(f"update {iteration}: {rows} completions make {parts} minibatches, not {config.minibatches}")
    for epoch in range(config.epochs):
        # Raw bits, because NumPy promises them for ever; its permutation() may change between versions.
        bits = np.random.PCG64(derive(seed, "update", iteration, epoch)).random_raw(rows)
        yield from np.array_split(np.argsort(bits, kind="stable"), parts)


def _of_step(totals: Totals, rows: Rows, kl: KlTerm | None) -> dict[str, float]:
    metrics = {"loss": totals.loss, "entropy": totals.entropy / int(rows.lengths_N.sum())}
    if kl is not None:
        metrics |= {"kl_loss": totals.kl, "beta": kl.beta}
    return metrics if totals.clip is None else metrics | totals.clip.metrics()


def _summary(steps: list[dict[str, float]]) -> dict[str, float]:
    """Rate and count of the last step, the mean over the steps of everything else."""
    last = steps[-1]
    metrics = {name: float(np.mean([step[name] for step in steps])) for name in last}
    return metrics | {name: last[name] for name in ("learning_rate", "step")}
