"""The training loop of a reward model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rloo_pipeline import seeds
from rloo_pipeline.errors import UserError
from rloo_pipeline.objective.preference import bradley_terry_loss, won
from rloo_pipeline.objective.schedule import learning_rate
from rloo_pipeline.policy.batches import plan
from rloo_pipeline.policy.step import clip_and_step, make_optimizer, precision
from rloo_pipeline.preference.passes import Ids, logits
from rloo_pipeline.progress import progress
from rloo_pipeline.reward_model_config import RewardModelConfig


@dataclass(frozen=True)
class Pairs:
    """Token ids of both sides of each pair, prompt included, and the margin that the loss asks for."""

    chosen_N: Sequence[Ids]
    rejected_N: Sequence[Ids]
    margin_N: np.ndarray  # float64

    def __len__(self) -> int:
        return len(self.chosen_N)

    @property
    def lengths_N(self) -> np.ndarray:
        """Tokens of the longer side."""
        sides = zip(self.chosen_N, self.rejected_N, strict=True)
        return np.array([max(len(chosen), len(rejected)) for chosen, rejected in sides], np.int64)


@dataclass(frozen=True)
class Step:
    """One optimizer step: mean loss (nats) and share of pairs won before it, gradient norm before clipping, rate."""

    step: int
    loss: float
    accuracy: float
    grad_norm: float
    learning_rate: float


def count_steps(config: RewardModelConfig, pairs: int) -> int:
    """How many optimizer steps there are; raises UserError if there are too few pairs or steps."""
    if config.batch_size > pairs:
        raise UserError(f"batch_size is {config.batch_size}, but there are {pairs} pairs to train on; lower it")
    steps = config.steps or math.ceil(round(pairs * (config.epochs or 0) / config.batch_size, 6))
    if config.warmup_steps >= steps:
        raise UserError(
            f"epochs {config.epochs} of {pairs} pairs make {steps} steps, and warmup_steps is {config.warmup_steps}; "
            "lower it or raise epochs"
        )
    return steps


def train(model: Any, pairs: Pairs, config: RewardModelConfig, steps: int, seed: int, batch_tokens: int) -> list[Step]:
    """Train in place for `steps` steps; at most `batch_tokens` padded tokens in a pass, or one pair."""
    parameters = dict(model.named_parameters())
    optimizer = make_optimizer(parameters, config)
    order = pair_order(len(pairs), steps * config.batch_size, seed)
    done: list[Step] = []
    with progress("reward_model", steps, "steps") as shown:
        for step in range(steps):
            rows_B = order[step * config.batch_size : (step + 1) * config.batch_size]
            optimizer.zero_grad()
            loss, difference_B = accumulate(model, pairs, rows_B, config, batch_tokens)
            rate = learning_rate(step, config.learning_rate, config.warmup_steps, config.schedule, steps)
            norm = clip_and_step(optimizer, parameters, config.max_grad_norm, rate)
            done.append(Step(step, loss, float(won(difference_B).mean()), norm, rate))
            shown.advance(1)
    return done


def accumulate(
    model: Any, pairs: Pairs, rows_B: np.ndarray, config: RewardModelConfig, batch_tokens: int
) -> tuple[float, np.ndarray]:
    """Add the gradient of the mean loss over the pairs at `rows_B` into the parameters, microbatch by microbatch.

    Returns the loss and reward differences `difference_B` in the order of rows_B. Both sides of a pair are in one pass.
    """
    import torch

    total, difference_B = 0.0, np.empty(len(rows_B))
    for part in plan(pairs.lengths_N[rows_B], max(batch_tokens // 2, 1)):
        rows = rows_B[part]
        ids = [*(pairs.chosen_N[row] for row in rows), *(pairs.rejected_N[row] for row in rows)]
        with precision(config, model.device):
            rewards = logits(model, ids)
        chosen, rejected = rewards[: len(rows)], rewards[len(rows) :]
        margin = torch.tensor(pairs.margin_N[rows], dtype=torch.float32, device=rewards.device)
        loss = bradley_terry_loss(chosen, rejected, margin, len(rows_B))
        torch.autograd.backward(loss)
        total += loss.item()
        difference_B[part] = (chosen - rejected).detach().double().cpu().numpy()
    return total, difference_B


def pair_order(pairs: int, rows: int, seed: int) -> np.ndarray:
    """Indices of the pairs of all steps one after the other, int64 [rows]: epochs, each a permutation of its own."""
    # Raw bits, because NumPy promises them for ever; its permutation() may change between versions.
    epochs = [
        np.argsort(np.random.PCG64(seeds.derive(seed, "pairs", epoch)).random_raw(pairs), kind="stable")
        for epoch in range(math.ceil(rows / pairs))
    ]
    return np.concatenate(epochs)[:rows]
