"""Update: one strictly on-policy step of AdamW on the sequence loss."""

import math
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from rloo_pipeline import fingerprint
from rloo_pipeline.config import UpdateConfig
from rloo_pipeline.disk import check_space
from rloo_pipeline.errors import UserError
from rloo_pipeline.manifest import checked_fingerprint, read_manifest, write_model_manifest
from rloo_pipeline.objective.schedule import learning_rate
from rloo_pipeline.policy import trainer_state
from rloo_pipeline.policy.batches import Batch, rows_of
from rloo_pipeline.policy.handle import Policy, open_policy
from rloo_pipeline.policy.load import load_model
from rloo_pipeline.policy.logprobs import batches, check_head, score_batch
from rloo_pipeline.progress import progress, say
from rloo_pipeline.shards import read_shards
from rloo_pipeline.stages.advantages import check_made_from, join
from rloo_pipeline.stages.context import Context, Record, start
from rloo_pipeline.stages.logprobs import sampler_gap

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def run(context: Context, config: UpdateConfig) -> None:
    """Take one step on the trained rows, write policy and trainer state; raises UserError on rows of another policy."""
    layout, iteration = context.layout, context.iteration
    policy = open_policy(layout.model(context.link.previous))
    check_space(layout, policy.model, 1)
    state = layout.trainer_state(context.link.previous)
    rollouts, advantages = read_manifest(layout.rollouts(iteration)), read_manifest(layout.advantages(iteration))
    check_on_policy(rollouts["facts"]["policy_fingerprint"], policy.fingerprint, iteration, context.link.previous)
    check_made_from(advantages["facts"]["rollouts_fingerprint"], rollouts["fingerprint"], "advantages", iteration)
    inputs = {
        "policy": policy.fingerprint,
        "trainer_state": checked_fingerprint(state),
        "rollouts": rollouts["fingerprint"],
        "advantages": advantages["fingerprint"],
    }
    record = start(context, "update", config, inputs)

    rows = trained_rows(read_shards(layout.rollouts(iteration)), read_shards(layout.advantages(iteration)))
    model = _trainable(policy, context.execution.gradient_checkpointing)
    parameters = dict(model.named_parameters())
    optimizer = make_optimizer(parameters, config)
    step = trainer_state.restore(optimizer, parameters, state)
    totals = accumulate(
        model, rows, rollouts["facts"]["temperature"], config, context.execution.update_microbatch_tokens
    )
    record.metrics |= check_gap(totals, rows, config, iteration)
    record.metrics |= take_step(optimizer, parameters, config, step)
    _describe(record, totals, rows)

    work = record.work
    shutil.rmtree(work, ignore_errors=True)
    _save_policy(model, policy, work / "model")
    trainer_state.save(optimizer, parameters, work / "trainer_state", step + 1)
    written = write_model_manifest(work / "model", trust_remote_code=policy.trust_remote_code)
    state_written = write_model_manifest(work / "trainer_state")
    outputs = {
        work / "trainer_state": layout.trainer_state(iteration),
        work / "model": layout.model(iteration),
    }
    record.finish(outputs, fingerprint.of_json([written, state_written]))
    shutil.rmtree(work, ignore_errors=True)


@dataclass(frozen=True)
class Rows:
    """The completions trained on: token ids, the sampler's log-probs (nats) and advantages."""

    prompts_N: list[np.ndarray]
    completions_N: list[np.ndarray]
    sampler_logprobs_N: list[np.ndarray]
    advantages_N: np.ndarray

    def __len__(self) -> int:
        return len(self.prompts_N)


@dataclass
class Totals:
    """Sums over all microbatches of the step."""

    loss: float
    entropy: float
    logprobs_N: list[np.ndarray]


def check_on_policy(sampled: str, updated: str, iteration: str, previous: str) -> None:
    """Raise UserError if the rollouts were sampled from other weights than those to be updated."""
    if sampled != updated:
        raise UserError(
            f"rollouts {iteration} were sampled from other weights ({sampled[:12]}) than policy {previous} "
            f"({updated[:12]}), so the step would not be on-policy; run `dvc repro rollouts@{iteration}` again"
        )


def trained_rows(rollouts: pa.Table, advantages: pa.Table) -> Rows:
    """The rows that count in the loss, joined by key; raises UserError if there is none."""
    table = join(rollouts, advantages)
    table = table.filter(table["trained"])
    if table.num_rows == 0:
        raise UserError("no completion is trained on: none has a valid reward and a valid sibling; see the rewards")
    return Rows(
        rows_of(table, "prompt_token_ids"),
        rows_of(table, "completion_token_ids"),
        rows_of(table, "sampler_logprobs"),
        table["advantage"].to_numpy(),
    )


