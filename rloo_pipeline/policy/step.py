"""One optimizer step: the gradient of the loss over some rows, clipped and applied."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rloo_pipeline.errors import UserError
from rloo_pipeline.objective.kl import Estimator, Normalization
from rloo_pipeline.objective.normalization import loss_denominator
from rloo_pipeline.objective.schedule import learning_rate
from rloo_pipeline.objective_config import OptimizerConfig, UpdateConfig
from rloo_pipeline.policy.batches import Batch
from rloo_pipeline.policy.images import RowImages
from rloo_pipeline.policy.logprobs import batches, score_batch
from rloo_pipeline.progress import progress

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class KlTerm:
    """The KL in the loss: its weight (reward units per nat) and how it is estimated."""

    beta: float
    estimator: Estimator
    normalization: Normalization


@dataclass(frozen=True)
class Rows:
    """The completions trained on: token ids, the sampler's log-probs (nats) and advantages.

    Where they are needed also: log-probs of the policy before its first step (None until then: the model's own) and of
    the reference, and the weights of the sampler correction, of tokens or of completions; those of completions are in
    advantages_N already.
    """

    prompts_N: list[np.ndarray]
    completions_N: list[np.ndarray]
    sampler_logprobs_N: list[np.ndarray]
    advantages_N: np.ndarray
    old_logprobs_N: list[np.ndarray] | None = None
    reference_logprobs_N: list[np.ndarray] | None = None
    token_weights_N: list[np.ndarray] | None = None
    weights_N: np.ndarray | None = None
    names_N: list[str] | None = None  # how a completion is told to people
    images_N: RowImages | None = None  # for a policy loaded with images

    def __len__(self) -> int:
        return len(self.prompts_N)

    @property
    def lengths_N(self) -> np.ndarray:
        """Tokens of each completion."""
        return np.array([len(row) for row in self.completions_N], np.int64)

    def take(self, chosen_M: np.ndarray) -> "Rows":
        """The rows at these indices, in their order."""
        parts: dict[str, Any] = {
            name: [values[row] for row in chosen_M] if isinstance(values, list) else values[chosen_M]
            for name, values in vars(self).items()
            if values is not None
        }
        return Rows(**parts)


@dataclass
class Totals:
    """Sums over all microbatches of the step, and what is known of each row."""

    loss: float
    entropy: float
    logprobs_N: list[np.ndarray]
    kl: float = 0.0  # the KL term over the denominator, before beta
    clip: "Clip | None" = None  # with several steps


@dataclass(frozen=True)
class Clip:
    """How many importance ratios of each row there are, and how many of them lost their gradient to the clip."""

    ratios_N: np.ndarray  # int64: the row's tokens, or 1 for the whole completion
    low_N: np.ndarray  # int64
    high_N: np.ndarray  # int64

    @classmethod
    def of(cls, rows: "Rows", level: str) -> "Clip":
        """Before anything was clipped."""
        nothing_N = np.zeros(len(rows), np.int64)
        return cls(rows.lengths_N if level == "token" else nothing_N + 1, nothing_N, nothing_N.copy())

    def metrics(self) -> dict[str, float]:
        """Shares of the step's ratios, and the least and the greatest share of a completion's, named as in TRL."""
        ratios, per_row_N = max(self.ratios_N.sum(), 1), np.maximum(self.ratios_N, 1)
        return {
            "clip_ratio/low_mean": float(self.low_N.sum() / ratios),
            "clip_ratio/low_min": float((self.low_N / per_row_N).min()),
            "clip_ratio/high_mean": float(self.high_N.sum() / ratios),
            "clip_ratio/high_max": float((self.high_N / per_row_N).max()),
            "clip_ratio/region_mean": float((self.low_N + self.high_N).sum() / ratios),
        }


def make_optimizer(parameters: dict[str, "torch.nn.Parameter"], config: OptimizerConfig) -> "torch.optim.AdamW":
    """AdamW; weight decay acts on matrices alone."""
    import torch

    matrices = [parameter for parameter in parameters.values() if parameter.ndim >= 2]
    others = [parameter for parameter in parameters.values() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.adam_epsilon)


def accumulate(
    model: "PreTrainedModel",
    rows: Rows,
    temperature: float,
    config: UpdateConfig,
    batch_tokens: int,
    kl: KlTerm | None = None,
) -> Totals:
    """Add the gradient of the step's loss into the parameters, microbatch by microbatch.

    Each microbatch is divided by the step's own denominator, so the gradient does not depend on their size. With
    several steps, rows without old_logprobs_N are of the policy that is in the model: every ratio is exactly 1.
    """
    import torch

    clip = Clip.of(rows, config.ratio_level) if config.several_steps else None
    totals = Totals(0.0, 0.0, [np.empty(0, np.float32)] * len(rows), clip=clip)
    trained_N = np.ones(len(rows), bool)
    denominator = loss_denominator(config.loss_normalization, rows.lengths_N, trained_N, config.constant_length)
    with progress("update", len(rows), "completions") as done:
        for batch in batches(rows.prompts_N, rows.completions_N, batch_tokens):
            batch = batch.to(model.device)
            with precision(config, model.device):
                scores = score_batch(model, batch, temperature, rows.images_N)
            loss = _policy_loss(scores.logprobs_BT, batch, rows, denominator, config, totals)
            if kl is not None:
                loss = loss + kl.beta * _kl_loss(scores.logprobs_BT, batch, rows, denominator, kl, totals)
            torch.autograd.backward(loss)
            totals.loss += loss.item()
            totals.entropy += scores.entropy.item()
            for row, logprobs_T in unpadded(batch, scores.logprobs_BT):
                totals.logprobs_N[row] = logprobs_T
            done.advance(len(batch.rows_B))
    return totals


def _policy_loss(
    logprobs_BT: "torch.Tensor", batch: Batch, rows: Rows, denominator: float, config: UpdateConfig, totals: Totals
) -> "torch.Tensor":
    """The microbatch's share of the loss without the KL; clipped only with several steps."""
    import torch

    from rloo_pipeline.objective.clipped_loss import sequence_clipped_loss, token_clipped_loss
    from rloo_pipeline.objective.loss import sequence_loss

    mask_BT = batch.completion_mask_BT
    advantages_B = torch.tensor(rows.advantages_N[batch.rows_B], device=logprobs_BT.device)
    weights_BT = None if rows.token_weights_N is None else _padded(rows.token_weights_N, batch)
    if totals.clip is None:
        return sequence_loss(logprobs_BT, mask_BT, advantages_B, denominator, weights_BT)
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    shared = (logprobs_BT, _old(logprobs_BT, batch, rows), mask_BT, advantages_B, denominator)
    if config.ratio_level == "sequence":
        clipped = sequence_clipped_loss(*shared, config.epsilon, high)
    else:
        clipped = token_clipped_loss(*shared, config.epsilon, high, weights_BT)
    totals.clip.low_N[batch.rows_B] = _by_row(clipped.clipped_low)
    totals.clip.high_N[batch.rows_B] = _by_row(clipped.clipped_high)
    return clipped.loss


def _old(logprobs_BT: "torch.Tensor", batch: Batch, rows: Rows) -> "torch.Tensor":
    """Log-probs of the policy that the ratio is taken to, [B, T]; before the first step it is the model's own."""
    return logprobs_BT.detach() if rows.old_logprobs_N is None else _padded(rows.old_logprobs_N, batch)


def _by_row(clipped: "torch.Tensor") -> np.ndarray:
    return np.asarray(clipped.reshape(len(clipped), -1).sum(-1).cpu().numpy())


def _kl_loss(
    logprobs_BT: "torch.Tensor", batch: Batch, rows: Rows, denominator: float, kl: KlTerm, totals: Totals
) -> "torch.Tensor":
    import torch

    from rloo_pipeline.objective.kl_loss import kl_loss

    assert rows.reference_logprobs_N is not None
    reference_BT = _padded(rows.reference_logprobs_N, batch)
    old_BT = _old(logprobs_BT, batch, rows)
    weights_B = None if rows.weights_N is None else torch.tensor(rows.weights_N[batch.rows_B], device=old_BT.device)
    mask_BT = batch.completion_mask_BT
    term = kl_loss(logprobs_BT, old_BT, reference_BT, mask_BT, denominator, kl.estimator, kl.normalization, weights_B)
    totals.kl += term.item()
    return term


def precision(config: OptimizerConfig, device: "torch.device") -> AbstractContextManager[object]:
    """Autocast to bfloat16, or nothing, as the settings say."""
    import torch

    return torch.autocast(device.type, torch.bfloat16) if config.dtype == "bfloat16" else nullcontext()


def _padded(values_N: list[np.ndarray], batch: Batch) -> "torch.Tensor":
    """The batch's rows of per-token values, [B, T] in their dtype, 0 where completion_mask is False."""
    import torch

    mask_BT = batch.completion_mask_BT
    flat = torch.from_numpy(np.concatenate([values_N[row] for row in batch.rows_B])).to(mask_BT.device)
    return flat.new_zeros(mask_BT.shape).masked_scatter(mask_BT, flat)


def unpadded(batch: Batch, logprobs_BT: "torch.Tensor") -> Iterator[tuple[int, np.ndarray]]:
    """Row index and float32 values of each row of the batch, without padding."""
    lengths_B = batch.completion_mask_BT.sum(-1).tolist()
    values_BT = logprobs_BT.detach().float().cpu().numpy()
    for row, values_T, length in zip(batch.rows_B, values_BT, lengths_B, strict=True):
        yield int(row), values_T[:length]


def take_step(
    optimizer: "torch.optim.Optimizer", parameters: dict[str, "torch.nn.Parameter"], config: UpdateConfig, step: int
) -> dict[str, float]:
    """Clip the gradient and step at the schedule's rate; `step` counts the steps before this one, from 0."""
    rate = learning_rate(step, config.learning_rate, config.warmup_steps, config.schedule, config.schedule_steps)
    norm = clip_and_step(optimizer, parameters, config.max_grad_norm, rate)
    return {"grad_norm": norm, "learning_rate": rate, "step": step + 1}


def clip_and_step(
    optimizer: "torch.optim.Optimizer",
    parameters: dict[str, "torch.nn.Parameter"],
    max_grad_norm: float | None,
    rate: float,
) -> float:
    """Step at `rate` with the gradient clipped; returns its norm before that. Raises UserError if it is not finite."""
    import torch

    for parameter in parameters.values():
        if parameter.grad is None:  # Not reached by text alone, as an image encoder: its moments stay 0.
            parameter.grad = torch.zeros_like(parameter)
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), max_grad_norm or math.inf).item()
    if not math.isfinite(norm):
        raise UserError(f"the gradient norm is {norm}: something in the loss overflowed; nothing was written")
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    return norm