def _trainable(policy: Policy, checkpointing: bool) -> "PreTrainedModel":
    model = load_model(policy.model, "float32", trust_remote_code=policy.trust_remote_code)
    check_head(model)
    if checkpointing:
        # Dropout rates are 0, so training mode only lets the layers recompute their activations.
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def make_optimizer(parameters: dict[str, "torch.nn.Parameter"], config: UpdateConfig) -> "torch.optim.AdamW":
    """AdamW; weight decay acts on matrices alone."""
    import torch

    matrices = [parameter for parameter in parameters.values() if parameter.ndim >= 2]
    others = [parameter for parameter in parameters.values() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.adam_epsilon)


def accumulate(
    model: "PreTrainedModel", rows: Rows, temperature: float, config: UpdateConfig, batch_tokens: int
) -> Totals:
    """Add the gradient of the step's loss into the parameters, microbatch by microbatch.

    Each microbatch is divided by the step's own number of sequences, so the gradient does not depend on their size.
    """
    import torch

    from rloo_pipeline.objective.loss import sequence_loss

    totals = Totals(0.0, 0.0, [np.empty(0, np.float32)] * len(rows))
    advantages_N = torch.tensor(rows.advantages_N, device=model.device)
    with progress("update", len(rows), "completions") as done:
        for batch in batches(rows.prompts_N, rows.completions_N, batch_tokens):
            batch = batch.to(model.device)
            with _precision(config, model.device):
                scores = score_batch(model, batch, temperature)
            advantages_B = advantages_N[torch.from_numpy(batch.rows_B).to(model.device)]
            loss = sequence_loss(scores.logprobs_BT, batch.completion_mask_BT, advantages_B, len(rows))
            torch.autograd.backward(loss)
            totals.loss += loss.item()
            totals.entropy += scores.entropy.item()
            for row, logprobs_T in _unpadded(batch, scores.logprobs_BT):
                totals.logprobs_N[row] = logprobs_T
            done.advance(len(batch.rows_B))
    return totals


def _precision(config: UpdateConfig, device: "torch.device") -> AbstractContextManager[object]:
    import torch

    return torch.autocast(device.type, torch.bfloat16) if config.dtype == "bfloat16" else nullcontext()


def _unpadded(batch: Batch, logprobs_BT: "torch.Tensor") -> Iterator[tuple[int, np.ndarray]]:
    lengths_B = batch.completion_mask_BT.sum(-1).tolist()
    values_BT = logprobs_BT.detach().float().cpu().numpy()
    for row, values_T, length in zip(batch.rows_B, values_BT, lengths_B, strict=True):
        yield int(row), values_T[:length]


def check_gap(totals: Totals, rows: Rows, config: UpdateConfig, iteration: str) -> dict[str, float]:
    """The gap between sampler and trainer, nats; above the tolerance UserError in float32, a warning in bfloat16."""
    gap = sampler_gap(rows.sampler_logprobs_N, totals.logprobs_N)
    largest = gap["sampler_gap/token_max"]
    if largest <= config.sampler_tolerance:
        return gap
    message = (
        f"rollouts {iteration}: the sampler's log-probs differ from the policy's by up to {largest:.4g} nats per token "
        f"(update.sampler_tolerance is {config.sampler_tolerance:g})"
    )
    if config.dtype == "float32":
        raise UserError(
            f"{message}; either other weights sampled them (run `dvc repro rollouts@{iteration}` again) or the engine "
            "works in lower precision (raise the tolerance, or set rollouts.dtype to float32)"
        )
    say(f"warning: {message}")
    return gap


def take_step(
    optimizer: "torch.optim.Optimizer", parameters: dict[str, "torch.nn.Parameter"], config: UpdateConfig, step: int
) -> dict[str, float]:
    """Clip the gradient and step at the schedule's rate; `step` counts the steps before this one, from 0."""
    import torch

    for parameter in parameters.values():
        if parameter.grad is None:  # Not reached by text alone, as an image encoder: its moments stay 0.
            parameter.grad = torch.zeros_like(parameter)
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), config.max_grad_norm or math.inf).item()
    if not math.isfinite(norm):
        raise UserError(f"the gradient norm is {norm}: a log-prob or an advantage overflowed; nothing was written")
    rate = learning_rate(step, config.learning_rate, config.warmup_steps, config.schedule, config.schedule_steps)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    return {"grad_norm": norm, "learning_rate": rate, "step": step + 1}


def _describe(record: Record, totals: Totals, rows: Rows) -> None:
    tokens = sum(len(row) for row in rows.completions_N)
    record.metrics |= {
        "loss": totals.loss,
        "entropy": totals.entropy / tokens,
        "completions": len(rows),
        "completion_tokens": tokens,
    }
    record.timings["tokens"] = float(tokens + sum(len(row) for row in rows.prompts_N))


def _save_policy(model: "PreTrainedModel", previous: Policy, target: Path) -> None:
    """Weights by save_pretrained; configuration, tokenizer and chat template are the previous policy's, to the byte."""
    model.save_pretrained(target)
    for path in previous.model.iterdir():
        if path.suffix != ".safetensors" and path.name not in (fingerprint.MANIFEST, "model.safetensors.index.json"):
            shutil.copyfile(path, target / path.name)
